"""Counts the targets of a batch and finds ids outside the vocabulary, without a read by the host.

    n     = number of targets that are neither ignore_index nor bad
    dloss = loss_scale / max(n, 1)          bad: outside 0..vocab_size-1, for a target and not ignore_index

tokens, targets: (A, B, T) int32, all micro-batches. loss_scale: (1,) or () fp32, dloss: (1,) fp32.
counts: (3,) int32 = (n, flat position of the first bad token or -1, that of the first bad target or -1).
`nan_if_bad` makes a loss nan where counts tells of a bad id.
"""

import functools

import numpy as np

from nbtrain.device import (
    array_module,
    as_arrays,
    cuda,
    device_function,
    expect,
    float32,
    int32,
    kernel,
    launch,
    on_gpu,
    tuned,
)
from nbtrain.errors import InvalidValue

LAST = 2**31 - 1  # as a position: none
NAN = np.float32(np.nan)

# ----------------------------------------------------------------------------
# GPU kernels


@functools.cache
def _fold(T: int):
    @device_function
    def fold_counts(n, bad_token, bad_target):
        """(sum, least, least) over a block of T threads, T a power of two; right in thread 0 alone."""
        buf = cuda.shared.array((3, T), int32)
        lane = cuda.threadIdx.x
        buf[0, lane] = n
        buf[1, lane] = bad_token
        buf[2, lane] = bad_target
        half = T // 2
        while half > 0:
            cuda.syncthreads()
            if lane < half:
                buf[0, lane] += buf[0, lane + half]
                buf[1, lane] = min(buf[1, lane], buf[1, lane + half])
                buf[2, lane] = min(buf[2, lane], buf[2, lane + half])
            half //= 2
        return buf[0, lane], buf[1, lane], buf[2, lane]

    return fold_counts


@functools.cache
def _block_kernel(checked: bool):
    """partial[3 * b :] = what block b found among its share of the batch, which threads read side by side."""
    T, _ = tuned("batch_check")
    fold = _fold(T)

    @kernel(launch_bounds=T)
    def batch_check_block(tokens, targets, partial, N, vocab_size, ignore_index):
        n, bad_token, bad_target = int32(0), int32(LAST), int32(LAST)
        i = cuda.blockIdx.x * T + cuda.threadIdx.x
        while i < N:
            token, target = tokens[i], targets[i]
            if target != ignore_index:
                if checked and (target < 0 or target >= vocab_size):
                    bad_target = min(bad_target, int32(i))
                else:
                    n += int32(1)
            if checked and (token < 0 or token >= vocab_size):
                bad_token = min(bad_token, int32(i))
            i += cuda.gridDim.x * T
        n, bad_token, bad_target = fold(n, bad_token, bad_target)
        if cuda.threadIdx.x == 0:
            at = 3 * cuda.blockIdx.x
            partial[at] = n
            partial[at + 1] = bad_token
            partial[at + 2] = bad_target

    return batch_check_block, T


@functools.cache
def _total_kernel():
    """One block adds up the blocks. Without fastmath, so that the quotient is the host's."""
    T, _ = tuned("batch_check")
    fold = _fold(T)

    @kernel(launch_bounds=T, fastmath=False)
    def batch_check_total(partial, blocks, loss_scale, counts, dloss):
        n, bad_token, bad_target = int32(0), int32(LAST), int32(LAST)
        b = cuda.threadIdx.x
        while b < blocks:
            n += partial[3 * b]
            bad_token = min(bad_token, partial[3 * b + 1])
            bad_target = min(bad_target, partial[3 * b + 2])
            b += T
        n, bad_token, bad_target = fold(n, bad_token, bad_target)
        if cuda.threadIdx.x == 0:
            counts[0] = n
            counts[1] = bad_token if bad_token < LAST else -1
            counts[2] = bad_target if bad_target < LAST else -1
            dloss[0] = loss_scale[0] / float32(max(n, int32(1)))

    return batch_check_total, T


@functools.cache
def _nan_kernel():
    @kernel(launch_bounds=1, fastmath=False)  # without assumptions about NaN
    def batch_check_nan(loss_sum, counts):
        if counts[1] >= 0 or counts[2] >= 0:
            loss_sum[0] = NAN

    return batch_check_nan


# ----------------------------------------------------------------------------
# CPU


def _batch_check_cpu(tokens, targets, loss_scale, counts, dloss, vocab_size, ignore_index):
    counted = targets.reshape(-1) != ignore_index
    counts[1:] = -1
    if vocab_size is not None:
        for i, ids in enumerate((tokens.reshape(-1), targets.reshape(-1))):
            bad = (ids < 0) | (ids >= vocab_size)
            if i == 1:
                bad &= counted
                counted &= ~bad
            if bad.any():
                counts[1 + i] = bad.argmax()
    counts[0] = np.count_nonzero(counted)
    dloss[0] = loss_scale[0] / np.float32(max(counts[0], 1))


# ----------------------------------------------------------------------------
# Launchers


def batch_check(
    tokens, targets, loss_scale, *, vocab_size: int | None = None, ignore_index: int = -100, out=None
):
    """Returns `(counts, dloss)`, with which a step divides its loss and refuses a bad batch on the device.

    Without a vocab_size no id is bad.
    """
    tokens, targets, loss_scale = as_arrays(tokens, targets, loss_scale)
    if loss_scale.shape == ():
        loss_scale = loss_scale.reshape(1)
    xp = array_module(tokens)
    counts, dloss = (xp.empty(3, np.int32), xp.empty(1, np.float32)) if out is None else out
    expect(
        "batch_check",
        "tokens (A, B, T) int32, targets (A, B, T) int32, loss_scale (1,) fp32, "
        "counts (3,) int32, dloss (1,) fp32",
        *(tokens, targets, loss_scale, counts, dloss),
        hint="Give one micro-batch as tokens[None].",
    )
    N = tokens.size
    if not 1 <= N < LAST:
        raise InvalidValue(f"batch_check expects 1..{LAST - 1} tokens; got {tokens.shape}. Split the batch.")
    if on_gpu(tokens):
        check, T = _block_kernel(vocab_size is not None)
        total, _ = _total_kernel()
        blocks = min(tuned("batch_check")[1], -(-N // T))
        partial = xp.empty(3 * blocks, np.int32)
        limits = np.int32(vocab_size or 0), np.int32(ignore_index)
        launch(check, blocks, T, tokens, targets, partial, N, *limits)
        launch(total, 1, T, partial, blocks, loss_scale, counts, dloss)
    else:
        _batch_check_cpu(tokens, targets, loss_scale, counts, dloss, vocab_size, ignore_index)
    return counts, dloss


def nan_if_bad(loss_sum, counts):
    """Returns `loss_sum` (1,) fp32, which becomes nan where `counts` tells of a bad id: a loss over ids that
    kernels had to clamp or leave out looks like any other."""
    loss_sum, counts = as_arrays(loss_sum, counts)
    expect("nan_if_bad", "loss_sum (1,) fp32, counts (3,) int32", loss_sum, counts)
    if on_gpu(loss_sum):
        launch(_nan_kernel(), 1, 1, loss_sum, counts)
    elif (counts[1:] >= 0).any():
        loss_sum[0] = NAN
    return loss_sum
