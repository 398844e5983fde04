"""AdamW, with the 16-bit copy of the parameters written in the same pass (Loshchilov and Hutter, 2019).

    g' = factor * g
    m' = beta1 * m + (1 - beta1) * g'              v' = beta2 * v + (1 - beta2) * g' ** 2
    step = m' / (1 - beta1 ** t) / (sqrt(v' / (1 - beta2 ** t)) + eps)
    master' = master - lr * (step + weight_decay * master)
    params' = master', rounded to storage

n = elements of the whole model in one flat array, a multiple of 256. A tile is 256 of them in a row.
g, params: (n,) fp32, fp16 or bf16. master, m, v: (n,) fp32. decay: (n / 256,) uint8, 0 where a tile has no
weight decay. hyper: (8,) fp32 = (lr, factor, skip, 1 / (1 - beta1 ** t), 1 / (1 - beta2 ** t), unused …), on
the device: lr and factor (clipping and the loss scale) are known there alone. Where skip is not 0, master, m
and v stay as they are, and g is not read. Arithmetic is fp32.
"""

import functools
import math

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
    same_memory,
    tuned,
    twin,
)
from nbtrain.device.cpu import span, task_count
from nbtrain.errors import InvalidValue

TILE = 256
ZERO = np.float32(0)

# ----------------------------------------------------------------------------
# GPU kernels


@functools.cache
def _adamw_kernel(aligned: bool, in_place: bool, with_copy: bool, zero_grad: bool):
    """Eight elements a thread."""
    T, _ = tuned("adamw")
    load8, store8 = row_access(aligned)

    @kernel(launch_bounds=T)
    def adamw(
        g, master, m, v, decay, hyper, new_master, new_m, new_v, params, n, b1, c1, b2, c2, eps, weight_decay
    ):
        i = (cuda.blockIdx.x * T + cuda.threadIdx.x) * 8
        if i < n:
            applied = hyper[2] == ZERO
            ga = cuda.local.array(8, float32)
            pa = cuda.local.array(8, float32)
            ma = cuda.local.array(8, float32)
            va = cuda.local.array(8, float32)
            if applied or not in_place:
                load8(pa, 0, master, i, n - i)
                load8(ma, 0, m, i, n - i)
                load8(va, 0, v, i, n - i)
                if applied:
                    load8(ga, 0, g, i, n - i)
                    lr, factor, r1, r2 = hyper[0], hyper[1], hyper[3], hyper[4]
                    wd = weight_decay if decay[i // TILE] != 0 else ZERO
                    for j in range(8):
                        x = ga[j] * factor
                        ma[j] = b1 * ma[j] + c1 * x
                        va[j] = b2 * va[j] + c2 * x * x
                        step = ma[j] * r1 / (math.sqrt(va[j] * r2) + eps)
                        pa[j] -= lr * (step + wd * pa[j])  # 1 - lr * wd would lose digits of lr * wd
                store8(new_master, i, pa, 0, n - i)
                store8(new_m, i, ma, 0, n - i)
                store8(new_v, i, va, 0, n - i)
                if with_copy:
                    store8(params, i, pa, 0, n - i)
            if zero_grad:
                for j in range(8):
                    ga[j] = ZERO
                store8(g, i, ga, 0, n - i)

    return adamw, T


# ----------------------------------------------------------------------------
# CPU twins


@twin(writes="")
def _adamw_cpu(g, master, m, v, decay, hyper, numbers, new_master, new_m, new_v, in_place, tasks):
    b1, c1, b2, c2, eps, weight_decay = numbers
    lr, factor, applied, r1, r2 = hyper[0], hyper[1], hyper[2] == ZERO, hyper[3], hyper[4]
    for t in prange(tasks):
        first, last = span(t, tasks, decay.size)
        for tile in range(first, last):
            i, j = tile * TILE, (tile + 1) * TILE
            G, P, M, V = g[i:j], new_master[i:j], new_m[i:j], new_v[i:j]
            if not in_place:
                for k in range(TILE):
                    P[k] = master[i + k]
                    M[k] = m[i + k]
                    V[k] = v[i + k]
            if applied:
                wd = weight_decay if decay[tile] != 0 else ZERO
                for k in range(TILE):
                    x = G[k] * factor
                    M[k] = b1 * M[k] + c1 * x
                    V[k] = b2 * V[k] + c2 * x * x
                    P[k] -= lr * (M[k] * r1 / (np.sqrt(V[k] * r2) + eps) + wd * P[k])


# ----------------------------------------------------------------------------
# Launchers


def adamw(
    g,
    master,
    m,
    v,
    params,
    decay,
    hyper,
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    zero_grad: bool = False,
    out=None,
):
    """Returns `(master, m, v, params)` after one update.

    Of `params` only the dtype counts. In fp32 `params` is `master`: the same buffer, in `out` as well.
    `out` gives the four arrays to write, which may be the inputs. A skipped update leaves arrays that are
    updated in place untouched; fresh ones get copies. `zero_grad` writes zeros over g after its use, and when
    the update is skipped.
    """
    g, master, m, v, params, decay, hyper = as_arrays(g, master, m, v, params, decay, hyper)
    n, tiles = expect(
        "adamw",
        "g (n,) float, master (n,) fp32, m (n,) fp32, v (n,) fp32, params (n,) float, decay (tiles,) uint8, "
        "hyper (8,) fp32",
        *(g, master, m, v, params, decay, hyper),
        hint="Lay all parameters in one flat array.",
    )
    if n != tiles * TILE or not n:
        raise InvalidValue(
            f"adamw expects n = {TILE} elements for each flag of decay; got n = {n} and {tiles} flags. "
            f"Pad the parameters to a multiple of {TILE} and give each tile a flag."
        )
    b1, b2 = betas
    if not (0 <= b1 < 1 and 0 <= b2 < 1 and eps > 0 and math.isfinite(eps + weight_decay)):
        raise InvalidValue(
            "adamw expects betas in [0, 1), eps > 0 (padding has m = v = 0) and a finite weight_decay; got "
            f"betas = {betas}, eps = {eps}, weight_decay = {weight_decay}."
        )
    xp = array_module(g)
    if out is None:
        out = [xp.empty_like(x) for x in (master, m, v)]
        out.append(out[0] if params.dtype == np.float32 else xp.empty_like(params))
    new_master, new_m, new_v, new_params = out
    expect(
        "adamw's out",
        "master (n,) fp32, m (n,) fp32, v (n,) fp32, new params (n,), params (n,)",
        *(*out, params),
    )
    in_place = all(map(same_memory, (master, m, v, params), out))
    with_copy = not same_memory(new_params, new_master)
    numbers = [np.float32(x) for x in (b1, 1 - b1, b2, 1 - b2, eps, weight_decay)]
    if on_gpu(g):
        whole = aligned(n, g, master, m, v, *out)
        update, T = _adamw_kernel(whole, in_place, with_copy, bool(zero_grad))
        arrays = g, master, m, v, decay, hyper, new_master, new_m, new_v, new_params if with_copy else hyper
        launch(update, -(-n // (8 * T)), T, *arrays, n, *numbers)
    else:
        if not (in_place and hyper[2] != 0):
            tasks = task_count(tiles, 64)
            _adamw_cpu(
                g, master, m, v, decay, hyper, tuple(numbers), new_master, new_m, new_v, in_place, tasks
            )
            if with_copy:
                with np.errstate(over="ignore"):  # beyond fp16's range is infinity, as on the GPU
                    new_params[...] = new_master
        if zero_grad:
            g[...] = 0
    return tuple(out)
