"""Your own decode loop: the arena is one leaf of a pytree that your jit threads and donates.

Run it: python examples/decode_loop.py
"""

from functools import partial

import jax
import numpy as np

import unimem_jax as um

PROMPTS = ("In the beginning", "And the LORD said unto Moses,", "Blessed are")
NEW_TOKENS, FUSED = 64, 16

model, params, _ = um.load("embedded")
plan = um.plan(model.parts(), arena_bytes=8 << 20, page_tokens=16)
print(plan)
memory = um.Memory(plan, rows=8, context_tokens=model.context_tokens)
device = memory.init()  # one pytree; the arena is one of its leaves
step = um.step(model, plan)  # pure: (params, device, packet) -> (device, out)


@partial(jax.jit, donate_argnums=1)
def run_one(params, device, packet):
    """One chunk of a prompt, or moves."""
    return step(params, device, packet)


@partial(jax.jit, donate_argnums=1)
def run_many(params, device, packets):
    """Several decode steps in one program: add what your research needs around `step`."""
    return jax.lax.scan(lambda device, packet: step(params, device, packet), device, packets)


requests, texts = [], []
for prompt in PROMPTS:
    tokens = [model.start_token, *prompt.encode()]
    request = memory.admit(len(tokens), max_new=NEW_TOKENS)  # or raises with the itemised need
    for packet in memory.prefill(request, tokens):
        device, out = run_one(params, device, packet)
    requests.append(request)
    texts.append([int(out.sampled[0])])

for _ in range(NEW_TOKENS // FUSED):
    for packets in memory.decode(FUSED, requests):  # pages for 16 steps granted ahead
        device, out = run_many(params, device, packets)
    for text, sampled in zip(texts, np.asarray(out.sampled).T, strict=True):
        text.extend(int(token) for token in sampled)

for prompt, text, request in zip(PROMPTS, texts, requests, strict=True):
    print(prompt + bytes(token for token in text if token >= 0).decode(errors="replace"))
    memory.free(request)
