"""Every memory-bound operator at GPT-2's sizes on a GPU: ms, GB/s and the share of this card's copy speed.

    python -m profiling.bench_ops [--dtype fp16 bf16] [--only layernorm] [--peers torch] [--out FOLDER]

Rows are 32 x 1024 tokens of 768 channels, vocabulary 50304, 124 M parameters. Bytes are those that must move:
each input read once, each output written once. Operators walk over several sets of arrays, so that the L2
cache holds none of them.
"""

import argparse
import traceback
from pathlib import Path

import numpy as np

from nbtrain.batch import stable_order
from nbtrain.device import FLOATS
from profiling.timing import RESULTS, copy_gb_s, graph_ms, machine, write_results

B, T, C, V, H = 32, 1024, 768, 50304, 12
N = B * T
PARAMS = 124_475_904


class Arrays:
    """Random arrays on the device, cheap to make: one block of random numbers, tiled."""

    def __init__(self, dtype):
        import cupy

        self.cupy, self.dtype = cupy, dtype
        self.block = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)

    def __call__(self, *shape, dtype=None, scale=1.0):
        dtype, size = dtype or self.dtype, int(np.prod(shape))
        block = self.cupy.asarray((self.block * np.float32(scale)).astype(dtype))
        out = self.cupy.empty(size, dtype)
        for start in range(0, size, block.size):
            n = min(block.size, size - start)
            out[start : start + n] = block[:n]
        return out.reshape(shape)

    def sets(self, n, *shapes):
        return [[self(*shape) for shape in shapes] for _ in range(n)]


def layernorm(new):
    from nbtrain.ops.layernorm import layernorm_backward, layernorm_forward

    w, b = new(C), new(C)
    sets = new.sets(3, *[(N, C)] * 5)
    saved = [(new(N, dtype=np.float32), new(N, dtype=np.float32)) for _ in sets]
    grads = [(s[2], new(C), new(C)) for s in sets]

    def forward(i):
        x, r, y, total, _ = sets[i % 3]
        layernorm_forward(x, w, b, residual=r, out=(y, *saved[i % 3], total))

    def backward(i):
        x, r, _, total, dy = sets[i % 3]
        layernorm_backward(dy, total, w, *saved[i % 3], dresidual=r, out=grads[i % 3])

    for i in range(3):
        forward(i)
    size = N * C * sets[0][0].itemsize
    yield "residual + layernorm forward", forward, 4 * size
    yield "layernorm backward", backward, 4 * size


def gelu(new):
    from nbtrain.ops.gelu import gelu_backward, gelu_forward

    bias, dbias = new(4 * C), new(4 * C)
    sets = new.sets(2, *[(N, 4 * C)] * 3)
    size = N * 4 * C * sets[0][0].itemsize
    yield "bias + gelu forward", lambda i: gelu_forward(sets[i % 2][0], bias, out=sets[i % 2][1]), 2 * size

    def backward(i):
        x, y, dy = sets[i % 2]
        gelu_backward(dy, x, bias, out=(y, dbias))

    yield "bias + gelu backward", backward, 3 * size


def softmax(new):
    from nbtrain.ops.softmax import softmax_backward, softmax_forward

    x, y, dy = new(16 * H * T, T), new(16 * H * T, T), new(16 * H * T, T)
    size = x.nbytes
    yield "softmax forward", lambda i: softmax_forward(x, out=y), 2 * size
    yield "softmax backward", lambda i: softmax_backward(dy, y, out=x), 3 * size


def cross_entropy(new):
    from nbtrain.ops.cross_entropy import cross_entropy_forward_backward

    logits, losses = new(N, V), new(N, dtype=np.float32)
    targets = new.cupy.asarray(np.random.default_rng(0).integers(0, 50257, N).astype(np.int32))
    dloss = new.cupy.full(1, 1 / N, np.float32)

    def fused(i):
        cross_entropy_forward_backward(logits, targets, dloss, vocab_size=50257, losses=losses)

    yield "cross-entropy forward + backward", fused, 2 * logits.nbytes


def embedding(new):
    from nbtrain.ops.embedding import embedding_backward, embedding_forward

    rng = np.random.default_rng(0)
    zipf = 1 / np.arange(1, 50258)
    tokens = rng.choice(50257, (B, T), p=zipf / zipf.sum()).astype(np.int32)
    order = new.cupy.asarray(stable_order(tokens[None])[0])
    tokens = new.cupy.asarray(tokens)
    wte, wpe, x = new(V, C), new(T, C), new(B, T, C)
    yield "embedding forward", lambda i: embedding_forward(tokens, wte, wpe, out=x), 2 * x.nbytes
    yield (
        "embedding backward",
        lambda i: embedding_backward(x, tokens, order, wte, wpe, accumulate=True),
        3 * x.nbytes,
    )


def adamw(new):
    from nbtrain.ops.adamw import adamw
    from nbtrain.ops.global_norm import global_norm

    g, params = new(PARAMS), new(PARAMS)
    master, m, v = (
        new(PARAMS, dtype=np.float32),
        new(PARAMS, dtype=np.float32),
        abs(new(PARAMS, dtype=np.float32)),
    )
    decay = new.cupy.ones(PARAMS // 256, np.uint8)
    hyper = new.cupy.asarray(np.array([1e-4, 1, 0, 10, 20, 0, 0, 0], np.float32))
    norm = new(1, dtype=np.float32)
    size = PARAMS * (2 * g.itemsize + 24)
    yield (
        "adamw + 16-bit copy",
        lambda i: adamw(g, master, m, v, params, decay, hyper, out=(master, m, v, params)),
        size,
    )
    yield "gradient norm", lambda i: global_norm(g, out=norm), g.nbytes


OPERATORS = [layernorm, gelu, softmax, cross_entropy, embedding, adamw]


# ----------------------------------------------------------------------------
# The same work in PyTorch: each function yields a row's name and the ways to do its work


def eager_and_compiled(function):
    import torch

    return function, torch.compile(function)


def backward_pass(function, dy, *inputs):
    """The backward pass of `function(*inputs)` alone, eager and compiled."""
    import torch

    for forward in eager_and_compiled(function):
        y = forward(*inputs)
        yield lambda y=y: torch.autograd.grad(y, inputs, dy, retain_graph=True)


def torch_layernorm(new):
    from torch.nn.functional import layer_norm

    x, r, w, b = new(N, C), new(N, C), new(C), new(C)
    forward = eager_and_compiled(lambda: (x + r, layer_norm(x + r, (C,), w, b)))
    yield "residual + layernorm forward", forward
    inputs = [t.clone().requires_grad_() for t in (x, w, b)]
    yield "layernorm backward", backward_pass(lambda x, w, b: layer_norm(x, (C,), w, b), r, *inputs)


def torch_gelu(new):
    from torch.nn.functional import gelu

    def bias_gelu(x, b):
        return gelu(x + b, approximate="tanh")

    x, b = new(N, 4 * C), new(4 * C)
    yield "bias + gelu forward", eager_and_compiled(lambda: bias_gelu(x, b))
    inputs = [x.clone().requires_grad_(), b.clone().requires_grad_()]
    yield "bias + gelu backward", backward_pass(bias_gelu, new(N, 4 * C), *inputs)


def torch_softmax(new):
    import torch

    x = new(16 * H * T, T)
    yield "softmax forward", eager_and_compiled(lambda: torch.softmax(x, -1))
    x.requires_grad_()
    yield "softmax backward", backward_pass(lambda x: torch.softmax(x, -1), new(16 * H * T, T), x)


def torch_cross_entropy(new):
    import torch

    logits, targets = new(N, V).requires_grad_(), torch.randint(0, 50257, (N,), device=new.device)

    def loss(z):
        return torch.nn.functional.cross_entropy(z.float(), targets)

    forwards = eager_and_compiled(loss)
    works = [lambda f=f: torch.autograd.grad(f(logits), logits) for f in forwards]
    yield "cross-entropy forward + backward", works


def torch_embedding(new):
    import torch
    from torch.nn.functional import embedding

    zipf = 1 / torch.arange(1, 50258, dtype=torch.float64)
    ids = torch.multinomial(zipf, N, replacement=True).to(new.device).reshape(B, T)
    wte, wpe = new(V, C).requires_grad_(), new(T, C)
    yield "embedding forward", eager_and_compiled(lambda: embedding(ids, wte) + wpe)
    yield "embedding backward", backward_pass(lambda t: embedding(ids, t), new(B, T, C), wte)


def torch_adamw(new):
    import torch

    p = torch.randn(PARAMS, device=new.device).requires_grad_()
    p.grad = torch.randn(PARAMS, device=new.device)
    half = new(PARAMS)
    optimizer = torch.optim.AdamW([p], lr=1e-4, fused=True)

    def update():
        optimizer.step()
        half.copy_(p.detach())

    yield "adamw + 16-bit copy", [update]
    g = new(PARAMS)
    yield "gradient norm", eager_and_compiled(lambda: torch.linalg.vector_norm(g, dtype=torch.float32))


PEERS = [torch_layernorm, torch_gelu, torch_softmax, torch_cross_entropy, torch_embedding, torch_adamw]


class TorchArrays:
    """Standard normal tensors of one dtype on the device."""

    def __init__(self, dtype: str, device: str = "cuda"):
        import torch

        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
        self.device = device

    def __call__(self, *shape):
        import torch

        return torch.randn(*shape, device=self.device, dtype=self.dtype)


def torch_ms(work) -> float:
    """Median ms of a call, six in the queue before the first begins: Python's own time is not counted."""
    import torch

    for _ in range(3):
        work()
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)  # cycles: some 20 ms, in which all of them are launched
        start.record()
        for _ in range(6):
            work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 6)
    return float(np.median(times))


def torch_rows(dtype: str, only: str) -> dict[str, float]:
    """ms of the same work in PyTorch: the better of eager and compile."""
    import torch

    found = {}
    for peer in PEERS:
        if only in peer.__name__:
            try:
                for name, works in peer(TorchArrays(dtype)):
                    found[name] = min(map(torch_ms, works))
            except Exception:
                traceback.print_exc()
            torch.cuda.empty_cache()
    return found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", nargs="+", default=["fp16", "bf16"], choices=list(FLOATS))
    parser.add_argument("--only", default="", help="part of an operator's name")
    parser.add_argument("--peers", default="", help="torch: the same work in PyTorch, in this run")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    args = parser.parse_args()
    import cupy

    rows, copy = [], copy_gb_s()
    print(machine())
    print(f"copy {copy:.0f} GB/s")
    for dtype in args.dtype:
        for operator in OPERATORS:
            if args.only in operator.__name__:
                try:
                    for name, work, n_bytes in operator(Arrays(FLOATS[dtype])):
                        ms = graph_ms(work)
                        speed = n_bytes / ms / 1e6
                        rows.append(dict(op=name, dtype=dtype, ms=ms, gb_s=speed, of_copy=speed / copy))
                except Exception:
                    traceback.print_exc()
                cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in args.peers:
            peer = torch_rows(dtype, args.only)
            for row in rows:
                if row["dtype"] == dtype and row["op"] in peer:
                    row |= dict(torch_ms=peer[row["op"]], ratio=row["ms"] / peer[row["op"]])
    print("| op | dtype | ms | GB/s | of copy | torch ms | ours / theirs |\n|---|---|---|---|---|---|---|")
    for r in rows:
        peer = f"{r['torch_ms']:.4f} | {r['ratio']:.2f}" if "ratio" in r else "- | -"
        print(f"| {r['op']} | {r['dtype']} | {r['ms']:.4f} | {r['gb_s']:.0f} | {r['of_copy']:.1%} | {peer} |")
    print(write_results("bench_ops", [dict(op="copy", gb_s=copy), *rows], args.out))


if __name__ == "__main__":
    main()
