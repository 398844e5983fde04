import importlib.util
import subprocess
import sys
import threading

import numpy as np
import pytest

from nbtrain.device import SIMULATED
from tests.cli_runs import TEXT, TINY


def _make_shared_arrays_once():
    """The simulator looks whether a line's shared array is there, then makes it: of two threads that look at
    once, each gets an array of its own. Here they queue."""
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    make, lock = FakeCUDAShared.array, threading.Lock()

    def array(self, *args, **options):
        frame = sys._getframe(1)
        line = frame.f_code.co_filename, frame.f_lineno
        with lock:
            made = self.__dict__.setdefault("by_line", {})
            if line not in made:
                self._allocations.clear()  # its own key is the line below, for every array
                made[line] = make(self, *args, **options)
            return made[line]

    FakeCUDAShared.array = array


if SIMULATED:
    # The simulator's main thread spins while the kernel's threads want Python's lock, which it keeps for a
    # whole interval each time: at the usual 5 ms a barrier takes nine times as long.
    sys.setswitchinterval(1e-4)
    _make_shared_arrays_once()

# Its kernels are numba-cuda's to write down, whatever runs them.
collect_ignore = [] if importlib.util.find_spec("numba_cuda") else ["nvidia"]


def pytest_report_header():
    return "tests/nvidia left out: numba-cuda is not installed" if collect_ignore else None


def pytest_addoption(parser):
    parser.addoption(
        "--device", default="cuda:0", help="the GPU that tests marked gpu run on (hip:0 on ROCm)"
    )


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def xp(request):
    """NumPy (the CPU twin, or the kernel under NUMBA_ENABLE_CUDASIM=1) and CuPy (the kernel on a GPU)."""
    if request.param == "numpy":
        return np
    if SIMULATED:
        pytest.skip("the simulator runs kernels on NumPy arrays")
    import cupy

    return cupy


@pytest.fixture
def kernel_xp(xp):
    """`xp`, where it runs kernels and no CPU twin."""
    if xp is np and not SIMULATED:
        pytest.skip("a kernel: set NUMBA_ENABLE_CUDASIM=1, or take a GPU")
    return xp


@pytest.fixture
def nb(capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""
    from nbtrain.cli import main

    def run(*args):
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        code = end.value.code
        return (0 if code is None else code), *capsys.readouterr()

    return run


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a tiny run on TEXT, and what training printed."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text(TEXT)
    source = ("--text", folder / "text.txt", "--out", folder / "run", "--sample-tokens", "30")
    command = [sys.executable, "-m", "nbtrain", "train", *source, *TINY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return folder / "run", done.stdout


@pytest.fixture
def run_config(tmp_path):
    """20 steps on tokens that follow each other, so that there is something to learn."""
    from nbtrain.data import write_tokens
    from nbtrain.run import RunConfig

    ids = np.arange(700) * 7 % 20
    write_tokens(tmp_path / "train.bin", ids, vocab_size=20)
    write_tokens(tmp_path / "val.bin", ids[:100], vocab_size=20)
    paths = dict(train=(str(tmp_path / "train.bin"),), val=(str(tmp_path / "val.bin"),))
    return RunConfig(**paths, steps=20, B=3, micro=2, seed=5, eval_every=8, eval_batches=2)
