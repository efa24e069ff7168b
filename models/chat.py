"""Conversations as prompts: the chat template that comes with a model, and texts that stay texts.

A template is a Jinja program of the model's file. It runs in a sandbox, and whatever goes wrong in
it is a typed error.

J1  What a user writes never becomes a control token. Characters that control tokens begin with are
    replaced by private ones while the template runs, and put back once control tokens are found.
J2  Everything else of a message reaches the template as it is.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import NoReturn

from unimem_jax.errors import UsageError

PRIVATE = range(0xF0000, 0xFFFFE)  # characters that Unicode gives no meaning to


class ChatTemplate:
    """Turns messages into tokens.

    Attributes:
      place: what errors call the template.
    """

    def __init__(
        self, source: str, control: Mapping[str, int], *, place: str,
        start: str | None = None, end: str | None = None,
    ):  # fmt: skip
        """Compiles a template.

        Args:
          control: control tokens and their ids.
          start, end: what the template calls bos_token and eos_token.
        Raises:
          UsageError: it is no template, or the package `jinja2` is not installed.
        """
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise UsageError(
                f"{place}: a chat template needs the package jinja2: pip install 'unimem-jax[text]'"
            ) from error
        self.place, self._error = place, TemplateError
        self._source, self._control = source, dict(control)
        names = sorted(map(re.escape, control), key=len, reverse=True)
        self._split = re.compile("|".join(names) or r"(?!)")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        # What templates of the hub expect of Transformers, beside Jinja's own.
        environment.globals["raise_exception"] = self._refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        self._known = {"bos_token": start or "", "eos_token": end or ""}
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise UsageError(f"{place}: the chat template is invalid: {_line(error)}") from error

    def encode(
        self, messages: Sequence[Mapping[str, str]], encode: Callable[[str], list[int]]
    ) -> list[int]:
        """The tokens of a conversation, and of the beginning of the answer.

        Args:
          messages: objects with "role" and "content".
          encode: tokens of a text without control tokens.
        Raises:
          UsageError: a message without the two texts, or one that leaves no private character
            unused; the template refuses the messages, or fails.
        """
        require_messages(messages)
        used = set(self._source).union(*(one["content"] for one in messages))
        private = (code for code in PRIVATE if chr(code) not in used)
        first = {ord(token[0]) for token in self._control}
        hidden = dict(zip(first, private, strict=False))
        if len(hidden) < len(first):
            raise UsageError("the messages use up the characters that Unicode gives no meaning to")
        shown = {private: character for character, private in hidden.items()}
        text = self._render(
            [{**one, "content": one["content"].translate(hidden)} for one in messages]
        )
        found: list[int] = []
        last = 0
        for match in self._split.finditer(text):
            found += encode(text[last : match.start()].translate(shown))
            found.append(self._control[match[0]])
            last = match.end()
        return found + encode(text[last:].translate(shown))

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._known
            )
        except Exception as error:  # a template is a program and can fail in any way
            raise UsageError(f"{self.place}: the chat template failed: {_line(error)}") from error

    def _refuse(self, message: str) -> NoReturn:
        raise self._error(message)


def require_messages(messages: Sequence[Mapping[str, str]]) -> None:
    """Raises UsageError unless each is an object with a "role" and a "content" that are Unicode."""
    for message in messages:
        for name in ("role", "content"):
            text = message.get(name) if isinstance(message, Mapping) else None
            if not isinstance(text, str):
                raise UsageError(f"a message has a text {name!r}: {message!r:.60}")
            require_unicode(text)


def require_unicode(text: str) -> None:
    """Raises UsageError for text that is no Unicode, such as half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text is not valid Unicode at character {error.start}: "
            f"{text[error.start]!r}; give its tokens as ids"
        ) from error


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
