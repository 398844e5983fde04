"""Compiling a step's kernels before the first launch, in several processes at once.

A step that is walked through on outlines leaves on its card the kernels that it would launch. A kernel is a
closure, which one process cannot send another: so workers walk the same step, and compile what they are told
to, one kernel at a time, into the cache on disk (`nbtrain.device.binaries`) that launches read.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from nbtrain.device.backend import backend
from nbtrain.device.binaries import cached_binary, path_of
from nbtrain.device.cpu import cache_folder
from nbtrain.device.machine import cores
from nbtrain.device.outline import Card
from nbtrain.device.packed import numba_types
from nbtrain.device.place import say_once

KERNELS_A_WORKER = 2  # which starts in the time that three of them take


def compile_ahead(card: Card, architecture: str, module: str, order: dict) -> int:
    """Compiles the kernels that `card` has seen and the cache has not; returns how many.

    `python -m module` is a worker: the first line that it reads is `order` as JSON; it walks the same step
    and calls `serve`. Where there is little to compile, or one core, launches compile for themselves: 0.
    """
    missing = [file for file in _files(card, architecture).items() if not file[1].path.exists()]
    n_workers = min(cores(), len(missing) // KERNELS_A_WORKER)
    if n_workers < 2:
        return 0
    say_once(
        f"compiling {len(missing)} kernels in {n_workers} processes, once for this machine; they are kept in "
        f"{cache_folder()}"
    )
    start, todo = time.perf_counter(), SimpleQueue[str]()
    for name, _ in sorted(missing, key=lambda file: -len(file[1].kernel.py_func.__code__.co_code)):
        todo.put(name)  # the long ones first, so that no worker begins one when the others are done
    workers: list[_Worker] = []
    threads = ThreadPoolExecutor(n_workers)
    try:
        try:
            for _ in range(n_workers):
                workers.append(_Worker(module, order))
        except OSError as error:
            say_once(f"{len(workers)} of {n_workers} processes that compile could be started: {error}")
        n_compiled = sum(threads.map(lambda worker: worker.compile(todo), workers))
    finally:  # whatever came in between: the threads end with their workers
        for worker in workers:
            worker.end()
        threads.shutdown()
    say_once(f"compiled {n_compiled} kernels in {time.perf_counter() - start:.1f} s")
    return n_compiled


def serve(card: Card, architecture: str) -> None:
    """The rest of a worker's work: compiles the kernels that it reads the names of, a line each, and answers
    each name when its code lies in the cache, and ends where it cannot be put there."""
    files = _files(card, architecture)
    for line in sys.stdin:
        path, kernel, types = files[line.strip()]
        compile_ = functools.partial(backend.compile_binary, kernel, types, architecture)
        cached_binary(kernel, types, architecture, compile_)
        if not path.exists():
            sys.exit(f"{path} cannot be written")
        print(line.strip(), flush=True)


class _File(NamedTuple):
    path: Path
    kernel: Any
    types: tuple


def _files(card: Card, architecture: str) -> dict[str, _File]:
    """What the code of each kernel that `card` has seen is kept in, by the file's name, which says all that
    the code follows from."""
    seen = ((kernel, numba_types(signature)) for kernel, signature in card.launches or ())
    found = [_File(path_of(kernel, types, architecture), kernel, types) for kernel, types in seen]
    return {file.path.name: file for file in found}


class _Worker:
    """A process that compiles."""

    def __init__(self, module: str, order: dict):
        self._said = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module],  # -P: nothing from the folder where the user happens to be
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            start_new_session=True,  # Ctrl-C is this process's to hear
            # The GPU belongs to this process: a worker asks it nothing, and takes no memory of it.
            env={
                **os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "",
            },
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        self._questions, self._answers, self._order = self._process.stdin, self._process.stdout, order

    def compile(self, todo: SimpleQueue) -> int:
        """Has kernels compiled until there are no more, or until the worker is gone; returns how many."""
        n_compiled = 0
        try:
            self._send(json.dumps(self._order))
            while True:
                name = todo.get_nowait()
                self._send(name)
                if self._answers.readline().strip() != name:
                    break
                n_compiled += 1
        except Empty:
            return n_compiled
        except OSError:  # nobody reads
            pass
        self._process.wait()
        self._said.seek(0)
        last = (self._said.read().strip() or "it said nothing").splitlines()[-1]
        say_once(
            f"a process that compiled kernels ended early ({last}); what it leaves is for the others, or is "
            "compiled at its launch"
        )
        return n_compiled

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._questions, self._answers, self._said):
            with contextlib.suppress(BrokenPipeError):  # what was written and never read
                file.close()

    def _send(self, line: str) -> None:
        self._questions.write(line + "\n")
        self._questions.flush()
