"""Kernels that the gate must refuse, each for one reason, and one that it must accept. See test_gate.py."""

import numpy as np
from numba import types

from nbtrain.device import block_sum, cuda, float32, kernel, load, store

F32, I16, F16 = (types.Array(t, 1, "C") for t in (types.float32, types.int16, types.float16))
THREADS = 96  # neither one wavefront nor whole wavefronts
row_sum = block_sum(THREADS, 1)


@kernel(launch_bounds=THREADS)
def healthy(x, out):
    """Sums with the block's threads, in fp16 storage."""
    store(out, cuda.blockIdx.x, row_sum(load(x, cuda.grid(1))))


@kernel(launch_bounds=THREADS)
def fp64_literal(x, out):
    i = cuda.grid(1)
    out[i] = x[i] * 0.1


@kernel(launch_bounds=THREADS)
def shuffle(x, out):
    i = cuda.grid(1)
    out[i] = x[i] + cuda.shfl_xor_sync(0xFFFFFFFF, x[i], 1)


@kernel(launch_bounds=THREADS)
def float16_index(x, out):
    i = cuda.grid(1)
    out[i] = float32(x[i])


@kernel(launch_bounds=THREADS)
def float16_shared(x, out):
    buf = cuda.shared.array(THREADS, types.float16)
    buf[cuda.threadIdx.x] = x[cuda.grid(1)]
    cuda.syncthreads()
    out[cuda.grid(1)] = buf[0]


@kernel(launch_bounds=THREADS)
def scratch(x, out):
    """A local array that is indexed by a value cannot live in registers."""
    a = cuda.local.array(200, float32)
    for k in range(200):
        a[k] = x[k]
    out[0] = a[int(x[200])] + a[int(x[201])]


def _many_values(n):
    """A kernel with `n` values that live across a barrier."""
    lines = ["def spill(x, out):", "    i = cuda.threadIdx.x"]
    lines += [f"    v{k} = x[i + {k}]" for k in range(n)] + ["    cuda.syncthreads()"]
    lines += [f"    out[i + {k}] = v{k} * v{n - 1 - k}" for k in range(n)]
    scope = {"cuda": cuda}
    exec("\n".join(lines), scope)
    return scope["spill"]


spill = kernel(launch_bounds=1024)(_many_values(260))  # a thread in a block of 1024 has at most 128 registers


@kernel(launch_bounds=THREADS)
def shared_memory(x, out):
    buf = cuda.shared.array(64 * 256 + 1, float32)
    k = cuda.threadIdx.x
    while k < 64 * 256 + 1:
        buf[k] = x[k]
        k += THREADS
    cuda.syncthreads()
    out[cuda.threadIdx.x] = buf[64 * 256 - cuda.threadIdx.x]


@kernel(launch_bounds=THREADS)
def block(x, out):
    out[cuda.grid(1)] = x[cuda.grid(1)]


def record(only=""):
    calls = [
        (healthy, (I16, F32), THREADS),
        (float16_index, (F16, F32), THREADS),
        (block, (F32, F32), (THREADS, 2)),
    ]
    calls += [(k, (F32, F32), THREADS)
              for k in (fp64_literal, shuffle, float16_shared, scratch, spill, shared_memory)]  # fmt: skip
    return [
        (k, signature, np.int32(1), threads) for k, signature, threads in calls if only in k.py_func.__name__
    ]
