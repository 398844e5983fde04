"""Inputs made by hypothesis: the same ones in every run, so that a failure is of a change and not of chance.
`make fuzz` takes other ones each time, and more of them (NBTRAIN_FUZZ a test)."""

import os

from hypothesis import HealthCheck, settings

MORE = os.environ.get("NBTRAIN_FUZZ")
examples = settings(
    max_examples=int(MORE or 150),
    derandomize=MORE is None,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # every example writes its folder anew
)
