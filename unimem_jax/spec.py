"""What a model remembers, in words that need no JAX.

A model declares parts: one part is one thing one layer keeps (key rows, value rows, a convolution
tail, a recurrent state). Its lifetime says for how long: the whole context, a window of tokens, or
one request. This module only describes and validates; `plan` turns parts into bytes.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from unimem_jax.errors import UsageError

STORED_DTYPES = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in (
        "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
        "int8", "uint8", "int32", "uint32",
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, order=True)
class Lifetime:
    """How long a part is kept: use `CONTEXT`, `REQUEST` or `window(tokens)`.

    Attributes:
      kind: "context" (one entry per token, all tokens), "window" (one entry per token, the last
        `tokens` of them, the token itself included) or "request" (one entry per request).
      tokens: window length in tokens; 0 for the other kinds.
    Raises:
      UsageError: for another kind, a window that is not a positive int, or tokens of another kind.
    """

    kind: str
    tokens: int = 0

    def __post_init__(self) -> None:
        is_count = isinstance(self.tokens, int) and not isinstance(self.tokens, bool)
        if self.kind == "window" and (not is_count or self.tokens < 1):
            raise UsageError(f"a window is a positive number of tokens, not {self.tokens!r}")
        if self.kind not in ("context", "window", "request"):
            raise UsageError(f"a lifetime is CONTEXT, REQUEST or window(n), not {self.kind!r}")
        if self.kind != "window" and self.tokens != 0:
            raise UsageError(f"only a window counts tokens: {self.kind} with {self.tokens!r}")

    def __str__(self) -> str:
        return f"window_{self.tokens}" if self.kind == "window" else self.kind

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
      UsageError: if `tokens` is not a positive int.
    """
    return Lifetime("window", tokens)


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """Who owns a part: a layer, its visit (a layer run twice owns two sites) and a stream within
    it.
    """

    layer: int
    visit: int = 0
    stream: str = ""

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
      dtype: stored element type, a name from `STORED_DTYPES`.
      lifetime: `CONTEXT`, `window(tokens)` or `REQUEST`.
    Raises:
      UsageError: for a site, shape or lifetime of another type, an empty or non-positive shape, an
        unknown dtype, or a name that is not an identifier.
    """

    site: Site
    name: str
    shape: tuple[int, ...]
    dtype: str
    lifetime: Lifetime

    def __post_init__(self) -> None:
        where = f"part {self.site}.{self.name}"
        if not isinstance(self.site, Site):
            raise UsageError(f"{where}: a site is a unimem_jax.Site, not {self.site!r}")
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise UsageError(f"a part's name is an identifier, not {self.name!r}")
        is_tuple = isinstance(self.shape, tuple) and len(self.shape) > 0
        if not is_tuple or not all(type(n) is int and n > 0 for n in self.shape):
            raise UsageError(
                f"{where}: a shape is a tuple of one or more positive ints, not {self.shape!r}"
            )
        if self.dtype not in STORED_DTYPES:
            raise UsageError(
                f"{where}: cannot store {self.dtype!r}; stored are {', '.join(STORED_DTYPES)}"
            )
        if not isinstance(self.lifetime, Lifetime):
            raise UsageError(
                f"{where}: lifetime is CONTEXT, REQUEST or window(n), not {self.lifetime!r}"
            )

    @property
    def key(self) -> PartKey:
        """`(site, name)`, by which views and fresh parts name it."""
        return (self.site, self.name)

    @property
    def byte_count(self) -> int:
        """Bytes of one entry of this part, without padding."""
        return int(np.prod(self.shape, dtype=np.int64)) * STORED_DTYPES[self.dtype].itemsize
