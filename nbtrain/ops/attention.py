"""Causal self-attention (Vaswani et al., 2017), with dropout on the probabilities.

    s = sm_scale * q k^T     p = causal softmax(s)     y = keep(p) v          keep: dropout, or nothing
    dv = keep(p)^T dy        dp = keep(dy v^T)         ds = p * (dp - sum_k p * dp)
    dq = sm_scale * ds k     dk = sm_scale * ds^T q

qkv: (B, T, 3C) holds q, k and v side by side, each with its H heads of D = C / H side by side.
y, dy: (B, T, C); dqkv: (B, T, 3C); one of fp32, fp16, bf16.  lse: (B, H, T) fp32, log sum exp(s) over keys.

Nothing of size T * T is saved: the backward makes p again, by the same kernel. Heads are read in place, as
strided matrices. On the GPU the scores of a few b at a time lie in scratch of the storage dtype; on the CPU a
block of 64 queries is multiplied, normalised and multiplied again while it is in the cache.

The product applies sm_scale, not the softmax: its sums are fp32, so what must fit fp16 (65504) is the scaled
score, not q.k, which is sqrt(D) times larger. Rounding costs the same either way: it is relative.

Dropout draws for element first + ((b * H + h) * T + query) * T + key (see `nbtrain.device.philox`).
"""

import numpy as np

from nbtrain.device import array_module, as_arrays, expect, on_gpu, prange, same_memory, twin
from nbtrain.device.blas import gemm_batched
from nbtrain.device.cpu import exp, fill, larger, mm, scratch, span, task_count
from nbtrain.device.dropout import BITS_ROOM, draw_bits, dropout_of
from nbtrain.device.fused_attention import fused_attention
from nbtrain.device.reduce import sum_rows
from nbtrain.device.softmax_rows import check_length, launch_backward, launch_forward
from nbtrain.errors import InvalidValue

ZERO, ONE = np.float32(0), np.float32(1)
SCRATCH_BYTES = 256 << 20  # of one scratch array of scores on the GPU, unless a single b needs more
QUERIES = 64  # a block of the CPU twin: its scores stay in the L2 cache up to T of some thousand
CPU_SCRATCH_BYTES = 64 << 20

# ----------------------------------------------------------------------------
# On the GPU: products and softmax kernels, a few b at a time


def _heads(x, parts, H):
    """`parts` views (B, H, T, D) of x (B, T, parts * C)."""
    B, T, W = x.shape
    return tuple(x.reshape(B, T, parts, H, W // (parts * H)).transpose(2, 0, 3, 1, 4))


def _scores(a, b, out, alpha):
    """out (n, H, T, T) = alpha * a b^T, head by head; a, b (n, H, T, D)."""
    for i in range(len(a)):
        gemm_batched(a[i], b[i].transpose(0, 2, 1), out[i], alpha=alpha)


def _chunks(qkv, H):
    """(slice of b, their scores' shape), as many b as fit SCRATCH_BYTES."""
    B, T, _ = qkv.shape
    n = max(1, min(B, SCRATCH_BYTES // (H * T * T * qkv.itemsize)))
    for b in range(0, B, n):
        yield slice(b, min(b + n, B)), (min(n, B - b), H, T, T)


def _scratch(qkv, H):
    """An array for the scores of the largest chunk."""
    _, shape = next(_chunks(qkv, H))
    return array_module(qkv).empty(shape, qkv.dtype)


def _forward_gpu(qkv, H, sm_scale, drop, y, lse):
    T = qkv.shape[1]
    q, k, v = _heads(qkv, 3, H)
    (o,) = _heads(y, 1, H)
    scores = _scratch(qkv, H)
    for b, (n, *_) in _chunks(qkv, H):
        p = scores[:n]
        _scores(q[b], k[b], p, sm_scale)
        here = drop._replace(first=drop.first + b.start * H * T * T)
        launch_forward(p, p, T, sm_scale=1, causal=True, lse=lse[b].reshape(-1), dropout=here)
        for i in range(n):
            gemm_batched(p[i], v[b][i], o[b][i])


def _backward_gpu(dy, qkv, H, sm_scale, drop, dqkv):
    T = qkv.shape[1]
    (q, k, v), (dq, dk, dv) = _heads(qkv, 3, H), _heads(dqkv, 3, H)
    (do,) = _heads(dy, 1, H)
    probabilities, gradients = _scratch(qkv, H), _scratch(qkv, H)
    for b, (n, *_) in _chunks(qkv, H):
        p, ds = probabilities[:n], gradients[:n]
        _scores(q[b], k[b], p, sm_scale)
        launch_forward(p, p, T, sm_scale=1, causal=True)
        _scores(do[b], v[b], ds, 1)
        here = drop._replace(first=drop.first + b.start * H * T * T)
        dropped = None if drop.rng is None else p
        launch_backward(ds, p, ds, T, sm_scale=1, causal=True, dropped=dropped, dropout=here)
        for i in range(n):
            gemm_batched(p[i].transpose(0, 2, 1), do[b][i], dv[b][i])
            gemm_batched(ds[i], k[b][i], dq[b][i], alpha=sm_scale)
            gemm_batched(ds[i].transpose(0, 2, 1), q[b][i], dk[b][i], alpha=sm_scale)


# ----------------------------------------------------------------------------
# CPU twins


@twin(writes="y lse", blas=True)
def _forward_cpu(qkv, H, sm_scale, y, lse, rng, site, first, threshold, keep_scale, scores, bits):
    """scores (tasks, QUERIES, T), bits (tasks, T + BITS_ROOM)."""
    B, T, C = y.shape
    D = C // H
    tasks, rows, _ = scores.shape
    for t in prange(tasks):
        begin, end = span(t, tasks, B * H)
        for item in range(begin, end):
            b, h = item // H, item % H
            iq, ik, iv = h * D, C + h * D, 2 * C + h * D
            q, k, v = qkv[b, :, iq : iq + D], qkv[b, :, ik : ik + D], qkv[b, :, iv : iv + D]
            o = y[b, :, iq : iq + D]
            for lo in range(0, T, rows):
                hi = min(T, lo + rows)  # these queries see keys 0 .. hi - 1
                p = scores[t, : hi - lo, :hi]
                mm(q[lo:hi], k[:hi].T, p, sm_scale, ZERO)
                for i in range(hi - lo):
                    row = scores[t, i, :hi]  # not p[i]: a row of the whole array is contiguous by type
                    fill(row[lo + i + 1 :], np.float32(-np.inf))  # not skipped: whole rows vectorize
                    top = np.float32(-np.inf)
                    for j in range(hi):
                        top = larger(top, row[j])
                    s = ZERO
                    for j in range(hi):
                        e = exp(row[j] - top)
                        row[j] = e
                        s += e
                    inv = ONE / s
                    for j in range(hi):
                        row[j] *= inv
                    lse[b, h, lo + i] = top + np.log(s)
                    if rng is not None:
                        u = draw_bits(bits[t], rng, site, first + (item * T + lo + i) * T, hi)
                        for j in range(hi):
                            row[j] = row[j] * keep_scale if u[j] >= threshold else ZERO
                mm(p, v[:hi], o[lo:hi], ONE, ZERO)


@twin(writes="dqkv", blas=True)
def _backward_cpu(
    dy, qkv, y, lse, H, sm_scale, dqkv, rng, site, first, threshold, keep_scale, scores, gradients, bits
):
    """scores, gradients (tasks, QUERIES, T), bits (tasks, T + BITS_ROOM).

    The sum of p * dp over keys is that of y * dy over channels.
    """
    B, T, C = y.shape
    D = C // H
    tasks, rows, _ = scores.shape
    for t in prange(tasks):
        begin, end = span(t, tasks, B * H)
        for item in range(begin, end):
            b, h = item // H, item % H
            iq, ik, iv = h * D, C + h * D, 2 * C + h * D
            q, k, v = qkv[b, :, iq : iq + D], qkv[b, :, ik : ik + D], qkv[b, :, iv : iv + D]
            dq, dk, dv = dqkv[b, :, iq : iq + D], dqkv[b, :, ik : ik + D], dqkv[b, :, iv : iv + D]
            do = dy[b, :, iq : iq + D]
            beta = ZERO
            for lo in range((T - 1) // rows * rows, -1, -rows):  # the last block, which sees every key, sets
                hi = min(T, lo + rows)
                p, ds = scores[t, : hi - lo, :hi], gradients[t, : hi - lo, :hi]
                mm(q[lo:hi], k[:hi].T, p, sm_scale, ZERO)
                mm(do[lo:hi], v[:hi].T, ds, ONE, ZERO)
                for i in range(hi - lo):
                    o, g = y[b, lo + i, iq : iq + D], dy[b, lo + i, iq : iq + D]
                    delta = ZERO
                    for j in range(D):
                        delta += g[j] * o[j]
                    log_sum = lse[b, h, lo + i]
                    pr, dr = scores[t, i, :hi], gradients[t, i, :hi]
                    fill(pr[lo + i + 1 :], np.float32(-np.inf))
                    if rng is None:
                        for j in range(hi):
                            e = exp(pr[j] - log_sum)
                            pr[j] = e
                            dr[j] = e * (dr[j] - delta)
                    else:
                        u = draw_bits(bits[t], rng, site, first + (item * T + lo + i) * T, hi)
                        for j in range(hi):
                            e = exp(pr[j] - log_sum)
                            keep = keep_scale if u[j] >= threshold else ZERO
                            pr[j] = e * keep
                            dr[j] = e * (dr[j] * keep - delta)
                mm(p.T, do[lo:hi], dv[:hi], ONE, beta)
                mm(ds.T, q[lo:hi], dk[:hi], sm_scale, beta)
                mm(ds, k[:hi], dq[lo:hi], sm_scale, ZERO)
                beta = ONE


def _scratch_cpu(B, H, T, arrays, dropout):
    """`arrays` blocks of scores and one row of bits a task, in bounded memory."""
    rows = min(QUERIES, T)
    most = max(1, min(32, CPU_SCRATCH_BYTES // (arrays * rows * T * 4)))
    tasks = task_count(B * H, 1, most)
    blocks = [scratch(tasks, rows, T) for _ in range(arrays)]
    return *blocks, np.empty((tasks, T + BITS_ROOM if dropout else 0), np.uint32)


# ----------------------------------------------------------------------------
# Launchers


def attention_forward(
    qkv, H: int, *, sm_scale: float | None = None, dropout: float = 0.0, rng=None, site: int = 0,
    first: int = 0, out=None,
):  # fmt: skip
    """Returns `(y, lse)`; sm_scale is 1 / sqrt(D) by default. `out` gives the two arrays to write."""
    given = out if out is not None else (None, None)
    qkv, rng, y, lse = as_arrays(qkv, rng, *given)
    spec = "rng (3,) uint32, y (B, T, {C}), lse (B, {H}, T) fp32"
    B, T, C = _check("attention_forward", qkv, H, spec, rng, y, lse)
    drop = dropout_of("attention_forward", dropout, rng, site, first)
    scale = np.float32((C // H) ** -0.5 if sm_scale is None else sm_scale)
    if out is None:
        xp = array_module(qkv)
        y, lse = xp.empty((B, T, C), qkv.dtype), xp.empty((B, H, T), np.float32)
    fused = fused_attention(qkv, H, scale, dropout)
    if fused is not None:
        fused.flash_forward(qkv, H, scale, y, lse)
    elif on_gpu(qkv):
        _forward_gpu(qkv, H, scale, drop, y, lse)
    else:
        _forward_cpu(qkv, H, scale, y, lse, *drop, *_scratch_cpu(B, H, T, 1, dropout))
    return y, lse


def attention_backward(
    dy, qkv, y, lse, H: int, *, sm_scale: float | None = None, dropout: float = 0.0, rng=None, site: int = 0,
    first: int = 0, dbias=None, out=None,
):  # fmt: skip
    """Returns dqkv from dy, the forward's arguments and what it returned. Options must be the forward's.

    `dbias` (3C,), if given, is written too: the sum of dqkv over B and T, the gradient of the bias behind
    qkv. `out` is an array of its own, not qkv.
    """
    dy, qkv, y, lse, rng, out, dbias = as_arrays(dy, qkv, y, lse, rng, out, dbias)
    spec = (
        "dy (B, T, {C}), y (B, T, {C}), lse (B, {H}, T) fp32, rng (3,) uint32, out (B, T, {W}), dbias ({W},)"
    )
    B, T, C = _check("attention_backward", qkv, H, spec, dy, y, lse, rng, out, dbias)
    drop = dropout_of("attention_backward", dropout, rng, site, first)
    if same_memory(out, qkv):
        raise InvalidValue(
            "attention_backward reads qkv while it writes out; got one array for both. Pass another, or none."
        )
    scale = np.float32((C // H) ** -0.5 if sm_scale is None else sm_scale)
    dqkv = array_module(qkv).empty_like(qkv) if out is None else out
    fused = fused_attention(qkv, H, scale, dropout)
    if fused is not None:
        fused.flash_backward(dy, qkv, y, lse, H, scale, dqkv, dbias=dbias)
    elif on_gpu(qkv):
        _backward_gpu(dy, qkv, H, scale, drop, dqkv)
        if dbias is not None:
            sum_rows(dqkv.reshape(B * T, 3 * C), dbias)
    else:
        _backward_cpu(dy, qkv, y, lse, H, scale, dqkv, *drop, *_scratch_cpu(B, H, T, 2, dropout))
        if dbias is not None:
            dbias[...] = dqkv.reshape(B * T, 3 * C).sum(0, dtype=np.float32)
    return dqkv


def _check(op, qkv, H, spec, *others):
    B, T, W = expect(op, "qkv (B, T, 3C)", qkv)
    if H < 1 or W % (3 * H):
        raise InvalidValue(
            f"{op} expects qkv (B, T, 3C) with C a multiple of H heads; got qkv {qkv.shape}, H = {H}: "
            f"{W} is not a multiple of 3 * {H}. Choose a width that the heads divide."
        )
    check_length(op, T)
    C = W // 3
    expect(op, f"qkv (B, T, {W}), " + spec.format(C=C, H=H, W=W), qkv, *others)
    return B, T, C
