"""One token after the other for B sequences, with their keys and values kept: the forward pass of sampling.

    prefill: all tokens of a sequence but the last, at once, by the kernels of training; k and v go to the
             cache
    step:    one more token a sequence: its k and v go to the cache, its q attends to all that are there

k_cache, v_cache: (L, B, H, length, D) in the dtype of the weights, L layers, H heads of D channels. tokens
and lengths (B,) int32 are on the device too, so that a step is the same launches every time: on NVIDIA GPUs
they are captured once, in one graph, and replayed for every token. A step of a 124M model is 100 launches of
a few microseconds, which no host could launch as fast.
"""

from collections.abc import Sequence

import numpy as np

from nbtrain.config import GPTConfig
from nbtrain.device import array_module, on_gpu
from nbtrain.device.blas import fuses_bias
from nbtrain.device.graph import Graph
from nbtrain.device.place import enough_memory, say_once, to_device, use
from nbtrain.device.scratch import Scratch
from nbtrain.errors import InvalidValue
from nbtrain.ops.attention import attention_forward
from nbtrain.ops.attention_decode import attention_decode
from nbtrain.ops.embedding import embedding_forward
from nbtrain.ops.embedding_decode import embedding_decode
from nbtrain.ops.gelu import gelu_forward
from nbtrain.ops.layernorm import layernorm_forward
from nbtrain.ops.linear import linear_forward, matmul
from nbtrain.tree import Tree, check_params

PREFILL_STEP = 64  # prefilled lengths grow in steps of it, so that few shapes occur
PREFILL_TOKENS = 16_384  # that are prefilled at once, unless a single sequence has more
# What takes memory, and what to do where it is not there.
DECODING = "decoding", "Take fewer sequences at once, or fewer tokens for each."


class Decoder:
    """The cache of B sequences, and the forward pass of one more token for each.

    The memory of `params` is kept and read by every step, whatever becomes of that tree: training that writes
    over it changes the model. But 16-bit weights on the CPU are widened to fp32, here and by `refresh`. Not
    for several threads at once.
    """

    def __init__(self, params: Tree, config: GPTConfig, batch_size: int, length: int | None = None):
        """`length`: the tokens that a sequence may have, at most and by default block_size."""
        check_params(params, config.leaves())
        length = config.block_size if length is None else length
        for name, value, most in (("batch_size", batch_size, 2**20), ("length", length, config.block_size)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidValue(f"{name} must be an int in 1 … {most}; got {value!r}.")
        self.config, self.batch_size, self.length = config, batch_size, length
        self.device, self._source = params.device, params.buffer
        self._n = np.zeros(batch_size, np.int64)  # lengths, known on the host
        with use(self.device), enough_memory(*DECODING):
            if self.device == "cpu" and params.dtype != np.float32:
                params = Tree(params.layout, params.buffer.astype(np.float32))
            self._params = params.alias()  # a step may consume the caller's tree
            xp = array_module(params.buffer)
            shape = config.n_layer, batch_size, config.n_head, length, config.head_dim
            self._k, self._v = (xp.zeros(shape, params.dtype) for _ in range(2))
            self._tokens, self._lengths = (xp.zeros(batch_size, np.int32) for _ in range(2))
            self._prefill_scratch, self._step_scratch = Scratch(params.buffer), Scratch(params.buffer)
            self._graph = self._captured() if on_gpu(self._tokens) else None
            self._lengths.fill(0)  # warming up took a step

    @property
    def tokens(self):
        """(B,) int32 on the device: what the next step reads. Write the next tokens here."""
        return self._tokens

    @property
    def lengths(self) -> np.ndarray:
        """(B,) the tokens that each sequence has in the cache."""
        return self._n.copy()

    def serves(self, params: Tree) -> bool:
        """True if it was made with this memory."""
        return params.buffer is self._source

    def refresh(self) -> None:
        """Takes over weights that were written to the memory of `params` since. Sequences begun before hold
        keys and values of the old ones: start them anew."""
        if self._params.buffer is not self._source:
            self._params.buffer[...] = self._source

    def start(self, rows: Sequence[int], sequences: Sequence[np.ndarray]) -> None:
        """Makes each of `rows` begin anew with a sequence (n,) int32 of 1 … length ids, which the host has
        checked; its last token is left to the next step. Other rows are as they were."""
        for row, ids in zip(rows, sequences, strict=True):
            if not 0 <= row < self.batch_size or not 1 <= len(ids) <= self.length:
                raise InvalidValue(
                    f"a sequence of row 0 … {self.batch_size - 1} has 1 … {self.length} tokens; got "
                    f"{len(ids)} for row {row}."
                )
        with use(self.device), enough_memory(*DECODING):
            begun = ((row, ids[:-1]) for row, ids in zip(rows, sequences, strict=True) if len(ids) > 1)
            work = sorted(begun, key=lambda item: len(item[1]))
            while work:
                T = -(-len(work[-1][1]) // PREFILL_STEP) * PREFILL_STEP
                T = min(T, self.length)
                count = max(1, PREFILL_TOKENS // T)
                self._prefill(work[-count:], T)
                work = work[:-count]
            xp = array_module(self._tokens)
            where = to_device(np.asarray(rows, np.int64), self.device)
            self._tokens[where] = xp.asarray(np.array([ids[-1] for ids in sequences], np.int32))
            self._lengths[where] = xp.asarray(np.array([len(ids) - 1 for ids in sequences], np.int32))
            for row, ids in zip(rows, sequences, strict=True):
                self._n[row] = len(ids) - 1

    def step(self):
        """The logits (B, padded_vocab_size) behind `tokens`, which every sequence now has; the memory is used
        again by the next call. All sequences must be shorter than `length`."""
        if (self._n >= self.length).any():
            row = int((self._n >= self.length).argmax())
            raise InvalidValue(
                f"sequence {row} has all {self.length} tokens that the cache holds. Begin it anew with its "
                "last ones: start([row], [ids])."
            )
        with use(self.device), enough_memory(*DECODING):
            if self._graph is None:
                logits = self._step()
            else:
                self._graph.launch()
                logits = self._graph.result
        self._n += 1
        return logits

    @property
    def bytes(self) -> int:
        """Memory of the cache."""
        return self._k.nbytes + self._v.nbytes

    # ----------------------------------------------------------------------------

    def _captured(self) -> Graph | None:
        """The step as a graph, before there is anything in the cache that its warming up could spoil."""
        if not fuses_bias(self._tokens):
            say_once("decoding launches every kernel by itself: its products cannot be captured here")
            return None
        return Graph(self._warm_up, self._step)

    def _warm_up(self):
        self._lengths.fill(0)
        self._step()

    def _step(self):
        p, scratch, B = self._params, self._step_scratch, self.batch_size
        x = scratch("x1", (B, self.config.n_embd), p.dtype)
        embedding_decode(self._tokens, self._lengths, p.wte, p.wpe, out=x)
        f = None
        for i, w in enumerate(p.sections("blocks")):

            def attend(qkv, out, i=i):
                attention_decode(qkv, self._k[i], self._v[i], self._lengths, out=out)

            f, x = self._block(scratch, w, f, x, attend)
        h = scratch("h", x.shape, x.dtype)
        mean, rstd = (scratch(name, (B,), np.float32) for name in ("mean", "rstd"))
        layernorm_forward(f, p.lnf_w, p.lnf_b, residual=x, out=(h, mean, rstd, x))
        logits = scratch("logits", (B, self.config.padded_vocab_size), p.dtype)
        matmul(h, p.wte.T, out=logits)
        self._lengths += np.int32(1)
        return logits

    def _prefill(self, work, T: int):
        """work: [(row, ids)], at most T ids each. What stands behind a sequence in its row is never seen:
        attention looks back, and a step writes its place of the cache before it reads it."""
        p, scratch, cfg = self._params, self._prefill_scratch, self.config
        rows = to_device(np.array([row for row, _ in work], np.int64), self.device)
        tokens = np.zeros((len(work), T), np.int32)
        for i, (_, ids) in enumerate(work):
            tokens[i, : len(ids)] = ids
        (n, _), C, H = tokens.shape, cfg.n_embd, cfg.n_head
        x, f = scratch("x1", (n * T, C), p.dtype), None
        embedding_forward(to_device(tokens, self.device), p.wte, p.wpe, out=x.reshape(n, T, C))
        bits = np.dtype(f"u{p.dtype.itemsize}")  # a copy by index, whatever the dtype
        for i, w in enumerate(p.sections("blocks")):

            def attend(qkv, out, i=i):
                kv = qkv.view(bits).reshape(n, T, 3, H, cfg.head_dim).transpose(2, 0, 3, 1, 4)
                for cache, new in ((self._k[i], kv[1]), (self._v[i], kv[2])):
                    cache.view(bits)[rows, :, :T] = new
                if i + 1 < cfg.n_layer:  # nobody asks what comes out of the last one
                    lse = scratch("lse", (n, H, T), np.float32)
                    attention_forward(qkv.reshape(n, T, 3 * C), H, out=(out.reshape(n, T, C), lse))

            f, x = self._block(scratch, w, f, x, attend, whole=i + 1 < cfg.n_layer)

    def _block(self, scratch, w, f, x, attend, whole=True):
        """One block of `nbtrain.model.GPT`: from the branch f (None: none) and the stream x before it to
        those behind it. attend(qkv, out) is its attention; without `whole` nothing else is done after it."""
        N, C = x.shape
        h, branch = scratch("h", (N, C), x.dtype), scratch("branch", (N, C), x.dtype)
        qkv, att = scratch("qkv", (N, 3 * C), x.dtype), scratch("att", (N, C), x.dtype)
        mean, rstd = scratch("mean", (N,), np.float32), scratch("rstd", (N,), np.float32)
        layernorm_forward(x if f is None else f, w.ln1_w, w.ln1_b,
                          residual=None if f is None else x, out=(h, mean, rstd, x))  # fmt: skip
        linear_forward(h, w.qkv_w, w.qkv_b, out=qkv)
        attend(qkv, att)
        if whole:
            fc, act = scratch("fc", (N, 4 * C), x.dtype), scratch("act", (N, 4 * C), x.dtype)
            linear_forward(att, w.proj_w, w.proj_b, out=branch)
            layernorm_forward(branch, w.ln2_w, w.ln2_b, residual=x, out=(h, mean, rstd, x))
            linear_forward(h, w.fc_w, out=fc)
            gelu_forward(fc, w.fc_b, out=act)
            linear_forward(act, w.out_w, w.out_b, out=branch)
        return branch, x
