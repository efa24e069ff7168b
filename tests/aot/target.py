"""Compiles programs for an H200 on a machine that has no GPU and no driver.

It needs the CUDA plugin of the installed jax, in exactly its version, and `ptxas`; nothing is run
and no memory is taken, so an arena may have any size. With UNIMEM_REQUIRE_AOT=1 a missing plugin
is an error, so that a continuous integration run cannot skip these checks unnoticed.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import pytest
from jax import stages
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")

# The data sheet of the H200 SXM and the limits of compute capability 9.0 in the CUDA programming
# guide, in the fields of XLA's GpuTargetConfigProto.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 minor: 0 patch: 0 }
dnn_version_info { major: 9 minor: 12 }
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


def require_plugin() -> None:
    """Skips the calling test without a CUDA plugin, or fails it under UNIMEM_REQUIRE_AOT=1."""
    if _plugin_is_installed():
        return
    reason = f"compiling for an H200 needs jax-cuda13-plugin and jax-cuda13-pjrt {jax.__version__}"
    if os.environ.get("UNIMEM_REQUIRE_AOT") == "1":
        pytest.fail(f"UNIMEM_REQUIRE_AOT=1, and {reason}")
    pytest.skip(reason)


def compile_for_h200(
    fn: Callable[..., Any], *shapes: Any, donate: int | tuple[int, ...] = ()
) -> stages.Compiled:
    """Compiles `jax.jit(fn)` for one H200.

    Args:
      shapes: pytrees of arrays or `jax.ShapeDtypeStruct`; only shapes and dtypes count.
      donate: numbers of the donated arguments.
    """
    sharding = SingleDeviceSharding(_topology().devices[0])

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    placed = jax.tree.map(place, shapes)
    with jax.sharding.use_abstract_mesh(traced_for("NVIDIA H200")):
        return jax.jit(fn, donate_argnums=donate).trace(*placed).lower().compile()


def traced_for(device_kind: str) -> AbstractMesh:
    """Tells code that looks at the device while it is traced which device that will be."""
    fields = {"device_kind": device_kind, "num_cores": None}
    if "platform" in AbstractDevice.__dataclass_fields__:  # required since jax 0.12
        fields["platform"] = "gpu"
    return AbstractMesh((), (), abstract_device=AbstractDevice(**fields))


def _plugin_is_installed() -> bool:
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(name) is not None for name in PLUGINS)


@cache
def _topology() -> Any:
    # Without a driver the plugin refuses to load unless told that this is meant.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    return topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H200, topology="1x1x1"
    )
