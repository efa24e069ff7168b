"""The engine with kept prefixes: the same tokens and logits, whatever was kept or had to go."""

from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

import unimem_jax as um
from tests.engine.conftest import compilations
from tests.engine.hybrid import Hybrid, Recomputed
from tests.prefix.watched import sampled_logits
from unimem_jax.engine import Engine
from unimem_jax.errors import OutOfMemory, UsageError
from unimem_jax.price import add

CHUNK, PAGE, CHECKPOINT, CONTEXT = 16, 4, 8, Hybrid.context_tokens
TOLERANCE = 1e-4
NEW = um.Sampling(max_tokens=6)


@pytest.fixture(scope="module")
def model():
    """The tiny hybrid, and its full recomputation."""
    hybrid = Hybrid()
    params = hybrid.init()
    return hybrid, params, Recomputed(hybrid, params, CONTEXT)


@pytest.fixture(scope="module")
def shared(model):
    """An engine that keeps prefixes, in few shapes: compiling is what costs."""
    engine = Engine(
        *model[:2], arena_bytes=256 << 10, page_tokens=PAGE, rows=4, chunk_tokens=CHUNK,
        prefix_cache=True, checkpoint_tokens=CHECKPOINT,
    )  # fmt: skip
    engine._row_bucket = lambda count: 4
    return engine


@pytest.fixture
def engine(shared):
    """The engine with nothing kept; when a test ends, prefixes are all that is left."""
    clear(shared)
    yield shared
    assert shared.is_idle
    assert shared.memory.metrics()["rows"] == 0
    check(shared)
    assert cache_of(shared).tree.reclaimable() == tuple(shared.memory.allocator.held)
    clear(shared)


def cache_of(engine):
    return engine._admission.cache


def clear(engine):
    cache_of(engine).clear()
    assert not any(engine.memory.allocator.held)
    check(engine)


def check(engine):
    engine.memory.check()
    cache_of(engine).check()


def hits(engine):
    return engine.statistics().prefix_hit_tokens


def words(seed, count):
    return np.random.default_rng(seed).integers(1, 256, count).tolist()


def verify(model, engine, prompts, sampling=NEW, **options):
    """Generates, and compares every sampled position's logits with full recomputation."""
    with sampled_logits(engine, check) as seen:
        found = engine.generate(prompts, sampling, **options)
    for prompt, completion in zip(prompts, found, strict=True):
        ids = [*prompt, *completion.token_ids]
        if not sampling.temperature:
            assert (model[2].margins(ids, len(prompt)) > -TOLERANCE).all()
        logits = model[2].logits(ids)
        for at in range(len(prompt), len(ids)):
            np.testing.assert_allclose(seen[tuple(ids[:at])], logits[at - 1], atol=TOLERANCE)
    return [list(completion.token_ids) for completion in found]


@contextmanager
def ballast(engine, left):
    """Leaves room for so many units only."""
    allocator = engine.memory.allocator
    context = max(pool.index for pool in engine.plan.sub_pools)
    one = tuple(int(pool.index == context) for pool in engine.plan.sub_pools)
    held, admission = [], engine._admission
    while allocator.fits(add(left, one)):
        held += allocator.grant_pages(1, [context], committed=False).tolist()
    admission.check_idle = lambda: None  # it would find what is held here, and nobody's
    try:
        yield
    finally:
        allocator.free(held)
        del admission.check_idle


@pytest.mark.parametrize("seed", range(2))
def test_prompts_that_share_a_beginning_compute_it_once(model, engine, seed):
    system = words(seed, 41)
    prompts = [system + words(10 * seed + at, 3 + 9 * at) for at in range(1, 5)]
    before = hits(engine)
    verify(model, engine, prompts[:1])
    verify(model, engine, prompts[1:2])
    assert hits(engine) - before == 32, "the last checkpoint within what is shared"
    verify(model, engine, prompts[2:])
    assert hits(engine) - before == 32 + 2 * 40, "a checkpoint was kept where the two parted"


@pytest.mark.parametrize("length", [16, 17, 31, 32, 33, 64])
def test_equal_longer_and_shorter_prompts_resume_where_they_may(model, engine, length):
    prompt, before = words(length, length), hits(engine)
    first = verify(model, engine, [prompt])
    assert verify(model, engine, [prompt]) == first
    assert hits(engine) - before >= length - 1 - CHUNK
    verify(model, engine, [prompt[:-3]])
    verify(model, engine, [[*prompt, *words(1, 5)]])


def test_a_conversation_computes_each_turn_once(model, engine):
    talk, known = words(5, 20), 0
    for _ in range(4):
        before = hits(engine)
        (answer,) = verify(model, engine, [talk])
        assert hits(engine) - before == known, "a turn computes what is new"
        known = len(talk) + len(answer) - 1  # the last token is never computed
        talk = [*talk, *answer, *words(len(talk), 7)]


def test_sampled_tokens_do_not_depend_on_what_was_kept(model, engine):
    prompts = [words(8, 40)] * 3
    options = um.Sampling(max_tokens=8, temperature=1.0, seed=3)
    cold = verify(model, engine, prompts[:1], options)
    assert verify(model, engine, prompts, options) == cold * 3
    clear(engine)
    assert verify(model, engine, prompts, options) == cold * 3


@pytest.mark.parametrize("length", [1, 2, 20, 64])
def test_samples_of_one_prompt_read_it_once(model, engine, length):
    prompt = words(length, length)
    options = um.Sampling(max_tokens=6, temperature=1.0, seed=2**64 - 2, n=4)
    seeds = [2**64 - 2, 2**64 - 1, 0, 1]
    alone = [replace(options, n=1, seed=seed) for seed in seeds]
    wanted = [verify(model, engine, [prompt], one)[0] for one in alone]
    assert len(set(map(tuple, wanted))) > 1
    clear(engine)
    before = engine.statistics()
    found = engine.generate([prompt, prompt[::-1]], options)
    assert [list(one.token_ids) for one in found[:4]] == wanted
    assert len(found) == 8
    after = engine.statistics()
    computed = after.computed_tokens - before.computed_tokens
    assert computed <= 2 * (length - 1 + 4 * 6)
    hit = after.prefix_hit_tokens - before.prefix_hit_tokens
    assert hit >= 2 * 3 * (length - 1)


def test_samples_whose_first_is_given_up_go_on(model, engine):
    stream = engine.stream([words(0, 60)], um.Sampling(max_tokens=3, n=3))
    assert next(stream).index == 0
    engine.abort(min(engine._served))
    assert {piece.index for piece in stream} >= {1, 2}
    with pytest.raises(UsageError, match="one sample"):
        engine.submit(words(0, 9), um.Sampling(n=2))
    other = engine.stream([words(1, 60)], um.Sampling(n=3))
    engine.step()
    other.close()


@pytest.mark.parametrize("seed", range(3))
def test_scarcity_retracts_evicts_and_changes_no_token(model, engine, seed):
    """T29, A10, A17, T18: a crowd with one beginning in memory for two."""
    system = words(seed, 36)
    prompts = [system + words(50 + at, 5 * at + 1) for at in range(6)]
    before = engine.statistics()
    with ballast(engine, engine.memory.prices.peak(90, CHUNK)):
        verify(model, engine, prompts, um.Sampling(max_tokens=20))
        verify(model, engine, prompts[::-1], um.Sampling(max_tokens=20))
    after, metrics = engine.statistics(), cache_of(engine).metrics()
    assert after.retractions > before.retractions, "room was never short"
    assert after.prefix_hit_tokens > before.prefix_hit_tokens
    assert metrics["evicted"]


def test_a_prefix_that_leaves_no_room_for_its_copy_keeps_nobody_waiting(model, engine):
    """A19: alone it fits without the prefix, and not beside it (Y3)."""
    prompt = words(2, 40)
    with ballast(engine, engine.memory.prices.peak(45, CHUNK)):
        first = verify(model, engine, [prompt])
        before = hits(engine)
        assert verify(model, engine, [prompt]) == first
        assert hits(engine) == before, "there was room beside the prefix"
    assert verify(model, engine, [prompt]) == first


def test_a_retracted_request_goes_on_from_what_it_had(model, engine):
    """Room is short for a moment only: what did not have to go is not computed again."""
    prompts = [words(at, 40) for at in range(2)]
    options = um.Sampling(max_tokens=30)
    cold = [verify(model, engine, [prompt], options)[0] for prompt in prompts]
    clear(engine)
    before, tokens = engine.statistics(), {}
    peak = engine.memory.prices.peak(46, CHUNK)
    with ballast(engine, add(peak, peak)):
        numbers = [engine.submit(prompt, options) for prompt in prompts]
        while engine.statistics().retractions == before.retractions:
            read(engine, tokens)
    while not engine.is_idle:
        read(engine, tokens)
    assert [tokens[number] for number in numbers] == cold
    recomputed = engine.statistics().recomputed_tokens - before.recomputed_tokens
    assert recomputed < 40, "the retraction lost all that there was"


def read(engine, tokens):
    for piece in engine.step():
        tokens.setdefault(piece.index, []).extend(piece.token_ids)
    check(engine)


def test_a_checkpoint_that_finds_no_room_is_skipped_whichever_it_is(model, engine, monkeypatch):
    """T19, with the n-th copy failing for every n."""
    prompts = [words(3, 40) + words(at, 20) for at in range(3)]
    cold = [verify(model, engine, [prompt])[0] for prompt in prompts]
    copy_slot, calls = engine.memory.allocator.copy_slot, []
    for failing in count():
        clear(engine)
        calls.clear()

        def rigged(id_, pool, committed=True, failing=failing):
            calls.append(committed)
            if calls.count(False) == failing + 1 and not committed:
                raise OutOfMemory("a pin is in the way")
            return copy_slot(id_, pool, committed)

        monkeypatch.setattr(engine.memory.allocator, "copy_slot", rigged)
        assert verify(model, engine, prompts) == cold
        if calls.count(False) <= failing:
            break
    assert failing > 3


def test_namespaces_share_nothing(model, engine):
    """A37."""
    prompt = words(4, 40)
    for space in ("x", ("x", None), (None, "x")):
        before = hits(engine)
        verify(model, engine, [prompt], namespace=space)
        assert hits(engine) == before
        verify(model, engine, [prompt], namespace=space)
        assert hits(engine) > before


def test_requests_that_were_given_up_leave_their_prefixes(model, engine):
    """A13: running, waiting and finished."""
    prompt = words(6, 40)
    numbers = [engine.submit(prompt, um.Sampling(max_tokens=50)) for _ in range(6)]
    for _ in range(6):
        engine.step()
    for number in numbers:
        engine.abort(number)
    check(engine)
    before = hits(engine)
    verify(model, engine, [prompt])
    assert hits(engine) > before


def test_one_token_requests_are_released(model, engine):
    """A15: nothing ever decodes."""
    for length in (1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE):
        verify(model, engine, [words(length, length)] * 2, um.Sampling(max_tokens=1))
        assert cache_of(engine).tree.reclaimable() == tuple(engine.memory.allocator.held)


def test_hits_compile_nothing(model, engine):
    """A48."""
    prompts = [words(9, 50) + words(at, 9) for at in range(3)]
    verify(model, engine, prompts)
    clear(engine)
    with compilations() as seen:
        before = hits(engine)
        for _ in range(2):
            engine.generate(prompts, NEW)
        assert hits(engine) > before
    assert not seen


def test_a_failed_step_loses_what_was_kept_and_no_request(model, engine, monkeypatch):
    prompt = words(7, 40)
    first = verify(model, engine, [prompt])
    dispatch, calls = engine._dispatch, []

    def failing(packets):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the device is gone")
        return dispatch(packets)

    monkeypatch.setattr(engine, "_dispatch", failing)
    number = engine.submit(prompt, NEW)
    tokens = []
    for _ in range(30):
        try:
            tokens += [token for piece in engine.step() for token in piece.token_ids]
        except RuntimeError:
            assert not cache_of(engine).tree.node_count, "prefixes of a lost arena"
    assert tokens == first[0]
    with pytest.raises(UsageError):
        engine.abort(number)


def test_wrong_options_are_refused_before_anything_runs(model, engine):
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="checkpoint_tokens"):
            Engine(*model[:2], arena_bytes=256 << 10, checkpoint_tokens=wrong)
    for call in (engine.generate, engine.stream):
        with pytest.raises(UsageError, match="namespace"):
            call([words(0, 4)], NEW, namespace=["x"])
    with pytest.raises(UsageError, match="namespace"):
        engine.submit(words(0, 4), NEW, {})
