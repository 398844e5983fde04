"""Token files: ids on the disk, memory-mapped to be read.

nbtrain's own layout, everything little endian:

    offset  bytes  content
    0       8      b"nbtokens"
    8       4      version, uint32: 1
    12      4      dtype, uint32: 2 for uint16 ids, 4 for uint32 ids (its bytes an id)
    16      8      count, uint64: how many ids follow, at least 1
    24             the ids

llm.c's shards are read and written too: a header of int32[256] that holds magic, version, count, then the
ids; magic 20240520 with version 1 means uint16 (GPT-2), 20240801 with version 7 means uint32 (Llama 3).
nanoGPT's files are read only. They have no header, just uint16 ids: nothing in them says so, hence they are
read as `format="nanogpt"`, never by guessing.
"""

import os
import re
import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.files import write_atomically

MAGIC = b"nbtokens"
VERSION = 1
HEADER = struct.Struct("<8sIIQ")
DTYPES: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
LLMC_HEADER_BYTES = 256 * 4
MAX_LLMC_TOKENS = 2**31 - 1
# magic -> version, dtype of the ids
LLMC_KINDS: dict[int, tuple[int, np.dtype]] = {20240520: (1, DTYPES[2]), 20240801: (7, DTYPES[4])}
FORMATS = ("auto", "nbtrain", "llm.c", "nanogpt")
WRITABLE = ("nbtrain", "llm.c")
MAX_VOCAB_SIZE = 2**31 - 1  # ids travel as int32


class TokenFile:
    """The ids of one token file, mapped, not read: `tokens` is (count,) uint16 or uint32.

    `format` "auto" recognises nbtrain's and llm.c's headers. A damaged file is an InvalidValue that names it.
    """

    def __init__(self, path: str | Path, format: str = "auto"):
        if format not in FORMATS:
            raise InvalidValue(f"format must be one of {', '.join(map(repr, FORMATS))}; got {format!r}.")
        self.path = Path(path)
        if not self.path.is_file():
            what = "is a folder" if self.path.is_dir() else "does not exist"
            raise InvalidValue(f"expected a token file at {self.path}, which {what}.")
        n_bytes = self.path.stat().st_size
        with open(self.path, "rb") as file:
            head = file.read(LLMC_HEADER_BYTES)
        self.format = _recognise(self.path, head, n_bytes, format)
        offset, dtype, count = _LAYOUTS[self.format](self.path, head, n_bytes)
        expected = offset + count * dtype.itemsize
        if count == 0:
            raise InvalidValue(
                f"{self.path} holds 0 tokens: expected more than {offset} bytes, there are {n_bytes}. "
                "Write it again from a text that is not empty."
            )
        if n_bytes != expected:
            raise InvalidValue(
                f"{self.path} is damaged: {count} tokens of {dtype.itemsize} bytes behind {offset} bytes of "
                f"header need {expected} bytes, there are {n_bytes}. Copy or write the file again."
            )
        self.tokens = np.memmap(self.path, dtype=dtype, mode="r", offset=offset, shape=(count,))

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        dtype = self.tokens.dtype.name
        return f"TokenFile({str(self.path)!r}, {len(self)} {dtype} tokens, format={self.format!r})"


def write_tokens(path: str | Path, tokens, *, vocab_size: int, format: str = "nbtrain") -> None:
    """Writes ids (n,) to a token file, "nbtrain" or "llm.c": uint16 when `vocab_size` allows it, else uint32.

    Nothing is at `path` until the whole file is on the disk.
    """
    tokens = np.asarray(tokens)
    head, dtype = header(tokens.size, vocab_size=vocab_size, format=format)
    if tokens.ndim != 1 or tokens.size == 0:
        raise InvalidValue(f"{path}: expected at least one token in shape (n,); got shape {tokens.shape}.")
    if tokens.dtype.kind not in "iu":
        raise InvalidType(f"{path}: tokens must be integers; got {tokens.dtype}.")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        at = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
        raise InvalidValue(
            f"{path}: token {tokens[at]} at position {at} lies outside 0..{vocab_size - 1} (vocab_size = "
            f"{vocab_size}). Nothing was written."
        )

    def write(file):
        file.write(head)
        file.write(np.ascontiguousarray(tokens, dtype).data)

    write_atomically(path, write)


def header(count: int, *, vocab_size: int, format: str = "nbtrain") -> tuple[bytes, np.dtype]:
    """The bytes before `count` ids in a file of `format`, and the dtype of the ids."""
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise InvalidValue(f"vocab_size must lie in 1..{MAX_VOCAB_SIZE}; got {vocab_size}.")
    if format not in WRITABLE:
        raise InvalidValue(f"format must be {' or '.join(map(repr, WRITABLE))} to write; got {format!r}.")
    code = 2 if vocab_size <= 2**16 else 4
    if format == "nbtrain":
        return HEADER.pack(MAGIC, VERSION, code, count), DTYPES[code]
    if count > MAX_LLMC_TOKENS:
        raise InvalidValue(f"a shard of llm.c holds at most {MAX_LLMC_TOKENS} tokens; got {count}.")
    magic, version = next((m, v) for m, (v, dtype) in LLMC_KINDS.items() if dtype == DTYPES[code])
    return struct.pack("<256i", magic, version, count, *[0] * 253), DTYPES[code]


class ShardWriter:
    """Ids, added bit by bit, as token files of `shard_tokens` each in `folder`: <split>_000000.bin, ...

    A shard has its name when it is whole; before, it is a hidden .part file. `commit()` returns how far the
    files on the disk go, as JSON can hold it, and `at=` goes on from there: what came behind is overwritten.
    """

    def __init__(
        self, folder: Path, split: str, *, shard_tokens: int, vocab_size: int, format: str, at=(0, 0)
    ):
        self._folder, self._split, self._shard_tokens = folder, split, shard_tokens
        self._spec: dict = dict(vocab_size=vocab_size, format=format)
        head, self.dtype = header(0, **self._spec)
        self._offset = len(head)
        self.finished, self._count = at
        self._file: BinaryIO | None = None
        self._continue()

    @property
    def n_tokens(self) -> int:
        return self.finished * self._shard_tokens + self._count

    def add(self, ids: np.ndarray) -> None:
        """Adds ids (n,) that lie in the vocabulary."""
        ids = np.ascontiguousarray(ids, self.dtype)
        while ids.size:
            if self._file is None:
                self._file = open(self._part(self.finished), "w+b")
                self._file.write(bytes(self._offset))
            room = self._shard_tokens - self._count
            self._file.write(ids[:room].data)
            self._count += len(ids[:room])
            ids = ids[room:]
            if self._count == self._shard_tokens:
                self._finish()

    def commit(self) -> tuple[int, int]:
        """Puts what was added on the disk; (finished shards, tokens of the one begun)."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return self.finished, self._count

    def finish(self) -> dict[str, int]:
        """Ends the last shard, and returns the tokens of each by its name."""
        counts = [self._shard_tokens] * self.finished + ([self._count] if self._count else [])
        if self._count:
            self._finish()
        return {self._path(i).name: count for i, count in enumerate(counts)}

    def close(self, keep: bool = True) -> None:
        """Leaves the shard that was begun to a later run, or without `keep` removes it."""
        if self._file is not None:
            self._file.close()
            if not keep:
                self._part(self.finished).unlink(missing_ok=True)
            self._file = None

    def _finish(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        self._file.write(header(self._count, **self._spec)[0])
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        os.replace(self._part(self.finished), self._path(self.finished))
        self.finished, self._count = self.finished + 1, 0

    def _continue(self) -> None:
        """Brings the folder's files of this split to where `finished` and `_count` say they are."""
        part, whole = self._part(self.finished), self._path(self.finished)
        if self._count and not part.exists() and whole.exists():
            os.replace(whole, part)  # it was finished after the commit
        needed = [(self._path(i), self._shard_tokens) for i in range(self.finished)]
        for path, count in [*needed, (part, self._count)] if self._count else needed:
            n_bytes = path.stat().st_size if path.exists() else 0
            expected = self._offset + count * self.dtype.itemsize
            if n_bytes < expected or (path != part and n_bytes > expected):
                raise InvalidValue(
                    f"{path}: expected {expected} bytes from an earlier run, there are {n_bytes}. "
                    "Begin anew: --overwrite."
                )
        if self._count:
            self._file = open(part, "r+b")
            self._file.truncate(self._offset + self._count * self.dtype.itemsize)
            self._file.seek(0, os.SEEK_END)

    def _path(self, index: int) -> Path:
        return self._folder / f"{self._split}_{index:06d}.bin"

    def _part(self, index: int) -> Path:
        return self._folder / f".{self._split}_{index:06d}.bin.part"


def shard_names(folder: Path, split: str) -> list[str]:
    """Names of the files in `folder` that a ShardWriter of `split` wrote, whole or begun."""
    form = re.compile(rf"{split}_\d{{6,}}\.bin|\.{split}_\d{{6,}}\.bin\.part")
    return sorted(entry.name for entry in folder.iterdir() if form.fullmatch(entry.name))


def _recognise(path: Path, head: bytes, n_bytes: int, asked: str) -> str:
    """The format that the file's first bytes show, or "nanogpt" where that was asked for."""
    if head.startswith(MAGIC):
        found = "nbtrain"
    elif len(head) >= 4 and struct.unpack_from("<i", head)[0] in LLMC_KINDS:
        found = "llm.c"
    else:
        found = None
    if found is not None and asked in ("auto", found):
        return found
    if found is not None:
        raise InvalidValue(
            f"{path} has {found}'s header, but format={asked!r} was asked for. Say format={found!r}."
        )
    if asked == "nanogpt":
        return asked
    llmc = " or ".join(map(str, LLMC_KINDS))
    expected = {
        "nbtrain": f"the {HEADER.size} bytes of a header that begins with {MAGIC!r}",
        "llm.c": f"the {LLMC_HEADER_BYTES} bytes of a header that begins with {llmc}",
    }
    raise InvalidValue(
        f"{path} has no header: expected {expected.get(asked) or ' or '.join(expected.values())}; "
        f"there are {n_bytes} bytes, the first are {head[:8]!r}. A headerless file of nanoGPT is read as "
        'format="nanogpt".'
    )


def _nbtrain_layout(path: Path, head: bytes, n_bytes: int) -> tuple[int, np.dtype, int]:
    if n_bytes < HEADER.size:
        raise InvalidValue(f"{path} is cut short: its header needs {HEADER.size} bytes, there are {n_bytes}.")
    _, version, code, count = HEADER.unpack_from(head)
    if version != VERSION:
        raise InvalidValue(
            f"{path} has version {version} of nbtrain's token files ({n_bytes} bytes); this nbtrain reads "
            f"version {VERSION}. Update nbtrain, or write the file again."
        )
    if code not in DTYPES:
        raise InvalidValue(
            f"{path} is damaged: its dtype code must be 2 (uint16) or 4 (uint32), it is {code} ({n_bytes} "
            "bytes)."
        )
    return HEADER.size, DTYPES[code], count


def _llmc_layout(path: Path, head: bytes, n_bytes: int) -> tuple[int, np.dtype, int]:
    if n_bytes < LLMC_HEADER_BYTES:
        raise InvalidValue(
            f"{path} is cut short: its header needs {LLMC_HEADER_BYTES} bytes, there are {n_bytes}."
        )
    magic, version, count = struct.unpack_from("<iii", head)
    known, dtype = LLMC_KINDS[magic]
    if version != known:
        raise InvalidValue(
            f"{path} is a shard of llm.c with magic {magic} and version {version} ({n_bytes} bytes); nbtrain "
            f"reads version {known} of that magic."
        )
    if count < 0:
        raise InvalidValue(
            f"{path} is damaged: its header counts {count} tokens; there are {n_bytes} bytes, "
            f"{n_bytes - LLMC_HEADER_BYTES} of them behind the header."
        )
    return LLMC_HEADER_BYTES, dtype, count


def _nanogpt_layout(path: Path, head: bytes, n_bytes: int) -> tuple[int, np.dtype, int]:
    if n_bytes % 2:
        raise InvalidValue(
            f"{path} is damaged: a headerless file of uint16 has an even number of bytes, expected "
            f"{n_bytes - 1} or {n_bytes + 1}, there are {n_bytes}."
        )
    return 0, DTYPES[2], n_bytes // 2


_LAYOUTS = {"nbtrain": _nbtrain_layout, "llm.c": _llmc_layout, "nanogpt": _nanogpt_layout}
