"""Published geometries are what our models of those families declare for the published sizes."""

import pytest
from unimem_jax.models.fields import Fields
from unimem_jax.models.gpt_oss import GptOss
from unimem_jax.models.gpt_oss_config import read_sizes
from unimem_jax.models.qwen3_5 import read_decoder

from unimem_jax.geometries import geometry

GPT_OSS = {
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880,
    "intermediate_size": 2880, "num_experts_per_tok": 4, "vocab_size": 201_088,
    "sliding_window": 128, "max_position_embeddings": 131_072, "rope_theta": 150_000.0,
}  # fmt: skip
QWEN3_5 = {
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "rope_theta": 1e7,
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "vocab_size": 1000, "intermediate_size": 64, "hidden_size": 64,
    "max_position_embeddings": 262_144, "tie_word_embeddings": True,
}  # fmt: skip


def kept(parts):
    """What is kept where, without the stored dtype of convolution tails, which ours widen."""
    return {(part.key, part.shape, part.lifetime) for part in parts}


@pytest.mark.parametrize("name, layers, experts", [("20b", 24, 32), ("120b", 36, 128)])
def test_gpt_oss_declares_the_published_geometry(name, layers, experts):
    config = {**GPT_OSS, "num_hidden_layers": layers, "num_local_experts": experts}
    declared = GptOss(read_sizes(config), "bfloat16").parts()
    assert set(declared) == set(geometry(f"gpt-oss-{name}"))


@pytest.mark.parametrize(
    "name, layers, key_heads, value_heads",
    [("0.8b", 24, 2, 16), ("4b", 32, 4, 32), ("27b", 64, 4, 48), ("35b-a3b", 40, 2, 32)],
)
def test_qwen3_5_declares_the_published_geometry(name, layers, key_heads, value_heads):
    sizes = {
        "num_hidden_layers": layers, "num_key_value_heads": key_heads,
        "linear_num_value_heads": value_heads,
    }  # fmt: skip
    declared = read_decoder(Fields({**QWEN3_5, **sizes}), "bfloat16").parts()
    assert kept(declared) == kept(geometry(f"qwen3.5-{name}"))
