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

from nbtrain.device.place import to_host
from nbtrain.errors import InvalidValue
from nbtrain.files import flush

DTYPES = {np.dtype(np.float32): "F32", np.dtype(np.int32): "I32", np.dtype(np.uint32): "U32"}

Spec = tuple[tuple[int, ...], str]  # a tensor's shape and safetensors' name of its dtype


def write_tensors(file: Path, tensors: dict, metadata: dict[str, str] | None = None) -> dict:
    """Writes a new file with the arrays in `tensors`, from whatever device they are on, and flushes it;
    returns its size and SHA-256. 16-bit floats are written as fp32."""
    head: dict[str, dict] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, x in tensors.items():
        end = offset + 4 * x.size
        spelled = {"dtype": DTYPES.get(x.dtype, "F32"), "shape": list(x.shape)}
        head[name] = spelled | {"data_offsets": [offset, end]}
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
            if host.dtype not in DTYPES:
                host = host.astype(np.float32)
            write(host.reshape(-1).view(np.uint8))
        flush(opened)
    return {"bytes": 8 + len(text) + offset, "sha256": digest.hexdigest()}


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
    except SafetensorError as error:
        raise InvalidValue(f"{file} is damaged: it is no safetensors file ({error}).") from None
    with opened as tensors:
        present = set(tensors.keys())
        expected = expected | {name: spec for name, spec in (optional or {}).items() if name in present}
        if unlike := present ^ set(expected):
            name = sorted(unlike)[0]
            which = "lacks the" if name in expected else "has an unknown"
            raise InvalidValue(
                f"{file} {which} tensor {name[:80]!r}: it belongs to another config than that in {told_by}."
            )
        for name, wanted in expected.items():
            x = tensors.get_slice(name)
            found = tuple(x.get_shape()), x.get_dtype()
            if found != wanted:
                raise InvalidValue(
                    f"{file}: {name} must be {wanted[1]} {wanted[0]}; it is {found[1]} {found[0]}."
                )
        yield tensors
