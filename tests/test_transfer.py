"""The upload protocol against a model of streams in which a copy happens only once somebody waits for it."""

import sys
import types

import numpy as np
import pytest

from nbtrain.data import batches, eval_batches, write_tokens
from nbtrain.device.transfer import ALIGNMENT, Snapshots, Uploader, snapshot_bytes
from nbtrain.errors import Unavailable


class _Stream:
    """Work that is queued, and run when an event behind it is waited for."""

    def __init__(self, non_blocking=False):
        self.ptr, self.queue, self.n_done = id(self), [], 0
        _Stream.all[self.ptr] = self

    all: dict = {}

    def run(self, n):
        for work in self.queue[self.n_done : n]:
            work()
        self.n_done = max(self.n_done, n)

    def wait_event(self, event):
        stream, n = event.recorded  # as of now: a later record does not change what is waited for
        if self is _Stream.current:
            stream.run(n)
        else:
            self.queue.append(lambda: stream.run(n))

    def synchronize(self):
        self.run(len(self.queue))


class _Event:
    def __init__(self, disable_timing=False):
        self.recorded = None

    def record(self, stream):
        self.recorded = stream, len(stream.queue)

    def synchronize(self):
        self.recorded[0].run(self.recorded[1])


class _Device:
    def __init__(self, index):
        self.index = index

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass


class _Pointer:
    def __init__(self, data, offset=0):
        self.data, self.offset, self.ptr = data, offset, data.ctypes.data + offset
        _Pointer.all[self.ptr] = data[offset:]

    all: dict = {}

    def __add__(self, offset):
        return _Pointer(self.data, self.offset + offset)


@pytest.fixture
def cupy(monkeypatch):
    """A stand-in for CuPy with one device."""
    _Stream.all, _Pointer.all, _Stream.current = {}, {}, _Stream()
    pinned = []

    def alloc(n_bytes):
        return _Pointer(np.full(n_bytes, 0xEE, np.uint8))

    def alloc_pinned_memory(n_bytes):
        pinned.append(np.full(n_bytes, 0xEE, np.uint8))
        memory = pinned[-1].view(_Memory)
        memory.ptr = memory.ctypes.data
        _Pointer.all[memory.ptr] = pinned[-1]
        return memory

    def ndarray(shape, dtype, pointer):
        n_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return pointer.data[pointer.offset : pointer.offset + n_bytes].view(dtype).reshape(shape)

    def memcpy_async(to, source, n_bytes, kind, stream):
        assert kind in ("host to device", "device to host")
        to, source = _bytes_at(to), _bytes_at(source)
        _Stream.all[stream].queue.append(lambda: np.copyto(to[:n_bytes], source[:n_bytes]))

    runtime = types.SimpleNamespace(
        is_hip=False,
        getDeviceCount=lambda: 1,
        CUDARuntimeError=RuntimeError,
        memcpyAsync=memcpy_async,
        memcpyHostToDevice="host to device",
        memcpyDeviceToHost="device to host",
    )
    cuda = types.SimpleNamespace(
        runtime=runtime,
        Device=_Device,
        Stream=_Stream,
        Event=_Event,
        alloc=alloc,
        alloc_pinned_memory=alloc_pinned_memory,
        get_current_stream=lambda: _Stream.current,
        get_elapsed_time=lambda begun, copied: 1.5,
    )
    module = types.SimpleNamespace(cuda=cuda, ndarray=ndarray, pinned=pinned)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


class _Memory(np.ndarray):
    pass


def _bytes_at(address):
    """The bytes behind an address in one of the memories that were given out."""
    found = [x for x in _Pointer.all.values() if 0 <= address - x.ctypes.data < len(x)]
    return found[0][address - found[0].ctypes.data :]


class _OnDevice(np.ndarray):
    """An array as CuPy has them: its address is data.ptr."""

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data)


def _on_device(array):
    memory = _Pointer(np.ascontiguousarray(array).reshape(-1).view(np.uint8)).data
    return memory.view(array.dtype).reshape(array.shape).view(_OnDevice)


def _arrays(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 100, shape, dtype=np.int32) for shape in [(1, 3, 5), (2, 64), (7,)]]


def test_an_upload_is_there_only_after_its_wait(cupy):
    uploader, arrays = Uploader("cuda:0"), _arrays(0)
    begun = uploader.start(arrays)
    assert not any((a == b).all() for a, b in zip(begun.arrays, arrays, strict=True))
    done = uploader.wait(begun)
    assert all((a == b).all() and a.dtype == b.dtype for a, b in zip(done, arrays, strict=True))
    assert all((a.ctypes.data - done[0].ctypes.data) % ALIGNMENT == 0 for a in done)


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_pinned_memory_is_not_written_under_a_copy(ahead, cupy):
    """More uploads are under way than there are buffers: none gets another's bytes."""
    uploader = Uploader("cuda:0", buffers=2)
    begun = []
    for i in range(20):
        begun.append(uploader.start(_arrays(i)))
        if i >= ahead:
            got = uploader.wait(begun[i - ahead])
            assert all((a == b).all() for a, b in zip(got, _arrays(i - ahead), strict=True))
    assert len(cupy.pinned) == 2


def test_larger_arrays_get_larger_pinned_memory(cupy):
    uploader = Uploader("cuda:0", buffers=1)
    for n in (10, 1000, 10):
        array = np.arange(n)
        assert (uploader.upload([array])[0] == array).all()
    assert len(cupy.pinned) == 2


def test_a_copy_waits_for_what_the_current_stream_had_queued(cupy):
    """The pool may have handed out memory that kernels queued before still read."""
    uploader, ran = Uploader("cuda:0"), []
    _Stream.current.queue.append(lambda: ran.append("kernel"))
    begun = uploader.start(_arrays(0))
    _Stream.current.queue.append(lambda: ran.append("later kernel"))
    uploader.wait(begun)
    assert ran == ["kernel"]


def test_close_ends_the_copies_under_way(cupy):
    uploader = Uploader("cuda:0")
    begun = uploader.start(_arrays(0))
    uploader.close()
    assert all((a == b).all() for a, b in zip(begun.arrays, _arrays(0), strict=True))


def test_batches_through_a_device_equal_the_host_s(cupy, tmp_path):
    write_tokens(tmp_path / "train.bin", np.arange(500), vocab_size=500)
    spec = dict(B=2, T=8, micro=2)
    with batches(tmp_path / "train.bin", **spec) as host:
        wanted, states = [], []
        for _ in range(40):
            wanted.append(next(host))
            states.append(host.state())
    with batches(tmp_path / "train.bin", **spec, device="cuda:0") as source:
        for want, state in zip(wanted, states, strict=True):
            got = next(source)
            assert all((a == b).all() for a, b in zip(got, want, strict=True))
            assert source.state() == state  # the staged batch does not count
    host, device = (
        list(eval_batches(tmp_path / "train.bin", B=3, T=8, device=name)) for name in ("cpu", "cuda:0")
    )
    assert len(host) == len(device) == 21
    for got, want in zip(device, host, strict=True):
        assert all((a == b).all() for a, b in zip(got, want, strict=True))


def test_a_snapshot_holds_what_the_arrays_held_when_it_was_taken(cupy):
    """What is queued behind it, as the next step, waits for the copy; what was queued before comes first."""
    snapshots, arrays = Snapshots("cuda:0"), [_on_device(x) for x in _arrays(0)]
    before = [x.copy() for x in arrays]

    def step():
        for x in arrays:
            x += 1

    _Stream.current.queue.append(step)
    copies = snapshots.take(arrays)
    _Stream.current.queue.append(step)
    _Stream.current.synchronize()
    assert snapshots.wait() == 1.5
    for copy, array, was in zip(copies, arrays, before, strict=True):
        assert (copy == was + 1).all() and (array == was + 2).all()
        assert copy.dtype == was.dtype and copy.ctypes.data % 8 == 0


def test_snapshots_use_their_memory_again_and_take_more_for_larger_arrays(cupy):
    snapshots, arrays = Snapshots("cuda:0"), [_on_device(x) for x in _arrays(0)]
    snapshots.reserve(snapshot_bytes(arrays))
    for _ in range(3):
        snapshots.take(arrays)
        snapshots.wait()
    assert len(cupy.pinned) == 1
    larger = [_on_device(np.arange(4000))]
    (copy,) = snapshots.take(larger)
    snapshots.wait()
    assert len(cupy.pinned) == 2 and (copy == larger[0]).all()


def test_pinned_memory_that_cannot_be_had_is_told(cupy):
    def none(n_bytes):
        raise RuntimeError("out of memory")

    cupy.cuda.alloc_pinned_memory = none
    with pytest.raises(Unavailable, match=r"4,096 bytes of pinned host memory.*out of memory.*wait=True"):
        Snapshots("cuda:0").reserve(4096)


def test_a_snapshot_on_the_cpu_is_a_copy():
    snapshots, arrays = Snapshots("cpu"), _arrays(0)
    copies = snapshots.take(arrays)
    before = [x.copy() for x in arrays]
    for x in arrays:
        x[...] = -1
    assert snapshots.wait() == 0 and all((a == b).all() for a, b in zip(copies, before, strict=True))
    again = snapshots.take(arrays)
    assert all(a.ctypes.data == b.ctypes.data and (a == -1).all() for a, b in zip(again, copies, strict=True))


def test_what_is_not_there_says_what_to_do(cupy):
    with pytest.raises(Unavailable, match=r"cuda:1 was asked for, but there are 1 GPU\(s\)"):
        Uploader("cuda:1")
    with pytest.raises(Unavailable, match=r"hip:0 .*built for CUDA\. Install nbtrain\[rocm\]"):
        Uploader("hip:0")
    cupy.cuda.runtime.getDeviceCount = lambda: (_ for _ in ()).throw(RuntimeError("no driver"))
    with pytest.raises(Unavailable, match=r"no GPU can be used here \(no driver\)"):
        Uploader("cuda:0")
