"""Files and folders that are whole or absent: written beside their place, flushed to the disk, renamed. And
reading a file that somebody else may have made as long as he likes."""

import contextlib
import json
import os
import re
import secrets
import shutil
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
            flush(file)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    flush_folder(path.parent)


def write_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Calls `write(fresh)` on an empty folder beside `folder`, then puts it in that one's place.

    `write` flushes its files. At any moment one of both is whole and can be found: `folder` itself or, after
    a crash, one of `leftovers(folder)`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}")
    try:
        fresh.mkdir()
        write(fresh)
        flush_folder(fresh)
        _replace(folder, fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _replace(folder: Path, fresh: Path) -> None:
    old = folder.with_name(f"{folder.name}.old-{secrets.token_hex(4)}")
    had_one = folder.exists()
    if had_one:
        os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except BaseException:
        if had_one:
            os.rename(old, folder)
        raise
    flush_folder(folder.parent)
    for leftover in leftovers(folder):
        shutil.rmtree(leftover, ignore_errors=True)


def leftovers(folder: Path) -> list[Path]:
    """Folders that an interrupted `write_folder` left beside `folder`: the new ones first, then the old
    ones."""
    if not folder.parent.is_dir():
        return []
    form = re.compile(re.escape(folder.name) + r"\.(tmp|old)-[0-9a-f]{8}")
    found = []
    for entry in folder.parent.iterdir():
        if form.fullmatch(entry.name):
            with contextlib.suppress(FileNotFoundError):  # a save that goes on has just renamed it
                found.append((".old-" in entry.name, -entry.stat().st_mtime, entry))
    return [entry for *_, entry in sorted(found)]


def read_bounded(path: Path, most: int, expected: str = "at most {} bytes") -> bytes:
    """The content of a file. One with more than `most` bytes is not read but refused, with what was
    `expected`."""
    n_bytes = path.stat().st_size
    if n_bytes > most:
        raise InvalidValue(f"{path}: expected {expected.format(most)}, there are {n_bytes}.")
    return path.read_bytes()


def read_json(path: Path, most: int, *, encoding: str = "utf-8", fault: str = ":", hint: str = ""):
    """What a JSON file of at most `most` bytes holds. Errors name it; `fault` stands behind its name where it
    is no JSON, `hint` at the end where it is missing."""
    if not path.is_file():
        raise InvalidValue(f"{path} is missing.{hint}")
    content = read_bounded(path, most)
    try:
        return json.loads(content.decode(encoding))
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path}{fault} {len(content)} bytes that are no JSON ({error}).") from None


def flush(file: BinaryIO) -> None:
    """Returns when what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """A name in a folder, new or changed, is on the disk only when the folder is."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
