"""Qwen3 beside a slow twin and beside Transformers' own numbers, alone and through the arena."""

import ml_dtypes
import numpy as np
import pytest
from unimem_jax.models.decoder import Decoder
from unimem_jax.models.fields import Fields
from unimem_jax.models.qwen3 import load

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
from tests.models.qwen_twin import QWEN3, Twin, random_tensors
from tests.models.through_arena import Service
from unimem_jax.spec import CONTEXT, Site


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    tensors = random_tensors(QWEN3, seed=3)
    folder = write_folder(tmp_path_factory.mktemp("tiny"), QWEN3, tensors)
    model, params, tokenizer = load(folder)
    assert tokenizer is None
    return model, params, Twin(QWEN3, tensors)


@pytest.fixture(scope="module")
def oracle():
    def read_layer(state, layer):
        return {name: state[f"L{layer}.{name}s"][0].swapaxes(0, 1) for name in ("key", "value")}

    found = open_oracle("qwen3", read_layer)
    return *load(found.folder)[:2], found


def test_whole_sequences_give_the_logits_of_the_slow_twin(tiny):
    model, params, twin = tiny
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, length).tolist() for length in (60, 33, 1)]
    found = whole(model, params, prompts)
    for row, ids in zip(found, prompts, strict=True):
        near(row[: len(ids)], twin.run(ids)[0])


def test_the_arena_changes_nothing_over_many_pages(tiny):
    model, params, twin = tiny
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 96, length).tolist() for length in (50, 3)]
    service = Service(model, params, page_tokens=4, chunk_tokens=16, rows=2, context_tokens=80)
    kept = twin.run(prompts[0])[1]
    layers = [{name: kept[layer, name] for name in ("key", "value")} for layer in range(2)]
    require_remembered(service, prompts[0], layers)
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


def test_the_configuration_is_what_the_model_says_of_itself(tiny):
    model, params, _ = tiny
    assert isinstance(model, Decoder)
    assert {part.key: (part.shape, part.dtype, part.lifetime) for part in model.parts()} == {
        (Site(layer), name): ((2, 8), "float32", CONTEXT)
        for layer in range(2)
        for name in ("key", "value")
    }
    assert (model.vocab_size, model.context_tokens, model.end_tokens) == (96, 256, (7, 9))
    assert {name: array.shape for name, array in params.items()} == model.shapes()


def test_a_folder_is_found_by_its_model_type(tmp_path):
    folder = write_folder(tmp_path, QWEN3, random_tensors(QWEN3, 0))
    seen = []
    model, params, _ = um.load(folder, lambda *progress: seen.append(progress))
    assert type(model).__name__ == "Decoder"
    assert {name for name, _, _ in seen} == params.keys()
    total = sum(array.nbytes for array in params.values())
    assert [seen[0][2], *seen[-1][1:]] == [total] * 3


def test_a_tied_head_is_the_embedding_even_if_the_file_has_a_head_too(tmp_path):
    config = {**QWEN3, "tie_word_embeddings": True}
    tensors = random_tensors(config, 4)
    assert "lm_head.weight" not in tensors
    spare = {**tensors, "lm_head.weight": np.ones((96, 32), np.float32)}
    ids = list(range(20))
    for name, stored in (("without", tensors), ("with", spare)):
        model, params, _ = load(write_folder(tmp_path / name, config, stored))
        assert "lm_head.weight" not in params
        near(whole(model, params, [ids])[0], Twin(config, tensors).run(ids)[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_the_float32_of_the_same_weights(dtype, tmp_path):
    stored = np.dtype(getattr(ml_dtypes, dtype, dtype))
    tensors = {name: one.astype(stored) for name, one in random_tensors(QWEN3, 5).items()}
    folder = write_folder(tmp_path, QWEN3, tensors)
    model, params, _ = load(folder)
    assert {part.dtype for part in model.parts()} == {dtype}
    for name, array in params.items():
        assert str(array.dtype) == ("float32" if array.ndim == 1 else dtype), name
    ids = np.random.default_rng(2).integers(0, 96, 40).tolist()
    wanted = Twin(QWEN3, tensors).run(ids)[0]
    error = np.sqrt(np.square(whole(model, params, [ids])[0] - wanted).mean())
    bound = 0.03 if dtype == "bfloat16" else 0.004
    assert 0 < error < bound * wanted.std(), f"{error} of {wanted.std()}"
    wide, wide_params, _ = load(folder, "float32", token_dtype="bfloat16")
    assert {part.dtype for part in wide.parts()} == {"bfloat16"}
    assert {str(array.dtype) for array in wide_params.values()} == {"float32"}


def test_older_and_newer_rotary_settings_say_the_same(tmp_path):
    newer = {**QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 100}}
    del newer["rope_theta"]
    tensors = random_tensors(QWEN3, 0)
    found = [
        whole(*load(write_folder(tmp_path / str(at), config, tensors))[:2], [[1, 2, 3, 4]])
        for at, config in enumerate((QWEN3, newer))
    ]
    np.testing.assert_array_equal(*found)


def test_older_rotary_settings_beside_newer_ones_are_no_others():
    """Whoever adds `rope_scaling` to a newer file for longer texts would get none of it."""
    yarn = {"factor": 4.0, "original_max_position_embeddings": 64}
    newer = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100, **yarn}}
    wanted = Fields(newer).rotary(8)
    for same in ({"type": "yarn", **yarn}, {"rope_type": "yarn", **yarn, "truncate": None}):
        assert Fields({**newer, "rope_scaling": same}).rotary(8) == wanted
    for other in ({"type": "yarn", **yarn, "factor": 8.0}, {"factor": 4.0}, ["yarn"]):
        assert "rope_scaling is" in refusal(Fields({**newer, "rope_scaling": other}).rotary, 8)
    plain = {"rope_parameters": {"rope_theta": 100}}
    assert "and not what rope_parameters say" in refusal(
        Fields({**plain, "rope_scaling": {"type": "yarn", **yarn}}).rotary, 8
    )
    assert Fields({**plain, "rope_scaling": None}).rotary(8) == Fields(plain).rotary(8)
    assert Fields({**plain, "rope_scaling": {"type": "default"}}).rotary(8).scale == 1


REFUSED = {
    "attention_bias": (True, "attention_bias is True"),
    "hidden_act": ("gelu", "hidden_act is 'gelu'"),
    "use_sliding_window": (True, "use_sliding_window is True"),
    "layer_types": (["full_attention", "sliding_attention"], "layer_types[1] is"),
    "num_hidden_layers": (3, "lacks 11 tensors: model.layers.2."),
    "num_key_value_heads": (4, "num_key_value_heads is 4"),
    "head_dim": (7, "7 rotated channels"),
    "hidden_size": (48, "lm_head.weight is [96, 32] and not [96, 48]"),
    "vocab_size": ("many", "vocab_size is 'many'"),
    "intermediate_size": (None, "intermediate_size is None"),
    "rms_norm_eps": (0, "rms_norm_eps is 0"),
    "rope_theta": (None, "rope_theta"),
    "rope_scaling": (["yarn"], "rope_scaling is ['yarn']"),
    "rope_parameters": ({"rope_type": "dynamic", "rope_theta": 100}, "rope_type is 'dynamic'"),
    "tie_word_embeddings": ("yes", "tie_word_embeddings is 'yes'"),
    "eos_token_id": ("</s>", "eos_token_id is '</s>'"),
    "quantization_config": ({"quant_method": "fp8"}, "quant_method is 'fp8'"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_configuration_that_cannot_be_served_is_refused_by_its_field(field, tmp_path):
    value, message = REFUSED[field]
    folder = write_folder(tmp_path, {**QWEN3, field: value}, random_tensors(QWEN3, 0))
    assert message in refusal(load, folder)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    tensors = random_tensors(QWEN3, 0)
    name = "model.layers.1.self_attn.q_norm.weight"
    lacking = {key: tensor for key, tensor in tensors.items() if key != name}
    assert f"lacks 1 tensors: {name}" in refusal(
        load, write_folder(tmp_path / "lacking", QWEN3, lacking)
    )
    extra = {**tensors, "model.layers.1.self_attn.q_proj.bias": np.zeros(48, np.float32)}
    assert "nothing is known of 1 tensors: model.layers.1.self_attn.q_proj.bias" in refusal(
        load, write_folder(tmp_path / "extra", QWEN3, extra)
    )


def test_weights_that_are_no_plain_floats_are_refused(tmp_path):
    tensors = random_tensors(QWEN3, 0)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(np.int8)
    folder = write_folder(tmp_path, QWEN3, tensors)
    assert f"tensor {name} is int8, which is quantised" in refusal(load, folder)
    assert "not 'float64'" in refusal(load, folder, "float64")


def test_a_name_without_a_folder_asks_for_one():
    assert "give a folder" in refusal(load)
