import numpy as np
import pytest

import nbtrain.verify
from nbtrain.device import FLOATS, TARGET
from nbtrain.device.place import resolve_device
from nbtrain.errors import InvalidValue
from nbtrain.verify import CHECKS, LIMITS, Inputs, _in_own_process, error, verify

DEVICES = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", CHECKS)
def test_a_right_device_is_within_the_limits(name, dtype, device):
    device = device if device == "cpu" else resolve_device("auto")[0]
    assert error(CHECKS[name], dtype, device) <= (0 if device == "cpu" else LIMITS[dtype])


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_wrong_element_is_beyond_the_limit(dtype):
    """The smallest mistake that counts: one element of the second run off by a hundredth of the largest."""
    runs = []

    def check(a: Inputs):
        x = a.floats(301, 77).astype(np.float32)
        runs.append(1)
        if len(runs) == 2:
            x[300, 76] += 0.1 * np.abs(x).max()
        return (x,)

    assert error(check, dtype, "cpu") > LIMITS[dtype]


def test_a_result_that_is_not_finite_is_infinitely_wrong():
    assert error(lambda a: (np.array([1.0, np.nan]),), "fp32", "cpu") == np.inf


def test_inputs_are_the_same_each_time():
    a, b = Inputs("fp32", "cpu"), Inputs("fp32", "cpu")
    assert np.array_equal(a.floats(3, 5), b.floats(3, 5)) and np.array_equal(
        a.integers(9, 7), b.integers(9, 7)
    )


def test_a_check_that_ends_its_process_is_one_line():
    (line,) = _in_own_process("no_such_check", "cpu")
    assert line.startswith("BAD no_such_check: the process ended with exit code 1. KeyError")


def test_the_report_counts_its_lines(monkeypatch):
    answers = {"one": ["ok  one fp32: 0.1, limit 8", "BAD one fp16: 9.0, limit 8"], "speed": ["    speed"]}
    monkeypatch.setattr(nbtrain.verify, "CHECKS", {"one": None})
    monkeypatch.setattr(nbtrain.verify, "_in_own_process", lambda name, device: answers[name])
    monkeypatch.setattr(nbtrain.verify, "resolve_device", lambda device: ("hip:0", "asked for"))
    lines = list(verify())
    assert lines[0].startswith(f"verifying hip:0 ({TARGET})") and lines[-1] == "1 passed, 1 failed"


def test_there_must_be_a_gpu():
    with pytest.raises(InvalidValue, match="no GPU"):
        list(verify("cpu"))
