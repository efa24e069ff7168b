"""Qwen3-Next and Qwen3.5's mixtures: folders, refusals, and other checkpoints of Transformers.

The numbers that Transformers computed for longer prompts are compared in `test_references.py`.
"""

import numpy as np
import pytest
from unimem_jax.models import qwen3_5_moe, qwen3_next

import unimem_jax as um
from tests.models.oracle import WAYS, refusal, require_checkpoint, write_folder
from tests.models.reference import described

LOADERS = {"qwen3_5_moe": qwen3_5_moe.load, "qwen3_next": qwen3_next.load}


def read_layer(state, layer):
    """What a layer remembers in the dumped state."""
    if f"L{layer}.keys" in state:
        return {n: state[f"L{layer}.{n}s"][0].swapaxes(0, 1) for n in ("key", "value")}
    # Transformers keeps one input more than the next convolution sees.
    return {"conv": state[f"L{layer}.conv0"][0, :, 1:].T, "state": state[f"L{layer}.rec0"][0]}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("whole", marks=pytest.mark.slow),
        *(pytest.param(way, marks=pytest.mark.exhaustive) for way in WAYS),
    ],
)
@pytest.mark.parametrize("family", LOADERS)
def test_other_checkpoints_give_the_numbers_of_transformers(family, way):
    require_checkpoint(family, LOADERS[family], read_layer, way)


def test_experts_are_read_one_by_one_or_together(tmp_path):
    config, tensors = described("qwen3_5_moe")
    _, wanted, _ = um.load(write_folder(tmp_path / "each", config, tensors))
    together = {name: one for name, one in tensors.items() if ".experts." not in name}
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors[f"{place}.{e}.{name}_proj.weight"] for e in range(6)])
            for name in ("gate", "up", "down")
        )
        together[f"{place}.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        together[f"{place}.down_proj"] = down
    _, found, _ = um.load(write_folder(tmp_path / "all", config, together))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_a_folder_with_vision_and_drafts_is_read_for_its_text(tmp_path):
    config, tensors = described("qwen3_5_moe")
    outer = {"model_type": "qwen3_5_moe", "text_config": config, "vision_config": {}}
    nested = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    nested |= {"mtp.fc.weight": np.ones((2, 2), np.float32)}
    _, found, _ = um.load(write_folder(tmp_path, outer, nested))
    name = "model.layers.0.mlp.gate.weight"
    np.testing.assert_array_equal(found[name], tensors[name])


@pytest.mark.parametrize("family", LOADERS)
def test_an_expert_that_is_missing_is_named(family, tmp_path):
    config, tensors = described(family)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    del tensors[name]
    assert f"lacks 1 tensors: {name}" in refusal(um.load, write_folder(tmp_path, config, tensors))


REFUSED = [
    ("qwen3_next", "norm_topk_prob", False, "norm_topk_prob is False"),
    ("qwen3_next", "num_experts", None, "num_experts is None"),
    ("qwen3_next", "num_experts_per_tok", 7, "num_experts_per_tok is 7 and not at most 6"),
    ("qwen3_next", "mlp_only_layers", "1", "mlp_only_layers is '1'"),
    ("qwen3_next", "mlp_only_layers", [], "nothing is known of 3 tensors: model.layers.1.mlp.down"),
    ("qwen3_next", "decoder_sparse_step", 0, "decoder_sparse_step is 0"),
    ("qwen3_next", "linear_num_value_heads", 6, "conv1d.weight is [80, 1, 4] and not [104, 1, 4]"),
    ("qwen3_next", "layer_types", ["linear_attention", "mamba"], "layer_types[1] is 'mamba'"),
    ("qwen3_next", "hidden_act", "gelu", "hidden_act is 'gelu'"),
    ("qwen3_5_moe", "shared_expert_intermediate_size", 0, "shared_expert_intermediate_size is 0"),
    ("qwen3_5_moe", "moe_intermediate_size", 8, "is [64, 16] and not [64, 8]"),
    ("qwen3_5_moe", "quantization_config", {"quant_method": "fp8"}, "quant_method is 'fp8'"),
]


@pytest.mark.parametrize("family, field, value, message", REFUSED)
def test_a_configuration_that_cannot_be_served_is_refused_by_its_field(
    family, field, value, message, tmp_path
):
    config, tensors = described(family)
    folder = write_folder(tmp_path, {**config, field: value}, tensors)
    assert message in refusal(um.load, folder)
