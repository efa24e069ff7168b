"""Files that programs write: refused early, written whole or not at all.

O1  A path that cannot be written is refused when it is opened, before any work.
O2  Until the work is done the path keeps what it had; afterwards it has all of the new content.
"""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from unimem_jax.errors import UsageError


@contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` when the block ends without an exception.

    What is not a regular file (a pipe, a terminal) is written as it is.

    Raises:
      UsageError: if nothing can be written there.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    if stat.S_ISDIR(mode):
        raise UsageError(f"cannot write {path}: it is a folder")
    if not stat.S_ISREG(mode):
        with _opened(target, path) as file:
            yield file
        return
    # Threads share a process's number, and so do processes of several containers.
    draft = target.with_name(f".{target.name[:200]}.{secrets.token_hex(8)}.part")
    file = _opened(draft, path)
    try:
        with file:
            yield file
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)


def _opened(place: Path, path: str | Path) -> BinaryIO:
    try:
        return open(place, "wb")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
