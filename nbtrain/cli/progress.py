"""How a run shows itself on a terminal."""

import contextlib
import sys


def reporter():
    """Where a run tells how it goes: a progress bar on a terminal, lines elsewhere."""
    from nbtrain.log import Report

    return progress_bar() if sys.stdout.isatty() else Report()


def progress_bar():
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from nbtrain.log import Report, clock, speed

    class Bar(Report):
        def __init__(self):
            super().__init__()
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]}  {task.fields[left]} left"),
                console=Console(highlight=False),
            )
            self._task = None

        # No run ends because its terminal has gone.

        def say(self, text: str) -> None:
            with contextlib.suppress(OSError):
                self._progress.console.print(text, markup=False)

        def step(self, step, steps, loss, tokens_per_s, left_s, mfu=None) -> None:
            told = dict(loss=loss, speed=speed(tokens_per_s, mfu), left=clock(left_s))
            with contextlib.suppress(OSError):
                if self._task is None:
                    self._task = self._progress.add_task("", total=steps, **told)
                    self._progress.start()
                self._progress.update(self._task, completed=step, **told)

        def close(self) -> None:
            with contextlib.suppress(OSError):
                self._progress.stop()

    return Bar()
