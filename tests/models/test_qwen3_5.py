"""Qwen3.5 beside a slow twin and beside Transformers' own numbers, alone and through the arena."""

import ml_dtypes
import numpy as np
import pytest
from unimem_jax.models.fields import Fields
from unimem_jax.models.qwen3_5 import _rotated, load

import unimem_jax as um
from tests.models.oracle import (
    WAYS,
    near,
    open_oracle,
    refusal,
    require_parity,
    require_remembered,
    whole,
    write_folder,
)
from tests.models.qwen_twin import QWEN3_5, Twin, random_tensors
from tests.models.through_arena import Service
from unimem_jax.spec import CONTEXT, REQUEST, Site

NESTED = "model.language_model."
VISION = {
    "model.visual.patch_embed.proj.weight": np.ones((2, 3), np.float32),
    "mtp.fc.weight": np.ones((2, 2), np.float32),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    tensors = random_tensors(QWEN3_5, seed=3)
    folder = write_folder(tmp_path_factory.mktemp("tiny"), QWEN3_5, tensors)
    model, params, tokenizer = load(folder)
    assert tokenizer is None
    return model, params, Twin(QWEN3_5, tensors)


@pytest.fixture(scope="module")
def oracle():
    def read_layer(state, layer):
        if f"L{layer}.keys" in state:
            return {n: state[f"L{layer}.{n}s"][0].swapaxes(0, 1) for n in ("key", "value")}
        # Transformers keeps one input more than the next convolution sees.
        tail = state[f"L{layer}.conv0"][0, :, 1:].T
        return {"conv": tail, "state": state[f"L{layer}.rec0"][0]}

    found = open_oracle("qwen3_5", read_layer)
    return *load(found.folder)[:2], found


def test_whole_sequences_give_the_logits_of_the_slow_twin(tiny):
    model, params, twin = tiny
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, length).tolist() for length in (70, 33, 1)]
    found = whole(model, params, prompts)
    for row, ids in zip(found, prompts, strict=True):
        near(row[: len(ids)], twin.run(ids)[0])


def test_the_arena_holds_what_the_slow_twin_remembers_and_changes_nothing(tiny):
    model, params, twin = tiny
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 96, length).tolist() for length in (50, 1)]
    service = Service(model, params, page_tokens=4, chunk_tokens=16, rows=2, context_tokens=80)
    for ids in prompts:
        kept = twin.run(ids)[1]
        layers = [{name: kept[at, name] for at, name in kept if at == layer} for layer in range(3)]
        require_remembered(service, ids, layers)
    new, logits = service.generate(prompts, 12, retracted=(0, 5))
    for ids, tokens, rows in zip(prompts, new, logits, strict=True):
        near(rows, twin.run([*ids, *tokens[:-1]])[0][len(ids) - 1 :])


def test_transformers_logits_are_reproduced_without_a_past(oracle):
    model, params, numbers = oracle
    found = whole(model, params, numbers.prompts)
    for row, wanted in zip(found, numbers.logits, strict=True):
        near(row[: len(wanted)], wanted)


@pytest.mark.parametrize("way", WAYS)
def test_the_arena_reproduces_transformers_logits_tokens_and_state(way, oracle):
    require_parity(*oracle, way)


def test_layers_declare_tokens_or_a_request(tiny):
    model, params, _ = tiny
    found = {part.key: (part.shape, part.dtype, part.lifetime) for part in model.parts()}
    assert found == {
        (Site(0), "conv"): ((2, 54), "float32", REQUEST),
        (Site(0), "state"): ((6, 6, 5), "float32", REQUEST),
        (Site(1), "key"): ((2, 8), "float32", CONTEXT),
        (Site(1), "value"): ((2, 8), "float32", CONTEXT),
        (Site(2), "conv"): ((2, 54), "float32", REQUEST),
        (Site(2), "state"): ((6, 6, 5), "float32", REQUEST),
    }
    assert {name: array.shape for name, array in params.items()} == model.shapes()


def test_every_fourth_layer_is_attention_where_the_configuration_is_silent(tmp_path):
    config = {key: value for key, value in QWEN3_5.items() if key != "layer_types"}
    kinds = ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"]
    config |= {"num_hidden_layers": 5, "layer_types": kinds}
    tensors = random_tensors(config, 0)
    del config["layer_types"]
    model, _, _ = load(write_folder(tmp_path / "silent", config, tensors))
    assert {part.site.layer for part in model.parts() if part.name == "key"} == {3}
    config["full_attention_interval"] = 2
    assert "self_attn" in refusal(load, write_folder(tmp_path / "other", config, tensors))


def test_a_folder_with_vision_is_read_for_its_text(tmp_path):
    tied = {**QWEN3_5, "tie_word_embeddings": True}
    tensors = random_tensors(tied, 4)
    nested = {NESTED + n.removeprefix("model."): tensor for n, tensor in tensors.items()}
    text = {key: value for key, value in tied.items() if key != "tie_word_embeddings"}
    outer = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}}
    outer |= {"tie_word_embeddings": True}
    folder = write_folder(tmp_path / "vision", outer, nested | VISION)
    _, wanted, _ = load(write_folder(tmp_path / "text", tied, tensors))
    _, found, _ = um.load(folder)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)
    unknown = {**nested, "model.audio.weight": np.ones(2, np.float32)}
    assert "nothing is known of 1 tensors: model.audio.weight" in refusal(
        load, write_folder(folder, outer, unknown)
    )


def test_bfloat16_stays_near_float32_and_state_stays_float32(tmp_path):
    tensors = {n: t.astype(ml_dtypes.bfloat16) for n, t in random_tensors(QWEN3_5, 5).items()}
    model, params, _ = load(write_folder(tmp_path, QWEN3_5, tensors))
    assert {(part.name, part.dtype) for part in model.parts()} == {
        ("conv", "float32"),
        ("state", "float32"),
        ("key", "bfloat16"),
        ("value", "bfloat16"),
    }
    for name, array in params.items():
        assert str(array.dtype) == ("float32" if array.ndim == 1 else "bfloat16"), name
    ids = np.random.default_rng(2).integers(0, 96, 40).tolist()
    wanted = Twin(QWEN3_5, tensors).run(ids)[0]
    error = np.sqrt(np.square(whole(model, params, [ids])[0] - wanted).mean())
    assert 0 < error < 0.05 * wanted.std(), f"{error} of {wanted.std()}"


@pytest.mark.parametrize("inside", [{}, {"partial_rotary_factor": 0.5}])
def test_the_share_that_turns_is_read_where_it_is(inside):
    settings = {"rope_parameters": {"rope_theta": 100, **inside}}
    beside = {} if inside else {"partial_rotary_factor": 0.5}
    assert _rotated(Fields({**settings, **beside}), 64) == 32
    assert _rotated(Fields({"partial_rotary_factor": 0.5}), 64) == 32
    assert _rotated(Fields({"rope_parameters": {"rope_theta": 100}}), 64) == 16


REFUSED = {
    "layer_types": (["linear_attention", "full_attention"], "layer_types is"),
    "linear_num_value_heads": (3, "linear_num_value_heads is 3"),
    "linear_num_key_heads": (0, "linear_num_key_heads is 0"),
    "linear_conv_kernel_dim": (1, "linear_conv_kernel_dim is 1"),
    "linear_key_head_dim": (8, "in_proj_qkv.weight is [54, 32] and not [62, 32]"),
    "attention_bias": (True, "attention_bias is True"),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 100, "partial_rotary_factor": 1.5},
        "partial_rotary_factor is 1.5",
    ),
    "text_config": ("none", "text_config is 'none'"),
    "quantization_config": ({"quant_method": "awq"}, "quant_method is 'awq'"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_configuration_that_cannot_be_served_is_refused_by_its_field(field, tmp_path):
    value, message = REFUSED[field]
    folder = write_folder(tmp_path, {**QWEN3_5, field: value}, random_tensors(QWEN3_5, 0))
    assert message in refusal(load, folder)


def test_a_name_without_a_folder_asks_for_one():
    assert "give a folder" in refusal(load)
