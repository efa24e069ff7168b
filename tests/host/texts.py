"""What requests have computed, by who wrote it: pages that several texts share are one object."""

from dataclasses import dataclass, field

from unimem_jax.requests import Request


@dataclass(eq=False)
class Text:
    """Computed tokens, and who wrote which of them.

    Attributes:
      pages: what each page is; texts that share a page have the same object.
      past: (stop, serial): who wrote the tokens before `stop`, where not yet told.
    """

    serial: int
    length: int = 0
    pages: list[object] = field(default_factory=list)
    past: tuple[tuple[int, int], ...] = ()

    def writer(self, position):
        """Serial of the request that wrote a position."""
        return next((serial for stop, serial in self.past if position < stop), self.serial)

    def grow(self, length, page_tokens):
        """Counts tokens as computed; their pages are nobody else's."""
        self.length = length
        self.pages += [object() for _ in range(-(-length // page_tokens) - len(self.pages))]

    def begun(self, page_tokens):
        """The pages and the past of a text that begins with this one: full pages are shared."""
        full, part = divmod(self.length, page_tokens)
        return {
            "length": self.length,
            "pages": self.pages[:full] + [object()] * (part > 0),
            "past": tuple(
                (min(stop, self.length), serial)
                for stop, serial in (*self.past, (self.length, self.serial))
            ),
        }


@dataclass(eq=False)
class Twin(Text):
    """What a request is, without looking into it."""

    request: Request | None = None
    limit: int = 0
    peak: tuple[int, ...] | None = None
    has_sampled: bool = False


@dataclass(eq=False)
class Kept(Text):
    """What outlives its request: `ids` of all its pages, `shares` of them, slots at its end."""

    ids: tuple[int, ...] = ()
    shares: dict[int, list[int]] = field(default_factory=dict)
    seen: dict[int, list[object]] = field(default_factory=dict)
    slots: tuple[int, ...] = ()
