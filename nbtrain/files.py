"""Files that are whole or absent: written beside their place, flushed to the disk, then renamed."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from nbtrain.errors import InvalidValue


def write_atomically(path: str | Path, write: Callable[[BinaryIO], object]) -> None:
    """Calls `write(file)` on a temporary file beside `path` and renames it to `path` once it is on the disk.

    An interruption at any moment leaves what was at `path` before, untouched.
    """
    path = Path(path)
    if not path.parent.is_dir():
        raise InvalidValue(f"{path} cannot be written: there is no folder {path.parent}. Make it first.")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:  # unlike tempfile's 0600, the mode follows the user's umask
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the rename itself is on the disk only when the folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
