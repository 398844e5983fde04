"""What a model and a training step are made from: frozen dataclasses, validated once."""

import dataclasses
import math
from dataclasses import dataclass
from numbers import Integral, Real

from nbtrain.errors import InvalidType, InvalidValue

VOCAB_MULTIPLE = 128  # cuBLAS runs the vocabulary product 8 times slower at 50257 columns than at 50304

PRESETS = {
    # GPT-2 (Radford et al., 2019)
    "gpt2": dict(n_layer=12, n_head=12, n_embd=768),
    "gpt2-medium": dict(n_layer=24, n_head=16, n_embd=1024),
    "gpt2-large": dict(n_layer=36, n_head=20, n_embd=1280),
    "gpt2-xl": dict(n_layer=48, n_head=25, n_embd=1600),
    # nanoGPT's two Shakespeare models: one for a CPU, one for any GPU
    "shakespeare-small": dict(n_layer=4, n_head=4, n_embd=128, block_size=64, vocab_size=65),
    "shakespeare": dict(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65),
}


@dataclass(frozen=True)
class GPTConfig:
    """A GPT-2: learned positions, pre-LayerNorm, tanh-GELU, tied embedding, biases everywhere."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024  # positions
    vocab_size: int = 50257
    dropout: float = 0.0  # of the embedding, the attention probabilities and both residual branches

    def __post_init__(self):
        for field, most in (
            ("n_layer", 1_000),
            ("n_head", 1_000),
            ("n_embd", 32_768),
            ("block_size", 1_000_000),
            ("vocab_size", 10_000_000),
        ):
            _whole(self, field, 1, most)
        _number(self, "dropout", 0.0, 1.0, open_above=True)
        if self.n_embd % self.n_head:
            raise InvalidValue(
                f"n_embd must be a multiple of n_head; got n_embd={self.n_embd}, n_head={self.n_head}. "
                f"Take n_embd={self.n_embd // self.n_head * self.n_head or self.n_head} or another n_head."
            )

    @classmethod
    def preset(cls, name: str, **changes) -> "GPTConfig":
        """The configuration called `name`, with `changes` to its fields."""
        if name not in PRESETS:
            raise InvalidValue(f"unknown preset {name!r}. Presets: {', '.join(PRESETS)}.")
        return cls(**{**PRESETS[name], **changes})

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of 128; the padding is never
        predicted."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    def leaves(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the parameters, in order. Matrices are (in, out)."""
        C = self.n_embd
        block = {
            "ln1_w": (C,), "ln1_b": (C,), "qkv_w": (C, 3 * C), "qkv_b": (3 * C,),
            "proj_w": (C, C), "proj_b": (C,),
            "ln2_w": (C,), "ln2_b": (C,), "fc_w": (C, 4 * C), "fc_b": (4 * C,),
            "out_w": (4 * C, C), "out_b": (C,),
        }  # fmt: skip
        return [
            ("wte", (self.padded_vocab_size, C)),
            ("wpe", (self.block_size, C)),
            *((f"blocks.{i}.{name}", shape) for i in range(self.n_layer) for name, shape in block.items()),
            ("lnf_w", (C,)),
            ("lnf_b", (C,)),
        ]


@dataclass(frozen=True)
class TrainConfig:
    """One optimizer step: AdamW, its schedule, clipping, loss scaling and recomputation.

    The schedule's options are checked together by `nbtrain.optim.Schedule`, the loss scale's by
    `nbtrain.precision.LossScaling`.
    """

    lr: float = 6e-4
    schedule: str = "constant"  # constant, linear, cosine or wsd
    warmup: int = 0  # steps from 0 to lr
    total: int = 0  # steps of the whole schedule; needed by every schedule but constant
    decay: int = 0  # wsd: the last steps, that fall to min_lr
    min_lr: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1  # of matrices and embeddings
    clip: float = 1.0  # largest L2 norm of the gradient; 0 does not clip
    remat: str = "light"  # none, light, every:k or full
    loss_scale: float | str = "auto"  # a number, "dynamic", or "auto": dynamic for fp16, 1 otherwise
    growth_interval: int = 2000  # dynamic: good steps before the scale doubles

    def __post_init__(self):
        _number(self, "lr", 0.0, math.inf)
        _number(self, "min_lr", 0.0, math.inf)
        _number(self, "eps", 0.0, 1.0)
        if self.eps == 0:
            raise InvalidValue("eps must be above 0: padding has m = v = 0. Take 1e-8.")
        _number(self, "weight_decay", 0.0, math.inf)
        _number(self, "clip", 0.0, math.inf)
        for field in ("warmup", "total", "decay"):
            _whole(self, field, 0, 2**31 - 1)
        _whole(self, "growth_interval", 1, 2**31 - 1)
        if (
            not isinstance(self.betas, tuple)
            or len(self.betas) != 2
            or not all(is_number(b) and 0 <= b < 1 for b in self.betas)
        ):
            raise InvalidValue(f"betas are two numbers in [0, 1); got {self.betas!r}.")
        object.__setattr__(self, "betas", tuple(map(_plain, self.betas)))
        if is_number(self.loss_scale):
            object.__setattr__(self, "loss_scale", _plain(self.loss_scale))
        self.remat_every(1)

    def remat_every(self, n_layer: int) -> int:
        """Blocks between two kept inputs, 0 where no block runs forward again."""
        kind, _, k = self.remat.partition(":") if isinstance(self.remat, str) else ("", "", "")
        if kind in ("none", "light") and not k:
            return 0
        if kind == "full" and not k:
            return 1
        if kind == "every" and k.isdigit() and int(k) > 0:
            return min(int(k), n_layer)
        raise InvalidValue(f'remat is "none", "light", "every:k" with k >= 1, or "full"; got {self.remat!r}.')


def is_whole(x) -> bool:
    """Whether `x` is a whole number, of Python's or NumPy's; a bool is none."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def is_number(x) -> bool:
    """Whether `x` is a real number, of Python's or NumPy's; a bool is none."""
    return isinstance(x, Real) and not isinstance(x, bool)


def _plain(x) -> int | float:
    """A number as Python's own, which JSON can hold and whose hash is the same from run to run."""
    return int(x) if isinstance(x, Integral) else float(x)


def _whole(config, field, least, most):
    value = getattr(config, field)
    if not is_whole(value):
        raise InvalidType(f"{field} must be an int; got {value!r} ({type(value).__name__}).")
    if not least <= value <= most:
        raise InvalidValue(f"{field} must be in {least} … {most}; got {value}.")
    object.__setattr__(config, field, int(value))


def _number(config, field, least, most, open_above=False):
    value = getattr(config, field)
    if not is_number(value):
        raise InvalidType(f"{field} must be a number; got {value!r} ({type(value).__name__}).")
    value = _plain(value)
    if not least <= value <= most or value == math.inf or (open_above and value == most):
        end = ")" if open_above or most == math.inf else "]"
        raise InvalidValue(f"{field} must be in [{least}, {most}{end}; got {value}.")
    object.__setattr__(config, field, value)


def from_dict(kind, values: dict):
    """A config of class `kind` from a dict (JSON, TOML); unknown keys are an error that lists the known
    ones."""
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := set(values) - known:
        raise InvalidValue(
            f"unknown option {', '.join(sorted(map(repr, unknown)))} for {kind.__name__}. "
            f"Options: {', '.join(sorted(known))}."
        )
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})
