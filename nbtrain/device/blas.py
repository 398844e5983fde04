"""Matrix products on the GPU: the only caller of cuBLAS and hipBLAS.

Operands are row-major views with one contiguous axis each, so `a.T` costs nothing. Accumulation is fp32 for
every storage dtype; `accumulate="fp16"` trades that away (Hgemm): products of 16-bit inputs are then summed
in fp16, which loses about log2(K) of its 11 bits over K terms and overflows at 65504.

Two rooms: cuBLASLt through NVIDIA's own bindings, where they are installed (capturable in a graph, bias in
the epilogue, algorithms measured once a shape), and CuPy's bindings, which reach cuBLAS on NVIDIA and hipBLAS
on AMD. NBTRAIN_BLAS = cublaslt or cupy takes one by name. NumPy arrays, in the simulator, go through NumPy.
"""

import contextlib
import contextvars
import functools
import importlib.util
import os

import numpy as np

from nbtrain.device.arrays import bfloat16, is_cupy
from nbtrain.device.backend import TARGET
from nbtrain.device.launching import is_recording
from nbtrain.device.outline import Outline
from nbtrain.errors import InvalidType, InvalidValue, Unavailable

_DATA = {
    np.dtype(np.float32): 0,
    np.dtype(np.float16): 2,
    bfloat16: 14,
}  # CUDA_R_32F, CUDA_R_16F, CUDA_R_16BF
_FP32, _FP16 = 68, 64  # CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_16F
_HIP_FP32 = 0  # hipBLAS under CuPy takes the data type in its place: CUDA_R_32F
_DEFAULT_ALGORITHM = -1
WORKSPACE = 32 << 20  # bytes that cuBLASLt works in, a stream; NVIDIA's advice for Hopper
_NO, _YES = 0, 1  # CUBLAS_OP_N, CUBLAS_OP_T


@functools.cache
def room() -> tuple[str, str]:
    """("cublaslt" or "cupy", why)."""
    asked = os.environ.get("NBTRAIN_BLAS", "auto")
    here = TARGET == "nvidia" and importlib.util.find_spec("nvmath") is not None
    if asked == "auto":
        return (
            ("cublaslt", "nvmath-python is installed")
            if here
            else ("cupy", "there is no nvmath-python for this target")
        )
    if asked not in ("cublaslt", "cupy"):
        raise InvalidValue(f"NBTRAIN_BLAS is cublaslt, cupy or auto; got {asked!r}.")
    if asked == "cublaslt" and not here:
        raise Unavailable(
            "NBTRAIN_BLAS=cublaslt needs an NVIDIA GPU and nvmath-python: pip install 'nbtrain[cuda13]'."
        )
    return asked, "asked for"


at_length = contextvars.ContextVar("at_length", default=False)  # whether new products are measured for longer


@contextlib.contextmanager
def measured_at_length():
    """Within, products of new shapes are measured for longer, about half a second each: for training, which
    repeats them thousands of times."""
    before = at_length.set(True)
    try:
        yield
    finally:
        at_length.reset(before)


def plan() -> dict:
    """The algorithms that this process has chosen for its products, as JSON can hold them; {} where nothing
    is measured. Bits depend on them, so a checkpoint carries them."""
    if room()[0] != "cublaslt":
        return {}
    from nbtrain.device.nvidia import lt

    return lt.choices_made()


def adopt(made: dict) -> str | None:
    """Takes what `plan` gave in another process, for every product from now on. None, or the reason why the
    products' bits may differ from that process's. InvalidValue: `made` is not what `plan` gives."""
    if not isinstance(made, dict):
        raise InvalidValue(f"a plan of products is a dict; got {type(made).__name__}.")
    here, why = room()
    if here != "cublaslt":
        return (
            f"its matrix products went through cuBLASLt, here they go through {here} ({why})"
            if made
            else None
        )
    if not made:
        return "its matrix products went another way, here they go through cuBLASLt"
    from nbtrain.device.nvidia import lt

    return lt.take_choices(made)


def gemm(a, b, out, *, alpha: float = 1.0, beta: float = 0.0, accumulate: str = "fp32", bias=None) -> None:
    """out = alpha * a @ b + beta * out + bias.  a (M, K), b (K, N), out (M, N), each with one contiguous
    axis, out's the last.

    bias (N,) has out's dtype, and wants alpha = 1, beta = 0.
    """
    _gemm(a[None], b[None], out[None], alpha, beta, accumulate, bias)


def gemm_batched(a, b, out, *, alpha: float = 1.0, beta: float = 0.0, accumulate: str = "fp32") -> None:
    """out[i] = alpha * a[i] @ b[i] + beta * out[i].  a (I, M, K), b (I, K, N), out (I, M, N): one stride for
    each batch."""
    _gemm(a, b, out, alpha, beta, accumulate, None)


def fuses_bias(x) -> bool:
    """True if `gemm` adds a bias on its way; elsewhere fill `out` with it and take beta = 1."""
    if isinstance(x, Outline):
        return x.card.workspace_bytes > 0
    return is_cupy(x) and room()[0] == "cublaslt"


def _gemm(a, b, out, alpha, beta, accumulate, bias):
    (batch, M, K), N = a.shape, out.shape[-1]
    if b.shape != (batch, K, N) or out.shape != (batch, M, N):
        raise InvalidValue(
            f"a product expects a (M, K), b (K, N), out (M, N); got {a.shape}, {b.shape}, {out.shape}."
        )
    if accumulate not in ("fp32", "fp16"):
        raise InvalidValue(f'accumulate is "fp32" or "fp16"; got {accumulate!r}.')
    if a.dtype != b.dtype or a.dtype not in _DATA or out.dtype not in _DATA:
        raise InvalidType(
            f"a product expects one float dtype for a and b; got {a.dtype}, {b.dtype}. Convert with .astype."
        )
    half = accumulate == "fp16"
    if half and not a.dtype == out.dtype == np.float16:
        raise InvalidType(f'accumulate="fp16" is for fp16 arrays; got {a.dtype} and {out.dtype}.')
    if bias is not None and (bias.shape != (N,) or bias.dtype != out.dtype or alpha != 1 or beta != 0):
        raise InvalidValue(
            f"a product's bias is (N,) = ({N},) of out's dtype with alpha = 1, beta = 0; got {bias.shape}."
        )
    if is_recording():
        return
    if isinstance(out, Outline):
        out.card.product(a, b, out, beta)
        return
    assert bias is None or fuses_bias(out), "fill out with the bias and take beta = 1"
    if not is_cupy(out):
        _gemm_numpy(a, b, out, alpha, beta)
        return

    ta, lda = _layout(a, "a")
    tb, ldb = _layout(b, "b")
    tc, ldc = _layout(out, "out")
    if tc:
        raise InvalidValue(
            f"a product writes rows: out's last axis must be contiguous; strides are {out.strides}."
        )
    if room()[0] == "cublaslt":
        from nbtrain.device.nvidia import lt

        lt.gemm(a, b, out, bool(ta), bool(tb), alpha, beta, accumulate, bias)
        return

    from cupy.cuda import cublas, device

    scalars = np.array([alpha, beta], np.float16 if half else np.float32)
    alpha_at, beta_at = scalars.ctypes.data, scalars.ctypes.data + scalars.itemsize
    step_a, step_b, step_c = (x.strides[0] // x.itemsize for x in (a, b, out))
    shape = tb, ta, N, M, K  # cuBLAS is column-major and sees the transposed problem: out.T = b.T @ a.T
    if TARGET == "hip" and (half or bfloat16 in (a.dtype, out.dtype)):
        # CuPy's hipBLAS binding ends the process on bf16, and always accumulates in fp32 (with fp16 alpha
        # misread).
        from nbtrain.device.hip import blas

        blas.gemm(shape, b, ldb, step_b, a, lda, step_a, out, ldc, step_c, batch, scalars)
        return
    compute = _HIP_FP32 if TARGET == "hip" else _FP16 if half else _FP32
    handle = device.get_cublas_handle()
    if batch == 1:
        cublas.gemmEx(
            handle, *shape, alpha_at, b.data.ptr, _DATA[b.dtype], ldb, a.data.ptr, _DATA[a.dtype], lda,
            beta_at, out.data.ptr, _DATA[out.dtype], ldc, compute, _DEFAULT_ALGORITHM,
        )  # fmt: skip
    else:
        cublas.gemmStridedBatchedEx(
            handle, *shape, alpha_at, b.data.ptr, _DATA[b.dtype], ldb, step_b,
            a.data.ptr, _DATA[a.dtype], lda, step_a,
            beta_at, out.data.ptr, _DATA[out.dtype], ldc, step_c, batch, compute, _DEFAULT_ALGORITHM,
        )  # fmt: skip


def _layout(x, name) -> tuple[int, int]:
    """(transposed, leading dimension) of the matrices of a row-major batch."""
    rows, columns = x.shape[1:]
    row, column = (s // x.itemsize for s in x.strides[1:])
    if column == 1 or columns == 1:
        return _NO, max(row if rows > 1 else columns, columns, 1)
    if row == 1 or rows == 1:
        return _YES, max(column, rows, 1)
    raise InvalidValue(
        f"a product needs one contiguous axis in {name}; got strides {x.strides} for {x.shape}. Copy it."
    )


def _gemm_numpy(a, b, out, alpha, beta):
    product = np.float32(alpha) * np.matmul(a.astype(np.float32), b.astype(np.float32))
    if beta:
        product += np.float32(beta) * out.astype(np.float32)
    with np.errstate(over="ignore"):
        out[...] = product.astype(out.dtype)
