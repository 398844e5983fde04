"""Counts the targets of a batch and finds ids outside the vocabulary, without a read by the host.

    n     = number of targets that are neither ignore_index nor bad
    dloss = loss_scale / max(n, 1)          bad: outside 0..vocab_size-1, for a target and not ignore_index

tokens, targets: (A, B, T) int32, all micro-batches. loss_scale: (1,) or () fp32, dloss: (1,) fp32.
counts: (3,) int32 = (n, flat position of the first bad token or -1, that of the first bad target or -1).
"""

import functools

import numpy as np

from nbtrain.device import (
    array_module,
    as_arrays,
    cuda,
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

# ----------------------------------------------------------------------------
# GPU kernel


@functools.cache
def _kernel(checked: bool):
    """One block over the whole batch. Without fastmath, so that the quotient is the host's."""
    T, _ = tuned("batch_check")  # a power of two
    U = 4  # reads of each array in flight a thread

    @kernel(launch_bounds=T, fastmath=False)
    def batch_check(tokens, targets, loss_scale, counts, dloss, N, vocab_size, ignore_index):
        n_buf = cuda.shared.array(T, int32)
        token_buf = cuda.shared.array(T, int32)
        target_buf = cuda.shared.array(T, int32)
        token = cuda.local.array(U, int32)
        target = cuda.local.array(U, int32)
        lane = cuda.threadIdx.x
        n, bad_token, bad_target = int32(0), int32(LAST), int32(LAST)
        first = lane
        while first < N:
            for u in range(U):
                i = min(first + u * T, N - 1)
                token[u] = tokens[i]
                target[u] = targets[i]
            for u in range(U):
                i = first + u * T
                if i < N:
                    outside = checked and (target[u] < 0 or target[u] >= vocab_size)
                    if target[u] != ignore_index:
                        if outside:
                            bad_target = min(bad_target, int32(i))
                        else:
                            n += int32(1)
                    if checked and (token[u] < 0 or token[u] >= vocab_size):
                        bad_token = min(bad_token, int32(i))
            first += U * T
        n_buf[lane] = n
        token_buf[lane] = bad_token
        target_buf[lane] = bad_target
        half = T // 2
        while half > 0:
            cuda.syncthreads()
            if lane < half:
                n_buf[lane] += n_buf[lane + half]
                token_buf[lane] = min(token_buf[lane], token_buf[lane + half])
                target_buf[lane] = min(target_buf[lane], target_buf[lane + half])
            half //= 2
        if lane == 0:
            counts[0] = n_buf[0]
            counts[1] = token_buf[0] if token_buf[0] < LAST else -1
            counts[2] = target_buf[0] if target_buf[0] < LAST else -1
            dloss[0] = loss_scale[0] / float32(max(n_buf[0], int32(1)))

    return batch_check, T


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
# Launcher


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
        check, T = _kernel(vocab_size is not None)
        limits = np.int32(vocab_size or 0), np.int32(ignore_index)
        launch(check, 1, T, tokens, targets, loss_scale, counts, dloss, N, *limits)
    else:
        _batch_check_cpu(tokens, targets, loss_scale, counts, dloss, vocab_size, ignore_index)
    return counts, dloss
