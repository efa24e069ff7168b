"""Long prompts beside Transformers' own numbers, which `references/generate.py` makes.

337 tokens: windows of 21 slide across many pages, a DeltaNet goes through several of its chunks in
both programs, and the weights come as two shards with their index.
"""

import json
import os
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from unimem_jax.models import qwen3, qwen3_5
from unimem_jax.models.mxfp4 import dequantise

import unimem_jax as um
from tests.models.oracle import NEW_TOKENS, TOLERANCE, near, require_served, whole
from tests.models.reference import (
    CHUNKS,
    CONTEXT_TOKENS,
    PAGES,
    PAIRS,
    Reference,
    open_reference,
)
from tests.models.references.network import FOLDER, draw_tensors, write_folder
from tests.models.through_arena import Service

SPARSE = ("qwen3_5_moe", "qwen3_next", "kimi_linear", "deepseek_v32")
NETWORKS = ("gpt_oss", "gpt_oss_mxfp4", "qwen3", "qwen3_5", *SPARSE)
# Expanded while it is loaded, the packed network differs from "gpt_oss" in nothing that serves it.
SERVED = ("gpt_oss", "qwen3", "qwen3_5")
FIRST_PAIR = (8, 16)  # the other ways of networks with experts take hours
# Root mean square error of logits, in standard deviations of the logits; see docs/MODELS.md.
BFLOAT16_BOUNDS = {"qwen3": 0.015, "qwen3_5": 0.05}
LOADERS = {"qwen3": qwen3.load, "qwen3_5": qwen3_5.load}
WAYS = [
    pytest.param(*pair, marks=() if pair in PAIRS else pytest.mark.slow)
    for pair in product(PAGES, CHUNKS)
]


@pytest.fixture(scope="module")
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return open_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    "reference",
    [pytest.param(n, marks=pytest.mark.slow if n in SPARSE else ()) for n in NETWORKS],
    indirect=True,
    scope="module",
)
def test_logits_without_a_past_are_those_of_transformers(reference: Reference) -> None:
    oracle = reference.oracle
    found = whole(reference.model, reference.params, oracle.prompts)
    for row, positions, wanted in zip(found, reference.positions, oracle.logits, strict=True):
        near(row[positions], wanted)


@pytest.mark.parametrize("reference", SERVED, indirect=True, scope="module")
@pytest.mark.parametrize("page_tokens, chunk_tokens", WAYS)
def test_the_arena_gives_the_logits_tokens_and_state_of_transformers(
    page_tokens: int, chunk_tokens: int, reference: Reference
) -> None:
    serve_as_transformers(page_tokens, chunk_tokens, reference)


def serve_as_transformers(page_tokens: int, chunk_tokens: int, reference: Reference) -> None:
    """Through one arena: logits, tokens and state."""
    service = Service(
        reference.model, reference.params, page_tokens=page_tokens, chunk_tokens=chunk_tokens,
        rows=4, context_tokens=CONTEXT_TOKENS,
    )  # fmt: skip
    require_served(service, reference.oracle)


@pytest.mark.parametrize("reference", SPARSE, indirect=True, scope="module")
@pytest.mark.parametrize(
    "page_tokens, chunk_tokens",
    [pytest.param(*p, marks=() if p == FIRST_PAIR else pytest.mark.exhaustive) for p in PAIRS],
)
def test_the_arena_gives_what_transformers_gives_for_sparse_networks(
    page_tokens: int, chunk_tokens: int, reference: Reference
) -> None:
    serve_as_transformers(page_tokens, chunk_tokens, reference)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_matrices_expand_to_the_values_of_transformers(dtype: str) -> None:
    stored = np.load(FOLDER / "mxfp4.npz")
    assert set(np.unique(stored["every_scales"])) == set(range(253))
    assert {*np.unique(stored["every_blocks"] & 15)} == set(range(16))
    for kind in ("every", "random"):
        blocks, scales = stored[f"{kind}_blocks"], stored[f"{kind}_scales"]
        found = dequantise(blocks, scales, np.dtype(getattr(ml_dtypes, dtype, dtype)), kind)
        assert str(found.dtype) == dtype
        np.testing.assert_array_equal(found.astype(np.float32), stored[kind])
        assert np.isfinite(stored[kind]).all()


@pytest.mark.parametrize("name", BFLOAT16_BOUNDS)
def test_bfloat16_stays_within_its_bound_of_float32_and_of_what_transformers_loses(
    name: str, tmp_path: Path
) -> None:
    described = json.loads((FOLDER / f"{name}.json").read_text())
    tensors = draw_tensors(described["config"], described["tensors"], described["seed"])
    rounded = {key: one.astype(ml_dtypes.bfloat16) for key, one in tensors.items()}
    folder = write_folder(tmp_path, described["config"], rounded)
    model, params, _ = um.load(folder)
    exact, exact_params, _ = LOADERS[name](folder, "float32")

    stored = np.load(FOLDER / f"{name}.npz")
    prompts = [stored[f"prompt{at}"].tolist() for at in range(3)]
    service = Service(
        model, params, page_tokens=8, chunk_tokens=16, rows=4, context_tokens=CONTEXT_TOKENS
    )
    dtypes = {"key": "bfloat16", "value": "bfloat16", "conv": "float32", "state": "float32"}
    for pool in service.plan.sub_pools:
        assert all(lane.part.dtype == dtypes[lane.part.name] for lane in pool.lanes)

    new, served = service.generate(prompts, NEW_TOKENS, retracted=(1, 10))
    known = [[*ids, *tokens[:-1]] for ids, tokens in zip(prompts, new, strict=True)]
    alone, wanted = whole(model, params, known), whole(exact, exact_params, known)
    for at, ids in enumerate(prompts):
        length, end = len(ids), len(known[at])
        lost = rms(alone[at, :length] - wanted[at, :length]) / wanted[at, :length].std()
        assert 0 < lost < BFLOAT16_BOUNDS[name]
        assert lost < 1.2 * described["bfloat16_errors"][at]
        decoded = wanted[at, length - 1 : end]
        assert 0 < rms(served[at] - decoded) / decoded.std() < BFLOAT16_BOUNDS[name]


def rms(errors: np.ndarray) -> float:
    """Root of the mean square."""
    return float(np.sqrt(np.square(errors).mean()))


@pytest.mark.slow
def test_the_numbers_kept_are_those_that_transformers_computes(tmp_path: Path) -> None:
    python = os.environ.get("UNIMEM_TRANSFORMERS_PYTHON")
    if python is None:
        pytest.skip("UNIMEM_TRANSFORMERS_PYTHON names no interpreter that has Transformers")
    module = "tests.models.references.generate"
    subprocess.run([python, "-m", module, str(tmp_path)], cwd=FOLDER.parents[2], check=True)
    kept = sorted(path.name for path in FOLDER.glob("*.npz"))
    assert kept == sorted(path.name for path in tmp_path.glob("*.npz"))
    for name in kept:
        again, stored = np.load(tmp_path / name), np.load(FOLDER / name)
        assert again.files == stored.files
        for key in again.files:
            # Another release, or another count of threads, may round otherwise.
            np.testing.assert_allclose(again[key], stored[key], rtol=0, atol=TOLERANCE, err_msg=key)
    for path in FOLDER.glob("*.json"):
        described, stored = (json.loads((at / path.name).read_text()) for at in (tmp_path, FOLDER))
        assert described["tensors"] == stored["tensors"]
