"""Two engines on one tiny hybrid, shared by the tests: compiling is what costs."""

import logging
from contextlib import contextmanager

import jax
import pytest

from tests.engine.hybrid import Hybrid, Recomputed
from unimem_jax.engine import Engine

PAGE, CHUNK = 4, 16


@pytest.fixture(scope="session")
def hybrid():
    """The model and its parameters."""
    model = Hybrid()
    return model, model.init()


@pytest.fixture(scope="session")
def recomputed(hybrid):
    """The same model without past or arena."""
    return Recomputed(*hybrid, Hybrid.context_tokens)


@pytest.fixture(scope="session")
def shared_roomy(hybrid):
    """An engine with room for all that its rows can hold, warm."""
    engine = Engine(*hybrid, arena_bytes=1 << 20, page_tokens=PAGE, rows=4, chunk_tokens=CHUNK)
    engine.warm_up()
    return engine


@pytest.fixture(scope="session")
def shared_tight(hybrid):
    """An engine whose arena holds little more than its longest request, warm."""
    engine = Engine(*hybrid, arena_bytes=64 << 10, page_tokens=PAGE, rows=8, chunk_tokens=CHUNK)
    engine.warm_up()
    return engine


def assert_empty(engine):
    """Nothing runs or waits, and nothing is held (E1)."""
    assert engine.is_idle
    assert len(engine.queue) == 0
    engine.memory.check()
    metrics = engine.memory.metrics()
    assert metrics["rows"] == 0
    assert not any(metrics["live"] + metrics["committed"] + metrics["pending"])


@contextmanager
def compilations():
    """Gives a list of what JAX says of compilations while the block runs."""
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("jax").addHandler(handler)
    try:
        with jax.log_compiles():
            yield seen
    finally:
        logging.getLogger("jax").removeHandler(handler)


@pytest.fixture
def roomy(shared_roomy):
    """The roomy engine; a test leaves it empty."""
    yield shared_roomy
    assert_empty(shared_roomy)


@pytest.fixture
def tight(shared_tight):
    """The tight engine; a test leaves it empty."""
    yield shared_tight
    assert_empty(shared_tight)
