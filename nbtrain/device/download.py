"""Small arrays back to the host while the GPU goes on."""

import numpy as np

from nbtrain.device.arrays import is_cupy


class Download:
    """A copy of `x` as it is at this place of the current stream; `wait` gives it, and waits for nothing that
    was launched afterwards. On the CPU the copy is done at once."""

    def __init__(self, x):
        self._event = None
        if not is_cupy(x):
            self._host = x.copy()
            return
        import cupy

        self._memory = cupy.cuda.alloc_pinned_memory(x.nbytes)
        self._host = np.frombuffer(self._memory, x.dtype, x.size).reshape(x.shape)
        stream = cupy.cuda.get_current_stream()
        cupy.cuda.runtime.memcpyAsync(
            self._memory.ptr, x.data.ptr, x.nbytes, cupy.cuda.runtime.memcpyDeviceToHost, stream.ptr
        )
        self._event = stream.record(cupy.cuda.Event(disable_timing=True))
        self._source = x  # must outlive the copy

    def wait(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
            self._event = self._source = None
            self._host = self._host.copy()  # pinned memory goes back to its pool
        return self._host

    def __del__(self):
        event = getattr(self, "_event", None)
        if event is not None:
            event.synchronize()  # or the pool would hand out memory that the copy has yet to write
