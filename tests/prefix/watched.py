"""Logits of an engine as it serves."""

from contextlib import contextmanager

import numpy as np


@contextmanager
def sampled_logits(engine, on_batch=lambda engine: None):
    """Gives a dictionary from the tokens before a sampled one to the logits that it came from.

    Args:
      on_batch: called after each batch.
    """
    seen, run_batch = {}, engine._run_batch

    def watched(batch):
        out = run_batch(batch)
        on_batch(engine)
        logits = np.asarray(out.logits)
        for row, (served, more) in enumerate(batch):
            if served.computed + more == served.known:
                seen[tuple(served.tokens)] = logits[row]
        return out

    engine._run_batch = watched
    try:
        yield seen
    finally:
        del engine._run_batch
