"""The scalars of one update: learning rate, clipping, loss scale, bias correction, whether to update at all.

    norm = |g| / loss_scale                                g: the gradients of loss_scale * loss
    factor = min(1, clip / (norm + 1e-6)) / loss_scale
    loss = loss_sum / max(n_targets, 1)
    skip = norm is not finite, or no target counted, or an id lies outside the vocabulary,
           or loss > limits[0], or norm > limits[1]

The learning rate at step s, the attempts before this one, with W = warmup, T = total, D = decay steps:

    s < W       lr * (s + 1) / W
    constant    lr
    linear      min_lr + (lr - min_lr) * r                 r = (T - s) / (T - W), in 0 … 1
    cosine      min_lr + (lr - min_lr) * sin(pi r / 2)**2  the same r; (1 + cos(pi (1 - r))) / 2 would cancel
    wsd         min_lr + (lr - min_lr) * r                 r = (T - s) / D, in 0 … 1: warmup, stable, decay

Loss scaling (Micikevicius et al., 2018): when the norm is not finite a dynamic scale halves; after
`growth_interval` good steps in a row it doubles. A batch without targets, or with bad ids, says nothing about
the scale and leaves it alone; a step above a limit counts as a good one. Bias correction counts applied
updates, the schedule attempts.

norm, loss_sum, loss_scale: (1,) fp32. step, updates, good_steps: (1,) int32. limits: (2,) fp32, inf for none.
counts: (3,) int32 = (targets that count, first bad token, first bad target); no bad one is -1.
hyper: (8,) fp32 = (lr, factor, skip, 1 / (1 - beta1**t), 1 / (1 - beta2**t), 0, 0, 0), what adamw reads;
t = updates + 1. factor is 0 where skip is 1.
metrics: (8,) fp32 = (loss, norm, lr, loss_scale, skip, clip factor, 0, 0); the scale that this step used.
"""

import functools
import math

import numpy as np

from nbtrain.device import array_module, as_arrays, expect, float32, kernel, launch, on_gpu
from nbtrain.device.cpu import routine
from nbtrain.errors import InvalidValue

ZERO, ONE, HALF, TWO = np.float32(0), np.float32(1), np.float32(0.5), np.float32(2)
HALF_PI, TINY = np.float32(math.pi / 2), np.float32(1e-6)
LARGEST = np.finfo(np.float32).max
MIN_SCALE, MAX_SCALE = np.float32(1), np.float32(2**24)
# sin(x) / x = 1 - x**2/3! + …, to 4e-8 on 0 … pi/2.
S1, S2, S3, S4, S5 = (np.float32((-1) ** k / math.factorial(2 * k + 1)) for k in range(1, 6))
# (1 - exp(-x)) / x = 1 - x/2! + x**2/3! - …, to 2e-7 on 0 … 0.5.
E1, E2, E3, E4, E5, E6 = (np.float32((-1) ** k / math.factorial(k + 1)) for k in range(1, 7))

# ----------------------------------------------------------------------------
# GPU kernel and CPU twin: one function for one thread. Polynomials, because CUDA's sin takes a stack, and so
# that both sides round alike.


def _control(
    norm, loss_sum, counts, step, updates, loss_scale, good_steps, limits,
    hyper, metrics, tally, new_step, new_updates, new_loss_scale, new_good_steps,
    lr, min_lr, warmup, end, span, cosine, clip, rate1, rate2, growth_interval,
):  # fmt: skip
    s = step[0]
    if s < warmup:
        rate = lr * (float32(s + 1) / float32(warmup))
    else:
        r = min(ONE, max(ZERO, float32(end - s) / span))
        if cosine != 0:
            x = HALF_PI * r
            y = x * x
            r = x * (ONE + y * (S1 + y * (S2 + y * (S3 + y * (S4 + y * S5)))))
            r = min(ONE, r * r)
        rate = min_lr + (lr - min_lr) * r

    scale = loss_scale[0]
    unscaled = norm[0] / scale
    finite = unscaled <= LARGEST  # false for NaN
    usable = counts[0] > 0 and counts[1] < 0 and counts[2] < 0
    loss = loss_sum[0] / float32(max(counts[0], 1))
    outlier = loss > limits[0] or unscaled > limits[1]
    applied = finite and usable and not outlier
    factor = ZERO
    if applied:
        factor = min(ONE, clip / (unscaled + TINY))
    hyper[0] = rate
    hyper[1] = factor / scale
    hyper[2] = ZERO if applied else ONE
    t = float32(updates[0] + 1)
    for k in range(2):
        x = t * (rate1 if k == 0 else rate2)  # beta**t = exp(-x)
        if x < HALF:
            c = x * (ONE + x * (E1 + x * (E2 + x * (E3 + x * (E4 + x * (E5 + x * E6))))))
        else:
            c = ONE - float32(math.exp(-x))
        hyper[3 + k] = ONE / c
    for k in range(5, 8):
        hyper[k] = ZERO

    metrics[0] = loss
    metrics[1] = unscaled
    metrics[2] = rate
    metrics[3] = scale
    metrics[4] = ZERO if applied else ONE
    metrics[5] = factor
    metrics[6] = ZERO
    metrics[7] = ZERO
    for k in range(3):
        tally[k] = counts[k]

    good = good_steps[0]
    if growth_interval > 0 and usable:
        if finite:
            good += 1
            if good >= growth_interval:
                scale = min(scale * TWO, MAX_SCALE)
                good = 0
        else:
            scale = max(scale * HALF, MIN_SCALE)
            good = 0
    new_step[0] = s + 1
    new_updates[0] = updates[0] + (1 if applied else 0)
    new_loss_scale[0] = scale
    new_good_steps[0] = good


_control_cpu = routine(_control)


@functools.cache
def _control_kernel():
    return kernel(launch_bounds=1, fastmath=False)(_control)  # without assumptions about NaN


# ----------------------------------------------------------------------------
# Launchers


def control(
    norm, loss_sum, counts, step, updates, loss_scale, good_steps, *,
    schedule, clip: float = 0.0, betas: tuple[float, float] = (0.9, 0.95), growth_interval: int = 0,
    limits=None, out=None,
):  # fmt: skip
    """Returns `(hyper, metrics, counts, step, updates, loss_scale, good_steps)` after this attempt.

    `schedule` has the fields of `nbtrain.optim.Schedule`, valid ones. `clip`: the largest norm, 0 for any.
    `growth_interval`: good steps before a dynamic loss scale doubles, 0 for a static one. `limits`: (2,)
    fp32, the largest loss and norm of a step that is applied, None for any. `out` gives the seven arrays to
    write; the last four may be the inputs.
    """
    inputs = as_arrays(norm, loss_sum, counts, step, updates, loss_scale, good_steps)
    xp = array_module(inputs[0])
    inputs = *inputs, *as_arrays(xp.full(2, math.inf, np.float32) if limits is None else limits)
    expect(
        "control",
        "norm (1,) fp32, loss_sum (1,) fp32, counts (3,) int32, step (1,) int32, updates (1,) int32, "
        "loss_scale (1,) fp32, good_steps (1,) int32, limits (2,) fp32",
        *inputs,
    )
    b1, b2 = betas
    if not (0 <= b1 < 1 and 0 <= b2 < 1 and clip >= 0 and growth_interval >= 0):
        raise InvalidValue(
            f"control expects betas in [0, 1), clip >= 0 and growth_interval >= 0; got betas = {betas}, "
            f"clip = {clip}, growth_interval = {growth_interval}."
        )
    if out is None:
        eights = [xp.empty(8, np.float32) for _ in range(2)]
        out = *eights, *(xp.empty_like(x) for x in inputs[2:7])
    expect(
        "control's out",
        "hyper (8,) fp32, metrics (8,) fp32, counts (3,) int32, step (1,) int32, updates (1,) int32, "
        "loss_scale (1,) fp32, good_steps (1,) int32, norm (1,) fp32",
        *out,
        inputs[0],
    )
    numbers = (
        *_schedule_numbers(schedule),
        np.float32(clip or math.inf),
        _rate(b1),
        _rate(b2),
        growth_interval,
    )
    if on_gpu(inputs[0]):
        launch(_control_kernel(), 1, 1, *inputs, *out, *numbers)
    else:
        _control_cpu(*inputs, *out, *numbers)
    return tuple(out)


def _schedule_numbers(schedule):
    """lr, min_lr, warmup, the step that reaches min_lr, the steps that it takes, whether along a cosine."""
    end, span = schedule.total, max(schedule.total - schedule.warmup, 1)
    if schedule.kind == "constant":
        end, span = 2**31 - 1, 1
    elif schedule.kind == "wsd":
        span = max(schedule.decay, 1)
    lr, min_lr, span = np.float32(schedule.lr), np.float32(schedule.min_lr), np.float32(span)
    return lr, min_lr, schedule.warmup, end, span, int(schedule.kind == "cosine")


def _rate(beta):
    return np.float32(-math.log(beta) if beta > 0 else math.inf)
