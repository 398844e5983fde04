"""Arrays to the GPU and back beside the work that runs there: pinned memory, a copy stream, events."""

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
            n_bytes += _padded(array.nbytes)
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


class Snapshots:
    """Copies of arrays as they are at one moment, in host memory that is taken once and used again.

    On a GPU the copy runs on a stream of its own, behind what the current stream has queued. What is queued
    there afterwards waits for the copy, since a donated or captured step writes over what it was given: that
    is the copy's whole price, and the host does not wait. `wait` does, in whichever thread needs the bytes.
    On the CPU `take` returns when the copy is done.
    """

    def __init__(self, device: str):
        self._memory = np.empty(0, np.uint8)
        self._device = None
        if device != "cpu":
            self._cupy, index = _cupy_device(device)
            self._device = self._cupy.cuda.Device(index)
            with self._device:
                self._stream = self._cupy.cuda.Stream(non_blocking=True)
                self._queued = self._cupy.cuda.Event(disable_timing=True)
                self._begun, self._copied = self._cupy.cuda.Event(), self._cupy.cuda.Event()

    def reserve(self, n_bytes: int) -> None:
        """Takes host memory for snapshots of up to `n_bytes`, so that the first `take` need not."""
        if len(self._memory) >= n_bytes:
            return
        self._memory = np.empty(0, np.uint8)  # the smaller one goes first
        if self._device is None:
            self._memory = np.zeros(n_bytes, np.uint8)
            self._memory[::4096] = 1  # the system gives pages when they are written
            return
        cupy = self._cupy
        try:
            with self._device:
                self._memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(n_bytes), np.uint8, n_bytes)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise Unavailable(
                f"a snapshot takes {n_bytes:,} bytes of pinned host memory, which cannot be had ({error}). "
                "Free memory, or save with wait=True, which takes none."
            ) from None

    def take(self, arrays) -> tuple[np.ndarray, ...]:
        """The arrays' copies, which hold until the next call; on a GPU they are filled once `wait`
        returns."""
        self.reserve(snapshot_bytes(arrays))
        copies, offset = [], 0
        for array in arrays:
            part = self._memory[offset : offset + array.nbytes]
            copies.append(part.view(array.dtype).reshape(array.shape))
            offset += _padded(array.nbytes)
        if self._device is None:
            for array, copy in zip(arrays, copies, strict=True):
                np.copyto(copy, array)
            return tuple(copies)
        runtime = self._cupy.cuda.runtime
        with self._device:
            current = self._cupy.cuda.get_current_stream()
            self._queued.record(current)
            self._stream.wait_event(self._queued)
            self._begun.record(self._stream)
            for array, copy in zip(arrays, copies, strict=True):
                runtime.memcpyAsync(
                    copy.ctypes.data,
                    array.data.ptr,
                    array.nbytes,
                    runtime.memcpyDeviceToHost,
                    self._stream.ptr,
                )
            self._copied.record(self._stream)
            current.wait_event(self._copied)
        return tuple(copies)

    def wait(self) -> float:
        """Waits until the last snapshot is whole; returns how long the copy kept the GPU, in ms."""
        if self._device is None:
            return 0.0
        with self._device:
            self._copied.synchronize()
            return self._cupy.cuda.get_elapsed_time(self._begun, self._copied)


def snapshot_bytes(arrays) -> int:
    """Host memory that a snapshot of the arrays takes."""
    return sum(_padded(array.nbytes) for array in arrays)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


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
