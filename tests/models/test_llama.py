"""Llama beside a slow twin, alone and through the arena."""

import json

import numpy as np
import pytest
from unimem_jax.models.llama import load

import unimem_jax as um
from tests.models.oracle import near, refusal, require_remembered, whole, write_folder
from tests.models.qwen_twin import LLAMA, Twin, random_tensors
from tests.models.through_arena import Service
from unimem_jax.spec import CONTEXT, Site

# What SmolLM2's folder holds beside what matters.
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "is_llama_config": True, "rope_interleaved": False,
    "rope_scaling": None, "pretraining_tp": 1, "torch_dtype": "bfloat16", "use_cache": True,
    "tie_word_embeddings": True, "head_dim": None,
}  # fmt: skip
SLOWED = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
CONFIGS = {
    "plain": LLAMA,
    "one key head per query head": {**LLAMA, "num_key_value_heads": None},
    "as SmolLM2": {**LLAMA, **SMOLLM2, "num_attention_heads": 4},
    "as Llama 2": {**LLAMA, "rope_theta": None},
    "as Llama 3": {**LLAMA, "rope_scaling": SLOWED},
}


def explicit(config):
    """With the values that absent fields stand for."""
    heads = config["num_attention_heads"]
    return {
        **config,
        "num_key_value_heads": config["num_key_value_heads"] or heads,
        "head_dim": config["head_dim"] or config["hidden_size"] // heads,
        "rope_theta": config["rope_theta"] or 10_000.0,
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_folder_gives_the_logits_of_the_slow_twin(name, tmp_path):
    config = explicit(CONFIGS[name])
    tensors = random_tensors(config, seed=3)
    model, params, tokenizer = load(write_folder(tmp_path, CONFIGS[name], tensors))
    assert tokenizer is None
    assert params.keys() == tensors.keys()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 96, length).tolist() for length in (60, 33, 1)]
    for row, ids in zip(whole(model, params, prompts), prompts, strict=True):
        near(row[: len(ids)], Twin(config, tensors).run(ids)[0])


def test_the_arena_changes_nothing_over_many_pages(tmp_path):
    tensors = random_tensors(LLAMA, seed=3)
    model, params, _ = load(write_folder(tmp_path, LLAMA, tensors))
    twin = Twin(LLAMA, tensors)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 96, length).tolist() for length in (50, 3)]
    service = Service(model, params, page_tokens=4, chunk_tokens=16, rows=2, context_tokens=80)
    kept = twin.run(prompts[0])[1]
    layers = [{name: kept[layer, name] for name in ("key", "value")} for layer in range(3)]
    require_remembered(service, prompts[0], layers)
    new, logits = service.generate(prompts, 12, retracted=(0, 5))
    for ids, tokens, rows in zip(prompts, new, logits, strict=True):
        near(rows, twin.run([*ids, *tokens[:-1]])[0][len(ids) - 1 :])


def test_a_folder_is_found_by_its_model_type_and_declares_keys_and_values(tmp_path):
    model, _, _ = um.load(write_folder(tmp_path, LLAMA, random_tensors(LLAMA, 0)))
    assert {part.key: (part.shape, part.lifetime) for part in model.parts()} == {
        (Site(layer), name): ((2, 8), CONTEXT) for layer in range(3) for name in ("key", "value")
    }


REFUSED = {
    "attention_bias": (True, "attention_bias is True"),
    "mlp_bias": (True, "mlp_bias is True"),
    "hidden_act": ("gelu", "hidden_act is 'gelu'"),
    "rope_interleaved": (True, "rope_interleaved is True"),
    "num_key_value_heads": (4, "num_key_value_heads is 4"),
    "num_attention_heads": (64, "head_dim is 0"),
    "head_dim": (1 << 31, "2147483648 rotated channels"),
    "rope_scaling": ({"rope_type": "linear", "factor": 2.0}, "rope_type is 'linear'"),
    "rope_theta": (10**400, "rope_theta is a positive number, not 1000"),
    "rms_norm_eps": (10**400, "rms_norm_eps is 1000"),
    "num_hidden_layers": (1 << 40, "num_hidden_layers is 1099511627776 and not at most 1024"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_configuration_that_cannot_be_served_is_refused_by_its_field(field, tmp_path):
    value, message = REFUSED[field]
    config = {**LLAMA, field: value}
    if field == "num_attention_heads":
        del config["head_dim"]
    assert message in refusal(load, write_folder(tmp_path, config, random_tensors(LLAMA, 0)))


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "scaling, theta, message",
    [
        ({"rope_type": "factors"}, 100.0, "factors are not 4 positive numbers"),
        ({"rope_type": "factors", "factors": "abcd"}, 100.0, "factors are not 4 positive numbers"),
        (YARN, 1.0, "rope_theta is 1.0"),
    ],
)
def test_positions_that_no_model_has_are_refused(scaling, theta, message, tmp_path):
    config = {**LLAMA, "rope_scaling": scaling, "rope_theta": theta}
    assert message in refusal(load, write_folder(tmp_path, config, random_tensors(LLAMA, 0)))


def test_yarn_of_any_size_is_computed(tmp_path):
    sizes = {"original_max_position_embeddings": 10**300, "beta_fast": 1e-300, "beta_slow": 1e300}
    config = {**LLAMA, "rope_scaling": {**YARN, **sizes}}
    assert load(write_folder(tmp_path, config, random_tensors(LLAMA, 0)))


@pytest.mark.parametrize(
    "configured, more, wanted",
    [
        ([7, 9], {"eos_token_id": [9, 3]}, (7, 9, 3)),
        (None, {"eos_token_id": 3}, (3,)),
        (7, {}, (7,)),
    ],
)
def test_every_end_token_of_both_files_ends_a_text(configured, more, wanted, tmp_path):
    config = {**LLAMA, "eos_token_id": configured}
    folder = write_folder(tmp_path, config, random_tensors(LLAMA, 0))
    (folder / "generation_config.json").write_text(json.dumps(more))
    model, params, _ = load(folder)
    assert model.end_tokens == wanted
    engine = um.Engine(model, params, arena_bytes=1 << 20, context_tokens=64)
    (free,) = engine.generate([[1, 2, 3]], um.Sampling(max_tokens=8))
    model.end_tokens = (*wanted, free.token_ids[2])
    engine = um.Engine(model, params, arena_bytes=1 << 20, context_tokens=64)
    (ended,) = engine.generate([[1, 2, 3]], um.Sampling(max_tokens=8))
    assert ended.finish_reason == "stop"
    assert len(ended.token_ids) <= 3


def test_settings_for_generation_that_are_none_are_refused(tmp_path):
    folder = write_folder(tmp_path, LLAMA, random_tensors(LLAMA, 0))
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json is not valid JSON" in refusal(load, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "generation_config.json: eos_token_id is 'x'" in refusal(load, folder)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int4"])
def test_keys_are_not_rounded_to_integers(dtype, tmp_path):
    folder = write_folder(tmp_path, LLAMA, random_tensors(LLAMA, 0))
    assert f"not as {dtype!r}" in refusal(lambda: load(folder, token_dtype=dtype))


def test_a_name_without_a_folder_asks_for_one():
    assert "give a folder" in refusal(load)
