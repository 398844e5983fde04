"""The CPU's vocabulary: loops over one thread pool, `mm` (BLAS inside a kernel), fast elementary functions.

One idea carries the speed. numba's `prange` owns every thread, and BLAS runs single-threaded inside it: a
matrix product is split over the threads, takes its bias from the cache, or sits in an attention loop, and no
second pool of threads spins against the first.

A CPU twin is a function decorated with `twin`. It is written for fp32 arrays; 16-bit arguments are widened to
fp32 scratch, the same code runs, and what it writes is rounded once.

The same arguments give the same bits, with one exception: LLVM guards a vector loop by a test that what it
writes does not begin just behind what it reads, and takes the scalar loop elsewhere, which contracts products
and sums in other places. `scratch` lies apart from everything; but a result with rows of less than 64 numbers
that begins right behind an argument may differ in the last bit.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import inspect
import math
import os
import pickle
import stat
import threading
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
import platformdirs
import scipy
import scipy.linalg.cython_blas  # noqa: F401  brings the BLAS whose threads are limited below
from llvmlite import ir
from numba import njit, prange, types
from numba.core import caching, cgutils, codegen, serialize
from numba.extending import get_cython_function_address, intrinsic
from threadpoolctl import ThreadpoolController

from nbtrain.errors import InvalidValue, Unavailable
from nbtrain.files import write_atomically

__all__ = [
    "add_rows", "exp", "fill", "larger", "mm", "njit", "prange", "routine", "scratch", "span", "task_count",
    "twin", "uint_as_float",
]  # fmt: skip

F = np.float32
APART = 64  # numbers: the most that LLVM takes in one round of a loop
# Everything that -ffast-math allows but "there is no NaN and no infinity": those must reach the non-finite
# check.
FASTMATH = {"reassoc", "contract", "nsz", "arcp", "afn"}
ONLY_PRANGE = dict.fromkeys(
    ("comprehension", "reduction", "inplace_binop", "setitem", "numpy", "stencil", "fusion"), False
) | {"prange": True}


def _load_tbb():
    """Loads the tbb wheel's library, so that numba's tbb layer finds it by name.

    TBB starts a loop in 15 us and does not spin: beside another busy process, GNU OpenMP's spinning barrier
    makes a step 30 times slower. Where there is no wheel, numba takes OpenMP or its own pool; `_pool` below
    keeps the latter safe.
    """
    try:
        for file in importlib.metadata.files("tbb") or ():
            if file.name in ("libtbb.so.12", "tbb12.dll"):
                return ctypes.CDLL(str(Path(file.locate()).resolve()), getattr(ctypes, "RTLD_GLOBAL", 0))
    except (importlib.metadata.PackageNotFoundError, OSError):
        pass
    return None


_TBB = _load_tbb()
# numba's own pool ("workqueue") aborts the process when two threads enter it at once, and the BLAS limit
# below is one number for the whole process, so twins run one at a time.
_pool = threading.RLock()


# ----------------------------------------------------------------------------
# Compiled code on disk


def cache_folder() -> Path:
    """The folder of compiled code: NBTRAIN_CACHE_DIR, or the user's cache folder; mode 0700 and the user's
    own.

    numba's cache holds pickles, so a folder that somebody else can write to would run their code: it is
    refused.
    """
    folder = Path(
        os.environ.get("NBTRAIN_CACHE_DIR") or platformdirs.user_cache_dir("nbtrain", appauthor=False)
    )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise Unavailable(
            f"the folder of compiled code cannot be made: {error}. "
            "Set NBTRAIN_CACHE_DIR to a folder of yours."
        ) from None
    if hasattr(os, "getuid"):
        info = folder.stat()
        if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Unavailable(
                f"the cache folder must be yours alone (mode 0700); {folder} belongs to user {info.st_uid} "
                f"with mode {stat.filemode(info.st_mode)}. "
                "Run chmod 700 on it, or set NBTRAIN_CACHE_DIR to a folder of yours."
            )
    return folder


def _source_files(function, found: dict) -> dict:
    """The files of a function and of every compiled function that it calls: their code is linked into its
    own."""
    if function not in found:
        found[function] = function.__code__.co_filename
        named = [function.__globals__.get(name) for name in function.__code__.co_names]
        named += [cell.cell_contents for cell in function.__closure__ or ()]
        for callee in named:
            if hasattr(callee, "py_func"):
                _source_files(callee.py_func, found)
    return found


class _CacheLocator:
    """Puts numba's cache of one function into `cache_folder`, and lets it expire with every file its code
    comes from."""

    def __init__(self, function, file):
        self._files = sorted({file, __file__, *_source_files(function, {}).values()})
        self._line = function.__code__.co_firstlineno
        self._folder = (
            cache_folder() / "cpu" / hashlib.sha256(os.path.abspath(file).encode()).hexdigest()[:16]
        )

    @classmethod
    def from_function(cls, function, file):
        return cls(function, file)

    def ensure_cache_path(self):
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get_cache_path(self):
        return str(self._folder)

    def get_source_stamp(self):
        return hashlib.sha256(b"".join(Path(file).read_bytes() for file in self._files)).hexdigest()

    def get_disambiguator(self):
        return str(self._line)


class _CacheFiles:
    """One file for each signature of a function, whole or absent, with the key and the source stamp inside.

    numba's own files are an index and numbered code: of two processes that save at once, both may take one
    number, and the index then names the other signature's code, which runs on arguments of the wrong types.
    """

    def __init__(self, folder, name, stamp):
        self._folder, self._name, self._of = Path(folder), name, (numba.__version__, stamp)

    def _path(self, key) -> Path:
        return self._folder / f"{self._name}.{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.nbc"

    def save(self, key, data) -> None:
        # Two parts: the second can be read only by the numba version that the first one names.
        content = pickle.dumps(self._of) + serialize.dumps((key, data))
        write_atomically(self._path(key), lambda file: file.write(content))

    def load(self, key):
        try:
            with open(self._path(key), "rb") as file:
                if pickle.load(file) == self._of:
                    found, data = pickle.load(file)
                    return data if found == key else None
        except FileNotFoundError:
            pass
        _say_that_it_compiles()
        return None

    def flush(self) -> None:
        for path in self._folder.glob(f"{self._name}.*.nbc"):
            path.unlink(missing_ok=True)


def _say_that_it_compiles() -> None:
    from nbtrain.device.place import say_once  # which stands on this module

    say_once(
        "compiling for this CPU, once, half a minute or so for a whole model; the code is kept in "
        f"{cache_folder()}"
    )


class _CacheImpl(caching.CompileResultCacheImpl):
    _locator_classes = [_CacheLocator]


class _Cache(caching.FunctionCache):
    _impl_class = _CacheImpl

    def __init__(self, function):
        super().__init__(function)
        self._cache_file = _CacheFiles(
            self.cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )


class _Library(codegen.JITCodeLibrary):
    """Machine code that calls its own copies of what it calls.

    A function's object holds copies of its loops and routines, optimized once more with it, as weak symbols.
    In the process that compiled them numba has loaded the loops' and routines' own objects before, whose
    symbols win; in one that loads the function from the cache, the copies do. A sum that is vectorized
    another way has other bits, so copies are made local: they are called in both.
    """

    def _finalize_final_module(self):
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage == llvmlite.binding.Linkage.linkonce_odr:
                function.linkage = llvmlite.binding.Linkage.internal
        super()._finalize_final_module()


def _compile(function, **options):
    """`njit` with the cache above: numba's `cache=True` would write beside the source or into a folder of its
    choice."""
    compiled = njit(fastmath=FASTMATH, error_model="numpy", boundscheck=False, **options)(function)
    compiled._cache = _Cache(function)
    generator, compile_ = compiled.targetctx.codegen(), compiled.compile

    def compile_to_library(signature):
        before = generator._library_class
        generator._library_class = _Library
        try:
            return compile_(signature)
        finally:
            generator._library_class = before

    compiled.compile = compile_to_library
    return compiled


def routine(function):
    """Compiles a serial function that twins call, as a function of its own (never inlined, so it compiles
    once)."""
    return _compile(function, inline="never")


# ----------------------------------------------------------------------------
# BLAS inside numba: scipy's, one thread a call

llvmlite.binding.add_symbol("nbtrain_sgemm", get_cython_function_address("scipy.linalg.cython_blas", "sgemm"))
_SGEMM = "cciiifpipifpi"  # BLAS's arguments: characters, integers, floats, pointers, every one by reference


@intrinsic
def _sgemm(typing, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    kinds = {"c": types.int64, "i": types.int64, "p": types.int64, "f": types.float32}
    signature = types.void(*(kinds[kind] for kind in _SGEMM))

    def codegen(context, builder, signature, args):
        narrow, byte = {"c": ir.IntType(8), "i": ir.IntType(32)}, ir.IntType(8).as_pointer()
        references = []
        for kind, value in zip(_SGEMM, args, strict=True):
            if kind == "p":
                references.append(builder.inttoptr(value, byte))
            else:
                value = builder.trunc(value, narrow[kind]) if kind in narrow else value
                references.append(builder.bitcast(cgutils.alloca_once_value(builder, value), byte))
        function_type = ir.FunctionType(ir.VoidType(), [byte] * len(references))
        builder.call(
            cgutils.get_or_insert_function(builder.module, function_type, "nbtrain_sgemm"), references
        )
        return context.get_dummy_value()

    return signature, codegen


@routine
def mm(a, b, out, alpha, beta):
    """out = alpha * a @ b + beta * out, for fp32 views with one contiguous axis each (`.T` costs nothing)."""
    m, k = a.shape
    n = out.shape[1]
    # BLAS is column-major and sees the transposed problem: out.T = b.T @ a.T
    ta, lda = (78, a.strides[0] // 4) if a.strides[1] == 4 else (84, a.strides[1] // 4)
    tb, ldb = (78, b.strides[0] // 4) if b.strides[1] == 4 else (84, b.strides[1] // 4)
    # A view of one row or column may report any stride; BLAS wants one that could hold the row.
    lda = max(lda, k if ta == 78 else m)
    ldb = max(ldb, n if tb == 78 else k)
    ldc = max(out.strides[0] // 4, n)
    _sgemm(tb, ta, n, m, k, F(alpha), b.ctypes.data, ldb, a.ctypes.data, lda, F(beta), out.ctypes.data, ldc)


@functools.cache
def _blas_controllers():
    """threadpoolctl's handles on the BLAS that `mm` calls: the copy bundled with scipy, else every BLAS there
    is."""
    blas = [lib for lib in ThreadpoolController().lib_controllers if lib.user_api == "blas"]
    root = Path(scipy.__file__).parent
    own = [lib for lib in blas if {root, root.parent / "scipy.libs"} & set(Path(lib.filepath).parents)]
    return own or blas


def blas_architectures() -> str:
    """The kinds of CPU whose kernels that BLAS chose here: "SkylakeX"."""
    return " ".join(sorted({str(getattr(lib, "architecture", "?")) for lib in _blas_controllers()}))


@contextlib.contextmanager
def _one_blas_thread():
    """Keeps the BLAS inside twins to one thread while they run, and leaves it as it was."""
    before = [(lib, lib.num_threads) for lib in _blas_controllers()]
    before = [(lib, n) for lib, n in before if n != 1]
    for lib, _ in before:
        lib.set_num_threads(1)
    try:
        yield
    finally:
        for lib, n in before:
            lib.set_num_threads(n)


# ----------------------------------------------------------------------------
# Twins


def _is_16_bit(x) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.itemsize == 2


def twin(*, writes: str, blas: bool = False):
    """Compiles a CPU twin: a numba function over fp32 arrays, parallel where it says `prange`.

    `writes` names the parameters that it writes (they may be read, too). 16-bit arrays, fp16 or bfloat16, are
    widened to fp32 before the call, and those it writes are rounded afterwards, to nearest, ties to even.
    `blas` says that it calls `mm`.
    """
    alone = _one_blas_thread if blas else contextlib.nullcontext

    def decorate(function):
        compiled = _compile(function, parallel=ONLY_PRANGE)
        parameters = list(inspect.signature(function).parameters)
        written = [parameters.index(name) for name in writes.split()]

        @functools.wraps(function)
        def run(*args):
            for i in written:
                if args[i] is not None and not args[i].flags.writeable:
                    name, at = function.__module__.rpartition(".")[2], args[i]
                    raise InvalidValue(
                        f"{name} writes {parameters[i]}, and got a read-only array {at.shape} {at.dtype}. "
                        "Give it one of your own, as numpy.empty_like makes it."
                    )
            with _pool, alone():
                if not any(map(_is_16_bit, args)):
                    return compiled(*args)
                wide = [x.astype(F) if _is_16_bit(x) else x for x in args]
                for i, x in enumerate(args):  # one array given twice (in place) must stay one array
                    if _is_16_bit(x):
                        wide[i] = next(w for a, w in zip(args, wide, strict=True) if a is x)
                compiled(*wide)
                with np.errstate(over="ignore"):  # too large for 16 bits is infinite, as on a GPU
                    for i in written:
                        if _is_16_bit(args[i]):
                            args[i][...] = wide[i].astype(args[i].dtype)

        decorated: Any = run
        decorated.compiled = compiled
        return decorated

    return decorate


def thread_count() -> int:
    """Threads that twins run on."""
    return numba.get_num_threads()


@njit(inline="always")
def span(t, tasks, n, step=1):
    """First and last-plus-one item of task `t`: near-equal shares of n items, in multiples of `step`."""
    units = (n + step - 1) // step
    return min(n, units * t // tasks * step), min(n, units * (t + 1) // tasks * step)


def task_count(n: int, grain: int, most: int = 32) -> int:
    """Tasks for n items of which `grain` are worth a task: a power of two, whatever the number of threads, so
    that sums over tasks have the same bits on every machine with the same BLAS."""
    return 1 << min(max(n // grain, 1).bit_length() - 1, most.bit_length() - 1)


def scratch(*shape: int) -> np.ndarray:
    """Uninitialised fp32 for a twin to work in, no row of which begins just behind another array."""
    n = math.prod(shape)
    return np.empty(APART + n, F)[APART:].reshape(shape)


@njit(inline="always")
def fill(x, value):
    for i in range(x.size):
        x[i] = value


@routine
def add_rows(x, top, bottom, left, right, out):
    """out += x[top:bottom, left:right].sum(0), eight rows for each pass over out."""
    m = top + (bottom - top) // 8 * 8
    for i in range(top, m, 8):
        a, b, c, d = x[i, left:right], x[i + 1, left:right], x[i + 2, left:right], x[i + 3, left:right]
        e, f, g, h = x[i + 4, left:right], x[i + 5, left:right], x[i + 6, left:right], x[i + 7, left:right]
        for j in range(out.size):
            out[j] += ((a[j] + b[j]) + (c[j] + d[j])) + ((e[j] + f[j]) + (g[j] + h[j]))
    for i in range(m, bottom):
        a = x[i, left:right]
        for j in range(out.size):
            out[j] += a[j]


# ----------------------------------------------------------------------------
# Elementary functions


@intrinsic
def uint_as_float(typing, i):
    """The fp32 number with these 32 bits."""

    def codegen(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def larger(typing, a, b):
    """max that keeps NaN; unlike numba's max, LLVM vectorizes a reduction with it."""

    def codegen(context, builder, signature, args):
        f = ir.FloatType()
        return builder.call(
            builder.module.declare_intrinsic("llvm.maximum", [f], ir.FunctionType(f, [f, f])), args
        )

    return types.float32(types.float32, types.float32), codegen


@njit(fastmath=FASTMATH, inline="always")
def exp(x):
    """e**x for x <= 88 (Cephes), without a branch so that LLVM vectorizes it: 1.2e-7 relative; 0 below -87;
    NaN stays."""
    n = np.floor(x * F(1.4426950408889634) + F(0.5))
    r = x - n * F(0.693359375) - n * F(-2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    p = p * r * r + r + F(1.0)
    y = p * uint_as_float((np.int32(n) + np.int32(127)) << np.int32(23))
    return F(0) if x < F(-87) else y
