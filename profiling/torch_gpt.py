"""GPT-2 and its training loop in PyTorch, with nbtrain's leaf names and layouts: what it is compared with.

Pre-LayerNorm, learned positions, tanh-GELU, biases everywhere, output tied to the token embedding, no
dropout. Matrices are (in, out): Y = X W + b. `dict(model.named_parameters())` has nbtrain's names:

    wte (Vp, C)   wpe (T, C)   lnf_w, lnf_b (C,)
    blocks.{i}.   ln1_w, ln1_b (C,)   qkv_w (C, 3C)   qkv_b   proj_w (C, C)    proj_b
                  ln2_w, ln2_b (C,)   fc_w (C, 4C)    fc_b    out_w (4C, C)    out_b
"""

import math

import torch
import torch.nn.functional as F
from torch.nn import Module, ModuleList, Parameter

IGNORE_INDEX = -100


def linear(x, weight, bias):
    """x (B, T, in) times weight (in, out)."""
    return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)


def explicit_attention(q, k, v):
    """Softmax of the masked scores, written out; q, k, v (B, H, T, D)."""
    T, D = q.shape[-2:]
    scores = q @ k.transpose(-1, -2) * D**-0.5
    future = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1) @ v


def fused_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(Module):
    def __init__(self, C, H, attention):
        super().__init__()
        self.C, self.H, self.attention = C, H, attention
        self.ln1_w, self.ln1_b = Parameter(torch.ones(C)), Parameter(torch.zeros(C))
        self.qkv_w, self.qkv_b = Parameter(torch.empty(C, 3 * C)), Parameter(torch.zeros(3 * C))
        self.proj_w, self.proj_b = Parameter(torch.empty(C, C)), Parameter(torch.zeros(C))
        self.ln2_w, self.ln2_b = Parameter(torch.ones(C)), Parameter(torch.zeros(C))
        self.fc_w, self.fc_b = Parameter(torch.empty(C, 4 * C)), Parameter(torch.zeros(4 * C))
        self.out_w, self.out_b = Parameter(torch.empty(4 * C, C)), Parameter(torch.zeros(C))

    def forward(self, x):
        B, T, C = x.shape
        h = F.layer_norm(x, (C,), self.ln1_w, self.ln1_b, eps=1e-5)
        q, k, v = linear(h, self.qkv_w, self.qkv_b).split(C, dim=2)
        q, k, v = (a.view(B, T, self.H, C // self.H).transpose(1, 2) for a in (q, k, v))
        y = self.attention(q, k, v).transpose(1, 2).reshape(B, T, C)
        x = x + linear(y, self.proj_w, self.proj_b)
        h = F.layer_norm(x, (C,), self.ln2_w, self.ln2_b, eps=1e-5)
        h = F.gelu(linear(h, self.fc_w, self.fc_b), approximate="tanh")
        return x + linear(h, self.out_w, self.out_b)


class GPT(Module):
    """Initialised as GPT-2 is: normal, 0.02, and 0.02 / sqrt(2L) where a block writes into the residual."""

    def __init__(
        self,
        *,
        n_layer,
        n_head,
        n_embd,
        block_size,
        vocab_size,
        padded_vocab=None,
        fused=True,
        dtype=torch.float32,
    ):
        super().__init__()
        L, C = n_layer, n_embd
        self.vocab_size = vocab_size
        attention = fused_attention if fused else explicit_attention
        self.wte = Parameter(torch.empty(padded_vocab or vocab_size, C))
        self.wpe = Parameter(torch.empty(block_size, C))
        self.blocks = ModuleList([Block(C, n_head, attention) for _ in range(L)])
        self.lnf_w, self.lnf_b = Parameter(torch.ones(C)), Parameter(torch.zeros(C))
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("proj_w", "out_w"))
                torch.nn.init.normal_(p, std=0.02 / math.sqrt(2 * L) if residual else 0.02)
        with torch.no_grad():
            self.wte[vocab_size:] = 0
        self.to(dtype)

    def forward(self, tokens):
        """logits (B, T, vocab_size): padded rows of wte take no part."""
        x = F.embedding(tokens, self.wte) + self.wpe[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = F.layer_norm(x, self.lnf_w.shape, self.lnf_w, self.lnf_b, eps=1e-5)
        return x @ self.wte[: self.vocab_size].T

    def loss(self, tokens, targets):
        """Mean nats over the targets that count; tokens and targets (B, T) or (A, B, T), A micro-batches."""
        T = tokens.shape[-1]
        logits = self(tokens.reshape(-1, T))
        return F.cross_entropy(logits.flatten(0, 1), targets.reshape(-1), ignore_index=IGNORE_INDEX)


@torch.no_grad()
def load_params(model, params):
    """Copy arrays into the model, name -> array: `dict(params)` of nbtrain's parameters, for one.

    A missing, extra or misshapen leaf is an error. Rows that pad wte are left out if the model has none."""
    own = dict(model.named_parameters())
    if own.keys() != params.keys():
        raise ValueError(f"names on one side only: {sorted(own.keys() ^ params.keys())}")
    for name, p in own.items():
        value = torch.tensor(params[name], dtype=p.dtype)
        if name == "wte":
            value = value[: len(p)]
        if value.shape != p.shape:
            raise ValueError(f"{name} has shape {tuple(p.shape)}; got {tuple(value.shape)}")
        p.copy_(value)


def to_torch(*arrays):
    """Token arrays as PyTorch wants them: int64."""
    return [torch.tensor(a, dtype=torch.int64) for a in arrays]


def adamw(model, *, lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=None):
    """torch.optim.AdamW that decays matrices and embeddings only."""
    params = list(model.parameters())
    decayed = {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay}
    others = {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}
    return torch.optim.AdamW([decayed, others], lr=lr, betas=betas, eps=eps, fused=fused)


def learning_rate(step, *, lr, warmup, total, min_lr):
    """Linear warm-up, then a cosine that reaches min_lr at step `total`; step counts from 0."""
    if step < warmup:
        return lr * (step + 1) / warmup
    progress = min((step - warmup) / (total - warmup), 1.0)
    return min_lr + 0.5 * (lr - min_lr) * (1 + math.cos(math.pi * progress))


def train_step(model, optimizer, tokens, targets, *, clip=1.0, lr=None):
    """(loss, grad_norm) of one step, as tensors; the model is updated.

    The clip factor is clip / (norm + 1e-6), at most 1."""
    if lr is not None:
        for group in optimizer.param_groups:
            group["lr"] = lr
    loss = model.loss(tokens, targets)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach(), norm


@torch.no_grad()
def mean_loss(model, batches):
    """Mean nats over every counted target of NumPy batches (tokens, targets)."""
    total, count = 0.0, 0
    for batch in batches:
        tokens, targets = to_torch(*batch)
        n = int((targets != IGNORE_INDEX).sum())
        total, count = total + n * float(model.loss(tokens, targets)), count + n
    return total / count
