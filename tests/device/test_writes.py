"""A step writes the entries of its new tokens and not one byte more."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.device.models import MIXTURES
from tests.device.served import CHUNK, Programs, Served
from tests.device.traffic import clean, programs, same_bits
from unimem_jax.requests import Work
from unimem_jax.step import _Program


@pytest.mark.parametrize("name", [*MIXTURES, "embedded"])
def test_random_traffic_writes_nothing_beside_its_entries(name):
    served = clean(name)
    assert served.steps > 20
    assert served.stray_writes == 0


def ungranted_pages_are_written(self, pool, views, table):
    """The rows of all valid tokens, whether their page was granted or not."""
    page_tokens = self.store.plan.page_tokens
    addresses = table.addresses(pool, views.positions // page_tokens)
    present = jnp.where(views.valid, addresses, pool.unit_count)
    return self.store.entry_rows(pool, present, views.positions % page_tokens)


def chunk_beside_a_neighbour(shared):
    """Stray writes of a chunk of 8 tokens, seen through a window of 3, and what comes out."""
    served = Served(shared)
    neighbour, request = served.memory.open(), served.memory.open()
    served.step([Work(neighbour, 2, np.asarray([9, 4], np.int32))], CHUNK)
    served.step([Work(request, CHUNK, np.arange(CHUNK, dtype=np.int32))], CHUNK)
    served.step([Work(neighbour, 1, np.ones(1, np.int32))], CHUNK)
    return served.stray_writes, served.record


def test_a_chunk_longer_than_every_window_writes_only_pages_that_it_was_granted(monkeypatch):
    model, shared = programs("window only")
    strays, record = chunk_beside_a_neighbour(shared)
    assert strays == 0
    monkeypatch.setattr(_Program, "entry_rows", ungranted_pages_are_written)
    strays, naive = chunk_beside_a_neighbour(Programs(model, shared.params, shared.plan))
    assert strays > 0
    assert not same_bits(record, naive)
