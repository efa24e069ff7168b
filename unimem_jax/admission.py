"""Who gets memory in a step, and from what: plain, or resuming from kept prefixes.

What it is: the hands of the scheduler's decisions. It frees what the retracted hold, makes room,
opens what is admitted and keeps prefixes. What it does not do: it runs no program, and decides
nothing but where prefixes are kept.

    tokens  [0, start)          kept by the cache, shared or copied when the request was admitted
            [start, computed)   computed by the request itself
            [0, kept)           published: others may resume in it

Y1  A prefix is published after exactly the tokens that dispatched steps consumed, when the request
    holds just what one resuming there holds; so it costs no bytes but a copy of running state.
Y2  A request that is admitted finds what it resumes from, whatever went to make room for it.
Y3  If nothing runs and what waits does not fit beside the prefix that it would resume from, it
    begins without one: a cache keeps nobody waiting for ever.
"""

from collections.abc import Sequence

import numpy as np

from unimem_jax.allocator import number_of
from unimem_jax.errors import require_positive
from unimem_jax.memory import Memory
from unimem_jax.plan import SubPool
from unimem_jax.prefix import NO_MATCH, PrefixCache
from unimem_jax.price import Demand, add, less
from unimem_jax.queue import Queue, StepPlan
from unimem_jax.requests import NO_PREFIX, Prefix
from unimem_jax.schedule import Fits, Limits, Reuse, room, schedule
from unimem_jax.serving import Served

CHECKPOINT_TOKENS = 256  # fewest tokens that a checkpoint of running state saves


class Admission:
    """Requests that share nothing.

    Args:
      memory: of all requests.
    Attributes:
      hit_tokens: tokens that prefixes saved.
      recomputed_tokens: computed before and lost by a retraction.
    """

    def __init__(self, memory: Memory):
        self.memory = memory
        self.hit_tokens = self.recomputed_tokens = 0

    def decide(self, queue: Queue[Served], limits: Limits) -> StepPlan[Served]:
        """The next step. Changes nothing."""
        return schedule(queue, self.memory.prices, room(self.memory), limits)

    def enact(self, decided: StepPlan[Served]) -> None:
        """Frees what the retracted hold and opens what is admitted."""
        self._take_back(decided.retracted)
        for served in decided.admitted:
            self._open(served, 0)

    def _take_back(self, retracted: Sequence[Served]) -> None:
        for served in retracted:
            served.lost = served.computed
            self.release(served)

    def _open(self, served: Served, start: int, prefix: Prefix = NO_PREFIX) -> None:
        served.request = self.memory.open(served.words, prefix=prefix)
        served.computed = served.kept = start
        self.recomputed_tokens += max(0, served.lost - start)
        served.lost = 0

    def keep(self, work: Sequence[tuple[Served, int]]) -> None:
        """Notes what a step has computed."""

    def holds_back(self, served: Served) -> bool:
        """Whether a sample waits, since the first one of its prompt reads that for all of them."""
        return False

    def check_idle(self) -> None:
        """Verifies that nothing is held, now that no request is left. Raises InvariantError."""
        self.memory.check_idle()

    def release(self, served: Served) -> None:
        """Frees a request's memory, if it has any."""
        if served.request is not None:
            self.memory.free(served.request)
            served.request = None


class PrefixAdmission(Admission, Reuse[Served]):
    """Requests that resume from prefixes which others computed, or they themselves.

    Args:
      memory: of all requests; none of them holds a commitment.
      checkpoint_tokens: fewest tokens that a checkpoint saves. One is taken where a prompt leaves
        what is kept, before a prompt's last token, and every so many tokens of a prompt. What a
        request leaves behind is kept whole, and takes no copy.
    Raises:
      UsageError: a number of tokens that is not a positive int.
    """

    def __init__(self, memory: Memory, checkpoint_tokens: int = CHECKPOINT_TOKENS):
        super().__init__(memory)
        require_positive(checkpoint_tokens=checkpoint_tokens)
        self.checkpoint_tokens = checkpoint_tokens
        self.cache = PrefixCache(memory.allocator, memory.prices)

    def decide(self, queue: Queue[Served], limits: Limits) -> StepPlan[Served]:
        """The next step; what only the cache holds counts as free."""
        prices, fits = self.memory.prices, self._room()
        decided = schedule(queue, prices, fits, limits, self)
        # Y3: beside the prefix it needs room for copies of what changes, and may not have it.
        return decided if decided.work else schedule(queue, prices, fits, limits)

    def _room(self) -> Fits:
        """`fits` beside what requests hold. What the cache alone holds is counted once."""
        layout, held = self.memory.allocator.layout, self.memory.allocator.held
        least: list[Demand] = []

        def fits(demand: Demand) -> bool:
            if layout.fits(held, demand):
                return True
            if not least:
                least.append(self.held())
            return layout.fits(least[0], demand)

        return fits

    def start(self, generation: Served) -> int:
        """Tokens after which a request that waits would resume."""
        served, cache = generation, self.cache
        served.match = match = cache.match(served.tokens, served.namespace)
        last, pauses, least = match.length, [], self.checkpoint_tokens
        for at in (min(match.known, served.known - 1), served.known - 1):
            if cache.tree.has_marks and at - last >= (1 if served.followers else least):
                pauses.append(at)
                last = at
        served.pauses = tuple(pauses)
        return match.length

    def until(self, generation: Served, computed: int) -> int:
        """Where its next chunk ends at the latest: a prefix is kept there."""
        return next((at for at in generation.pauses if at > computed), generation.known)

    def shared(
        self, generation: Served, retracted: Sequence[Served], admitted: Sequence[Served]
    ) -> Demand:
        """Units of a request that others use too, so that it alone neither takes nor frees them;
        of one that waits, less what has to stay while it is copied.
        """
        is_running = generation.request is not None
        counts = [0] * len(self.memory.plan.sub_pools)
        for pool in self.memory.plan.token_pools:
            numbers = self._pages(generation, pool)
            sharers = self.memory.allocator.tables[pool.index].sharers[numbers]
            users = sharers - self.cache.tree.kept[pool.index][numbers] - int(is_running)
            for gone in retracted:
                users -= np.isin(numbers, self._pages(gone, pool))
            for come in admitted:
                users += np.isin(numbers, self._pages(come, pool))
            counts[pool.index] = int(np.count_nonzero(users > 0))
        copies = self.memory.copies(generation.match.length)
        return tuple(counts) if is_running else less(counts, copies)

    def _pages(self, served: Served, pool: SubPool) -> np.ndarray:
        """Numbers of the pages that a request holds, or will share when it resumes."""
        if served.request is not None:
            ids = served.request.mapped(pool.index)
        else:
            match, plan = served.match, self.memory.plan
            first = self.memory.prices.first_page(pool.lifetime, match.length)
            ids = list(match.ids[first : match.length // plan.page_tokens])
        return number_of(np.asarray(ids, np.int64))

    def held(self) -> Demand:
        """Units that requests hold; what the cache alone keeps is not theirs."""
        return less(self.memory.allocator.held, self.cache.tree.reclaimable())

    def enact(self, decided: StepPlan[Served]) -> None:
        """As of `Admission`, making room for all that the step takes (Y2)."""
        prices = self.memory.prices
        begins = decided.starts or (0,) * len(decided.admitted)
        starts = {id(served): start for served, start in zip(decided.admitted, begins, strict=True)}
        with self.cache.held([served.match for served in decided.admitted if starts[id(served)]]):
            self._take_back(decided.retracted)
            demand: Demand = (0,) * len(self.memory.plan.sub_pools)
            for served, count in decided.work:
                start = starts.get(id(served), served.computed)
                if prices.pages(start) != prices.pages(start + count):
                    demand = add(demand, prices.growth(start, start + count))
            for start in starts.values():
                demand = add(demand, self.memory.copies(start))
            self.cache.evict(demand)
            for served in decided.admitted:
                start = starts[id(served)]
                match = served.match if start else NO_MATCH
                self._open(served, start, Prefix(start, match.ids, match.slots))
                self.cache.use(match, served.known)
                self.hit_tokens += start
                served.match = NO_MATCH

    def keep(self, work: Sequence[tuple[Served, int]]) -> None:
        """Publishes prefixes where requests have come to a place that pays (Y1)."""
        for served, count in work:
            computed = served.computed
            if count == 1 and served.kept >= served.prompt_tokens:
                continue  # nearly every step of nearly every request
            is_due = computed in served.pauses
            if computed < served.known:
                is_due |= computed - served.kept >= self.checkpoint_tokens
            elif not self.cache.tree.states:
                is_due = True  # the prompt is read, and keeping it takes no copy
            if is_due:
                self._publish(served, is_leaving=False)
                served.kept = computed

    def holds_back(self, served: Served) -> bool:
        """As of `Admission`: until the first sample has read all of the prompt but a token."""
        leader = served.leader
        return leader is not None and leader.computed < leader.prompt_tokens - 1

    def check_idle(self) -> None:
        """As of `Admission`, but for what the cache keeps."""
        self.memory.check_idle(self.cache.tree.reclaimable())

    def release(self, served: Served) -> None:
        """Frees a request's memory and keeps the prefix that it has computed."""
        if served.request is not None and served.computed:
            self._publish(served, is_leaving=True)
        super().release(served)

    def _publish(self, served: Served, is_leaving: bool) -> None:
        request = served.request
        assert request is not None
        self.cache.publish(
            served.tokens[: served.computed], request.ids, request.slots,
            namespace=served.namespace, is_leaving=is_leaving,
        )  # fmt: skip
