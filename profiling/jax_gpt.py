"""The same GPT-2 step in JAX, as one would write it: fp32 parameters, bf16 arithmetic, cuDNN attention, one
donated jit."""

import functools
import math
import os

import numpy as np

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # so that the card's memory says what is used

import jax
import jax.numpy as jnp


def init(cfg, key):
    keys = iter(jax.random.split(key, 4 * cfg.n_layer + 2))
    C = cfg.n_embd

    def normal(shape, last=False):
        return jax.random.normal(next(keys), shape) * (0.02 / math.sqrt(2 * cfg.n_layer) if last else 0.02)

    def norm():
        return jnp.ones(C), jnp.zeros(C)

    blocks = [
        dict(
            ln1=norm(), qkv=(normal((C, 3 * C)), jnp.zeros(3 * C)),
            proj=(normal((C, C), True), jnp.zeros(C)),
            ln2=norm(), fc=(normal((C, 4 * C)), jnp.zeros(4 * C)),
            out=(normal((4 * C, C), True), jnp.zeros(C)),
        )
        for _ in range(cfg.n_layer)
    ]  # fmt: skip
    wte = normal((cfg.padded_vocab_size, C))
    return dict(wte=wte, wpe=normal((cfg.block_size, C)), blocks=blocks, lnf=norm())


def layernorm(x, weights):
    x32 = x.astype(jnp.float32)
    mean = x32.mean(-1, keepdims=True)
    var = jnp.square(x32 - mean).mean(-1, keepdims=True)
    return ((x32 - mean) * jax.lax.rsqrt(var + 1e-5) * weights[0] + weights[1]).astype(x.dtype)


def loss(params, tokens, targets, cfg, kind):
    (B, T), H, C = tokens.shape, cfg.n_head, cfg.n_embd

    def linear(x, weights):
        return x @ weights[0].astype(kind) + weights[1].astype(kind)

    wte = params["wte"].astype(kind)
    x = wte[tokens] + params["wpe"].astype(kind)[:T]
    for w in params["blocks"]:
        q, k, v = (
            a.reshape(B, T, H, C // H) for a in jnp.split(linear(layernorm(x, w["ln1"]), w["qkv"]), 3, -1)
        )
        att = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        x = x + linear(att.reshape(B, T, C), w["proj"])
        x = x + linear(jax.nn.gelu(linear(layernorm(x, w["ln2"]), w["fc"]), approximate=True), w["out"])
    logits = (layernorm(x, params["lnf"]) @ wte.T).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def step(params, m, v, t, tokens, targets, *, cfg, kind):
    value, grads = jax.value_and_grad(loss)(params, tokens, targets, cfg, kind)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(grads)))
    factor = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * factor * g, m, grads)
    v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * jnp.square(factor * g), v, grads)

    def update(p, m, v):
        direction = (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.95**t)) + 1e-8)
        return p - 6e-4 * (direction + (0.1 * p if p.ndim >= 2 else 0.0))

    return jax.tree.map(update, params, m, v), m, v, t + 1, value


def run(args, zipf_tokens, time_blocks) -> dict:
    import nbtrain as nb

    cfg = nb.GPTConfig.preset(args.preset)
    params = jax.jit(functools.partial(init, cfg))(jax.random.key(0))
    m, v = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)
    kind = {"bf16": jnp.bfloat16, "fp16": jnp.float16}[args.dtype]
    train = jax.jit(functools.partial(step, cfg=cfg, kind=kind), donate_argnums=(0, 1, 2, 3))
    stream = zipf_tokens(cfg.vocab_size, args.batch * (cfg.block_size + 1) * 4).reshape(4, args.batch, -1)
    batches = [(jnp.asarray(t[:, :-1]), jnp.asarray(t[:, 1:])) for t in stream]
    state, losses = [params, m, v, jnp.float32(1)], []

    def one():
        *state[:], value = train(*state, *batches[len(losses) % 4])
        losses.append(value)

    one()
    row = time_blocks(one, lambda: np.asarray(losses[-1]))
    return row | dict(loss_first=float(losses[0]), loss_last=float(losses[-1]))
