"""Compiled CPU code on disk."""

import importlib.util
import sys
import textwrap

import numpy as np
import pytest

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
