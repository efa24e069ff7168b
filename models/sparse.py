"""Feed-forwards of which each token goes through a few: routed experts beside a shared one.

    mlp(x) = sum over chosen e of w_e expert_e(x) + shared(x)

How a token chooses is the family's: by the largest logits, with the softmax over them as weights,
or by the sigmoid of each logit with a correction that only the choice sees. Padding tokens choose
no expert. Choices and weights are float32 whatever the activations are.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Float, Int32

from unimem_jax.errors import UsageError

from .decoder import PRECISION, Feed, FeedForward, Forms, Matrix, Shapes, parameter
from .experts import choose_by_sigmoid, choose_experts, mix_experts
from .fields import Fields

# Matrices of an expert as most folders name them: gate, up, down.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Experts(nnx.Module):
    """Gated feed-forwards, the gate's rows above the others in `gate_up_proj`."""

    def __init__(self, count: int, width: int, hidden: int):
        self.sizes = (count, width, hidden)
        self.gate_up_proj = parameter(count, 2 * hidden, width)
        self.down_proj = parameter(count, width, hidden)

    def __call__(
        self,
        x: Float[Array, "tokens width"],
        chosen: Int32[Array, "tokens chosen"],
        weights: Float[Array, "tokens chosen"],
    ) -> Float[Array, "tokens width"]:
        """As `mix_experts`."""
        return mix_experts(x, chosen, weights, self._expert, expert_count=self.sizes[0])

    def forms(self, place: str, names: tuple[str, str, str] = PROJECTIONS) -> Forms:
        """One matrix per expert and projection, or one tensor for all experts.

        Args:
          place: of the experts within a layer.
          names: of an expert's gate, up and down projection.
        """
        count, width, hidden = self.sizes
        gate, up, down = names
        both: Shapes = {
            f"{place}.{expert}.{name}.weight": (hidden, width)
            for expert in range(count)
            for name in (gate, up)
        }
        downs: Shapes = {
            f"{place}.{expert}.{down}.weight": (width, hidden) for expert in range(count)
        }
        all_both, all_downs = f"{place}.gate_up_proj", f"{place}.down_proj"
        return {
            all_both: (both, {all_both: (count, 2 * hidden, width)}),
            all_downs: (downs, {all_downs: (count, width, hidden)}),
        }

    def _expert(self, expert: Array, rows: Array) -> Array:
        both = _multiply(rows, self.gate_up_proj[...], expert).astype(rows.dtype)
        gate, up = jnp.split(both, 2, axis=-1)
        return _multiply(jax.nn.silu(gate) * up, self.down_proj[...], expert)


class GatedShared(nnx.Module):
    """Experts by the largest logits, and a shared one that weighs itself, as in Qwen.

    Attributes:
      chosen: experts of each token.
    """

    name = "mlp"

    def __init__(self, width: int, hidden: tuple[int, int], experts: int, chosen: int):
        """Declares the layer; `hidden` is that of a routed expert and of the shared one."""
        self.chosen = chosen
        self.gate = Matrix(experts, width)
        self.experts = Experts(experts, width, hidden[0])
        self.shared_expert = Feed(width, hidden[1])
        self.shared_expert_gate = Matrix(1, width)

    def forms(self) -> Forms:
        """As `Mixer` says."""
        return self.experts.forms(f"{self.name}.experts")

    def __call__(self, x: Float[Array, "requests tokens width"], valid: Array) -> Array:
        """As `FeedForward.__call__`."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = choose_experts(self.gate.wide(tokens), self.chosen)
        chosen = of_valid(chosen, valid, self.experts.sizes[0])
        routed = self.experts(tokens, chosen, weights).reshape(x.shape)
        gate = jax.nn.sigmoid(self.shared_expert_gate.wide(x))
        return (routed + gate * self.shared_expert(x).astype(jnp.float32)).astype(x.dtype)


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose by sigmoids.

    Attributes:
      experts, chosen: how many there are, and how many each token goes through.
      shared: experts that every token goes through, kept as one of `shared` times the size.
      groups, scale: as in `choose_by_sigmoid`.
    """

    experts: int
    chosen: int
    shared: int
    groups: tuple[int, int]
    scale: float


class Router(nnx.Module):
    """A logit per expert, and what corrects their choice."""

    def __init__(self, experts: int, width: int):
        self.weight = parameter(experts, width)
        self.e_score_correction_bias = parameter(experts)

    def __call__(self, x: Float[Array, "tokens width"], routing: Routing) -> tuple[Array, Array]:
        """As `choose_by_sigmoid`."""
        wide, weight = x.astype(jnp.float32), self.weight[...].astype(jnp.float32)
        logits = jnp.einsum("ti,ei->te", wide, weight, precision=PRECISION)
        correction = self.e_score_correction_bias[...]
        return choose_by_sigmoid(
            logits, correction, routing.chosen, groups=routing.groups, scale=routing.scale
        )


class SigmoidSparse(nnx.Module):
    """Experts by corrected sigmoids beside a shared one, as in DeepSeek and Kimi.

    Attributes:
      name: what the hub calls it within a layer.
    """

    def __init__(
        self, width: int, hidden: int, routing: Routing, *,
        name: str = "mlp", projections: tuple[str, str, str] = PROJECTIONS,
    ):  # fmt: skip
        """Declares the layer; `projections` are the hub's names in a routed expert."""
        self.name, self.routing, self.projections = name, routing, projections
        self.gate = Router(routing.experts, width)
        self.experts = Experts(routing.experts, width, hidden)
        self.shared_experts = Feed(width, routing.shared * hidden)

    def forms(self) -> Forms:
        """As `Mixer` says."""
        return self.experts.forms(f"{self.name}.experts", self.projections)

    def __call__(self, x: Float[Array, "requests tokens width"], valid: Array) -> Array:
        """As `FeedForward.__call__`."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self.gate(tokens, self.routing)
        chosen = of_valid(chosen, valid, self.routing.experts)
        routed = self.experts(tokens, chosen, weights).reshape(x.shape)
        return (routed + self.shared_experts(x).astype(jnp.float32)).astype(x.dtype)


def of_valid(
    chosen: Int32[Array, "tokens chosen"], valid: Array, none: int
) -> Int32[Array, "tokens chosen"]:
    """The choices of valid tokens; `none`, the number of experts, for the others."""
    return jnp.where(valid.reshape(-1, 1), chosen, none)


def read_gated_shared(fields: Fields, layer: int) -> FeedForward:
    """The feed-forward of every layer of a Qwen mixture.

    Raises:
      UsageError: a field is missing, or asks for more experts than there are.
    """
    fields.require(norm_topk_prob=True)
    hidden = (
        fields.count("moe_intermediate_size"), fields.count("shared_expert_intermediate_size")
    )  # fmt: skip
    experts = fields.count("num_experts")
    chosen = fields.count_to("num_experts_per_tok", experts)
    return GatedShared(fields.count("hidden_size"), hidden, experts, chosen)


def read_routing(
    fields: Fields, *, experts: str = "n_routed_experts", chosen: str = "num_experts_per_tok",
    shared: str = "n_shared_experts", groups: str = "n_group",
) -> Routing:  # fmt: skip
    """How tokens choose, from the fields of these names.

    Raises:
      UsageError: a field is missing, or groups, experts and choices do not fit together.
    """
    count = fields.count(experts)
    parts = fields.filled(**{groups: 1}).count(groups)
    if count % parts:
        raise fields.refusal(groups, f"a divisor of {count} experts")
    allowed = fields.filled(topk_group=1).count_to("topk_group", parts)
    most = fields.count_to(chosen, allowed * count // parts)
    scale = fields.positive("routed_scaling_factor", 1.0)
    return Routing(count, most, fields.count(shared), (parts, allowed), scale)


def read_sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers have experts: those that `mlp_layer_types` calls so, or all after the first
    `first_k_dense_replace`.

    Raises:
      UsageError: a field is not what it has to be, or they contradict each other.
    """
    layers, kinds = fields.layers(), fields.get("mlp_layer_types")
    dense = fields.get("first_k_dense_replace", 1 if kinds is None else None)
    if dense is not None and (not isinstance(dense, int) or dense < 0):
        raise fields.refusal("first_k_dense_replace", "a number of layers")
    fields.require(moe_layer_freq=1)
    counted = None if dense is None else tuple(layer >= dense for layer in range(layers))
    if kinds is None:
        return counted or ()
    if not isinstance(kinds, list) or len(kinds) != layers or not {*kinds} <= {"dense", "sparse"}:
        raise fields.refusal("mlp_layer_types", f"{layers} times 'dense' or 'sparse'")
    listed = tuple(kind == "sparse" for kind in kinds)
    if counted not in (None, listed):
        raise UsageError(
            f"{fields.place}: mlp_layer_types and first_k_dense_replace, {dense}, disagree"
        )
    return listed


def _multiply(x: Array, matrices: Array, index: Array) -> Array:
    """x [rows, in] times the transpose of matrix `index` of [count, out, in]; float32."""
    matrix = lax.dynamic_index_in_dim(matrices, index, keepdims=False)
    return jnp.einsum(
        "ri,oi->ro", x, matrix, precision=PRECISION, preferred_element_type=jnp.float32
    )
