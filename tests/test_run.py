import dataclasses
import json
import math
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
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.data import eval_batches, write_tokens
from nbtrain.errors import InvalidValue, Unavailable
from nbtrain.lock import only_writer
from nbtrain.log import Report, TensorBoard, perplexity
from nbtrain.run import RunConfig, evaluate, micro_batches, resumed, train, why_no_capture
from nbtrain.tokenizer import ByteTokenizer
from nbtrain.train import init, make_eval_step

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=20, dropout=0.1)
TRAIN_CONFIG = TrainConfig(lr=1e-2, schedule="cosine", warmup=3, total=20, min_lr=1e-3)
LEVEL = TrainConfig(lr=1e-6)  # the loss stays where it is, but for the batches' differences


class Quiet(Report):
    """Remembers what was said; `at_step` is called with each step's number."""

    def __init__(self, at_step=lambda step: None):
        super().__init__()
        self.said, self._at_step = [], at_step

    def say(self, text):
        self.said.append(text)

    def step(self, step, *rest):
        self._at_step(step)


@pytest.fixture
def run_config(tmp_path):
    """20 steps on tokens that follow each other, so that there is something to learn."""
    ids = np.arange(700) * 7 % 20
    write_tokens(tmp_path / "train.bin", ids, vocab_size=20)
    write_tokens(tmp_path / "val.bin", ids[:100], vocab_size=20)
    paths = dict(train=(str(tmp_path / "train.bin"),), val=(str(tmp_path / "val.bin"),))
    return RunConfig(**paths, steps=20, B=3, micro=2, seed=5, eval_every=8, eval_batches=2)


def _train(run_config, out, config=CONFIG, train_config=TRAIN_CONFIG, **options):
    options.setdefault("report", Quiet())
    return train(config, train_config, run_config, out, device="cpu", **options)


def _rows(out):
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    lines = (out / "log.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    return [row for row in rows if "checkpoint" not in row]


def _losses(out):
    return [row["loss"] for row in _rows(out) if "loss" in row]


def _bits(opt_state):
    trees = (opt_state.master, opt_state.m, opt_state.v)
    scalars = (opt_state.step, opt_state.updates, *opt_state.loss_scale, opt_state.seed)
    return [tree.buffer.tobytes() for tree in trees] + [x.tobytes() for x in scalars]


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_resumed_run_has_the_bits_of_one_that_went_through(dtype, run_config, tmp_path):
    whole = _train(run_config, tmp_path / "whole", dtype=dtype)

    def interrupt(step):
        if step == 10:
            signal.raise_signal(signal.SIGINT)

    half = _train(run_config, tmp_path / "half", dtype=dtype, report=Quiet(interrupt))
    assert (half.interrupted, half.step, half.val_loss) == (True, 10, None)
    checkpoint = load(tmp_path / "half", device="cpu")
    again, train_config = resumed(checkpoint)
    assert (again, train_config) == (run_config, TRAIN_CONFIG)
    rest = _train(again, tmp_path / "half", train_config=train_config, resume=checkpoint)
    assert (rest.interrupted, rest.step, rest.val_loss) == (False, 20, whole.val_loss)
    assert _losses(tmp_path / "half") == _losses(tmp_path / "whole") and len(_losses(tmp_path / "half")) == 20
    assert _bits(rest.checkpoint.opt_state) == _bits(whole.checkpoint.opt_state)
    assert rest.checkpoint.params.buffer.tobytes() == whole.checkpoint.params.buffer.tobytes()
    assert rest.checkpoint.data_state == whole.checkpoint.data_state


def test_the_saved_checkpoint_is_the_result(run_config, tmp_path):
    result = _train(run_config, tmp_path / "run")
    on_disk = load(tmp_path / "run", device="cpu")
    assert on_disk.opt_state.step.item() == 20 and _bits(on_disk.opt_state) == _bits(
        result.checkpoint.opt_state
    )
    assert on_disk.config == CONFIG and on_disk.train_config == TRAIN_CONFIG


def test_training_learns_and_the_log_tells_every_step(run_config, tmp_path):
    run_config = dataclasses.replace(run_config, steps=60)
    train_config = dataclasses.replace(TRAIN_CONFIG, total=60)
    config = dataclasses.replace(CONFIG, dropout=0.0)
    result = _train(run_config, tmp_path / "run", config, train_config)
    rows = _rows(tmp_path / "run")
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 61))
    assert abs(steps[0]["loss"] - math.log(20)) < 0.2 and steps[-1]["loss"] < 1.0
    assert all(
        row["n_targets"] == 2 * 3 * 8 and row["tokens_per_s"] > 0 and not row["skipped"] for row in steps
    )
    assert steps[0]["lr"] == pytest.approx(1e-2 / 3) and steps[-1]["lr"] < 1.1e-3
    evaluations = {row["step"]: row for row in rows if "val_loss" in row}
    assert list(evaluations) == [8, 16, 24, 32, 40, 48, 56, 60]
    # On the way two batches of 3 windows of 8 tokens, at the end all but the first token.
    assert evaluations[8]["val_tokens"] == 48 and evaluations[60]["val_tokens"] == 99
    assert evaluations[60]["val_loss"] == result.val_loss < 1.0
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_are_read_when_the_next_step_has_been_launched(run_config, tmp_path, monkeypatch):
    """As on a GPU, which then never waits for the host; evaluations and the end read what there is."""
    events, donate = [], nbtrain.run.donate

    def watched(step):
        donated = donate(step)

        def launch(*args):
            events.append("launch")
            return donated(*args)

        return launch

    monkeypatch.setattr(nbtrain.run, "steps_ahead", lambda place: 1)
    monkeypatch.setattr(nbtrain.run, "donate", watched)
    run_config = dataclasses.replace(run_config, steps=5, eval_every=3)
    _train(run_config, tmp_path / "run", report=Quiet(events.append))
    assert events == ["launch", "launch", 1, "launch", 2, 3, "launch", "launch", 4, 5]
    assert [row["step"] for row in _rows(tmp_path / "run")] == [1, 2, 3, 3, 4, 5, 5]


def test_validation_takes_the_mean_over_tokens_not_batches(run_config):
    params, _ = init(CONFIG, dtype="fp32", device="cpu")
    step = make_eval_step(CONFIG)
    by_5, by_64 = (
        evaluate(step, params, eval_batches(list(run_config.val), B=B, T=8, vocab_size=20)) for B in (5, 64)
    )
    assert by_5[1] == by_64[1] == 99 and by_5[0] == pytest.approx(by_64[0], rel=1e-5)
    losses = iter([(2.0, 1), (3.0, 9)])
    fake = lambda params, batch: tuple(np.array([x]) for x in next(losses))  # noqa: E731
    assert evaluate(fake, None, [None, None]) == (0.5, 10)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_interrupt_leaves_at_once_and_handlers_are_restored(number, run_config, tmp_path, capfd):
    before = signal.getsignal(number)

    def interrupt(step):
        if step == 4:
            signal.raise_signal(number)
            signal.raise_signal(number)
            raise AssertionError("still here")

    with pytest.raises(KeyboardInterrupt):
        _train(run_config, tmp_path / "run", report=Quiet(interrupt))
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
        result = _train(run_config, tmp_path / "run")
    assert (result.interrupted, result.step, len(calls)) == (True, 4, 2)
    assert not any("val_loss" in row for row in _rows(tmp_path / "run"))


def test_checkpoints_on_the_way_do_not_change_the_run(run_config, tmp_path):
    plain = _train(run_config, tmp_path / "plain")
    often = _train(dataclasses.replace(run_config, save_every=6), tmp_path / "often")
    assert _bits(often.checkpoint.opt_state) == _bits(plain.checkpoint.opt_state)
    rows = [json.loads(line) for line in (tmp_path / "often" / "log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "checkpoint" in row]
    assert [row["checkpoint"] for row in rows] == [f"step_{step:08d}" for step in (6, 12, 18, 20)]
    # No bound: a stall is as long as the save before takes, which on a busy disk may be seconds.
    assert all(row["stall_ms"] > 0 and row["write_ms"] > 0 for row in rows)
    folder = tmp_path / "often" / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["step_00000018", "step_00000020"]
    # The last one cut by 8 bytes: the run goes on from the one before, and ends where it had ended.
    model = folder / "step_00000020" / "model.safetensors"
    os.truncate(model, model.stat().st_size - 8)
    named = []
    checkpoint = load(tmp_path / "often", device="cpu", passed_over=named.append)
    assert checkpoint.opt_state.step.item() == 18 and len(named) == 1 and str(model) in named[0]
    run, train_config = resumed(checkpoint)
    again = _train(run, tmp_path / "often", train_config=train_config, resume=checkpoint)
    assert _bits(again.checkpoint.opt_state) == _bits(plain.checkpoint.opt_state)
    assert _losses(tmp_path / "often") == _losses(tmp_path / "plain")


@pytest.mark.parametrize("slow", [False, True])  # then the next save finds the one before under way
def test_a_save_that_fails_on_the_way_is_told_and_the_run_goes_on(slow, run_config, tmp_path, monkeypatch):
    def full(path, *rest):
        if path.name in ("step_00000006", "step_00000012"):
            time.sleep(0.5 * slow)
            raise OSError(28, f"No space left on device: {path.name}")
        write(path, *rest)

    monkeypatch.setattr(nbtrain.checkpoints, "write", full)
    report, plain = Quiet(), _train(run_config, tmp_path / "plain")
    result = _train(dataclasses.replace(run_config, save_every=6), tmp_path / "run", report=report)
    told = [text for text in report.said if "could not be written" in text]
    assert len(told) == 2 and "step_00000006" in told[0] and "step_00000012" in told[1]
    waits = [text for text in report.said if "longer than save_every = 6" in text]
    assert len(waits) == slow and all(text.startswith("step 12: the steps wait") for text in waits)
    assert _bits(result.checkpoint.opt_state) == _bits(plain.checkpoint.opt_state)
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved == ["step_00000018", "step_00000020"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["checkpoint"] for row in rows if "checkpoint" in row] == saved


def test_a_run_whose_last_save_fails_says_so(run_config, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nbtrain.checkpoints, "write", full)
    with pytest.raises(OSError, match="No space left"):
        _train(run_config, tmp_path / "run")


def test_without_memory_for_snapshots_the_steps_wait_for_saves(run_config, tmp_path, monkeypatch):
    def none(self, *args):
        raise Unavailable("a snapshot takes 12 bytes of pinned host memory, which cannot be had.")

    monkeypatch.setattr(nbtrain.run.Checkpoints, "reserve", none)
    monkeypatch.setattr(nbtrain.checkpoints.Snapshots, "take", none)
    report = Quiet()
    _train(dataclasses.replace(run_config, save_every=6), tmp_path / "run", report=report)
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

    result = _train(run_config, tmp_path / "run", report=Loud())
    monkeypatch.undo()
    assert (result.interrupted, load(tmp_path / "run", "cpu").opt_state.step.item()) == (True, 10)


def test_a_folder_in_which_another_run_goes_is_left_alone(run_config, tmp_path):
    _train(run_config, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    failed = []

    def second():
        try:
            _train(run_config, tmp_path / "run", settings={"steps": 20})
        except Unavailable as error:
            failed.append(str(error))

    with only_writer(tmp_path / "run"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(failed) == 1 and f"is being written by process {os.getpid()} on " in failed[0]
    for path, content in before.items():
        assert path.name == ".lock" or path.read_bytes() == content
    assert _train(run_config, tmp_path / "run").step == 20


def test_a_run_without_skipping_takes_no_limits_from_its_checkpoint(run_config, tmp_path):
    half = _train(dataclasses.replace(run_config, steps=10), tmp_path / "half").checkpoint
    tight = half.opt_state._replace(limits=np.array([1e-3, 1e-3], np.float32))
    rest = _train(run_config, tmp_path / "rest", resume=half._replace(opt_state=tight))
    assert rest.checkpoint.opt_state.updates.item() == 20


def test_a_run_resumed_elsewhere_says_that_bits_may_differ(run_config, tmp_path):
    kept = _train(dataclasses.replace(run_config, steps=5), tmp_path / "run").checkpoint
    kept = load(kept.meta["path"], device="cpu")
    for differs, words in (([], []), (["cpu i486, here znver4"], ["bits may differ", "i486, here znver4"])):
        report = Quiet()
        checkpoint = kept._replace(meta=kept.meta | {"differs": differs}, params=kept.params.alias())
        state = kept.opt_state
        trees = {name: getattr(state, name).alias() for name in ("m", "v")}
        checkpoint = checkpoint._replace(opt_state=state._replace(master=checkpoint.params, **trees))
        _train(run_config, tmp_path / "other", resume=checkpoint, report=report)
        said = [text for text in report.said if "bits may differ" in text]
        assert len(said) == bool(words) and all(word in said[0] for word in words)


def test_a_failing_plot_does_not_stop_the_run(run_config, tmp_path, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", broken)
    report = Quiet()
    assert _train(run_config, tmp_path / "run", report=report).step == 20
    assert any("loss.png could not be drawn: RuntimeError: no fonts" in text for text in report.said)
    assert not (tmp_path / "run" / "loss.png").exists()


def test_a_run_whose_gradient_stays_lost_ends_with_a_checkpoint(run_config, tmp_path, monkeypatch):
    monkeypatch.setattr(nbtrain.run, "MOST_SKIPPED", 3)
    params, opt_state = init(CONFIG, dtype="fp32", device="cpu")
    params["lnf_w"][...] = np.nan
    state = nbtrain.run.batches(list(run_config.train), B=3, T=8, micro=2, seed=5)
    with state:
        save(tmp_path / "lost", params, opt_state, config=CONFIG, data_state=state.state())
    lost = load(tmp_path / "lost", device="cpu")
    with pytest.raises(InvalidValue, match="not finite for 3 steps in a row"):
        _train(run_config, tmp_path / "run", resume=lost)
    assert [row["loss"] for row in _rows(tmp_path / "run")] == [None] * 3
    assert load(tmp_path / "run", device="cpu").opt_state.step.item() == 3


def test_what_would_fail_at_the_end_fails_before_the_first_step(run_config, tmp_path):
    def trained(step):
        raise AssertionError("a step was done")

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("years of work")
    with pytest.raises(InvalidValue, match="checkpoints is a file"):
        _train(run_config, tmp_path / "run", report=Quiet(trained))
    no_val = dataclasses.replace(run_config, val=(str(tmp_path / "nowhere.bin"),))
    with pytest.raises(InvalidValue, match="nowhere.bin"):
        _train(no_val, tmp_path / "other", report=Quiet(trained))
    with pytest.raises(InvalidValue, match="the tokenizer has 256 ids, the model only 20"):
        _train(run_config, tmp_path / "other", tokenizer=ByteTokenizer(), report=Quiet(trained))
    done = init(CONFIG, dtype="fp32", device="cpu")
    done[1].step[...] = 20
    with pytest.raises(InvalidValue, match="has done 20 of 20 steps"):
        _train(run_config, tmp_path / "other", start=done, report=Quiet(trained))
    assert not (tmp_path / "other").exists()
    bad_lr = dataclasses.replace(TRAIN_CONFIG, warmup=30)
    with pytest.raises(InvalidValue, match="warmup"):
        _train(run_config, tmp_path / "other", train_config=bad_lr, report=Quiet(trained))


def test_a_run_goes_on_only_from_a_checkpoint_that_can(run_config, tmp_path):
    done = _train(dataclasses.replace(run_config, steps=2), tmp_path / "run").checkpoint
    with pytest.raises(InvalidValue, match="has done 2 of 2 steps"):
        _train(dataclasses.replace(run_config, steps=2), tmp_path / "run", resume=done)
    save(tmp_path / "weights", done.params, config=CONFIG)
    weights = load(tmp_path / "weights", device="cpu")
    with pytest.raises(InvalidValue, match="weights only"):
        _train(run_config, tmp_path / "run", resume=weights)
    with pytest.raises(InvalidValue, match="not saved by a run"):
        resumed(weights)
    assert resumed(done, steps=50)[0].steps == 50


def test_the_schedule_of_a_prolonged_run_is_prolonged(run_config, tmp_path):
    checkpoint = _train(run_config, tmp_path / "run").checkpoint
    run, train_config = resumed(checkpoint, steps=30)
    assert (run.steps, train_config.total) == (30, 30) and run.train == run_config.train


def test_perplexity_is_the_exponential_of_the_loss(run_config, tmp_path):
    assert (perplexity(0.0), perplexity(1e4)) == (1.0, math.inf) and math.isnan(perplexity(math.nan))
    report = Quiet()
    result = _train(run_config, tmp_path / "run", report=report)
    row = [row for row in _rows(tmp_path / "run") if "val_loss" in row][-1]
    assert row["val_perplexity"] == math.exp(row["val_loss"]) == math.exp(result.val_loss)
    told = f"validation loss {row['val_loss']:.4f}, perplexity {row['val_perplexity']:.2f} over 99 tokens"
    assert f"step 20: {told}" in report.said


@pytest.mark.parametrize("late", [0, 1])
def test_outliers_are_skipped_by_the_device_exactly_where_the_host_warns(
    late, run_config, tmp_path, monkeypatch
):
    monkeypatch.setattr(nbtrain.run, "steps_ahead", lambda place: late)
    monkeypatch.setattr("nbtrain.monitor.LEAST", 3)  # with few values a limit moves much from step to step
    run_config = dataclasses.replace(run_config, steps=40, warn_z=0.7, skip_outliers=True)
    options = dict(dtype="fp32", train_config=LEVEL)
    whole = _train(run_config, tmp_path / "whole", **options)
    rows = [row for row in _rows(tmp_path / "whole") if "loss" in row]
    skipped = [row["step"] for row in rows if row["skipped"]]
    assert 3 < len(skipped) < 30 and skipped[0] > 3 + late and len(rows) == 40
    assert [row["step"] for row in rows if "warnings" in row] == skipped
    assert all(
        "lies" in row["warnings"][0] and "skipped" in row["warnings"][-1] for row in rows if row["skipped"]
    )
    assert whole.checkpoint.opt_state.updates.item() == 40 - len(skipped)

    # Interrupted after an outlier and resumed, the log teaches the same limits.
    def interrupt(step):
        if step == skipped[2]:
            signal.raise_signal(signal.SIGINT)

    half = _train(run_config, tmp_path / "half", **options, report=Quiet(interrupt))
    assert half.interrupted
    rest = _train(run_config, tmp_path / "half", **options, resume=load(tmp_path / "half", device="cpu"))
    assert _bits(rest.checkpoint.opt_state) == _bits(whole.checkpoint.opt_state)


def test_outliers_are_told_and_change_nothing_where_none_is_skipped(run_config, tmp_path):
    report = Quiet()
    run_config = dataclasses.replace(run_config, steps=45)
    silent, loud = (dataclasses.replace(run_config, warn_z=z) for z in (0, 1.0))
    plain = _train(silent, tmp_path / "plain", train_config=LEVEL)
    told = _train(loud, tmp_path / "told", train_config=LEVEL, report=report)
    assert _bits(plain.checkpoint.opt_state) == _bits(told.checkpoint.opt_state)
    warned = [row["step"] for row in _rows(tmp_path / "told") if "warnings" in row]
    assert warned and [text for text in report.said if "standard deviations" in text] == [
        f"step {row['step']}: {'; '.join(row['warnings'])}"
        for row in _rows(tmp_path / "told")
        if "warnings" in row
    ]
    assert not any("warnings" in row for row in _rows(tmp_path / "plain"))
    with pytest.raises(InvalidValue, match="warn_z is 0"):
        dataclasses.replace(run_config, warn_z=0, skip_outliers=True)


def test_micro_batches_come_from_the_tokens_of_a_step():
    assert micro_batches(524_288, 16, 1024) == 32 and micro_batches(96, 12, 8) == 1
    for total, B, T, nearest in (
        (500_000, 16, 1024, 507_904),
        (95, 12, 8, 96),
        (1, 12, 8, 96),
        (145, 12, 8, 192),
    ):
        with pytest.raises(InvalidValue, match=f"The nearest is {nearest}\\."):
            micro_batches(total, B, T)
    for wrong in ((0, 1, 1), (8, 0, 1), (8, 1, True), (8.0, 1, 1)):
        with pytest.raises(InvalidValue, match="must be an int"):
            micro_batches(*wrong)


def test_the_plot_is_refreshed_while_the_run_goes(run_config, tmp_path, monkeypatch):
    monkeypatch.setattr("nbtrain.log.PLOT_EVERY_S", 0.0)
    there = []

    def look(step):
        there.append((tmp_path / "run" / "loss.png").exists())

    run_config = dataclasses.replace(run_config, eval_every=0, steps=4)
    _train(run_config, tmp_path / "run", report=Quiet(look))
    assert there[0] is False and there[-1] is True


def _records(folder):
    """The events of the files in a folder, read by hand: length, CRC, record, CRC."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.glob("events.out.tfevents.*")):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            yield Event.FromString(data[at + 12 : at + 12 + size])
            at += 16 + size


def _events(folder):
    """{tag: [(step, value)]}"""
    found = {}
    for event in _records(folder):
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_tensorboard_gets_the_numbers_of_the_log(run_config, tmp_path):
    out = tmp_path / "run"
    _train(dataclasses.replace(run_config, steps=5), out, tensorboard=True)
    _train(run_config, out, tensorboard=True)  # replaces it
    events, rows = _events(out / "tensorboard"), _rows(out)
    for tag, name in (("train/loss", "loss"), ("train/lr", "lr"), ("val/loss", "val_loss")):
        want = [(row["step"], np.float32(row[name])) for row in rows if name in row]
        assert events[tag] == want and len(want) in (3, 20)
    assert {"val/perplexity", "train/tokens_per_s", "train/grad_norm"} <= set(events)


def test_a_full_disk_under_tensorboard_holds_no_run_up(run_config, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.flush", full)
    report = Quiet()
    _train(run_config, tmp_path / "run", tensorboard=True, report=report)
    assert len(_losses(tmp_path / "run")) == 20
    assert sum("TensorBoard's files end here" in text for text in report.said) == 1


def test_tensorboard_hides_what_a_crash_left_behind_the_checkpoint(tmp_path):
    from tensorboardX.proto.event_pb2 import SessionLog

    for first in (0, 7):
        board = TensorBoard(tmp_path / str(first), first, Quiet())
        board.add({"step": first + 1, "loss": 2.0})
        board.close()
    starts = [
        (event.step, event.session_log.status)
        for first in (0, 7)
        for event in _records(tmp_path / str(first))
        if event.HasField("session_log")
    ]
    assert starts == [(8, SessionLog.START)]


def test_what_is_not_there_is_said_before_anything_is_written(run_config, tmp_path, monkeypatch):
    with pytest.raises(Unavailable, match="needs an NVIDIA GPU; the run is on cpu"):
        _train(run_config, tmp_path / "run", captured=True)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(Unavailable, match=r"pip install 'nbtrain\[tensorboard\]'"):
        _train(run_config, tmp_path / "run", tensorboard=True)
    assert not (tmp_path / "run").exists()


def test_a_step_is_captured_only_where_its_products_can_be(monkeypatch):
    monkeypatch.setattr("nbtrain.device.blas.room", lambda: ("cublaslt", "because of a test"))
    assert why_no_capture("cuda:0") is None and "the run is on hip:0" in why_no_capture("hip:0")
    monkeypatch.setattr("nbtrain.device.blas.room", lambda: ("cupy", "because of a test"))
    assert "through cupy: because of a test" in why_no_capture("cuda:0")
    with pytest.raises(Unavailable, match="asked for, but a graph needs products through cuBLASLt"):
        nbtrain.run.check_available("cuda:0", True, False)
    nbtrain.run.check_available("cuda:0", None, False)


def test_a_run_from_given_weights_begins_with_them(run_config, tmp_path):
    run_config = dataclasses.replace(run_config, steps=1)
    params, opt_state = init(CONFIG, seed=9, dtype="fp16", device="cpu")
    want = evaluate(make_eval_step(CONFIG), params, eval_batches(list(run_config.val), B=3, T=8))
    still = dataclasses.replace(TRAIN_CONFIG, lr=0.0, min_lr=0.0)
    result = _train(run_config, tmp_path / "run", train_config=still, start=(params, opt_state))
    assert result.val_loss == want[0] and result.checkpoint.params.dtype == np.float16


@pytest.mark.parametrize(
    "field, value",
    [("steps", 0), ("B", 0), ("micro", -1), ("seed", -1), ("eval_every", -1), ("B", True), ("steps", 2.0)],
)
def test_counts_of_a_run_are_checked(field, value):
    with pytest.raises(InvalidValue, match=f"{field} must be an int"):
        RunConfig(train=("a",), **{field: value})
