"""A training run: steps, evaluations, a log, a plot and a checkpoint, in one folder.

    log.jsonl      a JSON object a step, an evaluation and a checkpoint; `nbtrain.log` says what is in it
    loss.png       both losses so far, refreshed at evaluations and every minute
    config.toml    what the command line asked for, and what it left to its defaults
    tensorboard/   the numbers of log.jsonl, where asked for
    checkpoints/   what `Checkpoints` writes: at the end, when interrupted, and every `save_every` steps
    data/          token files, where the run was given a text; data_2/ … beside those of an older run

On a GPU a step's metrics are read when the next one has been launched, so that it does not wait for the host.
"""

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nbtrain.checkpoint import STEPS, Checkpoint, check_tokenizer
from nbtrain.checkpoints import Checkpoints, run_folder
from nbtrain.config import GPTConfig, TrainConfig, from_dict, is_whole
from nbtrain.data import batches, eval_batches, resolve
from nbtrain.device import blas, dtype_name
from nbtrain.device.place import to_device, use
from nbtrain.device.sensors import Sensors, device_name
from nbtrain.errors import InvalidType, InvalidValue, Unavailable
from nbtrain.files import write_atomically
from nbtrain.interrupt import Interrupt
from nbtrain.lock import only_writer
from nbtrain.log import Log, Plot, Report, TensorBoard
from nbtrain.modes import capture, donate
from nbtrain.monitor import Monitor, check_warn_z
from nbtrain.precision import choose
from nbtrain.speed import flop_per_token, peak_flop_per_s
from nbtrain.token_file import FORMATS
from nbtrain.train import OptState, init, make_eval_step, make_train_step
from nbtrain.tree import Tree

MOST_SKIPPED = 100  # steps in a row without a finite gradient; from 2**16 a loss scale reaches 1 in 16


@dataclass(frozen=True)
class RunConfig:
    """Everything of a run but the model and its optimizer."""

    train: tuple[str, ...]  # token files or patterns
    val: tuple[str, ...] = ()  # none: no evaluation
    format: str = "auto"  # of the token files
    steps: int = 2000
    B: int = 12  # sequences of a micro-batch
    micro: int = 1  # micro-batches a step
    seed: int = 0  # of weights, dropout and the order of the data
    eval_every: int = 250  # steps; 0: at the end only
    eval_batches: int = 40  # of an evaluation on the way, the first of val; the last one takes all of it
    save_every: int = 1000  # steps; 0: at the end only
    keep_last: int = 2  # checkpoints
    keep_every: int = 0  # steps: checkpoints at multiples of it stay; 0: none of them
    warn_z: float = 6.0  # standard deviations of loss and gradient norm that are warned of; 0: none
    skip_outliers: bool = False  # and whose update is skipped

    def __post_init__(self):
        for name, least in (
            ("steps", 1),
            ("B", 1),
            ("micro", 1),
            ("eval_every", 0),
            ("eval_batches", 1),
            ("save_every", 0),
            ("keep_last", 1),
            ("keep_every", 0),
        ):
            value = getattr(self, name)
            if not is_whole(value) or value < least:
                raise InvalidValue(f"{name} must be an int, {least} or more; got {value!r}.")
            object.__setattr__(self, name, int(value))
        if not is_whole(self.seed) or not 0 <= self.seed < 2**64:
            raise InvalidValue(f"seed must be an int in 0 … 2**64 - 1; got {self.seed!r}.")
        object.__setattr__(self, "seed", int(self.seed))
        for name in ("train", "val"):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(path, str) for path in value):
                raise InvalidType(f"{name} must be a tuple of paths, each a str; got {value!r}.")
        if self.format not in FORMATS:
            raise InvalidValue(f"format is one of {', '.join(FORMATS)}; got {self.format!r}.")
        if not isinstance(self.skip_outliers, bool):
            raise InvalidType(f"skip_outliers must be True or False; got {self.skip_outliers!r}.")
        check_warn_z(self.warn_z)
        if self.skip_outliers and not self.warn_z:
            raise InvalidValue("skip_outliers skips what warn_z warns of, and warn_z is 0. Take warn_z=6.")


class Result(NamedTuple):
    checkpoint: Checkpoint  # what was saved, in memory
    step: int  # steps done
    val_loss: float | None  # over all of val; None without one, or when interrupted
    interrupted: bool


def train(
    config: GPTConfig,
    train_config: TrainConfig,
    run: RunConfig,
    out: str | Path,
    *,
    tokenizer=None,
    dtype: str = "auto",
    device: str = "auto",
    start: tuple[Tree, OptState] | None = None,
    resume: Checkpoint | None = None,
    captured: bool | None = None,
    tensorboard: bool = False,
    settings: dict | None = None,
    report: Report | None = None,
) -> Result:
    """Trains, and leaves log, plot and checkpoints in `out`, where they replace those of an older run.

    `start` gives a new run its weights, and with them dtype and device; without it they are random. `resume`
    continues a run where its checkpoint was taken, bit for bit; it gives the weights, the dtype and the place
    in the data. `captured` runs the step as one graph: None where the GPU can, with the same bits. `settings`
    are written to config.toml. The first SIGINT or SIGTERM ends the run after the step under way, with a
    checkpoint; the second is a KeyboardInterrupt. A save on the way that fails, as on a full disk, is told,
    and the run goes on. One process at a time writes `out`: another one gets Unavailable.
    """
    report = report or Report()
    out = Path(out)
    if tokenizer is not None:
        check_tokenizer(tokenizer, config)
    params, opt_state, state, place = _start(config, run, dtype, device, start, resume, report)
    check_available(place, captured, tensorboard)
    first = int(opt_state.step.item())
    goes_on_here = resume is not None and run_folder(resume.meta["path"]) == out.resolve()
    ours = first if goes_on_here else 0  # the step up to which log and checkpoints in `out` are this run's
    if not run.skip_outliers:  # nor by what an earlier run took for usual
        opt_state = opt_state._replace(limits=None)
    checkpoints = Checkpoints(out / STEPS, run.keep_last, run.keep_every)
    as_graph = why_no_capture(place) is None if captured is None else captured
    step_of = capture if as_graph else donate
    train_step, eval_step = step_of(make_train_step(config, train_config)), make_eval_step(config)
    files = dict(T=config.block_size, format=run.format, vocab_size=config.vocab_size, device=place)
    if run.val:
        next(eval_batches(list(run.val), B=1, max_batches=1, **files | {"device": "cpu"}))

    with contextlib.ExitStack() as stack:
        stack.callback(report.close)
        stack.enter_context(only_writer(out))
        stack.enter_context(use(place))
        source = batches(list(run.train), B=run.B, micro=run.micro, seed=run.seed, state=state, **files)
        stack.enter_context(source)
        if settings is not None:
            write_atomically(out / "config.toml", lambda file: file.write(to_toml(settings)))
        elif not goes_on_here:
            (out / "config.toml").unlink(missing_ok=True)  # an older run's
        tokens_a_step = run.micro * run.B * config.block_size
        report.say(describe(config))
        report.say(
            f"data: a step is {run.micro} x {run.B} x {config.block_size} = {tokens_a_step:,} tokens, an "
            f"epoch {source.batches_per_epoch:,} steps, the run {run.steps:,} steps"
        )
        why = "asked for" if captured is not None else why_no_capture(place) or "auto"
        report.say(f"steps: {'captured in one graph' if as_graph else 'launched kernel by kernel'} ({why})")
        peak, text = _peak(config, place, dtype_name(params.dtype))
        report.say(text)
        monitor = Monitor(run.warn_z, steps_ahead(place))
        if resume is not None and "monitor" in resume.meta["extra"]:
            try:
                monitor.restore(resume.meta["extra"]["monitor"])
            except InvalidValue as error:
                raise InvalidValue(f"{resume.meta['path']}: {error}") from None
        log = Log(
            out / "log.jsonl", ours, tokens_a_step, run.steps, report,
            monitor=monitor, peak_tokens_per_s=peak, sensors=Sensors(place),
            board=TensorBoard(out / "tensorboard", ours, report) if tensorboard else None,
        )  # fmt: skip
        stack.enter_context(log)
        plot = Plot(log, out / "loss.png", report)
        interrupt = stack.enter_context(Interrupt())
        stack.enter_context(checkpoints)
        if moved := checkpoints.start(ours):
            which = f"checkpoints later than step {ours}" if ours else "an older run's checkpoints"
            names = " … ".join(dict.fromkeys((moved[0].name, moved[-1].name)))
            report.say(
                f"{which} ({names}) are kept in {moved[0].parent} until this run saves one (one saved by "
                "Ctrl-C, or when the run fails, does not count)"
            )
        beside = run.save_every > 0 and _can_save_beside(checkpoints, params, opt_state, report)

        def tell_saved() -> None:
            try:
                for saved in checkpoints.done():
                    log.saved(saved)
            except OSError as error:
                tell_not_saved(error)

        def tell_not_saved(error: OSError) -> None:
            report.say(f"step {step}: a checkpoint could not be written: {error}")

        said = False

        def keep(last: bool) -> Checkpoint:
            nonlocal said
            if checkpoints.saving and not last and not said:
                said = True
                report.say(
                    f"step {step}: the steps wait, because a save takes longer than save_every = "
                    f"{run.save_every} steps. Take a larger one"
                )
            told = dict(config=config, train_config=train_config, tokenizer=tokenizer)
            extra = {"run": dataclasses.asdict(run), "folder": str(out.resolve()), "monitor": monitor.state()}
            at = source.state()
            path, wait = checkpoints.path(step), last or not beside
            for another in (True, False):  # the first error may be that of the save before
                try:
                    checkpoints.save(step, params, opt_state, wait=wait, **told, data_state=at, extra=extra)
                    break
                except OSError as error:
                    if last and not another:
                        raise
                    tell_not_saved(error)
            meta = {"path": path, "dtype": dtype_name(params.dtype), "extra": extra}
            return Checkpoint(params=params, opt_state=opt_state, data_state=at, meta=meta, **told)

        def validate(max_batches: int | None) -> float | None:
            chosen = eval_batches(list(run.val), B=run.B, max_batches=max_batches, **files)
            loss, n = evaluate(eval_step, params, chosen, stop=lambda: interrupt.came)
            if interrupt.came:
                return None
            log.evaluated(step, loss, n)
            return loss

        late: deque = deque()  # steps whose metrics are not read yet

        def read(all_but: int = 0) -> None:
            while len(late) > all_but:
                log.step(*late.popleft())

        for step in range(first + 1, run.steps + 1):
            if run.skip_outliers:
                limits = np.array(monitor.limits(step), np.float32)
                opt_state = opt_state._replace(limits=to_device(limits, place))
            params, opt_state, metrics = train_step(params, opt_state, next(source))
            late.append((step, metrics))
            read(all_but=steps_ahead(place))
            on_the_way = step < run.steps
            evaluate_now = on_the_way and run.val and run.eval_every and step % run.eval_every == 0
            keep_now = on_the_way and run.save_every and step % run.save_every == 0
            if evaluate_now or keep_now:
                read()
                if evaluate_now:
                    validate(run.eval_batches)
                    plot.draw()
                if keep_now:
                    keep(last=False)
                log.pause()
            plot.refresh()
            tell_saved()
            if interrupt.came or log.not_finite_in_a_row >= MOST_SKIPPED:
                break
        read()
        checkpoints.keep_replaced = interrupt.came or log.not_finite_in_a_row >= MOST_SKIPPED
        kept = keep(last=True)
        tell_saved()
        report.say(f"step {step}: saved {kept.meta['path']}")
        if log.not_finite_in_a_row >= MOST_SKIPPED:
            other = ", or bf16 or fp32 instead of fp16" if dtype_name(params.dtype) == "fp16" else ""
            raise InvalidValue(
                f"the gradient was not finite for {MOST_SKIPPED} steps in a row, and no update was applied "
                f"in them. Take a smaller lr or a longer warm-up{other}."
            )
        val_loss = None
        if run.val and not interrupt.came:
            report.say("validating on all of the validation data")
            val_loss = validate(None)
        plot.draw()
        return Result(kept, step, val_loss, interrupt.came)


def _start(config, run, dtype, device, start, resume, report):
    """(params, opt_state, place in the data, device) of a new run, or of the one to go on with."""
    if start is not None:
        if (done := int(start[1].step.item())) >= run.steps:
            raise InvalidValue(f"start's opt_state has done {done} of {run.steps} steps. Ask for more.")
        return *start, None, start[0].device
    if resume is None:
        place, storage = choose(dtype, device, report.say)
        return *init(config, run.seed, dtype_name(storage), place), None, place
    path, opt_state = resume.meta["path"], resume.opt_state
    if opt_state is None or resume.data_state is None:
        raise InvalidValue(f"{path} holds weights only; a run goes on from one with the optimizer's state.")
    done = int(opt_state.step.item())
    if done >= run.steps:
        raise InvalidValue(f"{path} has done {done} of {run.steps} steps. Ask for more: --steps.")
    report.say(f"going on from {path}, step {done}, on {resume.params.device} in {resume.meta['dtype']}")
    if differs := resume.meta.get("differs"):
        report.say(f"bits may differ from those of a run that went through: {'; '.join(differs)}")
    return resume.params, opt_state, resume.data_state, resume.params.device


def _can_save_beside(checkpoints: Checkpoints, params: Tree, opt_state: OptState, report: Report) -> bool:
    """Takes the memory that saves beside the steps need, where it can be had."""
    try:
        checkpoints.reserve(params, opt_state)
    except (Unavailable, MemoryError) as error:
        report.say(f"the steps wait for every save: {error or type(error).__name__}")
        return False
    return True


def why_no_capture(place: str) -> str | None:
    """Why a step on this device cannot be captured in a graph; None where it can."""
    if not place.startswith("cuda"):
        return f"a graph needs an NVIDIA GPU; the run is on {place}"
    name, why = blas.room()
    if name != "cublaslt":
        return f"a graph needs products through cuBLASLt, here they go through {name}: {why}"
    return None


def check_available(place: str, captured: bool | None, tensorboard: bool) -> None:
    """Raises Unavailable where these options of `train` cannot be had."""
    if captured and (reason := why_no_capture(place)):
        raise Unavailable(
            f"capturing the step was asked for, but {reason}. Leave it away: the same bits come out."
        )
    if tensorboard:
        TensorBoard.check()


def micro_batches(total_tokens: int, B: int, T: int) -> int:
    """Micro-batches of B x T tokens that make `total_tokens`."""
    each = B * T
    for name, value in (("total_tokens", total_tokens), ("B", B), ("T", T)):
        if not is_whole(value) or value < 1:
            raise InvalidValue(f"{name} of a batch must be an int, 1 or more; got {value!r}.")
    if total_tokens % each:
        nearest = max(1, round(total_tokens / each)) * each
        raise InvalidValue(
            f"a total batch of {total_tokens:,} tokens is no multiple of a micro-batch, {B} x {T} = {each:,} "
            f"tokens. The nearest is {nearest}."
        )
    return total_tokens // each


def to_toml(settings: dict) -> bytes:
    """The settings as config.toml has them."""
    import tomli_w

    text = "# nbtrain train --config with this file repeats the run.\n" + tomli_w.dumps(settings)
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidValue(
            f"a path cannot be written to config.toml, which is UTF-8 ({error}). Rename it."
        ) from None


def _peak(config: GPTConfig, place: str, dtype: str) -> tuple[float | None, str]:
    """(tokens/s at 100% MFU or None, what is said of it)"""
    name = device_name(place)
    peak = peak_flop_per_s(name, dtype)
    if peak is None:
        return None, f"MFU: unknown, no {dtype} matrix peak is known for {name}"
    return peak / flop_per_token(
        config
    ), f"MFU: against {peak / 1e12:.0f} TFLOP/s, the dense {dtype} peak of {name}"


def steps_ahead(place: str) -> int:
    """Steps launched before the metrics of one are read. The CPU is done when a step returns."""
    return 0 if place == "cpu" else 1


def evaluate(eval_step, params, chosen, stop: Callable[[], bool] = lambda: False) -> tuple[float, int]:
    """(mean loss in nats per token, tokens) of `params` on batches, up to where `stop` becomes true."""
    total, n = 0.0, 0
    for batch in chosen:
        loss_sum, n_targets = eval_step(params, batch)
        total, n = total + float(loss_sum.item()), n + int(n_targets.item())
        if stop():
            break
    return total / n, n


def resumed(checkpoint: Checkpoint, **changes) -> tuple[RunConfig, TrainConfig]:
    """The RunConfig and TrainConfig of a run's checkpoint, with `changes` to the first."""
    path, values = checkpoint.meta["path"], checkpoint.meta["extra"].get("run")
    if not isinstance(values, dict) or not {"train", "steps"} <= set(values) or not checkpoint.train_config:
        raise InvalidValue(f"{path} was not saved by a run, so it says nothing about data and steps.")
    try:
        from_dict(RunConfig, values)
    except (InvalidValue, InvalidType) as error:
        raise InvalidValue(f"{path}: {error}") from None
    folders = checkpoint.meta["extra"].get("folder"), run_folder(path)
    for name in ("train", "val"):
        if name not in changes:
            changes[name] = tuple(_found(file, *folders, name) for file in values.get(name, ()))
    run = from_dict(RunConfig, values | changes)
    train_config = checkpoint.train_config
    if train_config.total == values["steps"]:  # the schedule ends with the run
        train_config = dataclasses.replace(train_config, total=run.steps)
    return run, train_config


def _found(file: str, was_in, folder: Path, name: str) -> str:
    """A token file of a run, or a pattern of such, where it is now: in the run's `folder`, where it was in
    that when it was `was_in`."""
    paths = [file]
    if isinstance(was_in, str) and Path(file).is_relative_to(was_in):
        paths.insert(0, str(folder / Path(file).relative_to(was_in)))
    for path in paths:
        with contextlib.suppress(InvalidValue):
            resolve(path)
            return path
    raise InvalidValue(
        f"{folder}: its token files {file} are not there any more. Say where they are: "
        f"{'data and val, --data and --val' if name == 'train' else 'val, --val'}."
    )


def describe(config: GPTConfig) -> str:
    """The model in one line."""
    n_params = sum(math.prod(shape) for _, shape in config.leaves())
    return (
        f"model: {config.n_layer} layers, {config.n_head} heads, {config.n_embd} channels, "
        f"{config.block_size} positions, vocabulary {config.vocab_size:,}: {n_params:,} parameters"
    )
