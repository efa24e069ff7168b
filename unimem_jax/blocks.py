"""Memory in blocks of one size, as vLLM's: a plan for comparison, over the same allocator.

All layers of one kind (whole context, a window, request state) are cut into groups of as many as
the rarest kind has, the last one padded; if no kind has 1.25 times as many as another, the most
frequent one sets the size. A block holds what one group keeps of some tokens, or one group's
running state: the tokens of a block are the fewest whole pages whose bytes reach the state's, and
what the state does not fill stays empty. A request holds one block of state for each group of such
layers. One block is set aside.

    block    [layers of a group] x [bytes of a layer for the tokens of a block]
    request  groups of state x 1 + groups of context x ceil(T / tokens) + windows alike

Since every unit is a whole number of blocks, any free block serves any kind: capacity is a sum, as
in a pool of blocks, and nothing there would have to move. Moves of such a plan mean nothing.

Source: vLLM 0.33, `kv_cache_utils.py` (groups) and `platforms/interface.py` (tokens of a block).
"""

from collections import defaultdict
from collections.abc import Iterable

from unimem_jax.errors import UsageError
from unimem_jax.plan import Plan, plan
from unimem_jax.spec import Lifetime, Part, Site

NEARLY_AS_MANY = 1.25  # layers of the most frequent kind for one of the rarest


def block_plan(parts: Iterable[Part], arena_bytes: int, page_tokens: int = 16) -> Plan:
    """The plan of an arena that is a pool of equal blocks.

    Args:
      parts: what the model declares.
      arena_bytes: bytes of all blocks.
      page_tokens: tokens of a block where no request state is larger.
    Raises:
      UsageError: as `plan`; token layers of several sizes, named request state or strides, for
        which nobody says how blocks look; an arena of less than one block of everything.
    """
    layers: defaultdict[Lifetime, defaultdict[Site, int]] = defaultdict(lambda: defaultdict(int))
    for part in parts:
        if part.lifetime.name or part.stride > 1:
            raise UsageError(f"equal blocks have no place for {part.site}.{part.name}")
        layers[part.lifetime][part.site] += part.byte_count
    sizes = {size for kind, sites in layers.items() if not kind.is_request
             for size in sites.values()}  # fmt: skip
    if len(sizes) != 1:
        raise UsageError(f"equal blocks need token layers of one size, not {sorted(sizes)} bytes")
    (token_bytes,) = sizes
    state_bytes = max((size for kind, sites in layers.items() if kind.is_request
                       for size in sites.values()), default=1)  # fmt: skip
    tokens = page_tokens * -(-state_bytes // (page_tokens * token_bytes))
    counts = [len(sites) for sites in layers.values()]
    group = max(counts) if max(counts) < NEARLY_AS_MANY * min(counts) else min(counts)
    block_bytes = group * token_bytes * tokens
    equal = [
        Part(Site(0), str(kind), (groups * block_bytes // per,), "uint8", kind)
        for kind, sites in layers.items()
        for groups, per in [(-(-len(sites) // group), 1 if kind.is_request else tokens)]
    ]
    blocks = arena_bytes // block_bytes - 1
    if blocks < 1:
        raise UsageError(f"{arena_bytes:,} bytes are not two blocks of {block_bytes:,}")
    return plan(equal, blocks * block_bytes, tokens)
