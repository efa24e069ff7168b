"""Random networks that two programs rebuild alike: a tensor follows from a seed and its own name.

NumPy and safetensors only, for Python 3.11 too, so that the interpreter that has Transformers and
the one that has JAX make the same folder and no weights need to be kept.
"""

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FOLDER = Path(__file__).parent
PLAIN_NORM = "linear_attn.norm"  # the one norm of Qwen3.5 whose weight is not added to 1
MIDDLE_SCALE = 120  # E8M0: weights of MXFP4 are then near 2 ** -7 times their code
LASTING = -4.0  # log of a DeltaNet's rate: half of its memory is left after some 50 tokens


def rebuild(name: str, folder: Path) -> Path:
    """Writes the hub folder of the network that `NAME.json` describes."""
    described = json.loads((FOLDER / f"{name}.json").read_text())
    config = described["config"]
    tensors = draw_tensors(config, described["tensors"], described["seed"])
    return write_folder(folder, config, tensors, described["shards"])


def draw_tensors(
    config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], seed: int
) -> dict[str, np.ndarray]:
    """Every tensor of a network, float32 (MXFP4: uint8), large enough that leaving it out shows."""
    return {name: draw(config, name, shape, seed) for name, shape in shapes.items()}


def draw(config: Mapping[str, Any], name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """The tensor `name` of a hub folder; no other tensor, and no order, has a part in it."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith("_blocks"):
        return rng.integers(0, 256, shape, np.uint8)
    if name.endswith("_scales"):
        return rng.integers(MIDDLE_SCALE - 1, MIDDLE_SCALE + 2, shape, np.uint8)
    normal = rng.normal(0, 1, shape)
    if "norm" in name and not name.endswith("bias"):
        is_centred = config["model_type"].startswith(("qwen3_5", "qwen3_next"))
        is_added_to_one = is_centred and PLAIN_NORM not in name
        return (normal * 0.2 + (not is_added_to_one)).astype(np.float32)
    if name.endswith("A_log"):
        return (normal + LASTING).astype(np.float32)
    if name.endswith("bias"):
        return (normal * 0.2).astype(np.float32)  # larger ones would choose every token
    if len(shape) > 1 and "embed" not in name:
        # Experts of GPT-OSS are [experts, in, out], matrices [out, in], convolutions [out, 1, in].
        inputs = shape[1] if "mlp.experts" in name else shape[-1]
        normal = normal * (1.5 * inputs**-0.5)
    return normal.astype(np.float32)


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], shards: int = 2
) -> Path:
    """A hub folder with these contents, in shards with their index, or in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    solid = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    if shards == 1:
        save_file(solid, folder / "model.safetensors")
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        names = sorted(solid)[shard::shards]
        save_file({name: solid[name] for name in names}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
