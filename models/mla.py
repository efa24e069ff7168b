"""Multi-head latent attention [DeepSeek-AI 2024, arXiv:2405.04434]: one small part per token.

What a token leaves is a latent c, from which every head's key and value are made, and beside it a
slice r of the key that all heads share and that alone may turn with the position.

    latent [rank + shared] = (c, r)       key_h = (K_h c, r)       value_h = V_h c

Two ways give the same result. Expanded: keys and values of every token seen are made, then attended
to. Absorbed: (K_h c) . q = c . (K_h' q), so each query is taken to the latent's space, all heads
read one key, the part itself, and what they read is taken back by V_h. The first multiplies less
where many queries see few tokens, the second where few see many; lengths decide while tracing.

L1  The part is cast to its stored dtype before it is used: a chunk boundary changes nothing.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float
from unimem_jax.pallas_kernels.paged_attention import Tokens, attend

from unimem_jax.spec import CONTEXT, STORED_DTYPES, Part, Site

from .decoder import PRECISION, Matrix, Mixed, Norm, require_float, split_heads
from .fields import Fields
from .rotary import Rotary, turn_pairs

LATENT_EPSILON = 1e-6  # of the norms of latents, whatever the other norms have


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of latent attention.

    Attributes:
      rank, shared: channels of c and of r.
      own, value: channels of a head's K_h c, and of its value.
      query_rank: of the latent that queries are made of; None: they are made of the input.
    """

    heads: int
    rank: int
    shared: int
    own: int
    value: int
    query_rank: int | None = None


class Seen(NamedTuple):
    """Parts [R, S or T, rank + shared] that queries see, of tokens before them and of their own.

    `past_mask` is bool[R, 1 or T, S], `fresh_mask` is bool[R, T, T], or None for all before it.
    """

    past: Array
    past_mask: Array
    fresh: Array
    fresh_mask: Array | None = None


class LatentAttention(nnx.Module):
    """Latent attention; its site owns "latent" [rank + shared] per token, for the whole context.

    Attributes:
      rotary: turns neighbours of the shared slice; None: nothing turns.
    """

    name = "self_attn"

    def __init__(
        self, site: Site, width: int, sizes: LatentSizes, *,
        rotary: Rotary | None, token_dtype: str,
    ):  # fmt: skip
        """Declares the layer.

        Args:
          token_dtype: stored dtype of the latent.
        Raises:
          UsageError: it is to be stored as integers, for which there is no scale.
        """
        require_float(token_dtype, "latents")
        self.site, self.sizes, self.rotary, self.token_dtype = site, sizes, rotary, token_dtype
        self.scale = (sizes.own + sizes.shared) ** -0.5
        self.scale *= 1.0 if rotary is None else rotary.score_scale
        queries = sizes.heads * (sizes.own + sizes.shared)
        if sizes.query_rank is None:
            self.q_proj = Matrix(queries, width)
        else:
            self.q_a_proj = Matrix(sizes.query_rank, width)
            self.q_a_layernorm = Norm(sizes.query_rank, epsilon=LATENT_EPSILON)
            self.q_b_proj = Matrix(queries, sizes.query_rank)
        self.kv_a_proj_with_mqa = Matrix(sizes.rank + sizes.shared, width)
        self.kv_a_layernorm = Norm(sizes.rank, epsilon=LATENT_EPSILON)
        self.kv_b_proj = Matrix(sizes.heads * (sizes.own + sizes.value), sizes.rank)
        self.o_proj = Matrix(width, sizes.heads * sizes.value)

    def parts(self) -> tuple[Part, ...]:
        """As `Mixer.parts`."""
        channels = self.sizes.rank + self.sizes.shared
        return (Part(self.site, "latent", (channels,), self.token_dtype, CONTEXT),)

    def __call__(self, x: Float[Array, "requests tokens width"], views: Any) -> Mixed:
        """As `Mixer.__call__`."""
        sizes = self.sizes
        hidden = x if sizes.query_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        made = self.q_proj(x) if sizes.query_rank is None else self.q_b_proj(hidden)
        own, shared = jnp.split(split_heads(made, sizes.heads), [sizes.own], axis=-1)
        latent, slice_ = jnp.split(self.kv_a_proj_with_mqa(x), [sizes.rank], axis=-1)
        if self.rotary is not None:
            table = self.rotary.table(views.positions)
            shared = turn_pairs(shared, table)
            slice_ = turn_pairs(slice_[:, :, None], table)[:, :, 0]
        fresh = jnp.concatenate([self.kv_a_layernorm(latent), slice_], axis=-1)

        past, mask, views = views.past(self.site, "latent")
        kept = fresh.astype(STORED_DTYPES[self.token_dtype]).astype(x.dtype)
        seen = Seen(past.astype(x.dtype), mask, kept)
        seen, more, views = self.narrow(seen, x, hidden, views)
        mixed = self.attend(own, shared, seen, views.valid)
        added = self.o_proj(mixed.reshape(*x.shape[:2], -1))
        return added, {(self.site, "latent"): fresh, **more}, views

    def narrow(
        self, seen: Seen, x: Array, hidden: Array, views: Any
    ) -> tuple[Seen, dict[Any, Array], Any]:
        """What is left to see, further fresh parts, and views; here everything.

        Args:
          x, hidden: input of the layer, and what queries are made of.
        """
        return seen, {}, views

    def attend(
        self,
        own: Float[Array, "requests tokens heads own"],
        shared: Float[Array, "requests tokens heads shared"],
        seen: Seen,
        valid: Bool[Array, "requests tokens"],
    ) -> Float[Array, "requests tokens heads value"]:
        """What queries (own, shared) read, the cheaper way."""
        count, sizes = own.shape[1], self.sizes
        tokens = seen.past.shape[1] + count
        per_token = sizes.rank * (sizes.own + sizes.value)
        absorbed = count * per_token + count * tokens * (2 * sizes.rank + sizes.shared)
        expanded = tokens * per_token + count * tokens * (sizes.own + sizes.shared + sizes.value)
        way = self.attend_absorbed if absorbed <= expanded else self.attend_expanded
        return way(own, shared, seen, valid)

    def attend_absorbed(self, own: Array, shared: Array, seen: Seen, valid: Array) -> Array:
        """As `attend`: heads read latents."""
        keys, values = self._matrices()
        query = _product("rtho,hoc->rthc", own, keys)
        query = jnp.concatenate([query, shared], axis=-1)

        def as_tokens(part: Array) -> Tokens:
            key = part[:, :, None, :]
            return Tokens(key, key[..., : self.sizes.rank])

        read = self._attend(query, as_tokens, seen, valid)
        return _product("rthc,hvc->rthv", read, values)

    def attend_expanded(self, own: Array, shared: Array, seen: Seen, valid: Array) -> Array:
        """As `attend`: heads read keys and values of their own."""
        keys, values = self._matrices()
        query = jnp.concatenate([own, shared], axis=-1)

        def as_tokens(part: Array) -> Tokens:
            latent, slice_ = jnp.split(part, [self.sizes.rank], axis=-1)
            key = _product("rsc,hoc->rsho", latent, keys)
            slice_ = jnp.broadcast_to(slice_[:, :, None], (*key.shape[:3], slice_.shape[-1]))
            key = jnp.concatenate([key, slice_], axis=-1)
            return Tokens(key, _product("rsc,hvc->rshv", latent, values))

        return self._attend(query, as_tokens, seen, valid)

    def _attend(self, query: Array, as_tokens: Any, seen: Seen, valid: Array) -> Array:
        """Attention over the tokens that `as_tokens` makes of parts."""
        past = mask = None
        if seen.past.shape[1]:
            past, mask = as_tokens(seen.past), seen.past_mask
        return attend(
            query, as_tokens(seen.fresh), valid, past, mask,
            scale=self.scale, fresh_mask=seen.fresh_mask,
        )  # fmt: skip

    def _matrices(self) -> tuple[Array, Array]:
        """[heads, own, rank] and [heads, value, rank]: K_h and V_h."""
        sizes = self.sizes
        both = self.kv_b_proj.weight[...].reshape(sizes.heads, -1, sizes.rank)
        return both[:, : sizes.own], both[:, sizes.own :]


def read_latent_sizes(fields: Fields, *, has_query_rank: bool) -> LatentSizes:
    """The sizes that a configuration asks for.

    Raises:
      UsageError: a field is missing, or asks for what is not computed here.
    """
    heads = fields.count("num_attention_heads")
    fields.require(num_key_value_heads=heads)
    if not has_query_rank:
        fields.require(q_lora_rank=None)
    return LatentSizes(
        heads=heads,
        rank=fields.count("kv_lora_rank"),
        shared=fields.count("qk_rope_head_dim"),
        own=fields.count("qk_nope_head_dim"),
        value=fields.count("v_head_dim"),
        query_rank=fields.count("q_lora_rank") if has_query_rank else None,
    )


def _product(formula: str, x: Array, matrices: Array) -> Array:
    """Float32 sums, rounded to the dtype of `x`."""
    found = jnp.einsum(
        formula, x, matrices, precision=PRECISION, preferred_element_type=jnp.float32
    )
    return found.astype(x.dtype)
