"""MXFP4 weights: their values by the definition of the format, and what is refused."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unimem_jax.models.mxfp4 import LARGEST_SCALE, dequantise, packed_shapes

from unimem_jax.errors import UsageError


def e2m1(code: int) -> float:
    """Sign, two bits of exponent with bias 1, one bit of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
    return -size if sign else size


def slowly(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float64[experts, in, out], one weight at a time."""
    experts, outputs, groups, _ = blocks.shape
    found = np.zeros((experts, groups * 32, outputs))
    for expert, out, place in np.ndindex(experts, outputs, groups * 32):
        group, within = divmod(place, 32)
        byte = int(blocks[expert, out, group, within // 2])
        code = byte >> 4 if within % 2 else byte & 15
        scale = 2.0 ** (int(scales[expert, out, group]) - 127)
        found[expert, place, out] = e2m1(code) * scale
    return found


def test_the_sixteen_codes_stand_for_the_values_of_the_specification() -> None:
    blocks = np.arange(16, dtype=np.uint8).reshape(1, 1, 1, 16)  # high nibbles are all 0
    found = dequantise(blocks, np.full((1, 1, 1), 128, np.uint8), np.float32, "w")
    assert found.shape == (1, 32, 1)
    positive = [0, 1, 2, 3, 4, 6, 8, 12]  # 0, 0.5, 1, 1.5, 2, 3, 4 and 6 at a scale of 2
    np.testing.assert_array_equal(found[0, 0::2, 0], [*positive, *(-value for value in positive)])
    assert not found[0, 1::2].any()


def test_the_low_half_of_a_byte_comes_first() -> None:
    blocks = np.full((1, 1, 1, 16), 0x72, np.uint8)
    found = dequantise(blocks, np.full((1, 1, 1), 127, np.uint8), np.float32, "w")
    assert found[0, :4, 0].tolist() == [1.0, 6.0, 1.0, 6.0]


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from(["float32", "bfloat16"]),
)
def test_weights_equal_a_slow_decoder_exactly(
    seed: int, sizes: tuple[int, int, int], dtype: str
) -> None:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (*sizes, 16), np.uint8)
    scales = rng.integers(0, LARGEST_SCALE + 1, sizes, np.uint8)
    found = dequantise(blocks, scales, np.dtype(getattr(ml_dtypes, dtype, dtype)), "w")
    assert str(found.dtype) == dtype
    np.testing.assert_array_equal(found.astype(np.float64), slowly(blocks, scales))


def test_packed_shapes_are_those_that_expand_to_the_matrices() -> None:
    blocks, scales = packed_shapes(3, 64, 5)
    assert (blocks, scales) == ((3, 5, 2, 16), (3, 5, 2))
    found = dequantise(np.zeros(blocks, np.uint8), np.zeros(scales, np.uint8), np.float32, "w")
    assert found.shape == (3, 64, 5)


@pytest.mark.parametrize(
    "blocks, scales, message",
    [
        (np.zeros((1, 2, 1, 16), np.int8), np.zeros((1, 2, 1), np.uint8), "uint8, not int8"),
        (np.zeros((1, 2, 1, 16), np.uint8), np.zeros((1, 2, 1), np.float32), "and float32"),
        (np.zeros((1, 2, 1, 8), np.uint8), np.zeros((1, 2, 1), np.uint8), "[1, 2, 1, 8]"),
        (np.zeros((1, 2, 1, 16), np.uint8), np.zeros((1, 2, 2), np.uint8), "scales [1, 2, 2]"),
        (np.zeros((2, 1, 16), np.uint8), np.zeros((2, 1), np.uint8), "[2, 1, 16]"),
        (np.zeros((1, 2, 1, 16), np.uint8), np.full((1, 2, 1), 255, np.uint8), "a scale of 255"),
        (np.zeros((1, 2, 1, 16), np.uint8), np.full((1, 2, 1), 253, np.uint8), "a scale of 253"),
    ],
)
def test_tensors_that_are_no_mxfp4_are_refused_by_name(
    blocks: Any, scales: Any, message: str
) -> None:
    with pytest.raises(UsageError) as error:
        dequantise(blocks, scales, np.float32, "model.w")
    assert str(error.value).startswith("model.w: ")
    assert message in str(error.value)
