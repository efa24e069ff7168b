"""Turns parts and a number of bytes into a layout: sub-pools, entries, lanes, bands.

A plan is a pure value: the same parts, bytes and page size always give the same plan. It allocates
nothing and knows nothing of requests.

    byte 0                                                                     arena_bytes
    | low end: largest slot ->   ...   <- floats, largest unit first ->   ...   <- high end: context
                                                                                |

P1  The arena is a whole number of entries of every token sub-pool, so each sub-pool's view is a
    free reshape.
P2  An entry is a multiple of 128 bytes; a part of 128 bytes or more starts at a multiple of 128, a
    smaller one at 16.
P3  A slot is a multiple of 4 KiB; each part in it starts at a multiple of 512 bytes, one row of its
    view.
P4  Parts of one sub-pool never overlap; all padding is counted in `padding_bytes`.
P5  Draft lanes start at a multiple of 128 bytes behind all others: parts of a draft model move none
    of the target's lanes.
P6  A sub-pool is all parts of one lifetime and one stride. A page spans the same tokens in every
    sub-pool; with stride r it has one entry for r of them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from unimem_jax.bands import Geometry, fits
from unimem_jax.errors import UsageError, plain_int
from unimem_jax.pads import choose_pads
from unimem_jax.spec import REQUEST, Lifetime, Part, PartKey

GRANULE_BYTES = 128  # one row of the arena
GRANULE_WORDS = 32
SLOT_ROW_BYTES = 512  # slots are read as rows of 128 words
SLOT_BYTES = 4096  # slots are multiples of this
SMALL_PART_BYTES = 16  # alignment of parts under a granule
MAX_GRANULES = 2**31  # device row numbers are int32, and so is the one past the last

type Kind = tuple[Lifetime, int]  # what the parts of one sub-pool share: lifetime and stride


@dataclass(frozen=True, slots=True)
class Lane:
    """Where one part lies inside its entry, in 32-bit words."""

    part: Part
    offset_words: int
    words: int


@dataclass(frozen=True, slots=True)
class SubPool:
    """All units of one lifetime and stride.

    Attributes:
      index: position in physical order, 0 at byte 0.
      name: "request", "request_checkpoint", "window_128", "context", "context_by_16" (a stride).
      stride: tokens that share one entry; 1 for request state.
      end: "low", "float" or "high".
      entry_words: words of one packed entry (of one slot for request state).
      unit_entries: entries of one page, page_tokens / stride; 1 in a slot.
      unit_granules: granules of one page or slot.
      unit_count: addresses 0 .. unit_count - 1 exist; `unit_count` itself is "absent".
      padding_bytes: bytes of one entry that no part uses.
    """

    index: int
    name: str
    lifetime: Lifetime
    stride: int
    end: str
    lanes: tuple[Lane, ...]
    entry_words: int
    unit_entries: int
    unit_granules: int
    unit_count: int
    padding_bytes: int

    @property
    def is_slot(self) -> bool:
        """Whether a unit is one request's state and not a page of tokens."""
        return self.lifetime.is_request

    @property
    def is_running(self) -> bool:
        """Whether a request takes a slot with its first token: `REQUEST`, and no named state."""
        return self.lifetime == REQUEST

    @property
    def target_words(self) -> int:
        """Words of an entry before its draft lanes; all of them if there are none (P5)."""
        return next((lane.offset_words for lane in self.lanes if lane.part.draft), self.entry_words)

    @property
    def unit_bytes(self) -> int:
        """Bytes of one page or slot."""
        return self.unit_granules * GRANULE_BYTES


@dataclass(frozen=True)
class Plan:
    """The layout of one arena. Made by `plan`; prints itself as a table; `to_json` for programs."""

    sub_pools: tuple[SubPool, ...]
    page_tokens: int
    arena_granules: int
    requested_bytes: int

    @property
    def arena_bytes(self) -> int:
        """Bytes of the device buffer: `requested_bytes` rounded down by P1."""
        return self.arena_granules * GRANULE_BYTES

    @cached_property
    def token_pools(self) -> tuple[SubPool, ...]:
        """Sub-pools whose units are pages of tokens."""
        return tuple(pool for pool in self.sub_pools if not pool.is_slot)

    @cached_property
    def slot_pools(self) -> tuple[SubPool, ...]:
        """Sub-pools of which a request takes a slot with its first token: its running state.

        Named request state is not among them; its slots are asked for one by one.
        """
        return tuple(pool for pool in self.sub_pools if pool.is_running)

    @cached_property
    def id_count(self) -> int:
        """Number of page ids; every live id holds a page of the longest-lived token sub-pools."""
        longest = max(map(_reach, self.token_pools), default=None)
        return min((p.unit_count for p in self.token_pools if _reach(p) == longest), default=0)

    @cached_property
    def geometry(self) -> Geometry:
        """What the allocator needs to know of this plan."""
        return Geometry(
            arena_granules=self.arena_granules,
            unit_granules=tuple(pool.unit_granules for pool in self.sub_pools),
            ends=tuple(pool.end for pool in self.sub_pools),
            is_slot=tuple(pool.is_slot for pool in self.sub_pools),
            id_count=self.id_count,
        )

    @cached_property
    def _lanes(self) -> dict[PartKey, tuple[SubPool, Lane]]:
        return {lane.part.key: (pool, lane) for pool in self.sub_pools for lane in pool.lanes}

    def locate(self, key: PartKey) -> tuple[SubPool, Lane]:
        """Finds the sub-pool and lane of part `(site, name)`.

        Raises:
          UsageError: if the model declared no such part.
        """
        try:
            return self._lanes[key]
        except KeyError:
            site, name = key
            names = ", ".join(sorted(n for s, n in self._lanes if s == site)) or "none"
            raise UsageError(
                f"no part {name!r} was declared at site {site}; declared: {names}"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """The whole plan as plain numbers and strings."""
        return {
            "arena_bytes": self.arena_bytes,
            "requested_bytes": self.requested_bytes,
            "page_tokens": self.page_tokens,
            "sub_pools": [
                {
                    "name": pool.name, "end": pool.end, "unit": "slot" if pool.is_slot else "page",
                    "stride": pool.stride, "entry_bytes": pool.entry_words * 4,
                    "unit_bytes": pool.unit_bytes, "unit_count": pool.unit_count,
                    "padding_bytes": pool.padding_bytes,
                    "lanes": [
                        {
                            "site": str(lane.part.site), "part": lane.part.name,
                            "shape": list(lane.part.shape), "dtype": lane.part.dtype,
                            "draft": lane.part.draft, "offset_bytes": lane.offset_words * 4,
                            "bytes": lane.part.byte_count,
                        }
                        for lane in pool.lanes
                    ],
                }
                for pool in self.sub_pools
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        rows = [("sub-pool", "end", "unit", "parts", "entry", "padding", "unit size", "at most")]
        for pool in self.sub_pools:
            unit = "slot" if pool.is_slot else f"page of {self.page_tokens}"
            unit += f" by {pool.stride}" if pool.stride > 1 else ""
            rows.append((
                pool.name, pool.end, unit, str(len(pool.lanes)), size_text(pool.entry_words * 4),
                size_text(pool.padding_bytes), size_text(pool.unit_bytes), f"{pool.unit_count:,}",
            ))  # fmt: skip
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        table = "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        lost = size_text(self.requested_bytes - self.arena_bytes)
        return f"arena {size_text(self.arena_bytes)} ({lost} of the request unused)\n{table}"


def plan(parts: Iterable[Part], arena_bytes: int, page_tokens: int = 16) -> Plan:
    """Lays out one arena for everything a model remembers.

    Args:
      parts: what the model declares, `model.parts()`.
      arena_bytes: device bytes for the arena; rounded down, never up.
      page_tokens: tokens per page, the same for every token sub-pool.
    Returns:
      The plan; the same arguments give the same plan.
    Raises:
      UsageError: no parts, a part declared twice, sizes that are not positive ints, a stride that
        does not divide a page, an arena of more than 2^31 granules, or one too small for one page
        and one slot of everything (itemised).
    """
    arena_bytes = plain_int(arena_bytes, "arena_bytes is a positive int")
    page_tokens = plain_int(page_tokens, "page_tokens is a positive int")
    groups = _grouped(parts)
    if arena_bytes // GRANULE_BYTES > MAX_GRANULES:
        raise UsageError(
            f"an arena is at most {size_text(MAX_GRANULES * GRANULE_BYTES)} per device, "
            f"not {size_text(arena_bytes)}; shard it"
        )
    _refuse_strides(groups, page_tokens)
    made = _planned(groups, arena_bytes, page_tokens)
    if not _holds_one_of_each(made):
        raise UsageError(_too_small(made, groups))
    return made


def _planned(groups: dict[Kind, list[Part]], arena_bytes: int, page_tokens: int) -> Plan:
    """The plan of an arena of this size, however small."""
    layouts = {kind: _lay_out(group, kind[0].is_request) for kind, group in groups.items()}
    widths = {kind: width for kind, (_, width) in layouts.items()}
    token_kinds = [kind for kind in groups if not kind[0].is_request]
    granules = min(arena_bytes // GRANULE_BYTES, MAX_GRANULES - 1)
    pads, multiple = choose_pads([widths[kind] for kind in token_kinds], granules)
    granules = granules // multiple * multiple
    for kind, pad in zip(token_kinds, pads, strict=True):
        widths[kind] += pad
    entries = {kind: 1 if kind[0].is_request else page_tokens // kind[1] for kind in groups}
    units = {kind: width * entries[kind] for kind, width in widths.items()}
    pools = []
    for index, (kind, end) in enumerate(_order(units)):
        (lifetime, stride), lanes, width = kind, layouts[kind][0], widths[kind]
        used = sum(lane.part.byte_count for lane in lanes)
        pools.append(
            SubPool(
                index=index, name=_name(kind), lifetime=lifetime, stride=stride, end=end,
                lanes=lanes, entry_words=width * GRANULE_WORDS, unit_entries=entries[kind],
                unit_granules=units[kind], unit_count=granules // units[kind],
                padding_bytes=width * GRANULE_BYTES - used,
            )
        )  # fmt: skip
    return Plan(tuple(pools), page_tokens, granules, arena_bytes)


def size_text(size_bytes: float) -> str:
    """Bytes as a short text: 512 B, 24 KiB, 3.5 MiB; powers of 2 where no float holds them."""
    if abs(size_bytes) >= 1 << 1000:
        return f"2^{int(size_bytes).bit_length() - 1} B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.4g} TiB"


def _grouped(parts: Iterable[Part]) -> dict[Kind, list[Part]]:
    """The parts of each sub-pool, sorted by key, in whatever order they come."""
    if not isinstance(parts, Iterable):
        raise UsageError(f"parts are several unimem_jax.Part values, not {type(parts).__name__}")
    declared: dict[PartKey, Part] = {}
    for part in parts:
        if not isinstance(part, Part):
            raise UsageError(f"parts are unimem_jax.Part values, not {type(part).__name__}")
        if part.key in declared:
            raise UsageError(f"part {part.site}.{part.name} is declared twice")
        declared[part.key] = part
    if not declared:
        raise UsageError("a plan needs at least one part; the model declared none")
    groups: dict[Kind, list[Part]] = {}
    for key in sorted(declared):
        part = declared[key]
        groups.setdefault((part.lifetime, part.stride), []).append(part)
    return groups


def _refuse_strides(groups: dict[Kind, list[Part]], page_tokens: int) -> None:
    for (_, stride), (part, *_) in groups.items():
        if page_tokens % stride:
            raise UsageError(
                f"part {part.site}.{part.name} has one entry for {stride} tokens, so page_tokens "
                f"is a multiple of {stride}, not {page_tokens}; the next is "
                f"{-(-page_tokens // stride) * stride}"
            )


def _lay_out(parts: list[Part], is_request: bool) -> tuple[tuple[Lane, ...], int]:
    """Packs parts side by side, draft parts last (P5); width in granules (P2, P3).

    Of the target's parts and of the draft's, the small ones of all sites come last: behind each
    site's own they would cost every layer the rest of a granule.
    """
    lanes: list[Lane] = []
    at = 0
    for part in sorted(parts, key=lambda p: (p.draft, p.byte_count < GRANULE_BYTES, p.site)):
        is_first_draft = part.draft and not (lanes and lanes[-1].part.draft)
        if is_request:
            step = SLOT_ROW_BYTES
        elif part.byte_count >= GRANULE_BYTES or is_first_draft:
            step = GRANULE_BYTES
        else:
            step = SMALL_PART_BYTES
        at = -(-at // step) * step
        lanes.append(Lane(part, at // 4, -(-part.byte_count // 4)))
        at += part.byte_count
    step = SLOT_BYTES if is_request else GRANULE_BYTES
    return tuple(lanes), -(-at // step) * step // GRANULE_BYTES


def _holds_one_of_each(made: Plan) -> bool:
    # Not a sum of sizes: the units lie on grids of their own.
    return all(pool.unit_count for pool in made.sub_pools) and fits(
        made.geometry, (1,) * len(made.sub_pools)
    )


def _too_small(made: Plan, groups: dict[Kind, list[Part]]) -> str:
    """What one of everything takes, and a round size that holds it."""
    need = ", ".join(
        f"one {'slot' if pool.is_slot else 'page'} of {pool.name} {size_text(pool.unit_bytes)}"
        for pool in made.sub_pools
    )
    least, largest = sum(pool.unit_bytes for pool in made.sub_pools), MAX_GRANULES * GRANULE_BYTES
    sizes = (  # eighths of powers of two, which `size_text` writes exactly
        eighths << power >> 4
        for power in range(least.bit_length(), largest.bit_length() + 1)
        for eighths in range(8, 16)
    )
    enough = next(
        (
            f"{size_text(size)} are enough"
            for size in sizes
            if made.requested_bytes < size <= largest
            and _holds_one_of_each(_planned(groups, size, made.page_tokens))
        ),
        f"more than the {size_text(largest)} of one device; shard it",
    )
    return f"an arena of {size_text(made.requested_bytes)} is too small: {need}; {enough}"


def _reach(pool: SubPool) -> float:
    return math.inf if pool.lifetime.kind == "context" else pool.lifetime.tokens


def _name(kind: Kind) -> str:
    lifetime, stride = kind
    return f"{lifetime}_by_{stride}" if stride > 1 else str(lifetime)


def _order(units: dict[Kind, int]) -> list[tuple[Kind, str]]:
    """Physical order, low end first: the rule is in docs/LAYOUT.md."""
    by_size = sorted(units, key=lambda kind: (-units[kind], _name(kind)))
    states = [kind for kind in by_size if kind[0].is_request]
    windows = sorted(
        (kind for kind in by_size if kind[0].kind == "window"), key=lambda kind: -kind[0].tokens
    )
    contexts = [kind for kind in by_size if kind[0].kind == "context"]
    low = (states or windows or contexts)[0]
    high = next((kind for kind in (*contexts, *windows, *states) if kind != low), None)
    if high is None:
        return [(low, "low")]
    floats = [kind for kind in by_size if kind not in (low, high)]
    return [(low, "low"), *((kind, "float") for kind in floats), (high, "high")]
