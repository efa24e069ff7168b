"""Text from tokens: what a tokenizer is, text as bytes, and where a text stops.

Text comes out in pieces as tokens come in. Nothing here knows models or memory, and nothing
imports JAX.

X1  The pieces of a stream, joined, are the decoding of all its tokens at once, however they were
    pushed.
X2  A piece never contains part of a character, nor anything that a stop text could still take back.
X3  The text ends before the stop text that is complete first (the longest of several complete at
    once).
"""

import codecs
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from unimem_jax.errors import UsageError

BYTE_COUNT = 256


class TextStream(Protocol):
    """Turns token ids into text as they come."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes more tokens; gives the text that is certain by now."""
        ...

    def end(self) -> str:
        """What is left when no more tokens come."""
        ...


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with whatever the model wants in front of it."""
        ...

    def stream(self) -> TextStream:
        """A fresh decoder for one request's new tokens."""
        ...


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer of a model that converses."""

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of messages with a "role" and a "content", up to where the answer begins."""
        ...


class ByteText:
    """Text as UTF-8 bytes: token id b is the byte b.

    Attributes:
      start_token: put in front of every prompt; None for nothing.
    """

    def __init__(self, start_token: int | None = None):
        self.start_token = start_token

    def encode(self, text: str) -> list[int]:
        """The start token and the bytes of `text`.

        Raises:
          UsageError: for text that is no Unicode, such as half of a surrogate pair.
        """
        try:
            encoded = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid Unicode at character {error.start}: "
                f"{text[error.start]!r}; give its tokens as ids"
            ) from error
        return [*([] if self.start_token is None else [self.start_token]), *encoded]

    def stream(self) -> "ByteStream":
        """A fresh decoder."""
        return ByteStream()


class ByteStream:
    """Decodes bytes as UTF-8; what is no UTF-8, or no byte, becomes U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these bytes complete."""
        # 0xFF occurs in no UTF-8, so it stands for an id that is no byte.
        return self._decoder.decode(bytes(i if 0 <= i < BYTE_COUNT else 0xFF for i in token_ids))

    def end(self) -> str:
        """U+FFFD if a character was left incomplete."""
        return self._decoder.decode(b"", final=True)


class StopText:
    """Cuts a text off before the first of several stop texts.

    Attributes:
      is_found: whether one has come; the text has ended.
    """

    def __init__(self, stops: Sequence[str] = ()):
        self.stops = tuple(stops)
        self.is_found = False
        self._held = ""

    def push(self, piece: str) -> str:
        """Takes more text; gives what is certain to lie before any stop text (X2).

        Cost: O(piece * stops) and the longest stop text; nothing is searched twice.
        """
        if self.is_found:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if ends:
            self.is_found, self._held = True, ""
            return text[: min(ends)[1]]
        kept = len(text) - max((_overlap(text, stop) for stop in self.stops), default=0)
        self._held = text[kept:]
        return text[:kept]

    def end(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held


def decode(tokenizer: Tokenizer, token_ids: Iterable[int]) -> str:
    """The text of tokens, all at once."""
    stream = tokenizer.stream()
    return stream.push(token_ids) + stream.end()


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that begin `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
