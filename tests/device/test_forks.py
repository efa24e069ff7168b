"""Forks and prefixes on a real arena: whoever begins with what another computed goes on as if it
had computed all of it itself, to the bit, whatever lies in bytes that nobody holds.
"""

from functools import cache
from itertools import permutations

import numpy as np
import pytest

from tests.device.models import MIXTURES, VOCABULARY, embedded
from tests.device.served import CHUNK, PAGE, POISON, Programs, Served
from unimem_jax.plan import plan
from unimem_jax.requests import Prefix, Work

NAMES = ["two windows", *(pytest.param(n, marks=pytest.mark.slow) for n in ("pooled", "embedded"))]
LENGTHS = [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 4 * PAGE + 3]
ARENA_BYTES = 64 << 10


@cache
def programs(name):
    model, params = embedded() if name == "embedded" else (MIXTURES[name], None)
    params = model.init() if params is None else params
    return Programs(model, params, plan(model.parts(), ARENA_BYTES, PAGE))


class Branches(Served):
    """Requests with texts that are told, token by token."""

    def __init__(self, name, word=POISON["float32 NaN"]):
        super().__init__(programs(name), word)

    def go_on(self, *branches):
        """One step; each branch is (request, tokens)."""
        work = [Work(r, len(tokens), np.array(tokens, np.int32)) for r, tokens in branches]
        self.step(work, CHUNK)
        self.memory.check()

    def read(self, prompt):
        """A request that has computed a prompt, in chunks."""
        request = self.memory.open()
        for start in range(0, len(prompt), CHUNK):
            self.go_on((request, prompt[start : start + CHUNK]))
        return request

    def fork(self, request):
        return self._known(self.memory.fork(request), self.texts.get(request, ((), None))[0])

    def resume(self, prefix, prompt):
        return self._known(self.memory.open(prefix=prefix), prompt)

    def _known(self, request, text):
        self.texts[request] = text, None
        return request

    def require_apart(self, name, prompt):
        """Every row that came out after the prompt is what requests that share nothing give."""
        mine = [(text, row) for text, row in self.seen if text[: len(prompt)] == prompt]
        whole = {text for text, _ in mine}
        whole -= {text[:end] for text in whole for end in range(1, len(text))}
        wanted = {}
        for text in whole:
            wanted |= apart(name, prompt, text)
        assert len(mine) > len(wanted) // 2
        for text, row in mine:
            assert np.array_equal(row.view(np.uint32), wanted[text].view(np.uint32)), text
        assert self.stray_writes == 0


@cache
def apart(name, prompt, text):
    """Logits after each token of a text, by a request that shares nothing: the prompt in chunks,
    then token by token.
    """
    served = Branches(name, word=None)
    request = served.read(prompt)
    for token in text[len(prompt) :]:
        served.go_on((request, [token]))
    return dict(served.seen)


def prompt_of(length):
    return tuple(np.random.default_rng(length).integers(0, VOCABULARY, length).tolist())


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_fork_and_a_fork_of_it_go_on_as_if_each_had_computed_all(name, length):
    prompt = prompt_of(length)
    served = Branches(name)
    first = served.read(prompt)
    second = served.fork(first)
    for token in (1, 2, 3):
        served.go_on((first, [token]), (second, [token + 3]))
    third = served.fork(second)
    for token in range(PAGE + 1):
        served.go_on((second, [token]), (third, [12 - token]), (first, [token]))
    served.require_apart(name, prompt)


@pytest.mark.parametrize("length", [PAGE, 3 * PAGE, 4 * PAGE + 3])
@pytest.mark.parametrize("name", NAMES)
def test_windows_slide_in_one_branch_and_the_other_sees_what_it_saw(name, length):
    prompt = prompt_of(length)
    served = Branches(name)
    first = served.read(prompt)
    waiting = served.fork(first)
    for token in range(12):
        served.go_on((first, [token]))
    for token in range(6):
        served.go_on((waiting, [12 - token]))
    served.require_apart(name, prompt)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_branches_are_freed_in_any_order_and_the_others_go_on(order):
    """The first of them before its copies have reached the device."""
    prompt = prompt_of(2 * PAGE + 2)
    served = Branches("two windows")
    first = served.read(prompt)
    branches = [first, served.fork(first), served.fork(first)]
    for at, gone in enumerate(order):
        served.memory.free(branches[gone])
        stranger = served.read(prompt_of(5))  # takes the bytes that were given back
        for token in range(3):
            left = [branches[other] for other in order[at + 1 :]]
            if left:
                served.go_on(*((branch, [token + at]) for branch in left))
        served.memory.free(stranger)
    served.require_apart("two windows", prompt)
    assert not any(served.memory.metrics()["live"])


@pytest.mark.parametrize("name", NAMES)
def test_a_request_begins_with_the_pages_and_the_checkpoint_of_one_that_is_gone(name):
    prompt = prompt_of(3 * PAGE)
    served = Branches(name)
    memory, allocator = served.memory, served.memory.allocator
    source = served.read(prompt)
    shares = memory.share(source, 0, 3)
    slots = [
        allocator.copy_slot(slot, pool.index, committed=False)
        for pool, slot in zip(memory.plan.slot_pools, source.slots, strict=True)
    ]
    kept = [(index, id_) for index, ids in shares.items() for id_ in ids]
    kept += [(pool.index, id_) for pool, id_ in zip(memory.plan.slot_pools, slots, strict=True)]
    memory.kept = kept
    prefix = Prefix(3 * PAGE, list(source.ids), slots)
    first = served.resume(prefix, prompt)
    for token in range(6):
        served.go_on((source, [token]), (first, [12 - token]))
    memory.free(source)
    memory.free(first)
    memory.free(served.read(prompt_of(11)))  # takes the bytes that were given back
    second = served.resume(prefix, prompt)
    for token in range(6):
        served.go_on((second, [token + 4]))
    memory.kept = []
    for index, id_ in kept:
        allocator.drop(id_, index)
    for token in range(3):
        served.go_on((second, [token]))
    served.require_apart(name, prompt)
    memory.free(second)
    assert not any(memory.metrics()["live"])


def test_what_a_fork_writes_is_seen_by_nobody_else_even_where_nothing_was_copied(monkeypatch):
    """The tests above are not blind: a fork without its copies is caught."""
    monkeypatch.setattr("unimem_jax.allocator.Allocator._copy", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_fork_and_a_fork_of_it_go_on_as_if_each_had_computed_all("two windows", PAGE + 1)
