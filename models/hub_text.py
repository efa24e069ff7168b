"""Text for models of the hub: a folder's `tokenizer.json`, read by the package `tokenizers`, and
the chat template beside it.

The package is optional. Without it, or without the file, a model takes and gives token ids.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from pathlib import Path
from typing import Any

from unimem_jax.errors import UsageError

from .chat import ChatTemplate, require_unicode
from .folder import read_object

FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"  # newer folders; older ones have it among the settings
BROKEN = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to


class HubText:
    """A tokenizer in the sense of `unimem_jax.text`, for conversations too if it has a template."""

    def __init__(self, tokenizer: Any, template: ChatTemplate | None = None):
        """Wraps a `tokenizers.Tokenizer`."""
        self._tokenizer, self._template = tokenizer, template

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the tokenizer puts around it; control tokens are read.

        Raises:
          UsageError: for text that is no Unicode, such as half of a surrogate pair.
        """
        require_unicode(text)
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the answer begins; see `ChatTemplate.encode`.

        Raises:
          UsageError: there is no template, or as there.
        """
        if self._template is None:
            raise UsageError("this model comes without a chat template; give a prompt instead")
        return self._template.encode(messages, self._encode_literally)

    @cached_property
    def _literal(self) -> Any:
        """Takes control tokens for the text that they look like."""
        found = deepcopy(self._tokenizer)
        found.encode_special_tokens = True
        return found

    def _encode_literally(self, text: str) -> list[int]:
        return list(self._literal.encode(text, add_special_tokens=False).ids)

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

        Cost: decodes each token about four times; again with every token that leaves a character
        incomplete, all that is held back.
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
      UsageError: a file that is no tokenizer, or one with token ids that the model lacks; a chat
        template that is none.
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
    # A file may keep how its model was trained; a prompt is taken whole and as it is.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise UsageError(
            f"{file} has the token id {largest}, but the model's vocabulary is {vocab_size}"
        )
    return HubText(tokenizer, _read_template(folder, tokenizer))


def _read_template(folder: Path, tokenizer: Any) -> ChatTemplate | None:
    settings = read_object(folder / SETTINGS) if (folder / SETTINGS).exists() else {}
    source, place = settings.get("chat_template"), folder / SETTINGS
    if (folder / TEMPLATE).exists():
        place = folder / TEMPLATE
        try:
            source = place.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read {place}: {error}") from error
    if isinstance(source, list):  # several, by name
        named = [one for one in source if isinstance(one, dict) and one.get("name") == "default"]
        source = named[0].get("template", source) if named else None
    if source is None:
        return None
    if not isinstance(source, str):
        raise UsageError(f"{place}: chat_template is {source!r:.60} and not a text")
    added = tokenizer.get_added_tokens_decoder()
    control = {token.content: at for at, token in added.items() if token.special}
    start, end = (_content(settings.get(f"{name}_token")) for name in ("bos", "eos"))
    return ChatTemplate(source, control, place=str(place), start=start, end=end)


def _content(token: Any) -> str | None:
    """A token in the settings is its text, or an object that holds it."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None
