"""The demonstration: 32 prompts in an arena too small for all of them at once.

It runs the prompts, watches the arena, and asks the simulator how many of the same requests would
run at once in pools of fixed size that share the same bytes. It prints nothing.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from unimem_jax.engine import Engine
from unimem_jax.errors import UsageError
from unimem_jax.picture import Moment, observe
from unimem_jax.plan import size_text
from unimem_jax.sampling import Sampling
from unimem_jax.serving import Completion, Piece, joined
from unimem_jax.simulate import Simulated, simulate
from unimem_jax.splits import best_split, default_split
from unimem_jax.statistics import Statistics

ARENA_BYTES = 3 << 20
ROWS = 16
TEXT = """
In the beginning God created the heaven and the earth. And the earth was without form, and void; and
darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters. And
God said, Let there be light: and there was light.

The LORD is my shepherd; I shall not want. He maketh me to lie down in green pastures: he leadeth me
beside the still waters. He restoreth my soul: he leadeth me in the paths of righteousness for his
name's sake.

To every thing there is a season, and a time to every purpose under the heaven: A time to be born,
and a time to die; a time to plant, and a time to pluck up that which is planted.

Blessed are the poor in spirit: for theirs is the kingdom of heaven. Blessed are they that mourn:
for they shall be comforted. Blessed are the meek: for they shall inherit the earth.
"""
PASSAGES = tuple(" ".join(passage.split()) + " " for passage in TEXT.split("\n\n"))
OPENINGS = (
    "And it came to pass, ", "The words of the wise ", "And the king said unto ", "Behold, I ",
    "My son, hear the ", "Then Peter stood up, and ", "O LORD, how ", "And Moses went up ",
    "There was a man in the land of ", "Now the sons of ", "Woe unto them that ", "And he said, ",
    "Praise ye the LORD. ", "And when the day was ", "Thus saith the LORD of hosts, ",
    "A certain man had two ", "The heavens declare ", "And David arose, ", "Hear, O Israel: ",
    "But the angel said ",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Demonstration:
    """What the demonstration found.

    Attributes:
      prompts, completions: in order.
      default, best: what the splits did; None where one cannot hold the longest request.
      tried: how many splits the search for the best one tried.
      moments: the arena after each step.
    """

    prompts: tuple[str, ...]
    completions: tuple[Completion, ...]
    statistics: Statistics
    arena_bytes: int
    unified: Simulated
    default: Simulated | None
    best: Simulated | None
    tried: int
    moments: tuple[Moment, ...]

    def table(self) -> str:
        """The figures as lines of text."""
        run = self.statistics
        lines = [
            ("arena", size_text(self.arena_bytes)),
            ("requests", f"{len(self.prompts)}"),
            ("running, mean and most", f"{run.running_mean:.1f} and {run.running_max}"),
            ("steps", f"{run.steps}"),
            ("tokens per second", f"{run.tokens_per_second:,.0f}"),
            ("moved units", f"{run.moved_units:,} ({size_text(run.moved_bytes)})"),
            ("retractions", f"{run.retractions}"),
            (f"split pools, best of {self.tried}", _split_text(self.best)),
            ("split pools, default ratio", _split_text(self.default)),
        ]
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in lines)

    def to_json(self) -> dict[str, Any]:
        """All but the moments, as plain numbers and strings."""
        splits = {"unified": self.unified, "best": self.best, "default": self.default}
        return {
            "arena_bytes": self.arena_bytes,
            "statistics": asdict(self.statistics),
            "simulated": {name: found and asdict(found) for name, found in splits.items()},
            "splits_tried": self.tried,
            "completions": [
                {"prompt": prompt, **asdict(completion)}
                for prompt, completion in zip(self.prompts, self.completions, strict=True)
            ],
        }


def demo_prompts() -> list[tuple[str, Sampling]]:
    """32 prompts: 20 of a few words, 8 of one passage, 4 of several, in mixed order."""
    long = ["".join(PASSAGES[at:] + PASSAGES[:at]) for at in range(4)]
    middle = [passage + opening for passage, opening in zip(PASSAGES * 2, OPENINGS, strict=False)]
    found = []
    for at in range(32):
        if at % 8 == 3:
            prompt = long[at // 8]
        elif at % 8 in (1, 6):
            prompt = middle[at // 8 * 2 + (at % 8 == 6)]
        else:
            prompt = OPENINGS[sum(other % 8 not in (1, 3, 6) for other in range(at))]
        options = Sampling(max_tokens=48 + 37 * at % 112, temperature=0.6, top_p=0.95, seed=at)
        found.append((prompt, options))
    return found


def demonstrate(engine: Engine, on_step: Callable[[int], object]) -> Demonstration:
    """Runs the prompts on a warm engine and compares with splits of the same bytes.

    Args:
      on_step: told after each step how many tokens it generated.
    """
    prompts, options = zip(*demo_prompts(), strict=True)
    indices = [engine.submit(*pair) for pair in zip(prompts, options, strict=True)]
    pieces: dict[int, list[Piece]] = {index: [] for index in indices}
    moments = []
    while not engine.is_idle:
        found = engine.step()
        for piece in found:
            pieces[piece.index].append(piece)
        moments.append(observe(engine.memory, len(engine.queue.running), len(engine.queue.waiting)))
        on_step(len(found))
    encode = engine.intake.encode
    completions = tuple(
        joined(pieces[index], len(encode(prompt)))
        for index, prompt in zip(indices, prompts, strict=True)
    )
    lengths = [(one.prompt_tokens, len(one.token_ids)) for one in completions]
    best, tried, default = None, 0, None
    # Pools that cannot hold the longest request are refused.
    with suppress(UsageError):
        _, best, tried = best_split(lengths, engine.plan, engine.limits)
    with suppress(UsageError):
        default = simulate(lengths, engine.plan, engine.limits, default_split(engine.plan))
    return Demonstration(
        prompts=prompts, completions=completions, statistics=engine.statistics(),
        arena_bytes=engine.plan.arena_bytes,
        unified=simulate(lengths, engine.plan, engine.limits),
        default=default, best=best, tried=tried, moments=tuple(moments),
    )  # fmt: skip


def _split_text(found: Simulated | None) -> str:
    if found is None:
        return "cannot hold the longest request"
    return f"{found.running_mean:.1f} running, most {found.running_max}, {found.steps} steps"
