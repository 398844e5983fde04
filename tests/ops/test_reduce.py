"""The kernel that adds up what other kernels' blocks have summed."""

import ml_dtypes
import numpy as np
import pytest

from nbtrain.device.reduce import READS, _sum_blocks_kernel, sum_blocks
from tests.helpers import assert_close, randn

_, X, Y = _sum_blocks_kernel()
A_TURN = READS * Y  # blocks that a block's threads read at a time


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("outs", [1, 2, 3])
@pytest.mark.parametrize("blocks", [1, Y, A_TURN - 1, A_TURN, A_TURN + 1, 2 * A_TURN + 3])
def test_every_block_is_added_once(kernel_xp, blocks, outs, dtype):
    C = 2 * X + 1
    (partial,) = randn(kernel_xp, np.float32, (outs, blocks, C))
    got = [kernel_xp.full(C, np.nan, dtype) for _ in range(outs)]
    sum_blocks(partial.ravel(), blocks, *got)
    for i, (a, b) in enumerate(zip(got, partial, strict=True)):
        assert_close(a, b.astype(np.float64).sum(0), dtype, name=f"out {i}")
