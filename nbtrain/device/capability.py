"""What the GPU that an array is on can do, beyond what every GPU can."""

import functools

from nbtrain.device.backend import SIMULATED, TARGET
from nbtrain.device.launching import is_recording, recorded_capability
from nbtrain.device.outline import Outline
from nbtrain.device.place import device_of


@functools.cache
def compute_capability(device: str) -> tuple[int, int] | None:
    """(9, 0) on a Hopper GPU; None on the CPU and on AMD."""
    if not device.startswith("cuda"):
        return None
    import cupy

    text = cupy.cuda.Device(int(device.partition(":")[2])).compute_capability
    return int(text[:-1]), int(text[-1])


def capability_of(x) -> tuple[int, int] | None:
    """The compute capability of the NVIDIA GPU that an array or an outline is on; None elsewhere."""
    if isinstance(x, Outline):
        return x.card.capability
    return recorded_capability() if is_recording() else compute_capability(device_of(x))


# Of a multiprocessor, by compute capability (CUDA C++ Programming Guide, "Technical Specifications per
# Compute Capability"). A table, since a plan has no device to ask.
_SHARED_KB = {
    (8, 0): 164, (8, 6): 100, (8, 7): 164, (8, 9): 100, (9, 0): 228, (10, 0): 228, (10, 3): 228,
    (11, 0): 228, (12, 0): 100, (12, 1): 100,
}  # fmt: skip


def shared_memory_of(x) -> int:
    """Bytes of shared memory that a multiprocessor of x's GPU has, where memory can copy to it by itself
    (`fetch_access`), else 0; 0, too, for a GPU that is newer than this table. A block takes 1 KB beside its
    own."""
    if SIMULATED:
        return 1 << 30
    return _SHARED_KB.get(capability_of(x) or (0, 0), 0) << 10 if TARGET != "hip" else 0


def can_fetch(x, aligned: bool, blocks: int, own_bytes: int) -> bool:
    """Whether a kernel may read the rows of x ahead (`fetch_access`): 16-bit ones at multiples of 16 bytes,
    where so many blocks on a multiprocessor find `own_bytes` of shared memory each. 2 KB besides are CUDA's
    and the reductions'."""
    return aligned and x.dtype.itemsize == 2 and blocks * (own_bytes + 2048) <= shared_memory_of(x)
