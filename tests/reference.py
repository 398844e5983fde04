"""Independent float64 oracles: forward only, plain NumPy, never imported by nbtrain.

Gradients come from `vjp`, central differences of these. Integer arguments (tokens, targets) are closed over:
vjp(lambda logits: cross_entropy(logits, targets), (logits,), dlosses).
"""

import numpy as np


def host(a):
    return np.asarray(a.get() if hasattr(a, "get") else a)  # .get(): CuPy to host


def f64(a):
    return np.array(host(a), np.float64)


def layernorm(x, weight, bias, residual=None, eps=1e-5):
    """y (…, C). With a residual x + residual is normalised, unrounded: a 16-bit test that wants the rounded
    sum passes the sum as x."""
    x, weight, bias = f64(x), f64(weight), f64(bias)
    if residual is not None:
        x = x + f64(residual)
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + eps) * weight + bias


def softmax(x, sm_scale=1.0, causal=False):
    """Rows along the last axis; causal: the last two axes are (query, key), and later keys get zero."""
    x = f64(x) * sm_scale
    if causal:
        x = np.where(np.tri(*x.shape[-2:], dtype=bool), x, -np.inf)
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def gelu(x, bias=None):
    """The tanh form: u/2 (1 + tanh(sqrt(2/pi) (u + 0.044715 u^3))), u = x + bias."""
    u = f64(x) if bias is None else f64(x) + f64(bias)
    return 0.5 * u * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)))


def linear(x, weight, bias=None):
    """x (…, in) times weight (in, out)."""
    y = f64(x) @ f64(weight)
    return y if bias is None else y + f64(bias)


def attention(qkv, H, sm_scale=None):
    """Causal attention: qkv (B, T, 3C) holds q, k and v one after the other, each with its H heads side by
    side; y (B, T, C)."""
    qkv = f64(qkv)
    B, T, C = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = qkv.reshape(B, T, 3, H, C // H).transpose(2, 0, 3, 1, 4)  # each (B, H, T, D)
    sm_scale = (C // H) ** -0.5 if sm_scale is None else sm_scale
    p = softmax(q @ k.swapaxes(-1, -2), sm_scale, causal=True)
    return (p @ v).transpose(0, 2, 1, 3).reshape(B, T, C)


def logsumexp(logits, vocab_size=None):
    """lse (N,) over the first vocab_size columns."""
    x = f64(logits)[:, :vocab_size]
    top = x.max(-1)
    return top + np.log(np.exp(x - top[:, None]).sum(-1))


def cross_entropy(logits, targets, vocab_size=None, ignore_index=-100):
    """losses (N,) in nats, zero where the target is ignored; columns from vocab_size on are padding."""
    x, targets = f64(logits), host(targets)
    counted = targets != ignore_index
    at_target = x[np.arange(len(x)), np.where(counted, targets, 0)]
    return np.where(counted, logsumexp(x, vocab_size) - at_target, 0.0)


def embedding(tokens, wte, wpe):
    """x (B, T, C) = wte[token] + wpe[position]."""
    tokens = host(tokens)
    return f64(wte)[tokens] + f64(wpe)[: tokens.shape[-1]]


def adamw(p, g, m, v, updates, *, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, decay=True):
    """(p, m, v) after one step (Loshchilov and Hutter, 2019); `updates` counts this step: 1 on the first."""
    p, g, m, v = f64(p), f64(g), f64(m), f64(v)
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    m_hat, v_hat = m / (1 - betas[0] ** updates), v / (1 - betas[1] ** updates)
    return p - lr * (m_hat / (np.sqrt(v_hat) + eps) + weight_decay * decay * p), m, v


def global_norm(arrays):
    """The L2 norm of all elements of all arrays together, 0-d."""
    return np.sqrt(sum(np.sum(f64(a) ** 2) for a in arrays))


def vjp(f, args, dy, h=1e-6):
    """Central-difference gradients of sum(f(*args) * dy) with respect to every argument.

    If f returns a tuple, dy is a tuple of the same length."""
    args = [f64(a) for a in args]
    dy = [f64(d) for d in (dy if isinstance(dy, tuple) else (dy,))]

    def objective():
        y = f(*args)
        return sum(np.sum(a * d) for a, d in zip(y if isinstance(y, tuple) else (y,), dy, strict=True))

    grads = []
    for a in args:
        g = np.empty_like(a)
        for i in np.ndindex(a.shape):
            keep = a[i]
            a[i] = keep + h
            up = objective()
            a[i] = keep - h
            down = objective()
            a[i], g[i] = keep, (up - down) / (2 * h)
        grads.append(g)
    return grads


def sample(logits, u, temperature=1.0, top_k=None, top_p=None):
    """The token of one row of logits (V,) that the uniform number u in [0, 1) picks.

    Kept are the first top_k of the stable order from the largest logit down, then its shortest beginning with
    the share top_p; the draw walks over what is kept by index."""
    x = f64(logits)
    order = np.argsort(-x, kind="stable")
    if temperature == 0:
        return int(order[0])
    p = np.exp((x - x.max()) / temperature)
    order = order[:top_k]
    if top_p is not None and top_p < 1:
        share = np.cumsum(p[order])
        order = order[: int(np.searchsorted(share, top_p * share[-1])) + 1]
    kept = np.zeros_like(p)
    kept[order] = p[order]
    return int(np.searchsorted(np.cumsum(kept), u * kept.sum(), side="right"))
