"""Attention over past and fresh tokens against one softmax per query in float64 NumPy."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from unimem_jax.pallas_kernels.errors import ArgumentError
from unimem_jax.pallas_kernels.paged_attention import Tokens, attend

PAGE = 8
POISON = (np.nan, np.inf, -np.inf)


@dataclass(frozen=True)
class Case:
    """One call of `attend` in NumPy; shapes as there."""

    query: np.ndarray
    fresh: tuple[np.ndarray, np.ndarray]
    valid: np.ndarray
    past: tuple[np.ndarray, np.ndarray] | None
    past_mask: np.ndarray | None
    scale: float = 0.3
    window: int | None = None
    sinks: np.ndarray | None = None
    soft_cap: float | None = None
    fresh_mask: np.ndarray | None = None


def random_case(
    seed: int, new: int, lengths: list[int], *, heads: tuple[int, int, int, int] = (4, 2, 8, 6),
    window: int | None = None, new_lengths: list[int] | None = None, has_sinks: bool = False,
    soft_cap: float | None = None,
) -> Case:  # fmt: skip
    """Requests of `lengths[r]` past tokens, held in whole pages, and `new_lengths[r]` new ones."""
    random = np.random.default_rng(seed)
    query_heads, key_heads, head, value_head = heads
    requests, tokens = len(lengths), -(-max(lengths) // PAGE) * PAGE

    def draw(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(np.float32)

    start = np.asarray(lengths)[:, None, None]
    position = start + np.arange(new)[None, :, None]
    held = np.arange(tokens)[None, None, :]
    mask = np.broadcast_to(held < start, (requests, new, tokens))
    if window is not None:
        mask = mask & (position - held < window)
    return Case(
        draw(requests, new, query_heads, head),
        (draw(requests, new, key_heads, head), draw(requests, new, key_heads, value_head)),
        np.arange(new) < np.asarray(new_lengths or [new] * requests)[:, None],
        (draw(requests, tokens, key_heads, head), draw(requests, tokens, key_heads, value_head)),
        mask,
        window=window,
        sinks=draw(query_heads) * 3 if has_sinks else None,
        soft_cap=soft_cap,
    )


jitted = jax.jit(attend, static_argnames=("scale", "window", "soft_cap"))


def attended(case: Case) -> np.ndarray:
    past = None if case.past is None else Tokens(*map(jnp.asarray, case.past))
    mask = None if case.past_mask is None else jnp.asarray(case.past_mask)
    sinks = None if case.sinks is None else jnp.asarray(case.sinks)
    fresh_mask = None if case.fresh_mask is None else jnp.asarray(case.fresh_mask)
    out = jitted(
        jnp.asarray(case.query), Tokens(*map(jnp.asarray, case.fresh)), jnp.asarray(case.valid),
        past, mask, scale=case.scale, window=case.window, sinks=sinks, soft_cap=case.soft_cap,
        fresh_mask=fresh_mask,
    )  # fmt: skip
    return np.asarray(out)


def attended_by_numpy(case: Case) -> np.ndarray:
    requests, new, query_heads, _ = case.query.shape
    group = query_heads // case.fresh[0].shape[2]
    out = np.zeros((requests, new, query_heads, case.fresh[1].shape[3]))
    for request, token, head in np.ndindex(requests, new, query_heads):
        oldest = 0 if case.window is None else max(0, token - case.window + 1)
        left = case.valid if case.fresh_mask is None else case.valid & case.fresh_mask[:, token]
        seen = [index for index in range(oldest, token + 1) if left[request, index]]
        keys, values = (part[request, seen, head // group] for part in case.fresh)
        if case.past is not None:
            row = token if case.past_mask.shape[1] > 1 else 0
            held = case.past_mask[request, row]
            keys = np.concatenate([case.past[0][request, held, head // group], keys])
            values = np.concatenate([case.past[1][request, held, head // group], values])
        score = keys.astype(np.float64) @ case.query[request, token, head] * case.scale
        if case.soft_cap is not None:
            score = case.soft_cap * np.tanh(score / case.soft_cap)
        if case.sinks is not None:
            score = np.append(score, case.sinks[head])
            values = np.concatenate([values, np.zeros_like(values, shape=(1, values.shape[1]))])
        if score.size:
            weight = np.exp(score - score.max())
            out[request, token, head] = weight @ values / weight.sum()
    return out


EDGES = [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE]


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, PAGE, PAGE + 1])
def test_every_edge_of_pages_and_windows_agrees_with_float64(new, window, has_sinks):
    case = random_case(0, new, EDGES, window=window, has_sinks=has_sinks)
    np.testing.assert_allclose(attended(case), attended_by_numpy(case), atol=2e-6)


@settings(max_examples=25)
@given(st.data())
def test_any_mix_of_options_agrees_with_float64(data):
    key_heads, group = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 1)]))
    new = data.draw(st.sampled_from([1, 4]))
    case = random_case(
        data.draw(st.integers(0, 1000)), new,
        [data.draw(st.integers(0, 2 * PAGE)) for _ in range(2)],
        heads=(key_heads * group, key_heads, 8, data.draw(st.sampled_from([8, 5]))),
        window=data.draw(st.sampled_from([None, 1, 3, 100])),
        new_lengths=[data.draw(st.integers(0, new)) for _ in range(2)],
        has_sinks=data.draw(st.booleans()),
        soft_cap=data.draw(st.sampled_from([None, 2.0])),
    )  # fmt: skip
    np.testing.assert_allclose(attended(case), attended_by_numpy(case), atol=2e-6)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("new", [1, 5])
def test_bytes_that_no_query_sees_leave_no_trace(poison, new):
    case = random_case(
        1, new, EDGES, window=PAGE, new_lengths=[new, 1, 1, new, 0, 1], has_sinks=True
    )
    dead, idle = ~case.past_mask.any(axis=1), ~case.valid

    def filled(parts: tuple[np.ndarray, np.ndarray], where: np.ndarray, value: float):
        return tuple(np.where(where[:, :, None, None], np.float32(value), part) for part in parts)

    def outcome(value: float) -> np.ndarray:
        past, fresh = filled(case.past, dead, value), filled(case.fresh, idle, value)
        return attended(replace(case, past=past, fresh=fresh))

    np.testing.assert_array_equal(outcome(poison), outcome(0))
    assert np.isfinite(outcome(poison)).all()


def test_a_past_hidden_whole_is_no_past_at_all():
    case = random_case(2, 4, [PAGE, PAGE], has_sinks=True)
    hidden = replace(case, past_mask=np.zeros_like(case.past_mask))
    without = replace(case, past=None, past_mask=None)
    np.testing.assert_allclose(attended(hidden), attended(without), atol=1e-7)


def test_a_query_that_sees_nothing_gives_zeros():
    case = random_case(3, 3, [0, PAGE], new_lengths=[0, 0])
    out = attended(case)
    assert not out[0].any()
    assert out[1].all()


@pytest.mark.parametrize("new", [1, 5])
def test_a_query_sees_only_the_fresh_tokens_that_it_is_left_with(new):
    case = random_case(5, new, [3, PAGE], new_lengths=[new, max(1, new - 2)], has_sinks=True)
    kept = np.random.default_rng(0).random((2, new, new)) < 0.5
    kept[1] = False  # not even its own
    narrowed = replace(case, fresh_mask=kept)
    np.testing.assert_allclose(attended(narrowed), attended_by_numpy(narrowed), atol=2e-6)
    assert np.abs(attended(narrowed) - attended(case)).max() > 0.01


def test_one_mask_row_serves_all_queries():
    case = random_case(4, 5, [3, PAGE])
    np.testing.assert_array_equal(
        attended(case), attended(replace(case, past_mask=case.past_mask[:, :1]))
    )


def test_a_chunk_boundary_changes_no_answer():
    whole = random_case(5, 9, [PAGE + 3], window=6, has_sinks=True)
    cut = 4
    first = replace(
        whole, query=whole.query[:, :cut], valid=whole.valid[:, :cut],
        fresh=tuple(part[:, :cut] for part in whole.fresh), past_mask=whole.past_mask[:, :cut],
    )  # fmt: skip
    held = np.arange(cut)[None, None, :] > np.arange(cut, 9)[None, :, None] - whole.window
    second = replace(
        whole, query=whole.query[:, cut:], valid=whole.valid[:, cut:],
        fresh=tuple(part[:, cut:] for part in whole.fresh),
        past=tuple(
            np.concatenate([old, new[:, :cut]], axis=1)
            for old, new in zip(whole.past, whole.fresh, strict=True)
        ),
        past_mask=np.concatenate([whole.past_mask[:, cut:], held], axis=2),
    )  # fmt: skip
    in_two = np.concatenate([attended(first), attended(second)], axis=1)
    np.testing.assert_allclose(attended(whole), in_two, atol=2e-6)


def test_scores_too_large_for_exp_still_make_a_softmax():
    case = replace(random_case(6, 2, [PAGE]), scale=1e4)
    np.testing.assert_allclose(attended(case), attended_by_numpy(case), atol=2e-6)


def test_stored_dtypes_narrower_than_the_query_are_read_as_they_are():
    case = random_case(7, 2, [PAGE, 3])
    narrow = [part.astype(jnp.bfloat16) for part in (*case.past, *case.fresh)]
    wide = [part.astype(np.float32) for part in narrow]
    rounded = replace(case, past=tuple(wide[:2]), fresh=tuple(wide[2:]))
    stored = replace(case, past=tuple(narrow[:2]), fresh=tuple(narrow[2:]))
    out = attended(stored)
    assert out.dtype == np.float32
    np.testing.assert_array_equal(out, attended(rounded))


def test_gradients_are_finite_where_everything_is_hidden():
    case = random_case(8, 4, [0], new_lengths=[2], has_sinks=True, window=2)

    def total(query, key, value, sinks):
        fresh = Tokens(key, value)
        return attend(
            query, fresh, jnp.zeros_like(case.valid), scale=0.3, window=2, sinks=sinks
        ).sum()

    arguments = map(jnp.asarray, (case.query, *case.fresh, case.sinks))
    for gradient in jax.grad(total, argnums=(0, 1, 2, 3))(*arguments):
        assert np.isfinite(gradient).all()


def test_gradients_agree_with_differences():
    case = random_case(9, 4, [0], has_sinks=True, soft_cap=2.0)

    def total(*arguments):
        # Differences are taken in NumPy.
        query, key, value, sinks = map(jnp.asarray, arguments)
        out = attend(
            query, Tokens(key, value), jnp.asarray(case.valid), scale=0.3, soft_cap=2.0, sinks=sinks
        )
        return jnp.sin(out).sum()

    arguments = tuple(map(jnp.asarray, (case.query, *case.fresh, case.sinks)))
    check_grads(total, arguments, order=1, modes=["rev"], eps=1e-2, rtol=2e-2)


CASE = random_case(0, 2, [PAGE, 3], has_sinks=True)


@pytest.mark.parametrize(
    "message, changed",
    [
        ("query is float32", {"query": CASE.query[0]}),
        ("query is int32", {"query": CASE.query.astype(np.int32)}),
        ("fresh has key", {"fresh": (CASE.fresh[0][:, :1], CASE.fresh[1])}),
        ("fresh has key", {"fresh": (CASE.fresh[0][..., :4], CASE.fresh[1])}),
        ("a divisor of 3 query heads", {"query": CASE.query[:, :, :3]}),
        ("valid is bool", {"valid": CASE.valid[:, :1]}),
        ("past and past_mask go together", {"past_mask": None}),
        ("past and past_mask go together", {"past": None}),
        ("past has key", {"past": tuple(part[:1] for part in CASE.past)}),
        ("past has values", {"past": (CASE.past[0], CASE.past[1][..., :3])}),
        ("past_mask is bool", {"past_mask": CASE.past_mask[:, :, :3]}),
        ("past_mask is float32", {"past_mask": CASE.past_mask.astype(np.float32)}),
        ("window is 0", {"window": 0}),
        ("soft_cap is 0", {"soft_cap": 0.0}),
        ("soft_cap is nan", {"soft_cap": np.nan}),
        ("sinks is", {"sinks": CASE.sinks[:1]}),
        ("fresh_mask is bool", {"fresh_mask": np.ones((2, 1, 2), bool)}),
        ("fresh_mask is int32", {"fresh_mask": np.ones((2, 2, 2), np.int32)}),
    ],
)
def test_bad_input_is_refused_by_name(message, changed):
    with pytest.raises(ArgumentError, match=message):
        attended(replace(CASE, **changed))
