"""Kimi-Linear: both kinds of folders, refusals, latent attention both ways, other checkpoints.

The numbers that Transformers computed for longer prompts are compared in `test_references.py`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from unimem_jax.models.fields import Fields
from unimem_jax.models.kimi_linear import load, read_decoder
from unimem_jax.models.mla import LatentAttention, LatentSizes, Seen

import unimem_jax as um
from tests.models.oracle import near, refusal, require_checkpoint, whole, write_folder
from tests.models.reference import described
from unimem_jax.spec import CONTEXT, REQUEST, Site

SIZES = LatentSizes(heads=4, rank=24, shared=8, own=12, value=10)


def read_layer(state, layer):
    """What a layer remembers in the dumped state."""
    if f"L{layer}.keys" in state:
        pair = [state[f"L{layer}.{name}"][0, 0] for name in ("keys", "values")]
        return {"latent": np.concatenate(pair, axis=-1)}
    # Transformers keeps one input more than the next convolution sees.
    return {"conv": state[f"L{layer}.conv0"][0, :, 1:].T, "state": state[f"L{layer}.rec0"][0]}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "page 1", "page 16"])
def test_another_checkpoint_gives_the_numbers_of_transformers(way):
    require_checkpoint("kimi_linear", load, read_layer, way)


def test_a_layer_keeps_one_latent_per_token_or_the_state_of_a_request():
    config, _ = described("kimi_linear")
    model = opened(config)
    assert {part.key: (part.shape, part.dtype, part.lifetime) for part in model.parts()} == {
        (Site(0), "conv"): ((3, 96), "float32", REQUEST),
        (Site(0), "state"): ((4, 8, 8), "float32", REQUEST),
        (Site(1), "latent"): ((32,), "bfloat16", CONTEXT),
        (Site(2), "conv"): ((3, 96), "float32", REQUEST),
        (Site(2), "state"): ((4, 8, 8), "float32", REQUEST),
    }


def test_the_published_sizes_take_the_bytes_of_the_published_geometry():
    config, _ = described("kimi_linear")
    full = [4, 8, 12, 16, 20, 24, 27]
    sizes = {
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    }  # fmt: skip
    model = opened({**config, **sizes, **hub_layers(27, full, heads=32, head=128)})
    wanted = um.geometry("kimi-linear-48b-a3b")
    for lifetime in (CONTEXT, REQUEST):
        # Convolution tails, which are bfloat16 there, are wider here.
        found, published = (
            sum(part.byte_count for part in parts if part.lifetime == lifetime)
            - (lifetime == REQUEST) * sum(p.byte_count for p in parts if p.name == "conv")
            for parts in (model.parts(), wanted)
        )
        assert found == published


def test_folders_of_the_hub_are_read_as_those_that_transformers_saves(tmp_path):
    config, tensors = described("kimi_linear")
    _, wanted, _ = um.load(write_folder(tmp_path / "saved", config, tensors))
    hub = {name: one for name, one in config.items() if name not in SAVED_FIELDS}
    hub |= hub_layers(3, [2], heads=4, head=8)
    hub |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "mla_use_nope": True}
    dense = "model.layers.0.block_sparse_moe."
    moved = {n.replace(dense, "model.layers.0.mlp."): one for n, one in tensors.items()}
    assert moved.keys() != tensors.keys()
    _, found, _ = um.load(write_folder(tmp_path / "hub", hub, moved))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_decay_rates_stay_float32_in_a_bfloat16_model(tmp_path):
    config, tensors = described("kimi_linear")
    model, params, _ = load(write_folder(tmp_path, config, tensors), "bfloat16")
    for name, array in params.items():
        assert str(array.dtype) == ("float32" if array.ndim == 1 else "bfloat16"), name
    name = "model.layers.0.self_attn.A_log"
    np.testing.assert_array_equal(params[name], tensors[name].reshape(-1))
    row = whole(model, params, [[1, 2, 3]])
    assert np.isfinite(row).all()


@pytest.fixture(scope="module")
def attention():
    """A layer with random weights."""
    layer = LatentAttention(Site(0), 32, SIZES, rotary=None, token_dtype="float32")
    rng = np.random.default_rng(0)
    graph, state = nnx.split(layer)
    drawn = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), state)
    return nnx.merge(graph, drawn)


def random_seen(rng, count, past):
    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    own, shared = normal(2, count, 4, 12), normal(2, count, 4, 8)
    mask = jnp.arange(past)[None, None] < jnp.asarray([past, past // 2])[:, None, None]
    seen = Seen(normal(2, past, 32), mask, normal(2, count, 32))
    return own, shared, seen, jnp.ones((2, count), jnp.bool_)


@pytest.mark.parametrize("count, past", [(1, 0), (1, 9), (6, 0), (6, 9)])
def test_absorbed_and_expanded_attention_read_the_same(count, past, attention):
    own, shared, seen, valid = random_seen(np.random.default_rng(count), count, past)
    absorbed = attention.attend_absorbed(own, shared, seen, valid)
    near(absorbed / 10, attention.attend_expanded(own, shared, seen, valid) / 10)
    assert np.abs(absorbed).max() > 1
    if past:
        other = seen._replace(past=-seen.past)
        moved = attention.attend_expanded(own, shared, other, valid)
        assert np.abs(np.asarray(absorbed - moved)).max() > 0.1


def test_the_cheaper_way_is_taken(attention, monkeypatch):
    taken = []
    for name in ("absorbed", "expanded"):
        monkeypatch.setattr(
            LatentAttention, f"attend_{name}", lambda *_, name=name: taken.append(name)
        )
    for count, past in ((1, 4096), (64, 0), (16, 4096), (2048, 4096)):
        own, shared = jnp.zeros((1, count, 4, 12)), jnp.zeros((1, count, 4, 8))
        seen = Seen(jnp.zeros((1, past, 32)), jnp.ones((1, 1, past)), jnp.zeros((1, count, 32)))
        attention.attend(own, shared, seen, None)
    assert taken == ["absorbed", "expanded", "absorbed", "expanded"]


@pytest.mark.parametrize("way", ["attend_absorbed", "attend_expanded"])
def test_what_no_query_sees_can_be_anything(way, attention):
    own, shared, seen, valid = random_seen(np.random.default_rng(5), 3, 8)
    stale = jnp.where(seen.past_mask[:, 0, :, None], seen.past, jnp.nan)
    assert np.isnan(stale).any()
    wanted = getattr(attention, way)(own, shared, seen, valid)
    found = getattr(attention, way)(own, shared, seen._replace(past=stale), valid)
    np.testing.assert_array_equal(found, wanted)


def hub_layers(layers, full, *, heads, head):
    """The fields that folders of the hub have for layers, which they count from 1."""
    linear = [layer for layer in range(1, layers + 1) if layer not in full]
    return {
        "layer_types": None, "mlp_layer_types": None, "linear_attn_config": {
            "kda_layers": linear, "full_attn_layers": full, "num_heads": heads, "head_dim": head,
            "short_conv_kernel_size": 4,
        },
    }  # fmt: skip


SAVED_FIELDS = (
    "layer_types", "mlp_layer_types", "linear_num_heads", "linear_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


def opened(config):
    """The network, without weights."""
    return read_decoder(Fields(config), "bfloat16")


LAYERS = hub_layers(3, [2], heads=4, head=8)["linear_attn_config"]
REFUSED = {
    "an unknown layer": (
        {"layer_types": ["linear_attention", "mamba", "full_attention"]},
        "layer_types[1] is 'mamba'",
    ),
    "no layers": ({"layer_types": None}, "layer_types is None and not a list"),
    "a layer twice": (
        {"linear_attn_config": {**LAYERS, "kda_layers": [1, 2, 3]}},
        "do not name each of the layers 1 to 3 once",
    ),
    "no list": (
        {"linear_attn_config": {**LAYERS, "kda_layers": "all"}},
        "kda_layers is 'all' and not a list",
    ),
    "two orders": (
        {"linear_attn_config": {**LAYERS, "kda_layers": [2, 3], "full_attn_layers": [1]}},
        "layer_types and linear_attn_config disagree",
    ),
    "positions": ({"mla_use_nope": False}, "mla_use_nope is False"),
    "a query latent": ({"q_lora_rank": 16}, "q_lora_rank is 16"),
    "fewer keys": ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    "weights as they are": ({"moe_renormalize": False}, "moe_renormalize is False"),
    "softmax": ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func is"),
    "many choices": ({"num_experts_per_token": 7}, "num_experts_per_token is 7 and not at most 6"),
    "uneven groups": ({"num_expert_group": 4}, "num_expert_group is 4 and not a divisor of 6"),
    "many groups": ({"topk_group": 2}, "topk_group is 2 and not at most 1"),
    "another rank": ({"kv_lora_rank": 16}, "and not [24, 64]"),
    "two counts": ({"first_k_dense_replace": 2}, "first_k_dense_replace, 2, disagree"),
    "one tap": ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
    "no length": ({"model_max_length": None}, "model_max_length is None"),
    "a type of experts": (
        {"mlp_layer_types": ["dense", "sparse", "wide"]}, "mlp_layer_types is",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_a_configuration_that_cannot_be_served_is_refused_by_its_field(why, tmp_path):
    changed, message = REFUSED[why]
    config, tensors = described("kimi_linear")
    assert message in refusal(um.load, write_folder(tmp_path, {**config, **changed}, tensors))


def test_latents_are_not_stored_as_integers(tmp_path):
    config, tensors = described("kimi_linear")
    folder = write_folder(tmp_path, config, tensors)
    assert "stored as floats, not as 'int8'" in refusal(lambda: load(folder, token_dtype="int8"))
