"""checkpoint.json: what it must hold, whether the files beside it are those that were saved, and what here is
not as it was there."""

import functools
import hashlib
import importlib.metadata
import json
import sys
from pathlib import Path

import nbtrain
from nbtrain.device import FLOATS, blas
from nbtrain.device.machine import machine
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.files import read_json

VERSION = 1
FORMAT = "nbtrain checkpoint"
MODEL, OPTIMIZER, INDEX = "model.safetensors", "optimizer.safetensors", "checkpoint.json"
MAX_INDEX_BYTES = 2**26  # the largest tokenizer is a quarter of it
LONGEST = {"bytes": 2**63, "sha256": "0" * 64}  # what is told of a file, before it is written
LIBRARIES = ("numpy", "numba", "llvmlite", "scipy", "ml-dtypes", "safetensors")
GPU_LIBRARIES = (
    "numba-cuda", "numba-hip", "nvmath-python", "cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0",
    "nvidia-cublas", "nvidia-cublas-cu12",
)  # fmt: skip
NO_BITS = {"python", "safetensors"}  # no result depends on their versions
FIELDS = dict(dtype=str, config=dict, versions=dict, machine=dict, gemm_plan=dict, files=dict)
OR_NONE = dict.fromkeys(("train_config", "tokenizer", "data_state", "extra"), dict)


@functools.cache  # looking them up takes as long as copying a small model
def versions_here() -> dict[str, str]:
    """Of nbtrain, Python and the libraries that results may depend on."""
    versions = {"nbtrain": nbtrain.__version__, "python": sys.version.split()[0]}
    for name in LIBRARIES + GPU_LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def digest_of(index: dict) -> str:
    """SHA-256 of all of checkpoint.json but its own "digest"."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode("ascii")).hexdigest()


def encoded(index: dict) -> bytes:
    """checkpoint.json's bytes."""
    return json.dumps(index, indent=1).encode("ascii")


def check_index(index: dict, where: str | Path) -> None:
    """Raises unless every field of `save` is there, and has its type: before it is written, and when it was
    read."""
    for field, kind in (FIELDS | OR_NONE).items():
        value = index.get(field)
        if not isinstance(value, kind) and (field not in OR_NONE or field not in index or value is not None):
            wanted = f"a {kind.__name__}" + " or None" * (field in OR_NONE)
            got = type(value).__name__ if field in index else "nothing"
            raise InvalidType(f"{where}: {field!r} must be {wanted}; got {got}.")
    if index["dtype"] not in FLOATS:
        raise InvalidValue(f"{where}: dtype must be one of {', '.join(FLOATS)}; got {index['dtype'][:40]!r}.")
    # Names are compared, never followed: no path in the file leads anywhere.
    if set(index["files"]) not in ({MODEL}, {MODEL, OPTIMIZER}):
        raise InvalidValue(
            f"{where}: expected the files {MODEL} and perhaps {OPTIMIZER}; got "
            f"{str(sorted(index['files']))[:200]}."
        )
    for name, expected in index["files"].items():
        if (
            not isinstance(expected, dict)
            or not isinstance(expected.get("bytes"), int)
            or not isinstance(expected.get("sha256"), str)
        ):
            raise InvalidValue(f"{where}: expected bytes and sha256 of {name}; got {_short(expected)}.")


def read_index(path: Path) -> dict:
    """checkpoint.json, its form checked."""
    file = path / INDEX
    index = read_json(file, MAX_INDEX_BYTES, encoding="ascii", fault=" is damaged:")
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InvalidValue(
            f'{file} does not belong to a checkpoint of nbtrain: expected "format": "{FORMAT}".'
        )
    if index.get("version") != VERSION:
        raise InvalidValue(
            f"{file} has format version {_short(index.get('version'))}; this nbtrain reads version "
            f"{VERSION}. Update nbtrain."
        )
    digest = index.pop("digest", None)
    if digest != digest_of(index):
        raise InvalidValue(f"{file} is damaged: its digest does not belong to its content.")
    try:
        check_index(index, file)
    except InvalidType as error:
        raise InvalidValue(str(error)) from None
    return index


def check_file(file: Path, expected: dict) -> None:
    """Raises where the file is not the one of `expected`, size and SHA-256; reads all of it."""
    if not file.is_file():
        raise InvalidValue(f"{file} is missing; expected {expected['bytes']} bytes.")
    n_bytes = file.stat().st_size
    if n_bytes != expected["bytes"]:
        raise InvalidValue(
            f"{file} is damaged: expected {expected['bytes']} bytes, there are {n_bytes}. Take another copy "
            "of the checkpoint."
        )
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    if digest != expected["sha256"]:
        raise InvalidValue(
            f"{file} is damaged: its {n_bytes} bytes are there, but not those that were saved (SHA-256 "
            f"{digest[:16]}…, expected {_short(expected['sha256'][:16])}…). Take another copy of the "
            "checkpoint."
        )


def differences(path: Path, index: dict, place: str) -> list[str]:
    """What is not as it was where the checkpoint was saved, and may so change bits. The plan of the GPU's
    products is taken from it where it can be."""
    there, here = index["machine"], machine(place)
    found = []
    if there.get("device") != here["device"]:
        found.append(f"device {_short(there.get('device'))}, here {here['device']}")
    else:
        for name in sorted(there.keys() | here.keys()):
            a, b = _short(there.get(name)), _short(here.get(name))
            if there.get(name) != here.get(name):
                what = _short(name)
                found.append(f"other {what}" if a == b or len(a + b) > 80 else f"{what} {a}, here {b}")
    versions = versions_here()
    for name in sorted((index["versions"].keys() | versions.keys()) - NO_BITS):
        a, b = index["versions"].get(name, "none"), versions.get(name, "none")
        if a != b and (place != "cpu" or name not in GPU_LIBRARIES):
            found.append(f"{_short(name)} {_short(a)}, here {_short(b)}")
    if place != "cpu" and there.get("device") == here["device"]:
        try:
            reason = blas.adopt(index["gemm_plan"])
        except InvalidValue as error:
            raise InvalidValue(f"{path / INDEX}: {error}") from None
        if reason is not None:
            found.append(_escaped(reason))
    return found


def _short(value) -> str:
    """A value of the file, as a message may hold it."""
    text = str(value)
    return _escaped(text if len(text) <= 60 else f"{text[:60]}…")


def _escaped(text: str) -> str:
    """`text` with nothing in it that a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
