"""Kernels compiled by several processes before they are launched."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbtrain.device import ahead

NAMES = [f"{i}.bin" for i in range(7)]
WORKER = """
import json, os, sys
order = json.loads(sys.stdin.readline())
with open(order["log"], "a") as log:
    for line in sys.stdin:
        if line.strip() == order["deadly"]:
            sys.exit("this kernel is wrong")
        log.write(f"{os.getpid()} {line}")
        log.flush()
        print(line.strip(), flush=True)
"""


@pytest.fixture
def compile_names(tmp_path, monkeypatch):
    """compile_ahead on files of these NAMES, which a module of our own answers for."""
    (tmp_path / "a_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("NBTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(ahead, "cores", lambda: 2)
    said = []
    monkeypatch.setattr(ahead, "say_once", said.append)
    files = {}
    for i, name in enumerate(NAMES):
        function = eval("lambda x: " + " + ".join("x" * (i + 1)))
        files[name] = ahead._File(tmp_path / name, SimpleNamespace(py_func=function), ())
    monkeypatch.setattr(ahead, "_files", lambda card, architecture: files)

    def compile_(deadly=""):
        log = tmp_path / "log"
        log.write_text("")
        n = ahead.compile_ahead(None, "sm_90a", "a_worker", {"log": str(log), "deadly": deadly})
        return n, [line.split() for line in log.read_text().splitlines()], said

    compile_.files = files
    return compile_


def test_each_kernel_is_compiled_once_the_longest_first(compile_names):
    n, log, said = compile_names()
    assert n == 7 and sorted(name for _, name in log) == NAMES
    by_worker = [[name for pid, name in log if pid == worker] for worker in {pid for pid, _ in log}]
    assert len(by_worker) == 2 and all(names == sorted(names, reverse=True) for names in by_worker)
    assert "compiling 7 kernels in 2 processes" in said[0] and said[1].startswith("compiled 7 kernels in ")


def test_what_the_cache_has_is_not_compiled(compile_names):
    for name in NAMES[:3]:
        compile_names.files[name].path.touch()
    n, log, _ = compile_names()
    assert n == 4 and sorted(name for _, name in log) == NAMES[3:]
    compile_names.files["3.bin"].path.touch()  # three are left: no work for two processes
    assert compile_names() == (0, [], compile_names()[2])


def test_a_worker_that_ends_is_named_and_the_other_goes_on(compile_names):
    n, log, said = compile_names(deadly="6.bin")
    assert n == 6 and sorted(name for _, name in log) == NAMES[:6]
    assert any("ended early (this kernel is wrong)" in text for text in said)


def test_a_module_that_is_not_there_is_said(compile_names, monkeypatch):
    said = []
    monkeypatch.setattr(ahead, "say_once", said.append)
    assert ahead.compile_ahead(None, "sm_90a", "no_such_module", {}) == 0
    assert any("No module named no_such_module" in text for text in said)


def test_processes_that_cannot_be_started_are_said_and_the_others_compile(compile_names, monkeypatch):
    started = []

    class Worker(ahead._Worker):
        def __init__(self, *args):
            if started:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(*args)
            started.append(self._process)

    monkeypatch.setattr(ahead, "_Worker", Worker)
    n, log, said = compile_names()
    assert n == 7 and len({pid for pid, _ in log}) == 1 and started[0].returncode is not None
    assert any("1 of 2 processes that compile could be started" in text for text in said)


def test_a_worker_imports_nothing_from_the_folder_where_it_is_started(compile_names, tmp_path, monkeypatch):
    here = tmp_path / "here"
    here.mkdir()
    (here / "json.py").write_text("raise SystemExit('my own file')")
    monkeypatch.chdir(here)
    n, _, said = compile_names()
    assert n == 7 and not any("my own file" in text for text in said)


def test_a_cache_that_cannot_be_written_is_said(monkeypatch, tmp_path, capsys):
    file = ahead._File(tmp_path / "0.bin", None, ())
    monkeypatch.setattr(ahead, "_files", lambda card, architecture: {"0.bin": file})
    monkeypatch.setattr(ahead, "cached_binary", lambda *args: ("entry", b""))
    monkeypatch.setattr("sys.stdin", ["0.bin\n"])
    with pytest.raises(SystemExit, match="0.bin cannot be written"):
        ahead.serve(None, "sm_90a")
    file.path.touch()
    ahead.serve(None, "sm_90a")
    assert capsys.readouterr().out == "0.bin\n"


def test_no_process_outlives_an_interruption(compile_names, monkeypatch):
    started = []

    class Worker(ahead._Worker):
        def __init__(self, *args):
            super().__init__(*args)
            started.append(self._process)

        def compile(self, todo):
            raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "_Worker", Worker)
    with pytest.raises(KeyboardInterrupt):
        compile_names()
    assert len(started) == 2 and all(process.returncode is not None for process in started)


SCRIPT = """
import dataclasses, sys
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.device import ahead
from nbtrain.device.binaries import cached_binary
from nbtrain.train import walk

ahead.cores = lambda: 2
config = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=97, dropout=0.1)
train = TrainConfig(remat="full", betas=(0.8, 0.9))
what = {"dtype": "bf16", "shape": (2, 2, 64), "in_place": True, "capability": (9, 0), "workspace": 1 << 25}
order = {"config": dataclasses.asdict(config), "train": dataclasses.asdict(train), "architecture": "sm_90a"}
card = walk(config, train, **what)
print(ahead.compile_ahead(card, "sm_90a", "nbtrain.compile_worker", order | what), len(card.launches))
files = ahead._files(card, "sm_90a").values()
for _, kernel, types in files:  # nothing is left to compile
    entry, binary = cached_binary(kernel, types, "sm_90a", None)
    assert entry == kernel.py_func.__name__ and binary.startswith(b"\\x7fELF")
print(ahead.compile_ahead(card, "sm_90a", "nbtrain.compile_worker", order | what))
pure = walk(config, train, **what | {"in_place": False})
pairs = set(card.launches) - set(pure.launches), set(pure.launches) - set(card.launches)
print(*(kernel.py_func.__name__ for side in pairs for kernel, _ in side))
"""


@pytest.mark.compile
def test_workers_compile_the_kernels_that_the_step_will_load(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "NBTRAIN_TARGET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=Path(__file__).parents[1],
        env=environment | {"NBTRAIN_CACHE_DIR": str(tmp_path / "cache")}, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *numbers, differ = done.stdout.splitlines()
    (n_compiled, n_kernels), (again,) = (map(int, line.split()) for line in numbers)
    assert differ == "adamw adamw"  # a captured step updates in place, a pure one does not
    assert n_compiled == n_kernels > 20 and again == 0
    assert "ended early" not in done.stderr
