"""Options of the command line that need no model: sizes as text, and all of `unimem simulate`."""

import argparse
import re
from decimal import Decimal

from unimem_jax.errors import UsageError

SIZE_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", 1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
SIMULATE_TEXT = "how many requests of a published model an arena would run at once, and how fast"


def size(text: str) -> int:
    """Bytes from "256MiB", "1GiB", "1e9", "64kB" or a plain number.

    Raises:
      UsageError: for anything else, and for less than one byte.
    """
    number, units = r"([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]{1,2})?)", r"([kmgt]?i?b?)"
    found = re.fullmatch(rf"{number}\s*{units}", text.strip().lower())
    unit = SIZE_UNITS.get(found[2]) if found else None
    if found is None or unit is None:
        raise UsageError(f"a size is a number with B, kB, MB, GB, KiB, MiB or GiB, not {text!r}")
    byte_count = int(Decimal(found[1]) * unit)
    if byte_count < 1:
        raise UsageError(f"a size is at least one byte, not {text!r}")
    return byte_count


def add_simulate(command: argparse.ArgumentParser) -> None:
    """Adds the options of `unimem simulate`."""
    command.add_argument("--model", required=True, metavar="NAME", help="such as qwen3.5-4b")
    command.add_argument("--arena", required=True, metavar="SIZE", help="bytes for all state")
    command.add_argument("--page", "--page-size", type=int, default=16, metavar="TOKENS")
    command.add_argument("--trace", metavar="FILE", help="CSV or JSON lines; docs/SIMULATE.md")
    command.add_argument("--limit", type=int, metavar="N", help="the first N requests of the trace")
    command.add_argument("--arrivals", metavar="trace|at-once", help="of a trace; as it says")
    for side, what in (("input", "without a trace: of a prompt"), ("output", "what it generates")):
        command.add_argument(
            f"--{side}", dest=f"{side}_tokens", type=int, metavar="TOKENS", help=what
        )
    command.add_argument("--requests", type=int, metavar="N", help="how many of these")
    command.add_argument("--concurrency", type=int, metavar="N", help="of these, at a time")
    command.add_argument(
        "--layout", default="unified", metavar="NAME", help="unified, split, split:RATIO or blocks"
    )
    command.add_argument(
        "--policy", default="first-come", metavar="NAME", help="or predicted, bounded"
    )
    command.add_argument("--json", metavar="FILE", help="also write the results as JSON")
    command.add_argument("--plot", metavar="FILE", help="a PNG of the arena, running and waiting")
