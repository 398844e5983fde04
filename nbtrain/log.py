"""What a run tells: plain lines, log.jsonl, loss.png and TensorBoard.

log.jsonl holds a JSON object a step (step, loss, lr, grad_norm, loss_scale, skipped, n_targets, tokens_per_s;
mfu, gpu_temperature_c and gpu_power_w where they are known; warnings where there are some), one an evaluation
(step, val_loss, val_perplexity, val_tokens) and one a checkpoint (step, checkpoint, stall_ms, write_ms). What
is not finite is null.
"""

import contextlib
import json
import math
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from nbtrain.device.sensors import Sensors
from nbtrain.errors import Unavailable
from nbtrain.files import write_atomically
from nbtrain.monitor import Monitor

SENSE_EVERY_S = 5.0  # a driver takes its time to answer
PLOT_EVERY_S = 60.0
PLOTTED = 1000  # points of a curve


class Report:
    """Where a run tells how it goes: plain lines, at most one in ten seconds besides evaluations."""

    EVERY_S = 10.0

    def __init__(self):
        self._said_at = -math.inf

    def say(self, text: str) -> None:
        # No run ends because nobody reads any more (`| head`), or because the disk of a `> file` is full.
        with contextlib.suppress(OSError):
            print(text, flush=True)

    def step(
        self, step: int, steps: int, loss: float, tokens_per_s: float, left_s: float, mfu: float | None = None
    ) -> None:
        """mfu: a share; None where no peak is known."""
        if time.perf_counter() - self._said_at >= self.EVERY_S or step == steps:
            self._said_at = time.perf_counter()
            how = f"loss {loss:.4f}, {speed(tokens_per_s, mfu)}, {clock(left_s)} left"
            self.say(f"step {step}/{steps}: {how}")

    def close(self) -> None:
        pass


def speed(tokens_per_s: float, mfu: float | None) -> str:
    """12,345 tokens/s, MFU 43.2%"""
    return f"{tokens_per_s:,.0f} tokens/s" + ("" if mfu is None else f", MFU {mfu:.1%}")


def clock(seconds: float) -> str:
    """1:02:03"""
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"


def perplexity(loss: float) -> float:
    """exp(loss): among how many tokens, equally likely, the model is as unsure."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class Log:
    """log.jsonl, open: each line is on its way to the disk when its step is told. Lines behind step `first`
    are dropped.

    peak_tokens_per_s: at 100% MFU; None where that is not known.
    """

    def __init__(
        self,
        path: Path,
        first: int,
        tokens_a_step: int,
        steps: int,
        report: Report,
        *,
        monitor: Monitor | None = None,
        peak_tokens_per_s: float | None = None,
        sensors: Sensors | None = None,
        board: "TensorBoard | None" = None,
    ):
        self.train: list[tuple[int, float]] = []  # step, loss
        self.val: list[tuple[int, float]] = []
        self.not_finite_in_a_row = 0
        self._tokens, self._steps, self._report = tokens_a_step, steps, report
        self._monitor, self._peak = monitor or Monitor(0), peak_tokens_per_s
        self._sensors, self._sensed_at, self._board = sensors, -math.inf, board
        kept = _lines(path, first) if first else []
        for row in kept:
            for name, losses in (("val_loss", self.val), ("loss", self.train)):
                if row.get(name) is not None:
                    losses.append((row["step"], row[name]))
        write_atomically(path, lambda file: file.writelines(json.dumps(row).encode() + b"\n" for row in kept))
        self._path, self._file = path, open(path, "ab", buffering=0)
        self._unwritten, self._told = b"", False  # what a full disk did not take, and whether that was said
        self._at = time.perf_counter()
        self._seen, self._step_s = 0, 0.0  # steps, and how long one takes, smoothed

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *exc) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def step(self, step: int, metrics) -> None:
        """Reads the metrics of a step, which waits for it, and writes them down."""
        m = metrics.read()
        now = time.perf_counter()
        elapsed, self._at = max(now - self._at, 1e-9), now
        # The first step compiles, so the second one begins the mean.
        mean = elapsed if self._seen < 2 else 0.95 * self._step_s + 0.05 * elapsed
        self._seen, self._step_s = self._seen + 1, mean
        lost = m["n_targets"] > 0 and not math.isfinite(m["grad_norm"])
        self.not_finite_in_a_row = self.not_finite_in_a_row + 1 if lost else 0
        row = {name: m[name] for name in ("loss", "lr", "grad_norm", "loss_scale", "skipped", "n_targets")}
        row["tokens_per_s"] = round(self._tokens / elapsed, 1)
        if self._peak is not None:
            row["mfu"] = round(self._tokens / elapsed / self._peak, 4)
        if self._sensors is not None and now - self._sensed_at >= SENSE_EVERY_S:
            row |= self._sensors.read()
            self._sensed_at = now
        if warnings := self._monitor.see(step, m):
            row["warnings"] = warnings
            self._report.say(f"step {step}: {'; '.join(warnings)}")
        self._write({"step": step} | row)
        if math.isfinite(m["loss"]):
            self.train.append((step, m["loss"]))
        rate = self._tokens / mean
        mfu = None if self._peak is None else rate / self._peak
        left_s = (self._steps - step) * mean if self._seen > 1 or step == self._steps else math.inf
        self._report.step(step, self._steps, m["loss"], rate, left_s, mfu)

    def evaluated(self, step: int, loss: float, n: int) -> None:
        self.val.append((step, loss))
        self._write({"step": step, "val_loss": loss, "val_perplexity": perplexity(loss), "val_tokens": n})
        self._report.say(
            f"step {step}: validation loss {loss:.4f}, perplexity {perplexity(loss):.2f} over {n:,} tokens"
        )

    def saved(self, saved) -> None:
        """A checkpoint is on the disk: a `checkpoints.Saved`."""
        times = {name: round(getattr(saved, name), 3) for name in ("stall_ms", "write_ms")}
        self._write({"step": saved.step, "checkpoint": saved.path.name} | times)

    def pause(self) -> None:
        """Time from the last step until now belongs to none."""
        self._at = time.perf_counter()

    def _write(self, row: dict) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._unwritten += json.dumps(finite).encode("ascii") + b"\n"
        try:
            while self._unwritten:  # a full disk may take a part
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._told = False
        except OSError as error:
            if not self._told:
                self._report.say(
                    f"{self._path} cannot be written: {error}. Its lines are kept until it can be"
                )
            self._told = True
        if self._board is not None:
            self._board.add(finite)


def _lines(path: Path, last: int) -> list[dict]:
    """The rows of a log up to step `last`; a line that a crash cut is dropped."""
    rows = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if (
                isinstance(row, dict)
                and isinstance(row.get("step"), int)
                and row["step"] <= last
                and {"loss", "val_loss", "checkpoint"} & set(row)
            ):
                rows.append(row)
    return rows


class TensorBoard:
    """The numbers of log.jsonl as TensorBoard's event files in `folder`, up to step `first` those that are
    there. Needs tensorboardX.

    Written here and now, not by tensorboardX's own thread: a full disk ends that one, and then a run that
    writes on waits for it for ever.
    """

    FLUSH_EVERY_S = 10.0

    def __init__(self, folder: Path, first: int, report: Report):
        record_writer, self._pb = _tensorboardx()
        self._report, self._flushed_at = report, -math.inf
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.out.tfevents.*") if first == 0 else ():
            old.unlink()
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file: Any = record_writer(str(folder / name))
        self._write(file_version="brain.Event:2")
        if first:  # what a crash left behind it is void
            self._write(step=first + 1, session_log=self._pb.SessionLog(status=self._pb.SessionLog.START))

    def add(self, row: dict) -> None:
        event = self._pb.Event()
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float):
                kind, short = ("val", name[4:]) if name.startswith("val_") else ("train", name)
                event.summary.value.add(tag=f"{kind}/{short}", simple_value=float(value))
        self._write(step=row["step"], summary=event.summary)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _write(self, **content) -> None:
        """No run ends because its pictures cannot be written."""
        if self._file is None:
            return
        try:
            self._file.write(self._pb.Event(wall_time=time.time(), **content).SerializeToString())
            if time.perf_counter() - self._flushed_at >= self.FLUSH_EVERY_S:
                self._file.flush()
                self._flushed_at = time.perf_counter()
        except OSError as error:
            self._report.say(f"TensorBoard's files end here: {error}. log.jsonl holds the same numbers")
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    @staticmethod
    def check() -> None:
        """Raises Unavailable where tensorboardX is not installed."""
        _tensorboardx()


def _tensorboardx() -> tuple[Any, Any]:
    """(the class that writes records to a file, the module of messages)"""
    try:
        import tensorboardX  # noqa: F401
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import RecordWriter
    except ImportError as error:
        raise Unavailable(
            f"TensorBoard's files were asked for, but tensorboardX cannot be imported ({error}). Run "
            "pip install 'nbtrain[tensorboard]', or do without: log.jsonl holds the same numbers."
        ) from None
    return RecordWriter, event_pb2


class Plot:
    """loss.png: drawn when asked for, and by `refresh` once a minute. A run does not end because it could not
    be drawn."""

    def __init__(self, log: Log, path: Path, report: Report):
        self._log, self._path, self._report = log, path, report
        self._due = time.perf_counter() + PLOT_EVERY_S
        self._failed = False

    def refresh(self) -> None:
        if time.perf_counter() >= self._due:
            self.draw()
            self._log.pause()

    def draw(self) -> None:
        start = time.perf_counter()
        try:
            draw(self._log.train, self._log.val, self._path)
        except Exception as error:
            if not self._failed:
                self._report.say(f"{self._path} could not be drawn: {type(error).__name__}: {error}")
            self._failed = True
        now = time.perf_counter()
        self._due = now + max(PLOT_EVERY_S, 50 * (now - start))  # at most 2% of the time


def draw(train: list[tuple[int, float]], val: list[tuple[int, float]], path: Path) -> None:
    """Both losses, lists of (step, loss), as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    if train:
        each = -(-len(train) // PLOTTED)
        steps, losses = _means(train, each)
        axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8)
        width = max(1, len(losses) // 50)
        mean = np.convolve(losses, np.full(width, 1 / width), "valid")
        label = f"training, mean of {each * width}" if each * width > 1 else "training"
        axes.plot(steps[width - 1 :], mean, color="tab:blue", label=label)
    if val:
        steps, losses = np.array(val).T
        axes.plot(steps, losses, "o-", color="tab:orange", markersize=4, label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    if train or val:
        axes.legend()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))


def _means(pairs: list[tuple[int, float]], each: int) -> tuple[np.ndarray, np.ndarray]:
    """The last step and the mean loss of every `each` pairs."""
    steps, losses = np.array(pairs, np.float64).T
    starts = np.arange(0, len(steps), each)
    ends = np.append(starts[1:], len(steps))
    return steps[ends - 1], np.add.reduceat(losses, starts) / (ends - starts)
