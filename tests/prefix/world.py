"""A prefix cache beside its twins: a dictionary of prefixes, and what lies at every address.

Requests grow through a `Memory` without a device. Instead of bytes the twin keeps, for every unit,
the tokens whose state it holds; moves and copies carry them along. What a match names must hold the
state of the tokens that were asked for, and the longest such place must be the one that is named.
"""

import random
from dataclasses import dataclass, field

import unimem_jax as um
from unimem_jax.allocator import number_of
from unimem_jax.memory import Memory
from unimem_jax.prefix import PrefixCache
from unimem_jax.requests import Prefix
from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, window

STATE = Part(Site(0), "state", (96,), "float32", REQUEST)
NEAR = Part(Site(1), "key", (32,), "float32", window(6))
FAR = Part(Site(2), "key", (48,), "float32", window(13))
WHOLE = Part(Site(3), "key", (64,), "float32", CONTEXT)
KINDS = {
    "whole": (WHOLE,),
    "window": (NEAR, WHOLE),
    "windows alone": (NEAR, FAR),
    "state": (STATE, WHOLE),
    "state alone": (STATE,),
    "hybrid": (STATE, NEAR, FAR, WHOLE),
}


@dataclass(eq=False)
class Running:
    """A request of the twin's: the tokens that it has computed."""

    tokens: list
    request: object
    goal: list
    namespace: object = None


@dataclass
class World:
    """One cache and what must be true of it."""

    kind: str = "hybrid"
    page_tokens: int = 4
    arena_bytes: int = 24 << 10
    seed: int = 0
    letters: int = 2
    layout: object = "unified"
    running: list = field(default_factory=list)
    hits: int = 0
    resumed: int = 0
    holding: list = field(default_factory=list)

    def __post_init__(self):
        self.plan = um.plan(KINDS[self.kind], self.arena_bytes, self.page_tokens)
        self.memory = Memory(self.plan, rows=6, context_tokens=64, layout=self.layout)
        self.memory.pending.forget = self.run_moves
        self.allocator = self.memory.allocator
        self.cache = PrefixCache(self.allocator, self.memory.prices)
        self.contents = {}  # (sub-pool, address) -> tokens whose state it holds, from the first on
        self.rng = random.Random(self.seed)
        self.freed_for = None
        let_go = self.cache._let_go

        def watched(node):
            if self.freed_for is not None:
                assert not self.allocator.fits(self.freed_for), "one more went than had to"
            let_go(node)

        self.cache._let_go = watched

    # What a device would do.

    def run_moves(self):
        ledger = self.allocator.ledger
        for batch in self.allocator.take_moves():
            pairs = zip(batch.sources.tolist(), batch.destinations.tolist(), strict=True)
            found = [(to, self.contents.get((batch.sub_pool, start))) for start, to in pairs]
            self.contents |= {(batch.sub_pool, to): tokens for to, tokens in found}
            ledger.dispatch()
        for ticket in range(ledger.retired + 1, ledger.dispatched + 1):
            ledger.retire(ticket)

    def content(self, pool, id_):
        self.run_moves()
        assert self.allocator.tables[pool].ids.present[number_of(id_)] == id_, "a stale id"
        return self.contents[pool, int(self.allocator.mapping[pool][number_of(id_)])]

    def write(self, one):
        """Everything that the request holds has the state of its tokens."""
        self.run_moves()
        for pool in self.plan.token_pools:
            first = self.memory.prices.first_page(pool.lifetime, len(one.tokens))
            for page in range(first, len(one.request.ids)):
                end = min(len(one.tokens), (page + 1) * self.page_tokens)
                self.put(pool.index, one.request.ids[page], one.tokens[:end])
        for pool, slot in zip(self.plan.slot_pools, one.request.slots, strict=False):
            self.put(pool.index, slot, list(one.tokens))

    def put(self, pool, id_, tokens):
        address = int(self.allocator.mapping[pool][number_of(id_)])
        assert address < self.allocator.tables[pool].absent, "a request lost a unit"
        before = self.contents.get((pool, address))
        # A page that a prefix shares may hold more tokens than the sharer knows, never others.
        is_more = before is not None and before[: len(tokens)] == tokens
        if not is_more or self.plan.sub_pools[pool].is_slot:
            self.contents[pool, address] = list(tokens)

    # What requests and schedulers do.

    def words(self, most=40):
        """Random tokens that often begin as others do."""
        known = []
        kept = list(self.records()) if self.rng.random() < 0.6 else []
        if kept:
            known = list(self.rng.choice(kept)[1])
            known = known[: self.rng.choice([len(known), self.rng.randint(0, len(known))])]
        count = self.rng.randint(1, most)
        return (known + [self.rng.randrange(self.letters) for _ in range(count)])[:most]

    def start(self):
        """A request that resumes as far as it may; cold where its copies have no room."""
        if not self.memory.free_rows:
            return
        tokens, namespace = self.words(), self.rng.choice([None, "other"])
        match = self.match(tokens, namespace)
        begin = Prefix()
        with self.cache.held([match]):
            self.holding = [match]
            if self.evict(self.memory.copies(match.length)):
                begin = Prefix(match.length, match.ids, match.slots)
                self.cache.use(match, len(tokens))
            self.holding = []
            request = self.memory.open(prefix=begin)
        one = Running(tokens[: begin.length], request, tokens, namespace)
        self.running.append(one)
        self.resumed += begin.length > 0
        self.verify(one)

    def verify(self, one):
        """What a request holds is the state of its tokens."""
        length = len(one.tokens)
        for pool in self.plan.token_pools:
            first = self.memory.prices.first_page(pool.lifetime, length)
            for page in range(first, len(one.request.ids)):
                end = min(length, (page + 1) * self.page_tokens)
                assert self.content(pool.index, one.request.ids[page])[:end] == one.tokens[:end]
        for pool, slot in zip(self.plan.slot_pools, one.request.slots, strict=False):
            assert self.content(pool.index, slot) == one.tokens

    def grow(self, one):
        """Computes some more tokens, after evicting for them; False if there is no room."""
        count = self.rng.randint(1, 9)
        more = one.goal[len(one.tokens) : len(one.tokens) + count]
        more += [self.rng.randrange(self.letters) for _ in range(count - len(more))]
        more = more[: 64 - len(one.tokens)]
        if not more:
            return False
        length = len(one.tokens)
        demand = self.memory.prices.growth(length, length + len(more))
        self.verify(one)
        if not self.evict(demand):
            return False
        self.memory.skip([one.request], [len(more)])
        one.tokens += more
        self.write(one)
        return True

    def evict(self, demand):
        allocator, before = self.allocator, self.records()
        is_possible = self.possible(demand)
        did_fit = allocator.fits(demand)
        assert self.cache.fits(demand) == is_possible
        self.freed_for = demand
        answer = self.cache.evict(demand)
        self.freed_for = None
        assert answer == is_possible == allocator.fits(demand)
        if did_fit or not is_possible:
            assert self.records() == before, "something went in vain"
        self.check()
        return answer

    def possible(self, demand):
        """Whether the demand fits beside what requests hold, by a recount of all of them."""
        held = [set() for _ in self.plan.sub_pools]
        for one in self.running:
            for pool in self.plan.token_pools:
                first = self.memory.prices.first_page(pool.lifetime, len(one.tokens))
                held[pool.index] |= set(one.request.ids[first:])
            for pool, slot in zip(self.plan.slot_pools, one.request.slots, strict=False):
                held[pool.index].add(slot)
        for match in self.holding:
            for pool in self.plan.token_pools:
                first = self.memory.prices.first_page(pool.lifetime, match.length)
                held[pool.index] |= set(match.ids[first:])
            for pool, slot in zip(self.plan.slot_pools, match.slots, strict=False):
                held[pool.index].add(slot)
        counts = tuple(len(ids) + more for ids, more in zip(held, demand, strict=True))
        return self.allocator.layout.fits(counts)

    def publish(self, one, is_leaving=False):
        if not one.tokens:
            return None
        published = self.cache.publish(
            one.tokens, one.request.ids, one.request.slots,
            namespace=one.namespace, is_leaving=is_leaving,
        )  # fmt: skip
        kept = self.records().get((one.namespace, tuple(one.tokens)))
        assert kept is not None, "the prefix is not there"
        assert published == (kept[2] is not None or not self.cache.tree.has_marks)
        if is_leaving:
            assert published, "keeping what is there already takes no room"
            self.end(one)
        self.check()
        return published

    def end(self, one):
        self.memory.free(one.request)
        self.running.remove(one)

    # What must be true.

    def records(self):
        """(namespace, tokens) -> (id, windows kept, mark) of every node."""
        return {
            (namespace, tokens): (node.id, tuple(need > 0 for need in node.needs), node.mark)
            for namespace, tokens, node in self.cache.tree.nodes()
        }

    def expect(self, tokens, namespace, most=None):
        """The longest place to resume, looked for everywhere."""
        records = {key[1]: value for key, value in self.records().items() if key[0] == namespace}
        most = max(0, len(tokens) - 1) if most is None else min(most, len(tokens))
        for length in range(most, 0, -1):
            for end in self.ends(length, len(tokens)):
                if self.resumes(records, tokens, length, end):
                    return length
        return 0

    def ends(self, length, known):
        """Lengths of the nodes whose page holds the last of `length` tokens."""
        page_end = -(-length // self.page_tokens) * self.page_tokens
        return range(length, min(page_end, known) + 1)

    def resumes(self, records, tokens, length, end):
        whole = end // self.page_tokens * self.page_tokens
        keys = [tuple(tokens[:at]) for at in range(self.page_tokens, whole + 1, self.page_tokens)]
        if end > whole:
            keys.append(tuple(tokens[:end]))
        if not all(key in records for key in keys):
            return False
        if self.plan.slot_pools and (end != length or records[keys[-1]][2] is None):
            return False
        for at, pool in enumerate(self.cache.tree.windows):
            first = self.memory.prices.first_page(pool.lifetime, length)
            if not all(records[key][1][at] for key in keys[first:]):
                return False
        return True

    def match(self, tokens, namespace=None, most=None):
        before = self.records()
        match = self.cache.match(tokens, namespace, most)
        assert match.length == self.expect(tokens, namespace, most)
        assert self.records() == before
        self.hits += match.length > 0
        for pool in self.plan.token_pools if match.length else ():
            first = self.memory.prices.first_page(pool.lifetime, match.length)
            for page in range(first, len(match.ids)):
                end = min(match.length, (page + 1) * self.page_tokens)
                held = self.content(pool.index, match.ids[page])
                assert held[:end] == tokens[:end], "a page holds the state of other tokens"
        for pool, slot in zip(self.plan.slot_pools, match.slots, strict=False):
            held = self.content(pool.index, slot)
            assert held == tokens[: match.length], "a slot holds the state of other tokens"
        return match

    def check(self):
        self.cache.check()
        self.memory.check()

    def finish(self):
        """Ends everything: only prefixes remain, and then nothing."""
        for one in list(self.running):
            self.end(one)
        self.check()
        reclaimable = self.cache.tree.reclaimable()
        assert reclaimable == tuple(self.allocator.held), "something beside prefixes is held"
        self.cache.clear()
        assert not any(self.allocator.held), "something is left after everything went"
        assert not self.cache.tree.node_count
        assert not list(self.cache.tree.nodes())
        self.check()
