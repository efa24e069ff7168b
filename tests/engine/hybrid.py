"""A tiny random model with all three kinds of state, and the slow way to generate with it."""

import jax
import jax.numpy as jnp
import numpy as np

from unimem_jax.spec import CONTEXT, REQUEST, Part, Site, window
from unimem_jax.views import FreshViews

WIDTH, HEADS, SIZE, WINDOW = 32, 2, 16, 10
STATE, NEAR, FAR = Site(0), Site(1), Site(2)


class Hybrid:
    """A recurrence, sliding-window attention and full attention; bytes in, bytes out."""

    vocab_size = 256
    context_tokens = 160
    start_token = 0
    text = "bytes"

    def parts(self):
        shape = (HEADS, SIZE)
        return (
            Part(STATE, "state", (WIDTH,), "float32", REQUEST),
            *(Part(NEAR, name, shape, "float32", window(WINDOW)) for name in ("key", "value")),
            *(Part(FAR, name, shape, "float32", CONTEXT) for name in ("key", "value")),
        )

    def init(self, seed=0):
        """Random parameters, large enough that the most likely token stands out."""
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return rng.normal(0, shape[0] ** -0.5, shape).astype(np.float32)

        attention = {name: normal(WIDTH, WIDTH) * 2 for name in ("query", "key", "value", "out")}
        return {
            "embedding": rng.normal(0, 1, (self.vocab_size, WIDTH)).astype(np.float32),
            "decay": rng.uniform(0.3, 0.95, WIDTH).astype(np.float32),
            "near": attention,
            "far": {name: normal(WIDTH, WIDTH) * 2 for name in attention},
            "head": normal(WIDTH, self.vocab_size) * 3,
        }

    def apply(self, params, tokens, views):
        x = jnp.asarray(params["embedding"]).at[tokens].get(mode="clip")
        x, views = self._remember(params["decay"], x, views)
        fresh = {}
        for site, name in ((NEAR, "near"), (FAR, "far")):
            x, added, views = self._attend(site, params[name], x, views)
            fresh |= added
        return jnp.tanh(views.select(x)) @ params["head"], fresh, views

    def _remember(self, decay, x, views):
        state, views = views.read(STATE, "state")

        def advance(state, token):
            entry, valid = token
            new = state * decay[None, :] + entry
            state = jnp.where(valid[:, None], new, state)
            return state, state

        steps = (jnp.swapaxes(x, 0, 1), jnp.swapaxes(views.valid, 0, 1))
        state, read = jax.lax.scan(advance, state, steps)
        return jnp.swapaxes(read, 0, 1), views.write(STATE, "state", state)

    def _attend(self, site, weights, x, views):
        split = lambda name: (x @ weights[name]).reshape(*x.shape[:2], HEADS, SIZE)  # noqa: E731
        key, value = split("key"), split("value")
        mixed, views = views.attend(site, split("query"), key, value, scale=SIZE**-0.5)
        x = x + mixed.reshape(x.shape) @ weights["out"]
        x = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        return x, {(site, "key"): key, (site, "value"): value}, views


class Recomputed:
    """Generates by running the whole sequence anew for each token: no past, no arena, no rows."""

    def __init__(self, model, params, tokens):
        self.tokens = tokens
        views = lambda length: FreshViews.of(model.parts(), length, tokens)  # noqa: E731
        self.run = jax.jit(lambda ids, length: model.apply(params, ids, views(length))[0])

    def logits(self, ids):
        """Logits [len(ids), V]."""
        padded = np.zeros((1, self.tokens), np.int32)
        padded[0, : len(ids)] = ids
        found = self.run(padded, np.asarray([len(ids)], np.int32))
        return np.array(found)[0, : len(ids)]

    def margins(self, ids, prompt_tokens):
        """By how much each generated token beats every other; negative if another one wins."""
        logits = self.logits(ids)[prompt_tokens - 1 : -1]
        drawn = np.asarray(ids[prompt_tokens:])
        chosen = np.take_along_axis(logits, drawn[:, None], axis=1)[:, 0]
        np.put_along_axis(logits, drawn[:, None], -np.inf, axis=1)
        return chosen - logits.max(axis=1)
