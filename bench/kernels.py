"""`python -m bench.kernels [--json FILE]`: times every op here, at the shapes of its cases.

A move is set beside an update in place of the same bytes, which reads and writes as much without
an address, and a gather beside a copy of its result; both in the same run, since only such ratios
mean anything on a shared machine.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from unimem_jax.pallas_kernels.cases import ATTENTION, UNITS, AttentionCase, UnitCase
from unimem_jax.pallas_kernels.move_units import move_units
from unimem_jax.pallas_kernels.paged_attention import Tokens, attend
from unimem_jax.pallas_kernels.rows import gather_pages, scatter_rows

REPEATS = 15
ARENA_BYTES = {"cpu": 1 << 30, "gpu": 32 << 30}
MOVED_BYTES = {"cpu": 64 << 20, "gpu": 4 << 30}


def main(arguments: list[str] | None = None) -> int:
    """Prints one line per op and case; writes them to a file with `--json`."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    measured = [moves(case) for case in UNITS] + [read_and_write(case) for case in ATTENTION]
    measured += [attention(case) for case in ATTENTION]
    for line in measured:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    if options.json:
        device = jax.devices()[0].device_kind
        report = {"jax": jax.__version__, "device": device, "measured": measured}
        options.json.write_text(json.dumps(report, indent=1))
    return 0


def seconds(run: Callable[[], Any]) -> float:
    """Median time of a call, after two that are not counted."""
    spent = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        jax.block_until_ready(run())
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[2:])


def moves(case: UnitCase) -> dict[str, Any]:
    """`move_units` beside an update in place of as many bytes."""
    platform = jax.default_backend()
    rows = case.rows(ARENA_BYTES[platform])
    units = rows // case.unit_rows
    count = max(1, min(units // 2, MOVED_BYTES[platform] // case.unit_bytes))
    order = np.random.default_rng(0).permutation(units).astype(np.int32)
    sources, destinations = jnp.asarray(order[:count]), jnp.asarray(order[count : 2 * count])
    move = jax.jit(functools.partial(move_units, unit_rows=case.unit_rows), donate_argnums=0)
    held = [jnp.zeros((rows, case.row_words), jnp.uint32)]

    def run() -> jax.Array:
        held[0] = move(held[0], sources, destinations, jnp.int32(count))
        return held[0]

    moved_s = seconds(run)
    update = jax.jit(lambda words: words + jnp.uint32(1), donate_argnums=0)
    words = [jnp.zeros((count * case.unit_bytes // 4,), jnp.uint32)]

    def run_update() -> jax.Array:
        words[0] = update(words[0])
        return words[0]

    updated_s = seconds(run_update)
    return {
        "op": "move_units", "case": case.name, "units": count,
        "gb_per_s": round(2 * count * case.unit_bytes / moved_s / 1e9, 2),
        "of_an_update": round(updated_s / moved_s, 2),
    }  # fmt: skip


def read_and_write(case: AttentionCase) -> dict[str, Any]:
    """One gather of the keys of a layer, and one scatter of whole entries."""
    rows = ARENA_BYTES[jax.default_backend()] // (4 * case.row_words) // 8 * 8
    arena = jnp.zeros((rows, case.row_words), jnp.uint32)
    words = case.heads[1] * case.heads[2] // 2
    pages = rows // case.page_tokens
    order = np.random.default_rng(0).permutation(pages)[: case.requests * case.past]
    shape = case.requests, case.past // case.page_tokens
    addresses = jnp.asarray(order[: shape[0] * shape[1]].reshape(shape), jnp.int32)
    gather = jax.jit(
        functools.partial(gather_pages, unit_rows=case.page_tokens, offset_words=0, words=words)
    )
    gathered_s = seconds(lambda: gather(arena, addresses))
    together = gather(arena, addresses)
    copied_s = seconds(functools.partial(jax.jit(lambda words: words + jnp.uint32(1)), together))
    writes = jnp.asarray(order[: case.requests * case.new], jnp.int32)
    entries = jnp.zeros((writes.shape[0], case.row_words), jnp.uint32)
    scatter = jax.jit(scatter_rows, donate_argnums=0)
    held = [arena]
    del arena

    def run() -> jax.Array:
        held[0] = scatter(held[0], writes, entries)
        return held[0]

    return {
        "op": "rows", "case": case.name, "gather_us": round(gathered_s * 1e6),
        "of_a_copy": round(copied_s / gathered_s, 2), "scatter_us": round(seconds(run) * 1e6),
    }  # fmt: skip


def attention(case: AttentionCase) -> dict[str, Any]:
    """`attend` over what was gathered; float32 throughout, as on a CPU."""
    query_heads, key_heads, head, value_head = case.heads
    random = np.random.default_rng(0)

    def draw(*shape: int) -> jax.Array:
        return jnp.asarray(random.standard_normal(shape), jnp.float32)

    def tokens(count: int) -> Tokens:
        shape = case.requests, count, key_heads
        return Tokens(draw(*shape, head), draw(*shape, value_head))

    run = jax.jit(
        functools.partial(attend, scale=head**-0.5, window=case.window, soft_cap=case.soft_cap)
    )
    valid = jnp.ones((case.requests, case.new), jnp.bool_)
    mask = jnp.ones((case.requests, 1, case.past), jnp.bool_)
    query = draw(case.requests, case.new, query_heads, head)
    fresh, past = tokens(case.new), tokens(case.past)
    return {
        "op": "attend", "case": case.name,
        "us": round(seconds(lambda: run(query, fresh, valid, past, mask)) * 1e6),
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
