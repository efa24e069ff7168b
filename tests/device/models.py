"""Tiny random models for the device path: any mix of layers, dtypes and shapes of parts."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from unimem_jax.models.embedded import EmbeddedModel, Sizes

from unimem_jax.spec import CONTEXT, REQUEST, STORED_DTYPES, Lifetime, Part, Site, window

WIDTH, VOCABULARY = 8, 13


@dataclass(frozen=True)
class Attending:
    """A layer of attention, 2 query heads per key head."""

    lifetime: Lifetime
    dtype: str = "float32"
    key_heads: int = 1
    head: int = 8
    value_head: int = 8

    def parts(self, site):
        key, value = (self.key_heads, self.head), (self.key_heads, self.value_head)
        return (
            Part(site, "key", key, self.dtype, self.lifetime),
            Part(site, "value", value, self.dtype, self.lifetime),
        )

    def matrices(self):
        heads = 2 * self.key_heads
        return {
            "query": (WIDTH, heads * self.head),
            "key": (WIDTH, self.key_heads * self.head),
            "value": (WIDTH, self.key_heads * self.value_head),
            "out": (heads * self.value_head, WIDTH),
        }

    def apply(self, site, weights, x, views):
        # Integers hold more of a value if it is larger; keys are exact multiples all the same.
        gain = {"int8": 16.0, "int4": 2.0}.get(self.dtype, 1.0)
        heads = {
            name: (x @ weights[name]).reshape(*x.shape[:2], -1, width)
            for name, width in (
                ("query", self.head), ("key", self.head), ("value", self.value_head)
            )
        }  # fmt: skip
        query, key, value = heads["query"], heads["key"] * gain, heads["value"] * gain
        mixed, views = views.attend(site, query, key, value, scale=self.head**-0.5 / gain)
        out = mixed.reshape(*x.shape[:2], -1) @ weights["out"] / gain
        return out, {(site, "key"): key, (site, "value"): value}, views


@dataclass(frozen=True)
class Remembering:
    """A decaying sum of what came, and a counter of tokens beside it."""

    shape: tuple[int, ...] = (WIDTH,)
    dtype: str = "float32"

    def parts(self, site):
        return (
            Part(site, "state", self.shape, self.dtype, REQUEST),
            Part(site, "seen", (1,), "int32", REQUEST),
        )

    def matrices(self):
        size = int(np.prod(self.shape))
        return {"in": (WIDTH, size), "out": (size, WIDTH)}

    def apply(self, site, weights, x, views):
        state, views = views.read(site, "state")
        seen, views = views.read(site, "seen")
        flat = state.reshape(x.shape[0], -1)

        def advance(state, token):
            added, valid = token
            new = (state.astype(jnp.float32) * 0.7 + added).astype(state.dtype)
            state = jnp.where(valid[:, None], new, state)
            return state, state.astype(jnp.float32)

        steps = jnp.swapaxes(x @ weights["in"], 0, 1), jnp.swapaxes(views.valid, 0, 1)
        flat, read = jax.lax.scan(advance, flat, steps)
        views = views.write(site, "state", flat.reshape(state.shape))
        counted = seen + views.valid.sum(axis=1, dtype=jnp.int32)[:, None]
        views = views.write(site, "seen", counted)
        age = seen[:, :, None] + jnp.arange(1, x.shape[1] + 1, dtype=jnp.int32)[None, :, None]
        slow = 1 / (1 + age.astype(jnp.float32))
        return (jnp.swapaxes(read, 0, 1) @ weights["out"]) * (1 + slow), {}, views


@dataclass(frozen=True)
class Pooling:
    """Attention over means of groups of tokens, each seen once its group is complete."""

    lifetime: Lifetime
    stride: int
    dtype: str = "float32"

    def parts(self, site):
        return (
            Part(site, "pooled", (WIDTH,), self.dtype, self.lifetime, self.stride),
            Part(site, "sum", (WIDTH,), "float32", REQUEST),
        )

    def matrices(self):
        return {"query": (WIDTH, WIDTH), "key": (WIDTH, WIDTH)}

    def apply(self, site, weights, x, views):
        begun, views = views.read(site, "sum")
        past, seen, views = views.past(site, "pooled")

        def advance(total, token):
            added, position, valid = token
            total = jnp.where((position % self.stride == 0)[:, None], 0.0, total) + added
            total = jnp.where(valid[:, None], total, 0.0)
            return total, total

        steps = (x @ weights["key"]).swapaxes(0, 1), views.positions.T, views.valid.T
        _, sums = jax.lax.scan(advance, begun, steps)
        sums = sums.swapaxes(0, 1)
        last = views.valid.sum(axis=1, dtype=jnp.int32)[:, None, None] - 1
        kept = jnp.take_along_axis(sums, jnp.maximum(last, 0), axis=1)[:, 0]
        views = views.write(site, "sum", kept)
        pooled = (sums / self.stride).astype(STORED_DTYPES[self.dtype])
        at = views.positions[:, None, :]
        fresh = views.valid[:, None, :] & (at <= views.positions[:, :, None])
        fresh = fresh & (at % self.stride == self.stride - 1)
        if self.lifetime.tokens:
            fresh = fresh & (at > views.positions[:, :, None] - self.lifetime.tokens)
        seen = jnp.broadcast_to(seen, (*fresh.shape[:2], seen.shape[2]))
        seen = jnp.concatenate([seen, fresh], axis=2)
        keys = jnp.concatenate([past, pooled], axis=1).astype(jnp.float32)
        keys = jnp.where(seen.any(axis=1)[:, :, None], keys, 0.0)
        scores = jnp.where(seen, (x @ weights["query"]) @ keys.swapaxes(1, 2), -1e9)
        mixed = jnp.where(seen, jax.nn.softmax(scores), 0.0) @ keys
        return mixed, {(site, "pooled"): pooled}, views


class Mixture:
    """Any layers, one after the other; follows the model protocol. With a stream it is a draft."""

    vocab_size = VOCABULARY
    context_tokens = None

    def __init__(self, *layers, stream=""):
        self.layers, self.stream = layers, stream

    def parts(self):
        own = [p for i, layer in enumerate(self.layers) for p in layer.parts(self.site(i))]
        return tuple(replace(part, draft=bool(self.stream)) for part in own)

    def site(self, index):
        return Site(index, stream=self.stream)

    def init(self, seed=0):
        rng = np.random.default_rng(seed)

        def normal(shape):
            return rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)

        return {
            "embedding": rng.normal(0, 1, (VOCABULARY, WIDTH)).astype(np.float32),
            "layers": [
                {name: normal(shape) for name, shape in layer.matrices().items()}
                for layer in self.layers
            ],
            "head": normal((WIDTH, VOCABULARY)) * 3,
        }

    def apply(self, params, tokens, views):
        x = jnp.asarray(params["embedding"]).at[tokens].get(mode="clip")
        fresh = {}
        for index, (layer, weights) in enumerate(zip(self.layers, params["layers"], strict=True)):
            added, parts, views = layer.apply(self.site(index), weights, x, views)
            x = x + added
            x = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
            fresh |= parts
        return views.select(x) @ params["head"], fresh, views


NEAR, NEARER = window(10), window(3)

HYBRID = Mixture(Remembering(), Attending(NEAR), Attending(CONTEXT))
MIXTURES = {
    "hybrid": HYBRID,
    "two windows": Mixture(
        Attending(NEARER, key_heads=2), Remembering((2, 3)), Attending(NEAR), Attending(CONTEXT)
    ),
    "attention only": Mixture(Attending(CONTEXT)),
    "state only": Mixture(Remembering((70,)), Remembering()),
    "window only": Mixture(Attending(NEARER)),
    "halves": Mixture(
        Remembering((5, 3), "bfloat16"), Attending(NEAR, "float16"), Attending(CONTEXT, "bfloat16")
    ),
    "bytes": Mixture(Attending(NEAR, "int8"), Attending(CONTEXT, "float8_e4m3fn")),
    "odd shapes": Mixture(
        Attending(NEAR, "bfloat16", key_heads=3, head=5, value_head=1),
        Remembering((3, 1, 43), "float16"),
        Attending(CONTEXT, "int8", head=3, value_head=7),
        Attending(CONTEXT, "float8_e5m2", head=6, value_head=11),
    ),
    "four bits": Mixture(Attending(NEAR, "int4"), Attending(CONTEXT, "float4_e2m1fn")),
    "pooled": Mixture(Pooling(CONTEXT, 4), Attending(CONTEXT), Pooling(NEAR, 2), Attending(NEAR)),
}


def embedded(token_dtype="float32"):
    """A small network like the one that ships, and parameters that are all random.

    `EmbeddedModel.init` starts its last matrices at zero, so that every logit would be zero.
    """
    sizes = Sizes(
        vocab=VOCABULARY, width=16, hidden=16, layers=("delta", "window", "full"),
        attention_heads=(2, 1, 8), delta_heads=(2, 4, 4), window_tokens=10,
    )  # fmt: skip
    model = EmbeddedModel(sizes, token_dtype)
    rng = np.random.default_rng(0)
    params = {
        name: rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
        for name, shape in model.shapes().items()
    }
    return model, model.nest(params)
