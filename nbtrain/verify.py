"""Compares a GPU with the CPU, operator by operator, for a person with an untested GPU to send back.

    nbtrain doctor --verify

Each check runs the same operators on the same numbers in both places, in a process of its own: one that hangs
or ends its process is one line of the report. An error is the largest difference over the largest CPU value,
in units of the dtype's eps.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from nbtrain import ops
from nbtrain.batch import Batch
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.device import FLOATS, TARGET, dtype_name
from nbtrain.device.place import resolve_device, synchronize, to_device, to_host, use
from nbtrain.errors import InvalidValue, NbtrainError
from nbtrain.modes import donate
from nbtrain.train import init, make_train_step

SECONDS = 300  # for one check
# Both sides round their result once. In fp32 they differ by the order of sums and by fast functions of 2e-7.
LIMITS = {"fp32": 200.0, "fp16": 8.0, "bf16": 8.0}


class Inputs:
    """The same random arrays on every device, in the order in which they are asked for."""

    def __init__(self, dtype: str, device: str):
        self.dtype, self.device, self.rng = FLOATS[dtype], device, np.random.default_rng(0)

    def floats(self, *shape, scale=1.0):
        return to_device((scale * self.rng.standard_normal(shape)).astype(self.dtype), self.device)

    def integers(self, high: int, *shape):
        return to_device(self.rng.integers(0, high, shape).astype(np.int32), self.device)

    def put(self, values, dtype):
        return to_device(np.array(values, dtype), self.device)


# ----------------------------------------------------------------------------
# Checks: operators at sizes that their blocks do not divide; what they return is compared


def layernorm(a: Inputs):
    x, residual, dy, weight, bias = (a.floats(*shape) for shape in [(301, 776)] * 3 + [(776,)] * 2)
    y, mean, rstd, total = ops.layernorm_forward(x, weight, bias, residual=residual)
    return y, mean, rstd, total, *ops.layernorm_backward(dy, total, weight, mean, rstd, dresidual=residual)


def gelu(a: Inputs):
    x, dy, bias = a.floats(301, 1000), a.floats(301, 1000), a.floats(1000)
    return ops.gelu_forward(x, bias), *ops.gelu_backward(dy, x, bias)


def softmax(a: Inputs):
    x, dy = a.floats(301, 1023), a.floats(301, 1023)
    y = ops.softmax_forward(x)
    return y, ops.softmax_backward(dy, y)


def cross_entropy(a: Inputs):
    logits, targets = a.floats(37, 50304, scale=3.0), a.integers(50257, 37)
    losses, lse = ops.cross_entropy_forward(logits, targets, vocab_size=50257)
    dlosses = a.put(np.linspace(0.5, 1.5, 37), np.float32)
    return losses, lse, ops.cross_entropy_backward(dlosses, logits, targets, lse, vocab_size=50257)


def embedding(a: Inputs):
    tokens, wte, wpe = a.integers(97, 4, 50), a.floats(97, 768), a.floats(64, 768)
    return (ops.embedding_forward(tokens, wte, wpe),)


def dropout(a: Inputs):
    x, rng = a.floats(301, 776), a.put([1, 2, 3], np.uint32)
    return (ops.dropout_forward(x, 0.1, rng, site=7),)


def global_norm(a: Inputs):
    return (ops.global_norm(a.floats(1_000_003)),)


def linear(a: Inputs):
    x, weight, bias, dy = a.floats(301, 776, scale=0.1), a.floats(776, 520), a.floats(520), a.floats(301, 520)
    return ops.linear_forward(x, weight, bias), *ops.linear_backward(dy, x, weight)


def attention(a: Inputs):
    qkv, dy = a.floats(2, 193, 3 * 256), a.floats(2, 193, 256)
    y, lse = ops.attention_forward(qkv, 4)
    return y, lse, ops.attention_backward(dy, qkv, y, lse, 4)


def training(a: Inputs):
    """The losses of ten steps of a small model on one batch, at a rate that does not amplify rounding: at
    1e-2 noise of one fp16 rounding a gradient moves them by 3 eps, at 1e-3 by 0.01."""
    config = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=97)
    step = donate(make_train_step(config, TrainConfig(lr=1e-3)))
    params, state = init(config, seed=0, dtype=dtype_name(a.dtype), device=a.device)
    batch = Batch.of(a.integers(97, 4, 32), a.integers(97, 4, 32))
    losses = []
    for _ in range(10):
        params, state, metrics = step(params, state, batch)
        losses.append(float(metrics.loss))
    return (np.array(losses, np.float32),)


CHECKS: dict[str, Callable] = {
    check.__name__: check
    for check in (
        layernorm, gelu, softmax, cross_entropy, embedding, dropout, global_norm, linear, attention, training,
    )
}  # fmt: skip


def error(check: Callable, dtype: str, device: str) -> float:
    """The largest error of what a check returns, in eps of `dtype`; infinite where a result is not finite."""
    with use(device):
        got = [to_host(x) for x in check(Inputs(dtype, device))]
    want = [to_host(x) for x in check(Inputs(dtype, "cpu"))]
    eps = {"fp32": 2.0**-23, "fp16": 2.0**-10, "bf16": 2.0**-7}[dtype]
    worst = 0.0
    for x, y in zip(got, want, strict=True):
        x, y = x.astype(np.float64), y.astype(np.float64)
        if not np.isfinite(x).all():
            return float("inf")
        worst = max(worst, float(np.abs(x - y).max() / np.abs(y).max() / eps))
    return worst


def copy_speed(device: str) -> float:
    """GB/s of LayerNorm in fp16 at 32,768 rows of 768: it reads and writes each element once."""
    a = Inputs("fp16", device)
    with use(device):
        x, weight, bias = a.floats(32768, 768), a.floats(768), a.floats(768)
        out = ops.layernorm_forward(x, weight, bias)
        times = []
        for _ in range(10):
            synchronize(device)
            begun = time.perf_counter()
            for _ in range(20):
                ops.layernorm_forward(x, weight, bias, out=out)
            synchronize(device)
            times.append((time.perf_counter() - begun) / 20)
    return 4 * x.size / min(times) / 1e9


# ----------------------------------------------------------------------------


def verify(device: str = "auto") -> Iterator[str]:
    """Lines of a report on `device`; the last one is 'N passed, N failed'."""
    device, _ = resolve_device(device)
    if device == "cpu":
        raise InvalidValue(
            "--verify compares a GPU with the CPU, and no GPU can be used here. Run nbtrain doctor."
        )
    yield f"verifying {device} ({TARGET}) against the CPU; an error is in units of eps"
    passed = failed = 0
    for name in [*CHECKS, "speed"]:
        for line in _in_own_process(name, device):
            passed += line.startswith("ok")
            failed += line.startswith("BAD")
            yield line
    yield f"{passed} passed, {failed} failed"


def _in_own_process(name: str, device: str) -> Iterator[str]:
    command = [sys.executable, "-m", "nbtrain.verify", name, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as hung:
        output = hung.stdout or b""
        yield from (output if isinstance(output, str) else output.decode()).splitlines()
        yield f"BAD {name}: no answer in {SECONDS} s"
        return
    yield from done.stdout.splitlines()
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        yield f"BAD {name}: the process ended with {how}. {last[0]}"


def main(name: str, device: str) -> None:
    if name == "speed":
        print(f"    layernorm fp16, 32768 x 768: {copy_speed(device):.0f} GB/s", flush=True)
        return
    for dtype in FLOATS:
        try:
            found, limit = error(CHECKS[name], dtype, device), LIMITS[dtype]
            print(
                f"{'ok ' if found <= limit else 'BAD'} {name} {dtype}: {found:.2f}, limit {limit:.0f}",
                flush=True,
            )
        except NbtrainError as reason:
            print(f"BAD {name} {dtype}: {reason}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
