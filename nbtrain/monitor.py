"""Early warnings: a loss or a gradient norm that lies far above those of the last steps.

    mean, std       of the last WINDOW values, from LEAST of them on
    z = (x - mean) / max(std, 0.001 |mean|)
    limit = mean + warn_z * max(std, 0.001 |mean|);  x > limit is an outlier

Each value is held against the limit from before its own step. An outlier enters the window as its limit: one
spike hides no later one, and a level that stays is normal after a few dozen steps. What is not finite never
enters. Where steps run ahead of the host, the limit is as many steps older, so that the device, which skips
by it, and the host, which warns by it, decide alike, and a resumed run decides as one that went through.
"""

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from nbtrain.errors import InvalidValue

WINDOW, LEAST = 128, 32  # steps
NAMES = {"loss": "loss", "grad_norm": "gradient norm"}
LARGEST = float(np.finfo(np.float32).max)


class Usual(NamedTuple):
    """What one number was in the last steps."""

    mean: float = 0.0
    spread: float = math.inf  # the standard deviation, or 0.001 |mean| where that is more
    n: int = 0  # steps
    limit: float = math.inf  # an fp32 number, as the device holds it


class Monitor:
    """Watches the steps of a run. `warn_z`: how many standard deviations are too many, 0 for any number.
    `late`: steps launched before the metrics of one are read."""

    def __init__(self, warn_z: float = 6.0, late: int = 0):
        check_warn_z(warn_z)
        self._warn_z, self._late = warn_z, late
        self._windows = {name: deque[float](maxlen=WINDOW) for name in NAMES}
        self._after: dict[int, dict[str, Usual]] = {}  # step -> what was usual once it had been seen
        self._finite = True  # the last step's gradient

    def state(self) -> dict:
        """What it has seen, as JSON can hold it, for `restore`. Numbers are text: infinities have one."""
        return {
            "windows": {name: [repr(float(x)) for x in window] for name, window in self._windows.items()},
            "after": {
                str(step): {name: list(map(repr, usual[name])) for name in NAMES}
                for step, usual in self._after.items()
            },
            "finite": self._finite,
        }

    def restore(self, state: dict) -> None:
        """Goes on where another Monitor's `state` was taken."""
        try:
            windows = {
                name: deque[float](map(float, state["windows"][name]), maxlen=WINDOW) for name in NAMES
            }
            after = {
                int(step): {name: _usual(usual[name]) for name in NAMES}
                for step, usual in state["after"].items()
            }
            finite = bool(state["finite"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InvalidValue(f"the state of a Monitor is damaged ({error!r}): {state!r:.80}") from None
        self._windows, self._after, self._finite = windows, after, finite

    def limits(self, step: int) -> tuple[float, float]:
        """The largest loss and gradient norm that are usual at `step`; inf while too few were seen."""
        usual = self._usual(step)
        return usual["loss"].limit, usual["grad_norm"].limit

    def see(self, step: int, metrics: dict) -> list[str]:
        """Takes a step's loss, grad_norm, loss_scale, n_targets and skipped; returns what to warn of."""
        usual, warnings = self._usual(step), []
        was_finite, self._finite = self._finite, math.isfinite(metrics["grad_norm"])
        if metrics["n_targets"] == 0:
            warnings.append("no target counted; the update was skipped")
        elif not self._finite:
            # A scaled gradient that overflows while the loss is finite is how a dynamic scale finds its size.
            scaled = metrics["loss_scale"] > 1 and math.isfinite(metrics["loss"])
            if was_finite and not scaled:
                warnings.append(
                    f"loss {metrics['loss']:.4g}, gradient norm {metrics['grad_norm']:.4g}: not finite; the "
                    "update was skipped"
                )
        else:
            for name, window in self._windows.items():
                x, (mean, spread, n, limit) = metrics[name], usual[name]
                if x > limit:
                    warnings.append(
                        f"{NAMES[name]} {x:.4g} lies {(x - mean) / spread:.1f} standard deviations above "
                        f"{mean:.4g}, the mean of the last {n} steps"
                    )
                window.append(min(x, limit))
            if warnings and metrics["skipped"]:
                warnings[-1] += "; the update was skipped"
        self._after[step] = {name: self._measure(window) for name, window in self._windows.items()}
        self._after.pop(step - self._late - 2, None)
        return warnings

    def _usual(self, step: int) -> dict[str, Usual]:
        return self._after.get(step - 1 - self._late) or dict.fromkeys(NAMES, Usual())

    def _measure(self, window) -> Usual:
        if len(window) < LEAST or not self._warn_z:
            return Usual()
        values = np.array(window)
        mean = float(values.mean())
        spread = max(float(values.std()), 1e-3 * abs(mean), 1e-9)  # above 0 where all of them are 0
        limit = float(np.float32(min(mean + self._warn_z * spread, LARGEST)))
        return Usual(mean, spread, len(window), limit)


def _usual(numbers) -> Usual:
    mean, spread, n, limit = numbers
    return Usual(float(mean), float(spread), int(n), float(limit))


def check_warn_z(warn_z) -> None:
    if isinstance(warn_z, bool) or not isinstance(warn_z, int | float) or not 0 <= warn_z < math.inf:
        raise InvalidValue(
            f"warn_z counts standard deviations, 0 or more, 0 for no warnings; got {warn_z!r}. 6 is usual."
        )
