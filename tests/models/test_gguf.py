"""GGUF files: networks beside a slow twin, quantised tensors, and files that are refused."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from unimem_jax.models.gguf import load, paired_halves

import unimem_jax as um
from tests.models.gguf_files import (
    GGUF_LLAMA,
    GGUF_QWEN3,
    VOCABULARY,
    write_gguf,
)
from tests.models.oracle import near, refusal, whole
from tests.models.qwen_twin import Twin, random_tensors

# Error of a stored matrix, in parts of the largest number of its block.
BOUNDS = {
    "F16": 1e-3, "BF16": 5e-3, "Q8_0": 5e-3, "Q5_1": 0.04, "Q5_0": 0.07, "Q4_1": 0.075,
    "Q4_0": 0.14,
}  # fmt: skip
TIED = GGUF_LLAMA | {"tie_word_embeddings": True}
SLOWED = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip


@pytest.mark.parametrize("config", [GGUF_LLAMA, TIED, GGUF_QWEN3], ids=["llama", "tied", "qwen3"])
def test_a_file_gives_the_logits_of_the_slow_twin(config, tmp_path):
    tensors = random_tensors(config, 3)
    model, params, _ = load(write_gguf(tmp_path / "tiny.gguf", config, tensors))
    assert params.keys() == tensors.keys()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, length).tolist() for length in (40, 1)]
    for row, ids in zip(whole(model, params, prompts), prompts, strict=True):
        near(row[: len(ids)], Twin(config, tensors).run(ids)[0])
    assert (model.vocab_size, model.context_tokens) == (VOCABULARY, 256)
    assert (model.start_token, model.end_tokens) == (1, (0,))


def test_neighbours_that_turned_together_turn_as_halves():
    heads, head, width = 3, 8, 5
    rng = np.random.default_rng(0)
    query_rows, key_rows = rng.normal(0, 1, (2, heads * head, width))
    rate = 50.0 ** -(np.arange(head // 2) / (head // 2))

    def scores(rows, positions, xs, is_neighbour):
        found = []
        for row, position, x in zip(rows, positions, xs, strict=True):
            vector = (row @ x).reshape(heads, head)
            pairs = vector.reshape(heads, -1, 2) if is_neighbour else vector.reshape(heads, 2, -1)
            first, second = np.moveaxis(pairs, 2 if is_neighbour else 1, 0)
            found.append((first + 1j * second) * np.exp(1j * position * rate))
        return (found[0] * found[1].conj()).real.sum(axis=1)

    xs = rng.normal(0, 1, (2, width))
    stored = scores((query_rows, key_rows), (9, 4), xs, is_neighbour=True)
    put_back = [paired_halves(rows, heads) for rows in (query_rows, key_rows)]
    np.testing.assert_allclose(scores(put_back, (9, 4), xs, is_neighbour=False), stored, atol=1e-12)
    assert np.abs(scores((query_rows, key_rows), (9, 4), xs, is_neighbour=False) - stored).max() > 1


def test_factors_of_a_file_slow_its_rotary_positions(tmp_path):
    config = GGUF_LLAMA | {"rope_scaling": SLOWED}
    tensors = random_tensors(config, 3)
    twin = Twin(config, tensors)
    rates = 100.0 ** -(np.arange(4) / 4)
    factors = np.float32([rate / twin.slowed(rate) for rate in rates])
    assert (factors[0], factors[-1]) == (1, 8)
    beside = {"rope_freqs.weight": factors}
    model, params, _ = load(write_gguf(tmp_path / "a.gguf", GGUF_LLAMA, tensors, beside=beside))
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 60).tolist()
    near(whole(model, params, [ids])[0], twin.run(ids)[0])


@pytest.mark.parametrize("kind", BOUNDS)
def test_quantised_matrices_come_back_as_near_as_their_type_can_say(kind, tmp_path):
    tensors = random_tensors(GGUF_LLAMA, 3)
    file = write_gguf(tmp_path / "tiny.gguf", GGUF_LLAMA, tensors, kind=kind)
    model, params, _ = load(file)
    dtype = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    for name, tensor in tensors.items():
        found = np.asarray(params[name]).astype(np.float32)
        if tensor.ndim == 1:
            np.testing.assert_array_equal(found, tensor)
            continue
        assert str(params[name].dtype) == dtype
        error = np.abs(found - tensor).reshape(-1, 32).max(axis=1)
        largest = np.abs(tensor).reshape(-1, 32).max(axis=1)
        assert (error / largest).max() < BOUNDS[kind], name
        assert error.max() > 0
    assert {part.dtype for part in model.parts()} == {dtype}
    assert {str(array.dtype) for array in load(file, "bfloat16")[1].values()} == {
        "float32", "bfloat16"
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["BF16", "Q8_0"])
def test_vectors_may_be_stored_as_matrices_are(kind, tmp_path):
    config = GGUF_LLAMA | {"hidden_size": 1024}  # a vector of several slices
    tensors = random_tensors(config, 0)
    file = write_gguf(tmp_path / "a.gguf", config, tensors, kind=kind, least_axes=1)
    for name, array in load(file)[1].items():
        assert array.shape == tensors[name].shape
        np.testing.assert_allclose(array, tensors[name], atol=0.03)


def test_a_file_is_found_by_its_ending_and_shows_progress(tmp_path):
    seen = []
    file = write_gguf(tmp_path / "tiny.GGUF", GGUF_LLAMA, random_tensors(GGUF_LLAMA, 0))
    model, params, _ = um.load(file, lambda *progress: seen.append(progress))
    assert len(seen) == len(params) == len(model.shapes())
    assert seen[-1][1] == seen[-1][2] == sum(array.nbytes for array in params.values())


PEAK = """
import sys
from unimem_jax.models.gguf import load

def peak_bytes():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

load(sys.argv[2], sys.argv[1])
before = peak_bytes()
_, params, _ = load(sys.argv[3], sys.argv[1])
weights = [array.nbytes for array in params.values()]
print(peak_bytes() - before, sum(weights), max(weights))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts pages as Linux does")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_the_weights_and_one_tensor(dtype, tmp_path):
    large = GGUF_LLAMA | {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
    large |= {"head_dim": 64}
    files = [
        write_gguf(tmp_path / str(at), config, random_tensors(config, 0), kind="Q8_0")
        for at, config in enumerate((GGUF_LLAMA, large))
    ]
    command = [sys.executable, "-c", PEAK, dtype, *map(str, files)]
    # Otherwise the C library keeps some of what was freed.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    peak, weights, largest = map(int, run.stdout.split())
    assert weights > 10 * largest > 50 << 20
    assert weights < peak < weights + largest


def refused(tmp_path, message, config=GGUF_LLAMA, **written):
    """The file is refused with this message, and no tensor has been read."""
    seen = []
    file = write_gguf(tmp_path / "tiny.gguf", config, random_tensors(config, 0), **written)
    found = refusal(lambda: load(file, on_tensor=lambda *step: seen.append(step)))
    assert message in found
    assert str(file) in found
    assert not seen


CHANGED = {
    "llama.block_count": (4, "lacks 9 tensors: blk.3.attn_k.weight, "),
    "llama.context_length": (None, "llama.context_length is None"),
    "llama.feed_forward_length": (96, "ffn_down.weight is [32, 64] and not [32, 96]"),
    "llama.attention.head_count": (3, "rope.dimension_count"),
    "llama.attention.head_count_kv": (3, "num_key_value_heads is 3"),
    "llama.attention.value_length": (4, "llama.attention.value_length is 4"),
    "llama.attention.sliding_window": (9, "llama.attention.sliding_window is 9"),
    "llama.expert_count": (8, "llama.expert_count is 8"),
    "llama.rope.scaling.type": ("yarn", "llama.rope.scaling.type is 'yarn'"),
    "llama.rope.scaling.factor": (4.0, "llama.rope.scaling.factor is 4.0"),
    "llama.rope.scale_linear": (4.0, "llama.rope.scale_linear is 4.0"),
    "llama.rope.dimension_count": (4, "llama.rope.dimension_count is 4"),
    "llama.vocab_size": (5, "llama.vocab_size is 5"),
    "split.count": (2, "split.count is 2"),
    "tokenizer.ggml.model": ("llama", "tokenizer.ggml.model is 'llama'"),
    "tokenizer.ggml.pre": ("other", "tokenizer.ggml.pre is 'other'"),
    "tokenizer.ggml.tokens": (["a", "b"], "2 different tokens"),
    "tokenizer.ggml.token_type": ([1, 1], "2 types"),
    "tokenizer.ggml.merges": (["a nowhere"], "merges do not fit"),
    "tokenizer.ggml.eos_token_id": (VOCABULARY, "tokenizer.ggml.eos_token_id is"),
    "tokenizer.chat_template": ("{% for %}", "the chat template is invalid"),
}


@pytest.mark.parametrize("key", CHANGED)
def test_metadata_that_cannot_be_served_are_refused_by_their_key(key, tmp_path):
    value, message = CHANGED[key]
    changed = {key: value}
    if key == "llama.attention.head_count":
        changed["llama.rope.dimension_count"] = 8
        changed["llama.attention.key_length"] = None
    refused(tmp_path, message, changed=changed)


def test_weights_of_another_dtype_are_refused(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf", GGUF_LLAMA, random_tensors(GGUF_LLAMA, 0))
    assert "not 'float64'" in refusal(load, file, "float64")


def test_a_file_without_a_tokenizer_is_refused(tmp_path):
    refused(tmp_path, "holds no tokenizer", changed={"tokenizer.ggml.model": None})
    refused(tmp_path, "merges is missing", changed={"tokenizer.ggml.merges": None})


def test_another_architecture_is_refused(tmp_path):
    refused(tmp_path, "architecture 'bert'; supported are llama, qwen3", name="bert")


def test_a_quantisation_that_cannot_be_undone_is_refused(tmp_path):
    refused(tmp_path, "is Q8_1, which cannot be dequantised", kind="Q8_1")


def test_tensors_too_many_are_refused(tmp_path):
    beside = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    refused(tmp_path, "nothing is known of 1 tensors: blk.0.attn_q.bias", beside=beside)


@pytest.mark.parametrize("factors", [[1.0, 1.0], [1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, np.nan]])
def test_factors_that_slow_nothing_known_are_refused(factors, tmp_path):
    beside = {"rope_freqs.weight": np.float32(factors)}
    file = write_gguf(tmp_path / "a.gguf", GGUF_LLAMA, random_tensors(GGUF_LLAMA, 0), beside=beside)
    assert "factors are not 4 positive numbers" in refusal(load, file)


def test_a_file_that_ends_anywhere_before_its_end_is_refused(tmp_path):
    whole_file = write_gguf(tmp_path / "a.gguf", GGUF_LLAMA, random_tensors(GGUF_LLAMA, 0))
    content = whole_file.read_bytes()
    load(whole_file)
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 20, *range(24, len(content), len(content) // 50), len(content) - 64]:
        cut.write_bytes(content[:length])
        assert f"{cut} is not a readable GGUF file" in refusal(load, cut), length


def test_what_is_no_file_of_the_format_is_refused(tmp_path):
    (tmp_path / "text.gguf").write_text("Once upon a time\n" * 9)
    assert "not a readable GGUF file" in refusal(load, tmp_path / "text.gguf")
    assert "cannot read" in refusal(load, tmp_path / "none.gguf")
    assert "cannot read" in refusal(load, tmp_path)
    assert "give a .gguf file" in refusal(load)


@pytest.mark.parametrize("package", ["gguf", "tokenizers", "jinja2"])
def test_a_package_that_is_not_installed_is_named(package, tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf", GGUF_LLAMA, random_tensors(GGUF_LLAMA, 0))
    monkeypatch.setitem(sys.modules, package, None)
    assert f"needs the package {package}" in refusal(load, file)
