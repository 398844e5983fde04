"""The step's other modes, which give the bits of the pure one: `donate` consumes what it is given, `capture`
replays a graph besides."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nbtrain.batch import IGNORE_INDEX, Batch
from nbtrain.device import array_module
from nbtrain.device.graph import Graph
from nbtrain.device.place import device_of, enough_memory, say_once, use
from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.precision import LossScale
from nbtrain.train import A_STEP, Metrics, OptState, TrainStep, check_state
from nbtrain.tree import Tree


def _renew(params: Tree, state: OptState, renew: Callable) -> tuple[Tree, OptState]:
    """The same memory in new trees, each made by `renew`; fp32 params stay their own master."""
    own_master = state.master is params
    params = renew(params)
    master = params if own_master else renew(state.master)
    return params, state._replace(master=master, m=renew(state.m), v=renew(state.v))


def donate(step: TrainStep) -> Callable:
    """`step` with the same signature and the same bits, but params and opt_state are consumed: the results
    live in their memory, and using a consumed tree again raises InvalidValue (as JAX's donate_argnums)."""
    if not isinstance(step, TrainStep):
        raise InvalidType(f"donate expects what make_train_step returns; got {type(step).__name__}.")

    def donated(params: Tree, opt_state: OptState, batch: Batch) -> tuple[Tree, OptState, Metrics]:
        check_state(params, opt_state)
        device = device_of(params.buffer)
        with use(device), enough_memory(*A_STEP):
            batch = step._place(params, batch)
            out = params, opt_state.master, opt_state.m, opt_state.v
            params, opt_state, metrics = step._run(params, opt_state, batch, out)
        # Only the step's last launch writes them: until here, whatever went wrong has lost nothing.
        return *_renew(params, opt_state, Tree.consume), metrics

    return donated


NUMBERS = {  # how many, and their dtype
    "values": (8, np.float32), "counts": (3, np.int32),
    "step": (1, np.int32), "updates": (1, np.int32),
    "loss_scale": (1, np.float32), "good_steps": (1, np.int32),
    "seed": (2, np.uint32), "limits": (2, np.float32),
}  # fmt: skip


class Numbers(NamedTuple):
    """The few numbers that a captured step reads and writes, in one piece of memory that one copy moves.

    They are views of `words`, in the order and of the dtypes of NUMBERS."""

    words: Any  # uint32
    values: Any  # these two are for Metrics, the others are OptState's scalars
    counts: Any
    step: Any
    updates: Any
    loss_scale: Any
    good_steps: Any
    seed: Any
    limits: Any

    @classmethod
    def empty(cls, xp) -> "Numbers":
        words, views, at = xp.empty(sum(n for n, _ in NUMBERS.values()), np.uint32), {}, 0
        for name, (n, dtype) in NUMBERS.items():
            views[name] = words[at : at + n].view(dtype)
            at += n
        return cls(words, **views)

    @property
    def control_out(self) -> tuple:
        """What a step changes: all but the seed and the limits."""
        return self.values, self.counts, self.step, self.updates, self.loss_scale, self.good_steps

    @property
    def scalars(self) -> tuple:
        """In the order of `_scalars`."""
        return self.step, self.updates, self.loss_scale, self.good_steps, self.seed, self.limits

    def put_in(self, state: OptState) -> OptState:
        scale = LossScale(self.loss_scale, self.good_steps)
        return state._replace(
            step=self.step, updates=self.updates, loss_scale=scale, seed=self.seed, limits=self.limits
        )


class CapturedStep:
    """`donate(step)` replayed from one graph a batch shape; `capture` makes it."""

    SHAPES_BEFORE_A_WORD = 4

    def __init__(self, step: TrainStep):
        self._step = step
        self._state: Any = None  # (params, opt_state, Numbers), the memory that every graph reads and writes
        self._last: Any = None  # the Numbers that the last call returned
        self._graphs: dict[tuple, tuple[Graph, Batch]] = {}

    def __call__(self, params: Tree, opt_state: OptState, batch: Batch) -> tuple[Tree, OptState, Metrics]:
        check_state(params, opt_state)
        device = device_of(params.buffer)
        if device == "cpu":
            raise Unavailable(
                "capture needs a GPU; params are on the CPU. Use donate(step), which gives the same bits."
            )
        with use(device), enough_memory(*A_STEP):
            xp = array_module(params.buffer)
            batch = self._step._place(params, batch)
            own = self._state
            if own is None:  # the graphs' memory is the first trees'
                numbers = Numbers.empty(xp)
                _copy(_scalars(opt_state), numbers.scalars)
                own = params, numbers.put_in(opt_state), numbers
            else:
                _check_alike(own, (params, opt_state))
            own_params, own_state, numbers = own
            result = Numbers.empty(xp)
            graph, buffers = self._graph(own_params, own_state, numbers, batch)
            self._state = own  # until here a failure has consumed nothing, and no graph is bound to `own`
            self._take(params, opt_state)
            _copy(batch, buffers)
            graph.launch()
            result.words[...] = numbers.words
            params, state = _renew(own_params, own_state, Tree.consume)
            self._state, self._last = (params, state, numbers), result
        return params, result.put_in(state), Metrics(result.values, result.counts, batch)

    def _take(self, params, state):
        """Copies what is given into the graphs' own memory; trees that came from elsewhere are consumed."""
        own_params, own_state, numbers = self._state
        for own, given in zip(_trees(own_params, own_state), _trees(params, state), strict=True):
            if own is not given:
                own.buffer[...] = given.buffer
        scalars, last = _scalars(state), self._last
        if last is not None and all(x is y for x, y in zip(scalars[:-1], last.scalars[:-1], strict=True)):
            numbers.words[...] = last.words
            if scalars[-1] is not last.limits:  # a run may set new ones for each step
                numbers.limits[...] = scalars[-1]
        else:
            _copy(scalars, numbers.scalars)
        kept = [id(tree) for tree in _trees(own_params, own_state)]
        for given in {id(tree): tree for tree in _trees(params, state)}.values():
            if id(given) not in kept:
                given.consume()

    def _graph(self, params, state, numbers, batch):
        shape = batch.tokens.shape
        if shape not in self._graphs:
            if len(self._graphs) == self.SHAPES_BEFORE_A_WORD:
                say_once(
                    f"capture: more than {self.SHAPES_BEFORE_A_WORD} batch shapes, "
                    "each with a graph and memory of its own"
                )
            buffers = Batch(*(x.copy() for x in batch))
            params, state = _renew(params, state, Tree.alias)  # those that are given will be consumed
            out = params, state.master, state.m, state.v

            def warm_up():
                """A step without a target, which updates nothing. Before it gradients with targets alone:
                products are measured on numbers, since zeros take less power."""
                self._step._gradients(params, state, buffers, in_place=True)
                targets = buffers.targets.copy()
                targets.fill(IGNORE_INDEX)
                self._step._run(params, state, buffers._replace(targets=targets), out)

            def work():
                self._step._run(params, state, buffers, out, numbers.control_out)

            self._graphs[shape] = Graph(warm_up, work), buffers
        return self._graphs[shape]


def _scalars(state: OptState) -> tuple:
    limits = state.limits
    if limits is None:  # a graph has room for them from the first
        limits = array_module(state.step).full(2, np.inf, np.float32)
    return state.step, state.updates, *state.loss_scale, state.seed, limits


def _copy(sources, targets) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source


def _trees(params: Tree, state: OptState) -> tuple[Tree, ...]:
    return params, state.master, state.m, state.v


def _check_alike(own, given) -> None:
    for a, b in zip(_trees(*own[:2]), _trees(*given), strict=True):
        if a.layout != b.layout or a.dtype != b.dtype:
            raise InvalidValue(
                f"this captured step holds {a}, and got {b}. Capture another step for another model or dtype."
            )


def capture(step: TrainStep) -> CapturedStep:
    """`donate(step)`, run from one graph: no launch gaps, no work on the host between the batch and the
    metrics.

    The first call with a batch shape compiles, measures the products, and captures; it consumes no step.
    Trees that did not come from this function's last call are copied into the graph's memory. GPU only.
    """
    if not isinstance(step, TrainStep):
        raise InvalidType(f"capture expects what make_train_step returns; got {type(step).__name__}.")
    if step.has_run:
        raise InvalidValue(
            "capture takes a step that has not run: a graph must own the working memory it writes. "
            "Make another with make_train_step."
        )
    return CapturedStep(step)
