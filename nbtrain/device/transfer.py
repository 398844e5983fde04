"""Host arrays to the GPU beside the work that runs there: pinned memory, a copy stream, events."""

from collections import deque
from typing import NamedTuple

import numpy as np

from nbtrain.errors import InvalidValue, Unavailable

ALIGNMENT = 256  # bytes; what the arrays of one upload start at, as separate allocations would


class Upload(NamedTuple):
    arrays: tuple  # CuPy arrays, filled once `copied` is done
    copied: object  # cupy event on the copy stream


class _Pinned:
    """Pinned host memory, and the event after which it may be written again."""

    def __init__(self, cupy, n_bytes: int):
        self.memory = cupy.cuda.alloc_pinned_memory(n_bytes)
        self.bytes = np.frombuffer(self.memory, np.uint8, n_bytes)
        self.copied = cupy.cuda.Event(disable_timing=True)


class Uploader:
    """Copies tuples of host arrays to one GPU on a stream of its own.

    `start` begins a copy and returns at once; `wait` makes the current stream wait for it and gives the
    arrays; `upload` is both. The order that makes this safe without a host synchronisation:

    * An upload's memory comes from the pool of the stream that is current at `start`, so the pool may hand
      out bytes that kernels queued on that stream still read. The copy stream therefore waits for all that
      was queued there before. Called before a step is queued, the copy runs beside that step and behind the
      one before.
    * The current stream waits for the copy's event in `wait`; afterwards the arrays are like any others of
      that stream, and freeing them is ordered by it. Call `start` and `wait` under the same current stream.
    * Pinned memory is written again only once the event of its last copy is done. This bounds, too, how far
      the host runs ahead: by `buffers` uploads.
    * `close` waits for the copy stream, so that memory is not given back under a copy that nobody waited for.
    """

    def __init__(self, device: str, buffers: int = 3):
        cupy, index = _cupy_device(device)
        self._cupy, self._device = cupy, cupy.cuda.Device(index)
        self._buffers = buffers
        self._pinned: deque[_Pinned] = deque()  # oldest copy first
        with self._device:
            self._stream = cupy.cuda.Stream(
                non_blocking=True
            )  # a blocking one would serialise with the null stream
            self._queued = cupy.cuda.Event(disable_timing=True)

    def start(self, arrays) -> Upload:
        """The arrays on the GPU, as one copy that has begun."""
        cupy = self._cupy
        offsets, n_bytes = [], 0
        for array in arrays:
            offsets.append(n_bytes)
            n_bytes += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        with self._device:
            pinned = self._next_pinned(n_bytes)
            for array, offset in zip(arrays, offsets, strict=True):
                into = pinned.bytes[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
                np.copyto(into, array)
            memory = cupy.cuda.alloc(n_bytes)
            self._queued.record(cupy.cuda.get_current_stream())
            self._stream.wait_event(self._queued)
            cupy.cuda.runtime.memcpyAsync(
                memory.ptr, pinned.memory.ptr, n_bytes, cupy.cuda.runtime.memcpyHostToDevice, self._stream.ptr
            )
            pinned.copied.record(self._stream)
            uploaded = tuple(
                cupy.ndarray(array.shape, array.dtype, memory + offset)
                for array, offset in zip(arrays, offsets, strict=True)
            )
        return Upload(uploaded, pinned.copied)

    def wait(self, upload: Upload) -> tuple:
        """The arrays of `upload`, which the current stream now waits for."""
        with self._device:
            self._cupy.cuda.get_current_stream().wait_event(upload.copied)
        return upload.arrays

    def upload(self, arrays) -> tuple:
        """`start` and `wait` in one."""
        return self.wait(self.start(arrays))

    def close(self) -> None:
        """Waits until every copy that began is done."""
        with self._device:
            self._stream.synchronize()

    def _next_pinned(self, n_bytes: int) -> _Pinned:
        """Pinned memory of at least `n_bytes` that no copy reads, moved behind all the others."""
        if len(self._pinned) < self._buffers:
            pinned = _Pinned(self._cupy, n_bytes)
        else:
            pinned = self._pinned.popleft()
            pinned.copied.synchronize()
            if len(pinned.bytes) < n_bytes:
                pinned = _Pinned(self._cupy, n_bytes)
        self._pinned.append(pinned)
        return pinned


def _cupy_device(device: str):
    """CuPy and the index of "cuda:<index>" or "hip:<index>"."""
    kind, _, index = device.partition(":") if isinstance(device, str) else ("", "", "")
    if kind not in ("cuda", "hip") or not (index.isascii() and index.isdigit()):
        raise InvalidValue(f'device must be "cpu", "cuda:<index>" or "hip:<index>"; got {device!r}.')
    extra = {"cuda": "cuda13] or nbtrain[cuda12", "hip": "rocm"}[kind]
    try:
        import cupy
    except ImportError as error:
        raise Unavailable(
            f"{device} needs CuPy, which does not import ({error}). Install nbtrain[{extra}]."
        ) from None
    if cupy.cuda.runtime.is_hip != (kind == "hip"):
        built = "ROCm" if cupy.cuda.runtime.is_hip else "CUDA"
        raise Unavailable(
            f"{device} was asked for, but the CuPy installed here is built for {built}. Install "
            f"nbtrain[{extra}]."
        )
    try:
        n_devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise Unavailable(
            f"{device} was asked for, but no GPU can be used here ({error}). Check the driver."
        ) from None
    if int(index) >= n_devices:
        raise Unavailable(f"{device} was asked for, but there are {n_devices} GPU(s) here, counted from 0.")
    return cupy, int(index)
