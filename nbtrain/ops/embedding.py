"""Token and position embeddings, and their gradients without atomics.

    x[b, t] = wte[tokens[b, t]] + wpe[t]
    dwte[id] (+)= sum over (b, t) with tokens[b, t] == id of dx[b, t]          dwpe[t] = sum_b dx[b, t]

tokens: (B, T) int32. wte: (V, C), wpe: (P, C) with P >= T, x, dx: (B, T, C), one of fp32, fp16, bf16; dwte
and dwpe may each have another float dtype. order: (B*T,) int32, the stable argsort of the flattened tokens.
Sums are fp32, in one fixed order. Ids outside the vocabulary are refused on the host and clamped on the GPU.
"""

import functools

import numpy as np

from nbtrain.device import (
    aligned,
    array_module,
    as_arrays,
    cuda,
    device_function,
    expect,
    expect_ids,
    float32,
    int32,
    is_recording,
    kernel,
    launch,
    on_gpu,
    prange,
    row_access,
    row_shape,
    tuned,
    twin,
)
from nbtrain.device.cpu import fill, span, task_count
from nbtrain.errors import InvalidValue

ZERO = np.float32(0)
MOST_GROUPS = 65_535  # blocks along a grid's second axis, CUDA's limit and HIP's
SEGMENT = 32  # positions of `order` that one block adds up; the order of the sums depends on it

# ----------------------------------------------------------------------------
# GPU kernels


@functools.cache
def _forward_kernel(C: int, aligned: bool):
    """One position of ROWS sequences to a group of threads, eight channels a thread: the tokens' rows are on
    their way together, and the position's is read once. blockIdx.z counts the chunks of a long row."""
    T, R = row_shape("embedding_forward", C, vectors=1)
    ROWS = 4
    W = 8 * ROWS
    load8, store8 = row_access(aligned)

    @kernel(launch_bounds=T * R)
    def embedding_forward(tokens, wte, wpe, x, B, time, V):
        rows = cuda.local.array(ROWS, int32)
        a = cuda.local.array(W, float32)
        position = cuda.local.array(8, float32)
        t = cuda.blockIdx.x * R + cuda.threadIdx.y
        b0 = cuda.blockIdx.y * ROWS
        c = (cuda.blockIdx.z * T + cuda.threadIdx.x) * 8
        if t < time and c < C:
            for u in range(ROWS):
                rows[u] = min(max(tokens[min(b0 + u, B - 1) * time + t], 0), V - 1)
            load8(position, 0, wpe, t * C + c, C - c)
            for u in range(ROWS):
                load8(a, u * 8, wte, rows[u] * C + c, C - c)
            for u in range(ROWS):
                for j in range(8):
                    a[u * 8 + j] += position[j]
                if b0 + u < B:
                    store8(x, ((b0 + u) * time + t) * C + c, a, u * 8, C - c)

    return embedding_forward, T, R, ROWS


def _column_block(C: int) -> tuple[int, int]:
    """(threads a block, blocks a row), eight columns a thread"""
    T = min(row_shape("embedding_backward", C, vectors=1)[0], tuned("embedding_backward")[0])
    return T, -(-C // (8 * T))


@functools.cache
def _token_kernels(C: int, aligned: bool):
    """The gradient of wte in two kernels; a run is the positions of `order` that hold one token.

    segments: a block a segment, SEGMENT positions of `order`. It adds the runs that lie inside to dwte. A run
    that reaches over a border leaves its part in partial (segments, 2, C): [0] if it began before, else [1].
    crossing: a block a run that crosses borders adds its parts, in order, to dwte.
    The most frequent token, a tenth of a text, is thus shared by many blocks, and every sum has one order.
    """
    T, _ = _column_block(C)
    U = 4  # rows in flight a thread
    W = 8 * U
    HELD = SEGMENT + 2  # the segment, and a position on either side
    load8, store8 = row_access(aligned)

    @device_function
    def add_row(dwte, at, s, w, count):
        load8(w, 0, dwte, at, count)
        for j in range(8):
            w[j] += s[j]
        store8(dwte, at, w, 0, count)

    @device_function
    def token_at(tokens, order, p, N, V):
        """The token at position p of the order, -1 outside."""
        if p < 0 or p >= N:
            return int32(-1)
        return int32(min(max(tokens[min(max(order[p], 0), N - 1)], 0), V - 1))

    @kernel(launch_bounds=T)
    def embedding_segments(dx, tokens, order, dwte, partial, N, V):
        rows = cuda.shared.array(HELD, int32)
        ids = cuda.shared.array(HELD, int32)
        a = cuda.local.array(W, float32)
        s = cuda.local.array(8, float32)
        w = cuda.local.array(8, float32)
        segment = cuda.blockIdx.x
        k = cuda.threadIdx.x
        while k < HELD:
            p = segment * SEGMENT + k - 1
            ids[k] = token_at(tokens, order, p, N, V)
            rows[k] = min(max(order[min(max(p, 0), N - 1)], 0), N - 1)
            k += T
        cuda.syncthreads()
        c = (cuda.blockIdx.y * T + cuda.threadIdx.x) * 8
        if c < C:
            last = min(SEGMENT, N - segment * SEGMENT)
            from_before = ids[0] == ids[1]
            for j in range(8):
                s[j] = ZERO
            k = 1
            while k <= last:
                for u in range(U):
                    load8(a, u * 8, dx, rows[min(k + u, last)] * C + c, C - c)
                for u in range(U):
                    if k + u <= last:
                        for j in range(8):
                            s[j] += a[u * 8 + j]
                        ends = ids[k + u + 1] != ids[k + u]
                        if ends or k + u == last:
                            if from_before:
                                store8(partial, segment * 2 * C + c, s, 0, C - c)
                            elif ends:
                                add_row(dwte, ids[k + u] * C + c, s, w, C - c)
                            else:
                                store8(partial, (segment * 2 + 1) * C + c, s, 0, C - c)
                            from_before = False
                            for j in range(8):
                                s[j] = ZERO
                k += U

    @kernel(launch_bounds=T)
    def embedding_crossing(dwte, tokens, order, partial, N, V):
        ids = cuda.shared.array(T, int32)
        a = cuda.local.array(W, float32)
        s = cuda.local.array(8, float32)
        segment = cuda.blockIdx.x
        first, end = segment * SEGMENT, (segment + 1) * SEGMENT
        token = token_at(tokens, order, end - 1, N, V)
        crosses = token >= 0 and token_at(tokens, order, end, N, V) == token
        begins = (
            token_at(tokens, order, first, N, V) != token or token_at(tokens, order, first - 1, N, V) != token
        )
        if crosses and begins:  # the same for the whole block
            c = (cuda.blockIdx.y * T + cuda.threadIdx.x) * 8
            if c < C:
                load8(s, 0, partial, (segment * 2 + 1) * C + c, C - c)
            going = True
            while going:
                cuda.syncthreads()  # ids are read by the round before
                ids[cuda.threadIdx.x] = token_at(
                    tokens, order, (segment + 1 + cuda.threadIdx.x) * SEGMENT, N, V
                )
                cuda.syncthreads()
                k = 0
                while k < T and going:  # T is a multiple of U
                    if c < C:
                        for u in range(U):
                            part = min(segment + 1 + k + u, cuda.gridDim.x - 1)
                            load8(a, u * 8, partial, part * 2 * C + c, C - c)
                    for u in range(U):
                        going = going and ids[k + u] == token
                        if going:
                            for j in range(8):
                                s[j] += a[u * 8 + j]
                    k += U
                segment += T
            if c < C:
                add_row(dwte, token * C + c, s, a, C - c)

    return embedding_segments, embedding_crossing


@functools.cache
def _position_kernel(C: int, aligned: bool):
    """A block a position."""
    T, _ = _column_block(C)
    U = 4  # rows in flight a thread
    W = 8 * U
    load8, store8 = row_access(aligned)

    @kernel(launch_bounds=T)
    def embedding_positions(dx, dwpe, B, time):
        t = cuda.blockIdx.x
        c = (cuda.blockIdx.y * T + cuda.threadIdx.x) * 8
        a = cuda.local.array(W, float32)
        s = cuda.local.array(8, float32)
        for j in range(8):
            s[j] = ZERO
        if c < C:
            if t < time:
                b = 0
                while b < B:
                    for u in range(U):
                        load8(a, u * 8, dx, (min(b + u, B - 1) * time + t) * C + c, C - c)
                    for u in range(U):
                        if b + u < B:
                            for j in range(8):
                                s[j] += a[u * 8 + j]
                    b += U
            store8(dwpe, t * C + c, s, 0, C - c)

    return embedding_positions


@functools.cache
def _zero_kernel(C: int, aligned: bool):
    """A block a row."""
    T, _ = _column_block(C)
    _, store8 = row_access(aligned)

    @kernel(launch_bounds=T)
    def embedding_zero(dwte):
        a = cuda.local.array(8, float32)
        for j in range(8):
            a[j] = ZERO
        c = (cuda.blockIdx.y * T + cuda.threadIdx.x) * 8
        if c < C:
            store8(dwte, cuda.blockIdx.x * C + c, a, 0, C - c)

    return embedding_zero


# ----------------------------------------------------------------------------
# CPU twins


@twin(writes="x")
def _forward_cpu(tokens, wte, wpe, x):
    B, T, C = x.shape
    for n in prange(B * T):
        b, t = n // T, n % T
        row, token, position = x[b, t], wte[tokens[b, t]], wpe[t]
        for c in range(C):
            row[c] = token[c] + position[c]


@twin(writes="dwte dwpe")
def _backward_cpu(dx, tokens, dwte, dwpe, accumulate, tasks):
    """A task owns some columns, so there is no race and one order of the sums."""
    B, T, C = dx.shape
    for u in prange(tasks):
        first, last = span(u, tasks, C, 16)
        if not accumulate:
            for k in range(dwte.shape[0]):
                fill(dwte[k, first:last], ZERO)
        for t in range(dwpe.shape[0]):
            position = dwpe[t, first:last]
            fill(position, ZERO)
            if t < T:
                for b in range(B):
                    d, token = dx[b, t, first:last], dwte[tokens[b, t], first:last]
                    for c in range(last - first):
                        token[c] += d[c]
                        position[c] += d[c]


# ----------------------------------------------------------------------------
# Launchers


def embedding_forward(tokens, wte, wpe, *, out=None):
    """Returns x (B, T, C), the embedding of every token plus that of its position, 0..T-1."""
    tokens, wte, wpe = as_arrays(tokens, wte, wpe)
    spec = "tokens (B, T) int32, wte (V, C), wpe (P, C)"
    B, T, V, C, P = expect("embedding", spec, tokens, wte, wpe, hint="Give one sequence as tokens[None].")
    _check_ids(tokens, V, P)
    x = array_module(wte).empty((B, T, C), wte.dtype) if out is None else out
    expect("embedding's out", "x (B, T, C), tokens (B, T) int32, wte (V, C)", x, tokens, wte)
    if on_gpu(wte):
        forward, X, Y, rows = _forward_kernel(C, aligned(C, wte, wpe, x))
        if B > MOST_GROUPS * rows:
            raise InvalidValue(
                f"embedding expects at most {MOST_GROUPS * rows:,} sequences on a GPU; got {B:,}. "
                "Embed them in parts."
            )
        grid = -(-T // Y), -(-B // rows), -(-C // (8 * X))
        launch(forward, grid, (X, Y), tokens, wte, wpe, x, B, T, V)
    else:
        _forward_cpu(tokens, wte, wpe, x)
    return x


def embedding_backward(dx, tokens, order, dwte, dwpe, *, accumulate: bool = True) -> None:
    """Adds the gradient of wte to `dwte` (sets it with accumulate=False), sets `dwpe` to that of wpe.

    Accumulating is what a tied vocabulary wants: its product has written dwte before. Rows of dwpe from T on
    are set to zero. The CPU needs no `order`; None will do.
    """
    dx, tokens, order, dwte, dwpe = as_arrays(dx, tokens, order, dwte, dwpe)
    expect(
        "embedding_backward",
        "dx (B, T, C), tokens (B, T) int32, order (N,) int32, dwte (V, C) float, dwpe (P, C) float",
        *(dx, tokens, order, dwte, dwpe),
    )
    (B, T, C), V, P = dx.shape, dwte.shape[0], dwpe.shape[0]
    _check_ids(tokens, V, P)
    if order is not None and order.shape != (B * T,):
        raise InvalidValue(
            f"embedding_backward expects order ({B * T},), one entry a token; got {order.shape}. "
            'Make it with tokens.ravel().argsort(kind="stable").'
        )
    if on_gpu(dx):
        if order is None:
            raise InvalidValue(
                "embedding_backward expects the order of the tokens on a GPU; got None. Make it with "
                'tokens.ravel().argsort(kind="stable").astype("int32").'
            )
        X, chunks = _column_block(C)
        if not accumulate:
            launch(_zero_kernel(C, aligned(C, dwte)), (V, chunks), X, dwte)
        N, n_segments = B * T, -(-B * T // SEGMENT)
        partial = array_module(dx).empty((n_segments, 2, C), np.float32)
        segments, crossing = _token_kernels(C, aligned(C, dx, dwte))
        launch(segments, (n_segments, chunks), X, dx, tokens, order, dwte, partial, N, V)
        launch(crossing, (n_segments, chunks), X, dwte, tokens, order, partial, N, V)
        launch(_position_kernel(C, aligned(C, dx, dwpe)), (P, chunks), X, dx, dwpe, B, T)
    else:
        _backward_cpu(dx, tokens, dwte, dwpe, accumulate, task_count(C, 16))


def _check_ids(tokens, V: int, P: int) -> None:
    T = tokens.shape[1]
    if T > P:
        raise InvalidValue(
            f"embedding expects at most {P} positions, the rows of wpe; got tokens {tokens.shape}. "
            "Cut the sequences, or take a wpe of more rows."
        )
    if not is_recording():
        expect_ids("embedding", "tokens", tokens, V)
