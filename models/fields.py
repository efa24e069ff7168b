"""The fields of a `config.json`, checked one by one; a message names the field and what it holds.

A family reads what it computes from here and refuses what it does not. Nothing here knows a family.
"""

from collections.abc import Collection, Mapping
from typing import Any

from unimem_jax.errors import UsageError

from .rotary import Rotary, is_positive, read_rotary

# More of either are an error, and would take minutes or all memory before a tensor is missed.
MOST_CHANNELS = 1 << 16  # of a head
MOST_LAYERS = 1 << 10


class Fields:
    """One object of a configuration.

    Attributes:
      place: what messages call it.
    """

    def __init__(self, config: Mapping[str, Any], place: str = "config.json"):
        self._config, self.place = config, place

    def get(self, name: str, default: Any = None) -> Any:
        """The value as it is; `default` where it is absent or null."""
        value = self._config.get(name)
        return default if value is None else value

    def section(self, name: str) -> "Fields":
        """The object under `name`.

        Raises:
          UsageError: it is absent or no object. All methods raise it for a value they cannot give.
        """
        value = self.get(name)
        if not isinstance(value, dict):
            raise self.refusal(name, "an object")
        return Fields(value, f"{self.place}: {name}")

    def filled(self, **defaults: Any) -> "Fields":
        """The same object with values for fields that are absent or null."""
        given = {name: value for name, value in self._config.items() if value is not None}
        return Fields({**defaults, **given}, self.place)

    def count(self, name: str) -> int:
        """A positive integer."""
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(name, "a positive integer")
        return value

    def count_to(self, name: str, most: int) -> int:
        """A positive integer of at most `most`."""
        value = self.count(name)
        if value > most:
            raise self.refusal(name, f"at most {most}")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """A list of positive integers."""
        value = self.get(name)
        if not isinstance(value, list) or any(type(one) is not int or one < 1 for one in value):
            raise self.refusal(name, "a list of positive integers")
        return tuple(value)

    def positive(self, name: str, default: float) -> float:
        """A positive number, `default` if absent."""
        value = self.get(name, default)
        if not is_positive(value):
            raise self.refusal(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false, `default` if absent."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def token(self, name: str) -> int | None:
        """A token id, or the first of a list of them; None if absent."""
        return next(iter(self.tokens(name)), None)

    def tokens(self, name: str) -> tuple[int, ...]:
        """Token ids, given as one or as a list of them; none if absent."""
        value = self.get(name, [])
        found = value if isinstance(value, list) else [value]
        if any(not isinstance(one, int) or isinstance(one, bool) for one in found):
            raise self.refusal(name, "a token id or a list of them")
        return tuple(found)

    def require(self, **wanted: Any) -> None:
        """Refuses any value but the one that is computed here, which is what absence means too."""
        for name, value in wanted.items():
            if self.get(name, value) != value:
                raise self.refusal(name, f"{value!r}, all that is computed here")

    def attention_heads(self) -> tuple[int, int, int]:
        """Query heads, key heads and head size, which fit together."""
        heads, key_heads = self.count("num_attention_heads"), self.count("num_key_value_heads")
        if heads % key_heads:
            raise self.refusal("num_key_value_heads", f"a divisor of {heads} attention heads")
        return heads, key_heads, self.count("head_dim")

    def layers(self) -> int:
        """`num_hidden_layers`, as far as any model has."""
        layers = self.count("num_hidden_layers")
        if layers > MOST_LAYERS:
            raise self.refusal("num_hidden_layers", f"at most {MOST_LAYERS}")
        return layers

    def layer_kinds(self, supported: Collection[str]) -> tuple[str, ...] | None:
        """`layer_types`, one name per layer; None if absent."""
        layers, kinds = self.layers(), self.get("layer_types")
        if kinds is None:
            return None
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise self.refusal("layer_types", f"a list of num_hidden_layers, {layers}, names")
        for layer, kind in enumerate(kinds):
            if kind not in supported:
                raise UsageError(
                    f"{self.place}: layer_types[{layer}] is {kind!r}; supported are "
                    f"{', '.join(supported)}"
                )
        return tuple(kinds)

    def rotary(self, channels: int, beside: Collection[str] = ()) -> Rotary:
        """Rotary positions over `channels` channels of a head.

        Newer files have one object, `rope_parameters`; older ones have `rope_scaling`, which may
        be absent, and keep the base beside it. Where both are given they have to agree: readers
        differ in which of them they follow.

        Args:
          beside: settings in the object that somebody else reads.
        """
        name = "rope_parameters" if self.get("rope_parameters") else "rope_scaling"
        settings = self.get(name, {})
        if not isinstance(settings, dict):
            raise self.refusal(name, "an object")
        if channels % 2 or not 2 <= channels <= MOST_CHANNELS:
            raise UsageError(
                f"{self.place}: head_dim gives {channels} rotated channels; they go in pairs, and "
                f"are at most {MOST_CHANNELS}"
            )
        settings = {key: value for key, value in settings.items() if key not in beside}
        if name == "rope_parameters" and (older := self.get("rope_scaling")):
            said = _with_kind(settings)
            if not isinstance(older, dict) or any(
                said.get(key) != value
                for key, value in _with_kind(older).items()
                if value is not None and key not in beside
            ):
                raise self.refusal("rope_scaling", "what rope_parameters say as well")
        return read_rotary(
            {"rope_theta": self.get("rope_theta"), **settings}, channels, f"{self.place}: {name}"
        )

    def refusal(self, name: str, wanted: str) -> UsageError:
        """The error that `name` is not `wanted`."""
        return UsageError(f"{self.place}: {name} is {self.get(name)!r:.60} and not {wanted}")


def _with_kind(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings with their kind under its newer name."""
    kind = settings.get("rope_type") or settings.get("type") or "default"
    return {**{key: one for key, one in settings.items() if key != "type"}, "rope_type": kind}
