"""Reads AMD code objects: an ELF file whose note, in MessagePack, says what each kernel needs."""

import struct
from dataclasses import dataclass

NT_AMDGPU_METADATA = 32
SHT_SYMTAB, SHT_NOTE, STT_FUNC = 2, 7, 2


@dataclass(frozen=True)
class Kernel:
    name: str
    scratch_bytes: int  # stack of a thread, in global memory
    sgpr_spills: int  # scalar registers moved, for want of room, to lanes of a vector register or to scratch
    vgpr_spills: int  # vector registers written to scratch
    lds_bytes: int  # shared memory of a block
    vgprs: int
    sgprs: int
    threads: int  # the largest block it was compiled for
    wavefront: int
    kernarg_bytes: int
    code: bytes


def read_kernel(image: bytes) -> Kernel:
    """The only kernel of a code object."""
    sections = sections_of(image)
    (about,) = _metadata(image, sections)["amdhsa.kernels"]
    return Kernel(
        name=about[".name"],
        scratch_bytes=about[".private_segment_fixed_size"],
        sgpr_spills=about[".sgpr_spill_count"],
        vgpr_spills=about[".vgpr_spill_count"],
        lds_bytes=about[".group_segment_fixed_size"],
        vgprs=about[".vgpr_count"],
        sgprs=about[".sgpr_count"],
        threads=about[".max_flat_workgroup_size"],
        wavefront=about[".wavefront_size"],
        kernarg_bytes=about[".kernarg_segment_size"],
        code=_function(image, sections, about[".name"]),
    )


def sections_of(image: bytes):
    """(name, type, flags, address, offset, size, link, info, alignment, entry size) of each section."""
    if image[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"expected a little-endian 64-bit ELF file, got one that begins with {image[:6]!r}")
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count = struct.unpack_from("<HH", image, 58)
    return [struct.unpack_from("<IIQQQQIIQQ", image, start + k * size) for k in range(count)]


def _metadata(image: bytes, sections) -> dict:
    for _, kind, _, _, offset, size, *_ in sections:
        end = offset + size
        while kind == SHT_NOTE and offset < end:
            name_size, desc_size, note = struct.unpack_from("<III", image, offset)
            desc = offset + 12 + (name_size + 3) // 4 * 4
            if note == NT_AMDGPU_METADATA:
                return _unpack(image[desc : desc + desc_size], 0)[0]
            offset = desc + (desc_size + 3) // 4 * 4
    raise ValueError("the code object has no AMDGPU metadata note")


def _function(image: bytes, sections, name: str) -> bytes:
    for _, kind, _, _, offset, size, link, *_ in sections:
        if kind != SHT_SYMTAB:
            continue
        names = sections[link][4]
        for at in range(offset, offset + size, 24):
            name_at, info, _, section, address, length = struct.unpack_from("<IBBHQQ", image, at)
            found = image[names + name_at : image.index(b"\0", names + name_at)]
            if found == name.encode() and info & 15 == STT_FUNC:
                begin = sections[section][4] + address - sections[section][3]
                return image[begin : begin + length]
    raise ValueError(f"the code object has no code for {name}")


def _unpack(data: bytes, at: int):
    """(value, position after it) of the MessagePack value at `at`. Notes have no floats and no extensions."""
    tag = data[at]
    at += 1
    if tag <= 0x7F:
        return tag, at
    if tag >= 0xE0:
        return tag - 256, at
    if tag <= 0x8F:
        return _unpack_map(data, at, tag & 15)
    if tag <= 0x9F:
        return _unpack_list(data, at, tag & 15)
    if tag <= 0xBF:
        return data[at : at + (tag & 31)].decode(), at + (tag & 31)
    if tag in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[tag], at
    formats = {0xCC: "B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: "b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
               0xD9: "B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}  # fmt: skip
    if tag not in formats:
        raise ValueError(f"unexpected MessagePack tag {tag:#x}")
    (value,) = struct.unpack_from(formats[tag], data, at)
    at += struct.calcsize(formats[tag])
    if tag >= 0xDE:
        return _unpack_map(data, at, value)
    if tag >= 0xDC:
        return _unpack_list(data, at, value)
    if tag >= 0xD9:
        return data[at : at + value].decode(), at + value
    return value, at


def _unpack_list(data, at, count):
    values = []
    for _ in range(count):
        value, at = _unpack(data, at)
        values.append(value)
    return values, at


def _unpack_map(data, at, count):
    flat, at = _unpack_list(data, at, 2 * count)
    return dict(zip(flat[::2], flat[1::2], strict=True)), at
