"""Compiled CPU code on disk."""

import importlib.util
import sys
import textwrap
import threading

import numpy as np
import pytest

from nbtrain.device.cpu import _CacheFiles

HELPER = """
    from nbtrain.device import njit

    @njit
    def helper(x):
        return x + {step}
"""
TWIN = """
    from nbtrain.device import prange, twin
    from cache_helper import helper

    @twin(writes="y")
    def add(x, y):
        for i in prange(x.size):
            y[i] = helper(x[i])
"""


def load(folder, name, source):
    path = folder / f"{name}.py"
    path.write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    # Not through the import system, whose own cache goes by the time and size of the file.
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    return module


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir(mode=0o700)
    monkeypatch.setenv("NBTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path
    for name in ("cache_helper", "cache_twin"):
        sys.modules.pop(name, None)


def run(folder, step):
    load(folder, "cache_helper", HELPER.format(step=step))
    add = load(folder, "cache_twin", TWIN).add
    x, y = np.zeros(3, np.float32), np.empty(3, np.float32)
    add(x, y)
    return y.tolist(), sum(add.compiled.stats.cache_hits.values())


def test_code_expires_with_the_functions_that_it_calls(fresh):
    """A stale copy of a helper once wrote past the end of a buffer that had become smaller."""
    assert run(fresh, 1) == ([1, 1, 1], 0)
    assert run(fresh, 1) == ([1, 1, 1], 1)
    assert run(fresh, 2) == ([2, 2, 2], 0)


def test_code_saved_by_several_processes_at_once_stays_with_its_key(tmp_path):
    """numba's own cache files mix it up: what is loaded then runs on arguments of other types."""
    writers, rounds = 4, 50
    start = threading.Barrier(writers)

    def save(writer):
        for n in range(rounds):
            start.wait()
            _CacheFiles(tmp_path, f"f{n}", "stamp").save(("key", writer), writer)

    threads = [threading.Thread(target=save, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(rounds):
        found = [_CacheFiles(tmp_path, f"f{n}", "stamp").load(("key", writer)) for writer in range(writers)]
        assert found == list(range(writers))
    assert not list(tmp_path.glob("*.tmp*"))


def test_code_of_other_sources_or_another_key_is_not_loaded(tmp_path, monkeypatch):
    files = _CacheFiles(tmp_path, "f", "new")
    _CacheFiles(tmp_path, "f", "old").save("key", b"old")
    assert files.load("key") is None
    files.save("key", b"new")
    assert files.load("key") == b"new"
    monkeypatch.setattr(_CacheFiles, "_path", lambda self, key: next(tmp_path.glob("f.*")))  # hashes collide
    assert files.load("another key") is None
    files.flush()
    assert not list(tmp_path.iterdir())
