"""Text for models of the hub: a folder's `tokenizer.json`, read by the package `tokenizers`.

The package is optional. Without it, or without the file, a model takes and gives token ids. This
knows no chat templates.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from unimem_jax.errors import UsageError

FILE = "tokenizer.json"
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to


class HubText:
    """A tokenizer in the sense of `unimem_jax.text`."""

    def __init__(self, tokenizer: Any):
        """Wraps a `tokenizers.Tokenizer`."""
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts around it.

        Raises:
          UsageError: for text that is no Unicode, such as half of a surrogate pair.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"the text is not valid Unicode at character {error.start}: "
                f"{text[error.start]!r}; give its tokens as ids"
            ) from error
        return list(self._tokenizer.encode(text).ids)

    def stream(self) -> "HubStream":
        """A fresh decoder for one request's new tokens."""
        return HubStream(self._tokenizer)


class HubStream:
    """Decodes tokens as they come; special tokens are left out.

    # [0, context)      decoded and forgotten
    # [context, given)  given out; decoded again, as some decoders join what follows to it
    # [given, end)      held until it ends in a whole character
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes more tokens; gives the text that is certain by now.

        Cost: decodes each token about four times.
        """
        return "".join(map(self._push_one, token_ids))

    def end(self) -> str:
        """What is left; U+FFFD where a character was left incomplete."""
        return self._take(self._decode(self._context + self._held))

    def _push_one(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        return "" if text.endswith(BROKEN) else self._take(text)

    def _take(self, text: str) -> str:
        piece = text[len(self._decode(self._context)) :]
        if piece:
            self._context, self._held = self._held, []
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))


def read_text(folder: Path, vocab_size: int) -> HubText | None:
    """The tokenizer of a folder; None where it has none, or `tokenizers` is not installed.

    Raises:
      UsageError: a file that is no tokenizer, or one with token ids that the model lacks.
    """
    file = folder / FILE
    if not file.exists():
        return None
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return None
    try:
        tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the package raises no narrower one
        raise UsageError(f"{file} is not a readable tokenizer: {error}") from error
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise UsageError(
            f"{file} has the token id {largest}, but the model's vocabulary is {vocab_size}"
        )
    return HubText(tokenizer)
