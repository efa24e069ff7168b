"""MXFP4 weights of hub checkpoints, expanded while loading. NumPy; no arithmetic on a device.

32 neighbouring weights of a row share one scale. A weight is four bits, E2M1: sign, two bits of
exponent, one of mantissa; a scale is one byte, E8M0: a power of two.

    blocks  uint8[experts, out, in / 32, 16]   byte b of a block: weight 2b low, weight 2b + 1 high
    scales  uint8[experts, out, in / 32]       weight = E2M1 * 2 ** (scale - 127)

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4; layout of the
GPT-OSS checkpoints.
"""

from typing import Any

import numpy as np

from unimem_jax.errors import UsageError

BLOCK_WEIGHTS = 32
BLOCK_BYTES = 16
SCALE_BIAS = 127
LARGEST_SCALE = 252  # 6 * 2 ** 126 is beyond float32, and 255 is NaN
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 codes 0 to 7; 8 to 15 are negative
CODES = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)
# Both weights of every possible byte, float32[256, 2].
PAIRS = np.stack([np.tile(CODES, 16), np.repeat(CODES, 16)], axis=1)


def packed_shapes(experts: int, inputs: int, outputs: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the blocks and of the scales of matrices with a multiple of 32 `inputs`."""
    groups = (experts, outputs, inputs // BLOCK_WEIGHTS)
    return (*groups, BLOCK_BYTES), groups


def dequantise(blocks: np.ndarray, scales: np.ndarray, dtype: Any, name: str) -> np.ndarray:
    """Expands packed matrices to [experts, in, out], as `x @ matrix` takes them.

    Args:
      blocks, scales: uint8, of the shapes above.
      dtype: of the result; bfloat16 and float32 hold every weight exactly.
      name: of the tensor, for messages.
    Raises:
      UsageError: wrong dtypes or shapes, or a scale that is NaN or beyond float32.
    Cost: float32 copies of one expert beside the result.
    """
    if blocks.dtype != np.uint8 or scales.dtype != np.uint8:
        raise UsageError(
            f"{name}: MXFP4 blocks and scales are uint8, not {blocks.dtype} and {scales.dtype}"
        )
    if blocks.ndim != 4 or blocks.shape != (*scales.shape, BLOCK_BYTES):
        raise UsageError(
            f"{name}: MXFP4 blocks are [experts, out, in / 32, 16] with one scale per block, "
            f"not {list(blocks.shape)} with scales {list(scales.shape)}"
        )
    if scales.size and scales.max() > LARGEST_SCALE:
        raise UsageError(f"{name}: a scale of {scales.max()} is beyond float32 (255 is NaN)")
    experts, outputs, groups, _ = blocks.shape
    matrices = np.empty((experts, groups * BLOCK_WEIGHTS, outputs), dtype)
    for matrix, packed, scale in zip(matrices, blocks, scales, strict=True):
        exponents = scale.astype(np.int32) - SCALE_BIAS
        weights = np.ldexp(PAIRS[packed], exponents[..., None, None])
        matrix[...] = weights.reshape(outputs, -1).T
    return matrices
