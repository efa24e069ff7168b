"""Comparing a family with numbers that others computed, alone and through the arena.

The numbers are either a twin's or those of tiny checkpoints that Transformers ran. The checkpoints
are no part of the project: a test that wants them skips where they are absent.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unimem_jax as um
from tests.models.references.network import write_folder as write_folder
from tests.models.through_arena import QUICK, Service
from unimem_jax.allocator import number_of
from unimem_jax.errors import UsageError
from unimem_jax.requests import Request
from unimem_jax.spec import PartKey, Site

TOLERANCE = 1e-4
NEW_TOKENS = 24
CONTEXT_TOKENS = 128
FOLDERS = Path(os.environ.get("UNIMEM_ORACLES", Path(__file__).parents[3] / "shared" / "oracles"))
# (page tokens, chunk tokens): every page size and every chunk once; 40 is a whole prompt.
WAYS = {"page 1": (1, 7), "page 8": (8, 16), "page 16": (16, 40), "page 64": (64, 1)}

# What a layer has to hold after the first prompt: the name of a part -> its value, request state
# whole and token state as [tokens, *shape], of all tokens or of the last ones.
Remembered = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Oracle:
    """A checkpoint and what Transformers made of it.

    Attributes:
      prompts, logits: token ids, and the logits [n, V] at each of them.
      new, new_logits: greedy tokens after each prompt, and the logits they were taken from.
      remembered: of each layer, after the first prompt.
    """

    folder: Path
    prompts: list[list[int]]
    logits: list[np.ndarray]
    new: list[list[int]]
    new_logits: list[np.ndarray]
    remembered: list[Remembered]


def open_oracle(name: str, read_layer: Callable[[Any, int], Remembered]) -> Oracle:
    """The checkpoint `name`, or a skipped test.

    Args:
      read_layer: picks what a layer remembers out of the dumped state.
    """
    folder = FOLDERS / name
    if not folder.is_dir():
        pytest.skip(f"no oracle at {folder}; UNIMEM_ORACLES names another place")
    reference, state = np.load(folder / "ref_fp32.npz"), np.load(folder / "state_fp32.npz")
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    return Oracle(
        folder,
        [reference[f"prompt{at}"].tolist() for at in range(3)],
        [reference[f"logits{at}"] for at in range(3)],
        [reference[f"gen{at}"].tolist() for at in range(3)],
        [reference[f"gen_logits{at}"] for at in range(3)],
        [read_layer(state, layer) for layer in range(layers)],
    )


def near(found: Any, wanted: Any) -> None:
    """Within the tolerance of all comparisons of float32 with a reference."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def whole(model: Any, params: Any, prompts: list[list[int]]) -> np.ndarray:
    """Logits [prompts, tokens, V] of every token of every prompt, without a past."""
    rows = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, ids in zip(rows, prompts, strict=True):
        row[: len(ids)] = ids
    lengths = jnp.asarray([len(ids) for ids in prompts], jnp.int32)

    @partial(jax.jit, compiler_options=QUICK)
    def run(params: Any, tokens: jax.Array) -> jax.Array:
        views = um.FreshViews.of(model.parts(), lengths, rows.shape[1])
        return model.apply(params, tokens, views)[0]

    return np.asarray(run(params, jnp.asarray(rows)))


def require_parity(model: Any, params: Any, oracle: Oracle, way: str) -> None:
    """`require_served` with the pages and chunks of a way."""
    page_tokens, chunk_tokens = WAYS[way]
    service = Service(
        model, params, page_tokens=page_tokens, chunk_tokens=chunk_tokens, rows=4,
        context_tokens=CONTEXT_TOKENS,
    )  # fmt: skip
    require_served(service, oracle)


def require_checkpoint(name: str, load: Callable[..., Any], read_layer: Any, way: str) -> None:
    """A checkpoint of Transformers gives its numbers in one way: "whole" without a past, or one of
    `WAYS` through the arena.
    """
    oracle = open_oracle(name, read_layer)
    model, params, _ = load(oracle.folder)
    if way != "whole":
        require_parity(model, params, oracle, way)
        return
    found = whole(model, params, oracle.prompts)
    for row, wanted in zip(found, oracle.logits, strict=True):
        near(row[: len(wanted)], wanted)


def require_served(service: Service, oracle: Oracle) -> None:
    """Through one arena, logits, tokens and state are the oracle's: batched, with a request that
    loses its memory on the way, and alone.
    """
    require_remembered(service, oracle.prompts[0], oracle.remembered)
    new, logits = service.generate(oracle.prompts, NEW_TOKENS, retracted=(1, 10))
    for at in range(3):
        near(logits[at], oracle.new_logits[at])
        assert new[at] == oracle.new[at]
    for at in (0, 2):
        new, logits = service.generate([oracle.prompts[at]], NEW_TOKENS)
        near(logits[0], oracle.new_logits[at])
        assert new[0] == oracle.new[at]


def require_remembered(service: Service, prompt: list[int], wanted: list[Remembered]) -> None:
    """After the prompt the arena holds, part by part, what each layer is wanted to remember."""
    (request,), _ = service.prefill([prompt], NEW_TOKENS)
    asked = {(Site(layer), name) for layer, parts in enumerate(wanted) for name in parts}
    assert asked == {lane.part.key for pool in service.plan.sub_pools for lane in pool.lanes}
    for site, name in sorted(asked):
        pool, _ = service.plan.locate((site, name))
        if pool.is_slot:
            found = stored_state(service, request, (site, name))
        else:
            kept = range(len(prompt) - len(wanted[site.layer][name]), len(prompt))
            found = service.stored(request, (site, name), kept)
        near(found, wanted[site.layer][name])
    service.memory.free(request)


def stored_state(service: Service, request: Request, key: PartKey) -> np.ndarray:
    """What the arena holds of a float32 part of request state, read byte by byte through the
    host's mapping.
    """
    pool, lane = service.plan.locate(key)
    states = [one.index for one in service.plan.sub_pools if one.is_slot]
    slot = request.slots[states.index(pool.index)]
    address = int(service.memory.allocator.mapping[pool.index][number_of(slot)])
    assert 0 <= address < pool.unit_count, f"{key} is absent"
    words = np.asarray(service.device.arena).view(np.uint32).reshape(-1)
    first = address * pool.entry_words + lane.offset_words
    return words[first : first + lane.words].view(np.float32).reshape(lane.part.shape)


def refusal(load: Callable[..., Any], *arguments: Any) -> str:
    """The one line of the error that `load` refuses with."""
    with pytest.raises(UsageError) as error:
        load(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)
