"""The tokenizer and the chat template inside a GGUF file, built with the package `tokenizers`.

Byte-level BPE is what is known here; a file names how it cuts text before merging.
"""

from typing import Any

from unimem_jax.errors import UsageError

from .chat import ChatTemplate
from .fields import Fields
from .gguf_file import EXTRA
from .hub_text import HubText

PREFIX = "tokenizer.ggml."
BYTE_LEVEL = "gpt2"
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF

# How text is cut, by the name in the file; None is the pattern of GPT-2, which `tokenizers` has.
# Source: llama.cpp's src/llama-vocab.cpp, and the tokenizer.json files of the models.
PATTERNS = {
    "gpt-2": None,
    "smollm": None,
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SINGLE_DIGITS = "smollm"  # cuts every digit off first
COMPOSED = "qwen2"  # is given composed characters
WHOLE_WORDS = "llama-bpe"  # takes a word that is a token whole, and begins a text with a token


def read_text(fields: Fields, vocab_size: int) -> HubText:
    """The tokenizer of a GGUF file's metadata, with its chat template if it has one.

    Raises:
      UsageError: a tokenizer that is missing, of a kind not known here, or that does not match the
        vocabulary; a template that is none; or the package `tokenizers` is not installed.
    """
    place = fields.place
    try:
        from tokenizers import AddedToken
    except ImportError as error:
        raise UsageError(f"the text of {place} needs the package tokenizers: {EXTRA}") from error
    kind, cut = fields.get(f"{PREFIX}model"), fields.get(f"{PREFIX}pre")
    if kind is None:
        raise UsageError(f"{place} holds no tokenizer: it has no {PREFIX}model")
    if kind != BYTE_LEVEL:
        raise fields.refusal(f"{PREFIX}model", f"{BYTE_LEVEL!r}, the only kind known here")
    if cut not in PATTERNS:
        raise fields.refusal(f"{PREFIX}pre", f"one of {', '.join(PATTERNS)}")
    tokens, types = _listed(fields, "tokens", str), _listed(fields, "token_type", int)
    if not vocab_size == len(tokens) == len(types) == len(set(tokens)):
        raise UsageError(
            f"{place}: the tokenizer has {len(set(tokens))} different tokens and {len(types)} "
            f"types, but the model's vocabulary is {vocab_size}"
        )
    tokenizer = _byte_level(cut, tokens, _listed(fields, "merges", str), place)
    of_type = {
        wanted: [token for token, one in zip(tokens, types, strict=True) if one == wanted]
        for wanted in (CONTROL, USER_DEFINED)
    }
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in of_type[CONTROL]])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in of_type[USER_DEFINED]])
    start, end = (_named(fields, f"{PREFIX}{one}_token_id", tokens) for one in ("bos", "eos"))
    if start is not None and fields.flag(f"{PREFIX}add_bos_token", cut == WHOLE_WORDS):
        _begin_with(tokenizer, start)
    source = fields.get("tokenizer.chat_template")
    if source is None:
        return HubText(tokenizer)
    if not isinstance(source, str):
        raise fields.refusal("tokenizer.chat_template", "a text")
    control = {token: at for at, token in enumerate(tokens) if types[at] == CONTROL and token}
    return HubText(tokenizer, ChatTemplate(source, control, place=place, start=start, end=end))


def _byte_level(cut: str, tokens: list[str], merges: list[str], place: str) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pairs = [(first, second) for first, _, second in (merge.partition(" ") for merge in merges)]
    vocabulary = {token: at for at, token in enumerate(tokens)}
    try:
        found = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=cut == WHOLE_WORDS))
    except Exception as error:  # the package raises no narrower one
        raise UsageError(
            f"{place}: the tokenizer's merges do not fit its tokens: {error}"
        ) from error
    pattern = PATTERNS[cut]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] * (cut == SINGLE_DIGITS)
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    found.pre_tokenizer = pre_tokenizers.Sequence(steps)
    found.decoder = decoders.ByteLevel()
    if cut == COMPOSED:
        found.normalizer = normalizers.NFC()
    return found


def _begin_with(tokenizer: Any, start: str) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single=[start, "$A"], special_tokens=[(start, tokenizer.token_to_id(start))]
    )


def _listed(fields: Fields, name: str, kind: type) -> list[Any]:
    found = fields.get(PREFIX + name)
    if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
        raise UsageError(f"{fields.place}: {PREFIX}{name} is missing or no list of {kind.__name__}")
    return found


def _named(fields: Fields, name: str, tokens: list[str]) -> str | None:
    """The text of a token that metadata names by its id."""
    token = fields.token(name)
    if token is None:
        return None
    if not 0 <= token < len(tokens):
        raise fields.refusal(name, f"below {len(tokens)}, the number of tokens")
    return tokens[token]
