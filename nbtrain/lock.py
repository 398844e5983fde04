"""One process at a time writes a run's folder.

A POSIX lock on the file .lock in it, which the system gives back however the process ends, kill -9 included.
The file stays with what was written; a folder that was made for it and got nothing else goes again. Where
there are no such locks (Windows, some network file systems), nothing is held.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from nbtrain.errors import InvalidValue, Unavailable

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
_mine = threading.local()  # .folders: those that this thread holds


@contextlib.contextmanager
def only_writer(folder: str | Path) -> Iterator[None]:
    """A context in which no other process or thread is in one for `folder`, which is made where it is absent.
    In one thread they may be nested. Unavailable names who holds it."""
    folder = Path(folder).resolve()
    held = _mine.__dict__.setdefault("folders", set())
    if fcntl is None or folder in held:
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise InvalidValue(f"{folder} is a file; a run writes a folder. Take another name.")
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_still(folder / NAME, descriptor):  # the one who made it has just removed it
                raise BlockingIOError
        except BlockingIOError:
            other = os.read(descriptor, 300).decode("utf-8", "replace").strip() or "another process"
            raise Unavailable(
                f"{folder} is being written by {other}. Wait until it ends, or take another folder."
            ) from None
        except OSError:  # this file system has no locks
            yield
            return
        with contextlib.suppress(OSError):  # a full disk: then the name is missing
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        held.add(folder)
        try:
            yield
        finally:
            held.discard(folder)
            if made:
                _remove_if_unused(folder)
    finally:
        os.close(descriptor)


def _is_still(file: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_if_unused(folder: Path) -> None:
    """Removes a folder that holds the lock's file alone."""
    with contextlib.suppress(OSError):
        if os.listdir(folder) == [NAME]:
            os.unlink(folder / NAME)
            os.rmdir(folder)
