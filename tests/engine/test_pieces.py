"""No piece is lost: whoever submits a request reads all of it, whatever happens beside it."""

import jax.numpy as jnp
import pytest

import unimem_jax as um
from unimem_jax.errors import UsageError
from unimem_jax.store import PackedStore


def read_all(engine):
    pieces = []
    while not engine.is_idle:
        pieces += engine.step()
    return pieces


def tokens_of(pieces, index):
    return [token for piece in pieces if piece.index == index for token in piece.token_ids]


def test_pieces_that_wait_for_step_keep_the_engine_from_being_idle(roomy):
    (alone,) = roomy.generate(["hello"], um.Sampling(max_tokens=2))
    index = roomy.submit("hello", um.Sampling(max_tokens=2))
    roomy.generate(["a longer one"], um.Sampling(max_tokens=6))
    assert not roomy.is_idle
    assert tokens_of(read_all(roomy), index) == list(alone.token_ids)


def test_an_aborted_request_leaves_no_pieces_behind(roomy):
    index = roomy.submit("hello", um.Sampling(max_tokens=9))
    stream = roomy.stream(["another"], um.Sampling(max_tokens=9))
    next(stream)
    next(stream)
    roomy.abort(index)
    stream.close()
    assert roomy.step() == []
    assert roomy.is_idle


def test_a_tokenizer_that_fails_for_one_request_costs_another_no_token(roomy, monkeypatch):
    (wanted,) = roomy.generate(["first"], um.Sampling(max_tokens=6))
    first = roomy.submit("first", um.Sampling(max_tokens=6))
    second = roomy.submit("second", um.Sampling(max_tokens=6))
    stream, calls = roomy._served[second].stream, []

    class Broken:
        def push(self, tokens):
            calls.append(tokens)
            if len(calls) == 3:
                raise RuntimeError("no such token")
            return stream.push(tokens)

        def end(self):
            return stream.end()

    monkeypatch.setattr(roomy._served[second], "stream", Broken())
    pieces = [*roomy.step(), *roomy.step()]
    with pytest.raises(RuntimeError, match="no such token"):
        roomy.step()
    pieces += read_all(roomy)
    assert tokens_of(pieces, first) == list(wanted.token_ids)


def test_state_of_another_shape_is_refused_while_tracing(hybrid):
    model, _ = hybrid
    plan = um.plan(model.parts(), 1 << 18, 16)
    part = next(part for part in model.parts() if part.lifetime.is_request)
    store = PackedStore(plan)
    arena, slot = store.init(), jnp.zeros((1,), jnp.int32)
    state = store.read_state(arena, part.key, slot).astype("float32")
    with pytest.raises(UsageError, match="per request"):
        store.write_state(arena, part.key, slot, state[:, :-1])
