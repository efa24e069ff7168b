"""What an engine counts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Statistics:
    """Sums over all steps of an engine.

    Attributes:
      running_mean, running_max: requests that run, counted in each step before those that ended
        leave.
      generated_tokens: sampled and kept.
      computed_tokens: run through the model, prompts included.
      recomputed_tokens: of those, computed before and lost by a retraction.
      prefix_hit_tokens: known to requests and not computed, since a kept prefix had them.
      moved_units, moved_bytes: moves of the allocator.
      seconds: inside steps; `tokens_per_second` counts generated tokens over them.
    """

    steps: int
    running_mean: float
    running_max: int
    retractions: int
    generated_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    prefix_hit_tokens: int
    moved_units: int
    moved_bytes: int
    seconds: float
    tokens_per_second: float
