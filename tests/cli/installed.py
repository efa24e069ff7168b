"""Tiny models installed under the entry-point group, for this process or for others."""

from pathlib import Path

ENTRY_POINTS = """[unimem_jax.models]
tiny = tiny_models:tiny
silent = tiny_models:silent
endless = tiny_models:endless
broken = tiny_models:missing
"""

MODULE = '''
from tests.engine.hybrid import Hybrid
from unimem_jax.errors import UsageError


class Silent(Hybrid):
    """Says nothing of text."""

    text = None


class Endless(Hybrid):
    """Has a context that takes long to fill."""

    context_tokens = 50_000


def tiny(path=None):
    if path is not None and not (path / "weights").exists():
        raise UsageError(f"no weights in {path}")
    return Hybrid(), Hybrid().init(), None


def silent(path=None):
    return Silent(), Silent().init(), None


def endless(path=None):
    return Endless(), Endless().init(), None
'''


def install(folder: Path) -> Path:
    """Writes a distribution that announces the models; `folder` then belongs on the path."""
    info = folder / "tiny_models-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-models\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "tiny_models.py").write_text(MODULE)
    return folder
