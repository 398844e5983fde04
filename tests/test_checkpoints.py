import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import nbtrain.checkpoint
import nbtrain.checkpoints
from nbtrain.checkpoint import INDEX, MODEL, OPTIMIZER, load, save, write
from nbtrain.checkpoints import Checkpoints, run_folder
from nbtrain.errors import InvalidValue
from tests.test_checkpoint import CONFIG, _edit, _state


def _save(checkpoints, step, wait=True, seed=None):
    """Saves a state of its own for each step, and returns the state."""
    params, opt_state = _state(seed=step if seed is None else seed)
    opt_state.step[...] = step
    checkpoints.save(step, params, opt_state, config=CONFIG, wait=wait)
    return params, opt_state


def _steps(folder):
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def held(monkeypatch):
    """An event that the writing of checkpoints waits for."""
    event = threading.Event()

    def write_when_told(*args):
        assert event.wait(30)
        write(*args)

    monkeypatch.setattr(nbtrain.checkpoints, "write", write_when_told)
    yield event
    event.set()


# Which there are


@pytest.mark.parametrize(
    "keep, left",
    [(dict(keep_last=1), [50]), (dict(), [40, 50]), (dict(keep_last=1, keep_every=20), [20, 40, 50])],
)
def test_the_last_ones_and_every_mth_are_kept(keep, left, tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", **keep)
    for step in (10, 20, 30, 40, 50):
        assert _save(checkpoints, step) and checkpoints.path(step).is_dir()
    assert _steps(tmp_path / "checkpoints") == [f"step_{step:08d}" for step in left]


def test_the_newest_is_found_in_a_run_and_in_its_folder_of_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", keep_last=3)
    for step in (9, 99_999_999, 100_000_000):  # by number, not by name
        params, _ = _save(checkpoints, step)
    (tmp_path / "run" / "log.jsonl").write_text("{}")
    for found in (load(tmp_path / "run", "cpu"), load(checkpoints.folder, "cpu"), checkpoints.newest("cpu")):
        assert found.opt_state.step.item() == 100_000_000 and found.meta["differs"] == []
        assert found.params.buffer.tobytes() == params.buffer.tobytes()
        assert run_folder(found.meta["path"]) == tmp_path / "run"
    assert load(checkpoints.path(9), "cpu").opt_state.step.item() == 9


def test_the_folder_of_a_run_is_found_from_whatever_is_in_it(tmp_path):
    (tmp_path / "run" / "checkpoints" / "replaced").mkdir(parents=True)
    for inside in (".", "checkpoints", "checkpoints/step_00000009", "checkpoints/replaced"):
        assert run_folder(tmp_path / "run" / inside) == tmp_path / "run"
    assert run_folder(tmp_path / "run/checkpoints/replaced/step_00000009") == tmp_path / "run"
    # A checkpoint of its own, wherever it lies.
    assert run_folder(tmp_path / "checkpoints" / "mine" / "one") == tmp_path / "checkpoints" / "mine"


def test_loading_beside_a_run_takes_the_one_that_came_when_the_newest_went(tmp_path, monkeypatch):
    checkpoints, find, named = Checkpoints(tmp_path, keep_last=1), nbtrain.checkpoint._find, []
    _save(checkpoints, 10)

    def find_and_save(path):
        found = find(path)
        if path == checkpoints.path(10):
            _save(checkpoints, 20)  # which removes the one that was found
        return found

    monkeypatch.setattr(nbtrain.checkpoint, "_find", find_and_save)
    assert load(tmp_path, "cpu", passed_over=named.append).opt_state.step.item() == 20 and not named


def _cut(path):
    os.truncate(path / MODEL, (path / MODEL).stat().st_size - 8)
    return MODEL


def _flip(path):
    data = bytearray((path / OPTIMIZER).read_bytes())
    data[-5] ^= 4
    (path / OPTIMIZER).write_bytes(data)
    return OPTIMIZER


def _unfinished(path):
    (path / INDEX).unlink()
    path.rename(path.with_name(path.name + ".tmp-0123abcd"))
    return "did not finish"


def _lost(path):
    (path / MODEL).unlink()
    return f"{MODEL} is missing"


def _emptied(path):
    (path / INDEX).write_bytes(b"")
    return INDEX


@pytest.mark.parametrize("damage", [_cut, _flip, _unfinished, _lost, _emptied])
def test_damaged_ones_are_named_and_the_newest_good_one_is_taken(damage, tmp_path, capfd):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=4)
    for step in (10, 20, 30, 40):
        _save(checkpoints, step)
    words = [damage(checkpoints.path(step)) for step in (30, 40)]
    named = []
    assert checkpoints.newest("cpu", passed_over=named.append).opt_state.step.item() == 20
    for step, text in zip((40, 30), named, strict=True):
        assert f"step_{step:08d}" in text and words[0] in text
    load(tmp_path, "cpu")
    out, err = capfd.readouterr()
    assert not out and err.count("nbtrain: passed over a damaged checkpoint") == 2 and words[0] in err
    for step in (10, 20):
        damage(checkpoints.path(step))
    with pytest.raises(InvalidValue, match="none of the 4 checkpoints .* is good.*00000040.*00000010"):
        checkpoints.newest("cpu")


def test_a_run_that_has_saved_nothing_yet_says_so(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InvalidValue, match=r"no checkpoint in .*checkpoints yet\.$"):
        load(tmp_path, "cpu")
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    _save(checkpoints, 10)
    checkpoints.start(0)
    with pytest.raises(InvalidValue, match="yet.*run before are in .*replaced"):
        load(tmp_path, "cpu")
    assert load(tmp_path / "checkpoints" / "replaced", "cpu").opt_state.step.item() == 10


def test_what_is_wrong_with_the_options_is_said(tmp_path):
    for options in (dict(keep_last=0), dict(keep_last=True), dict(keep_every=-1), dict(keep_every=1.5)):
        with pytest.raises(InvalidValue, match=f"{next(iter(options))} must be an int"):
            Checkpoints(tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValue, match="file is a file"):
        Checkpoints(tmp_path / "file")


# What goes


def test_what_interrupted_saves_left_goes_and_foreign_files_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    _save(checkpoints, 10)
    (tmp_path / "step_00000010" / "thesis.txt").write_text("years of work")
    for name in (
        "step_00000020.tmp-0123abcd",
        "step_00000010.old-0123abcd",
        "step_00000020.tmp-mine",
        "notes",
    ):
        (tmp_path / name).mkdir()
    _save(checkpoints, 20)
    _save(checkpoints, 30)
    assert _steps(tmp_path) == ["notes", "step_00000010", "step_00000020.tmp-mine", "step_00000030"]


def test_a_damaged_one_does_not_count_among_the_last(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step in (10, 20):
        _save(checkpoints, step)
    _cut(checkpoints.path(20))
    _save(checkpoints, 30)
    assert _steps(tmp_path) == ["step_00000010", "step_00000030"]


def test_a_save_that_fails_removes_nothing(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    _save(checkpoints, 10)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            _save(checkpoints, 20)
    assert _steps(tmp_path) == ["step_00000010"] and checkpoints.newest("cpu").opt_state.step.item() == 10


def test_a_new_run_replaces_the_older_one_s_once_it_has_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=9)
    for step in (10, 20, 30):
        _save(checkpoints, step)
    (tmp_path / "step_00000030.tmp-0123abcd").mkdir()
    again = Checkpoints(tmp_path, keep_last=9)
    again.start(20)  # a run that goes on from 20 will come to a 30 of its own
    assert _steps(tmp_path) == ["replaced", "step_00000010", "step_00000020"]
    assert _steps(tmp_path / "replaced") == ["step_00000030", "step_00000030.tmp-0123abcd"]
    _save(again, 25)
    assert _steps(tmp_path) == ["step_00000010", "step_00000020", "step_00000025"]
    again.start(0)
    assert _steps(tmp_path) == ["replaced"]
    again.start(0)  # it was interrupted before its first save
    _save(again, 5)
    assert _steps(tmp_path) == ["step_00000005"]


CRASH = """
import os, sys, warnings
warnings.simplefilter("ignore")  # fork in a process with threads
from pathlib import Path
sys.path.insert(0, {root!r})
from nbtrain.checkpoints import Checkpoints
from tests.test_checkpoints import _save
checkpoints = Checkpoints(Path(sys.argv[1]), keep_last=2)
WATCHED = {{"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree"}}
last = 20
for crash_at in range(1, 1000):
    child = os.fork()
    if child == 0:
        events = 0
        def count(event, args):
            global events
            events += event in WATCHED
            if events == crash_at:
                os._exit(9)  # as kill -9: no handler, no cleaning up
        sys.addaudithook(count)
        _save(checkpoints, last + 10)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    step = checkpoints.newest("cpu", passed_over=print).opt_state.step.item()
    print("crash", crash_at, status, step - last, flush=True)
    last = step
    if status == 0:
        break
    if crash_at % 3 == 0:
        _save(checkpoints, last)  # the same step once more
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the crash is a child process that ends at once")
def test_a_crash_at_any_moment_of_saving_and_pruning_loses_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 20):
        _save(checkpoints, step)
    script = CRASH.format(root=str(Path(__file__).parents[1]))
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    rows = [tuple(map(int, line.split()[1:])) for line in lines if line.startswith("crash")]
    # Either the new one is whole or the one before is there; both occurred.
    assert {row[1:] for row in rows} == {(9, 0), (9, 10), (0, 10)} and len(rows) > 12
    assert any("did not finish" in line for line in lines)
    last = checkpoints.newest("cpu").opt_state.step.item()
    assert _steps(tmp_path) == [f"step_{step:08d}" for step in (last - 10, last)]


# Beside the steps


def test_what_is_saved_is_the_state_at_the_call(tmp_path, held):
    with Checkpoints(tmp_path) as checkpoints:
        params, opt_state = _save(checkpoints, 10, wait=False)
        save(tmp_path / "other", params, opt_state, config=CONFIG)
        for x in (opt_state.master.buffer, opt_state.m.buffer, opt_state.v.buffer, *opt_state.loss_scale):
            x[...] = 77
        opt_state.step[...] = 11
        assert not checkpoints.path(10).exists() and checkpoints.done() == []
        held.set()
    for name in (MODEL, OPTIMIZER, INDEX):
        assert (checkpoints.path(10) / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_weights_alone_are_copied_too(tmp_path, held):
    params, _ = _state("bf16")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, params, config=CONFIG)
        before = params.buffer.tobytes()
        params.buffer[...] = 0
        held.set()
    got = load(tmp_path / "step_00000010", "cpu")
    assert got.opt_state is None and got.params.buffer.tobytes() == before


def test_a_second_save_waits_for_the_first(tmp_path, held):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 10, wait=False)
    threading.Timer(0.3, held.set).start()
    _save(checkpoints, 20, wait=False)
    assert checkpoints.path(10).exists()
    checkpoints.close()
    first, second = checkpoints.done()
    assert (first.step, first.path, second.step) == (10, checkpoints.path(10), 20)
    # The first stalled for a copy of some kB; the second for as long as the first took.
    assert 250 < min(first.write_ms, second.stall_ms) and first.stall_ms < second.stall_ms
    assert checkpoints.done() == []


def test_an_error_of_the_thread_rises_once_in_the_next_call(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)

    def full(*args):
        raise OSError(28, "No space left on device")

    for call in (lambda: _save(checkpoints, 30), checkpoints.done, checkpoints.close):
        with monkeypatch.context() as patch:
            patch.setattr(nbtrain.checkpoints, "write", full)
            _save(checkpoints, 20, wait=False)
            checkpoints._thread.join()
            with pytest.raises(OSError, match="No space left"):
                call()
        assert checkpoints.done() == [] and not list(tmp_path.iterdir())
    _save(checkpoints, 40, wait=False)
    checkpoints.close()
    assert [saved.step for saved in checkpoints.done()] == [40]


def test_leaving_waits_for_a_save_but_not_when_interrupted(tmp_path, held):
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), Checkpoints(tmp_path) as checkpoints:
        _save(checkpoints, 10, wait=False)
        raise KeyboardInterrupt
    assert time.perf_counter() - start < 10 and not checkpoints.path(10).exists()
    threading.Timer(0.2, held.set).start()
    start = time.perf_counter()
    # In a folder of its own: the save that was left behind sweeps its folder.
    with pytest.raises(ValueError, match="of the run"), Checkpoints(tmp_path / "other") as checkpoints:
        _save(checkpoints, 20, wait=False)
        raise ValueError("of the run")
    assert time.perf_counter() - start > 0.15 and checkpoints.path(20).exists()


def test_the_memory_of_snapshots_is_taken_once(tmp_path, monkeypatch):
    params, opt_state = _state()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.reserve(params, opt_state)
    taken = checkpoints._snapshots._memory
    # fp32 weights are their own master: three trees, and scalars that are padded.
    assert 3 * params.buffer.nbytes < len(taken) < 3 * params.buffer.nbytes + 2048
    for step in (10, 20):
        _save(checkpoints, step, wait=False)
        assert checkpoints._snapshots._memory is taken
    limits = np.zeros(2, np.float32)  # a captured step has them, from the first one on
    checkpoints.save(30, params, opt_state._replace(limits=limits), config=CONFIG)
    assert checkpoints._snapshots._memory is taken


# What differs


def test_limits_come_back(tmp_path):
    params, opt_state = _state()
    opt_state = opt_state._replace(limits=np.array([3.5, np.inf], np.float32))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, params, opt_state, config=CONFIG)
    assert load(tmp_path, "cpu").opt_state.limits.tolist() == [3.5, np.inf]


def test_another_machine_or_version_is_told(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    _save(checkpoints, 10)
    path = checkpoints.path(10)
    same = load(path, "cpu")
    assert same.meta["differs"] == [] and {"cpu", "instructions", "blas"} < set(same.meta["machine"])
    machine, versions = same.meta["machine"], same.meta["versions"]
    changed = versions | {"numba": "0.1", "cupy-cuda13x": "1.0", "python": "2.7"}
    _edit(path, machine=machine | {"cpu": "i486"}, versions=changed)
    assert load(path, "cpu").meta["differs"] == [
        f"cpu i486, here {machine['cpu']}",
        f"numba 0.1, here {versions['numba']}",
    ]
    _edit(path, machine={"device": "cuda", "gpu": "NVIDIA H200"}, versions=versions)
    assert load(path, "cpu").meta["differs"] == ["device cuda, here cpu"]
    _edit(path, machine=machine | {"instructions": "mmx " + machine["instructions"]})
    assert load(path, "cpu").meta["differs"] == ["other instructions"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_snapshot_under_captured_steps_is_the_state_at_the_call(dtype, tmp_path, pytestconfig):
    """Steps are launched behind the copy at once; what is saved equals a save that waited."""
    from nbtrain.config import GPTConfig, TrainConfig
    from nbtrain.device.place import synchronize, use
    from nbtrain.modes import capture
    from nbtrain.train import init, make_train_step
    from tests.test_resume import batches_of

    device = pytestconfig.getoption("--device")
    config = GPTConfig(n_layer=4, n_head=4, n_embd=256, block_size=64, vocab_size=1000, dropout=0.1)
    params, opt_state = init(config, 0, dtype, device)
    train_step = capture(make_train_step(config, TrainConfig(lr=1e-3)))
    batches = batches_of(config, 12, device)
    with use(device), Checkpoints(tmp_path) as checkpoints:
        for batch in batches[:6]:
            params, opt_state, _ = train_step(params, opt_state, batch)
        save(tmp_path / "waited", params, opt_state, config=config)
        checkpoints.save(6, params, opt_state, config=config)
        for batch in batches[6:]:
            params, opt_state, _ = train_step(params, opt_state, batch)
        synchronize(device)
    (saved,) = checkpoints.done()
    assert 0 < saved.stall_ms < saved.write_ms + 1000
    for name in (MODEL, OPTIMIZER):
        assert (checkpoints.path(6) / name).read_bytes() == (tmp_path / "waited" / name).read_bytes()
