"""The training step: batch -> loss -> gradients -> norm -> AdamW -> 16-bit copy.

 1. the batch is validated: ids on the host where it is there, else on the device
 2. forward in the dtype of params
 3. cross-entropy in fp32, mean over the targets that count, over all micro-batches
 4. the loss is scaled
 5. backward, gradients in the dtype of params, recomputing as the remat policy says
 6. unscaling is folded into 7 and 8; where micro-batches accumulate, `cast_and_scale` adds them up in fp32
 7. L2 norm of all gradients and the non-finite check, one device scalar; the clip factor
 8. AdamW on the fp32 master weights, skipped on the device when the norm is not finite or no target counted;
    the loss scale halves then, and doubles after a run of good steps (Micikevicius et al., 2018). A step
    whose loss or norm lies above opt_state.limits is skipped too
 9. 16-bit weights from the master, in the same pass
10. metrics as device scalars; the caller reads them when it wants them
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nbtrain.batch import Batch, check_batch
from nbtrain.config import GPTConfig, TrainConfig
from nbtrain.device import FLOATS, array_module, backend, dtype_name
from nbtrain.device.ahead import compile_ahead
from nbtrain.device.blas import WORKSPACE, measured_at_length, room
from nbtrain.device.capability import capability_of
from nbtrain.device.outline import Card, planning
from nbtrain.device.philox import Rng
from nbtrain.device.place import device_of, enough_memory, to_device, to_host, use
from nbtrain.errors import InvalidType, InvalidValue
from nbtrain.model import GPT, init_params
from nbtrain.ops.adamw import adamw
from nbtrain.ops.batch_check import batch_check, nan_if_bad
from nbtrain.ops.cast import cast_and_scale
from nbtrain.ops.control import control
from nbtrain.ops.cross_entropy import sum_losses
from nbtrain.ops.global_norm import global_norm
from nbtrain.optim import Schedule
from nbtrain.precision import LossScale, LossScaling, choose
from nbtrain.tree import Layout, Tree

SAMPLE, N_SAMPLES = 256, 16  # elements, and how many samples of so many are compared
Array = Any  # numpy.ndarray or cupy.ndarray
# What takes memory, and what to do where it is not there.
A_STEP = (
    "a training step",
    'Make it anew, for a smaller B or with remat="full"; nb.plan and `nbtrain plan` tell what fits.',
)


class OptState(NamedTuple):
    """What AdamW and the loss scale remember. Scalars are (1,) arrays on the device."""

    step: Array  # (1,) int32, attempts: schedule, data and random bits follow it
    updates: Array  # (1,) int32, applied steps: bias correction follows it
    master: Tree  # fp32, the weights of record; params == cast(master) after every step
    m: Tree  # fp32, first moment
    v: Tree  # fp32, second moment
    loss_scale: LossScale
    seed: Array  # (2,) uint32, of dropout
    limits: Array | None = None  # (2,) fp32, largest loss and gradient norm that is applied; never saved


class Scalar(np.lib.mixins.NDArrayOperatorsMixin):
    """One number of a step, on the device until somebody uses it: float(x), x.item(), numpy.asarray(x),
    2 * x, x < 3, round(x, 2) wait for the device.

    It is used as a 0-d NumPy array of its dtype that nobody can write: arithmetic gives NumPy's numbers. Like
    an array it has no hash.
    """

    shape, ndim, size = (), 0, 1
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, metrics: "Metrics", field: str):
        self._metrics, self._field = metrics, field

    @property
    def dtype(self) -> np.dtype:
        return Metrics.FIELDS[self._field]

    def item(self) -> float | int | bool:
        return self._metrics.read()[self._field]

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __round__(self, digits: int | None = None) -> float | int:
        return round(self.item(), digits)

    def __array__(self, dtype=None, copy=None):
        return np.array(self.item(), self.dtype if dtype is None else dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        if out and not any(isinstance(x, Scalar) for x in out):  # `x += 1` makes x another number
            options["out"] = out
        numbers = (np.asarray(x)[()] if isinstance(x, Scalar) else x for x in inputs)
        return getattr(ufunc, method)(*numbers, **options)

    def __format__(self, form: str) -> str:
        return format(self.item(), form)

    def __repr__(self) -> str:
        return repr(self.item())


class Metrics:
    """What a step reports. Nothing waits for the device until a field is read; then an id outside the
    vocabulary, found by the device, raises InvalidValue (the update was not applied)."""

    FIELDS = {
        **dict.fromkeys(("loss", "grad_norm", "lr", "loss_scale"), np.dtype(np.float32)),
        "skipped": np.dtype(bool),
        "n_targets": np.dtype(np.int64),  # sums over steps pass 2**31
    }

    loss: Scalar  # fp32, mean nats per counted target, unscaled
    grad_norm: Scalar  # fp32, before clipping, unscaled
    lr: Scalar  # fp32
    loss_scale: Scalar  # fp32, the scale that this step used
    skipped: Scalar  # bool: the gradients were not finite, no target counted, or a limit was passed
    n_targets: Scalar  # int

    def __init__(self, values, counts, batch: Batch):
        # None once it has been read, so that a number that is kept does not keep the batch.
        self.on_device: tuple | None = (values, counts, batch)
        self._host: dict = {}

    def __getattr__(self, field: str) -> Scalar:
        # Made when asked for: a Scalar that hung here would be a cycle, and keep the batch until it is found.
        if field not in Metrics.FIELDS:
            raise AttributeError(f"metrics have {', '.join(Metrics.FIELDS)}; got {field!r}.")
        return Scalar(self, field)

    def read(self) -> dict[str, float | int | bool]:
        """Every field as a Python number; waits for the device."""
        on_device = self.on_device
        if on_device is not None:
            (values, counts), batch = map(to_host, on_device[:2]), on_device[2]
            for name, array, at in zip(("tokens", "targets"), batch, counts[1:], strict=False):
                if at >= 0:
                    where = tuple(int(i) for i in np.unravel_index(int(at), array.shape))
                    raise InvalidValue(
                        f"{name}[{', '.join(map(str, where))}] is {int(array[where])}, outside the "
                        "vocabulary; the update was not applied. "
                        "Check the data's tokenizer against the model's vocab_size."
                    )
            numbers = map(float, values[:4])
            self._host = dict(zip(self.FIELDS, (*numbers, bool(values[4]), int(counts[0])), strict=True))
            self.on_device = None
        return self._host

    def __repr__(self) -> str:
        return f"Metrics({', '.join(f'{k}={v}' for k, v in self.read().items())})"


def init(
    config: GPTConfig, seed: int = 0, dtype: str = "auto", device: str = "auto"
) -> tuple[Tree, OptState]:
    """(params, opt_state) of a new model with GPT-2's initial values.

    dtype "fp32", "fp16", "bf16"; device "cpu", "cuda:0", "hip:0". "auto" chooses, and says what, once, on
    stderr.
    """
    if not isinstance(config, GPTConfig):
        raise InvalidType(f"init expects a GPTConfig; got {type(config).__name__}.")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidValue(f"seed must be an int in 0 … 2**64 - 1; got {seed!r}.")
    place, storage = choose(dtype, device)
    advice = "Take a smaller model; nb.plan and `nbtrain plan` tell what a model takes."
    with use(place), enough_memory("a new model", advice):
        params, master = init_params(config, seed, storage, place)
        return params, init_opt_state(params, master, seed)


def init_opt_state(params: Tree, master: Tree | None = None, seed: int = 0) -> OptState:
    """AdamW's state before the first step. master: fp32 weights whose cast params is; made from params where
    absent."""
    xp = array_module(params.buffer)
    if master is None:
        fp32 = params.dtype == np.float32
        master = params if fp32 else Tree(params.layout, params.buffer.astype(np.float32))
    return OptState(
        step=xp.zeros(1, np.int32),
        updates=xp.zeros(1, np.int32),
        master=master,
        m=params.like(np.float32),
        v=params.like(np.float32),
        loss_scale=LossScaling.of("auto", params.dtype).init(xp),
        seed=to_device(np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32), device_of(params.buffer)),
    )


class TrainStep:
    """A pure `train_step(params, opt_state, batch) -> (params, opt_state, metrics)`; `make_train_step` makes
    it.

    It owns working memory (activations, gradients) that its calls share, so it is for one thread at a time.
    """

    def __init__(
        self,
        loss_and_grads: Callable,
        config: TrainConfig,
        model: GPTConfig | None = None,
    ):
        self.loss_and_grads, self.config = loss_and_grads, config
        self.model = model  # where loss_and_grads is a GPT's
        self.vocab_size = model.vocab_size if model else None
        self.schedule = Schedule(
            config.schedule, config.lr, config.min_lr, config.warmup, config.total, config.decay
        )
        LossScaling.of(
            config.loss_scale, np.float16, config.growth_interval
        )  # wrong options fail here, not in a step
        self.layout = Layout.of(model.leaves()) if model else None  # of the params that loss_and_grads takes
        self._memory: tuple | None = None  # what _grads, _sums and _decay were made for
        self._grads: Any = None  # a Tree, from the first step on
        self._sums: Tree | None = None  # fp32, over micro-batches
        self._decay: Array = None

    @property
    def has_run(self) -> bool:
        return self._grads is not None

    def __call__(self, params: Tree, opt_state: OptState, batch: Batch) -> tuple[Tree, OptState, Metrics]:
        check_state(params, opt_state)
        device = device_of(params.buffer)
        with use(device), enough_memory(*A_STEP):
            batch = self._place(params, batch)
            fresh, master, m, v = (
                Tree(t.layout, array_module(t.buffer).empty_like(t.buffer))
                for t in (params, opt_state.master, opt_state.m, opt_state.v)
            )
            if params.dtype == np.float32:
                master = fresh
            return self._run(params, opt_state, batch, (fresh, master, m, v))

    def _scaling(self, params) -> LossScaling:
        return LossScaling.of(self.config.loss_scale, params.dtype, self.config.growth_interval)

    def _gradients(self, params, state, batch, in_place: bool):
        """(gradients over all micro-batches, flat; losses (A,); batch_check's counts; the loss scale).

        in_place: whether the update behind them will be, for which the first call has kernels compiled."""
        xp, scaling = array_module(params.buffer), self._scaling(params)
        scale = state.loss_scale.value if scaling.dynamic else xp.full(1, scaling.initial, np.float32)
        A, B, _ = batch.tokens.shape
        memory = params.layout, params.dtype, device_of(params.buffer)
        if memory != self._memory:
            _check_master(params, state)
            self._compile_ahead(params, batch.tokens.shape, in_place)
            decay = to_device(params.layout.decay_flags(), device_of(params.buffer))
            # Together, so that a step without enough memory leaves nothing half made.
            self._grads, self._sums, self._decay, self._memory = params.like(), None, decay, memory
        grads, sums = self._grads, None
        if A > 1:
            if self._sums is None:
                self._sums = params.like(np.float32)
            sums = self._sums

        counts, dloss = batch_check(batch.tokens, batch.targets, scale, vocab_size=self.vocab_size)
        key = None
        if self.model is None or self.model.dropout:
            key = xp.empty(3, np.uint32)
            key[:2] = state.seed
            key[2:].view(np.int32)[:] = state.step
        losses = xp.empty(A, np.float32)
        with measured_at_length():
            for a in range(A):
                micro = Batch(batch.tokens[a], batch.targets[a], batch.order[a])
                rng = None if key is None else Rng(key, a * B)
                losses[a : a + 1] = self.loss_and_grads(params, micro, loss_scale=dloss, rng=rng, out=grads)
                if sums is not None:
                    cast_and_scale(grads.buffer, 1.0, out=sums.buffer, accumulate=a > 0)
        return (grads if sums is None else sums).buffer, losses, counts, scale

    def _compile_ahead(self, params, shape, in_place) -> None:
        """Has the kernels of a GPU's first step compiled in several processes: for a model that another
        process can make."""
        if self.model is None or device_of(params.buffer) in ("cpu", "plan"):
            return
        what = {
            "dtype": dtype_name(params.dtype),
            "shape": shape,
            "in_place": in_place,
            "capability": capability_of(params.buffer),
            "workspace": WORKSPACE if room()[0] == "cublaslt" else 0,
        }
        order = {
            "config": dataclasses.asdict(self.model),
            "train": dataclasses.asdict(self.config),
            "architecture": backend.architecture(),
        }
        card = walk(self.model, self.config, **what)
        compile_ahead(card, order["architecture"], "nbtrain.compile_worker", order | what)

    def _run(self, params, state, batch, out, control_out=None):
        """control_out: arrays for control's results but `hyper`; the last four may be the state's own."""
        cfg = self.config
        new_params, master, m, v = out
        in_place = master is state.master
        grads, losses, counts, scale = self._gradients(params, state, batch, in_place)
        norm = global_norm(grads)
        hyper, values, counts, step, updates, new_scale, good_steps = control(
            norm, sum_losses(losses), counts, state.step, state.updates, scale, state.loss_scale.good_steps,
            schedule=self.schedule, clip=cfg.clip, betas=cfg.betas,
            growth_interval=self._scaling(params).growth_interval,
            limits=state.limits,
            out=None if control_out is None else (array_module(norm).empty(8, np.float32), *control_out),
        )  # fmt: skip
        adamw(
            grads, state.master.buffer, state.m.buffer, state.v.buffer, params.buffer, self._decay,
            hyper, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay,
            out=(master.buffer, m.buffer, v.buffer, new_params.buffer),
        )  # fmt: skip
        scale = LossScale(new_scale, good_steps)
        new_state = OptState(step, updates, master, m, v, scale, state.seed, state.limits)
        return new_params, new_state, Metrics(values, counts, batch)

    def _place(self, params: Tree, batch: Batch) -> Batch:
        return _placed("train_step", params, self.layout, batch, self.vocab_size)


def _placed(step: str, params: Tree, layout: Layout | None, batch: Batch, vocab_size: int | None) -> Batch:
    """The batch on the device of `params`, validated where the host holds it; `layout` is what params must
    have."""
    if layout is not None and params.layout is not layout and params.layout != layout:
        raise InvalidValue(
            f"params have {len(params.layout.leaves)} leaves of {params.n_params:,} elements, the model's "
            f"config {len(layout.leaves)} of {layout.n_params:,}. Take both from one configuration."
        )
    if not isinstance(batch, Batch):
        raise InvalidType(
            f"{step} expects a Batch; got {type(batch).__name__}. Batch.of(tokens, targets) makes it."
        )
    device, where = device_of(params.buffer), {device_of(x) for x in batch}
    if where == {device} and device != "cpu":
        return batch
    if where != {"cpu"}:
        raise InvalidType(
            f"params are on {device}, the batch is on {', '.join(sorted(where))}. Move one of them."
        )
    check_batch(batch, vocab_size or 2**31 - 1)
    return batch if device == "cpu" else Batch(*(to_device(x, device) for x in batch))


def check_state(params, state) -> None:
    if not isinstance(params, Tree) or not isinstance(state, OptState):
        raise InvalidType(
            f"train_step expects (params: Tree, opt_state: OptState, batch); got {type(params).__name__}, "
            f"{type(state).__name__}. nb.init(config) makes them."
        )
    where = {device_of(t.buffer) for t in (params, state.master, state.m, state.v)}
    if len(where) > 1:
        raise InvalidType(
            f"params and opt_state are on several devices: {', '.join(sorted(where))}. Move them to one."
        )
    for name, tree in (("master", state.master), ("m", state.m), ("v", state.v)):
        if tree.layout != params.layout:
            raise InvalidValue(
                f"opt_state.{name} has another layout than params. Take both from one nb.init or checkpoint."
            )


def _check_master(params: Tree, state: OptState) -> None:
    """Raises where params are other weights than opt_state's master weights, by samples: the update would
    take those, and what was given as params would be lost. On a GPU this waits for the device."""
    a, b = params.buffer, state.master.buffer
    if a is b or device_of(a) == "plan":
        return
    for start in np.linspace(0, max(a.size - SAMPLE, 0), N_SAMPLES).astype(int).tolist():
        given, master = (to_host(x[start : start + SAMPLE]) for x in (a, b))
        with np.errstate(over="ignore"):  # too large for fp16 is infinite there too
            rounded = master.astype(a.dtype).astype(np.float32)
        if not np.allclose(given.astype(np.float32), rounded, rtol=2.0**-6, equal_nan=True):
            raise InvalidValue(
                "params are other weights than opt_state.master holds, and a step goes on from those. For "
                "weights that come alone, nb.init_opt_state(params) makes the state."
            )


def make_train_step(model: GPTConfig | Callable, config: TrainConfig | None = None) -> TrainStep:
    """A pure `train_step(params, opt_state, batch) -> (params, opt_state, metrics)`: inputs untouched,
    outputs fresh.

    model: a GPTConfig, or a function `loss_and_grads(params, batch, *, loss_scale, rng, out) -> loss_sum` of
    your own. It gets a micro-batch (tokens and targets (B, T), order (B*T,)), writes the gradients of
    loss_scale * (the sum of its losses) to the tree `out`, whole, and returns that sum as (1,) fp32.
    loss_scale is on the device and already divided by the number of counted targets of the whole batch.
    """
    config = TrainConfig() if config is None else config
    if not isinstance(config, TrainConfig):
        raise InvalidType(f"make_train_step expects a TrainConfig; got {type(config).__name__}.")
    if isinstance(model, GPTConfig):
        return TrainStep(GPT(model, config.remat).loss_and_grads, config, model)
    if not callable(model):
        raise InvalidType(
            f"make_train_step expects a GPTConfig or a function loss_and_grads; got {type(model).__name__}."
        )
    if config.remat_every(1):
        raise InvalidValue(
            f"remat={config.remat!r} belongs to a GPTConfig; your own loss_and_grads recomputes as it likes."
        )
    return TrainStep(model, config)


def outlines(config: GPTConfig, dtype: str, shape, card: Card) -> tuple[Tree, OptState, Batch]:
    """What a step with batches (A, B, T) = `shape` takes, without memory, on `card`."""
    layout = Layout.of(config.leaves())
    params = Tree(layout, card.empty(layout.size, FLOATS[dtype]))
    master = params if dtype == "fp32" else Tree(layout, card.empty(layout.size, np.float32))
    return params, init_opt_state(params, master), outline_of_batch(shape, card)


def outline_of_batch(shape, card: Card) -> Batch:
    A, B, T = shape
    return Batch(*(card.empty(shape, np.int32) for shape in ((A, B, T), (A, B, T), (A, B * T))))


def walk(
    config: GPTConfig, train: TrainConfig, dtype: str, shape, in_place: bool, capability, workspace: int
) -> Card:
    """A card on which such a step, with an update in place or not, was walked through: it knows the
    kernels."""
    with planning(Card(capability and tuple(capability), workspace)) as card:
        card.launches = {}
        step, (params, state, batch) = make_train_step(config, train), outlines(config, dtype, shape, card)
        if in_place:
            step._run(params, state, batch, (params, state.master, state.m, state.v))
        else:
            step(params, state, batch)
    return card


def make_eval_step(config: GPTConfig) -> Callable:
    """`eval_step(params, batch) -> (loss_sum, n_targets)`, (1,) arrays on the device: the loss of a batch
    without dropout.

    An id outside the vocabulary raises InvalidValue where the host holds the batch. Where it lies on a GPU,
    nothing waits, and loss_sum is nan.
    """
    if not isinstance(config, GPTConfig):
        raise InvalidType(f"make_eval_step expects a GPTConfig; got {type(config).__name__}.")
    model, layout = GPT(config, "full"), Layout.of(config.leaves())

    def eval_step(params: Tree, batch: Batch):
        if not isinstance(params, Tree):
            raise InvalidType(
                f"eval_step expects (params: Tree, batch); got {type(params).__name__}. nb.init(config) makes"
                " params."
            )
        with use(device_of(params.buffer)), enough_memory("an evaluation", "Take a smaller B."):
            batch = _placed("eval_step", params, layout, batch, config.vocab_size)
            xp = array_module(params.buffer)
            counts, _ = batch_check(
                batch.tokens, batch.targets, xp.ones(1, np.float32), vocab_size=config.vocab_size
            )
            losses = xp.empty(len(batch.tokens), np.float32)
            for a in range(len(batch.tokens)):
                losses[a : a + 1] = model.eval_loss(
                    params, Batch(batch.tokens[a], batch.targets[a], batch.order[a])
                )
            return nan_if_bad(sum_losses(losses), counts), counts[:1]

    return eval_step
