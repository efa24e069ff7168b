"""Step programs over arenas of any size, to compile and not to run."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.device.models import MIXTURES, embedded
from tests.in_place import MEBIBYTE
from unimem_jax.packet import Packet, step_shape, upkeep_shape, word_count
from unimem_jax.plan import plan
from unimem_jax.step import init_device, step

PAGE_TOKENS, ROW_PAGES, FUSED_STEPS = 16, 64, 8


@dataclass(frozen=True)
class Case:
    """A packet of up to `rows` rows of `tokens` tokens, reading `pages` pages of the past."""

    rows: int
    tokens: int
    pages: int

    def __str__(self):
        return f"{self.rows}x{self.tokens} over {self.pages} pages"

    @property
    def temp_bytes(self):
        """What a step of the tiny models may hold: scores of 4 heads, some times, and 1 MiB."""
        past = self.pages * PAGE_TOKENS + self.tokens
        return MEBIBYTE + 6 * 4 * self.rows * self.tokens * past


class Steps:
    """The step of a tiny model on an arena, and the shapes of its arguments."""

    def __init__(self, name, arena_bytes, store=None):
        model = embedded()[0] if name == "embedded" else MIXTURES[name]
        params = model.nest(model.shapes()) if name == "embedded" else model.init()
        self.plan = plan(model.parts(), arena_bytes, PAGE_TOKENS)
        store = store(self.plan) if store else None
        self.run = step(model, self.plan, store)
        is_shape = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
        self.params = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf if is_shape(leaf) else leaf.shape, jnp.float32),
            params,
            is_leaf=is_shape,
        )
        self.device = jax.eval_shape(lambda: init_device(self.plan, 16, ROW_PAGES))

    def packet(self, case):
        """A step packet; for a number instead of a case, an upkeep packet of that sub-pool."""
        if isinstance(case, int):
            shape = upkeep_shape(self.plan, case)
        else:
            shape = step_shape(self.plan, case.rows, case.tokens, case.pages)
        return Packet(jax.ShapeDtypeStruct((word_count(shape),), jnp.int32), shape)

    def arguments(self, case, steps=None):
        packet = self.packet(case)
        if steps is not None:
            words = jax.ShapeDtypeStruct((steps, *packet.words.shape), jnp.int32)
            packet = Packet(words, packet.shape)
        return self.params, self.device, packet

    def scanned(self, params, device, packets):
        """Fused steps, as `Memory.decode` makes their packets."""
        return lax.scan(lambda device, packet: self.run(params, device, packet), device, packets)

    def until_zero(self, params, device, packet):
        """A user's own loop: steps until all rows sample token 0, counting them."""

        def body(carry):
            device, _, count = carry
            device, out = self.run(params, device, packet)
            return device, out.sampled, count + 1

        start = device, jnp.full((packet.shape.rows,), -1, jnp.int32), np.int32(0)
        return lax.while_loop(lambda carry: jnp.any(carry[1] != 0), body, start)

    def if_positive(self, params, device, packet):
        """A user's own branch: a step, or none."""
        nothing = lambda device: (device, jnp.zeros((packet.shape.rows,), jnp.int32))  # noqa: E731

        def some(device):
            device, out = self.run(params, device, packet)
            return device, out.sampled

        return lax.cond(packet.words[0] > 0, some, nothing, device)
