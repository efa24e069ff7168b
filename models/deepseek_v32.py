"""DeepSeek-V3.2 from a Hugging Face folder: latent attention to a few chosen tokens, and experts.

An indexer scores every past and fresh token by a small key of its own, which all its heads share;
attention sees the best `index_topk` of them.

    score of token s for query t  =  sum over heads i of w_ti relu(q_ti . k_s / sqrt(D))

The index key lies beside the latent in one entry and may be stored in another dtype. While a query
has no more tokens behind it than it may choose, attention is dense.

I1  Of tokens with equal scores those at the lowest positions are chosen, whether they are past or
    fresh: where a chunk ends changes nothing. Many scores are exactly 0, where no head has any.
I2  The index key is cast to its stored dtype before it scores.

A single query gathers what it chose; many mask what they did not. The published sizes are those of
DeepSeek-V3.2-Exp [DeepSeek-AI 2025]; its FP8 weights are not read, and neither is its drafting
layer. The Hadamard turn of the published indexer changes no score but by rounding, and is left out.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jaxtyping import Bool, Float, Int32

from unimem_jax.spec import CONTEXT, STORED_DTYPES, Part, Site

from .checkpoint import Loaded, dense_feed, load_folder, read_sizes
from .decoder import (
    PRECISION,
    Decoder,
    FeedForward,
    Matrix,
    Mixer,
    Norm,
    parameter,
    require_float,
    split_heads,
)
from .fields import Fields
from .folder import OnTensor
from .mla import LatentAttention, LatentSizes, Seen, read_latent_sizes
from .rotary import Rotary, turn_first
from .sparse import SigmoidSparse, read_routing, read_sparse_layers

INDEXED = "indexed_attention"
CENTRED_EPSILON = 1e-6  # of the index keys' norm


class LayerNorm(nnx.Module):
    """Mean 0 and variance 1 over the last axis, with weight and bias, in float32."""

    def __init__(self, channels: int):
        self.weight, self.bias = parameter(channels), parameter(channels)

    def __call__(self, x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
        """Shape and dtype of `x`."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + CENTRED_EPSILON)
        shape = (1,) * (x.ndim - 1) + (-1,)
        return (wide * self.weight[...].reshape(shape) + self.bias[...].reshape(shape)).astype(
            x.dtype
        )


class Indexer(nnx.Module):
    """What scores tokens: queries from the queries' latent, one key and weights from the input.

    Attributes:
      heads, head: index heads and their channels, of which the first turn as halves.
      most: tokens that a query may choose.
    """

    def __init__(self, width: int, query_rank: int, heads: tuple[int, int], most: int):
        self.heads, self.head = heads
        self.most = most
        self.wq_b = Matrix(self.heads * self.head, query_rank)
        self.wk = Matrix(self.head, width)
        self.k_norm = LayerNorm(self.head)
        self.weights_proj = Matrix(self.heads, width)

    def key(self, x: Array, table: tuple[Array, Array]) -> Float[Array, "requests tokens head"]:
        """The index key of each token."""
        return turn_first(self.k_norm(self.wk(x))[:, :, None], table)[:, :, 0]

    def score(
        self, x: Array, hidden: Array, table: tuple[Array, Array], keys: Array
    ) -> Float[Array, "requests tokens keys"]:
        """Float32 scores of keys [R, N, head] for each token of x."""
        query = turn_first(split_heads(self.wq_b(hidden), self.heads), table)
        weights = self.weights_proj.wide(x) * self.heads**-0.5
        return index_scores(query.astype(jnp.float32), keys.astype(jnp.float32), weights)


class IndexedAttention(LatentAttention):
    """Latent attention to chosen tokens; its site owns "index_key" [head] beside "latent".

    Attributes:
      index_dtype: stored dtype of index keys.
    """

    def __init__(
        self, site: Site, width: int, sizes: LatentSizes, *,
        rotary: Rotary, dtypes: tuple[str, str], index_heads: tuple[int, int], most: int,
    ):  # fmt: skip
        """Declares the layer; `dtypes` are those of stored latents and index keys.

        Raises:
          UsageError: either is to be stored as integers.
        """
        super().__init__(site, width, sizes, rotary=rotary, token_dtype=dtypes[0])
        require_float(dtypes[1], "index keys")
        self.turns, self.index_dtype = rotary, dtypes[1]
        self.indexer = Indexer(width, sizes.query_rank or width, index_heads, most)

    def parts(self) -> tuple[Part, ...]:
        """As `Mixer.parts`."""
        key = Part(self.site, "index_key", (self.indexer.head,), self.index_dtype, CONTEXT)
        return (*super().parts(), key)

    def narrow(
        self, seen: Seen, x: Array, hidden: Array, views: Any
    ) -> tuple[Seen, dict[Any, Array], Any]:
        """The best tokens, and the fresh index keys."""
        table = self.turns.table(views.positions)
        fresh = self.indexer.key(x, table)
        past, _, views = views.past(self.site, "index_key")
        kept = fresh.astype(STORED_DTYPES[self.index_dtype])
        keys = jnp.concatenate([past.astype(jnp.float32), kept.astype(jnp.float32)], axis=1)
        parts = {(self.site, "index_key"): fresh}
        if keys.shape[1] <= self.indexer.most:
            return seen, parts, views
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), jnp.bool_))
        allowed = causal[None] & views.valid[:, None, :]
        before = (*allowed.shape[:2], past.shape[1])
        mask = jnp.concatenate([jnp.broadcast_to(seen.past_mask, before), allowed], axis=2)
        chosen, is_seen = choose_tokens(
            self.indexer.score(x, hidden, table, keys), mask, self.indexer.most
        )
        return narrowed(seen, chosen, is_seen), parts, views


@jax.jit  # layers of one shape are traced once, here and below
def index_scores(
    query: Float[Array, "requests tokens heads head"],
    keys: Float[Array, "requests keys head"],
    weights: Float[Array, "requests tokens heads"],
) -> Float[Array, "requests tokens keys"]:
    """Weighted sums over heads of relu(query . key / sqrt(head)).

    Cost: one query reads the keys once; many go head by head, to hold no [R, T, heads, N].
    """
    scale = query.shape[-1] ** -0.5
    if query.shape[1] == 1:
        product = jnp.einsum("rthd,rnd->rthn", query, keys, precision=PRECISION) * scale
        return jnp.einsum("rth,rthn->rtn", weights, jax.nn.relu(product), precision=PRECISION)

    def add(total: Array, head: tuple[Array, Array]) -> tuple[Array, None]:
        one, weight = head
        product = jnp.einsum("rtd,rnd->rtn", one, keys, precision=PRECISION) * scale
        return total + weight[:, :, None] * jax.nn.relu(product), None

    start = jnp.zeros((*query.shape[:2], keys.shape[1]), jnp.float32)
    heads = (jnp.moveaxis(query, 2, 0), jnp.moveaxis(weights, 2, 0))
    return lax.scan(add, start, heads)[0]


def choose_tokens(
    scores: Float[Array, "requests tokens keys"],
    mask: Bool[Array, "requests tokens keys"],
    count: int,
) -> tuple[Int32[Array, "requests tokens chosen"], Bool[Array, "requests tokens chosen"]]:
    """Indices of the `count` best keys that each token sees (I1), and which of them it sees."""
    _, chosen = lax.top_k(jnp.where(mask, scores, -jnp.inf), count)
    return chosen.astype(jnp.int32), jnp.take_along_axis(mask, chosen, axis=2)


def narrowed(
    seen: Seen,
    chosen: Int32[Array, "requests tokens chosen"],
    is_seen: Bool[Array, "requests tokens chosen"],
) -> Seen:
    """Only the chosen tokens, numbered from the first past one through the last fresh one."""
    requests, count, past = *chosen.shape[:2], seen.past.shape[1]
    if count == 1:
        together = jnp.concatenate([seen.past, seen.fresh], axis=1)
        gathered = jnp.take_along_axis(together, chosen[:, 0, :, None], axis=1)
        return Seen(gathered, is_seen, seen.fresh, jnp.zeros((requests, 1, 1), jnp.bool_))
    rows = jnp.arange(requests)[:, None, None]
    columns = jnp.arange(count)[None, :, None]
    kept = jnp.zeros((requests, count, past + count), jnp.bool_)
    kept = kept.at[rows, columns, chosen].set(is_seen, unique_indices=True)
    return Seen(seen.past, kept[:, :, :past], seen.fresh, kept[:, :, past:])


def read_decoder(fields: Fields, token_dtype: str, *, index_dtype: str | None = None) -> Decoder:
    """The network that a `config.json` describes.

    Args:
      token_dtype, index_dtype: stored dtypes of latents and index keys, names from
        `spec.STORED_DTYPES`; index keys as latents by default.
    Raises:
      UsageError: a field is missing, contradicts another, or asks for what is not computed here.
    """
    fields.require(
        attention_bias=False, mlp_bias=False, hidden_act="silu", norm_topk_prob=True,
        scoring_func="sigmoid", topk_method="noaux_tc", rope_interleave=True,
        indexer_rope_interleave=False,
    )  # fmt: skip
    fields.layer_kinds((INDEXED,))
    sparse = read_sparse_layers(fields)
    width, epsilon = fields.count("hidden_size"), fields.positive("rms_norm_eps", 1e-6)
    sizes = read_latent_sizes(fields, has_query_rank=True)
    index_heads = (fields.count("index_n_heads"), fields.count("index_head_dim"))
    if index_heads[1] < sizes.shared:
        raise fields.refusal("index_head_dim", f"at least qk_rope_head_dim, {sizes.shared}")
    rotary, most = fields.rotary(sizes.shared), fields.count("index_topk")
    dtypes = (token_dtype, index_dtype or token_dtype)

    def mixer(layer: int) -> Mixer:
        return IndexedAttention(
            Site(layer), width, sizes,
            rotary=rotary, dtypes=dtypes, index_heads=index_heads, most=most,
        )  # fmt: skip

    def feed(layer: int) -> FeedForward:
        if not sparse[layer]:
            return dense_feed(fields, layer)
        return SigmoidSparse(width, fields.count("moe_intermediate_size"), read_routing(fields))

    blocks = [(mixer(layer), feed(layer)) for layer in range(len(sparse))]
    return Decoder(read_sizes(fields), blocks, partial(Norm, epsilon=epsilon))


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, index_dtype: str | None = None,
    on_tensor: OnTensor | None = None,
) -> Loaded:  # fmt: skip
    """Loads a folder; arguments, result, errors and cost as `checkpoint.load_folder`.

    Args:
      index_dtype: of stored index keys; by default as `token_dtype`.
    """
    read = partial(read_decoder, index_dtype=index_dtype)
    return load_folder(path, read, dtype, token_dtype=token_dtype, on_tensor=on_tensor)
