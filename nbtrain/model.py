"""GPT-2 (Radford et al., 2019): forward, loss and gradients, from the operators.

    x = wte[tokens] + wpe
    for each block:  x = x + proj(attention(qkv(layernorm(x))))
                     x = x + out(gelu(fc(layernorm(x))))
    loss = cross_entropy(layernorm(x) @ wte.T, targets)

A residual addition belongs to the LayerNorm behind it: a block hands on its last branch `f` and the stream
`x` apart, and the next LayerNorm adds them. N = B * T rows; activations are (N, C) unless said.

Recomputation (Chen et al., 2016): with `remat="every:k"` only the input of each k-th block is kept, and the
backward pass runs the forward pass of k blocks again, by the same kernels, so gradients have the same bits
for every policy. With every policy but "none", on a GPU, GELU's result is not kept: its backward kernel has
all it takes to write it again ("light" does that alone). Logits exist for some rows at a time, and become
their gradient in place while they are there; they lie over what only a block's own passes need.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from nbtrain.batch import IGNORE_INDEX, Batch
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.device import on_gpu
from nbtrain.device.philox import Rng
from nbtrain.device.place import device_of, to_device
from nbtrain.device.scratch import Scratch
from nbtrain.errors import InvalidValue
from nbtrain.ops.attention import attention_backward, attention_forward
from nbtrain.ops.cast import cast_and_scale
from nbtrain.ops.cross_entropy import cross_entropy_forward, cross_entropy_forward_backward, sum_losses
from nbtrain.ops.dropout import dropout_backward, dropout_forward
from nbtrain.ops.embedding import embedding_backward, embedding_forward
from nbtrain.ops.gelu import gelu_backward, gelu_forward
from nbtrain.ops.layernorm import layernorm_backward, layernorm_forward
from nbtrain.ops.linear import (
    linear_backward,
    linear_backward_input,
    linear_backward_weight,
    linear_forward,
    matmul,
)
from nbtrain.tree import Layout, Tree

Array = Any  # numpy.ndarray or cupy.ndarray

LOGITS_BYTES = 1 << 30  # logits in memory at once

# Places that draw random bits: site = 4 * layer + place.
_ATTENTION, _AFTER_PROJ, _AFTER_OUT, _EMBEDDING = range(4)


class Activations(NamedTuple):
    """What one block's backward pass reads."""

    x1: Array  # the stream that enters the block
    h1: Array  # its LayerNorm
    mean1: Array  # (N,) fp32
    rstd1: Array  # (N,) fp32
    qkv: Array  # (N, 3C)
    att: Array  # the heads' outputs side by side
    lse: Array  # (B, H, T) fp32
    x2: Array  # the stream after attention
    h2: Array  # its LayerNorm
    mean2: Array  # (N,) fp32
    rstd2: Array  # (N,) fp32
    fc: Array  # (N, 4C), before bias and GELU
    act: Array  # (N, 4C), after


def init_params(config: GPTConfig, seed: int = 0, dtype=np.float32, device: str = "cpu") -> tuple[Tree, Tree]:
    """(params in `dtype`, fp32 master) with GPT-2's initial values, the same for every dtype and device.

    Matrices and embeddings are normal with standard deviation 0.02, those that end a residual branch 0.02 /
    sqrt(2 L); LayerNorm weights are 1, biases and the embedding's padding 0. In fp32 both trees are one.
    """
    layout = Layout.of(config.leaves())
    master = Tree(layout, np.zeros(layout.size, np.float32))
    rng = np.random.Generator(np.random.PCG64(seed))
    for name, leaf in master:
        if leaf.ndim == 2:
            last = name.endswith(("proj_w", "out_w"))
            rng.standard_normal(out=leaf, dtype=np.float32)
            leaf *= np.float32(0.02 / math.sqrt(2 * config.n_layer) if last else 0.02)
        elif name.endswith(("ln1_w", "ln2_w", "lnf_w")):
            leaf[...] = 1
    master["wte"][config.vocab_size :] = 0
    on_device = Tree(layout, to_device(master.buffer, device))
    if dtype == np.float32:
        return on_device, on_device
    return Tree(layout, to_device(master.buffer.astype(dtype), device)), on_device


class GPT:
    """The functions of one configuration, and the working memory that they share from step to step.

    Not for several threads at once: every call writes the same memory.
    """

    def __init__(self, config: GPTConfig, remat: str = TrainConfig.remat):
        self.config = config
        self._keeps_gelu = remat == "none"
        self._device = ""
        self.every = TrainConfig(remat=remat).remat_every(config.n_layer)
        self._scratch: Any = None  # a Scratch, from the first call on, whose params say on which device

    def loss_and_grads(self, params: Tree, batch: Batch, *, loss_scale, rng: Rng | None = None, out: Tree):
        """The sum of the losses of a micro-batch, (1,) fp32; writes the gradients of loss_scale * that sum to
        `out`.

        batch: tokens and targets (B, T), order (B*T,), int32. loss_scale: (1,) fp32 on the device. rng:
        needed for dropout. out: a tree of the layout and dtype of params.
        """
        cfg, p, g = self.config, params, out
        if cfg.dropout and rng is None:
            raise InvalidValue(f"dropout {cfg.dropout} needs rng=Rng(key, row); got None.")
        (B, T), C = batch.tokens.shape, cfg.n_embd
        N, dtype, scratch = B * T, params.dtype, self._memory(params)
        blocks, grads = p.sections("blocks"), g.sections("blocks")

        chunks = self._row_chunks(N, dtype)
        of_blocks = (8 if self._rewrites_gelu else 4) * C * N  # act, dfc
        largest = max(chunks[0].stop * cfg.padded_vocab_size, of_blocks)
        scratch("logits", (largest,), dtype)  # at once, or it would be taken again when it grows
        f, x2 = self._blocks(p, batch.tokens, rng)
        hf, mean, rstd, x = self._last_norm(p, f, x2)
        losses, targets = scratch("losses", (N,), np.float32), batch.targets.reshape(N)
        dh = scratch("branch", (N, C), dtype)  # what a forward pass calls branch has been read
        # Several chunks add up in fp32, so that the embedding's gradient is rounded once.
        dwte = g.wte if len(chunks) == 1 else scratch("dwte", g.wte.shape, np.float32)
        for rows in chunks:
            logits = self._logits_of(p, hf[rows])
            cross_entropy_forward_backward(
                logits, targets[rows], loss_scale, vocab_size=cfg.vocab_size, losses=losses[rows]
            )
            matmul(logits.T, hf[rows], out=dwte, beta=0.0 if rows.start == 0 else 1.0)
            matmul(logits, p.wte, out=dh[rows])
        loss_sum = sum_losses(losses)
        dx = hf  # whose last use was the product before
        layernorm_backward(
            dh, x, p.lnf_w, mean, rstd, dx_sum=self._bias_gradient(grads[-1].out_b),
            out=(dx, g.lnf_w, g.lnf_b),
        )  # fmt: skip
        for i in reversed(range(cfg.n_layer)):
            if self.every and (i + 1) % self.every == 0 and i + 1 < cfg.n_layer:
                self._recompute(p, range(i + 1 - self.every, i + 1), B, T, dtype, rng)
            a = self._activations(i, B, T, dtype)
            self._block_backward(i, blocks[i], grads[i], a, dx, dh, rng, grads[i - 1] if i else None)
        if cfg.dropout:
            self._dropout(dropout_backward, dx, rng, _EMBEDDING, T * C, dx)
        embedding_backward(dx.reshape(B, T, C), batch.tokens, batch.order, dwte, g.wpe, accumulate=True)
        if dwte is not g.wte:
            cast_and_scale(dwte.reshape(-1), 1.0, out=g.wte.reshape(-1))
        return loss_sum

    def eval_loss(self, params: Tree, batch: Batch):
        """The sum of the losses of a micro-batch without dropout, (1,) fp32; the bits of `loss_and_grads` at
        dropout 0."""
        hf = self._final(params, batch.tokens)
        losses = self._scratch("losses", hf.shape[:1], np.float32)
        lse = self._scratch("lse_logits", hf.shape[:1], np.float32)
        targets = batch.targets.reshape(-1)
        for rows in self._row_chunks(len(hf), hf.dtype):
            cross_entropy_forward(
                self._logits_of(params, hf[rows]), targets[rows], vocab_size=self.config.vocab_size,
                ignore_index=IGNORE_INDEX, out=(losses[rows], lse[rows]),
            )  # fmt: skip
        return sum_losses(losses)

    def logits(self, params: Tree, tokens):
        """(B, T, vocab_size) logits of tokens (B, T) int32; the memory is used again by the next call."""
        B, T = tokens.shape
        return self._logits_of(params, self._final(params, tokens)).reshape(B, T, -1)[
            ..., : self.config.vocab_size
        ]

    # ----------------------------------------------------------------------------

    def _memory(self, params: Tree) -> Scratch:
        device = device_of(params.buffer)
        if self._scratch is None or self._device != device:
            self._device = device
            self._scratch = Scratch(params.buffer)
            self._on_gpu = on_gpu(params.buffer)
        return self._scratch

    @property
    def _rewrites_gelu(self) -> bool:
        return self._on_gpu and not self._keeps_gelu

    def _final(self, params, tokens):
        """(N, C): what the vocabulary product takes, without keeping anything for a backward pass."""
        return self._last_norm(params, *self._blocks(params, tokens, None, keep=False))[0]

    def _activations(self, i: int, B: int, T: int, dtype, keep: bool = True) -> Activations:
        """Memory of block i's activations; blocks share it where they are recomputed, or not kept at all."""
        C, H, N, scratch = self.config.n_embd, self.config.n_head, B * T, self._scratch
        slot = 0 if not keep else i % self.every if self.every else i
        kept = f"kept.{i // self.every}" if keep and self.every and slot == 0 else None

        def name_of(field: str) -> str:
            if field == "x1" and kept:
                return kept
            return "logits" if field == "act" and self._rewrites_gelu else f"{field}.{slot}"

        shapes = {
            "x1": (N, C), "h1": (N, C), "mean1": (N,), "rstd1": (N,),
            "qkv": (N, 3 * C), "att": (N, C), "lse": (B, H, T),
            "x2": (N, C), "h2": (N, C), "mean2": (N,), "rstd2": (N,), "fc": (N, 4 * C), "act": (N, 4 * C),
        }  # fmt: skip
        statistics = ("mean1", "rstd1", "lse", "mean2", "rstd2")
        return Activations(
            **{
                name: scratch(name_of(name), shape, np.float32 if name in statistics else dtype)
                for name, shape in shapes.items()
            }
        )

    def _blocks(self, p, tokens, rng, keep: bool = True):
        """The last block's branch and stream, (f, x2), before they are added."""
        cfg, (B, T) = self.config, tokens.shape
        self._memory(p)
        first = self._activations(0, B, T, p.dtype, keep)
        embedding_forward(tokens, p.wte, p.wpe, out=first.x1.reshape(B, T, cfg.n_embd))
        if cfg.dropout and rng is not None:
            self._dropout(dropout_forward, first.x1, rng, _EMBEDDING, T * cfg.n_embd, first.x1)
        f, x = None, None
        for i, w in enumerate(p.sections("blocks")):
            a = self._activations(i, B, T, p.dtype, keep)
            f = self._block_forward(i, w, a, f, x, rng)
            x = a.x2
        return f, x

    def _block_forward(self, i, w, a: Activations, f, x, rng):
        """Fills `a` and returns the branch that the next LayerNorm adds to a.x2. f None: a.x1 holds the
        stream already."""
        (B, H, T), (N, C) = a.lse.shape, a.x1.shape
        branch = self._scratch("branch", (N, C), a.x1.dtype)
        if f is None:
            layernorm_forward(a.x1, w.ln1_w, w.ln1_b, out=(a.h1, a.mean1, a.rstd1, a.x1))
        else:
            layernorm_forward(f, w.ln1_w, w.ln1_b, residual=x, out=(a.h1, a.mean1, a.rstd1, a.x1))
        linear_forward(a.h1, w.qkv_w, w.qkv_b, out=a.qkv)
        attention_forward(
            a.qkv.reshape(B, T, 3 * C),
            H,
            out=(a.att.reshape(B, T, C), a.lse),
            **self._attention_dropout(i, T, rng),
        )
        linear_forward(a.att, w.proj_w, w.proj_b, out=branch)
        self._branch_dropout(dropout_forward, branch, rng, i, _AFTER_PROJ, T, branch)
        layernorm_forward(branch, w.ln2_w, w.ln2_b, residual=a.x1, out=(a.h2, a.mean2, a.rstd2, a.x2))
        linear_forward(a.h2, w.fc_w, out=a.fc)
        gelu_forward(a.fc, w.fc_b, out=a.act)
        linear_forward(a.act, w.out_w, w.out_b, out=branch)
        self._branch_dropout(dropout_forward, branch, rng, i, _AFTER_OUT, T, branch)
        return branch

    def _block_backward(self, i, w, g, a: Activations, dx, dh, rng, g_before):
        """dx: the gradient of the block's result on entry, of a.x1 on return. g_before: the gradients of the
        block before, whose last bias is added to a.x1."""
        (B, H, T), (N, C) = a.lse.shape, a.x1.shape
        rewritten = a.act if self._rewrites_gelu else None
        behind_act = 0 if rewritten is None else a.act.nbytes
        dfc = self._scratch("logits", (N, 4 * C), dx.dtype, at=behind_act)
        dqkv = self._scratch("logits", (N, 3 * C), dx.dtype, at=behind_act)  # dfc has been read by then
        dout = self._branch_dropout(dropout_backward, dx, rng, i, _AFTER_OUT, T)
        linear_backward_input(dout, w.out_w, out=dfc)
        gelu_backward(dfc, a.fc, w.fc_b, recompute_out=rewritten, out=(dfc, g.fc_b))
        own_bias = self._bias_gradient(g.proj_b) is None
        linear_backward_weight(dout, a.act, bias=own_bias, out=(g.out_w, g.out_b if own_bias else None))
        linear_backward(dfc, a.h2, w.fc_w, bias=False, out=(dh, g.fc_w, None))
        layernorm_backward(
            dh, a.x2, w.ln2_w, a.mean2, a.rstd2, dresidual=dx, dx_sum=self._bias_gradient(g.proj_b),
            out=(dx, g.ln2_w, g.ln2_b),
        )  # fmt: skip
        dout = self._branch_dropout(dropout_backward, dx, rng, i, _AFTER_PROJ, T)
        linear_backward(
            dout, a.att, w.proj_w, bias=own_bias, out=(dh, g.proj_w, g.proj_b if own_bias else None)
        )
        attention_backward(
            dh.reshape(B, T, C), a.qkv.reshape(B, T, 3 * C), a.att.reshape(B, T, C), a.lse, H,
            dbias=g.qkv_b if self._on_gpu else None, out=dqkv.reshape(B, T, 3 * C),
            **self._attention_dropout(i, T, rng),
        )  # fmt: skip
        dbias = None if self._on_gpu else g.qkv_b
        linear_backward(dqkv, a.h1, w.qkv_w, bias=not self._on_gpu, out=(dh, g.qkv_w, dbias))
        layernorm_backward(
            dh, a.x1, w.ln1_w, a.mean1, a.rstd1, dresidual=dx,
            dx_sum=g_before and self._bias_gradient(g_before.out_b), out=(dx, g.ln1_w, g.ln1_b),
        )  # fmt: skip

    def _bias_gradient(self, dbias):
        """`dbias`, where the gradient of a branch's last bias is the sum of what LayerNorm's backward pass
        writes: on a GPU and without dropout between them. Else None."""
        return dbias if self._on_gpu and not self.config.dropout else None

    def _recompute(self, p, blocks, B, T, dtype, rng):
        f, x, sections = None, None, p.sections("blocks")
        for i in blocks:
            a = self._activations(i, B, T, dtype)
            f = self._block_forward(i, sections[i], a, f, x, rng)
            x = a.x2

    def _last_norm(self, p, f, x2):
        """(hf, mean, rstd, x) from the last branch and stream."""
        (N, C), scratch = f.shape, self._scratch
        hf, x = scratch("hf", (N, C), f.dtype), scratch("x", (N, C), f.dtype)
        mean, rstd = scratch("meanf", (N,), np.float32), scratch("rstdf", (N,), np.float32)
        layernorm_forward(f, p.lnf_w, p.lnf_b, residual=x2, out=(hf, mean, rstd, x))
        return hf, mean, rstd, x

    def _row_chunks(self, N: int, dtype) -> list[slice]:
        """Rows whose logits are in memory together: as few chunks, of equal size, as LOGITS_BYTES allows."""
        n_bytes = N * self.config.padded_vocab_size * np.dtype(dtype).itemsize
        size = -(-N // -(-n_bytes // LOGITS_BYTES))
        size = -(-size // 64) * 64  # whole tiles
        return [slice(n, min(n + size, N)) for n in range(0, N, size)]

    def _logits_of(self, p, hf):
        logits = self._scratch("logits", (len(hf), self.config.padded_vocab_size), hf.dtype)
        return matmul(hf, p.wte.T, out=logits)

    def _dropout(self, apply, x, rng, site, per_row, out):
        return apply(x, self.config.dropout, rng.key, site=site, first=rng.row * per_row, out=out)

    def _branch_dropout(self, apply, x, rng, i, place, T, out=None):
        """Dropout behind a residual branch, into `out` or into memory of its own; x itself without
        dropout."""
        if not self.config.dropout or rng is None:
            return x
        out = self._scratch("dbranch", x.shape, x.dtype) if out is None else out
        return self._dropout(apply, x, rng, 4 * i + place, T * x.shape[1], out)

    def _attention_dropout(self, i, T, rng) -> dict:
        if not self.config.dropout or rng is None:
            return {}
        first = rng.row * self.config.n_head * T * T
        return {"dropout": self.config.dropout, "rng": rng.key, "site": 4 * i + _ATTENTION, "first": first}
