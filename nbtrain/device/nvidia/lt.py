"""Matrix products through cuBLASLt: one plan a shape, its algorithm measured once, capturable in a graph.

cuBLASLt is column-major, and a row-major matrix is its transpose there: the call made is out.T = b.T @ a.T,
so cuBLASLt's A is our b and its m is our N. A plan holds descriptor, layouts and algorithm; calling it is one
foreign call.

The algorithm of a shape is the fastest of the library's first candidates on this device that gives the same
bits twice (`device/ranking.py`); split sums stay in fp32. The library is asked with working memory and
without: where a call brings some, many algorithms clear a counter there first, by which their blocks take
turns, and that costs 5 us in a graph. So a choice is an algorithm and the bytes it gets. Choices are kept
on disk, by device and library version, so that a run repeats its bits in the next process; `choices_made`
and `take_choices` carry them to another machine of the same kind. A kept choice is taken only if the
library offers it for that shape: nothing else is handed to it.
"""

import contextlib
import ctypes
import functools
import hashlib
import json
import re

import cupy
import numpy as np
from nvmath.bindings import cublasLt as lt

from nbtrain.device.arrays import bfloat16
from nbtrain.device.blas import WORKSPACE, at_length
from nbtrain.device.cpu import cache_folder
from nbtrain.device.place import say_once
from nbtrain.device.ranking import fastest
from nbtrain.errors import InvalidValue, Unavailable
from nbtrain.files import write_atomically

CANDIDATES = 8  # 32 found nothing better

_DATA = {np.dtype(np.float32): 0, np.dtype(np.float16): 2, bfloat16: 14}
_COMPUTE = {"fp32": (68, 0), "fp16": (64, 2)}  # (compute type, type of alpha and beta)
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8  # descriptor attributes
_BATCH_COUNT, _BATCH_STRIDE = 5, 6  # layout attributes
_PREFER_WORKSPACE, _PREFER_REDUCTION, _PREFER_ALIGNMENT = 1, 3, (5, 6, 7, 8)
_REDUCE_IN_FP32 = 2
_NOTHING, _ADD_BIAS = 1, 4  # epilogues
_RESULT = np.dtype(
    [
        ("algorithm", "<u8", (8,)),
        ("workspace", "<u8"),
        ("status", "<i4"),
        ("waves", "<f4"),
        ("reserved", "<i4", (4,)),
    ]
)


def _put(setter, obj, attribute, value, kind):
    x = kind(value)
    setter(obj, attribute, ctypes.addressof(x), ctypes.sizeof(x))


class _Plan:
    """What the shapes, dtypes and alignment of one product fix."""

    def __init__(self, a, b, out, ta, tb, accumulate, bias, alignment):
        compute, scale = _COMPUTE[accumulate]
        self.scalars = np.array([1, 0], np.float16 if accumulate == "fp16" else np.float32)
        self.alpha_at = self.scalars.ctypes.data
        self.beta_at = self.alpha_at + self.scalars.itemsize
        self.word = np.zeros(1, np.uint64)
        self.bias = 0
        self.descriptor = lt.matmul_desc_create(compute, scale)
        describe = functools.partial(_put, lt.matmul_desc_set_attribute, self.descriptor)
        describe(_TRANSA, int(tb), ctypes.c_int32)
        describe(_TRANSB, int(ta), ctypes.c_int32)
        describe(_EPILOGUE, _NOTHING if bias is None else _ADD_BIAS, ctypes.c_uint32)
        if bias is not None:
            self.point_at_bias(bias.data.ptr)
        self.layouts = [self._layout(x, transposed) for x, transposed in ((a, ta), (b, tb), (out, False))]
        self.candidates = self._candidates(alignment)
        self.had_a_choice = len(self.candidates) > 1
        self.choose(0)

    @staticmethod
    def _layout(x, transposed):
        batch, rows, columns = x.shape
        row, column = (s // x.itemsize for s in x.strides[1:])
        if transposed:
            rows, columns, row, column = columns, rows, column, row
        layout = lt.matrix_layout_create(
            _DATA[x.dtype], columns, rows, max(row if rows > 1 else columns, columns)
        )
        if batch > 1:
            _put(lt.matrix_layout_set_attribute, layout, _BATCH_COUNT, batch, ctypes.c_int32)
            _put(
                lt.matrix_layout_set_attribute,
                layout,
                _BATCH_STRIDE,
                x.strides[0] // x.itemsize,
                ctypes.c_int64,
            )
        return layout

    def _candidates(self, alignment):
        offered = np.concatenate([self._offered(alignment, bytes_) for bytes_ in (WORKSPACE, 0)])
        _, first = np.unique([self.text_of(candidate) for candidate in offered], return_index=True)
        return offered[np.sort(first)]

    def _offered(self, alignment, workspace):
        """The library's first candidates that work in `workspace` bytes, its favourite first."""
        preference = lt.matmul_preference_create()
        prefer = functools.partial(_put, lt.matmul_preference_set_attribute, preference)
        prefer(_PREFER_WORKSPACE, workspace, ctypes.c_uint64)
        prefer(_PREFER_REDUCTION, _REDUCE_IN_FP32, ctypes.c_uint32)
        for attribute in _PREFER_ALIGNMENT:
            prefer(attribute, alignment, ctypes.c_uint32)
        results, count = np.zeros(CANDIDATES, _RESULT), np.zeros(1, np.int32)
        a, b, out = self.layouts
        with contextlib.suppress(lt.cuBLASLtError):  # it has none
            lt.matmul_algo_get_heuristic(
                _handle(), self.descriptor, b, a, out, out, preference,
                CANDIDATES, results.ctypes.data, count.ctypes.data,
            )  # fmt: skip
        lt.matmul_preference_destroy(preference)
        return results[: count[0]][results[: count[0]]["status"] == 0]

    def point_at_bias(self, pointer):
        self.bias = self.word[0] = pointer
        lt.matmul_desc_set_attribute(self.descriptor, _BIAS_POINTER, self.word.ctypes.data, 8)

    def choose(self, i):
        self.chosen = self.candidates[i : i + 1].copy()
        self.algorithm_at = self.chosen.ctypes.data  # a candidate's first field
        self.workspace = int(self.chosen["workspace"].sum())

    @property
    def text(self) -> str:
        """The choice as text, for the disk and for checkpoints."""
        return self.text_of(self.chosen)

    @staticmethod
    def text_of(candidate) -> str:
        """An algorithm, and its bytes of working memory, as hexadecimal text."""
        return candidate["algorithm"].tobytes().hex() + candidate["workspace"].tobytes().hex()

    def take(self, text: str | None) -> bool:
        """Whether `text` is one of the candidates; it is chosen then. Without the bytes, as texts once were,
        the algorithm gets those it asked for first."""
        for i, candidate in enumerate(self.candidates):
            if text and self.text_of(candidate).startswith(text):
                self.choose(i)
                return True
        return False

    def __call__(self, a, b, out, alpha, beta, bias, workspace, stream):
        self.scalars[0], self.scalars[1] = alpha, beta  # read by the call itself
        if bias != self.bias:
            self.point_at_bias(bias)
        la, lb, lo = self.layouts
        lt.matmul(
            _handle(), self.descriptor, self.alpha_at, b, lb, a, la, self.beta_at, out, lo, out, lo,
            self.algorithm_at, workspace, self.workspace, stream,
        )  # fmt: skip


@functools.cache
def _handle():
    return lt.create()


@functools.cache
def _workspace(device: int, stream: int):
    """Working memory of a stream: two products at once may not share it."""
    return cupy.empty(WORKSPACE, cupy.uint8)


def _identity() -> str:
    """What choices belong to: the kind of device and the library's version."""
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode()
    return f"{name}, cuBLASLt {lt.get_version()}"


class Choices:
    """The algorithm of each product, as hexadecimal text by a readable key; kept on disk by device and
    library version."""

    def __init__(self):
        digest = hashlib.sha256(_identity().encode()).hexdigest()[:16]
        self.path = cache_folder() / f"products-{digest}.json"
        self.algorithms: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError):
            self.algorithms = checked_choices(json.loads(self.path.read_text()))

    def put(self, key: str, algorithm: str) -> None:
        self.algorithms[key] = algorithm
        text = json.dumps(self.algorithms, indent=1, sort_keys=True)
        with contextlib.suppress(OSError):  # without a disk the choice lasts as long as the process
            write_atomically(self.path, lambda file: file.write(text.encode()))


@functools.cache
def choices(device: int) -> Choices:
    return Choices()


def checked_choices(found) -> dict[str, str]:
    """`found`, if it is a dict of keys and algorithms, else InvalidValue."""
    if not isinstance(found, dict) or not all(
        isinstance(k, str) and isinstance(v, str) and re.fullmatch("[0-9a-f]{128}([0-9a-f]{16})?", v)
        for k, v in found.items()
    ):
        raise InvalidValue("expected the algorithm of each product as 128 or 144 hexadecimal digits.")
    return found


def choices_made() -> dict:
    """What this process has chosen, for products that left a choice."""
    found = {_name(key): plan.text for key, plan in _plans.items() if plan.had_a_choice}
    return {"for": _identity(), "algorithms": found} if found else {}


def take_choices(made: dict) -> str | None:
    """Takes what `choices_made` gave, for the products of this process from now on; returns why not, if
    not."""
    if made.get("for") != _identity():
        return f"its matrix products were chosen on {str(made.get('for'))[:80]}; this is {_identity()}"
    found = checked_choices(made.get("algorithms"))
    choices(cupy.cuda.Device().id).algorithms.update(found)
    refused = 0
    for key, plan in _plans.items():
        if (text := found.get(_name(key))) is not None:
            refused += not plan.take(text)
    return f"cuBLASLt no longer offers {refused} of its algorithms" if refused else None


def _name(key: tuple) -> str:
    return " ".join(map(str, key[:-1]))  # all but the device


_plans: dict[tuple, _Plan] = {}


def gemm(a, b, out, ta: bool, tb: bool, alpha: float, beta: float, accumulate: str, bias=None) -> None:
    """out = alpha * a @ b + beta * out for (I, M, K), (I, K, N), (I, M, N) views; `ta`, `tb` say whose rows
    are strided.

    bias (N,): added to every row.
    """
    pointers = [x.data.ptr if x is not None else 0 for x in (a, b, out, bias)]
    alignment = functools.reduce(int.__or__, pointers, 256)
    alignment &= -alignment
    device = out.device.id
    key = (
        a.shape, a.strides, b.shape, b.strides, out.strides, a.dtype, out.dtype, ta, tb, accumulate,
        beta != 0, bias is not None, alignment, device,
    )  # fmt: skip
    stream = cupy.cuda.get_current_stream().ptr
    workspace = _workspace(device, stream).data.ptr
    plan = _plans.get(key)
    if plan is None:
        plan = _plans[key] = _make(key, (a, b, out, ta, tb, accumulate, bias, alignment), alpha, beta, stream)
    a_at, b_at, out_at, bias_at = pointers
    plan(a_at, b_at, out_at, alpha, beta, bias_at, workspace, stream)


def _make(key, operands, alpha, beta, stream):
    a, b, out, *_, bias, _ = operands
    plan = _Plan(*operands)
    if not len(plan.candidates):
        raise Unavailable(
            f"cuBLASLt has no algorithm for a {a.shape} @ b {b.shape} in {a.dtype}. "
            "Use another dtype or shape."
        )
    kept = choices(out.device.id)
    name = _name(key)
    if plan.had_a_choice and not plan.take(kept.algorithms.get(name)):
        if cupy.cuda.runtime.streamIsCapturing(stream):
            raise InvalidValue(
                f"a product of a new shape under capture: {a.shape} @ {b.shape}. Run the step once before."
            )
        if at_length.get():
            say_once(f"measuring matrix products, once for a shape; the choices are kept in {cache_folder()}")
        _measure(plan, a, b, out, bias, alpha, beta, stream)
        kept.put(name, plan.text)
    return plan


def _bits(x) -> int:
    """A number that changes with the bits of `x`, a view of any strides."""
    return int(x.view(f"u{x.itemsize}").sum(dtype=cupy.uint64))


def _measure(plan, a, b, out, bias, alpha, beta, stream):
    """Takes the fastest candidate that repeats its bits; while they are timed nothing waits."""
    workspace = _workspace(out.device.id, stream).data.ptr
    target = out
    if beta:  # out's values are still needed, and every run must begin with the same ones
        last = sum((n - 1) * stride for n, stride in zip(out.shape, out.strides, strict=True))
        extent = last + out.itemsize
        target = cupy.empty(-(-extent // 16) * 4, cupy.uint32)
    bias_at = 0 if bias is None else bias.data.ptr

    def run():
        plan(a.data.ptr, b.data.ptr, target.data.ptr, alpha, beta, bias_at, workspace, stream)

    def times(which, calls, rounds):
        events = []
        for _ in range(rounds):
            for i in which:
                plan.choose(i)
                start, end = cupy.cuda.Event(), cupy.cuda.Event()
                for k in range(calls):
                    if k == calls // 2:
                        start.record()
                    run()
                end.record()
                events.append((start, end))
        end.synchronize()
        ms = np.array([cupy.cuda.get_elapsed_time(*pair) for pair in events]).reshape(rounds, len(which))
        return np.median(ms, 0) / (calls - calls // 2)

    usable = []
    for i in range(len(plan.candidates)):
        plan.choose(i)
        bits = []
        for _ in range(2):
            if target is not out:
                target.fill(0)
            with contextlib.suppress(lt.cuBLASLtError):  # a candidate that the library then refuses
                run()
                bits.append(_bits(target))
        if len(bits) == 2 and bits[0] == bits[1]:
            usable.append(i)
    if not usable:
        raise Unavailable("no algorithm of cuBLASLt gave the same bits twice for this product.")
    plan.choose(fastest(usable, times, at_length.get()))
