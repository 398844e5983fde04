import dataclasses
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from nbtrain.log import Log, Report, TensorBoard, _means, clock, draw, perplexity
from tests.short_runs import Quiet, losses_of, rows_of, train_on_cpu


def test_the_log_of_a_resumed_run_drops_what_the_crash_left(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [{"step": s, "loss": 3.0 - s} for s in (1, 2, 3)] + [{"step": 2, "val_loss": 0.5}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo')
    with Log(path, 2, 10, 9, Quiet()) as log:
        assert (log.train, log.val) == ([(1, 2.0), (2, 1.0)], [(2, 0.5)])
        log.evaluated(3, 0.25, 7)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 2, 3]
    with Log(path, 0, 10, 9, Quiet()):
        pass
    assert path.read_text() == ""


def test_numbers_that_are_not_finite_are_null_in_the_log(tmp_path):
    values = dict(loss=math.nan, lr=1e-3, grad_norm=math.inf, loss_scale=2.0**16, skipped=True, n_targets=4)
    with Log(tmp_path / "log.jsonl", 0, 10, 9, Quiet()) as log:
        log.step(1, SimpleNamespace(read=lambda: values))
        assert (log.train, log.not_finite_in_a_row) == ([], 1)
        log.evaluated(1, math.nan, 7)
    row, evaluation = rows_of(tmp_path)
    assert evaluation == {"step": 1, "val_loss": None, "val_perplexity": None, "val_tokens": 7}
    with Log(tmp_path / "log.jsonl", 1, 10, 9, Quiet()) as log:
        assert log.train == log.val == []
    assert (row["loss"], row["grad_norm"], row["skipped"], row["loss_scale"]) == (None, None, True, 65536.0)


def test_a_step_tells_how_much_of_the_peak_it_used_and_what_the_driver_says(tmp_path, monkeypatch):
    values = dict(loss=2.0, lr=1e-3, grad_norm=1.0, loss_scale=1.0, skipped=False, n_targets=4)
    read, clock_s = SimpleNamespace(read=lambda: values), iter([0.0, 2.0, 4.0, 8.0, 10.0])
    monkeypatch.setattr("nbtrain.log.time.perf_counter", lambda: next(clock_s))
    sensors = SimpleNamespace(read=lambda: {"gpu_temperature_c": 64, "gpu_power_w": 301.5})
    with Log(tmp_path / "log.jsonl", 0, 10, 9, Quiet(), peak_tokens_per_s=20.0, sensors=sensors) as log:
        for step in (1, 2, 3, 4):
            log.step(step, read)
    rows = rows_of(tmp_path)
    assert [row["tokens_per_s"] for row in rows] == [5.0, 5.0, 2.5, 5.0]
    assert [row["mfu"] for row in rows] == [0.25, 0.25, 0.125, 0.25]
    # Asked at most every five seconds: at 2 and at 8.
    assert [row.get("gpu_temperature_c") for row in rows] == [64, None, 64, None]
    assert rows[0]["gpu_power_w"] == 301.5


def test_a_long_run_is_drawn_in_few_points(tmp_path):
    losses = [(step, 3.0 - step / 1e5) for step in range(1, 100_004)]
    steps, means = _means(losses, 101)
    assert len(steps) == 991 and steps[-1] == 100_003 and steps[0] == 101
    assert means[0] == pytest.approx(3.0 - 51 / 1e5) and means[-1] == pytest.approx(3.0 - 99_997 / 1e5)
    draw(losses, [(5, 2.0)], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_plain_lines_are_few_and_end_with_the_last_step(capsys):
    report = Report()
    for step in range(1, 1001):
        report.step(step, 1000, 2.5, 12_345.6, 3725.2)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"step {step}/1000: loss 2.5000, 12,346 tokens/s, 1:02:05 left" for step in (1, 1000)]
    report.step(1000, 1000, 2.5, 12_345.6, 0.0, 0.4567)
    assert (
        capsys.readouterr().out == "step 1000/1000: loss 2.5000, 12,346 tokens/s, MFU 45.7%, 0:00:00 left\n"
    )


def test_clock_reads_hours_minutes_seconds():
    assert [clock(s) for s in (0, 59.6, 3600, 90061, math.nan)] == [
        "0:00:00",
        "0:01:00",
        "1:00:00",
        "25:01:01",
        "?",
    ]


class Disk:
    """A file on a disk that takes `room` bytes."""

    def __init__(self, room):
        self.room, self.taken = room, b""

    def write(self, data):
        if not self.room:
            raise OSError(28, "No space left on device")
        data = data[: self.room]
        self.room -= len(data)
        self.taken += data
        return len(data)

    def close(self):
        pass


def test_lines_that_a_full_disk_does_not_take_are_written_when_it_does(tmp_path):
    report = Quiet()
    with Log(tmp_path / "log.jsonl", 0, 10, 9, report) as log:
        log._file.close()
        disk = log._file = Disk(room=100)
        for step in range(1, 8):
            log.evaluated(step, 1.0, 7)
        disk.room = 10**6
        log.evaluated(8, 1.0, 7)
    assert [json.loads(line)["step"] for line in disk.taken.splitlines()] == list(range(1, 9))
    told = [text for text in report.said if "No space left" in text]
    assert len(told) == 1 and str(tmp_path / "log.jsonl") in told[0]


def test_the_step_that_compiles_after_a_resume_does_not_count_in_the_time_left(tmp_path, monkeypatch):
    rows = [{"step": step, "loss": 2.0} for step in range(1, 51)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = dict(loss=2.0, lr=1e-3, grad_norm=1.0, loss_scale=1.0, skipped=False, n_targets=4)
    read, clock_s, left_s = SimpleNamespace(read=lambda: values), iter([0.0, 100.0, 101.0, 102.0]), []
    monkeypatch.setattr("nbtrain.log.time.perf_counter", lambda: next(clock_s))
    report = Quiet()
    report.step = lambda step, steps, loss, rate, left, mfu: left_s.append(left)
    with Log(tmp_path / "log.jsonl", 50, 10, 60, report) as log:
        for step in (51, 52, 53):
            log.step(step, read)
    assert left_s == [math.inf, 8.0, pytest.approx(7.0)]


def test_lines_that_nobody_reads_end_no_run(monkeypatch):
    class Closed:
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Closed())
    Report().say("step 1")


def test_a_failing_plot_does_not_stop_the_run(run_config, tmp_path, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no fonts")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", broken)
    report = Quiet()
    assert train_on_cpu(run_config, tmp_path / "run", report=report).step == 20
    assert any("loss.png could not be drawn: RuntimeError: no fonts" in text for text in report.said)
    assert not (tmp_path / "run" / "loss.png").exists()


def test_the_plot_is_refreshed_while_the_run_goes(run_config, tmp_path, monkeypatch):
    monkeypatch.setattr("nbtrain.log.PLOT_EVERY_S", 0.0)
    there = []

    def look(step):
        there.append((tmp_path / "run" / "loss.png").exists())

    run_config = dataclasses.replace(run_config, eval_every=0, steps=4)
    train_on_cpu(run_config, tmp_path / "run", report=Quiet(look))
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
    train_on_cpu(dataclasses.replace(run_config, steps=5), out, tensorboard=True)
    train_on_cpu(run_config, out, tensorboard=True)  # replaces it
    events, rows = _events(out / "tensorboard"), rows_of(out)
    for tag, name in (("train/loss", "loss"), ("train/lr", "lr"), ("val/loss", "val_loss")):
        want = [(row["step"], np.float32(row[name])) for row in rows if name in row]
        assert events[tag] == want and len(want) in (3, 20)
    assert {"val/perplexity", "train/tokens_per_s", "train/grad_norm"} <= set(events)


def test_a_full_disk_under_tensorboard_holds_no_run_up(run_config, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.flush", full)
    report = Quiet()
    train_on_cpu(run_config, tmp_path / "run", tensorboard=True, report=report)
    assert len(losses_of(tmp_path / "run")) == 20
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


def test_perplexity_is_the_exponential_of_the_loss(run_config, tmp_path):
    assert (perplexity(0.0), perplexity(1e4)) == (1.0, math.inf) and math.isnan(perplexity(math.nan))
    report = Quiet()
    result = train_on_cpu(run_config, tmp_path / "run", report=report)
    row = [row for row in rows_of(tmp_path / "run") if "val_loss" in row][-1]
    assert row["val_perplexity"] == math.exp(row["val_loss"]) == math.exp(result.val_loss)
    told = f"validation loss {row['val_loss']:.4f}, perplexity {row['val_perplexity']:.2f} over 99 tokens"
    assert f"step 20: {told}" in report.said
