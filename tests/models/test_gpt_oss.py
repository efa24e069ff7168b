"""GPT-OSS beside a slow twin and beside Transformers' own numbers, alone and through the arena."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from unimem_jax.models.experts import choose_experts, mix_experts
from unimem_jax.models.gpt_oss import GptOss, load
from unimem_jax.models.gpt_oss_config import read_sizes
from unimem_jax.models.mxfp4 import dequantise
from unimem_jax.models.rotary import read_rotary

import unimem_jax as um
from tests.models.gpt_oss_twin import CONFIG, Twin, random_tensors, write_folder
from tests.models.through_arena import Service
from unimem_jax.errors import UsageError
from unimem_jax.spec import CONTEXT, Site, window

TOLERANCE = 1e-4
NEW_TOKENS = 24
ORACLES = Path(os.environ.get("UNIMEM_ORACLES", Path(__file__).parents[3] / "shared" / "oracles"))
# Every page size and every chunk once: 40 is a whole prompt.
WAYS = {"page 1": (1, 7), "page 8": (8, 16), "page 16": (16, 40), "page 64": (64, 1)}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[GptOss, Any, Twin]:
    tensors = random_tensors(CONFIG, seed=3)
    folder = write_folder(tmp_path_factory.mktemp("tiny"), CONFIG, tensors)
    model, params, tokenizer = load(folder)
    assert tokenizer is None
    return model, params, Twin(CONFIG, tensors)


def test_a_folder_brings_its_tokenizer_and_shows_each_tensor(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="of the extra `text`")
    tensors = random_tensors(CONFIG, seed=3)
    folder = write_folder(tmp_path, CONFIG, tensors)
    words = tokenizers.models.WordLevel({"in": 0, "the": 1}, unk_token="the")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    seen: list[Any] = []
    model, _, text = load(folder, token_dtype="bfloat16", on_tensor=lambda *step: seen.append(step))
    assert text is not None
    assert text.encode("in") == [0]
    assert len(seen) == len(tensors)
    assert {part.dtype for part in model.parts()} == {"bfloat16"}


@pytest.fixture(scope="module")
def oracle() -> tuple[GptOss, Any, Any, Any]:
    folder = ORACLES / "gpt_oss"
    if not folder.is_dir():
        pytest.skip(f"no oracle at {folder}; UNIMEM_ORACLES names another place")
    model, params, _ = load(folder)
    return model, params, np.load(folder / "ref_fp32.npz"), np.load(folder / "state_fp32.npz")


def whole(model: GptOss, params: Any, prompts: list[list[int]]) -> np.ndarray:
    """Logits of every token of every prompt, without a past."""
    rows = np.zeros((len(prompts), max(map(len, prompts))), np.int32)
    for row, ids in zip(rows, prompts, strict=True):
        row[: len(ids)] = ids
    lengths = jnp.asarray([len(ids) for ids in prompts], jnp.int32)

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> jax.Array:
        views = um.FreshViews.of(model.parts(), lengths, rows.shape[1])
        return model.apply(params, tokens, views)[0]

    return np.asarray(run(params, jnp.asarray(rows)))


def near(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE)


def test_whole_sequences_give_the_logits_of_the_slow_twin(tiny: Any) -> None:
    model, params, twin = tiny
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, length).tolist() for length in (60, 33, 1)]
    found = whole(model, params, prompts)
    for row, ids in zip(found, prompts, strict=True):
        near(row[: len(ids)], twin.run(ids)[0])


def test_windows_that_slide_over_many_pages_change_nothing(tiny: Any) -> None:
    model, params, twin = tiny
    ids = np.random.default_rng(1).integers(0, 96, 150).tolist()
    service = Service(model, params, page_tokens=4, chunk_tokens=16, rows=1, context_tokens=200)
    (tokens,), logits = service.generate([ids], 12, retracted=(0, 5))
    wanted = twin.run([*ids, *tokens[:-1]])[0][len(ids) - 1 :]
    near(logits[0], wanted)
    assert tokens == wanted.argmax(axis=1).tolist()


def test_parts_are_windows_and_contexts_of_the_configured_layers(tiny: Any) -> None:
    model, _, _ = tiny
    lifetimes = {part.key: part.lifetime for part in model.parts()}
    expected = [window(11), CONTEXT, window(11)]
    assert lifetimes == {
        (Site(layer), name): lifetime
        for layer, lifetime in enumerate(expected)
        for name in ("key", "value")
    }
    assert {part.shape for part in model.parts()} == {(2, 8)}
    assert (model.vocab_size, model.context_tokens, model.end_tokens) == (96, 256, (7,))


def test_transformers_logits_are_reproduced_without_a_past(oracle: Any) -> None:
    model, params, reference, _ = oracle
    prompts = [reference[f"prompt{at}"].tolist() for at in range(3)]
    found = whole(model, params, prompts)
    for at, ids in enumerate(prompts):
        near(found[at, : len(ids)], reference[f"logits{at}"])


@pytest.mark.parametrize("way", WAYS)
def test_the_arena_reproduces_transformers_logits_tokens_and_state(way: str, oracle: Any) -> None:
    model, params, reference, state = oracle
    page_tokens, chunk_tokens = WAYS[way]
    service = Service(
        model, params, page_tokens=page_tokens, chunk_tokens=chunk_tokens, rows=4,
        context_tokens=128,
    )  # fmt: skip
    prompts = [reference[f"prompt{at}"].tolist() for at in range(3)]
    require_state(service, prompts[0], state)
    together = service.generate(prompts, NEW_TOKENS, retracted=(1, 10))
    alone = [service.generate([prompt], NEW_TOKENS) for prompt in prompts[:2]]
    for at in range(3):
        wanted = reference[f"gen{at}"].tolist()
        near(together[1][at], reference[f"gen_logits{at}"])
        assert together[0][at] == wanted
    for at, (tokens, logits) in enumerate(alone):
        near(logits[0], reference[f"gen_logits{at}"])
        assert tokens[0] == reference[f"gen{at}"].tolist()


def require_state(service: Service, prompt: list[int], state: Any) -> None:
    """After prefill the arena holds Transformers' keys and values: all, or the last W - 1."""
    (request,), _ = service.prefill([prompt], NEW_TOKENS)
    for layer in range(6):
        for name in ("key", "value"):
            wanted = state[f"L{layer}.{name}s"][0].swapaxes(0, 1)
            kept = range(len(prompt) - len(wanted), len(prompt))
            near(service.stored(request, (Site(layer), name), kept), wanted)
    service.memory.free(request)


def test_bfloat16_weights_stay_bfloat16_and_near_their_float32_values(tmp_path: Path) -> None:
    # All experts are chosen: rounding cannot flip a choice.
    config = {**CONFIG, "num_local_experts": 2, "num_experts_per_tok": 2}
    rounded = {
        name: tensor.astype(ml_dtypes.bfloat16)
        for name, tensor in random_tensors(config, 5).items()
    }
    folder = write_folder(tmp_path, config, rounded)
    model, params, _ = load(folder)
    wide, wide_params, _ = load(folder, "float32")
    assert {part.dtype for part in model.parts()} == {"bfloat16"}
    assert params["blocks"][0]["feed"]["gate_up"].dtype == jnp.bfloat16
    assert params["blocks"][0]["feed"]["router"]["kernel"].dtype == jnp.float32
    prompts = [np.random.default_rng(2).integers(0, 96, 40).tolist()]
    found, wanted = whole(model, params, prompts), whole(wide, wide_params, prompts)
    near(wanted[0], Twin(config, rounded).run(prompts[0])[0])
    error = np.sqrt(np.square(found - wanted).mean())
    assert 0 < error < 0.05 * wanted.std(), f"{error} of {wanted.std()}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_with_mxfp4_experts_equals_its_expanded_folder(tmp_path: Path, dtype: str) -> None:
    stored = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tensors = {n: t.astype(stored) for n, t in random_tensors(CONFIG, 4).items()}
    packed, expanded = {}, {}
    rng = np.random.default_rng(0)
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = expanded[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(123, 126, (experts, outputs, inputs // 32), np.uint8)
        packed[name + "_blocks"], packed[name + "_scales"] = blocks, scales
        expanded[name] = dequantise(blocks, scales, stored, name)
    quantised = {**CONFIG, "quantization_config": {"quant_method": "mxfp4"}}
    model, params, _ = load(write_folder(tmp_path / "packed", quantised, packed))
    _, wanted, _ = load(write_folder(tmp_path / "expanded", CONFIG, expanded))
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    if dtype == "float32":
        ids = rng.integers(0, 96, 30).tolist()
        near(whole(model, params, [ids])[0], Twin(CONFIG, expanded).run(ids)[0])


@pytest.mark.parametrize("tokens, experts, count", [(1, 5, 2), (7, 5, 3), (40, 3, 3), (90, 64, 2)])
def test_experts_are_mixed_as_if_one_by_one(tokens: int, experts: int, count: int) -> None:
    rng = np.random.default_rng(tokens)
    x, matrices = rng.normal(size=(tokens, 6)), rng.normal(size=(experts, 6, 4))
    logits = rng.normal(size=(tokens, experts))
    chosen, weights = choose_experts(jnp.asarray(logits, jnp.float32), count)
    chosen = jnp.where(jnp.arange(tokens)[:, None] % 5 == 4, experts, chosen)  # padding
    weights_of = jnp.asarray(matrices, jnp.float32)
    found = mix_experts(
        jnp.asarray(x, jnp.float32), chosen, weights,
        lambda expert, rows: rows @ weights_of[expert], expert_count=experts,
    )  # fmt: skip
    for token in range(tokens):
        best = np.argsort(-logits[token])[:count]
        chances = np.exp(logits[token][best])
        parts = np.stack([x[token] @ matrices[expert] for expert in best])
        wanted = (chances / chances.sum()) @ parts * (token % 5 != 4)
        near(np.asarray(found[token]), wanted)


def test_an_expert_that_nobody_chose_is_not_run() -> None:
    poisoned = jnp.asarray([1.0, jnp.nan, 2.0], jnp.float32)
    x = jnp.ones((9, 1), jnp.float32)
    chosen = jnp.asarray([[2], [0], [3]] * 3, jnp.int32)  # 3 is no expert
    found = mix_experts(
        x, chosen, jnp.ones((9, 1), jnp.float32),
        lambda expert, rows: rows * poisoned[expert], expert_count=3,
    )  # fmt: skip
    assert found[:, 0].tolist() == [2.0, 1.0, 0.0] * 3


def test_yarn_leaves_fast_channels_and_stretches_slow_ones() -> None:
    settings = {**CONFIG["rope_scaling"], "rope_theta": 150000.0, "factor": 32.0,
                "original_max_position_embeddings": 4096}  # fmt: skip
    rotary = read_rotary(settings, 64, "rope")
    assert rotary.scale == pytest.approx(1.3466, abs=1e-4)
    plain = 150000.0 ** -(np.arange(0, 64, 2) / 64)
    ratio = plain / np.asarray(rotary.frequencies)
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(32)
    assert (np.diff(ratio) >= 0).all()
    truncated = read_rotary({**settings, "truncate": True}, 64, "rope")
    assert truncated.frequencies != rotary.frequencies
    newer = {
        **CONFIG,
        "rope_parameters": {**CONFIG["rope_scaling"], "rope_theta": CONFIG["rope_theta"]},
    }
    del newer["rope_scaling"], newer["rope_theta"]
    assert read_sizes(newer).rotary == read_sizes(CONFIG).rotary


def test_layers_alternate_from_a_window_where_the_configuration_is_silent() -> None:
    silent = {name: value for name, value in CONFIG.items() if name != "layer_types"}
    assert read_sizes(silent).windows == (11, None, 11)


REFUSED = {
    "layer_types": (["sliding_attention", "linear_attention", "full_attention"], "layer_types[1]"),
    "num_hidden_layers": (4, "layer_types"),
    "sliding_window": (0, "sliding_window"),
    "num_key_value_heads": (4, "num_key_value_heads"),
    "head_dim": (7, "head_dim"),
    "hidden_size": (64, "another shape for"),
    "vocab_size": ("many", "vocab_size"),
    "num_experts_per_tok": (6, "num_experts_per_tok"),
    "attention_bias": (False, "attention_bias"),
    "tie_word_embeddings": (True, "tie_word_embeddings"),
    "hidden_act": ("gelu", "hidden_act"),
    "swiglu_limit": (-1.0, "swiglu_limit"),
    "rms_norm_eps": ("small", "rms_norm_eps"),
    "eos_token_id": ("</s>", "eos_token_id"),
    "rope_scaling": ({**CONFIG["rope_scaling"], "factor": None}, "rope_scaling.factor"),
    "rope_theta": (None, "rope_theta"),
    "quantization_config": ({"quant_method": "gptq"}, "quantization_config.quant_method is 'gptq'"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_configuration_that_cannot_be_served_is_refused_by_its_field(
    field: str, tmp_path: Path
) -> None:
    value, message = REFUSED[field]
    folder = write_folder(tmp_path, {**CONFIG, field: value}, random_tensors(CONFIG, 0))
    assert message in refusal(folder)


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"rope_type": "longrope"}, "rope_scaling.rope_type is 'longrope'"),
        ({"mscale": 0.7}, "rope_scaling.mscale"),
        ({"beta_fast": -1}, "rope_scaling.beta_fast"),
    ],
)
def test_positions_that_are_not_computed_here_are_refused(
    setting: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = copy.deepcopy(CONFIG)
    config["rope_scaling"] |= setting
    assert message in refusal(write_folder(tmp_path, config, random_tensors(CONFIG, 0)))


def test_weights_that_contradict_the_configuration_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG, 0)
    name = "model.layers.1.self_attn.sinks"
    lacking = {key: tensor for key, tensor in tensors.items() if key != name}
    assert name in refusal(write_folder(tmp_path / "lacking", CONFIG, lacking))
    extra = {**tensors, "model.layers.3.self_attn.sinks": tensors[name]}
    assert "model.layers.3.self_attn.sinks" in refusal(write_folder(tmp_path, CONFIG, extra))


def test_experts_stored_otherwise_than_configured_are_told_apart_from_missing_ones(
    tmp_path: Path,
) -> None:
    tensors = random_tensors(CONFIG, 0)
    quantised = {**CONFIG, "quantization_config": {"quant_method": "mxfp4"}}
    folder = write_folder(tmp_path, quantised, tensors)
    assert "quantization_config asks for mxfp4" in refusal(folder)
    tensors["model.layers.0.mlp.experts.down_proj_blocks"] = np.zeros((1,), np.uint8)
    assert "this folder are MXFP4" in refusal(write_folder(folder, CONFIG, tensors))
    narrow = {**quantised, "intermediate_size": 24}
    (folder / "config.json").write_text(json.dumps(narrow))
    assert "intermediate_size is 24" in refusal(folder)


def test_a_dtype_without_arithmetic_and_a_missing_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not 'int8'"):
        GptOss(read_sizes(CONFIG), "int8")
    with pytest.raises(UsageError, match="give a folder"):
        load()


def refusal(folder: Path) -> str:
    with pytest.raises(UsageError) as error:
        load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)
