"""Capturing launches in one graph, and replaying it: a graph of hundreds of kernels costs 2 us a node, not
10."""

import contextlib

from nbtrain.device.outline import Pool, planned_card
from nbtrain.errors import Unavailable


class Graph:
    """What `work()` launches on the current device, captured once; `launch()` replays it on the current
    stream.

    `warm_up()` runs first, twice, so that everything is compiled, measured and allocated. Both run under a
    memory pool of their own that lives as long as the graph: memory that `work` takes and gives back is taken
    again by every replay and by nobody else. `result` is what `work()` returned.
    """

    def __init__(self, warm_up, work):
        card = planned_card()
        if card is not None:
            with card.using(Pool(card)) as self.pool:
                warm_up()
                self.pool.free_all_blocks()
                warm_up()
                self.result, self.graph = work(), None
            return
        import cupy

        self.pool = cupy.cuda.MemoryPool()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        before = cupy.cuda.get_current_stream().record()
        with cupy.cuda.using_allocator(self.pool.malloc), self.stream:
            self.stream.wait_event(before)
            warm_up()
            self.stream.synchronize()
            # What measuring the products took, and the first sizes of scratch that grew.
            self.pool.free_all_blocks()
            warm_up()
            self.stream.synchronize()
            self.stream.begin_capture()
            try:
                self.result = work()
                self.graph = self.stream.end_capture()
            except BaseException as error:
                with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
                    self.stream.end_capture()
                if isinstance(error, cupy.cuda.runtime.CUDARuntimeError):
                    raise Unavailable(
                        f"this step cannot be captured in a graph ({error}): something in it waits for the "
                        "device or takes memory from it. Use donate, or capture only launches."
                    ) from error
                raise

    def launch(self) -> None:
        if self.graph is not None:
            self.graph.launch()

    @property
    def bytes(self) -> int:
        """Device memory that the graph holds, beside what existed before it."""
        return self.pool.total_bytes()
