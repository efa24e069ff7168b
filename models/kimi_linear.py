"""Kimi-Linear from a Hugging Face folder: Kimi delta attention, latent attention between, experts.

Nothing turns with positions: the shared slice of a key stays as it is. The first feed-forward is
dense; the others choose experts by corrected sigmoids. The published sizes are those of
Kimi-Linear-48B-A3B [Kimi Team 2025, arXiv:2510.26692].

Folders of the hub list layers and sizes in `linear_attn_config`, those that Transformers saves in
fields of their own; both are read. The latter have the dense feed-forward under the experts' name.
"""

from functools import partial
from pathlib import Path

from unimem_jax.errors import UsageError
from unimem_jax.spec import Site

from .checkpoint import Loaded, load_folder, read_sizes
from .decoder import Decoder, Feed, FeedForward, Forms, Mixer, Norm
from .fields import Fields
from .folder import OnTensor
from .kda import KimiDelta
from .mla import LatentAttention, read_latent_sizes
from .qwen3 import FULL
from .sparse import PROJECTIONS, SigmoidSparse, read_routing, read_sparse_layers

LINEAR = "linear_attention"
NESTED = "linear_attn_config"
SPARSE = "block_sparse_moe"
EXPERT_PROJECTIONS = ("w1", "w3", "w2")


class KimiFeed(Feed):
    """A dense feed-forward that some folders keep where experts would be."""

    def __init__(self, width: int, hidden: int):
        super().__init__(width, hidden)
        self.sizes = (width, hidden)

    def forms(self) -> Forms:
        """As `Mixer` says."""
        width, hidden = self.sizes
        shapes = dict(zip(PROJECTIONS, [(hidden, width)] * 2 + [(width, hidden)], strict=True))
        return {
            f"{self.name}.{one}.weight": tuple(
                {f"{place}.{one}.weight": shape} for place in (self.name, SPARSE)
            )
            for one, shape in shapes.items()
        }


def read_decoder(fields: Fields, token_dtype: str) -> Decoder:
    """The network that a `config.json` describes.

    Args:
      token_dtype: stored dtype of latents, a name from `spec.STORED_DTYPES`.
    Raises:
      UsageError: a field is missing, contradicts another, or asks for what is not computed here.
    """
    fields.require(
        attention_bias=False, hidden_act="silu", moe_renormalize=True, mla_use_nope=True,
        moe_router_activation_func="sigmoid", rope_scaling=None,
    )  # fmt: skip
    kinds, sparse = _kinds(fields), read_sparse_layers(fields)
    width, epsilon = fields.count("hidden_size"), fields.positive("rms_norm_eps", 1e-5)
    heads, taps = _delta_sizes(fields)

    def mixer(layer: int) -> Mixer:
        if kinds[layer] == LINEAR:
            return KimiDelta(Site(layer), width, heads, taps=taps, epsilon=epsilon)
        sizes = read_latent_sizes(fields, has_query_rank=False)
        return LatentAttention(Site(layer), width, sizes, rotary=None, token_dtype=token_dtype)

    def feed(layer: int) -> FeedForward:
        if not sparse[layer]:
            return KimiFeed(width, fields.count("intermediate_size"))
        routing = read_routing(
            fields, experts="num_experts", chosen="num_experts_per_token",
            shared="num_shared_experts", groups="num_expert_group",
        )  # fmt: skip
        return SigmoidSparse(
            width, fields.count("moe_intermediate_size"), routing,
            name=SPARSE, projections=EXPERT_PROJECTIONS,
        )  # fmt: skip

    blocks = [(mixer(layer), feed(layer)) for layer in range(len(kinds))]
    sizes = read_sizes(fields, context="model_max_length")
    return Decoder(sizes, blocks, partial(Norm, epsilon=epsilon))


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
) -> Loaded:  # fmt: skip
    """Loads a folder; arguments, result, errors and cost as `checkpoint.load_folder`."""
    return load_folder(path, read_decoder, dtype, token_dtype=token_dtype, on_tensor=on_tensor)


def _kinds(fields: Fields) -> tuple[str, ...]:
    """What mixes tokens in each layer; the lists of the hub count layers from 1."""
    given = fields.layer_kinds((LINEAR, FULL))
    if fields.get(NESTED) is None:
        if given is None:
            raise fields.refusal("layer_types", f"a list, and there is no {NESTED} either")
        return given
    nested, layers = fields.section(NESTED), range(1, fields.layers() + 1)
    linear, full = (nested.counts(name) for name in ("kda_layers", "full_attn_layers"))
    if sorted([*linear, *full]) != [*layers]:
        raise UsageError(
            f"{nested.place}: kda_layers and full_attn_layers do not name each of the layers 1 to "
            f"{len(layers)} once"
        )
    kinds = tuple(FULL if layer in full else LINEAR for layer in layers)
    if given not in (None, kinds):
        raise UsageError(f"{fields.place}: layer_types and {NESTED} disagree")
    return kinds


def _delta_sizes(fields: Fields) -> tuple[tuple[int, int], int]:
    """(heads, channels of each), taps."""
    names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if fields.get(NESTED) is not None:
        fields, names = fields.section(NESTED), ("num_heads", "head_dim", "short_conv_kernel_size")
    heads, head, taps = map(fields.count, names)
    if taps < 2:
        raise fields.refusal(names[2], "at least 2")
    return (heads, head), taps
