"""DeepSeek-V3.2: which tokens are chosen, over past and fresh ones; refusals; other checkpoints.

The numbers that Transformers computed for longer prompts are compared in `test_references.py`.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from unimem_jax.models import deepseek_v32
from unimem_jax.models.deepseek_v32 import (
    Seen,
    choose_tokens,
    index_scores,
    load,
    narrowed,
    read_decoder,
)
from unimem_jax.models.fields import Fields

import unimem_jax as um
from tests.models.oracle import near, refusal, require_checkpoint, whole, write_folder
from tests.models.reference import described
from tests.models.through_arena import Service
from unimem_jax.spec import CONTEXT, Site

MOST = 16  # tokens that a query chooses in the network of `references`


def read_layer(state, layer):
    """What a layer remembers in the dumped state."""
    pair = [state[f"L{layer}.{name}"][0, 0] for name in ("keys", "values")]
    return {"latent": np.concatenate(pair, axis=-1), "index_key": state[f"L{layer}.idx"][0]}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["whole", "page 1", "page 16"])
def test_another_checkpoint_gives_the_numbers_of_transformers(way):
    require_checkpoint("deepseek_v32", load, read_layer, way)


@pytest.mark.parametrize("count", [1, 5])
def test_scores_are_weighted_sums_over_heads(count):
    rng = np.random.default_rng(count)
    query, keys = rng.normal(size=(2, count, 3, 8)), rng.normal(size=(2, 11, 8))
    weights = rng.normal(size=(2, count, 3))
    wanted = np.zeros((2, count, 11))
    for row, token, key, head in np.ndindex(2, count, 11, 3):
        product = query[row, token, head] @ keys[row, key] / np.sqrt(8)
        wanted[row, token, key] += weights[row, token, head] * max(product, 0)
    found = index_scores(*(jnp.asarray(one, jnp.float32) for one in (query, keys, weights)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def chosen_sets(scores, mask, count):
    """For each query the positions that it chooses: best first, equal ones from the lowest."""
    found = np.zeros(mask.shape, bool)
    for at in np.ndindex(mask.shape[:2]):
        seen = np.flatnonzero(mask[at])
        order = seen[np.argsort(-scores[at][seen], kind="stable")]
        found[at][order[:count]] = True
    return found


@pytest.mark.parametrize("levels", [2, 5, 1000])
@pytest.mark.parametrize("count, past", [(1, 12), (6, 7), (6, 0)])
def test_the_chosen_are_the_best_and_the_lowest_of_equals(count, past, levels):
    """Few levels make nearly all scores equal, as scores of 0 are."""
    rng = np.random.default_rng(levels)
    total = past + count
    scores = rng.integers(0, levels, (2, count, total)).astype(np.float32)
    scores[:, :, past // 2] = np.nan  # hidden below
    before = np.broadcast_to(np.arange(past) < np.array([past, 3])[:, None, None], (2, count, past))
    own = np.broadcast_to(np.tril(np.ones((count, count), bool)), (2, count, count))
    mask = np.concatenate([before, own], axis=2) & ~np.isnan(scores)
    chosen, is_seen = choose_tokens(jnp.asarray(scores), jnp.asarray(mask), 4)
    found = np.zeros(mask.shape, bool)
    for at in np.ndindex(2, count):
        found[at][np.asarray(chosen[at])[np.asarray(is_seen[at])]] = True
    wanted = chosen_sets(scores, mask, 4)
    np.testing.assert_array_equal(found, wanted)
    if levels == 2 and past:  # other rules would choose otherwise
        assert (wanted != chosen_sets(scores[:, :, ::-1], mask[:, :, ::-1], 4)[:, :, ::-1]).any()


def test_one_query_gathers_what_many_would_mask():
    rng = np.random.default_rng(0)
    past, fresh = (jnp.asarray(rng.normal(size=(2, n, 6)), jnp.float32) for n in (9, 1))
    seen = Seen(past, jnp.ones((2, 1, 9), jnp.bool_), fresh)
    chosen = jnp.asarray([[[9, 2, 4]], [[1, 0, 3]]], jnp.int32)
    is_seen = jnp.asarray([[[True, True, True]], [[True, True, False]]])
    few = narrowed(seen, chosen, is_seen)
    together = jnp.concatenate([past, fresh], axis=1)
    for row in range(2):
        np.testing.assert_array_equal(few.past[row], together[row, chosen[row, 0]])
    np.testing.assert_array_equal(few.past_mask, is_seen)
    assert not few.fresh_mask.any()


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    config, tensors = described("deepseek_v32")
    return config, tensors, tmp_path_factory.mktemp("networks")


def test_latent_and_index_key_lie_in_one_entry_in_dtypes_of_their_own(network):
    config, tensors, folder = network
    model, params, _ = load(
        write_folder(folder / "mixed", config, tensors),
        token_dtype="bfloat16", index_dtype="float32",
    )  # fmt: skip
    kept = {part.key: (part.shape, part.dtype, part.lifetime) for part in model.parts()}
    assert kept[Site(1), "latent"] == ((32,), "bfloat16", CONTEXT)
    assert kept[Site(1), "index_key"] == ((16,), "float32", CONTEXT)
    ids = np.random.default_rng(0).integers(0, 64, 40).tolist()
    service = Service(model, params, page_tokens=4, chunk_tokens=7, rows=1, context_tokens=64)
    assert len(service.plan.sub_pools) == 1
    (request,), logits = service.prefill([ids], 1)
    # Rounding may carry a latent across a step of its stored dtype, and no further.
    np.testing.assert_allclose(logits[0], whole(model, params, [ids])[0, -1], rtol=0, atol=0.01)
    service.memory.free(request)


def test_attention_is_dense_as_long_as_all_tokens_may_be_chosen(network):
    config, tensors, folder = network
    rows = []
    for most in (MOST, 4096):
        place = write_folder(folder / f"most {most}", {**config, "index_topk": most}, tensors)
        model, params, _ = load(place)
        ids = np.random.default_rng(2).integers(0, 64, 3 * MOST).tolist()
        rows.append(whole(model, params, [ids])[0])
    near(rows[0][:MOST], rows[1][:MOST])
    assert np.abs(rows[0][MOST:] - rows[1][MOST:]).max() > 0.01


def test_where_no_head_scores_anything_the_first_tokens_are_chosen(network, monkeypatch):
    """A token that no layer chooses reaches no other; not even a query's own has to be chosen."""
    config, tensors, folder = network
    silent = {
        name: np.zeros_like(one) if "weights_proj" in name else one for name, one in tensors.items()
    }
    model, params, _ = load(write_folder(folder / "silent", config, silent))
    ids = np.random.default_rng(3).integers(0, 64, 30).tolist()
    unseen, seen = [*ids], [*ids]
    unseen[MOST + 2], seen[0] = (ids[MOST + 2] + 1) % 64, (ids[0] + 1) % 64
    rows = whole(model, params, [ids, unseen, seen])
    np.testing.assert_array_equal(rows[0, -1], rows[1, -1])
    assert np.abs(rows[0, -1] - rows[2, -1]).max() > 1e-3

    def choose_last(scores, mask, count):
        chosen, is_seen = choose_tokens(scores[:, :, ::-1], mask[:, :, ::-1], count)
        return scores.shape[2] - 1 - chosen, is_seen

    # A rule that takes the last of equals would be noticed.
    monkeypatch.setattr(deepseek_v32, "choose_tokens", choose_last)
    others = whole(model, params, [ids, unseen, seen])
    assert np.abs(others[0, -1] - others[1, -1]).max() > 1e-3


def test_the_published_sizes_are_the_published_geometry():
    config, _ = described("deepseek_v32")
    sizes = {
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "index_n_heads": 64, "index_head_dim": 128, "layer_types": None, "mlp_layer_types": None,
    }  # fmt: skip
    parts = read_decoder(Fields({**config, **sizes}), "bfloat16").parts()
    wanted = um.geometry("deepseek-v3.2")
    for layer in (0, 60):
        found, published = (
            sum(part.byte_count for part in kept if part.site.layer == layer)
            for kept in (parts, wanted)
        )
        assert found == published == 2 * (512 + 64 + 128)


REFUSED = {
    "an unknown layer": ({"layer_types": ["full_attention"] * 2}, "layer_types[0] is 'full"),
    "no query latent": ({"q_lora_rank": None}, "q_lora_rank is None"),
    "fewer keys": ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    "a short key": ({"index_head_dim": 4}, "index_head_dim is 4 and not at least"),
    "no choice": ({"index_topk": 0}, "index_topk is 0"),
    "other heads": ({"index_n_heads": 8}, "indexer.weights_proj.weight is [16, 64] and not [8,"),
    "softmax": ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    "another method": ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
    "halves that turn": ({"rope_interleave": False}, "rope_interleave is False"),
    "an indexer's neighbours that turn": (
        {"indexer_rope_interleave": True}, "indexer_rope_interleave is True",
    ),
    "biases": ({"mlp_bias": True}, "mlp_bias is True"),
    "groups": ({"n_group": 3}, "n_group is 3 and not a divisor of 8"),
    "choices beyond the groups": (
        {"num_experts_per_tok": 5}, "num_experts_per_tok is 5 and not at most 4",
    ),
    "dense layers": ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    "two counts": ({"first_k_dense_replace": 0}, "first_k_dense_replace, 0, disagree"),
    "experts between": ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    "a negative stretch": (
        {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": -1.0,
            "original_max_position_embeddings": 128,
        }},
        "mscale_all_dim is a positive number",
    ),
    "quantised weights": ({"quantization_config": {"quant_method": "fp8"}}, "is 'fp8'"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_a_configuration_that_cannot_be_served_is_refused_by_its_field(why, network, tmp_path):
    changed, message = REFUSED[why]
    config, tensors, _ = network
    assert message in refusal(um.load, write_folder(tmp_path, {**config, **changed}, tensors))


def test_index_keys_are_not_stored_as_integers(network):
    config, tensors, folder = network
    place = write_folder(folder / "integers", config, tensors)
    assert "index keys are stored as floats, not as 'int8'" in refusal(
        lambda: load(place, index_dtype="int8")
    )


def test_scores_grow_with_the_stretch_of_positions(network):
    """The factor of scores goes with `mscale_all_dim`; cosine and sine stay as they are."""
    config, _, _ = network
    settings = config["rope_parameters"]
    plain = {key: one for key, one in settings.items() if not key.startswith("mscale")}
    rotary = Fields({"rope_parameters": settings}).rotary(8)
    assert rotary.scale == 1.0
    assert rotary.score_scale == pytest.approx((0.1 * np.log(4.0) + 1) ** 2)
    without = Fields({"rope_parameters": plain}).rotary(8)
    assert (without.scale, without.score_scale) == (pytest.approx(0.1 * np.log(4.0) + 1), 1.0)
    assert without.frequencies == rotary.frequencies
