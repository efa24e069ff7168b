"""Published geometries: their bytes worked out by hand, as planned, and as the docs show them."""

import re
from pathlib import Path

import pytest

from unimem_jax.errors import UsageError
from unimem_jax.geometries import geometry, geometry_names
from unimem_jax.plan import plan, size_text

GIB = 1 << 30
MODELS = Path(__file__).parents[2] / "docs" / "MODELS.md"

# Name: layers, bytes of one token of whole context, {window: bytes of one token in it}, bytes of
# recurrent state and of convolution tails per request. By hand: heads x channels x 2 (keys and
# values) x 2 bytes x layers; 4 bytes a state element; 2 bytes x 3 inputs a convolution channel.
BY_HAND = {
    "gpt-oss-20b": (24, 24_576, {128: 24_576}, 0, 0),
    "gpt-oss-120b": (36, 36_864, {128: 36_864}, 0, 0),
    "qwen3.5-0.8b": (24, 12_288, {}, 18_874_368, 663_552),
    "qwen3.5-4b": (32, 32_768, {}, 50_331_648, 1_179_648),
    "qwen3.5-9b": (32, 32_768, {}, 50_331_648, 1_179_648),
    "qwen3.5-27b": (64, 65_536, {}, 150_994_944, 2_949_120),
    "qwen3.5-35b-a3b": (40, 20_480, {}, 62_914_560, 1_474_560),
    "qwen3-next-80b-a3b": (48, 24_576, {}, 75_497_472, 1_769_472),
    "kimi-linear-48b-a3b": (27, 8_064, {}, 41_943_040, 1_474_560),
    "kimi-k3": (93, 27_648, {}, 434_110_464, 15_261_696),
    "kimi-k3.1-pro": (93, 33_792, {}, 434_110_464, 15_261_696),
    "deepseek-v3.2": (61, 85_888, {}, 0, 0),
    "deepseek-v3.2-fp8": (61, 48_068, {}, 0, 0),
    "muse-spark-816b-a42b": (62, 65_536, {2048: 188_416}, 0, 0),
    "inkling-975b-a41b": (66, 45_056, {512: 450_560}, 0, 6_352_896),
    "gemma-3-4b": (34, 20_480, {1024: 118_784}, 0, 0),
    "gemma-3-27b": (62, 81_920, {1024: 425_984}, 0, 0),
    "nemotron-3-nano-30b-a3b": (52, 6_144, {}, 48_234_496, 847_872),
    "lfm2-1.2b": (16, 12_288, {}, 0, 81_920),
}
# Bytes of one request's whole window, as engines publish them.
WINDOW_BYTES = {
    "gpt-oss-20b": 3_145_728, "gpt-oss-120b": 4_718_592, "muse-spark-816b-a42b": 385_875_968,
    "inkling-975b-a41b": 230_686_720, "gemma-3-4b": 121_634_816,
}  # fmt: skip
# Layers, counted from 0, that attend over the whole context.
FULL_LAYERS = {
    "gpt-oss-20b": range(1, 24, 2),
    "qwen3.5-4b": range(3, 32, 4),
    "kimi-linear-48b-a3b": (3, 7, 11, 15, 19, 23, 26),
    "kimi-k3": (*range(3, 93, 4), 92),
    "muse-spark-816b-a42b": range(1, 62, 4),
    "inkling-975b-a41b": range(5, 66, 6),
    "gemma-3-4b": (5, 11, 17, 23, 29),
    "nemotron-3-nano-30b-a3b": (5, 12, 19, 26, 33, 42),
    "lfm2-1.2b": (2, 5, 8, 10, 12, 14),
}


def bytes_of(parts, kind, *, tails=None):
    """Bytes of the parts of a kind of lifetime; of the convolution tails among them, or without."""
    return sum(
        part.byte_count
        for part in parts
        if part.lifetime.kind == kind and tails in (None, part.name.endswith("conv"))
    )


def test_every_geometry_is_checked_by_hand():
    assert set(BY_HAND) == set(geometry_names())


@pytest.mark.parametrize("name", BY_HAND)
def test_the_bytes_of_a_published_model_are_those_worked_out_by_hand(name):
    parts = geometry(name)
    layers, token, windows, state, tails = BY_HAND[name]
    assert max(part.site.layer for part in parts) < layers
    assert bytes_of(parts, "context") == token
    assert {part.lifetime.tokens for part in parts if part.lifetime.kind == "window"} == set(
        windows
    )
    assert bytes_of(parts, "window") == sum(windows.values())
    assert bytes_of(parts, "request", tails=False) == state
    assert bytes_of(parts, "request", tails=True) == tails
    if name in WINDOW_BYTES:
        assert sum(tokens * size for tokens, size in windows.items()) == WINDOW_BYTES[name]


@pytest.mark.parametrize("name", BY_HAND)
def test_a_published_model_is_planned_with_next_to_no_padding(name):
    made = plan(geometry(name), 64 * GIB, page_tokens=16)
    _, token, windows, state, tails = BY_HAND[name]
    wanted = {"context": token, "request": state + tails}
    wanted |= {f"window_{tokens}": size for tokens, size in windows.items()}
    for pool in made.sub_pools:
        used = wanted.pop(pool.name)
        assert pool.entry_words * 4 - pool.padding_bytes == used
        assert pool.padding_bytes <= used / 50, "only scales of a few bytes are padded at all"
    assert not any(wanted.values())
    assert made.requested_bytes - made.arena_bytes < GIB / 32


@pytest.mark.parametrize("name", FULL_LAYERS)
def test_the_layers_over_the_whole_context_are_where_the_model_has_them(name):
    found = {part.site.layer for part in geometry(name) if part.lifetime.kind == "context"}
    assert found == set(FULL_LAYERS[name])


def test_the_latent_and_the_index_key_of_a_token_lie_in_one_entry():
    (pool,) = plan(geometry("deepseek-v3.2-fp8"), GIB, 16).sub_pools
    assert {lane.part.dtype for lane in pool.lanes} == {"float8_e4m3fn", "float32", "bfloat16"}
    assert pool.entry_words * 4 == 48_896


def test_another_name_is_refused_with_those_there_are():
    with pytest.raises(UsageError) as caught:
        geometry("gpt-5")
    assert all(name in str(caught.value) for name in ("gpt-5", *geometry_names()))


def documented():
    """The rows of the table in docs/MODELS.md, cell by cell."""
    section = MODELS.read_text(encoding="utf-8").split("## Published geometries")[1]
    rows = re.findall(r"^\| `(.+?)` \| (.*) \|$", section.split("\n## ")[0], re.MULTILINE)
    return {name: cells.split(" | ") for name, cells in rows}


def shown(name):
    """What the table should say of a geometry."""
    pools = {pool.name: pool for pool in plan(geometry(name), 64 * GIB, 16).sub_pools}
    parts = geometry(name)
    windows = [pool for pool in pools.values() if pool.lifetime.kind == "window"]
    return [
        f"{bytes_of(parts, 'context'):,}",
        f"{pools['context'].entry_words * 4:,}",
        " + ".join(f"{w.entry_words * 4:,} of {w.lifetime.tokens:,}" for w in windows) or "-",
        size_text(pools["request"].unit_bytes) if "request" in pools else "-",
    ]


def test_the_table_in_the_docs_is_what_the_code_says():
    assert documented() == {name: shown(name) for name in geometry_names()}
