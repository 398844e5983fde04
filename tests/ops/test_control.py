import math

import numpy as np
import pytest

from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.ops.control import control
from nbtrain.optim import Schedule
from tests.helpers import assert_close
from tests.reference import host

CONSTANT = Schedule("constant", lr=1e-3)
SCHEDULES = [
    Schedule("constant", lr=6e-4),
    Schedule("constant", lr=6e-4, warmup=7),
    Schedule("linear", lr=1e-3, min_lr=1e-4, warmup=10, total=100),
    Schedule("linear", lr=1e-3, total=3),
    Schedule("cosine", lr=6e-4, min_lr=6e-5, warmup=20, total=200),
    Schedule("cosine", lr=6e-4, warmup=700, total=600_000),
    Schedule("wsd", lr=2e-3, min_lr=2e-5, warmup=5, total=50, decay=10),
    Schedule("wsd", lr=2e-3, total=40, decay=40),
]


def run(
    xp, *, norm=1.0, loss_sum=6.0, counts=(3, -1, -1), step=0, updates=0, loss_scale=1.0, good_steps=0,
    schedule=CONSTANT, **options,
):  # fmt: skip
    """What control says, on the host: hyper, metrics, counts, step, updates, loss_scale, good_steps."""
    out = control(
        *inputs(xp, norm, loss_sum, counts, step, updates, loss_scale, good_steps),
        schedule=schedule,
        out=poisoned(xp),
        **options,
    )
    hyper, metrics, tally, *numbers = map(host, out)
    return hyper, metrics, tally.tolist(), *(x.item() for x in numbers)


def inputs(xp, norm=1.0, loss_sum=6.0, counts=(3, -1, -1), step=0, updates=0, loss_scale=1.0, good_steps=0):
    floats, whole = np.float32, np.int32
    kinds = (floats, floats, whole, whole, whole, floats, whole)
    values = ([norm], [loss_sum], counts, [step], [updates], [loss_scale], [good_steps])
    return [xp.asarray(np.array(v, kind)) for v, kind in zip(values, kinds, strict=True)]


def poisoned(xp):
    floats = [xp.full(n, np.nan, np.float32) for n in (8, 8, 1)]
    whole = [xp.full(n, -77, np.int32) for n in (3, 1, 1, 1)]
    return floats[0], floats[1], whole[0], whole[1], whole[2], floats[2], whole[3]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.kind}-{s.total}")
def test_the_rate_follows_the_schedule(xp, schedule):
    """To 16 eps of itself; at the end of a cosine lr_at itself cancels, to eps(float64) * lr."""
    marks = {0, 1, schedule.warmup, schedule.total // 2, schedule.total - schedule.decay, schedule.total}
    steps = sorted({s + d for s in marks for d in (-1, 0, 1) if s + d >= 0} | {10**6})
    for step in steps:
        hyper, metrics, *_ = run(xp, step=step, schedule=schedule)
        want = schedule.lr_at(step)
        assert abs(float(hyper[0]) - want) <= 2.0**-19 * want + 2.0**-52 * schedule.lr, f"step {step}"
        assert metrics[2] == hyper[0]


def test_the_rate_never_leaves_its_bounds(xp):
    schedule = Schedule("cosine", lr=1e-3, min_lr=1e-3, total=100)
    assert {float(run(xp, step=s, schedule=schedule)[0][0]) for s in range(0, 101, 10)} == {
        float(np.float32(1e-3))
    }


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.95, 0.999, 0.9999, 0.999999])
def test_bias_corrections_match_float64(xp, beta):
    for updates in (0, 1, 2, 6, 9, 50, 69, 400, 500, 693, 6930, 10**5, 10**6):
        hyper, *_ = run(xp, updates=updates, betas=(beta, 0.95))
        t = updates + 1
        want = [1 / -np.expm1(t * np.log(b)) if b else 1.0 for b in (beta, 0.95)]
        assert np.max(np.abs(hyper[3:5] / want - 1)) < 1e-6, f"t {t}"


def test_clipping_divides_the_scale_out_first(xp):
    """Loss scale 65536, true norm 0.5, clip 1: nothing is clipped."""
    hyper, metrics, *_ = run(xp, norm=32768.0, loss_scale=65536.0, clip=1.0)
    assert hyper[1] == 2.0**-16 and hyper[2] == 0
    assert metrics[1] == 0.5 and metrics[3] == 65536 and metrics[5] == 1


@pytest.mark.parametrize("norm,clip", [(300.0, 1.0), (2.0, 0.5), (1.0, 1.0), (0.9, 1.0), (0.0, 1.0)])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_a_large_norm_is_clipped(xp, norm, clip, loss_scale):
    hyper, metrics, *_ = run(xp, norm=norm * loss_scale, clip=clip, loss_scale=loss_scale)
    factor = min(1, clip / (norm + 1e-6))
    assert_close(hyper[1:2], [factor / loss_scale], np.float32)
    assert_close(metrics[[1, 5]], [norm, factor], np.float32)


@pytest.mark.parametrize("clip", [0, 0.0, math.inf])
def test_no_clip_keeps_the_gradient(xp, clip):
    hyper, *_ = run(xp, norm=1e30, clip=clip)
    assert hyper[1] == 1


def test_the_loss_is_the_mean_over_counted_targets(xp):
    _, metrics, counts, *_ = run(xp, loss_sum=7.5, counts=(5, -1, -1))
    assert metrics[0] == 1.5 and counts == [5, -1, -1]


def test_a_good_step_counts_as_attempt_and_update(xp):
    hyper, metrics, _, step, updates, loss_scale, good_steps = run(
        xp, step=12, updates=9, loss_scale=8.0, good_steps=4, growth_interval=2000
    )
    assert (step, updates, loss_scale, good_steps) == (13, 10, 8.0, 5)
    assert hyper[2] == 0 and metrics[4] == 0


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_skips_and_halves_the_scale(xp, norm):
    hyper, metrics, _, step, updates, loss_scale, good_steps = run(
        xp, norm=norm, step=12, updates=9, loss_scale=65536.0, good_steps=4, growth_interval=2000, clip=1.0
    )
    assert (step, updates, loss_scale, good_steps) == (13, 9, 32768.0, 0)
    assert hyper[1] == 0 and hyper[2] == 1
    assert metrics[3] == 65536 and metrics[4] == 1 and not np.isfinite(metrics[1])
    assert np.isfinite(hyper).all()


@pytest.mark.parametrize("norm", [1.0, math.inf])
@pytest.mark.parametrize("counts", [(0, -1, -1), (3, 0, -1), (3, -1, 17)])
def test_an_unusable_batch_skips_and_leaves_the_scale_alone(xp, counts, norm):
    hyper, metrics, tally, step, updates, loss_scale, good_steps = run(
        xp, norm=norm, loss_sum=0.0, counts=counts, step=3, updates=2, loss_scale=64.0, good_steps=1999,
        growth_interval=2000,
    )  # fmt: skip
    assert (step, updates, loss_scale, good_steps) == (4, 2, 64.0, 1999)
    assert hyper[2] == 1 and metrics[4] == 1 and metrics[0] == 0 and tally == list(counts)


@pytest.mark.parametrize(
    "norm,scale,good_steps,want",
    [
        (1.0, 1024.0, 8, (1024.0, 9)),
        (1.0, 1024.0, 9, (2048.0, 0)),
        (1.0, 2.0**24, 9, (2.0**24, 0)),
        (1.0, 2.0**23, 9, (2.0**24, 0)),
        (math.inf, 2.0, 9, (1.0, 0)),
        (math.inf, 1.0, 9, (1.0, 0)),
    ],
)
def test_a_dynamic_scale_moves_between_1_and_2_to_the_24(xp, norm, scale, good_steps, want):
    *_, loss_scale, good_steps = run(
        xp, norm=norm, loss_scale=scale, good_steps=good_steps, growth_interval=10
    )
    assert (loss_scale, good_steps) == want


@pytest.mark.parametrize("norm", [1.0, math.nan])
def test_a_static_scale_stays(xp, norm):
    *_, loss_scale, good_steps = run(xp, norm=norm, loss_scale=2.0**30, good_steps=0)
    assert (loss_scale, good_steps) == (2.0**30, 0)


@pytest.mark.filterwarnings("ignore:.*overflow encountered")  # NumPy's, in the simulator
def test_a_norm_that_overflows_when_unscaled_is_not_finite(xp):
    hyper, metrics, *_ = run(xp, norm=3e38, loss_scale=0.125, clip=1.0)
    assert hyper[2] == 1 and metrics[1] == np.inf


@pytest.mark.parametrize(
    "limits, skip",
    [
        ((math.inf, math.inf), False),
        ((2.0, 0.5), False),  # exactly at both
        ((1.9, 0.5), True),
        ((2.0, 0.4), True),
        ((math.nan, math.nan), False),
    ],
)
def test_a_step_above_a_limit_is_skipped_and_the_scale_goes_on(xp, limits, skip):
    """Loss 6 / 3, norm 0.5 without the scale; a finite gradient is a good step to the scale either way."""
    hyper, metrics, _, step, updates, loss_scale, good_steps = run(
        xp, norm=32768.0, loss_scale=65536.0, step=12, updates=9, good_steps=4, growth_interval=2000,
        limits=xp.asarray(np.array(limits, np.float32)),
    )  # fmt: skip
    assert (step, updates, loss_scale, good_steps) == (13, 9 if skip else 10, 65536.0, 5)
    assert hyper[2] == metrics[4] == skip and (hyper[1] == 0) == skip
    assert metrics[:2].tolist() == [2.0, 0.5]


def test_a_limit_does_not_hide_a_norm_that_is_not_finite(xp):
    *_, loss_scale, good_steps = run(
        xp, norm=math.inf, loss_scale=64.0, growth_interval=9, limits=xp.asarray(np.float32([1, 1]))
    )
    assert (loss_scale, good_steps) == (32.0, 0)


def test_fresh_arrays_leave_the_inputs_and_in_place_gives_the_same(xp):
    given = inputs(xp, step=5, updates=4, loss_scale=2.0, good_steps=1)
    before = [x.copy() for x in given]
    options = dict(schedule=SCHEDULES[4], clip=0.5, growth_interval=2)
    want = control(*given, **options)
    assert all((a == b).all() for a, b in zip(given, before, strict=True))
    out = (*poisoned(xp)[:3], *given[3:])
    got = control(*given, **options, out=out)
    assert all(a is b for a, b in zip(got, out, strict=True))
    assert all((a == b).all() for a, b in zip(got, want, strict=True))
    assert [float(x[0]) for x in want[3:]] == [6, 5, 4, 0]


def test_rejects_shapes_dtypes_and_numbers_that_cannot_be_right(xp):
    norm, loss_sum, counts, *state = inputs(xp)
    with pytest.raises(InvalidValue, match=r"counts \(3,\).*counts int32 \(2,\)"):
        control(norm, loss_sum, counts[:2], *state, schedule=CONSTANT)
    with pytest.raises(InvalidType, match="counts float32"):
        control(norm, loss_sum, counts.astype(np.float32), *state, schedule=CONSTANT)
    with pytest.raises(InvalidValue, match=r"limits \(2,\)"):
        control(norm, loss_sum, counts, *state, schedule=CONSTANT, limits=norm)
    for options in (dict(betas=(0.9, 1.0)), dict(clip=-1.0), dict(clip=math.nan), dict(growth_interval=-1)):
        with pytest.raises(InvalidValue, match="control expects betas"):
            control(norm, loss_sum, counts, *state, schedule=CONSTANT, **options)
