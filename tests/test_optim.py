import math

import ml_dtypes
import numpy as np
import pytest

from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.optim import Schedule, clip_by_global_norm
from nbtrain.precision import LossScaling, resolve_dtype
from tests import reference
from tests.golden import load_golden
from tests.helpers import assert_close, randn

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_schedules_have_their_values():
    """Worked out by hand; warmup 4, total 12, lr 1, min_lr 0.2."""
    common = dict(lr=1.0, min_lr=0.2, warmup=4, total=12)
    warmup = [0.25, 0.5, 0.75, 1.0]
    linear = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2]
    wsd = [1.0] * 5 + [0.8, 0.6, 0.4, 0.2, 0.2]
    for kind, extra, after in (("linear", {}, linear), ("wsd", dict(decay=4), [*wsd[:4], *wsd[4:]])):
        schedule = Schedule(kind, **common, **extra)
        np.testing.assert_allclose([schedule.lr_at(s) for s in range(14)], warmup + after, rtol=1e-14)
    cosine = Schedule("cosine", **common)
    got = [cosine.lr_at(s) for s in (0, 4, 6, 8, 10, 12, 99)]
    root = math.sqrt(0.5)
    np.testing.assert_allclose(
        got, [0.25, 1.0, 0.6 + 0.4 * root, 0.6, 0.6 - 0.4 * root, 0.2, 0.2], rtol=1e-14
    )
    constant = Schedule("constant", lr=3.0, warmup=2)
    assert [constant.lr_at(s) for s in (0, 1, 2, 10**9)] == [1.5, 3.0, 3.0, 3.0]


def test_the_golden_run_used_the_cosine_schedule():
    golden = load_golden()
    schedule = Schedule("cosine", **golden.schedule)
    np.testing.assert_allclose([schedule.lr_at(s) for s in range(10)], golden.lrs, rtol=1e-12)


@pytest.mark.parametrize(
    "options,error,match",
    [
        (dict(kind="cosin"), InvalidValue, "constant, linear, cosine, wsd; got 'cosin'"),
        (dict(lr=-1.0), InvalidValue, "lr must be 0 or more"),
        (dict(lr=math.nan), InvalidValue, "lr must be 0 or more"),
        (dict(lr="1e-3"), InvalidType, "lr must be a number; got '1e-3'"),
        (dict(warmup=1.5), InvalidType, "warmup counts steps"),
        (dict(total=-3), InvalidValue, "total must be in 0"),
        (dict(kind="cosine"), InvalidValue, "needs total, its steps, above warmup; got total=0"),
        (dict(kind="linear", warmup=10, total=10), InvalidValue, "total=10, warmup=10"),
        (dict(kind="cosine", total=10, lr=1e-3, min_lr=1.0), InvalidValue, "Lower min_lr"),
        (dict(kind="wsd", total=10), InvalidValue, "decay=0"),
        (dict(kind="wsd", total=10, warmup=5, decay=6), InvalidValue, "decay=6, total=10, warmup=5"),
    ],
)
def test_schedules_that_cannot_be_right_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        Schedule(**options)


def test_clipping_survives_fp16(xp):
    """The square of 300 overflows fp16."""
    clipped, norm = clip_by_global_norm(xp.asarray(np.array([300], np.float16)), 1.0)
    assert clipped.dtype == np.float16 and float(clipped[0]) == 1.0 and float(norm[0]) == 300.0


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_clipping_bounds_the_norm_and_keeps_the_direction(xp, dtype, max_norm):
    (g,) = randn(xp, dtype, (777,))
    clipped, norm = clip_by_global_norm(g, max_norm)
    want = reference.global_norm([g])
    assert_close(norm, [want], np.float32)
    assert_close(clipped, reference.f64(g) * min(1, max_norm / (want + 1e-6)), dtype)
    assert clipped.dtype == dtype


@pytest.mark.parametrize("max_norm", [0, -1.0, math.nan])
def test_clipping_needs_a_positive_norm(max_norm):
    with pytest.raises(InvalidValue, match="max_norm must be above 0"):
        clip_by_global_norm(np.ones(3, np.float32), max_norm)


@pytest.mark.parametrize(
    "device,capability,want,reason",
    [
        ("cpu", None, np.float32, "CPU"),
        ("cuda:0", (9, 0), BF16, "9.0 has bf16"),
        ("cuda:1", (8, 0), BF16, "8.0 has bf16"),
        ("cuda:0", (7, 5), np.float16, "7.5 has no bf16.*scaled dynamically"),
        ("cuda:0", (12, 0), BF16, "12.0 has bf16"),
        ("hip:0", None, np.float16, "beside CuPy.*scaled dynamically"),
    ],
)
def test_auto_chooses_a_dtype_and_says_why(device, capability, want, reason):
    import re

    dtype, why = resolve_dtype("auto", device, capability)
    assert dtype == want and re.search(reason, why)


@pytest.mark.parametrize("device,capability", [("cpu", None), ("cuda:0", (9, 0)), ("hip:0", None)])
def test_a_dtype_asked_for_is_taken(device, capability):
    for name, want in (("fp32", np.float32), ("fp16", np.float16), ("bf16", BF16)):
        assert resolve_dtype(name, device, capability) == (want, "asked for")


@pytest.mark.parametrize("device,capability", [("cuda:0", (7, 0)), ("cuda:0", (7, 5))])
def test_bf16_where_there_is_none_is_refused(device, capability):
    with pytest.raises(Unavailable, match=f"bf16 was asked for, but on {device} .*fp16"):
        resolve_dtype("bf16", device, capability)


def test_unknown_dtypes_and_a_missing_capability_are_refused():
    with pytest.raises(InvalidValue, match="'fp32', 'fp16', 'bf16' or 'auto'; got 'float16'"):
        resolve_dtype("float16", "cpu")
    with pytest.raises(InvalidType, match="dtype is a name"):
        resolve_dtype(np.float16, "cpu")
    with pytest.raises(InvalidValue, match="compute capability of cuda:0"):
        resolve_dtype("auto", "cuda:0")


def test_loss_scaling_of_each_kind():
    assert LossScaling.of("auto", np.float16) == LossScaling(65536.0, 2000)
    assert LossScaling.of("auto", np.float32) == LossScaling.of("auto", BF16) == LossScaling(1.0, 0)
    assert LossScaling.of("dynamic", BF16, 7) == LossScaling(65536.0, 7)
    static = LossScaling.of(1024.0, np.float16)
    assert static == LossScaling(1024.0, 0) and not static.dynamic


def test_the_loss_scale_starts_where_its_configuration_says(xp):
    state = LossScaling.of("dynamic", np.float16).init(xp)
    assert state.value.dtype == np.float32 and state.good_steps.dtype == np.int32
    assert float(state.value[0]) == 65536 and int(state.good_steps[0]) == 0
    assert state.value.shape == state.good_steps.shape == (1,)


@pytest.mark.parametrize(
    "options,error,match",
    [
        (dict(initial=0.0), InvalidValue, "power of two.*got 0.0"),
        (dict(initial=1000), InvalidValue, "power of two.*got 1000"),
        (dict(initial=math.inf), InvalidValue, "power of two"),
        (dict(initial=True), InvalidType, "must be a number"),
        (dict(initial=0.5, growth_interval=10), InvalidValue, "between 1 and"),
        (dict(initial=2.0**25, growth_interval=10), InvalidValue, "between 1 and"),
        (dict(growth_interval=-1), InvalidValue, "growth_interval must be in"),
        (dict(growth_interval=2.0), InvalidType, "growth_interval counts steps"),
    ],
)
def test_loss_scalings_that_cannot_be_right_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        LossScaling(**options)


def test_an_unknown_loss_scaling_is_refused():
    with pytest.raises(InvalidValue, match='"dynamic" or "auto"; got \'static\''):
        LossScaling.of("static", np.float16)
