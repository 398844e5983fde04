"""A run and what goes wrong around it: interrupts, full disks, a second run in its folder."""

import dataclasses
import json
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import nbtrain.checkpoints
import nbtrain.run
from nbtrain.checkpoint import load, save, write
from nbtrain.errors import InvalidValue, Unavailable
from nbtrain.interrupt import Interrupt
from nbtrain.lock import only_writer
from nbtrain.log import Report
from nbtrain.tokenizer import ByteTokenizer
from nbtrain.train import init
from tests.short_runs import CONFIG, TRAIN_CONFIG, Quiet, bits_of, rows_of, train_on_cpu


@pytest.mark.parametrize("slow", [False, True])  # then the next save finds the one before under way
def test_a_save_that_fails_on_the_way_is_told_and_the_run_goes_on(slow, run_config, tmp_path, monkeypatch):
    def full(path, *rest):
        if path.name in ("step_00000006", "step_00000012"):
            time.sleep(0.5 * slow)
            raise OSError(28, f"No space left on device: {path.name}")
        write(path, *rest)

    monkeypatch.setattr(nbtrain.checkpoints, "write", full)
    report, plain = Quiet(), train_on_cpu(run_config, tmp_path / "plain")
    result = train_on_cpu(dataclasses.replace(run_config, save_every=6), tmp_path / "run", report=report)
    told = [text for text in report.said if "could not be written" in text]
    assert len(told) == 2 and "step_00000006" in told[0] and "step_00000012" in told[1]
    waits = [text for text in report.said if "longer than save_every = 6" in text]
    assert len(waits) == slow and all(text.startswith("step 12: the steps wait") for text in waits)
    assert bits_of(result.checkpoint.opt_state) == bits_of(plain.checkpoint.opt_state)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step_00000018", "step_00000020"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["checkpoint"] for row in rows if "checkpoint" in row] == saved


def test_a_run_whose_last_save_fails_says_so(run_config, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nbtrain.checkpoints, "write", full)
    with pytest.raises(OSError, match="No space left"):
        train_on_cpu(run_config, tmp_path / "run")


def test_without_memory_for_snapshots_the_steps_wait_for_saves(run_config, tmp_path, monkeypatch):
    def none(self, *args):
        raise Unavailable("a snapshot takes 12 bytes of pinned host memory, which cannot be had.")

    monkeypatch.setattr(nbtrain.run.Checkpoints, "reserve", none)
    monkeypatch.setattr(nbtrain.checkpoints.Snapshots, "take", none)
    report = Quiet()
    train_on_cpu(dataclasses.replace(run_config, save_every=6), tmp_path / "run", report=report)
    assert any("wait for every save: a snapshot takes 12 bytes" in text for text in report.said)
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "checkpoint" in row] == [6, 12, 18, 20]


def test_an_interrupt_saves_where_nobody_reads_what_is_said(run_config, tmp_path, monkeypatch):
    """As behind `| tee`, which Ctrl-C ends, too."""

    class Closed:
        def write(self, *args):
            raise BrokenPipeError(32, "Broken pipe")

        flush = write

    class Loud(Report):
        def step(self, step, *rest):
            if step == 10:
                monkeypatch.setattr(sys, "stdout", Closed())
                monkeypatch.setattr(os, "write", Closed().write)
                signal.raise_signal(signal.SIGINT)
            super().step(step, *rest)

    result = train_on_cpu(run_config, tmp_path / "run", report=Loud())
    monkeypatch.undo()
    assert (result.interrupted, load(tmp_path / "run", "cpu").opt_state.step.item()) == (True, 10)


def test_a_folder_in_which_another_run_goes_is_left_alone(run_config, tmp_path):
    train_on_cpu(run_config, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    failed = []

    def second():
        try:
            train_on_cpu(run_config, tmp_path / "run", settings={"steps": 20})
        except Unavailable as error:
            failed.append(str(error))

    with only_writer(tmp_path / "run"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(failed) == 1 and f"is being written by process {os.getpid()} on " in failed[0]
    for path, content in before.items():
        assert path.name == ".lock" or path.read_bytes() == content
    assert train_on_cpu(run_config, tmp_path / "run").step == 20


def test_what_would_fail_at_the_end_fails_before_the_first_step(run_config, tmp_path):
    def trained(step):
        raise AssertionError("a step was done")

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("years of work")
    with pytest.raises(InvalidValue, match="checkpoints is a file"):
        train_on_cpu(run_config, tmp_path / "run", report=Quiet(trained))
    no_val = dataclasses.replace(run_config, val=(str(tmp_path / "nowhere.bin"),))
    with pytest.raises(InvalidValue, match="nowhere.bin"):
        train_on_cpu(no_val, tmp_path / "other", report=Quiet(trained))
    with pytest.raises(InvalidValue, match="the tokenizer has 256 ids, the model only 20"):
        train_on_cpu(run_config, tmp_path / "other", tokenizer=ByteTokenizer(), report=Quiet(trained))
    done = init(CONFIG, dtype="fp32", device="cpu")
    done[1].step[...] = 20
    with pytest.raises(InvalidValue, match="has done 20 of 20 steps"):
        train_on_cpu(run_config, tmp_path / "other", start=done, report=Quiet(trained))
    assert not (tmp_path / "other").exists()
    bad_lr = dataclasses.replace(TRAIN_CONFIG, warmup=30)
    with pytest.raises(InvalidValue, match="warmup"):
        train_on_cpu(run_config, tmp_path / "other", train_config=bad_lr, report=Quiet(trained))


@pytest.mark.parametrize("number", Interrupt.SIGNALS)
def test_the_second_interrupt_leaves_at_once_and_handlers_are_restored(number, run_config, tmp_path, capfd):
    before = signal.getsignal(number)

    def interrupt(step):
        if step == 4:
            signal.raise_signal(number)
            signal.raise_signal(number)
            raise AssertionError("still here")

    with pytest.raises(KeyboardInterrupt):
        train_on_cpu(run_config, tmp_path / "run", report=Quiet(interrupt))
    assert signal.getsignal(number) is before
    assert "Interrupt again to leave at once" in capfd.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_interrupt_ends_a_long_evaluation(run_config, tmp_path):
    calls = []

    def eval_step(params, batch):
        calls.append(batch)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return np.array([1.0]), np.array([1])

    run_config = dataclasses.replace(run_config, eval_every=4, eval_batches=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nbtrain.run, "make_eval_step", lambda config: eval_step)
        result = train_on_cpu(run_config, tmp_path / "run")
    assert (result.interrupted, result.step, len(calls)) == (True, 4, 2)
    assert not any("val_loss" in row for row in rows_of(tmp_path / "run"))


def test_a_run_whose_gradient_stays_lost_ends_with_a_checkpoint(run_config, tmp_path, monkeypatch):
    monkeypatch.setattr(nbtrain.run, "MOST_SKIPPED", 3)
    params, opt_state = init(CONFIG, dtype="fp32", device="cpu")
    params["lnf_w"][...] = np.nan
    state = nbtrain.run.batches(list(run_config.train), B=3, T=8, micro=2, seed=5)
    with state:
        save(tmp_path / "lost", params, opt_state, config=CONFIG, data_state=state.state())
    lost = load(tmp_path / "lost", device="cpu")
    with pytest.raises(InvalidValue, match="not finite for 3 steps in a row"):
        train_on_cpu(run_config, tmp_path / "run", resume=lost)
    assert [row["loss"] for row in rows_of(tmp_path / "run")] == [None] * 3
    assert load(tmp_path / "run", device="cpu").opt_state.step.item() == 3


def test_what_is_not_there_is_said_before_anything_is_written(run_config, tmp_path, monkeypatch):
    with pytest.raises(Unavailable, match="needs an NVIDIA GPU; the run is on cpu"):
        train_on_cpu(run_config, tmp_path / "run", captured=True)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(Unavailable, match=r"pip install 'nbtrain\[tensorboard\]'"):
        train_on_cpu(run_config, tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_a_terminal_that_goes_ends_a_run_in_order_unless_nohup_says_otherwise(run_config, tmp_path):
    def hang_up(step):
        if step == 4:
            signal.raise_signal(signal.SIGHUP)

    gone = train_on_cpu(run_config, tmp_path / "gone", report=Quiet(hang_up))
    assert (gone.interrupted, gone.step) == (True, 4)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stays = train_on_cpu(run_config, tmp_path / "stays", report=Quiet(hang_up))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (stays.interrupted, stays.step) == (False, 20)
