"""The memory that a run will take, by part, before anything is allocated.

The training step itself is walked through, on arrays that have shapes and no memory
(`nbtrain.device.outline`): what the step would allocate, pool and all, is what the plan counts. So a plan
follows the model's code, and no formula stands beside it. One thing no walk can tell, and it was measured:
what a process takes of a card beside arrays (`CONTEXT_BYTES`).
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from nbtrain.batch import Batch
from nbtrain.config import GPTConfig, TrainConfig, is_whole
from nbtrain.device import dtype_name
from nbtrain.device.blas import WORKSPACE
from nbtrain.device.capability import compute_capability
from nbtrain.device.outline import Card, planning
from nbtrain.device.place import memory_of, resolve_device
from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.model import GPT, LOGITS_BYTES
from nbtrain.modes import capture, donate
from nbtrain.precision import resolve_dtype
from nbtrain.train import (
    OptState,
    TrainStep,
    make_eval_step,
    make_train_step,
    outline_of_batch,
    outlines,
)
from nbtrain.tree import Tree

# What a card's memory rises by beside arrays: the driver's context, CuPy's and cuBLAS's code, this library's
# kernels and the graph, on an H200. On the CPU: interpreter and libraries, once twins are compiled.
CONTEXT_BYTES = {"cuda": 560_000_000, "hip": 560_000_000, "cpu": 200_000_000}
MODES = ("auto", "pure", "donate", "capture")
MOST_ABOVE = 16  # values of B that are looked at above the one that a search found
MOST_VRAM = 16 << 40
MOST_TOKENS = 2**31 - 2  # of a batch: the kernels count them in 32 bits
# Recomputing every block takes this share of a step more, and a step of so many rows is half as fast, a row,
# as one of very many: both by docs/speed.md. They order what fits, and are no forecast.
FORWARD_SHARE, HALF_SPEED_ROWS = 0.27, 1200
GELU_SHARE = 0.01  # what writing GELU's results again takes, by docs/speed.md


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run takes at its peak: `parts` in bytes, by name, and their sum."""

    config: GPTConfig
    dtype: str  # fp32, fp16 or bf16
    B: int
    T: int
    micro: int
    remat: str
    mode: str  # pure, donate or capture
    device: str  # cuda, hip or cpu
    parts: dict[str, int]
    given_back: int = 0  # bytes of the peak that the first step needs alone, to measure products

    @property
    def total(self) -> int:
        """Bytes of the card at the peak, the context included."""
        return sum(self.parts.values())

    @property
    def recomputed(self) -> int:
        """Blocks that run forward a second time in every step."""
        return _recomputed(self.remat, self.config.n_layer)

    @property
    def speed(self) -> float:
        """An estimate of tokens/s, relative to a large batch without recomputation."""
        rows = self.B * self.T
        again = FORWARD_SHARE * self.recomputed / self.config.n_layer
        if self.device != "cpu" and self.remat != "none":
            again += GELU_SHARE
        return rows / (rows + HALF_SPEED_ROWS) / (1 + again)

    def __str__(self) -> str:
        width = max(map(len, self.parts))
        rows = [
            f"{name:{width}} {n_bytes / 1e6:12,.0f} MB" for name, n_bytes in self.parts.items() if n_bytes
        ]
        return "\n".join([*rows, f"{'total':{width}} {self.total / 1e6:12,.0f} MB"])


def plan(
    config: GPTConfig,
    *,
    B: int,
    T: int | None = None,
    micro: int = 1,
    dtype: str = "auto",
    remat: str = TrainConfig.remat,
    mode: str = "auto",
    device: str = "auto",
    evaluate: bool = True,
) -> Plan:
    """The memory of a run with batches (micro, B, T), by part; nothing is allocated, and no GPU is needed.

    T: block_size by default. dtype: "fp32", "fp16", "bf16" or "auto", what `nbtrain.init` would choose. mode:
    "pure", "donate" or "capture", what is done with the step; "auto" is what `nbtrain train` does. device:
    "cuda", "hip", "cpu", one of this machine ("cuda:0"), or "auto": the GPU that is here, else an NVIDIA one
    that has bf16. evaluate: the run evaluates, too, (B, T) at a time, as `nbtrain train` does.

    On the CPU the memory that operators work in is not counted: it is small in fp32, and in 16 bits up to an
    array widened to fp32 for each that an operator is given.
    """
    return _Run.of(config, T, micro, dtype, mode, device, evaluate).plan(_count("B", B), remat)


def fits(
    config: GPTConfig,
    vram: int,
    *,
    remat: str | None = None,
    T: int | None = None,
    micro: int = 1,
    dtype: str = "auto",
    mode: str = "auto",
    device: str = "auto",
    evaluate: bool = True,
) -> list["Fit"]:
    """The largest B whose run takes at most `vram` bytes, for every remat policy, from no recomputation to
    most, or for `remat` alone. Other arguments as for `plan`."""
    run = _Run.of(config, T, micro, dtype, mode, device, evaluate)
    vram = _count("vram", vram)
    if vram > MOST_VRAM:
        raise InvalidValue(f"vram is the bytes of a card, {MOST_VRAM:,} at most; got {vram:,}.")
    chosen = policies(config.n_layer) if remat is None else [remat]
    return [Fit(remat, run.largest(vram, remat), run.plan(1, remat)) for remat in chosen]


class Fit(NamedTuple):
    remat: str
    largest: Plan | None  # with the largest B; None where even B = 1 is too much
    smallest: Plan  # with B = 1


def fastest(found: list[Fit]) -> Plan | None:
    """The fastest plan that fits, by `Plan.speed`; None where nothing fits."""
    plans = [fit.largest for fit in found if fit.largest is not None]
    return max(plans, key=lambda plan: plan.speed, default=None)


def policies(n_layer: int) -> list[str]:
    """Remat policies worth a look, those that recompute least first: none, light, every:k with k a half, a
    fourth, … of the blocks, full."""
    halves = [n_layer >> shift for shift in range(1, n_layer.bit_length())]
    found = ["none", "light", *(f"every:{k}" for k in halves if k > 1), "full"]
    return sorted(found, key=lambda remat: _recomputed(remat, n_layer))


def parse_bytes(text: str) -> int:
    """Bytes of "8GB" (10^9), "24GiB" (2^30), "512MB", "80e9" or "80000000000"."""
    units = {"": 1, "b": 1} | {
        letter + end: base**power
        for power, letter in enumerate("kmgt", 1)
        for end, base in (("b", 1000), ("ib", 1024), ("", 1000))
    }
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:e\d{1,2})?)\s*([a-z]*)\s*", text.lower())
    n_bytes = float(found[1]) * units.get(found[2], 0) if found else 0
    if not 1e6 <= n_bytes <= MOST_VRAM:
        raise InvalidValue(
            "an amount of memory is a number with a unit, as 8GB, 24GiB or 80e9, from 1MB to 16TiB; "
            f"got {text!r}."
        )
    return int(n_bytes)


class _Run:
    """A run of which all but B and the remat policy is settled."""

    def __init__(self, config, T, micro, dtype, mode, device, capability, evaluate):
        self.config, self.T, self.micro, self.dtype = config, T, micro, dtype
        self.mode, self.device, self.capability, self.evaluate = mode, device, capability, evaluate
        self.plan: Callable[[int, str], Plan] = functools.cache(self._plan)

    @classmethod
    def of(cls, config, T, micro, dtype, mode, device, evaluate) -> "_Run":
        if not isinstance(config, GPTConfig):
            raise InvalidType(f"plan expects a GPTConfig; got {type(config).__name__}.")
        kind, capability = target(device)
        storage, _ = resolve_dtype(dtype, "cpu" if kind == "cpu" else f"{kind}:0", capability)
        if mode not in MODES:
            raise InvalidValue(f"mode is one of {', '.join(MODES)}; got {mode!r}.")
        if mode == "auto":
            mode = "capture" if kind == "cuda" else "donate"
        if mode == "capture" and kind == "cpu":
            raise Unavailable("capture needs a GPU; plan for the CPU with donate or pure.")
        T = config.block_size if T is None else _count("T", T)
        if T > config.block_size:
            raise InvalidValue(f"T is at most block_size = {config.block_size}; got {T}.")
        micro = _count("micro", micro)
        return cls(config, T, micro, dtype_name(storage), mode, kind, capability, evaluate)

    def _plan(self, B: int, remat: str) -> Plan:
        if self.micro * B * self.T > MOST_TOKENS:
            raise InvalidValue(
                f"a batch has at most {MOST_TOKENS:,} tokens; got {self.micro} x {B} x {self.T}. "
                "Take a smaller B."
            )
        parts, given_back = self._walk(B, remat)
        parts["context and libraries"] = CONTEXT_BYTES[self.device]
        shape = B, self.T, self.micro
        return Plan(self.config, self.dtype, *shape, remat, self.mode, self.device, parts, given_back)

    def _walk(self, B: int, remat: str) -> tuple[dict[str, int], int]:
        """(parts but for the context, bytes of them that are given back after the first step)."""
        config, shape = self.config, (self.micro, B, self.T)
        card = Card(self.capability, WORKSPACE if self.device == "cuda" else 0)
        with planning(card):
            params, state, batch = outlines(config, self.dtype, shape, card)
            _next = outline_of_batch(shape, card)  # on its way while the other is in use
            step = make_train_step(config, TrainConfig(remat=remat))
            if self.device == "cpu":
                _as_on_the_cpu(_model(step), params)
            run = {"pure": lambda step: step, "donate": donate, "capture": capture}[self.mode](step)
            for _ in range(2 if self.mode == "pure" else 1):  # what comes after repeats it
                params, state, _ = run(params, state, batch)
            parts, trained = parts_of(params, state, step, batch, self.mode), card.peak
            parts["products' workspace"] = card.workspaces
            if self.device == "cpu":  # twins allocate by themselves, and NumPy has no pool
                if self.evaluate:
                    parts["evaluation"] = _evaluation_on_the_cpu(config, params, card, B, self.T)
                return parts, 0
            parts["operators, and the pool's rest"] = trained - sum(parts.values())
            if self.evaluate:
                make_eval_step(config)(params, outline_of_batch((1, B, self.T), card))
            parts["evaluation"] = card.peak - trained
        return parts, card.peak - card.bytes

    def largest(self, vram: int, remat: str) -> Plan | None:
        """The plan with the largest B that takes at most `vram`.

        Memory grows with B, but where the logits are cut into one chunk more it falls back a little: so above
        the B that a search finds, a few more are looked at.
        """
        most = MOST_TOKENS // (self.micro * self.T)
        need = functools.cache(lambda B: self.plan(B, remat).total)
        if need(1) > vram:
            return None
        low, high, slope = 1, most + 1, max(need(min(2, most)) - need(1), 1)
        while high - low > 1:  # low fits, high does not
            middle = min(max(low + int((vram - need(low)) / slope), low + 1), 4 * low, high - 1)
            slope = max(int((need(middle) - need(low)) / (middle - low)), 1)
            low, high = (middle, high) if need(middle) <= vram else (low, middle)
        more = min(int((1 + self.evaluate) * LOGITS_BYTES / (need(low) / low)) + 1, MOST_ABOVE)
        above = range(min(low + more, most), low, -1)
        return self.plan(next((B for B in above if need(B) <= vram), low), remat)


def parts_of(params: Tree, state: OptState, step: TrainStep, batch: Batch, mode: str) -> dict[str, int]:
    """Bytes of what a run holds by name, once `step` has run: of a planned run, and of a real one."""
    scratch, weights, master = _model(step)._scratch.sizes, params.buffer.nbytes, state.master.buffer.nbytes
    trees = {
        "weights": weights,
        "fp32 master weights": 0 if state.master is params else master,
        "AdamW moments": state.m.buffer.nbytes + state.v.buffer.nbytes,
    }
    return trees | {
        "a second set of these": sum(trees.values()) if mode == "pure" else 0,
        "gradients": step._grads.buffer.nbytes,
        "fp32 sums of gradients": step._sums.buffer.nbytes if step._sums is not None else 0,
        "activations": sum(scratch.values()) - scratch["logits"] - scratch.get("dwte", 0),
        "logits, and a block's own pass": scratch["logits"],  # the model lays the one over the other
        "fp32 embedding gradient": scratch.get("dwte", 0),
        # One in use, one on its way, and the one that a graph reads.
        "batches": (3 if mode == "capture" else 2) * sum(x.nbytes for x in batch),
    }


def _as_on_the_cpu(model: GPT, params: Tree) -> None:
    """The model takes outlines for arrays on a GPU; on the CPU it keeps what GELU returns."""
    model._memory(params)
    model._on_gpu = False


def _evaluation_on_the_cpu(config, params, card, B: int, T: int) -> int:
    model = GPT(config, "full")
    _as_on_the_cpu(model, params)
    model.eval_loss(params, Batch(*(x[0] for x in outline_of_batch((1, B, T), card))))
    return model._scratch.bytes


def _model(step: TrainStep) -> Any:
    """The GPT whose method the step calls."""
    return step.loss_and_grads.__self__  # type: ignore[attr-defined]


def target(device: str) -> tuple[str, tuple[int, int] | None]:
    """(cuda, hip or cpu; compute capability of an NVIDIA GPU) of what a plan is for."""
    if device not in ("auto", "cpu", "cuda", "hip"):
        device, _ = resolve_device(device)
        return device.partition(":")[0], compute_capability(device)
    here, _ = resolve_device("auto")
    kind = here.partition(":")[0]
    if device == "cpu" or device == "hip":
        return device, None
    if kind == "hip" and device == "auto":
        return "hip", None
    return "cuda", compute_capability(here) or (8, 0)


def memory_here(device: str) -> int | None:
    """Bytes of the GPU that `device` names or "auto" finds; None without one, and on the CPU."""
    here, _ = resolve_device("auto" if device in ("auto", "cuda", "hip") else device)
    return None if here == "cpu" or device == "cpu" else memory_of(here)


def _recomputed(remat: str, n_layer: int) -> int:
    every = TrainConfig(remat=remat).remat_every(n_layer)
    return (n_layer - 1) // every * every if every else 0


def _count(name: str, value) -> int:
    if not is_whole(value):
        raise InvalidType(f"{name} must be an int; got {value!r} ({type(value).__name__}).")
    if value < 1:
        raise InvalidValue(f"{name} must be 1 or more; got {value}.")
    return int(value)
