"""Products on AMD GPUs that CuPy cannot ask hipBLAS for, through ROCm's own Python bindings.

CuPy's binding accumulates in fp32 whatever it is told, and on bf16 it throws a C++ exception that ends the
process. The calls are checked against a stub of hipBLAS; nothing here has run on an AMD GPU.
"""

import functools

from nbtrain.errors import Unavailable

STATUS_SUCCESS = 0


@functools.cache
def _bindings():
    try:
        from rocm.bindings import hip, hipblas
    except ImportError as error:
        raise Unavailable(
            f"on AMD, products in bf16 or summed in fp16 need hipBLAS's Python bindings; got {error}. Run "
            "pip install rocm-bindings-libraries, or train in fp16 or fp32 with fp32 accumulation."
        ) from None
    return hipblas, hip.hipDataType


@functools.cache
def _handle(device: int):
    return _checked(_bindings()[0].hipblasCreate())


def _checked(result):
    """What a call returned beside its status."""
    status, *values = result
    if int(status) != STATUS_SUCCESS:
        raise Unavailable(f"hipBLAS answered {status.name}. Check that its ROCm is the one that CuPy uses.")
    return values[0] if values else None


def gemm(shape, a, lda, step_a, b, ldb, step_b, out, ldc, step_c, batch, scalars) -> None:
    """The column-major problem out = alpha * op(a) @ op(b) + beta * out, for a batch of matrices.

    shape: (transpose a, transpose b, m, n, k). a, b, out: CuPy arrays of fp32, fp16 or bf16. scalars: alpha
    and beta, a NumPy array on the host; its dtype, fp32 or fp16, is also that of the accumulation.
    """
    from cupy.cuda import get_current_stream, runtime

    blas, kind = _bindings()
    ta, tb, m, n, k = shape
    operation = (blas.hipblasOperation_t.HIPBLAS_OP_N, blas.hipblasOperation_t.HIPBLAS_OP_T)
    kinds = {"float32": kind.HIP_R_32F, "float16": kind.HIP_R_16F, "bfloat16": kind.HIP_R_16BF}
    ka, kb, kc = (kinds[x.dtype.name] for x in (a, b, out))
    handle = _handle(runtime.getDevice())
    _checked(blas.hipblasSetStream(handle, get_current_stream().ptr))
    alpha, beta = scalars.ctypes.data, scalars.ctypes.data + scalars.itemsize
    computes = blas.hipblasComputeType_t
    compute = computes.HIPBLAS_COMPUTE_16F if scalars.itemsize == 2 else computes.HIPBLAS_COMPUTE_32F
    default = blas.hipblasGemmAlgo_t.HIPBLAS_GEMM_DEFAULT
    problem = handle, operation[ta], operation[tb], m, n, k, alpha
    if batch == 1:
        result = blas.hipblasGemmEx(
            *problem, a.data.ptr, ka, lda, b.data.ptr, kb, ldb, beta, out.data.ptr, kc, ldc, compute, default
        )
    else:
        result = blas.hipblasGemmStridedBatchedEx(
            *problem, a.data.ptr, ka, lda, step_a, b.data.ptr, kb, ldb, step_b, beta, out.data.ptr, kc, ldc,
            step_c, batch, compute, default,
        )  # fmt: skip
    _checked(result)
