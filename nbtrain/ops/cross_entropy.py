"""Softmax cross-entropy over the vocabulary, alone or with its gradient in one pass over the logits.

    lse[n]    = log(sum_v exp(logits[n, v]))                                         v < vocab_size
    losses[n] = lse[n] - logits[n, target[n]]                                        0 if ignored
    dlogits[n, v] = (exp(logits[n, v] - lse[n]) - (v == target[n])) * dlosses[n]     0 if ignored, or padding

N = rows (batch * time), V = columns, of which those from vocab_size on are padding.
logits, dlogits: (N, V), one of fp32, fp16, bf16. targets: (N,) int32.
losses (in nats), lse, dlosses: (N,) fp32.
A row is ignored if its target is ignore_index or outside 0..vocab_size-1; host targets like that are refused.

The sum of exponentials is kept beside a running maximum (Milakov and Gimelshein, 2018). Arithmetic and sums
are fp32. Rows do not meet, so N may be a slice of a batch's rows: logits of a chunk at a time are enough.
"""

import functools

import numpy as np

from nbtrain.device import (
    aligned,
    array_module,
    as_array,
    as_arrays,
    block_max,
    block_sum,
    can_fetch,
    cuda,
    device_function,
    exp2,
    expect,
    expect_ids,
    fetch_access,
    float32,
    is_recording,
    kernel,
    launch,
    load,
    log2,
    njit,
    on_gpu,
    prange,
    rcp,
    row_access,
    same_memory,
    tuned,
    twin,
)
from nbtrain.device.cpu import exp, fill, larger, routine, scratch, span, task_count
from nbtrain.errors import InvalidValue

ZERO = np.float32(0)
LOG2E, LN2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
# A logit that counts for nothing. A power of two: its product with LOG2E is exact, so that a fused
# multiply-add of MASKED * LOG2E - MASKED2 is 0; the rounding of any other number this large is a power that
# overflows.
MASKED = np.float32(-(2.0**126))
LOADS = 4  # reads of 16 bytes in flight a thread
RESIDENT = 1024  # threads on a multiprocessor, which leaves each 64 registers
MASKED2 = np.float32(MASKED * LOG2E)
HINT = "Flatten (B, T, V) with logits.reshape(-1, V)."

# ----------------------------------------------------------------------------
# GPU kernels


def _row_shape(V: int) -> tuple[int, int]:
    """(threads of a row, eights in a row)"""
    eights = -(-V // 8)
    return min(tuned("cross_entropy")[0], -(-eights // 32) * 32), eights


def _resident(T: int) -> int:
    """Blocks on a multiprocessor."""
    return RESIDENT // T if T >= 512 else 4


def _shared_bytes(V: int) -> int:
    return 16 * _row_shape(V)[1]


def _row_functions(V: int, vocab_size: int, aligned: bool):
    """What both kernels do to eight logits of a row of V: hide padding, differentiate and write."""
    _, store8 = row_access(aligned)
    PADDED = vocab_size < 8 * -(-V // 8)

    @device_function
    def mask(a, c):
        if PADDED and c + 8 > vocab_size:
            for j in range(8):
                if c + j >= vocab_size:
                    a[j] = MASKED

    @device_function
    def write_gradient(a, at, dlogits, base, c, log2_norm, scale, d, target):
        """dlogits = exp2(a * log2(e) - log2_norm) * scale - (d at the target)."""
        for j in range(8):
            g = exp2(a[at + j] * LOG2E - log2_norm) * scale
            if target - c == j:
                g -= d
            a[at + j] = g
        store8(dlogits, base + c, a, at, V - c)

    return mask, write_gradient


@functools.cache
def _forward_kernel(V: int, vocab_size: int, loads: int, aligned: bool, ahead: bool):
    """A block a row, a thread `loads` eights at a time. With `with_gradient` it reads the row again and
    writes dlogits over it: one kernel for both, so that both give the same losses bit for bit.

    `ahead`, the row is fetched to shared memory, all of it at once, and both passes read it there: every
    number crosses the bus once in each direction. Elsewhere the second pass goes backwards, since the row's
    end is still in the caches.

    Powers are of two, relative to the row's rounded maximum of logit * log2(e): a fused multiply-add rounds
    logit * log2(e) - maximum once, so large logits lose nothing.
    """
    T, EIGHTS = _row_shape(V)
    U, W, WHOLE = loads, 8 * loads, vocab_size // 8
    _, store8 = row_access(aligned)
    slots, fetch8, await_fetches, read8 = fetch_access(ahead, aligned, 0)
    mask, write_gradient = _row_functions(V, vocab_size, aligned)
    row_max, row_sum = block_max(T), block_sum(T)

    @device_function
    def max8(a, at):
        return max(
            max(max(a[at], a[at + 1]), max(a[at + 2], a[at + 3])),
            max(max(a[at + 4], a[at + 5]), max(a[at + 6], a[at + 7])),
        )

    @kernel(launch_bounds=(T, _resident(T)), shared_bytes=_shared_bytes(V) if ahead else 0)
    def cross_entropy_forward(logits, targets, dloss, losses, lse, ignore_index, with_gradient):
        n, lane = cuda.blockIdx.x, cuda.threadIdx.x
        base = n * V
        target = targets[n]
        counted = target != ignore_index and target >= 0 and target < vocab_size
        a = cuda.local.array(W, float32)
        if with_gradient and not counted:  # the same for the whole block
            for j in range(8):
                a[j] = ZERO
            e = lane
            while e < EIGHTS:
                store8(logits, base + e * 8, a, 0, V - e * 8)
                e += T
            if lane == 0:
                losses[n] = ZERO
        else:
            words = slots()
            e = lane
            while e < EIGHTS:
                fetch8(words, 4 * e, logits, base + e * 8)
                e += T
            # Before the reductions, behind which the row is written. By every thread: if a branch alone
            # loaded it, the compiler would multiply it there, round the product, and no longer fuse it below.
            at_target = load(logits, base + (target if counted else 0))
            await_fetches()
            top, s = MASKED2, ZERO
            e = lane
            while e < WHOLE - (U - 1) * T:
                for u in range(U):
                    read8(a, u * 8, words, 4 * (e + u * T), logits, base + (e + u * T) * 8, 8)
                before = top
                for u in range(U):
                    top = max(top, max8(a, u * 8) * LOG2E)
                s *= exp2(before - top)
                for k in range(W):
                    s += exp2(a[k] * LOG2E - top)
                e += U * T
            while e < EIGHTS:
                read8(a, 0, words, 4 * e, logits, base + e * 8, V - e * 8)
                mask(a, e * 8)
                before = top
                top = max(top, max8(a, 0) * LOG2E)
                s *= exp2(before - top)
                for k in range(8):
                    s += exp2(a[k] * LOG2E - top)
                e += T
            row_top = row_max(top)
            s = row_sum(s * exp2(top - row_top))
            if lane == 0:
                log2_sum = log2(s)
                loss = ZERO
                if counted:
                    loss = LN2 * (log2_sum - (at_target * LOG2E - row_top))
                losses[n] = loss
                if not with_gradient:
                    lse[n] = LN2 * (row_top + log2_sum)
            if with_gradient:
                d = dloss[0]
                scale = d * rcp(s)
                e -= T
                while e >= WHOLE - U * T and e >= 0:  # what may hold padding, one eight at a time
                    read8(a, 0, words, 4 * e, logits, base + e * 8, V - e * 8)
                    mask(a, e * 8)
                    write_gradient(a, 0, logits, base, e * 8, row_top, scale, d, target)
                    e -= T
                while e >= (U - 1) * T:
                    for u in range(U):
                        read8(a, u * 8, words, 4 * (e - u * T), logits, base + (e - u * T) * 8, 8)
                    for u in range(U):
                        write_gradient(a, u * 8, logits, base, (e - u * T) * 8, row_top, scale, d, target)
                    e -= U * T
                while e >= 0:
                    read8(a, 0, words, 4 * e, logits, base + e * 8, 8)
                    write_gradient(a, 0, logits, base, e * 8, row_top, scale, d, target)
                    e -= T

    return cross_entropy_forward, T


def _forward(logits, targets, dloss, losses, lse, vocab_size, ignore_index, with_gradient):
    (N, V), (T, EIGHTS) = logits.shape, _row_shape(logits.shape[1])
    whole = aligned(V, logits)
    # A row of fewer than two eights a thread is still in the first cache.
    ahead = EIGHTS >= 2 * T and can_fetch(logits, whole, _resident(T), _shared_bytes(V))
    loads = LOADS * 2 // logits.dtype.itemsize if whole else 1
    forward, _ = _forward_kernel(V, vocab_size, loads, whole, ahead)
    numbers = np.int32(ignore_index), np.int32(with_gradient)
    launch(forward, N, T, logits, targets, dloss, losses, lse, *numbers)


@functools.cache
def _backward_kernel(V: int, vocab_size: int, aligned: bool):
    """A block a row."""
    T, EIGHTS = _row_shape(V)
    load8, _ = row_access(aligned)
    mask, write_gradient = _row_functions(V, vocab_size, aligned)

    @kernel(launch_bounds=T)
    def cross_entropy_backward(dlosses, logits, targets, lse, dlogits, ignore_index):
        n = cuda.blockIdx.x
        base = n * V
        target = targets[n]
        counted = target != ignore_index and target >= 0 and target < vocab_size
        a = cuda.local.array(8, float32)
        d, log2_norm = ZERO, lse[n] * LOG2E
        if counted:
            d = dlosses[n]
        e = cuda.threadIdx.x
        while e < EIGHTS:
            if counted:
                load8(a, 0, logits, base + e * 8, V - e * 8)
                mask(a, e * 8)
            else:
                for j in range(8):
                    a[j] = MASKED
            write_gradient(a, 0, dlogits, base, e * 8, log2_norm, d, d, target)
            e += T

    return cross_entropy_backward, T


@functools.cache
def _sum_kernel():
    """One block; a thread adds every T-th loss.

    Rounding errors are carried along (Kahan, 1965); fastmath would drop them.
    """
    T, _ = tuned("sum_losses")
    block_total = block_sum(T)

    @kernel(launch_bounds=T, fastmath=False)
    def sum_losses(losses, N, out):
        n = cuda.threadIdx.x
        s, lost = ZERO, ZERO
        while n < N:
            term = losses[n] - lost
            total = s + term
            lost = (total - s) - term
            s = total
            n += T
        s = block_total(s)
        if cuda.threadIdx.x == 0:
            out[0] = s

    return sum_losses, T


# ----------------------------------------------------------------------------
# CPU twins


@njit
def _minus(a, b):
    """a - b without fastmath, which would regroup it with its neighbours and lose what cancels here."""
    return a - b


@routine
def _exp_row(row, target):
    """row becomes exp(row - its maximum); returns its sum, log-sum-exp and the loss at `target` unless -1.

    Both twins call it, so that both give the same losses to the last bit.
    """
    top = np.float32(-np.inf)
    for v in range(row.size):
        top = larger(top, row[v])
    at_target = row[target] if target >= 0 else top
    s = ZERO
    for v in range(row.size):
        e = exp(row[v] - top)
        row[v] = e
        s += e
    log_sum = np.log(s)
    return s, top + log_sum, _minus(log_sum, _minus(at_target, top))


@twin(writes="losses lse")
def _forward_cpu(logits, targets, vocab_size, ignore_index, losses, lse, rows):
    tasks = rows.shape[0]
    for t in prange(tasks):
        row = rows[t]
        first, last = span(t, tasks, logits.shape[0])
        for n in range(first, last):
            source = logits[n, :vocab_size]
            for v in range(row.size):
                row[v] = source[v]
            target = targets[n]
            counted = target != ignore_index and target >= 0 and target < vocab_size
            _, norm, loss = _exp_row(row, target if counted else -1)
            losses[n] = loss if counted else ZERO
            lse[n] = norm


@twin(writes="logits losses")
def _forward_backward_cpu(logits, targets, dloss, vocab_size, ignore_index, losses):
    for n in prange(logits.shape[0]):
        target = targets[n]
        row, padding = logits[n, :vocab_size], logits[n, vocab_size:]
        fill(padding, ZERO)
        if target != ignore_index and target >= 0 and target < vocab_size:
            s, _, loss = _exp_row(row, target)
            losses[n] = loss
            d = dloss[0]
            scale = d / s
            for v in range(row.size):
                row[v] *= scale
            row[target] -= d
        else:
            losses[n] = ZERO
            fill(row, ZERO)


@twin(writes="dlogits")
def _backward_cpu(dlosses, targets, lse, vocab_size, ignore_index, dlogits):
    """dlogits holds the logits."""
    for n in prange(dlogits.shape[0]):
        target = targets[n]
        row, padding = dlogits[n, :vocab_size], dlogits[n, vocab_size:]
        fill(padding, ZERO)
        if target != ignore_index and target >= 0 and target < vocab_size:
            d, norm = dlosses[n], lse[n]
            for v in range(row.size):
                row[v] = exp(row[v] - norm) * d
            row[target] -= d
        else:
            fill(row, ZERO)


# ----------------------------------------------------------------------------
# Launchers


def cross_entropy_forward(
    logits, targets, *, vocab_size: int | None = None, ignore_index: int = -100, out=None
):
    """Returns `(losses, lse)`; `lse` is for `cross_entropy_backward`, and is that of ignored rows, too."""
    logits, targets = as_arrays(logits, targets)
    N, V = expect(
        "cross_entropy",
        "logits (N, V), targets (N,) int32",
        logits,
        targets,
        hint=HINT,
    )
    vocab_size = _check_targets(targets, V, vocab_size, ignore_index)
    xp = array_module(logits)
    losses, lse = (xp.empty(N, np.float32), xp.empty(N, np.float32)) if out is None else out
    expect("cross_entropy's out", "losses (N,) fp32, lse (N,) fp32, targets (N,) int32", losses, lse, targets)
    if on_gpu(logits):
        no_dloss = xp.empty(1, np.float32)
        _forward(logits, targets, no_dloss, losses, lse, vocab_size, ignore_index, with_gradient=False)
    else:
        rows = scratch(task_count(N, 1 + 16384 // V), vocab_size)
        _forward_cpu(logits, targets, vocab_size, ignore_index, losses, lse, rows)
    return losses, lse


def cross_entropy_forward_backward(
    logits, targets, dloss, *, vocab_size: int | None = None, ignore_index: int = -100, losses=None
):
    """Returns `losses` and writes dlogits over `logits`: what training uses.

    `dloss` (1,) fp32 is the gradient of every counted row's loss: the loss scale over the number of targets.
    """
    logits, targets, dloss, losses = as_arrays(logits, targets, dloss, losses)
    if losses is None:
        losses = array_module(logits).empty(targets.shape, np.float32)
    N, V = expect(
        "cross_entropy_forward_backward",
        "logits (N, V), targets (N,) int32, dloss (1,) fp32, losses (N,) fp32",
        *(logits, targets, dloss, losses),
        hint=HINT,
    )
    vocab_size = _check_targets(targets, V, vocab_size, ignore_index)
    if on_gpu(logits):
        no_lse = dloss
        _forward(logits, targets, dloss, losses, no_lse, vocab_size, ignore_index, with_gradient=True)
    else:
        _forward_backward_cpu(logits, targets, dloss, vocab_size, ignore_index, losses)
    return losses


def cross_entropy_backward(
    dlosses, logits, targets, lse, *, vocab_size: int | None = None, ignore_index: int = -100, out=None
):
    """Returns dlogits, which may be written over `logits`."""
    dlosses, logits, targets, lse = as_arrays(dlosses, logits, targets, lse)
    out = array_module(logits).empty_like(logits) if out is None else out
    N, V = expect(
        "cross_entropy_backward",
        "dlosses (N,) fp32, logits (N, V), targets (N,) int32, lse (N,) fp32, out (N, V)",
        *(dlosses, logits, targets, lse, out),
        hint=HINT,
    )[:2]
    vocab_size = _check_targets(targets, V, vocab_size, ignore_index)
    if on_gpu(logits):
        backward, T = _backward_kernel(V, vocab_size, aligned(V, logits, out))
        launch(backward, N, T, dlosses, logits, targets, lse, out, np.int32(ignore_index))
    else:
        if not same_memory(out, logits):
            out[...] = logits
        _backward_cpu(dlosses, targets, lse, vocab_size, ignore_index, out)
    return out


def sum_losses(losses, *, out=None):
    """Returns the sum (1,) fp32 of `losses` (N,), good to a few eps; repeated, it has the same bits."""
    losses = as_array(losses)
    out = array_module(losses).empty(1, np.float32) if out is None else out
    (N,) = expect("sum_losses", "losses (N,) fp32, out (1,) fp32", losses, out)
    if on_gpu(losses):
        total, T = _sum_kernel()
        launch(total, 1, T, losses, N, out)
    else:
        out[0] = losses.sum()  # NumPy adds pairwise
    return out


def _check_targets(targets, V: int, vocab_size: int | None, ignore_index: int) -> int:
    """The number of columns that are no padding; a host target must be one of them or `ignore_index`."""
    vocab_size = V if vocab_size is None else int(vocab_size)
    if not 1 <= vocab_size <= V:
        raise InvalidValue(
            f"cross_entropy expects vocab_size in 1..{V}, the columns of logits; got {vocab_size}. "
            "Pad the logits, or pass the number of classes."
        )
    if not is_recording():
        expect_ids("cross_entropy", "targets", targets, vocab_size, ignore_index=ignore_index)
    return vocab_size
