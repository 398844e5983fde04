"""How a run, and what takes long beside one, shows itself on a terminal."""

import contextlib
import sys
import time

LINE_S = 30.0


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


@contextlib.contextmanager
def progress():
    """Where a command tells on stderr how far it is, as (what, done, total): a bar on a terminal, a line
    every half minute elsewhere."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            tasks: dict = {}

            def update(what: str, done: int, total: int) -> None:
                if what not in tasks:
                    tasks[what] = bar.add_task(what)
                bar.update(tasks[what], completed=done, total=total)

            yield update
        return
    said_at = time.monotonic()

    def say(what: str, done: int, total: int) -> None:
        nonlocal said_at
        if time.monotonic() - said_at > LINE_S:
            said_at = time.monotonic()
            print(f"{what}: {done / total:.0%}", file=sys.stderr, flush=True)

    yield say
