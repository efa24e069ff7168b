"""What a model sees of its past, and where it leaves what it remembers.

Views are values: each call returns its result together with new views, and nothing is mutated, so a
model may run its layers under `lax.scan`. Token state is only read here; the step writes it once,
after the model has run.

    past pages  [first kept, position)     gathered through page ids and the mapping, masked by
                                           position
    fresh       [position, position + T)   the new tokens themselves, causal among each other

V1  Which past tokens count is decided by their position alone; what a stale or absent page holds
    never matters.
V2  Fresh values are cast to the stored dtype before attention uses them, so a chunk boundary
    changes nothing.
V3  After every read the arena and what was read are tied, so that XLA never copies the arena to
    keep an old value.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from unimem_jax.errors import UsageError
from unimem_jax.pallas_kernels.paged_attention import Tokens, attend
from unimem_jax.plan import Plan, SubPool
from unimem_jax.spec import REQUEST, STORED_DTYPES, Lifetime, Part, PartKey, Site
from unimem_jax.store import PackedStore


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arena", "positions", "valid", "start", "pages", "first_page", "slots"],
    meta_fields=["store"],
)
@dataclass(frozen=True)
class Views:
    """The past of R requests, of which each has up to T new tokens in this step.

    Attributes:
      arena: uint32[granules, 32].
      positions: int32[R, T], position of each new token in its request.
      valid: bool[R, T]; padding tokens are a suffix of a row.
      start: bool[R], whether the row's request state starts from zeros.
      pages: per token sub-pool index, int32[R, C] addresses of the pages that its attention reads.
      first_page: per token sub-pool index, int32[R], the page number (in the request) of column 0.
      slots: per state sub-pool index, int32[R] slot addresses.
    """

    store: PackedStore
    arena: Array
    positions: Array
    valid: Array
    start: Array
    pages: dict[int, Array]
    first_page: dict[int, Array]
    slots: dict[int, Array]

    @property
    def plan(self) -> Plan:
        """The layout that these views read."""
        return self.store.plan

    def attend(
        self, site: Site, query: Array, key: Array, value: Array, *,
        scale: float, sinks: Array | None = None, soft_cap: float | None = None,
    ) -> tuple[Array, "Views"]:  # fmt: skip
        """Attention of new tokens over their past at `site` and over each other.

        Args:
          site: owner of the parts "key" [Hk, D] and "value" [Hk, Dv]; its lifetime gives the
            window.
          query: [R, T, Hq, D]; query head h reads key head h // (Hq // Hk).
          key, value: [R, T, Hk, D], [R, T, Hk, Dv] of the new tokens.
          scale, sinks, soft_cap: as in `pallas_kernels.paged_attention.attend`.
        Returns:
          [R, T, Hq, Dv] in the dtype of `query`, and the views to go on with.
        Raises:
          UsageError: if the site declared no such parts, or keys and values that are not kept
            alike, token by token.
        Cost: reads the pages in `pages` once for keys and once for values.
        """
        pool, key_lane = self.plan.locate((site, "key"))
        _, value_lane = self.plan.locate((site, "value"))
        fresh = _as_stored(key_lane.part, value_lane.part, key, value)
        limit = pool.lifetime.tokens or None
        past = mask = None
        if self.pages[pool.index].shape[1]:
            addresses = self.pages[pool.index]
            past = Tokens(
                self.store.read_pages(self.arena, (site, "key"), addresses),
                self.store.read_pages(self.arena, (site, "value"), addresses),
            )
            mask = self._past_mask(pool, past.key.shape[1])
        mixed = attend(
            query, fresh, self.valid, past, mask,
            scale=scale, window=limit, sinks=sinks, soft_cap=soft_cap,
        )  # fmt: skip
        arena, mixed = lax.optimization_barrier((self.arena, mixed))
        return mixed, replace(self, arena=arena)

    def past(self, site: Site, name: str) -> tuple[Array, Array, "Views"]:
        """Past entries of any token part, for attention of a model's own making.

        Returns:
          [R, S, *shape] in the stored dtype; bool[R, 1 or T, S], which of them each new token sees:
          what it does not see can be anything, NaN too; and the views to go on with. With a stride
          an entry is seen where the last of its tokens is, once that was in an earlier step.
        Raises:
          UsageError: the site declared no such part, or it is request state.
        Cost: reads the part's lane of the pages in `pages` once.
        """
        pool, lane = self.plan.locate((site, name))
        _require_per_token(lane.part)
        found = self.store.read_pages(self.arena, (site, name), self.pages[pool.index])
        arena, found = lax.optimization_barrier((self.arena, found))
        return found, self._past_mask(pool, found.shape[1]), replace(self, arena=arena)

    def read(self, site: Site, name: str) -> tuple[Array, "Views"]:
        """Request state [R, *shape]; zeros for rows that start. Second result: the views to go on
        with.
        """
        pool, _ = self.plan.locate((site, name))
        found = self.store.read_state(self.arena, (site, name), self._slots(pool))
        start = self.start.reshape(-1, *(1,) * (found.ndim - 1))
        found = jnp.where(start, jnp.zeros_like(found), found)
        arena, found = lax.optimization_barrier((self.arena, found))
        return found, replace(self, arena=arena)

    def write(self, site: Site, name: str, value: Array) -> "Views":
        """Replaces request state [R, *shape], in place in the arena; padding rows are dropped."""
        pool, _ = self.plan.locate((site, name))
        arena = self.store.write_state(self.arena, (site, name), self._slots(pool), value)
        return replace(self, arena=arena)

    def select(self, hidden: Array) -> Array:
        """[R, T, H] -> [R, H]: each row's last valid token (its first one, if none is valid)."""
        last = jnp.maximum(self.valid.sum(axis=1, dtype=jnp.int32) - 1, 0)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]

    def _slots(self, pool: SubPool) -> Array:
        _require_running(pool.lifetime)
        return self.slots[pool.index]

    def _past_mask(self, pool: SubPool, past: int) -> Array:
        """bool[R, 1 or T, past]: which past entries each new token sees (V1)."""
        first = self.first_page[pool.index] * self.plan.page_tokens
        last = (np.arange(past, dtype=np.int32) + 1) * pool.stride - 1  # token of each entry
        at = (first[:, None] + last[None, :])[:, None, :]
        seen = at < self.positions[:, :1, None]
        if pool.lifetime.tokens:
            seen = seen & (at > self.positions[:, :, None] - pool.lifetime.tokens)
        return seen


@partial(
    jax.tree_util.register_dataclass, data_fields=["positions", "valid"], meta_fields=["parts"]
)
@dataclass(frozen=True)
class FreshViews:
    """Views of requests that have no past: whole sequences, for training and for checking.

    State starts from zeros and is not kept; `select` keeps every token.
    """

    parts: tuple[Part, ...] = field(repr=False)
    positions: Array
    valid: Array

    @classmethod
    def of(cls, parts: Iterable[Part], lengths: Array, tokens: int) -> "FreshViews":
        """Views of R sequences of `lengths` (int32[R]) tokens each, padded to `tokens`."""
        at = jnp.arange(tokens, dtype=jnp.int32)[None, :]
        positions = jnp.broadcast_to(at, (lengths.shape[0], tokens))
        return cls(tuple(parts), positions, at < lengths[:, None])

    def attend(
        self, site: Site, query: Array, key: Array, value: Array, *,
        scale: float, sinks: Array | None = None, soft_cap: float | None = None,
    ) -> tuple[Array, "FreshViews"]:  # fmt: skip
        """As `Views.attend`, over the new tokens alone."""
        part = self._part((site, "key"))
        fresh = _as_stored(part, self._part((site, "value")), key, value)
        limit = part.lifetime.tokens or None
        mixed = attend(
            query, fresh, self.valid, scale=scale, window=limit, sinks=sinks, soft_cap=soft_cap
        )
        return mixed, self

    def past(self, site: Site, name: str) -> tuple[Array, Array, "FreshViews"]:
        """No entries: [R, 0, *shape] and bool[R, 1, 0]; errors as `Views.past`."""
        part, rows = self._part((site, name)), self.valid.shape[0]
        _require_per_token(part)
        none = jnp.zeros((rows, 0, *part.shape), STORED_DTYPES[part.dtype])
        return none, jnp.zeros((rows, 1, 0), jnp.bool_), self

    def read(self, site: Site, name: str) -> tuple[Array, "FreshViews"]:
        """Zeros [R, *shape]."""
        part = self._running((site, name))
        return jnp.zeros((self.valid.shape[0], *part.shape), STORED_DTYPES[part.dtype]), self

    def write(self, site: Site, name: str, value: Array) -> "FreshViews":
        """Checks the shape and keeps nothing."""
        part = self._running((site, name))
        if value.shape[1:] != part.shape:
            raise UsageError(f"{site}.{name} is {part.shape} per request, not {value.shape[1:]}")
        return self

    def select(self, hidden: Array) -> Array:
        """All tokens, unchanged."""
        return hidden

    def _running(self, key: PartKey) -> Part:
        part = self._part(key)
        _require_running(part.lifetime)
        return part

    def _part(self, key: PartKey) -> Part:
        for part in self.parts:
            if part.key == key:
                return part
        raise UsageError(f"no part {key[1]!r} was declared at site {key[0]}")


def _require_running(lifetime: Lifetime) -> None:
    if lifetime != REQUEST:
        raise UsageError(f"a step reads and writes running state, not {lifetime}")


def _require_per_token(part: Part) -> None:
    if part.lifetime.is_request:
        raise UsageError(f"{part.site}.{part.name} is request state; `read` gives it, not `past`")


def _as_stored(key_part: Part, value_part: Part, key: Array, value: Array) -> Tokens:
    """Fresh keys and values in their stored dtypes; UsageError if their pages are not the same."""
    kept = {(part.lifetime, part.stride) for part in (key_part, value_part)}
    if len(kept) > 1 or key_part.stride > 1:
        raise UsageError(
            f"attention at {key_part.site} needs a key and a value of one lifetime and stride 1, "
            f"not {key_part.lifetime} by {key_part.stride} and {value_part.lifetime} by "
            f"{value_part.stride}; `past` reads them one by one"
        )
    return Tokens(
        key.astype(STORED_DTYPES[key_part.dtype]), value.astype(STORED_DTYPES[value_part.dtype])
    )
