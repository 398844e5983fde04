"""One call of every launcher, at GPT-2's sizes: what the compile checks record and compile. Nothing here runs a kernel.

Arrays are `np.empty`, never touched, so their size costs nothing. An operator's author adds a function named after it.
"""

import numpy as np

from nbtrain.device import FLOATS, recording

N, C, V, T, H = 2048, 768, 50304, 1024, 12


def empty(dtype, *shapes):
    arrays = [np.empty(shape, dtype) for shape in shapes]
    return arrays[0] if len(arrays) == 1 else arrays


def layernorm(dtype):
    from nbtrain.ops.layernorm import layernorm_backward, layernorm_forward

    for channels in (768, 1600, 767):  # whole groups, ragged groups, rows that are not aligned
        x, w = empty(dtype, (N, channels), (channels,))
        y, mean, rstd, total = layernorm_forward(x, w, w, residual=x)
        layernorm_forward(x, w, w)
        layernorm_backward(x, total, w, mean, rstd, dresidual=x)
        layernorm_backward(x, total, w, mean, rstd)


CALLS = [layernorm]


def record(only: str = "", dtypes=tuple(FLOATS)):
    """Every distinct (kernel, numba argument types, grid, block) of `CALLS` whose names contain `only`."""
    from numba import typeof

    found = {}
    for call in CALLS:
        if only in call.__name__:
            for dtype in dtypes:
                with recording() as records:
                    call(FLOATS[dtype])
                for kernel, args, grid, block in records:
                    types = tuple(typeof(x) for x in args)
                    found[kernel, types] = (kernel, types, grid, block)
    return list(found.values())
