"""How large published models are, for the step-time model: `weights("gpt-oss-20b")`.

One row for each geometry of `geometries`. Parameters are those that the model's name or card
states; bytes are those of the published checkpoint where it is quantised (GPT-OSS, Kimi K3,
DeepSeek-V3.2) and bfloat16 elsewhere. Query heads come from the published configurations. Sparse
attention counts as if nothing were selected.
"""

from dataclasses import dataclass

from unimem_jax.errors import UsageError
from unimem_jax.geometries import geometry_names

GIGA = 1e9


@dataclass(frozen=True, slots=True)
class Weights:
    """Sizes of one model.

    Attributes:
      total, active: parameters in all, and those that one token uses.
      bytes_each: bytes of one parameter, on average.
      pair_operations: operations that attention spends on a byte of key and value that a query
        sees. With 16-bit keys and values that is the number of query heads for one key head; a
        latent serves all heads.
    """

    total: float
    active: float
    bytes_each: float
    pair_operations: float


# Total and active parameters (1e9), bytes each, operations a byte of key and value.
_ROWS = {
    "gpt-oss-20b": (20.9, 3.6, 0.66, 8),
    "gpt-oss-120b": (116.8, 5.1, 0.56, 8),
    "qwen3.5-0.8b": (0.8, 0.8, 2, 4),
    "qwen3.5-4b": (4, 4, 2, 4),
    "qwen3.5-9b": (9, 9, 2, 4),
    "qwen3.5-27b": (27, 27, 2, 6),
    "qwen3.5-35b-a3b": (35, 3, 2, 8),
    "qwen3-next-80b-a3b": (80, 3, 2, 8),
    "kimi-linear-48b-a3b": (48, 3, 2, 60),
    "kimi-k3": (2800, 104, 0.55, 181),
    "kimi-k3.1-pro": (2800, 104, 0.55, 148),
    "deepseek-v3.2": (671, 37, 1, 198),
    "deepseek-v3.2-fp8": (671, 37, 1, 347),
    "muse-spark-816b-a42b": (816, 42, 2, 8),
    "inkling-975b-a41b": (975, 41, 2, 8),
    "gemma-3-4b": (4, 4, 2, 2),
    "gemma-3-27b": (27, 27, 2, 2),
    "nemotron-3-nano-30b-a3b": (30, 3, 2, 16),
    "lfm2-1.2b": (1.2, 1.2, 2, 4),
}


def weights(name: str) -> Weights:
    """The sizes of a published model.

    Args:
      name: one of `geometry_names()`.
    Raises:
      UsageError: for another name.
    """
    if name not in _ROWS:
        raise UsageError(f"no model is named {name!r}; known: {', '.join(geometry_names())}")
    total, active, bytes_each, pair_operations = _ROWS[name]
    return Weights(total * GIGA, active * GIGA, bytes_each, pair_operations)
