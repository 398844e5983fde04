"""A model of your own from nbtrain's operators, trained by nbtrain's step.

    x = wte[tokens] + wpe
    y = layernorm(x + out(gelu(fc(x))))
    loss = cross_entropy(y @ wte.T, targets)

Each token is predicted from the one before it and its position alone. `loss_and_grads` is all that a model
needs; AdamW, clipping, loss scaling and accumulation over micro-batches come with the step.

    python examples/custom_loss.py --steps 500
"""

import argparse
import tempfile

import numpy as np

import nbtrain as nb
from nbtrain.device.place import resolve_device, to_device
from nbtrain.ops import (
    cross_entropy_forward_backward,
    embedding_backward,
    embedding_forward,
    gelu_backward,
    gelu_forward,
    layernorm_backward,
    layernorm_forward,
    linear_backward,
    linear_forward,
    matmul,
    sum_losses,
)
from nbtrain.text import prepare_text, shakespeare_text
from nbtrain.tokenizer import ByteTokenizer
from nbtrain.train import init_opt_state
from nbtrain.tree import Layout, Tree

V, T, C = 256, 32, 64  # bytes, positions, channels
LEAVES = [
    ("wte", (V, C)), ("wpe", (T, C)), ("fc_w", (C, 4 * C)), ("fc_b", (4 * C,)),
    ("out_w", (4 * C, C)), ("out_b", (C,)), ("ln_w", (C,)), ("ln_b", (C,)),
]  # fmt: skip


def init_params(seed=0, device="cpu"):
    """fp32 weights: matrices normal with standard deviation 0.05, LayerNorm's weight 1, biases 0."""
    layout = Layout.of(LEAVES)
    params, rng = Tree(layout, np.zeros(layout.size, np.float32)), np.random.default_rng(seed)
    for name, leaf in params:
        leaf[...] = 0.05 * rng.standard_normal(leaf.shape) if leaf.ndim == 2 else name == "ln_w"
    return Tree(layout, to_device(params.buffer, device))


def loss_and_grads(params, batch, *, loss_scale, rng, out):
    """The sum of a micro-batch's losses, (1,) fp32; the gradients of loss_scale * that sum go to `out`."""
    p, g = params, out
    B, T = batch.tokens.shape
    N, C = B * T, p.wte.shape[1]

    x = embedding_forward(batch.tokens, p.wte, p.wpe).reshape(N, C)
    fc = linear_forward(x, p.fc_w)
    act = gelu_forward(fc, p.fc_b)
    branch = linear_forward(act, p.out_w, p.out_b)
    y, mean, rstd, total = layernorm_forward(branch, p.ln_w, p.ln_b, residual=x)
    logits = matmul(y, p.wte.T)
    losses = cross_entropy_forward_backward(logits, batch.targets.reshape(N), loss_scale)
    dlogits = logits  # written over

    # Every leaf of g is written; the embedding adds to wte's, which the vocabulary's product has written.
    matmul(dlogits.T, y, out=g.wte)
    dy = matmul(dlogits, p.wte)
    dtotal = np.empty_like(dy)
    layernorm_backward(dy, total, p.ln_w, mean, rstd, out=(dtotal, g.ln_w, g.ln_b))
    dact, _, _ = linear_backward(dtotal, act, p.out_w, out=(None, g.out_w, g.out_b))
    dfc, _ = gelu_backward(dact, fc, p.fc_b, out=(dact, g.fc_b))
    dx, _, _ = linear_backward(dfc, x, p.fc_w, bias=False, out=(None, g.fc_w, None))
    dx += dtotal
    embedding_backward(dx.reshape(B, T, C), batch.tokens, batch.order, g.wte, g.wpe, accumulate=True)
    return sum_losses(losses)


def main(args=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args(args)
    device, _ = resolve_device(options.device)

    params = init_params(device=device)
    opt_state = init_opt_state(params)
    train_step = nb.donate(nb.make_train_step(loss_and_grads, nb.TrainConfig(lr=3e-3)))
    with tempfile.TemporaryDirectory() as folder:
        data = prepare_text(shakespeare_text(), folder, ByteTokenizer())
        with nb.batches(data.train, B=32, T=T, seed=0, device=device) as source:
            for step in range(1, options.steps + 1):
                params, opt_state, metrics = train_step(params, opt_state, next(source))
                if step % 100 == 0 or step == options.steps:
                    print(f"step {step}: loss {float(metrics.loss):.4f}")


if __name__ == "__main__":
    main()
