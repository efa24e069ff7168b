"""What holds for every test: the CPU, strict promotion rules, repeatable Hypothesis examples.

JAX_PLATFORMS is set in the environment, before anything imports JAX, so that the programs which
tests start inherit it; a value that is already there is kept.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

# An accidental promotion or broadcast in the library costs bytes; users may be laxer.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A deadline would measure the machine. In CI the examples are the same in every run.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("repeatable" if os.environ.get("CI") else "here")
