"""Every kernel of flash attention as a step launches them, for tests/compile_check.py: recorded, not run."""

import numpy as np
from numba import typeof

from nbtrain.device import FLOATS, recording
from nbtrain.device.nvidia.flash import HEAD_DIMS, flash_backward, flash_forward


def record(arch: str):
    """(kernel, numba argument types, grid, block) for 80 (mma.sync) and 90a (wgmma)."""
    found = {}
    for D in HEAD_DIMS:
        for dtype in ("fp16", "bf16"):
            for T in (1024, 1000):
                B, H = 1, 2
                qkv, out = np.empty((B, T, 3 * H * D), FLOATS[dtype]), np.empty((B, T, H * D), FLOATS[dtype])
                lse = np.empty((B, H, T), np.float32)
                with recording() as records:
                    flash_forward(qkv, H, 0.125, out, lse, arch=int(arch[:2]))
                    flash_backward(out, qkv, out, lse, H, 0.125, qkv, dbias=qkv[0, 0], arch=int(arch[:2]))
                for kernel, args, grid, block in records:
                    types = tuple(typeof(x) for x in args)
                    found[kernel, types] = (kernel, types, grid, block)
    return list(found.values())
