"""One request from prompt to completion: its checks, its tokens, its text.

Host only: the engine runs what is described here. What is wrong with a prompt is found here, in one
place and before anything runs.

    tokens  [0, prompt_tokens)       the prompt
            [prompt_tokens, known)   sampled
            [0, computed)            their state is in memory
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from unimem_jax.errors import UsageError
from unimem_jax.memory import Memory
from unimem_jax.prefix import NO_MATCH, Match, require_hashable
from unimem_jax.queue import Generation
from unimem_jax.requests import Request, Work
from unimem_jax.sampling import Sampling
from unimem_jax.text import StopText, TextStream, Tokenizer

type Prompt = str | Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one request.

    Attributes:
      index: the request: its place among the prompts, or what `Engine.submit` returned.
      token_ids: tokens sampled.
      text: text that is certain by now; None without a tokenizer.
      finish_reason: None while it runs; "stop" after a stop text, stop id or the model's end token;
        "length" after the most tokens.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class Completion:
    """What one prompt became.

    Attributes:
      text: the new text, without the prompt and any stop text; None without a tokenizer.
      token_ids: all tokens sampled, the one that ended the request included.
      finish_reason: "stop" or "length", see `Piece`; "interrupted" where it was given up.
      prompt_tokens: tokens of the prompt, the start token included.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int


def joined(pieces: Sequence[Piece], prompt_tokens: int) -> Completion:
    """All pieces of one request as one completion; "interrupted" if the last did not end it."""
    texts = [piece.text for piece in pieces if piece.text is not None]
    return Completion(
        text="".join(texts) if texts or not pieces else None,
        token_ids=tuple(token for piece in pieces for token in piece.token_ids),
        finish_reason=(pieces[-1].finish_reason if pieces else None) or "interrupted",
        prompt_tokens=prompt_tokens,
    )


@dataclass(slots=True, eq=False)
class Served(Generation):
    """A generation with its tokens and its text; `known` is the number of its tokens.

    Attributes:
      tokens: the prompt and what was sampled.
      words: of its `Sampling`.
      stop_ids: tokens that end it.
      stream, stop: turn tokens into text; `stream` is None without a tokenizer.
      request: its memory while it runs.
      namespace: whose prefixes it may resume from and adds to.
      match: where it would resume, while it waits.
      pauses: lengths at which a chunk ends, so that the prefix is kept.
      kept: tokens of it that were published last.
      lost: tokens that the last retraction took.
      leader: the first sample of the same prompt, if it is another one.
      followers: samples that wait until this one has read their prompt.
    """

    tokens: list[int] = field(default_factory=list)
    words: tuple[int, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    stream: TextStream | None = None
    stop: StopText = field(default_factory=StopText)
    request: Request | None = None
    index: int = 0
    namespace: Hashable = None
    match: Match = NO_MATCH
    pauses: tuple[int, ...] = ()
    kept: int = 0
    lost: int = 0
    leader: "Served | None" = None
    followers: "list[Served]" = field(default_factory=list)

    def work(self, count: int) -> Work:
        """The next `count` tokens to compute; a token is sampled after the last one known."""
        assert self.request is not None
        end = self.computed + count
        ids = np.asarray(self.tokens[self.computed : end], np.int32)
        return Work(self.request, count, ids, emit=end == self.known)

    def accept(self, token: int) -> Piece:
        """Takes the next token and says what it adds."""
        reason = "stop" if token in self.stop_ids else None
        text = "" if self.stream is None or reason else self.stop.push(self.stream.push([token]))
        if reason is None and self.known + 1 == self.limit:
            reason = "length"
        if (reason or self.stop.is_found) and self.stream is not None:
            text += self.stop.push(self.stream.end()) + self.stop.end()
        if self.stop.is_found:
            reason = "stop"
        self.tokens.append(token)
        self.known += 1
        return Piece(self.index, (token,), None if self.stream is None else text, reason)


@dataclass(frozen=True, slots=True)
class Intake:
    """What prompts must be for one model.

    Attributes:
      context_tokens: longest request, prompt and new tokens.
      end_ids: tokens that end every request.
    """

    tokenizer: Tokenizer | None
    vocab_size: int
    context_tokens: int
    end_ids: frozenset[int]

    def check_all(
        self, prompts: object, sampling: Sampling | Sequence[Sampling] | None, memory: Memory,
        namespace: Hashable = None,
    ) -> list[Served]:  # fmt: skip
        """Checks all prompts and options before any of them is run.

        Returns:
          The samples of each prompt, prompt by prompt.
        Raises:
          UsageError: naming the prompt, if there are several, and what is wrong with it.
        """
        require_hashable(namespace)
        listed = [prompts] if isinstance(prompts, str) else prompts
        if not isinstance(listed, Sequence):
            raise UsageError(f"prompts are a list of texts or token ids, not {listed!r:.60}")
        options = Sampling() if sampling is None else sampling
        each = [options] * len(listed) if isinstance(options, Sampling) else options
        if not isinstance(each, Sequence) or not all(isinstance(one, Sampling) for one in each):
            raise UsageError(f"sampling is one Sampling, or one for each prompt, not {each!r:.60}")
        if len(each) != len(listed):
            raise UsageError(f"{len(each)} samplings do not match {len(listed)} prompts")
        found: list[Served] = []
        for at, (prompt, options) in enumerate(zip(listed, each, strict=True)):
            try:
                samples = [self.check(prompt, one, memory) for one in options.samples()]
            except UsageError as error:
                where = f"prompt {at}: " if len(listed) > 1 else ""
                raise UsageError(f"{where}{error}") from error
            for sample in samples:
                sample.namespace = namespace
                sample.leader = None if sample is samples[0] else samples[0]
            found += samples
        return found

    def check(self, prompt: object, sampling: Sampling, memory: Memory) -> Served:
        """Checks one prompt. The new tokens are clipped to what the context leaves.

        Raises:
          UsageError: an empty prompt, one of another type or with tokens that the model has not,
            stops that it cannot produce, or a request that exceeds the context or an empty arena.
        """
        tokens = self.encode(prompt)
        if not tokens:
            raise UsageError("a prompt has at least one token; seen an empty one")
        for name, ids in (("token", tokens), ("stop", sampling.stop_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                wrong = next(one for one in ids if not 0 <= one < self.vocab_size)
                raise UsageError(f"{name} ids go from 0 to {self.vocab_size - 1}; seen {wrong}")
        if sampling.stop and self.tokenizer is None:
            raise UsageError("stop texts need a tokenizer; without one use stop_ids")
        left = self.context_tokens - len(tokens)
        if left < 1:
            raise UsageError(
                f"a prompt of {len(tokens)} tokens leaves no room for a new one in a context of "
                f"{self.context_tokens}"
            )
        max_new = min(sampling.max_tokens, left)
        self._refuse_impossible(len(tokens), max_new, memory)
        return Served(
            known=len(tokens),
            limit=len(tokens) + max_new,
            tokens=tokens,
            prompt_tokens=len(tokens),
            words=sampling.words(),
            stop_ids=frozenset(sampling.stop_ids) | self.end_ids,
            stream=None if self.tokenizer is None else self.tokenizer.stream(),
            stop=StopText(sampling.stop),
        )

    def encode(self, prompt: object) -> list[int]:
        """The tokens of a prompt. Raises UsageError for what is neither text nor token ids."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError("a text needs a tokenizer; without one give token ids")
            return self.tokenizer.encode(prompt) if prompt else []
        if isinstance(prompt, np.ndarray) and prompt.ndim == 1 and prompt.dtype.kind in "iu":
            return prompt.tolist()
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise UsageError(f"a prompt is a text or a sequence of token ids, not {prompt!r:.60}")
        wrong = [
            one for one in prompt
            if isinstance(one, bool | np.bool_) or not isinstance(one, int | np.integer)
        ]  # fmt: skip
        if wrong:
            raise UsageError(f"token ids are whole numbers, not {wrong[0]!r:.60}")
        return [int(one) for one in prompt]

    def _refuse_impossible(self, prompt_tokens: int, max_new: int, memory: Memory) -> None:
        """Raises UsageError, itemised, if a request cannot run to its end even alone.

        Alone it can go token by token; the last new one is never computed. The message says how
        many would fit: refusing beats ending a text early for a reason that the caller can remove.
        """

        def fits(new: int) -> bool:
            try:
                memory.refuse_impossible(memory.prices.peak(prompt_tokens + new - 1, 1))
            except UsageError:
                return False
            return True

        if fits(max_new):
            return
        low, high = 0, max_new  # the longest that fits lies in [low, high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        asked = f"{prompt_tokens} prompt and {max_new} new tokens"
        cure = f"at most {low} new tokens fit" if low else "the prompt alone does not fit"
        peak = memory.prices.peak(prompt_tokens + max_new - 1, 1)
        try:
            memory.refuse_impossible(peak)
        except UsageError as error:
            raise UsageError(f"{asked} {error}; {cure}") from error
