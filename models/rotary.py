"""Rotary positions as a hub configuration describes them: plain or stretched, as YaRN or Llama 3.

This reads the description and turns queries and keys. It does not rescale attention scores: YaRN's
factor multiplies cosine and sine, and so reaches the scores through both queries and keys. Where
only a slice of a key turns, a family multiplies its scores by `Rotary.score_scale` instead.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int32

from unimem_jax.errors import UsageError

KNOWN = {
    "default": {"rope_type", "type", "rope_theta"},
    "yarn": {
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
        "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim",
    },
    "factors": {"rope_type", "rope_theta", "factors"},  # one per pair, as in GGUF files
    "llama3": {
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
        "low_freq_factor", "high_freq_factor",
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rotary:
    """How fast each pair of channels turns.

    Attributes:
      frequencies: radians per token; channel i of a head is paired with channel i + half.
      scale: factor of cosine and sine.
      score_scale: factor of scores, for attention whose keys have channels that do not turn.
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    score_scale: float = 1.0

    def table(
        self, positions: Int32[Array, "requests tokens"]
    ) -> tuple[Float[Array, "requests tokens 1 half"], Float[Array, "requests tokens 1 half"]]:
        """Scaled cosine and sine, float32, of every position; one table serves all layers."""
        frequency = jnp.asarray(self.frequencies, jnp.float32)
        angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None, :]
        return jnp.cos(angle) * self.scale, jnp.sin(angle) * self.scale


def turn(
    x: Float[Array, "requests tokens heads head"], table: tuple[Array, Array]
) -> Float[Array, "requests tokens heads head"]:
    """Rotates queries or keys, in float32, by a table of `Rotary`; the dtype of `x` comes back.

    Source: Su et al. 2021, arXiv:2104.09864, with the halves of a head paired.
    """
    cosine, sine = table
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [low * cosine - high * sine, high * cosine + low * sine]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def turn_first(
    x: Float[Array, "requests tokens heads head"], table: tuple[Array, Array]
) -> Float[Array, "requests tokens heads head"]:
    """As `turn`, of as many of the first channels as the table has angles for."""
    channels = 2 * table[0].shape[-1]
    if channels == x.shape[-1]:
        return turn(x, table)
    return jnp.concatenate([turn(x[..., :channels], table), x[..., channels:]], axis=-1)


def turn_pairs(
    x: Float[Array, "requests tokens heads head"], table: tuple[Array, Array]
) -> Float[Array, "requests tokens heads head"]:
    """As `turn`, but with neighbours paired; first the one of every pair, then the other."""
    return turn(jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1), table)


def read_rotary(settings: Mapping[str, Any], head: int, field: str) -> Rotary:
    """Rotary positions over a whole head of `head` channels.

    Args:
      settings: the object that a configuration calls `field`: "rope_type" ("default", "yarn" or
        "llama3"), "rope_theta" and what `KNOWN` lists, with the defaults of Transformers.
    Raises:
      UsageError: another type, a setting that this does not know or that is missing, or a value
        that makes no sense; names it.
    Source: YaRN, Peng et al. 2023, arXiv:2309.00071, section 3; the ramp is rounded outwards to
      whole channels unless "truncate" is false. Llama 3: `apply_scaling` in
      meta-llama/llama-models.
    """
    given = {name: value for name, value in settings.items() if value is not None}
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in KNOWN:
        raise UsageError(f"{field}.rope_type is {kind!r}; supported are {', '.join(KNOWN)}")
    if unknown := sorted(given.keys() - KNOWN[kind]):
        raise UsageError(f"{field}.{unknown[0]} is a setting that {kind!r} positions do not have")
    theta = _number(given, "rope_theta", field)
    plain = theta ** -(np.arange(0, head, 2) / head)
    if kind == "default":
        return Rotary(tuple(plain.tolist()))
    if kind == "factors":
        factors = given.get("factors")
        if (
            not isinstance(factors, list)
            or len(factors) != len(plain)
            or not all(map(is_positive, factors))
        ):
            raise UsageError(f"{field}.factors are not {len(plain)} positive numbers, one per pair")
        return Rotary(tuple((plain / np.asarray(factors, np.float64)).tolist()))

    factor = _number(given, "factor", field)
    trained = _number(given, "original_max_position_embeddings", field)
    if kind == "llama3":
        return _llama3(plain, factor, trained, [_number(given, name, field) for name in _TURNS])
    if theta <= 1:
        raise UsageError(f"{field}.rope_theta is {theta}; with 'yarn' it is more than 1")
    betas = [_number(given, name, field, default) for name, default in _BETAS.items()]
    # The channel that turns `beta` times within the context of training.
    first, last = (
        head * (math.log(trained) - math.log(beta) - math.log(2 * math.pi)) / (2 * math.log(theta))
        for beta in betas
    )
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head - 1)
    last = last + 0.001 if first == last else last  # a ramp, however steep
    stretched = np.clip((np.arange(head // 2) - first) / (last - first), 0, 1)
    frequencies = plain * (1 - stretched) + plain / factor * stretched
    of_turned, of_all = (given.get(name, 0) and _number(given, name, field) for name in _MSCALES)
    natural = _stretch(factor, 1)
    if of_turned and not of_all:
        raise UsageError(f"{field}.mscale does nothing without mscale_all_dim")
    if of_turned and of_all:
        natural = _stretch(factor, of_turned) / _stretch(factor, of_all)
    scale = _number(given, "attention_factor", field, natural)
    return Rotary(tuple(frequencies.tolist()), scale, _stretch(factor, of_all) ** 2)


_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
_MSCALES = ("mscale", "mscale_all_dim")  # of DeepSeek
_TURNS = ("low_freq_factor", "high_freq_factor")


def _stretch(factor: float, share: float) -> float:
    """How much larger scores are to be where positions are stretched by `factor`."""
    return 0.1 * share * math.log(factor) + 1 if factor > 1 else 1.0


def _llama3(plain: np.ndarray, factor: float, trained: float, turns: list[float]) -> Rotary:
    """Pairs that turn less often than `turns[0]` in the context of training are slowed down by
    `factor`, those that turn more often than `turns[1]` are left alone.
    """
    few, many = turns
    many = many if many > few else few + 0.001  # a ramp, however steep
    natural = np.clip((trained * plain / (2 * math.pi) - few) / (many - few), 0, 1)
    return Rotary(tuple((plain * natural + plain / factor * (1 - natural)).tolist()))


def _number(given: Mapping[str, Any], name: str, field: str, default: float | None = None) -> float:
    value = given.get(name, default)
    if not is_positive(value):
        raise UsageError(f"{field}.{name} is a positive number, not {value!r:.60}")
    return float(value)


def is_positive(value: object) -> TypeGuard[float]:
    """Whether it is a number above 0 that a float holds; JSON has integers that none does."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return 0 < value <= sys.float_info.max
