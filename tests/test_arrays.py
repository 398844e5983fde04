import ml_dtypes
import numpy as np
import pytest

from nbtrain.batch import Batch
from nbtrain.device import SIMULATED, as_array
from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.ops.cast import cast_and_scale
from nbtrain.ops.layernorm import layernorm_backward, layernorm_forward
from nbtrain.ops.linear import linear_forward
from tests.helpers import randn

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


class Foreign:
    """An array of another library: nothing but DLPack."""

    def __init__(self, array, device=None):
        self._array, self._device = array, device

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._device or self._array.__dlpack_device__()


def layernorm_inputs(dtype=np.float32):
    return randn(np, dtype, (5, 16), (16,), (16,))


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def test_an_array_of_another_library_is_taken_without_a_copy():
    x, weight, bias = layernorm_inputs()
    want = layernorm_forward(x, weight, bias)
    got = layernorm_forward(*map(Foreign, (x, weight, bias)))
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert as_array(Foreign(x)).ctypes.data == got[3].ctypes.data == x.ctypes.data
    ids = np.arange(12).reshape(2, 6)
    assert np.array_equal(Batch.of(Foreign(ids), Foreign(ids)).targets[0], ids)


def test_an_array_of_another_library_can_be_written():
    x, out = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    cast_and_scale(Foreign(x), 2.0, out=Foreign(out))
    assert out.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("error", [BufferError, RuntimeError, TypeError, ValueError, NotImplementedError])
def test_what_another_library_cannot_hand_over_is_an_error_that_says_what_to_do(error):
    class Broken(Foreign):
        def __dlpack__(self, **options):
            raise error("it is sparse")

    x, weight, bias = layernorm_inputs()
    with pytest.raises(InvalidType, match=r"got a Broken, of which it says: it is sparse.*x\.detach\(\)"):
        layernorm_forward(Broken(x), weight, bias)


def test_a_lack_of_memory_in_another_library_is_none_of_the_arrays_fault():
    class Broken(Foreign):
        def __dlpack__(self, **options):
            raise MemoryError

    with pytest.raises(MemoryError):
        as_array(Broken(np.zeros(3)))


def test_what_has_no_dlpack_is_refused():
    with pytest.raises(InvalidType, match="one with DLPack; got list"):
        as_array([1.0, 2.0])


def test_an_array_on_a_gpu_needs_cupy(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    with pytest.raises(Unavailable, match="read through CuPy.*nbtrain.cuda13"):
        as_array(Foreign(np.zeros(3), device=(2, 0)))


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


def test_tensors_of_torch_are_taken_and_written(torch):
    x, weight, bias = layernorm_inputs()
    want = layernorm_forward(x, weight, bias)
    tensors = [torch.from_numpy(a.copy()) for a in (x, weight, bias)]
    got = layernorm_forward(*tensors)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    total, out = tensors[0], torch.zeros(80)
    assert got[3].ctypes.data == total.data_ptr()
    cast_and_scale(total.reshape(-1), 2.0, out=out)
    assert np.array_equal(out.numpy(), 2 * x.reshape(-1))


def test_tensors_of_torch_that_cannot_be_taken_say_what_to_do(torch):
    x, weight, bias = layernorm_inputs(ml_dtypes.bfloat16)
    want = layernorm_forward(x, weight, bias)
    tensors = [torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for a in (x, weight, bias)]
    with pytest.raises(InvalidType, match=r"got a Tensor.*from_dlpack\(x\.view\(torch\.int16\)\)\.view"):
        layernorm_forward(*tensors)
    views = [np.from_dlpack(t.view(torch.int16)).view(ml_dtypes.bfloat16) for t in tensors]  # as it says
    got = layernorm_forward(*views)
    assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    learnt = torch.zeros(16, requires_grad=True)
    with pytest.raises(InvalidType, match=r"require.*x\.detach\(\)"):
        as_array(learnt)
    assert as_array(learnt.detach()).ctypes.data == learnt.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_only_read_may_be_read_only(dtype):
    inputs = layernorm_inputs(dtype)
    for options in ({}, {"residual": randn(np, dtype, (5, 16), seed=1)[0]}):
        want = layernorm_forward(*inputs, **options)
        got = layernorm_forward(*map(frozen, inputs), **{k: frozen(x) for k, x in options.items()})
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(SIMULATED, reason="the simulator runs kernels, and NumPy refuses the write")
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_must_not_be_read_only(dtype):
    x, weight, bias = layernorm_inputs(dtype)
    _, mean, rstd, _ = result = layernorm_forward(x, weight, bias)
    for i, name in enumerate(("y", "mean", "rstd")):
        out = [frozen(a) if i == k else a for k, a in enumerate(result)]
        kept = out[i].copy()
        with pytest.raises(InvalidValue, match=rf"layernorm writes {name}, and got a read-only array \(5,"):
            layernorm_forward(2 * x, weight, bias, out=out)
        assert np.array_equal(out[i], kept)
    with pytest.raises(InvalidValue, match="layernorm writes dx_sum"):
        layernorm_backward(x, x, weight, mean, rstd, dx_sum=frozen(bias))
    # Products write through an address, and would not have noticed.
    y = frozen(linear_forward(x, np.eye(16, dtype=dtype)))
    with pytest.raises(InvalidValue, match="linear writes out"):
        linear_forward(2 * x, np.eye(16, dtype=dtype), out=y)
    assert np.array_equal(y, x)


@pytest.mark.parametrize("eps", [-1, -1e-12, float("nan"), float("inf")])
def test_layernorm_refuses_an_eps_that_is_none(eps):
    with pytest.raises(InvalidValue, match="finite eps, 0 or more; got"):
        layernorm_forward(*layernorm_inputs(), eps=eps)
