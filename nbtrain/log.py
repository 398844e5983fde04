"""What a run tells: plain lines, log.jsonl and loss.png.

log.jsonl holds a JSON object a step (step, loss, lr, grad_norm, loss_scale, skipped, n_targets,
tokens_per_s), one an evaluation (step, val_loss, val_tokens).
"""

import contextlib
import json
import math
import time
from pathlib import Path

import numpy as np

from nbtrain.files import write_atomically


class Report:
    """Where a run tells how it goes: plain lines, at most one in ten seconds besides evaluations."""

    EVERY_S = 10.0

    def __init__(self):
        self._said_at = -math.inf

    def say(self, text: str) -> None:
        print(text, flush=True)

    def step(self, step: int, steps: int, loss: float, tokens_per_s: float, left_s: float) -> None:
        if time.perf_counter() - self._said_at >= self.EVERY_S or step == steps:
            self._said_at = time.perf_counter()
            self.say(
                f"step {step}/{steps}: loss {loss:.4f}, {tokens_per_s:,.0f} tokens/s, {clock(left_s)} left"
            )

    def close(self) -> None:
        pass


def clock(seconds: float) -> str:
    """1:02:03"""
    if not math.isfinite(seconds):
        return "?"
    minutes, s = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{s:02d}"


class Log:
    """log.jsonl, open: each line is on its way to the disk when its step is told. Lines behind step `first`
    are dropped."""

    def __init__(self, path: Path, first: int, tokens_a_step: int, steps: int, report: Report):
        self.train: list[tuple[int, float]] = []  # step, loss
        self.val: list[tuple[int, float]] = []
        self.skipped_in_a_row = 0
        self._tokens, self._steps, self._report = tokens_a_step, steps, report
        kept = _lines(path, first) if first else []
        for row in kept:
            for name, losses in (("val_loss", self.val), ("loss", self.train)):
                if row.get(name) is not None:
                    losses.append((row["step"], row[name]))
        write_atomically(path, lambda file: file.writelines(json.dumps(row).encode() + b"\n" for row in kept))
        self._file = open(path, "a", encoding="ascii", buffering=1)
        self._at = time.perf_counter()
        self._step_s: float | None = None  # smoothed

    def __enter__(self) -> "Log":
        return self

    def __exit__(self, *exc) -> None:
        self._file.close()

    def step(self, step: int, metrics) -> None:
        """Reads the metrics of a step, which waits for it, and writes them down."""
        m = metrics.read()
        now = time.perf_counter()
        elapsed, self._at = max(now - self._at, 1e-9), now
        # The first step compiles, so the second one begins the mean.
        mean = (
            elapsed if self._step_s is None or len(self.train) < 2 else 0.95 * self._step_s + 0.05 * elapsed
        )
        self._step_s = mean
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if m["skipped"] else 0
        names = ("loss", "lr", "grad_norm", "loss_scale", "skipped", "n_targets")
        self._write(
            {"step": step}
            | {name: m[name] for name in names}
            | {"tokens_per_s": round(self._tokens / elapsed, 1)}
        )
        if math.isfinite(m["loss"]):
            self.train.append((step, m["loss"]))
        self._report.step(step, self._steps, m["loss"], self._tokens / mean, (self._steps - step) * mean)

    def evaluated(self, step: int, loss: float, n: int) -> None:
        self.val.append((step, loss))
        self._write({"step": step, "val_loss": loss, "val_tokens": n})

    def saved(self, saved) -> None:
        """A checkpoint that is on the disk: a `checkpoints.Saved`."""
        times = {name: round(getattr(saved, name), 3) for name in ("stall_ms", "write_ms")}
        self._write({"step": saved.step, "checkpoint": saved.path.name} | times)

    def pause(self) -> None:
        """Time from the last step until now belongs to none."""
        self._at = time.perf_counter()

    def _write(self, row: dict) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps(finite) + "\n")


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


def draw(log: Log, path: Path, report: Report) -> None:
    """Both losses over the steps, as PNG. A run does not end because it could not be drawn."""
    try:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.subplots()
        if log.train:
            steps, losses = np.array(log.train).T
            axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8)
            width = max(1, len(losses) // 50)
            mean = np.convolve(losses, np.full(width, 1 / width), "valid")
            axes.plot(
                steps[width - 1 :],
                mean,
                color="tab:blue",
                label=f"training, mean of {width}" if width > 1 else "training",
            )
        if log.val:
            steps, losses = np.array(log.val).T
            axes.plot(steps, losses, "o-", color="tab:orange", markersize=4, label="validation")
        axes.set(xlabel="step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        if log.train or log.val:
            axes.legend()
        write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))
    except Exception as error:
        report.say(f"{path} could not be drawn: {type(error).__name__}: {error}")
