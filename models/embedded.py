"""The model that ships inside the package: a small byte-level hybrid with all three kinds of state.

Layers alternate gated DeltaNet (request state), sliding-window attention and full attention. It was
trained by `bench/train_embedded.py`; `embedded/MODEL_CARD.md` says on what and how well. It is a
model like any other: the engine does not know it.

E1  `apply` is pure. The graph of modules stays on the model; only its arrays cross a jit boundary,
    as nested dictionaries, and both are merged while tracing.
E2  `load` gives weights that fit in name, shape and dtype, or raises; it never gives some of them.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int32
from safetensors import SafetensorError, safe_open
from safetensors.flax import save as serialise

from unimem_jax.errors import UsageError
from unimem_jax.spec import CONTEXT, Part, PartKey, Site, window

from .delta import GatedDeltaNet
from .layers import Attention, RMSNorm, SwiGLU, linear

WEIGHTS = "weights.safetensors"
STORED = "bfloat16"  # of every tensor in the file; arithmetic is float32
STORED_CODE = "BF16"  # what the file calls it


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the network; the defaults are those of the shipped weights.

    Attributes:
      layers: kind of each layer: "delta", "window" or "full".
      attention_heads: query heads, key heads, head size.
      delta_heads: heads, key size Dk, value size Dv.
      taps: inputs that a short convolution sees, the current one included.
    Raises:
      UsageError: for a layer of another kind.
    """

    vocab: int = 256
    width: int = 160
    hidden: int = 432
    layers: tuple[str, ...] = ("delta", "window", "delta", "full", "delta", "window")
    attention_heads: tuple[int, int, int] = (4, 2, 32)
    delta_heads: tuple[int, int, int] = (4, 32, 32)
    taps: int = 4
    window_tokens: int = 64
    rotary_base: float = 10_000.0

    def __post_init__(self) -> None:
        if unknown := set(self.layers) - {"delta", "window", "full"}:
            raise UsageError(f"a layer is delta, window or full, not {unknown.pop()!r}")


class Block(nnx.Module):
    """A mixer of tokens and a feed-forward layer, each added to what comes in."""

    def __init__(self, layer: int, sizes: Sizes, token_dtype: str, rngs: nnx.Rngs):
        site, kind = Site(layer), sizes.layers[layer]
        self.mixer_norm = RMSNorm(sizes.width)
        if kind == "delta":
            self.mixer: Any = GatedDeltaNet(
                site, sizes.width, sizes.delta_heads, taps=sizes.taps, rngs=rngs
            )
        else:
            self.mixer = Attention(
                site, sizes.width, sizes.attention_heads,
                lifetime=CONTEXT if kind == "full" else window(sizes.window_tokens),
                rotary_base=sizes.rotary_base, token_dtype=token_dtype, rngs=rngs,
            )  # fmt: skip
        self.feed_norm = RMSNorm(sizes.width)
        self.feed = SwiGLU(sizes.width, sizes.hidden, rngs)

    def __call__(self, x: Array, views: Any) -> tuple[Array, dict[PartKey, Array], Any]:
        """(x [R, T, width], fresh token parts, views) after this layer."""
        added, fresh, views = self.mixer(self.mixer_norm(x), views)
        x = x + added
        return x + self.feed(self.feed_norm(x)), fresh, views


class Network(nnx.Module):
    """Embedding, blocks, and logits of the tokens that the views select."""

    def __init__(self, sizes: Sizes, token_dtype: str, rngs: nnx.Rngs):
        start = jax.random.normal(rngs.params(), (sizes.vocab, sizes.width), jnp.float32)
        self.embedding = nnx.Param(start)
        layers = range(len(sizes.layers))
        self.blocks = nnx.List([Block(layer, sizes, token_dtype, rngs) for layer in layers])
        self.norm = RMSNorm(sizes.width)
        self.head = linear(sizes.width, sizes.vocab, rngs, zero=True)

    def parts(self) -> tuple[Part, ...]:
        """The parts of all layers, in layer order."""
        return tuple(part for block in self.blocks for part in block.mixer.parts())

    def __call__(self, tokens: Array, views: Any) -> tuple[Array, dict[PartKey, Array], Any]:
        """As `EmbeddedModel.apply`."""
        x = self.embedding[...].at[tokens].get(mode="clip")
        fresh: dict[PartKey, Array] = {}
        for block in self.blocks:
            x, added, views = block(x, views)
            fresh |= added
        logits = self.head(self.norm(views.select(x)))
        return logits.astype(jnp.float32), fresh, views


class EmbeddedModel:
    """The byte-level hybrid, following the model protocol.

    Attributes:
      vocab_size: 256, one token per byte value.
      context_tokens: the longest sequence that it was trained on.
      start_token, end_tokens: byte 0, which begins every document and follows its last byte.
      text: "bytes": a text's tokens are its bytes.
    """

    context_tokens = 1024
    start_token, end_tokens = 0, (0,)
    text = "bytes"

    def __init__(self, sizes: Sizes | None = None, token_dtype: str = "float32"):
        """Makes the graph and no arrays.

        Args:
          sizes: of the network; the shipped ones by default.
          token_dtype: stored dtype of keys and values, a name from `spec.STORED_DTYPES`.
        """
        self.sizes = sizes or Sizes()
        self.vocab_size = self.sizes.vocab
        self._token_dtype = token_dtype
        network: Network = nnx.eval_shape(lambda: self._network(0))
        self._parts = network.parts()
        self._graph, shapes = nnx.split(network)
        self._shapes = nnx.to_pure_dict(shapes)

    def parts(self) -> tuple[Part, ...]:
        """What the model remembers; see docs/ARCHITECTURE.md."""
        return self._parts

    def init(self, seed: int) -> dict[str, Any]:
        """Fresh float32 parameters."""
        return nnx.to_pure_dict(nnx.state(self._network(seed)))

    def apply(
        self, params: dict[str, Any], tokens: Int32[Array, "requests new"], views: Any
    ) -> tuple[Float[Array, "..."], dict[PartKey, Array], Any]:
        """Runs the network on new tokens, given their past as views.

        Args:
          params: as `init` or `load` gives them.
          tokens: byte values.
        Returns:
          Logits float32[R, V] of `views.select`'s tokens, fresh token parts, views with state
          written.
        Cost: about 2 floating point operations per parameter and token, and attention.
        """
        return nnx.merge(self._graph, params)(tokens, views)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Dotted name, such as "blocks.0.mixer.out.kernel", and shape of every parameter."""
        return {name: leaf.shape for name, leaf in _by_name(self._shapes).items()}

    def nest(self, tensors: dict[str, Array]) -> dict[str, Any]:
        """Parameters as `apply` takes them, from a dictionary with the names of `shapes()`."""
        names, tree = list(_by_name(self._shapes)), jax.tree.structure(self._shapes)
        return jax.tree.unflatten(tree, [tensors[name] for name in names])

    def _network(self, seed: int) -> Network:
        return Network(self.sizes, self._token_dtype, nnx.Rngs(seed))


def load(path: str | Path | None = None) -> tuple[EmbeddedModel, dict[str, Any], None]:
    """The shipped model, or another file of weights for the same network.

    Args:
      path: a weight file or the folder that holds `weights.safetensors`; None: the one in this
        package.
    Returns:
      The model, its parameters as float32, and None in place of a tokenizer: text is bytes.
    Raises:
      UsageError: if the file is missing or corrupt, or a tensor is missing, extra, of another shape
        or dtype, or not finite; the message names it.
    Cost: reads a file of under 4 MB; float32 parameters take twice that.
    """
    model = EmbeddedModel()
    if path is not None:
        file = Path(path)
        return model, _read(model, file / WEIGHTS if file.is_dir() else file), None
    with resources.as_file(resources.files(__package__) / "embedded" / WEIGHTS) as file:
        return model, _read(model, file), None


def save(params: dict[str, Any], path: str | Path) -> None:
    """Writes parameters, rounded to the stored dtype, as a file that `load` reads."""
    rounded = {name: leaf.astype(STORED) for name, leaf in _by_name(params).items()}
    Path(path).write_bytes(serialise(rounded))


def _read(model: EmbeddedModel, file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise UsageError(f"no weights at {file}; give a weight file or a folder with {WEIGHTS}")
    try:
        with safe_open(file, framework="flax") as opened:
            _require_tensors(model, file, opened)
            tensors = {name: opened.get_tensor(name) for name in model.shapes()}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{file} is not a readable safetensors file: {error}") from error
    # In NumPy: JAX would compile a program for each shape.
    wide = {name: np.asarray(tensor).astype(np.float32) for name, tensor in tensors.items()}
    for name, tensor in wide.items():
        if not np.isfinite(tensor).all():
            raise UsageError(f"{file}: tensor {name} holds values that are not finite; get it anew")
    return model.nest({name: jnp.asarray(tensor) for name, tensor in wide.items()})


def _require_tensors(model: EmbeddedModel, file: Path, opened: Any) -> None:
    expected, found = model.shapes(), set(opened.keys())
    missing, extra = sorted(expected.keys() - found), sorted(found - expected.keys())
    if missing:
        raise UsageError(f"{file} lacks {len(missing)} tensors of this model: {_listed(missing)}")
    if extra:
        raise UsageError(f"{file} has {len(extra)} tensors that this model lacks: {_listed(extra)}")
    for name, shape in expected.items():
        stored = opened.get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise UsageError(
                f"{file}: tensor {name} is {stored.get_shape()}; this model has {list(shape)}"
            )
        if stored.get_dtype() != STORED_CODE:
            raise UsageError(
                f"{file}: tensor {name} is {stored.get_dtype()}; weights are {STORED_CODE}"
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _by_name(params: dict[str, Any]) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}
