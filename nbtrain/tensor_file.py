"""safetensors files: written one tensor after the other, read once every name, shape and dtype is right.

length    8 bytes, uint64 little-endian: that of the header
header    JSON: name -> dtype, shape, data_offsets; padded with spaces to 8 bytes
data      the tensors in the header's order, without gaps
"""

import contextlib
import hashlib
import json
import struct
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from nbtrain.device import FLOATS
from nbtrain.device.place import to_host
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.files import flush

# What is written, under safetensors' names; 16-bit floats as fp32.
DTYPES = dict.fromkeys(FLOATS.values(), "F32") | {np.dtype(np.int32): "I32", np.dtype(np.uint32): "U32"}

Spec = tuple[tuple[int, ...], str]  # a tensor's shape and safetensors' name of its dtype


def write_tensors(file: Path, tensors: dict, metadata: dict[str, str] | None = None) -> dict:
    """Writes a new file with the arrays in `tensors`, from whatever device they are on, and flushes it;
    returns its size and SHA-256. 16-bit floats are written as fp32; dtypes that DTYPES lacks are refused."""
    head: dict[str, dict] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, x in tensors.items():
        shape, dtype = spec_of(x)
        if dtype not in DTYPES.values():
            raise InvalidType(
                f"{file}: {name} must be {', '.join(map(str, DTYPES))}; it is {dtype}. Convert it first."
            )
        end = offset + 4 * x.size
        head[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(head).encode("ascii")
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(file, "xb") as opened:

        def write(data) -> None:
            opened.write(data)
            digest.update(data)

        write(struct.pack("<Q", len(text)) + text)
        for x in tensors.values():
            host = to_host(x)
            if host.dtype in FLOATS.values():
                host = host.astype(np.float32, copy=False)
            write(host.reshape(-1).view(np.uint8))
        flush(opened)
    return {"bytes": 8 + len(text) + offset, "sha256": digest.hexdigest()}


def spec_of(x) -> Spec:
    """What `write_tensors` makes of an array; the dtype is its own name where DTYPES lacks it."""
    dtype = getattr(x, "dtype", type(x).__name__)
    return tuple(getattr(x, "shape", ())), DTYPES.get(dtype, str(dtype))


def check_specs(
    found: dict[str, Spec],
    expected: dict[str, Spec],
    optional: dict[str, Spec] | None = None,
    *,
    where: str,
    told_by: str,
) -> None:
    """Raises unless `found`, what is or would be in a file, is what `expected` and perhaps `optional` say."""
    expected = expected | {name: spec for name, spec in (optional or {}).items() if name in found}
    if unlike := found.keys() ^ expected.keys():
        name = sorted(unlike)[0]
        which = "lacks the" if name in expected else "has an unknown"
        raise InvalidValue(
            f"{where} {which} tensor {name[:80]!r}: it belongs to another config than that in {told_by}."
        )
    for name, wanted in expected.items():
        if found[name] != wanted:
            kind = InvalidValue if found[name][1] == wanted[1] else InvalidType
            is_shape, is_dtype = found[name]
            raise kind(f"{where}: {name} must be {wanted[1]} {wanted[0]}; it is {is_dtype} {is_shape}.")


@contextlib.contextmanager
def open_tensors(
    file: Path,
    expected: dict[str, Spec],
    optional: dict[str, Spec] | None = None,
    told_by: str = "the caller",
):
    """An open file whose names, shapes and dtypes are those of `expected` and perhaps of `optional`, checked
    before a tensor is read. `told_by`: where they come from."""
    try:
        opened = safe_open(file, framework="numpy")
    except SafetensorError as error:  # which may quote the file
        raise InvalidValue(f"{file} is damaged: it is no safetensors file ({str(error)!r}).") from None
    with opened as tensors:
        slices = {name: tensors.get_slice(name) for name in tensors.keys()}
        found = {name: (tuple(x.get_shape()), x.get_dtype()) for name, x in slices.items()}
        try:
            check_specs(found, expected, optional, where=str(file), told_by=told_by)
        except InvalidType as error:
            raise InvalidValue(str(error)) from None
        yield tensors
