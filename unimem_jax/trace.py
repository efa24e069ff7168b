"""Traces: which requests arrive when, as lengths alone.

Three kinds of file are read, told apart by their first line:

    arrival_s,prompt_tokens,new_tokens[,prefix_blocks]     ours, CSV
    TIMESTAMP,ContextTokens,GeneratedTokens                Azure's public LLM traces, CSV
    {"timestamp": ms, "input_length": .., "output_length": .., "hash_ids": [..]}   Mooncake, JSONL

T1  Arrivals never go down, and the first is at 0.
T2  Prompts and what is generated have at least one token; Azure's rows without one get one.
T3  A prefix block is an id of 512 prompt tokens and of all before them; equal ids are equal tokens.
    The last one of a prompt may be partly filled. In CSV, ids are separated by spaces.

Sources: Splitwise, Patel et al., ISCA 2024 (Azure); Mooncake, Qin et al., FAST 2025.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from unimem_jax.errors import UsageError, require_positive

PREFIX_BLOCK_TOKENS = 512
OURS = ["arrival_s", "prompt_tokens", "new_tokens"]
PREFIXES = "prefix_blocks"  # our fourth column, which may be left out
AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")
MOST_TOKENS = 2**31 - 1  # of a prompt, and of what is generated
MOST_ID = 2**64 - 1  # of a prefix block
MOST_MS = 1e15


@dataclass(frozen=True, slots=True)
class Traced:
    """A request of a trace.

    Attributes:
      arrival_s: seconds after the first.
      prompt_tokens, new_tokens: at least 1 each.
      prefix_blocks: ids of the prompt's blocks of 512 tokens, or none where nobody knows (T3).
    """

    arrival_s: float
    prompt_tokens: int
    new_tokens: int
    prefix_blocks: tuple[int, ...] = ()


def read_trace(path: str | Path, limit: int | None = None) -> list[Traced]:
    """The requests of a trace, in order of arrival.

    Args:
      limit: how many to read; all by default. Lines after them are not looked at.
    Raises:
      UsageError: a file that cannot be read or is of no known kind, or a line that is empty, is
        malformed or goes back in time, by number; no request at all.
    """
    if limit is not None:
        require_positive(limit=limit)
    try:
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: byte {error.start} is no text") from error
    lines = text.removesuffix("\n").split("\n")
    read, first = _reader(path, lines)
    found: list[Traced] = []
    begin = 0.0
    for number, line in enumerate(lines[first:], first + 1):
        try:
            if not line.strip():
                raise ValueError("the line is empty")
            traced = read(line)
            begin = begin if found else traced.arrival_s
            traced = _checked(traced, begin, found)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: {error}") from error
        found.append(traced)
        if len(found) == limit:
            break
    if not found:
        raise UsageError(f"{path} has no request")
    return found


def _reader(path: str | Path, lines: Sequence[str]) -> tuple[Callable[[str], Traced], int]:
    """What reads a line of this file, and how many lines come before the first request."""
    head = lines[0].strip() if lines else ""
    if head.startswith("{"):
        return _mooncake, 0
    columns = [column.strip() for column in head.split(",")]
    if columns == AZURE:
        return _azure, 1
    if columns in (OURS, [*OURS, PREFIXES]):
        return (lambda line: _ours(line, len(columns))), 1
    raise UsageError(
        f"{path}:1: a trace begins with {','.join(OURS)}, with {','.join(AZURE)}, or is JSON lines "
        f"with {', '.join(MOONCAKE)}; not {head!r:.60}"
    )


def _cells(line: str, count: int) -> list[str]:
    cells = line.split(",")
    if len(cells) != count:
        raise ValueError(f"{count} columns are needed, not {len(cells)}")
    return [cell.strip() for cell in cells]


def _ours(line: str, columns: int) -> Traced:
    arrival, prompt, new, *blocks = _cells(line, columns)
    ids = tuple(_whole(text, "a prefix block", 0, MOST_ID) for text in " ".join(blocks).split())
    return Traced(
        _seconds(arrival), _whole(prompt, "prompt_tokens"), _whole(new, "new_tokens"), ids
    )


def _azure(line: str) -> Traced:
    stamp, prompt, new = _cells(line, len(AZURE))
    try:
        # 100 ns are cut to microseconds. Only differences count, so any time zone will do.
        arrival = datetime.fromisoformat(stamp).replace(tzinfo=UTC).timestamp()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"a time is needed, not {stamp!r:.40}") from error
    generated = max(1, _whole(new, AZURE[2], 0))
    return Traced(arrival, _whole(prompt, AZURE[1]), generated)


def _mooncake(line: str) -> Traced:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a line is one JSON object, not {line!r:.40}") from error
    if not isinstance(row, dict) or not set(MOONCAKE) <= row.keys():
        raise ValueError(f"a line has {', '.join(MOONCAKE)}")
    stamp, prompt, new, ids = (row[name] for name in MOONCAKE)
    if not isinstance(stamp, int | float) or isinstance(stamp, bool) or abs(stamp) > MOST_MS:
        raise ValueError(f"timestamp is a number of milliseconds, not {stamp!r:.40}")
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids is a list, not {ids!r:.40}")
    return Traced(
        stamp / 1000, _whole(prompt, "input_length"), _whole(new, "output_length"),
        tuple(_whole(one, "a hash id", 0, MOST_ID) for one in ids),
    )  # fmt: skip


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise ValueError(f"arrival_s is a number of seconds, not {text!r:.40}") from error


def _whole(value: object, name: str, least: int = 1, most: int = MOST_TOKENS) -> int:
    """A count, which CSV has as digits and JSON as a number."""
    found = value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        found = int(value[:30])
    if not isinstance(found, int) or isinstance(found, bool) or not least <= found <= most:
        raise ValueError(f"{name} is a whole number from {least} to {most}, not {value!r:.40}")
    return found


def _checked(traced: Traced, begin: float, found: Sequence[Traced]) -> Traced:
    """The request with its arrival after the first one's, held to T1 and T3."""
    if not math.isfinite(traced.arrival_s):
        raise ValueError(f"an arrival is a finite time, not {traced.arrival_s}")
    arrival = traced.arrival_s - begin
    if found and arrival < found[-1].arrival_s:
        raise ValueError("it arrives before the line above it; sort the trace by time")
    blocks = -(-traced.prompt_tokens // PREFIX_BLOCK_TOKENS)
    if traced.prefix_blocks and len(traced.prefix_blocks) != blocks:
        raise ValueError(
            f"{traced.prompt_tokens} prompt tokens are {blocks} blocks of {PREFIX_BLOCK_TOKENS}, "
            f"not {len(traced.prefix_blocks)}"
        )
    return Traced(arrival, traced.prompt_tokens, traced.new_tokens, traced.prefix_blocks)


def even_load(prompt_tokens: int, new_tokens: int, requests: int) -> list[Traced]:
    """Requests of one length that all arrive at 0."""
    require_positive(prompt_tokens=prompt_tokens, new_tokens=new_tokens, requests=requests)
    return [Traced(0.0, prompt_tokens, new_tokens) for _ in range(requests)]
