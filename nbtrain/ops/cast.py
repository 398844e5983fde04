"""Casting with a factor: 16-bit gradients to fp32, unscaled, and added up over micro-batches.

    out = x * factor          or          out = out + x * factor

x, out: (n,), each fp32, fp16 or bf16. factor: one fp32 number on the device, where the loss scale is known.
Arithmetic is fp32; what does not fit in 16 bits becomes infinite.
"""

import functools
import numbers

import numpy as np

from nbtrain.device import (
    aligned,
    array_module,
    as_arrays,
    cuda,
    expect,
    float32,
    kernel,
    launch,
    on_gpu,
    prange,
    row_access,
    tuned,
    twin,
)
from nbtrain.device.cpu import span, task_count

# ----------------------------------------------------------------------------
# GPU kernels


@functools.cache
def _cast_kernel(aligned: bool, accumulate: bool):
    """Eight elements a thread; the last, ragged eight one by one."""
    T, _ = tuned("cast")
    load8, store8 = row_access(aligned)
    load_ragged, store_ragged = row_access(False)

    @kernel(launch_bounds=T, fastmath=False)  # fastmath could drop a nan
    def cast_and_scale(x, factor, n, out):
        a = cuda.local.array(8, float32)
        b = cuda.local.array(8, float32)
        i = (cuda.blockIdx.x * T + cuda.threadIdx.x) * 8
        if i < n:
            whole = i + 8 <= n
            if whole:
                load8(a, 0, x, i, 8)
                if accumulate:
                    load8(b, 0, out, i, 8)
            else:
                load_ragged(a, 0, x, i, n - i)
                if accumulate:
                    load_ragged(b, 0, out, i, n - i)
            for j in range(8):
                r = a[j] * factor[0]
                b[j] = b[j] + r if accumulate else r
            if whole:
                store8(out, i, b, 0, 8)
            else:
                store_ragged(out, i, b, 0, n - i)

    return cast_and_scale, T


# ----------------------------------------------------------------------------
# CPU twins


@twin(writes="out")
def _cast_cpu(x, factor, out, accumulate, tasks):
    f = factor[0]
    for t in prange(tasks):
        first, last = span(t, tasks, x.size)
        a, b = x[first:last], out[first:last]
        if accumulate:
            for i in range(last - first):
                b[i] += a[i] * f
        else:
            for i in range(last - first):
                b[i] = a[i] * f


# ----------------------------------------------------------------------------
# Launchers


def cast_and_scale(x, factor, *, out, accumulate: bool = False):
    """Returns `out` = x * factor, or out + x * factor with `accumulate`. out may be x.

    `factor` is a number, or a () or (1,) fp32 array on the device of x.
    """
    x, out = as_arrays(x, out)
    xp = array_module(x)
    if isinstance(factor, numbers.Real):
        factor = xp.full(1, factor, np.float32)
    (factor,) = as_arrays(factor)
    if factor.ndim == 0:
        factor = factor.reshape(1)
    spec = "x (n,) float, factor (1,) fp32, out (n,) float"
    n, *_ = expect("cast_and_scale", spec, x, factor, out, hint="Flatten with .reshape(-1).")
    if on_gpu(x):
        cast, T = _cast_kernel(aligned(8, x, out), accumulate)
        launch(cast, -(-n // (8 * T)), T, x, factor, n, out)
    else:
        _cast_cpu(x, factor, out, accumulate, task_count(n, 65536))
    return out
