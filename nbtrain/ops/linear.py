"""Linear layers and plain products of matrices.

    y  = x W + b
    dx = dy W^T          dW = x^T dy          db = sum_n dy

N = rows (batch * time), K = features in, M = features out.
x, dx: (N, K), weight, dweight: (K, M) as in GPT-2's published weights, bias, dbias: (M,), y, dy: (N, M), one
of fp32, fp16, bf16.

On the GPU the products are the vendor's BLAS's, with fp32 accumulation. Some of them add the bias themselves;
elsewhere y is filled with it and the product is added. accumulate="fp16" sums products of fp16 arrays in
fp16: faster on some cards, but a sum of K terms loses about log2(K) of its 11 bits and overflows at 65504. On
the CPU every product is cut into tasks that call BLAS on one thread each, but for those of one row.
"""

import functools

import numpy as np

from nbtrain.device import (
    aligned,
    array_module,
    as_arrays,
    cuda,
    expect,
    float32,
    is_cupy,
    kernel,
    launch,
    on_gpu,
    prange,
    row_access,
    row_shape,
    twin,
)
from nbtrain.device.arrays import FLOATS
from nbtrain.device.blas import fuses_bias, gemm
from nbtrain.device.cpu import add_rows, fill, mm, routine, span, task_count
from nbtrain.device.reduce import sum_rows
from nbtrain.errors import InvalidType, InvalidValue, Unavailable

ZERO, ONE = np.float32(0), np.float32(1)
FLATTEN = "Flatten (B, T, K) with x.reshape(-1, K)."

# ----------------------------------------------------------------------------
# GPU kernels


@functools.cache
def _bias_kernel(M: int, aligned: bool):
    """y = bias in every row: eight columns of ROWS rows a thread; blockIdx.y counts chunks of a long row."""
    T, R = row_shape("linear_bias", M, vectors=1)
    ROWS = 4
    load8, store8 = row_access(aligned)

    @kernel(launch_bounds=T * R)
    def linear_bias(bias, y, N):
        b = cuda.local.array(8, float32)
        c = (cuda.blockIdx.y * T + cuda.threadIdx.x) * 8
        n0 = (cuda.blockIdx.x * R + cuda.threadIdx.y) * ROWS
        if c < M:
            load8(b, 0, bias, c, M - c)
            for n in range(n0, min(n0 + ROWS, N)):
                store8(y, n * M + c, b, 0, M - c)

    return linear_bias, T, R, ROWS


# ----------------------------------------------------------------------------
# CPU twins


def _shares(n: int) -> int:
    """Tasks for n rows or columns of a result.

    BLAS packs the operand that is not cut once for each task: eight tasks of 512 rows lose 5% against two, 32
    of 128 rows 20%. A short axis is still cut for a few threads.
    """
    return max(task_count(n, 64, 2), task_count(n, 192, 4), task_count(n, 512))


@twin(writes="out", blas=True)
def _product_cpu(a, b, bias, out, beta, tasks, by_rows):
    """out = a @ b + beta * out, or a @ b + bias; a task takes rows or columns of out and calls BLAS."""
    M, N = out.shape
    for t in prange(tasks):
        top, bottom = span(t, tasks, M, 16) if by_rows else (0, M)
        left, right = (0, N) if by_rows else span(t, tasks, N, 16)
        if bias is not None:
            for i in range(top, bottom):
                row, b_ = out[i, left:right], bias[left:right]
                for j in range(right - left):
                    row[j] = b_[j]
        mm(a[top:bottom], b[:, left:right], out[top:bottom, left:right], ONE, beta)


@twin(writes="out")
def _row_cpu(a, b, bias, out, beta, tasks):
    """`_product_cpu` for one row: BLAS would pack the matrix, which is read once. A task takes columns, four
    rows of b for each pass over them."""
    K, N = b.shape
    for t in prange(tasks):
        left, right = span(t, tasks, N, 16)
        o = out[0, left:right]
        _begin_row(o, bias, beta, left)
        whole = K // 4 * 4
        for k in range(0, whole, 4):
            w, x, y, z = a[0, k], a[0, k + 1], a[0, k + 2], a[0, k + 3]
            c, d, e, f = b[k, left:right], b[k + 1, left:right], b[k + 2, left:right], b[k + 3, left:right]
            for j in range(right - left):
                o[j] += (w * c[j] + x * d[j]) + (y * e[j] + z * f[j])
        for k in range(whole, K):
            w, c = a[0, k], b[k, left:right]
            for j in range(right - left):
                o[j] += w * c[j]


@twin(writes="out")
def _row_transposed_cpu(a, columns, bias, out, beta, tasks):
    """`_row_cpu` for b = columns.T, whose columns are contiguous."""
    N, K = columns.shape
    x = a[0]
    for t in prange(tasks):
        left, right = span(t, tasks, N, 16)
        o = out[0, left:right]
        _begin_row(o, bias, beta, left)
        for j in range(left, right):
            column, s = columns[j], ZERO
            for k in range(K):
                s += x[k] * column[k]
            o[j - left] += s


@routine
def _begin_row(o, bias, beta, left):
    """What the sums are added to; beta = 0 reads nothing."""
    for j in range(o.size):
        if bias is not None:
            o[j] = bias[left + j]
        else:
            o[j] = o[j] * beta if beta != ZERO else ZERO


@twin(writes="dweight dbias", blas=True)
def _backward_weight_cpu(dy, x, dweight, dbias, tasks):
    """A task takes rows or columns of dweight and columns of dbias; 256 rows of x at a time, so that dbias
    reads the cache."""
    N = x.shape[0]
    K, M = dweight.shape
    by_rows = K >= M
    for t in prange(tasks):
        top, bottom = span(t, tasks, K, 16) if by_rows else (0, K)
        left, right = (0, M) if by_rows else span(t, tasks, M, 16)
        first, last = span(t, tasks, M, 16)
        part = np.empty(last - first, np.float32)  # a sum of sums loses less than one long sum
        if dbias is not None:
            fill(dbias[first:last], ZERO)
        for n in range(0, N, 256):
            end = min(N, n + 256)
            u, d = x[n:end], dy[n:end]
            beta = ZERO if n == 0 else ONE
            mm(u[:, top:bottom].T, d[:, left:right], dweight[top:bottom, left:right], ONE, beta)
            if dbias is not None:
                fill(part, ZERO)
                add_rows(dy, n, end, first, last, part)
                for j in range(last - first):
                    dbias[first + j] += part[j]


# ----------------------------------------------------------------------------
# Launchers


def matmul(a, b, *, out=None, beta: float = 0.0, accumulate: str = "fp32"):
    """Returns `out` = a @ b + beta * out.  a (M, K), b (K, N), out (M, N).

    a and b are views with one contiguous axis each, so `a.T` costs nothing; out's last axis is contiguous.
    They share a float dtype; out may be fp32 beside 16-bit a and b.
    """
    a, b, out = as_arrays(a, b, out)
    if out is None and beta != 0.0:
        raise InvalidValue(f"matmul with beta = {beta} adds to out; got no out. Give the array to add to.")
    _check_product(a, b, out)
    if out is None:
        out = array_module(a).empty((a.shape[0], b.shape[1]), a.dtype)
    _check_accumulate(accumulate, a, out)
    _product(a, b, out, beta=beta, accumulate=accumulate)
    return out


def linear_forward(x, weight, bias=None, *, out=None, accumulate: str = "fp32"):
    """Returns `y` = x @ weight + bias. `out` gives the array to write."""
    x, weight, bias = as_arrays(x, weight, bias)
    N, _, M = expect("linear", "x (N, K), weight (K, M), bias (M,)", x, weight, bias, hint=FLATTEN)
    y = _or_new(out, x, N, M)
    expect("linear's out", "y (N, M), weight (K, M), x (N, K)", y, weight, x)
    _check_accumulate(accumulate, x, y)
    _product(x, weight, y, bias=bias, accumulate=accumulate)
    return y


def linear_backward(dy, x, weight, *, bias=True, need_dx=True, out=None, accumulate: str = "fp32"):
    """Returns `(dx, dweight, dbias)`, the gradients of `linear_forward`; dx is None without `need_dx`, dbias
    without `bias`.

    `out` gives the three arrays to write; one that is None is made. dx may be written over x, read before.
    """
    dy, x, weight = as_arrays(dy, x, weight)
    N, M, K = expect(
        "linear_backward", "dy (N, M), x (N, K), weight (K, M)", dy, x, weight, hint=FLATTEN
    )  # fmt: skip
    dx, dweight, dbias = (None, None, None) if out is None else out
    dx = _or_new(dx, x, N, K) if need_dx else None
    dweight, dbias = _or_new(dweight, x, K, M), _or_new(dbias, x, M) if bias else None
    outputs = "dx (N, K), dweight (K, M), dbias (M,), x (N, K)"
    expect("linear_backward's out", outputs, dx, dweight, dbias, x)
    _check_accumulate(accumulate, x, dweight)
    _backward_weight(dy, x, dweight, dbias, accumulate)
    if need_dx:
        _product(dy, weight.T, dx, accumulate=accumulate)
    return dx, dweight, dbias


def linear_backward_input(dy, weight, *, out=None, accumulate: str = "fp32"):
    """Returns `dx` = dy @ weight^T. `out` gives the array to write."""
    dy, weight = as_arrays(dy, weight)
    N, _, K = expect("linear_backward_input", "dy (N, M), weight (K, M)", dy, weight, hint=FLATTEN)
    dx = _or_new(out, dy, N, K)
    expect("linear_backward_input's out", "dx (N, K), weight (K, M), dy (N, M)", dx, weight, dy)
    _check_accumulate(accumulate, dy, dx)
    _product(dy, weight.T, dx, accumulate=accumulate)
    return dx


def linear_backward_weight(dy, x, *, bias=True, out=None, accumulate: str = "fp32"):
    """Returns `(dweight, dbias)` = (x^T @ dy, the sum of dy over rows); dbias is None without `bias`.

    `out` gives the two arrays to write; one that is None is made.
    """
    dy, x = as_arrays(dy, x)
    N, M, K = expect("linear_backward_weight", "dy (N, M), x (N, K)", dy, x, hint=FLATTEN)
    dweight, dbias = (None, None) if out is None else out
    dweight, dbias = _or_new(dweight, x, K, M), _or_new(dbias, x, M) if bias else None
    outputs = "dweight (K, M), dbias (M,), dy (N, M), x (N, K)"
    expect("linear_backward_weight's out", outputs, dweight, dbias, dy, x)
    _check_accumulate(accumulate, x, dweight)
    _backward_weight(dy, x, dweight, dbias, accumulate)
    return dweight, dbias


def _or_new(out, like, *shape):
    return array_module(like).empty(shape, like.dtype) if out is None else out


def _product(a, b, out, *, bias=None, beta=0.0, accumulate="fp32"):
    M, N = out.shape
    if on_gpu(out):
        if bias is not None and not fuses_bias(out):
            fill_rows, T, R, ROWS = _bias_kernel(N, aligned(N, bias, out))
            launch(fill_rows, (-(-M // (R * ROWS)), -(-N // (8 * T))), (T, R), bias, out, M)
            bias, beta = None, 1.0
        gemm(a, b, out, beta=beta, accumulate=accumulate, bias=bias)
    else:
        beta, tasks = ONE if bias is not None else np.float32(beta), _shares(max(M, N))
        if M == 1 and b.flags.c_contiguous:
            _row_cpu(a, b, bias, out, beta, tasks)
        elif M == 1 and b.flags.f_contiguous:
            _row_transposed_cpu(a, b.T, bias, out, beta, tasks)
        else:
            _product_cpu(a, b, bias, out, beta, tasks, M >= N)


def _backward_weight(dy, x, dweight, dbias, accumulate):
    M, K = dy.shape[1], x.shape[1]
    if on_gpu(x):
        gemm(x.T, dy, dweight, accumulate=accumulate)
        if dbias is not None:
            sum_rows(dy, dbias)
    else:
        _backward_weight_cpu(dy, x, dweight, dbias, _shares(max(K, M)))


# ----------------------------------------------------------------------------
# Checks


def _check_accumulate(accumulate, a, out):
    if accumulate not in ("fp32", "fp16"):
        raise InvalidValue(f'accumulate is "fp32" or "fp16"; got {accumulate!r}.')
    if accumulate == "fp16":
        if not on_gpu(a):
            raise Unavailable(
                'accumulate="fp16" needs a GPU: on the CPU fp16 is widened and summed in fp32. '
                'Pass accumulate="fp32".'
            )
        if not a.dtype == out.dtype == np.float16:
            raise InvalidType(
                f'accumulate="fp16" sums products of fp16 arrays into fp16; got {a.dtype} into {out.dtype}. '
                'Pass accumulate="fp32".'
            )


def _check_product(a, b, out):
    """`expect` for views: one contiguous axis each is enough."""
    given = [(name, x) for name, x in (("a", a), ("b", b), ("out", out)) if x is not None]
    picture = ", ".join(f"{name} {x.dtype} {x.shape}" for name, x in given)
    if len({is_cupy(x) for _, x in given}) > 1:
        raise InvalidType("matmul expects all arrays on one device; got some on the CPU. Move them first.")
    if any(x.ndim != 2 for _, x in given) or a.shape[1] != b.shape[0] or (
        out is not None and out.shape != (a.shape[0], b.shape[1])
    ):  # fmt: skip
        raise InvalidValue(f"matmul expects a (M, K), b (K, N), out (M, N); got {picture}. {FLATTEN}")
    if a.dtype not in FLOATS.values() or a.dtype != b.dtype or (
        out is not None and out.dtype not in (a.dtype, np.float32)
    ):  # fmt: skip
        raise InvalidType(
            f"matmul expects one float dtype for a and b, and out of that dtype or float32; got {picture}. "
            "Convert with .astype."
        )
    for name, x in given:
        if not (_rows_are_contiguous(x) or name != "out" and _rows_are_contiguous(x.T)):
            axis = "the last axis of out" if name == "out" else f"one axis of {name}"
            raise InvalidValue(
                f"matmul expects {axis} contiguous; {name} {x.shape} has strides {x.strides}. "
                "Copy it with numpy.ascontiguousarray or cupy.ascontiguousarray."
            )


def _rows_are_contiguous(x) -> bool:
    (rows, columns), (row, column) = x.shape, x.strides
    return column == x.itemsize and (rows == 1 or row % x.itemsize == 0 and row >= columns * x.itemsize)
