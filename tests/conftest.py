"""What holds for every test: the CPU, strict promotion rules, repeatable Hypothesis examples.

Two variables are set in the environment, before anything imports JAX, so that the programs which
tests start inherit them; a value that is already there is kept. Most of the suite's time is
compilation, and LLVM's optimisations are half of that. They are left out here; the long tests, the
oldest JAX and what is compiled for a GPU have them all (`XLA_FLAGS=` in the environment).
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import hypothesis
import jax

# An accidental promotion or broadcast in the library costs bytes; users may be laxer.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A deadline would measure the machine. In CI the examples are the same in every run.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable" if os.environ.get("CI") else "here")
