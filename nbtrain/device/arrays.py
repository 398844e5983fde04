"""What launchers ask of their arguments: which module they belong to, and whether shapes, dtypes and devices
agree."""

import functools
import re
import sys

import ml_dtypes
import numpy as np

from nbtrain.device.outline import Outline
from nbtrain.errors import InvalidType, InvalidValue, Unavailable

bfloat16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": bfloat16}
_KINDS = {
    "float": tuple(FLOATS.values()),
    "fp32": (np.dtype(np.float32),),
    "int32": (np.dtype(np.int32),),
    "uint32": (np.dtype(np.uint32),),
    "uint8": (np.dtype(np.uint8),),
    "any": None,
}


def dtype_name(storage) -> str:
    """The name that options use: fp32, fp16 or bf16."""
    return next(name for name, dtype in FLOATS.items() if dtype == storage)


def cupy_or_none():
    """CuPy if something has imported it (an array of its kind cannot exist otherwise), else None."""
    return sys.modules.get("cupy")


def is_cupy(x) -> bool:
    """True for CuPy's arrays, and for the outlines that stand for them where a step is planned."""
    cupy = cupy_or_none()
    return cupy is not None and isinstance(x, cupy.ndarray) or isinstance(x, Outline)


def array_module(x):
    """The module, `numpy` or `cupy`, that allocates arrays like `x`; for an outline, its card."""
    if isinstance(x, Outline):
        return x.card
    return cupy_or_none() if is_cupy(x) else np


def signature_of(args) -> tuple:
    """What a kernel is compiled for: the dtype of each array (CuPy's or an outline) and the type of each
    number."""
    return tuple(x.dtype if hasattr(x, "data") and hasattr(x.data, "ptr") else type(x) for x in args)


def as_array(x):
    """`x` as a NumPy or CuPy array, without a copy: those as they are, anything else through DLPack."""
    if x is None or isinstance(x, np.ndarray) or is_cupy(x):
        return x
    if not hasattr(x, "__dlpack__"):
        raise InvalidType(
            f"expected a NumPy or CuPy array, or one with DLPack; got {type(x).__name__}. "
            "Convert it with numpy.asarray or cupy.asarray."
        )
    try:
        if x.__dlpack_device__()[0] == 1:  # kDLCPU
            return np.from_dlpack(x)
        import cupy

        return cupy.from_dlpack(x)
    except ImportError:
        raise Unavailable(
            f"a {type(x).__name__} on a GPU is read through CuPy, which is not installed. Run pip install "
            "'nbtrain[cuda13]', or move it to the CPU."
        ) from None
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # whatever the other library raises
        raise InvalidType(
            f"expected an array that DLPack can hand over as it lies; got a {type(x).__name__}, of which it "
            f"says: {error}. A tensor with a gradient goes as x.detach(), bf16 as its bits: "
            "numpy.from_dlpack(x.view(torch.int16)).view(ml_dtypes.bfloat16)."
        ) from error


def as_arrays(*xs):
    """Each of `xs` as `as_array` makes it."""
    return tuple(map(as_array, xs))


@functools.cache
def _parse(spec: str):
    """'x (N, C), weight (C,), mean (N,) fp32' -> ((name, dims, kind), ...); no kind means the storage
    dtype."""
    items = re.findall(r"(\w+) \(([^)]*)\)(?: (\w+))?", spec)
    return tuple(
        (
            name,
            tuple(int(d) if d.isdigit() else d for d in re.split(r",\s*", dims.rstrip(", ")) if d),
            kind or "storage",
        )
        for name, dims, kind in items
    )


def expect(op: str, spec: str, *arrays, hint: str = "") -> tuple[int, ...]:
    """Checks `arrays` against `spec` and returns the dimensions it names, in order of first appearance.

    `spec` reads "x (N, C), weight (C,), mean (N,) fp32": a name, a shape, and a dtype where it is not the
    storage dtype, the float dtype that all arrays without one share. None stands for an optional array that
    is absent. All arrays must be C-contiguous and on one device. Raises InvalidValue or InvalidType with the
    whole picture.
    """
    # A step asks the same thing hundreds of times: what was found right once is looked up.
    try:
        key = (
            spec,
            *[None if x is None else (type(x), x.shape, x.dtype, x.flags.c_contiguous) for x in arrays],
        )
        found = _expected.get(key)
    except AttributeError:  # something that is no array; said below
        key, found = None, None
    if found is None:
        found = _expect(op, spec, arrays, hint)
        if key is not None:
            if len(_expected) >= 10_000:  # plans walk through many shapes
                _expected.clear()
            _expected[key] = found
    return found


_expected: dict[tuple, tuple[int, ...]] = {}


def _expect(op: str, spec: str, arrays, hint: str) -> tuple[int, ...]:
    names: dict[str, int] = {}
    module, storage = None, None
    for (name, dims, kind), x in zip(_parse(spec), arrays, strict=True):
        if x is None:
            continue
        if not isinstance(x, np.ndarray) and not is_cupy(x):
            raise InvalidType(
                f"{op} expects arrays ({spec}); got {name} of type {type(x).__name__}. "
                "Convert it with numpy.asarray or cupy.asarray."
            )
        module = module or array_module(x)
        if array_module(x) is not module:
            raise InvalidType(
                f"{op} expects all arrays on one device; got {_picture(spec, arrays)}. Move them first."
            )
        if kind == "storage":
            storage = storage or x.dtype
            wrong = x.dtype != storage or x.dtype not in FLOATS.values()
        else:
            allowed = _KINDS[kind]
            wrong = allowed is not None and x.dtype not in allowed
        if wrong:
            wanted = "one float dtype (float32, float16 or bfloat16)" if kind == "storage" else kind
            raise InvalidType(
                f"{op} expects {spec}, with {wanted} for {name}; got {_picture(spec, arrays)}. "
                "Convert with .astype."
            )
        if len(x.shape) != len(dims) or any(names.setdefault(d, n) != n if type(d) is str else d != n
                                            for d, n in zip(dims, x.shape, strict=True)):  # fmt: skip
            raise InvalidValue(f"{op} expects {spec}; got {_picture(spec, arrays)}. {hint}".rstrip())
        if not x.flags.c_contiguous:
            raise InvalidValue(
                f"{op} expects C-contiguous arrays; {name} {x.shape} has strides {x.strides}. "
                f"Copy it with numpy.ascontiguousarray or cupy.ascontiguousarray."
            )
    return tuple(names.values())


def expect_ids(
    op: str, name: str, ids, size: int, *, ignore_index: int | None = None, least: int = 0
) -> None:
    """Raises InvalidValue if a host array holds an id outside least..size-1 that is not `ignore_index`.

    Ids on a GPU are not read here: kernels keep them in bounds, and `batch_check` finds the bad ones.
    """
    if is_cupy(ids):
        return
    bad = (ids < least) | (ids >= size)
    if ignore_index is not None:
        bad &= ids != ignore_index
    if bad.any():
        at = np.unravel_index(int(bad.argmax()), bad.shape)
        besides = "" if ignore_index is None else f" or ignore_index = {ignore_index}"
        raise InvalidValue(
            f"{op} expects {name} in {least}..{size - 1}{besides}; "
            f"got {name}[{', '.join(map(str, at))}] = {ids[at]}. Check the vocabulary size and the data."
        )


def _picture(spec, arrays) -> str:
    return ", ".join(
        f"{name} {x.dtype} {tuple(x.shape)} on the {'GPU' if is_cupy(x) else 'CPU'}"
        for (name, _, _), x in zip(_parse(spec), arrays, strict=True)
        if isinstance(x, np.ndarray) or is_cupy(x)
    )


def same_memory(a, b) -> bool:
    """True if the two arrays begin at the same address (an output given as the input it replaces)."""
    return a is not None and b is not None and _address(a) == _address(b)


def _address(x) -> int:
    return x.data.ptr if is_cupy(x) else x.__array_interface__["data"][0]


def aligned(row_length: int, *arrays) -> bool:
    """True if rows of `row_length` elements can be read eight elements at a time in 128-bit accesses."""
    return row_length % 8 == 0 and all(x is None or _address(x) % 16 == 0 for x in arrays)
