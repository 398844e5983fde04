"""Which of several algorithms for one product is the fastest.

At its power limit a card runs as fast as its work is frugal: algorithms rank there by their energy, and
which of them needs the fewest cycles says little. It takes some hundredths of a second of the same work
until clocks have settled. That is worth its time where a product is repeated thousands of times, in
training.
"""

from collections.abc import Callable, Sequence

import numpy as np

SHORT_MS = 0.03  # products below it do not load the card
SHORT_CALLS, SHORT_ROUNDS = 20, 5
ROUGH_MS, NEAR = 4.0, 1.1  # a turn of every algorithm; those within NEAR times the best are timed again
CALLS, ROUNDS = 10, 5  # then, where nothing is known of repetitions
LONG_MS = 100.0  # a turn where they are many; its first half is not timed


def fastest(
    algorithms: Sequence[int], times: Callable[[Sequence[int], int, int], np.ndarray], at_length: bool
) -> int:
    """One of `algorithms`.

    `times(some, calls, rounds)` gives ms a call of each: `some` take turns of so many calls back to back, of
    which the second half is timed; the median over `rounds` turns.
    """
    about = times(algorithms[:1], 4, 1)[0]
    if about < SHORT_MS:
        found = times(algorithms, SHORT_CALLS, SHORT_ROUNDS)
        return algorithms[int(found.argmin())]
    found = times(algorithms, calls_in(ROUGH_MS, about), 1)
    best = found.min()
    near = [one for one, ms in zip(algorithms, found, strict=True) if ms <= NEAR * best]
    found = times(near, calls_in(LONG_MS, best), 1) if at_length else times(near, CALLS, ROUNDS)
    return near[int(found.argmin())]


def calls_in(ms: float, one: float) -> int:
    """Calls of about `one` ms that fill `ms`, at least 4."""
    return max(4, round(ms / one))
