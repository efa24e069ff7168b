"""The engine beside full recomputation, under scarcity, interruption and failure."""

import signal

import jax
import numpy as np
import pytest

from tests.engine.conftest import CHUNK, assert_empty, compilations
from tests.engine.hybrid import WINDOW
from unimem_jax.errors import UsageError
from unimem_jax.price import add
from unimem_jax.sampling import Sampling
from unimem_jax.simulate import simulate

TIE = 1e-4  # logits nearer than this may come in either order
PROMPTS = ["", "a", "hello", "x" * CHUNK, "y" * (CHUNK + 1), "z" * 40, "ab" * 30, "é" * 9, "q"]
PROMPTS = [prompt or [7] for prompt in PROMPTS]  # one of them as token ids
GREEDY = Sampling(max_tokens=60)


def ids_of(engine, prompt):
    return engine.intake.encode(prompt)


def assert_same_tokens(recomputed, prompt, first, second):
    """Equal tokens up to the first one that is a tie."""
    margins = recomputed.margins([*prompt, *first], len(prompt))
    for at, (left, right) in enumerate(zip(first, second, strict=True)):
        if left != right:
            assert margins[at] < TIE
            return


@pytest.fixture(scope="module")
def crowd(shared_tight):
    """All prompts at once in the tight engine, checked after every step; and what it did."""
    engine, before = shared_tight, shared_tight.statistics()
    indices = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    pieces = {index: [] for index in indices}
    compiled = []
    while not engine.is_idle:
        with compilations() as seen:
            found = engine.step()
        compiled += seen
        for piece in found:
            pieces[piece.index].append(piece)
        engine.memory.check()
        held = (0,) * len(engine.plan.sub_pools)
        for served in engine.queue.running:
            held = add(held, engine.memory.prices.held(served.computed))
        assert engine.memory.metrics()["live"] == list(held)  # E1
        assert all(served.request is None for served in engine.queue.waiting)
    return [pieces[index] for index in indices], before, engine.statistics(), compiled


def tokens_of(pieces):
    return [token for piece in pieces for token in piece.token_ids]


def test_greedy_tokens_are_those_of_full_recomputation(crowd, recomputed, roomy):
    pieces, *_ = crowd
    for prompt, some in zip(PROMPTS, pieces, strict=True):
        ids, tokens = ids_of(roomy, prompt), tokens_of(some)
        assert len(tokens) == GREEDY.max_tokens > 4 * WINDOW
        assert recomputed.margins([*ids, *tokens], len(ids)).min() > -TIE


def test_an_arena_too_small_for_all_retracts_and_moves_and_loses_nothing(crowd):
    pieces, before, after, _ = crowd
    assert after.retractions - before.retractions > 5
    assert after.moved_units > before.moved_units
    assert after.recomputed_tokens > 0
    assert all(some[-1].finish_reason == "length" for some in pieces)


def test_what_ran_is_what_the_simulator_says(crowd, tight):
    _, before, after, _ = crowd
    assert before.steps == 0  # the fixture came first
    lengths = [(len(ids_of(tight, prompt)), GREEDY.max_tokens) for prompt in PROMPTS]
    found = simulate(lengths, tight.plan, tight.limits)
    assert found.steps == after.steps
    assert found.running_mean == after.running_mean
    assert found.running_max == after.running_max
    assert found.retractions == after.retractions
    assert found.computed_tokens == after.computed_tokens
    assert found.moved_bytes == after.moved_bytes
    assert after.computed_tokens - after.recomputed_tokens == found.needed_tokens


@pytest.mark.parametrize("at", [0, 2, 6])
def test_a_prompt_alone_gives_what_it_gave_in_a_crowd(crowd, recomputed, roomy, at):
    pieces, *_ = crowd
    (alone,) = roomy.generate([PROMPTS[at]], GREEDY)
    prompt = ids_of(roomy, PROMPTS[at])
    assert_same_tokens(recomputed, prompt, alone.token_ids, tokens_of(pieces[at]))


def test_a_stream_gives_the_pieces_of_what_generate_gives(roomy):
    prompts, options = ["hello", "you", "é"], Sampling(max_tokens=20, temperature=1, seed=3)
    whole = roomy.generate(prompts, options)
    texts, tokens, ends = [""] * 3, [[], [], []], [None] * 3
    for piece in roomy.stream(prompts, options):
        assert ends[piece.index] is None, "a piece came after the end"
        texts[piece.index] += piece.text
        tokens[piece.index] += piece.token_ids
        ends[piece.index] = piece.finish_reason
    assert texts == [one.text for one in whole]
    assert tokens == [list(one.token_ids) for one in whole]
    assert ends == [one.finish_reason for one in whole]
    assert [one.prompt_tokens for one in whole] == [6, 4, 3]
    assert whole[0].text == bytes(whole[0].token_ids).decode("utf-8", "replace")


def test_a_stop_text_ends_a_text_before_it_even_inside_one_piece_of_several_tokens(roomy):
    (free,) = roomy.generate("hello", GREEDY)
    stop = free.text[10:13]
    (cut,) = roomy.generate("hello", Sampling(max_tokens=60, stop=["never there", stop]))
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert len(cut.token_ids) < 60
    streamed = "".join(p.text for p in roomy.stream("hello", Sampling(max_tokens=60, stop=stop)))
    assert streamed == cut.text


def test_a_stop_id_ends_a_request_and_is_its_last_token(roomy):
    (free,) = roomy.generate("hello", GREEDY)
    stop_id = free.token_ids[12]
    (cut,) = roomy.generate("hello", Sampling(max_tokens=60, stop_ids=[stop_id]))
    first = free.token_ids.index(stop_id)
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: first + 1]
    assert cut.text == bytes(free.token_ids[:first]).decode("utf-8", "replace")


def test_the_last_token_may_both_stop_and_be_the_last(roomy):
    (free,) = roomy.generate("hello", GREEDY)
    first = free.token_ids.index(free.token_ids[12])
    options = Sampling(max_tokens=first + 1, stop_ids=[free.token_ids[12]])
    assert roomy.generate("hello", options)[0].finish_reason == "stop"


def test_a_request_draws_by_its_own_seed_whoever_runs_beside_it(roomy, tight):
    options = [Sampling(max_tokens=30, temperature=0.9, top_p=0.9, seed=s) for s in (1, 2, 1)]
    alone = [roomy.generate(["hello"], one)[0].token_ids for one in options]
    assert alone[0] == alone[2] != alone[1]
    strangers = [Sampling(max_tokens=40, temperature=2.0, seed=9), Sampling(max_tokens=45)]
    crowd = tight.generate(["hello", "stranger", "x" * 50] * 2,
                           [options[0], *strangers, options[1], *strangers])  # fmt: skip
    assert crowd[0].token_ids == alone[0]
    assert crowd[3].token_ids == alone[1]


def test_new_tokens_are_clipped_to_the_context(roomy):
    context = roomy.intake.context_tokens
    (found,) = roomy.generate([[5] * (context - 4)], Sampling(max_tokens=10**9))
    assert len(found.token_ids) == 4
    assert found.finish_reason == "length"


def test_two_streams_and_a_submitted_request_take_turns(roomy, recomputed):
    options = Sampling(max_tokens=12)
    wanted = {text: roomy.generate(text, options)[0] for text in ("one", "two", "three")}
    first, second = roomy.stream("one", options), roomy.stream("two", options)
    index = roomy.submit("three", options)
    found = {"one": [], "two": []}
    for left, right in zip(first, second, strict=True):
        found["one"] += left.token_ids
        found["two"] += right.token_ids
    third = []
    while not roomy.is_idle:
        third += roomy.step()
    third += roomy.step()
    assert {piece.index for piece in third} == {index}
    found["three"] = tokens_of(third)
    for text, tokens in found.items():
        prompt = ids_of(roomy, text)
        assert_same_tokens(recomputed, prompt, wanted[text].token_ids, tokens)


def test_closing_a_stream_gives_up_its_requests_and_no_others(roomy):
    index = roomy.submit("mine", Sampling(max_tokens=100))
    stream = roomy.stream(["a", "b" * 50, "c", "d", "e"], Sampling(max_tokens=100))
    assert {next(stream).index for _ in range(3)} <= {0, 1, 2}
    stream.close()
    assert [served.index for served in roomy.queue.running] == [index]
    assert len(roomy.queue.waiting) == 0
    roomy.memory.check()
    roomy.abort(index)
    assert_empty(roomy)
    with pytest.raises(UsageError, match=f"no request {index}"):
        roomy.abort(index)


def test_a_stream_that_is_never_read_holds_nothing(roomy):
    stream = roomy.stream(["a", "b"])
    assert_empty(roomy)
    del stream


def test_nothing_compiles_after_the_warm_up(crowd, tight):
    *_, compiled = crowd  # the first thing that its engine ran
    assert compiled == []
    lengths = [1, 2, CHUNK, CHUNK + 1, 60, 100, 140]
    with compilations() as seen:
        tight.generate([[3] * n for n in lengths], Sampling(max_tokens=20))
        tight.generate("x", Sampling(max_tokens=9, temperature=1.5, top_k=3, min_p=0.1))
    assert seen == []
    with compilations() as seen:
        jax.jit(lambda x: x + 1)(np.zeros(3, np.float32)).block_until_ready()
    assert seen, "compilations are not seen"


def test_a_warm_up_amid_serving_changes_nothing(roomy):
    index = roomy.submit("hello", Sampling(max_tokens=20))
    roomy.step()
    before = [np.array(leaf) for leaf in jax.tree.leaves(roomy._device)]
    told = []
    roomy.warm_up(told.append)
    after = [np.array(leaf) for leaf in jax.tree.leaves(roomy._device)]
    for left, right in zip(before, after, strict=True):
        np.testing.assert_array_equal(left, right)
    assert told == [1] * len(roomy.shapes())
    roomy.abort(index)


def test_an_interrupt_waits_for_the_end_of_the_step(roomy, monkeypatch):
    wanted = roomy.generate("hello", Sampling(max_tokens=10))[0]
    index = roomy.submit("hello", Sampling(max_tokens=10))
    steps = roomy.statistics().steps
    dispatch = roomy._dispatch

    def interrupted(packets):
        signal.raise_signal(signal.SIGINT)
        return dispatch(packets)

    with monkeypatch.context() as patched:
        patched.setattr(roomy, "_dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            roomy.step()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert roomy.statistics().steps == steps + 1
    assert [served.computed for served in roomy.queue.running] == [6]  # not restarted
    pieces = []
    while not roomy.is_idle:
        pieces += roomy.step()
    assert {piece.index for piece in pieces} == {index}
    assert tokens_of(pieces) == list(wanted.token_ids)


def test_an_interrupted_generate_leaves_the_engine_empty(roomy, monkeypatch):
    dispatch, calls = roomy._dispatch, []

    def interrupted(packets):
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return dispatch(packets)

    with monkeypatch.context() as patched:
        patched.setattr(roomy, "_dispatch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            roomy.generate(["hello", "x" * 60, "y"] * 3, Sampling(max_tokens=50))
    assert_empty(roomy)


@pytest.mark.parametrize("failing", [1, 3])
def test_a_failed_step_loses_the_arena_and_no_request(roomy, monkeypatch, failing):
    wanted = roomy.generate(["hello", "y" * 40], Sampling(max_tokens=10, temperature=1, seed=4))
    for prompt in ("hello", "y" * 40):
        roomy.submit(prompt, Sampling(max_tokens=10, temperature=1, seed=4))
    run, calls = roomy._run, []

    def failing_run(device, packet):
        calls.append(1)
        if len(calls) == failing:
            raise RuntimeError("the device is gone")
        return run(device, packet)

    pieces = []
    with monkeypatch.context() as patched:
        patched.setattr(roomy, "_run", failing_run)
        try:
            while len(calls) < 99:
                pieces += roomy.step()
        except RuntimeError as error:
            assert str(error) == "the device is gone"
    assert len(calls) == failing
    assert len(roomy.queue.waiting) == 2
    roomy.memory.check()
    while not roomy.is_idle:
        pieces += roomy.step()
    first = min(piece.index for piece in pieces)
    for at, completion in enumerate(wanted):
        own = [piece for piece in pieces if piece.index == first + at]
        assert tokens_of(own) == list(completion.token_ids)
