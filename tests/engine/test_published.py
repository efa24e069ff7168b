"""Published figures, row by row, in every layout; the loads of the bench at their full size.

Rows that need the Azure conversation trace run where UNIMEM_TRACES names the folder that has it.
"""

import os
from pathlib import Path

import pytest

from bench.simulate import AZURE_REQUESTS, GIB, LAYOUTS, ROWS
from unimem_jax.replay import Load, replay

TOLERANCE = {"unified": 0.01, "split": 0.03, "blocks": 0.03}
TRACE = Path(os.environ.get("UNIMEM_TRACES", "")) / "AzureLLMInferenceTrace_conv.csv"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.model}-{row.gib}-{row.load}")
def test_published_running_and_steps_are_met(row, layout):
    load = Load(None, None, None, *row.load) if row.load else None
    if load is None:
        if not TRACE.is_file():
            pytest.skip("the trace is not here; UNIMEM_TRACES names its folder")
        load = Load(str(TRACE), AZURE_REQUESTS, "at-once")
    found = replay(row.model, row.gib * GIB, load, load.read(), layout=layout).simulated
    mean, steps = row.expected[LAYOUTS.index(layout)]
    # The published means have one decimal.
    assert found.running_mean == pytest.approx(mean, rel=TOLERANCE[layout], abs=0.05)
    assert found.steps == pytest.approx(steps, rel=TOLERANCE[layout])
