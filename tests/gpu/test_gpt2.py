"""GPT-2 124M on a GPU: 20 steps in fp32, 50 in 16 bits at B = 8, T = 1024 on Shakespeare's bytes."""

import time

import numpy as np
import pytest

from nbtrain.batch import Batch
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.device.place import synchronize, to_device, to_host
from nbtrain.errors import Unavailable
from nbtrain.modes import capture, donate
from nbtrain.text import shakespeare_text
from nbtrain.tokenizer import ByteTokenizer
from nbtrain.train import init, make_train_step

B, T = 8, 1024
STEPS = {"fp32": 20, "fp16": 50, "bf16": 50}


@pytest.fixture(scope="module")
def batches():
    try:
        text = shakespeare_text()
    except Unavailable as error:
        pytest.skip(str(error))
    n = max(STEPS.values())
    ids = ByteTokenizer().encode(text)[: n * B * (T + 1)].reshape(n, B, T + 1)
    return [
        Batch.of(*(to_device(np.ascontiguousarray(x), "cuda:0") for x in (i[:, :-1], i[:, 1:]))) for i in ids
    ]


def train(make, dtype, batches):
    params, state = init(GPTConfig.preset("gpt2"), 0, dtype, "cuda:0")
    step = make(
        make_train_step(GPTConfig.preset("gpt2"), TrainConfig(lr=6e-4, warmup=5, schedule="constant"))
    )
    metrics, times = [], []
    for batch in batches[: STEPS[dtype]]:
        start = time.perf_counter()
        params, state, m = step(params, state, batch)
        synchronize("cuda:0")
        times.append(time.perf_counter() - start)
        metrics.append(m.read())
    return params, state, metrics, times


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_steps_learn_and_pure_donated_and_captured_have_the_same_bits(dtype, batches):
    import cupy

    results = {}
    for name, make in (("pure", lambda step: step), ("donated", donate), ("captured", capture)):
        pool = cupy.get_default_memory_pool()
        pool.free_all_blocks()
        free = cupy.cuda.runtime.memGetInfo()[0]
        params, state, metrics, times = train(make, dtype, batches)
        used = free - cupy.cuda.runtime.memGetInfo()[0]
        ms = float(np.median(times[3:])) * 1e3
        losses = [m["loss"] for m in metrics]
        print(
            f"\n{dtype} {name:9} loss {losses[0]:.4f} -> {losses[-1]:.4f}, {ms:7.2f} ms, "
            f"{B * T / ms * 1e3:9,.0f} tokens/s, {used / 1e6:7,.0f} MB"
        )
        trees = [to_host(t.buffer) for t in (params, state.master, state.m, state.v)]
        results[name] = metrics, trees
        skipped = sum(m["skipped"] for m in metrics)
        # A dynamic loss scale begins at 65536 and halves until the gradients fit.
        assert losses[-1] < losses[0] - 2 and skipped <= (8 if dtype == "fp16" else 0)
        assert np.array_equal(trees[0], trees[1].astype(trees[0].dtype))  # params == cast(master)
        del params, state
    for name in ("donated", "captured"):
        assert results[name][0] == results["pure"][0], name
        assert all(np.array_equal(a, b) for a, b in zip(results[name][1], results["pure"][1], strict=True)), (
            name
        )
