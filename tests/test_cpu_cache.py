"""Compiled CPU code on disk."""

import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

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


DIGEST = """
import hashlib, sys
import numpy as np
sys.path.insert(0, {root!r})
from nbtrain.ops.cross_entropy import _forward_backward_cpu, cross_entropy_forward_backward
rng, digest = np.random.default_rng(0), hashlib.sha256()
for V in (20, 65, 127, 1000):
    logits = rng.standard_normal((500, V)).astype(np.float32)
    targets = rng.integers(0, V, 500).astype(np.int32)
    losses = cross_entropy_forward_backward(logits, targets, np.ones(1, np.float32), vocab_size=V)
    digest.update(losses.tobytes() + logits.tobytes())
print(sum(_forward_backward_cpu.compiled.stats.cache_hits.values()), digest.hexdigest())
"""


def test_code_has_the_same_bits_where_it_was_compiled_and_where_it_is_loaded(tmp_path):
    """A resumed run once had other bits than the process that had compiled the loop: each called another
    copy of it, and the copies added up rows in another order."""
    (tmp_path / "cache").mkdir(mode=0o700)
    script = DIGEST.format(root=str(Path(__file__).parents[1]))
    environment = os.environ | {"NBTRAIN_CACHE_DIR": str(tmp_path / "cache"), "NBTRAIN_TARGET": "none"}
    environment.pop("NUMBA_ENABLE_CUDASIM", None)
    said = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=250
        )
        assert run.returncode == 0, run.stderr
        said.append(run.stdout.split())
    (compiled, bits), (loaded, again) = said
    assert (compiled, loaded) == ("0", "1") and bits == again
