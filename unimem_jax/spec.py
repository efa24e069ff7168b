"""What a model remembers, in words that need no JAX.

A model declares parts: one part is one thing one layer keeps (key rows, value rows, a convolution
tail, a recurrent state). Its lifetime says for how long: the whole context, a window of tokens, or
one request. This module only describes and validates; `plan` turns parts into bytes.

A layer that reads the keys of an earlier layer declares none. A layer that runs several times
declares the parts of each visit, `Site(layer, visit)`.
"""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from unimem_jax.errors import UsageError, plain_int

STORED_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
        "float4_e2m1fn", "int8", "uint8", "int32", "uint32", "int4", "uint4",
    )
}  # fmt: skip
MOST_TOKENS = 2**31 - 1  # of a window: positions are int32 on the device
PAIRED_DTYPES = ("float4_e2m1fn", "int4", "uint4")  # two elements a byte, the first in its low bits


@dataclass(frozen=True, slots=True, order=True)
class Lifetime:
    """How long a part is kept: use `CONTEXT`, `REQUEST`, `window(tokens)` or `request(name)`.

    Attributes:
      kind: "context" (one entry per token, all tokens), "window" (one entry per token, the last
        `tokens` of them, the token itself included) or "request" (one entry per request).
      tokens: window length in tokens; 0 for the other kinds.
      name: of request state beside the running state; "" for everything else.
    Raises:
      UsageError: for another kind, a window that is not a positive int32, a name that is not an
        identifier, or tokens or a name of another kind.
    """

    kind: str
    tokens: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("context", "window", "request"):
            raise UsageError(f"a lifetime is CONTEXT, REQUEST or window(n), not {self.kind!r}")
        if self.kind == "window":
            tokens = plain_int(self.tokens, "a window is a positive number of tokens")
            if tokens > MOST_TOKENS:
                raise UsageError(f"a window is at most {MOST_TOKENS} tokens, not {tokens!r}")
            object.__setattr__(self, "tokens", tokens)
        elif self.tokens != 0:
            raise UsageError(f"only a window counts tokens: {self.kind} with {self.tokens!r}")
        if self.name != "":
            if self.kind != "request":
                raise UsageError(f"only request state has a name: {self.kind} with {self.name!r}")
            _require_identifier(self.name, "the name of request state")

    def __str__(self) -> str:
        """The name of its sub-pool: "context", "window_128", "request", "request_checkpoint"."""
        if self.kind == "window":
            return f"window_{self.tokens}"
        return f"{self.kind}_{self.name}" if self.name else self.kind

    @property
    def is_request(self) -> bool:
        """Whether the part is kept once per request and not once per token."""
        return self.kind == "request"

    def first_kept(self, length: int) -> int:
        """First token position that a query at position `length` still sees."""
        return max(0, length + 1 - self.tokens) if self.kind == "window" else 0


CONTEXT = Lifetime("context")
REQUEST = Lifetime("request")


def window(tokens: int) -> Lifetime:
    """The last `tokens` tokens: the query at position q sees keys max(0, q - tokens + 1) .. q.

    Raises:
      UsageError: if `tokens` is not a positive int32.
    """
    return Lifetime("window", tokens)


def request(name: str) -> Lifetime:
    """Request state in a sub-pool of its own: checkpoints, for example.

    A request takes a slot of `REQUEST` with its first token, and never one of these by itself:
    whoever keeps such state asks the allocator for its slots and gives them back.

    Raises:
      UsageError: if `name` is not an identifier.
    """
    _require_identifier(name, "the name of request state")
    return Lifetime("request", name=name)


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """Who owns a part: a layer, its visit (a layer run twice owns two sites) and a stream within
    it.

    Raises:
      UsageError: a layer or visit that is no int of 0 or more, a stream that is no text.
    """

    layer: int
    visit: int = 0
    stream: str = ""

    def __post_init__(self) -> None:
        for name in ("layer", "visit"):
            number = plain_int(getattr(self, name), f"a {name} is counted from 0", least=0)
            object.__setattr__(self, name, number)
        if not isinstance(self.stream, str):
            raise UsageError(f"a stream is a text, not {self.stream!r}")

    def __str__(self) -> str:
        visit = f"v{self.visit}" if self.visit else ""
        return f"L{self.layer}{visit}{'.' + self.stream if self.stream else ''}"


type PartKey = tuple[Site, str]


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that one site remembers per token, or per request.

    Attributes:
      site: the owner.
      name: what it is ("key", "value", "conv", "state", ...); unique within the site.
      shape: shape of one entry of it, in elements.
      dtype: stored element type, a name from `STORED_DTYPES`; 4-bit ones lie two in a byte.
      lifetime: `CONTEXT`, `window(tokens)`, `REQUEST` or `request(name)`.
      stride: tokens that share one entry (pooled index keys); 1 for request state.
      draft: whether a draft model owns it; draft lanes lie behind all others of an entry.
    Raises:
      UsageError: for a site, shape or lifetime of another type, an empty or non-positive shape, an
        unknown dtype, an odd number of 4-bit elements, a name that is not an identifier, or a
        stride of request state.
    """

    site: Site
    name: str
    shape: tuple[int, ...]
    dtype: str
    lifetime: Lifetime
    stride: int = 1
    draft: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.site, Site):
            raise UsageError(f"part {self.name}: a site is a unimem_jax.Site, not {self.site!r}")
        _require_identifier(self.name, "a part's name")
        where = f"part {self.site}.{self.name}"
        if not isinstance(self.shape, tuple) or not self.shape:
            raise UsageError(
                f"{where}: a shape is a tuple of one or more positive ints, not {self.shape!r}"
            )
        rule = f"{where}: each size of the shape {self.shape!r} is a positive int"
        object.__setattr__(self, "shape", tuple(plain_int(n, rule) for n in self.shape))
        if not isinstance(self.dtype, str) or self.dtype not in STORED_DTYPES:
            raise UsageError(
                f"{where}: cannot store {self.dtype!r}; stored are {', '.join(STORED_DTYPES)}"
            )
        if self.dtype in PAIRED_DTYPES and self.elements % 2:
            raise UsageError(
                f"{where}: {self.dtype} lies two in a byte, and the shape {self.shape!r} has "
                f"{self.elements} elements; pad it to an even number"
            )
        if not isinstance(self.lifetime, Lifetime):
            raise UsageError(
                f"{where}: lifetime is CONTEXT, REQUEST, request(name) or window(n), "
                f"not {self.lifetime!r}"
            )
        stride = plain_int(self.stride, f"{where}: a stride is a positive number of tokens")
        if stride > 1 and self.lifetime.is_request:
            raise UsageError(f"{where}: request state has no tokens to stride over: {stride}")
        object.__setattr__(self, "stride", stride)
        if not isinstance(self.draft, bool):
            raise UsageError(f"{where}: draft is True or False, not {self.draft!r}")

    @property
    def key(self) -> PartKey:
        """`(site, name)`, by which views and fresh parts name it."""
        return (self.site, self.name)

    @property
    def byte_count(self) -> int:
        """Bytes of one entry of this part, without padding."""
        return self.elements * element_bits(self.dtype) // 8

    @property
    def elements(self) -> int:
        """Elements of one entry of this part."""
        return math.prod(self.shape)


def element_bits(dtype: str) -> int:
    """Bits of one stored element of a dtype in `STORED_DTYPES`."""
    return 4 if dtype in PAIRED_DTYPES else 8 * STORED_DTYPES[dtype].itemsize


def _require_identifier(name: object, what: str) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(f"{what} is an identifier, not {name!r}")
