import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from nbtrain.config import GPTConfig
from nbtrain.device.sensors import Sensors, device_name
from nbtrain.errors import InvalidValue
from nbtrain.monitor import LEAST, WINDOW, Monitor
from nbtrain.speed import flop_per_token, peak_flop_per_s


def metrics(loss=2.0, grad_norm=1.0, **changes):
    return dict(loss=loss, grad_norm=grad_norm, loss_scale=1.0, n_targets=8, skipped=False) | changes


def usual(n, seed=0):
    """n losses around 2 and gradient norms around 1."""
    rng = np.random.default_rng(seed)
    return zip(rng.normal(2.0, 0.1, 200)[:n], rng.normal(1.0, 0.05, 200)[:n], strict=True)


def taught(n=WINDOW, **options):
    monitor = Monitor(**options)
    for step, (loss, norm) in enumerate(usual(n), 1):
        monitor.see(step, metrics(loss, norm))
    return monitor


@pytest.mark.parametrize("n", [LEAST - 1, LEAST, WINDOW, WINDOW + 9])
def test_limits_are_so_many_standard_deviations_above_the_mean_of_the_window(n):
    monitor = taught(n, warn_z=7.0)
    for k, limit in enumerate(monitor.limits(n + 1)):
        last = np.array(list(usual(n)))[-WINDOW:, k]
        want = last.mean() + 7.0 * last.std() if n >= LEAST else math.inf
        assert limit == pytest.approx(want, rel=1e-6) and limit == np.float32(limit)


def test_an_outlier_is_told_with_its_distance_and_the_skip():
    monitor = taught()
    last = np.array(list(usual(WINDOW)))
    z = (9.0 - last[:, 1].mean()) / last[:, 1].std()
    (told,) = monitor.see(WINDOW + 1, metrics(grad_norm=9.0, skipped=True))
    assert told == (
        f"gradient norm 9 lies {z:.1f} standard deviations above {last[:, 1].mean():.4g}, the mean of the "
        "last 128 steps; the update was skipped"
    )
    both = taught().see(WINDOW + 1, metrics(loss=5.0, grad_norm=9.0))
    assert [text.partition(" ")[0] for text in both] == ["loss", "gradient"]
    assert "skipped" not in "".join(both)


def test_a_spike_hides_no_later_one():
    monitor = taught()
    assert monitor.see(WINDOW + 1, metrics(loss=1e6))
    for step in range(WINDOW + 2, WINDOW + 6):
        assert not monitor.see(step, metrics())
    assert monitor.see(WINDOW + 6, metrics(loss=3.5))


def test_a_level_that_stays_becomes_usual():
    monitor = taught()
    warned = [bool(monitor.see(WINDOW + 1 + i, metrics(loss=20.0))) for i in range(100)]
    assert warned[0] and 5 < sum(warned) < 60 and not any(warned[60:])


def test_a_run_that_goes_well_is_left_in_peace():
    monitor, rng = Monitor(), np.random.default_rng(0)
    for step in range(1, 2001):
        loss = 2 + 8 * math.exp(-step / 100) + 0.05 * rng.standard_normal()
        assert not monitor.see(step, metrics(loss, 0.3 + 3 / step + 0.02 * rng.standard_normal()))
    constant = Monitor()
    for step in range(1, 60):
        assert not constant.see(step, metrics(loss=2.0))
    assert not constant.see(60, metrics(loss=2.01)) and constant.see(61, metrics(loss=2.02))


def test_a_value_after_nothing_but_zeros_is_told():
    monitor = Monitor()
    for step in range(1, 60):
        assert not monitor.see(step, metrics(grad_norm=0.0))
    assert monitor.see(60, metrics(grad_norm=0.1))


def test_what_is_not_finite_is_told_once_and_never_enters():
    monitor, alike = taught(), taught()
    lost = metrics(loss=math.nan, grad_norm=math.nan, skipped=True)
    assert monitor.see(WINDOW + 1, lost) == [
        "loss nan, gradient norm nan: not finite; the update was skipped"
    ]
    assert not monitor.see(WINDOW + 2, lost)
    assert monitor.limits(WINDOW + 3) == alike.limits(WINDOW + 1) != (math.inf, math.inf)
    assert not monitor.see(WINDOW + 3, metrics()) and monitor.see(WINDOW + 4, lost)


def test_a_dynamic_scale_that_overflows_is_no_news():
    monitor = taught()
    assert not monitor.see(WINDOW + 1, metrics(grad_norm=math.inf, loss_scale=2.0**16, skipped=True))


def test_a_batch_without_targets_is_told_and_does_not_count():
    monitor, alike = taught(), taught()
    told = monitor.see(WINDOW + 1, metrics(loss=0.0, grad_norm=0.0, n_targets=0, skipped=True))
    assert told == ["no target counted; the update was skipped"]
    assert monitor.limits(WINDOW + 2) == alike.limits(WINDOW + 1)


@pytest.mark.parametrize("late", [0, 1])
def test_a_limit_is_as_late_as_the_metrics_and_reading_ahead_changes_nothing(late):
    monitor, limits = Monitor(late=late), []
    for step, (loss, norm) in enumerate(usual(60), 1):
        monitor.see(step, metrics(loss, norm))
        limits.append((monitor.limits(step), monitor.limits(step + 1)))
    # What held for a step when it was told is what was said before it.
    assert all(a[1] == b[0] for a, b in zip(limits, limits[1:], strict=False))
    assert limits[-1][1] == taught(60 - late).limits(60 - late + 1)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("at", [1, 20, 40, 150])
def test_a_monitor_goes_on_from_its_state_in_a_file(late, at):
    whole, first, rest = Monitor(late=late), Monitor(late=late), Monitor(late=late)
    for step, (loss, norm) in enumerate(usual(200), 1):
        seen = metrics(loss, math.inf if step in (at, 30) else norm, loss_scale=1.0)
        whole.see(step, seen)
        (first if step <= at else rest).see(step, seen)
        if step == at:
            rest.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        if step >= at:
            assert rest.limits(step + 1) == whole.limits(step + 1)
    assert math.isfinite(whole.limits(200)[0])


@pytest.mark.parametrize(
    "change",
    [
        None,
        {"windows": {"loss": []}},
        {"windows": {"loss": ["x"], "grad_norm": []}},
        {"after": []},
        {"after": {"x": {}}},
        {"after": {"1": {"loss": ["1"], "grad_norm": ["1", "1", "1", "1"]}}},
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(change):
    monitor = taught()
    before = monitor.state()
    with pytest.raises(InvalidValue, match="the state of a Monitor is damaged"):
        monitor.restore(change and before | change)
    assert monitor.state() == before


def test_no_warnings_were_asked_for():
    monitor = taught(warn_z=0)
    assert monitor.limits(WINDOW + 1) == (math.inf, math.inf)
    assert not monitor.see(WINDOW + 1, metrics(loss=1e9))
    for wrong in (-1, math.inf, math.nan, "6", True, None):
        with pytest.raises(InvalidValue, match="warn_z counts standard deviations"):
            Monitor(wrong)


# Speed


def test_the_arithmetic_of_gpt2_is_counted():
    # 6 * (12 * 12 * 768**2 + 50304 * 768) + 12 * 12 * 768 * 1024
    assert flop_per_token(GPTConfig.preset("gpt2")) == 741_408_768 + 113_246_208


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("A100-PCIE-40GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.1),
        ("Tesla T4", 65.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("AMD Instinct MI300X", None),
        ("cpu", None),
    ],
)
def test_the_peak_is_that_of_exactly_this_device(name, tflops):
    want = None if tflops is None else tflops * 1e12
    assert peak_flop_per_s(name, "bf16") == peak_flop_per_s(name, "fp16") == want
    assert peak_flop_per_s(name, "fp32") is None


# Sensors


class Refused(Exception):
    pass


def fake_driver(monkeypatch, power=lambda handle: 301_500, by_bus=lambda bus: f"GPU at {bus}"):
    def temperature(handle, kind):
        assert (handle, kind) == ("GPU at 0000:3B:00.0", 0)
        return 64

    runtime = SimpleNamespace(
        deviceGetPCIBusId=lambda i: ["0000:1A:00.0", "0000:3B:00.0"][i],
        getDeviceProperties=lambda i: {"name": [b"A", b"NVIDIA H200"][i]},
    )
    nvml = dict(nvmlInit=lambda: None, nvmlDeviceGetHandleByPciBusId=by_bus, NVML_TEMPERATURE_GPU=0)
    nvml |= dict(nvmlDeviceGetTemperature=temperature, nvmlDeviceGetPowerUsage=power)
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**nvml))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))


def refuse(*args):
    raise Refused


def test_the_driver_is_asked_for_the_card_that_cuda_counts(monkeypatch):
    fake_driver(monkeypatch)
    assert Sensors("cuda:1").read() == {"gpu_temperature_c": 64, "gpu_power_w": 301.5}
    assert (device_name("cuda:1"), device_name("cpu")) == ("NVIDIA H200", "cpu")


def test_what_the_driver_does_not_tell_is_left_out(monkeypatch):
    fake_driver(monkeypatch, power=refuse)
    assert Sensors("cuda:1").read() == {"gpu_temperature_c": 64}
    fake_driver(monkeypatch, by_bus=refuse)
    assert Sensors("cuda:1").read() == Sensors("cpu").read() == Sensors("hip:0").read() == {}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert Sensors("cuda:1").read() == {}


@pytest.mark.gpu
def test_the_gpu_is_warm_and_has_a_name():
    assert device_name("cuda:0")
    for name, value in Sensors("cuda:0").read().items():
        assert 0 < value < {"gpu_temperature_c": 120, "gpu_power_w": 2000}[name]
