"""What published models remember, as parts: `geometry("gpt-oss-20b")`.

A geometry is what `model.parts()` would declare, without a model: `plan` lays it out, `unimem plan
--geometry` shows it, and the simulator serves it. It computes nothing and needs no JAX.

Keys, values, latents and convolution tails are bfloat16 and recurrent states float32, as engines
store them by default. A layer without a mixer that remembers (a layer of experts alone) keeps its
number and has no part. Sizes come from the models' published configurations; docs/MODELS.md has the
bytes, and says which sizes were assumed because no configuration was public.
"""

from collections.abc import Callable, Collection

from unimem_jax.errors import UsageError
from unimem_jax.spec import CONTEXT, REQUEST, Lifetime, Part, Site, window

type Layer = tuple[tuple[str, tuple[int, ...], str, Lifetime], ...]  # name, shape, dtype, lifetime

TAPS = 4  # of every short convolution but LFM2's; a tail holds one input less
HEAD = 128  # channels of a recurrent head, in keys and in values, but for Mamba


def geometry(name: str) -> tuple[Part, ...]:
    """The parts of a published model.

    Args:
      name: one of `geometry_names()`, for example "gpt-oss-20b" or "kimi-k3".
    Raises:
      UsageError: for another name.
    """
    if not isinstance(name, str) or name not in _LAYERS:
        raise UsageError(f"no geometry is named {name!r}; known: {', '.join(_LAYERS)}")
    return tuple(
        Part(Site(index), *kept) for index, layer in enumerate(_LAYERS[name]()) for kept in layer
    )


def geometry_names() -> tuple[str, ...]:
    """The names that `geometry` knows."""
    return tuple(_LAYERS)


def _attention(heads: int, width: int, lifetime: Lifetime = CONTEXT) -> Layer:
    """Keys and values of grouped-query attention."""
    return tuple((name, (heads, width), "bfloat16", lifetime) for name in ("key", "value"))


def _latent() -> Layer:
    """Multi-head latent attention: values are the latent itself, keys also have the rope slice."""
    return (("latent", (512,), "bfloat16", CONTEXT), ("rope", (64,), "bfloat16", CONTEXT))


def _index_key() -> Layer:
    """The one key that all index heads of sparse attention share."""
    return (("index_key", (128,), "bfloat16", CONTEXT),)


def _latent_fp8() -> Layer:
    """Latent and index key in 8 bits: a scale per 128 channels; the rope slice stays bfloat16."""
    return (
        ("latent", (512,), "float8_e4m3fn", CONTEXT),
        ("latent_scale", (4,), "float32", CONTEXT),
        ("rope", (64,), "bfloat16", CONTEXT),
        ("index_key", (128,), "float8_e4m3fn", CONTEXT),
        ("index_scale", (1,), "float32", CONTEXT),
    )


def _tail(channels: int, name: str = "conv", taps: int = TAPS) -> Layer:
    """The last inputs of a causal short convolution."""
    return ((name, (taps - 1, channels), "bfloat16", REQUEST),)


def _delta(value_heads: int) -> Layer:
    """Gated DeltaNet with 16 key heads; its convolution runs over queries, keys and values."""
    state = ("state", (value_heads, HEAD, HEAD), "float32", REQUEST)
    return (*_tail((16 + 16 + value_heads) * HEAD), state)


def _kimi_delta(heads: int) -> Layer:
    """Kimi delta attention: as many key heads as value heads."""
    return (*_tail(3 * heads * HEAD), ("state", (heads, HEAD, HEAD), "float32", REQUEST))


def _mamba(heads: int, width: int, state: int, groups: int) -> Layer:
    """Mamba2; its convolution runs over x, B and C."""
    channels = heads * width + 2 * groups * state
    return (*_tail(channels), ("state", (heads, width, state), "float32", REQUEST))


def _inkling(heads: int, lifetime: Lifetime) -> Layer:
    """Attention, and a short convolution after each of keys, values, mixer and experts."""
    kept = heads * HEAD
    tails = {"key_conv": kept, "value_conv": kept, "mixer_conv": 6144, "expert_conv": 6144}
    streams = (part for name, channels in tails.items() for part in _tail(channels, name))
    return (*_attention(heads, HEAD, lifetime), *streams)


def _cycle(count: int, period: int, most: Layer, last: Layer) -> list[Layer]:
    """`count` layers, of which every `period`-th is another."""
    return [most if (index + 1) % period else last for index in range(count)]


def _listed(count: int, numbers: Collection[int], most: Layer, listed: Layer) -> list[Layer]:
    """`count` layers, of which those with the `numbers`, counted from 1, are others."""
    return [listed if index + 1 in numbers else most for index in range(count)]


def _kimi_k3(full: Layer) -> list[Layer]:
    return _listed(93, {*range(4, 93, 4), 93}, _kimi_delta(96), full)


def _gpt_oss(count: int) -> list[Layer]:
    return _cycle(count, 2, _attention(8, 64, window(128)), _attention(8, 64))


def _nemotron(pattern: str) -> list[Layer]:
    """Layers by letter: M is Mamba2, * is attention, E is experts."""
    layers = {"M": _mamba(heads=64, width=64, state=128, groups=8), "*": _attention(2, 128)}
    return [layers.get(letter, ()) for letter in pattern]


_LAYERS: dict[str, Callable[[], list[Layer]]] = {
    "gpt-oss-20b": lambda: _gpt_oss(24),
    "gpt-oss-120b": lambda: _gpt_oss(36),
    "qwen3.5-0.8b": lambda: _cycle(24, 4, _delta(16), _attention(2, 256)),
    "qwen3.5-4b": lambda: _cycle(32, 4, _delta(32), _attention(4, 256)),
    "qwen3.5-9b": lambda: _cycle(32, 4, _delta(32), _attention(4, 256)),
    "qwen3.5-27b": lambda: _cycle(64, 4, _delta(48), _attention(4, 256)),
    "qwen3.5-35b-a3b": lambda: _cycle(40, 4, _delta(32), _attention(2, 256)),
    "qwen3-next-80b-a3b": lambda: _cycle(48, 4, _delta(32), _attention(2, 256)),
    "kimi-linear-48b-a3b": lambda: _listed(
        27, {4, 8, 12, 16, 20, 24, 27}, _kimi_delta(32), _latent()
    ),
    "kimi-k3": lambda: _kimi_k3(_latent()),
    "kimi-k3.1-pro": lambda: _kimi_k3((*_latent(), *_index_key())),
    "deepseek-v3.2": lambda: [(*_latent(), *_index_key())] * 61,
    "deepseek-v3.2-fp8": lambda: [_latent_fp8()] * 61,
    # 62 layers that end with one over the whole context: the first cycle is two layers short.
    "muse-spark-816b-a42b": lambda: _cycle(
        64, 4, _attention(16, 64, window(2048)), _attention(16, 64)
    )[2:],
    "inkling-975b-a41b": lambda: _cycle(66, 6, _inkling(16, window(512)), _inkling(8, CONTEXT)),
    "gemma-3-4b": lambda: _cycle(34, 6, _attention(4, 256, window(1024)), _attention(4, 256)),
    "gemma-3-27b": lambda: _cycle(62, 6, _attention(16, 128, window(1024)), _attention(16, 128)),
    "nemotron-3-nano-30b-a3b": lambda: _nemotron(
        "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "lfm2-1.2b": lambda: _listed(16, {3, 6, 9, 11, 13, 15}, _tail(2048, taps=3), _attention(8, 64)),
}
