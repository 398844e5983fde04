"""Ending a run by Ctrl-C: first in order, then at once."""

import contextlib
import os
import signal
import threading
from typing import Any


class Interrupt:
    """A context in which the first SIGINT, SIGTERM or SIGHUP sets `came`, and the second raises
    KeyboardInterrupt. A SIGHUP that nohup ignores is ignored."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))

    def __init__(self):
        self.came = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handler
            for number in self.SIGNALS:
                if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number, frame) -> None:
        if self.came:
            for number in self._before:
                signal.signal(number, signal.SIG_DFL)  # the third one needs no Python
            raise KeyboardInterrupt
        self.came = True
        # Not print: the signal may come in the middle of one. Nobody may be left to read it: Ctrl-C ends the
        # `tee` behind a pipe, too.
        with contextlib.suppress(OSError):
            os.write(
                2, b"\nnbtrain: interrupted; saving after this step. Interrupt again to leave at once.\n"
            )
