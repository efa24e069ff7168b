"""What a `config.json` says about a GPT-OSS network, checked field by field."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unimem_jax.errors import UsageError

from .fields import Fields
from .mxfp4 import BLOCK_WEIGHTS
from .rotary import Rotary, is_positive, read_rotary

WINDOWED, FULL = "sliding_attention", "full_attention"
# Fields of which only one value is computed here; it is also what absence means.
FIXED = {"attention_bias": True, "tie_word_embeddings": False, "hidden_act": "silu"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the network.

    Attributes:
      windows: of each layer, in tokens, the token itself included; None: full attention.
      attention_heads: query heads, key heads, head size.
      chosen: experts that each token goes through.
      gate_limit, gate_slope: of the experts' gated activation.
      end_tokens: each ends a text when sampled.
    """

    vocab: int
    width: int
    hidden: int
    windows: tuple[int | None, ...]
    attention_heads: tuple[int, int, int]
    experts: int
    chosen: int
    rotary: Rotary
    context_tokens: int
    norm_epsilon: float = 1e-5
    gate_limit: float = 7.0
    gate_slope: float = 1.702
    start_token: int | None = None
    end_tokens: tuple[int, ...] = ()


def read_sizes(config: Mapping[str, Any]) -> Sizes:
    """The sizes that a configuration asks for.

    Raises:
      UsageError: a field is missing, contradicts another or asks for what GPT-OSS here does not
        compute; names it.
    """
    for field, wanted in FIXED.items():
        if config.get(field, wanted) != wanted:
            raise UsageError(
                f"config.json: {field} is {config[field]!r}; this GPT-OSS computes {wanted!r} only"
            )
    heads, key_heads = _count(config, "num_attention_heads"), _count(config, "num_key_value_heads")
    head = _count(config, "head_dim")
    experts, chosen = _count(config, "num_local_experts"), _count(config, "num_experts_per_tok")
    if heads % key_heads:
        raise UsageError(
            f"config.json: num_attention_heads is {heads}, which num_key_value_heads, {key_heads}, "
            "does not divide"
        )
    if head % 2:
        raise UsageError(f"config.json: head_dim is {head}; rotary positions need an even number")
    if chosen > experts:
        raise UsageError(
            f"config.json: num_experts_per_tok is {chosen}, more than the {experts} experts"
        )
    fields = Fields(config)
    return Sizes(
        vocab=_count(config, "vocab_size"),
        width=_count(config, "hidden_size"),
        hidden=_count(config, "intermediate_size"),
        windows=_windows(config),
        attention_heads=(heads, key_heads, head),
        experts=experts,
        chosen=chosen,
        rotary=_rotary(config, head),
        context_tokens=_count(config, "max_position_embeddings"),
        norm_epsilon=_positive(config, "rms_norm_eps", 1e-5),
        gate_limit=_positive(config, "swiglu_limit", 7.0),
        gate_slope=_positive(config, "swiglu_alpha", 1.702),
        start_token=fields.token("bos_token_id"),
        end_tokens=fields.tokens("eos_token_id"),
    )


def read_packing(config: Mapping[str, Any]) -> str | None:
    """How the experts are stored: None (as they are) or "mxfp4".

    Raises:
      UsageError: another quantisation, or sizes that MXFP4 cannot pack.
    """
    settings = config.get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method != "mxfp4":
        raise UsageError(
            f"config.json: quantization_config.quant_method is {method!r}; supported is 'mxfp4'"
        )
    for field in ("hidden_size", "intermediate_size"):
        if _count(config, field) % BLOCK_WEIGHTS:
            raise UsageError(
                f"config.json: {field} is {config[field]}; MXFP4 packs multiples of {BLOCK_WEIGHTS}"
            )
    return "mxfp4"


def _windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    layers = Fields(config).layers()
    kinds = config.get("layer_types")
    if kinds is None:  # what Transformers takes absence for
        kinds = [FULL if layer % 2 else WINDOWED for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise UsageError(
            f"config.json: layer_types is not a list of num_hidden_layers, {layers}, names"
        )
    for layer, kind in enumerate(kinds):
        if kind not in (WINDOWED, FULL):
            raise UsageError(
                f"config.json: layer_types[{layer}] is {kind!r}; supported are "
                f"{WINDOWED} and {FULL}"
            )
    limit = _count(config, "sliding_window") if WINDOWED in kinds else None
    return tuple(limit if kind == WINDOWED else None for kind in kinds)


def _rotary(config: Mapping[str, Any], head: int) -> Rotary:
    """Newer files have one object, older ones keep the base beside it."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    settings = config.get(field) or {}
    if not isinstance(settings, dict):
        raise UsageError(f"config.json: {field} is {settings!r}, not an object")
    return read_rotary(
        {"rope_theta": config.get("rope_theta"), **settings}, head, f"config.json: {field}"
    )


def _count(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"config.json: {field} is a positive integer, not {value!r}")
    return value


def _positive(config: Mapping[str, Any], field: str, default: float) -> float:
    value = config.get(field, default)
    if not is_positive(value):
        raise UsageError(f"config.json: {field} is a positive number, not {value!r:.60}")
    return float(value)
