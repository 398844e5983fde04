"""nbtrain train"""

import sys
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from nbtrain.cli.app import INTERRUPTED, Dtype, Format, TokenizerKind, command
from nbtrain.cli.config_file import from_file
from nbtrain.cli.prepare import make_tokenizer
from nbtrain.cli.progress import reporter
from nbtrain.cli.sample import print_sample


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


SIZES = ("n_layer", "n_head", "n_embd", "block_size")
SOURCES = ("text", "shakespeare", "data")
# An option on the command line, and the options of a config file that are void beside it.
SUPERSEDES = {name: (*SOURCES, "val", "vocab_size") for name in SOURCES} | {
    "preset": (*SIZES, "vocab_size", "init"),
    "init": ("preset", *SIZES, "vocab_size"),
    "micro": ("total_batch_tokens",),
    "total_batch_tokens": ("micro",),
}
CHANGEABLE = ("steps", "save_every", "keep_last", "keep_every")  # fields of a RunConfig
RESUMABLE = (  # options that go with --resume
    *("resume", "config", "data", "val", "device", "capture", "tensorboard", "sample_tokens"),
    *CHANGEABLE,
)


def _from_file(context: typer.Context, path: Path | None) -> Path | None:
    from_file(context, path, train.__annotations__)
    return path


@command
def train(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=_from_file,
            is_eager=True,
            help="TOML file with any of these options, _ for -; flags win.",
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Train on this text file, or folder of .txt and .md files.")
    ] = None,
    shakespeare: Annotated[bool, typer.Option("--shakespeare", help="Train on Shakespeare's plays.")] = False,
    data: Annotated[list[str] | None, typer.Option(help="Train on token files: a path or pattern.")] = None,
    val: Annotated[list[str] | None, typer.Option(help="Token files to validate on, with --data.")] = None,
    format: Annotated[Format, typer.Option(help="Format of --data and --val.")] = Format.auto,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder, up to --steps.")
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(
            help="Begin with the weights in this folder: a run, a checkpoint, or GPT-2 of Hugging Face."
        ),
    ] = None,
    tokenizer: Annotated[
        TokenizerKind, typer.Option(help="For --text and --shakespeare; --init may bring one.")
    ] = TokenizerKind.char,
    preset: Annotated[
        str,
        typer.Option(
            help="Model size: shakespeare-small, shakespeare, gpt2, gpt2-medium, gpt2-large, gpt2-xl."
        ),
    ] = "shakespeare-small",
    n_layer: Annotated[int | None, typer.Option(help="Blocks, instead of the preset's.")] = None,
    n_head: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    n_embd: Annotated[int | None, typer.Option(help="Channels, a multiple of the heads.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Ids of the vocabulary; needed for --data without a tokenizer.json beside it."),
    ] = None,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.0,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 2000,
    batch_size: Annotated[int, typer.Option(help="Sequences of a micro-batch.")] = 12,
    micro: Annotated[int, typer.Option(help="Micro-batches a step; their gradients add up.")] = 1,
    total_batch_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step, instead of --micro, as 524288.")
    ] = None,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    schedule: Annotated[
        Schedule, typer.Option(help="Of the learning rate, after the warm-up.")
    ] = Schedule.cosine,
    warmup: Annotated[
        int | None, typer.Option(help="Steps from 0 to --lr.", show_default="100, or a tenth of short runs")
    ] = None,
    decay: Annotated[
        int | None, typer.Option(help="wsd: the last steps, that fall to --min-lr.", show_default="a tenth")
    ] = None,
    min_lr: Annotated[
        float | None, typer.Option(help="Learning rate at the end.", show_default="a tenth of --lr")
    ] = None,
    # A small batch wants a longer memory of squares than GPT-2's 0.95.
    betas: Annotated[
        tuple[float, float], typer.Option(help="AdamW's memory of gradients and of their squares.")
    ] = (0.9, 0.99),
    eps: Annotated[float, typer.Option(help="AdamW's smallest denominator.")] = 1e-8,
    weight_decay: Annotated[float, typer.Option(help="Of matrices and embeddings.")] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest L2 norm of the gradient; 0 does not clip.")] = 1.0,
    loss_scale: Annotated[
        str, typer.Option(help="A power of two, dynamic, or auto: dynamic for fp16, else 1.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Of weights, dropout and the order of the data.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and activations.")] = Dtype.auto,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, hip:0 or auto.")] = "auto",
    capture: Annotated[
        bool | None,
        typer.Option(
            "--capture/--no-capture", help="Run a step as one graph.", show_default="on an NVIDIA GPU"
        ),
    ] = None,
    remat: Annotated[
        str, typer.Option(help="Recompute activations to save memory: none, every:k or full.")
    ] = "none",
    warn_z: Annotated[
        float,
        typer.Option(
            help="Warn of a loss or gradient norm so many standard deviations above the usual; 0: never."
        ),
    ] = 6.0,
    skip_outliers: Annotated[
        bool, typer.Option("--skip-outliers", help="And skip the update of that step.")
    ] = False,
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: at the end only.")] = 250,
    eval_batches: Annotated[
        int, typer.Option(help="Batches of an evaluation on the way; the last one takes all.")
    ] = 40,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: at the end only.")] = 1000,
    keep_last: Annotated[int, typer.Option(help="Checkpoints to keep.")] = 2,
    keep_every: Annotated[
        int, typer.Option(help="Keep those at multiples of so many steps too; 0: none.")
    ] = 0,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write the log for TensorBoard too.")
    ] = False,
    out: Annotated[
        Path, typer.Option(help="Folder of the run; an older run's files in it are replaced.")
    ] = Path("runs/latest"),
    sample_tokens: Annotated[int, typer.Option(help="Tokens of text to print at the end; 0: none.")] = 400,
) -> None:
    """Train a model, from scratch, from a checkpoint, or from GPT-2's weights.

    The folder --out receives log.jsonl, loss.png, checkpoints/ and config.toml,
    which repeats the run when given to --config. The first Ctrl-C saves and
    leaves, the second leaves at once.

    Example: nbtrain train --shakespeare --out runs/demo
    Example: nbtrain train --text novels/ --steps 500 --out runs/novels
    Example: nbtrain train --resume runs/demo --steps 4000
    """
    options = _options(context)
    result = _new(options) if options.resume is None else _resume(options)
    from nbtrain.checkpoints import run_folder
    from nbtrain.log import perplexity

    if result.interrupted:
        folder = run_folder(result.checkpoint.meta["path"])
        print(f"nbtrain: go on with: nbtrain train --resume {folder}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if result.val_loss is not None:
        loss = result.val_loss
        print(f"final validation loss {loss:.4f}, perplexity {perplexity(loss):.2f}")
    if sample_tokens and result.checkpoint.tokenizer is not None:
        print()
        print_sample(result.checkpoint, None, sample_tokens, temperature=0.8, top_k=None, seed=0)


def _options(context: typer.Context) -> SimpleNamespace:
    """The options, and in `given` the names of those that were not left to their defaults. What a config
    file says is void where the command line says otherwise."""
    params = [param for param in context.command.params if param.name in context.params]
    sources = {str(param.name): _source(context, param.name) for param in params}
    void = {
        other
        for name, others in SUPERSEDES.items()
        for other in others
        if sources[name] == "COMMANDLINE" and sources[other] == "DEFAULT_MAP"
    }
    defaults = {str(param.name): param.default for param in params if param.name in void}
    given = {name for name, source in sources.items() if source in ("COMMANDLINE", "DEFAULT_MAP")} - void
    return SimpleNamespace(**context.params | defaults, given=given)


def _source(context: typer.Context, option) -> str | None:
    source = context.get_parameter_source(option)
    return None if source is None else source.name


def _resume(o):
    from nbtrain.checkpoint import load
    from nbtrain.checkpoints import run_folder
    from nbtrain.run import resumed
    from nbtrain.run import train as run_train

    if wrong := o.given - set(RESUMABLE):
        raise typer.BadParameter(
            f"--{sorted(wrong)[0].replace('_', '-')} is fixed by the run that --resume goes on with."
        )
    checkpoint = load(o.resume, o.device)
    changes = {name: getattr(o, name) for name in CHANGEABLE if name in o.given}
    changes |= {name: tuple(files) for name, files in (("train", o.data), ("val", o.val)) if files}
    run, train_config = resumed(checkpoint, **changes)
    out = run_folder(checkpoint.meta["path"])
    options = dict(tokenizer=checkpoint.tokenizer, device=o.device, resume=checkpoint, report=reporter())
    options |= dict(captured=o.capture, tensorboard=o.tensorboard)
    return run_train(checkpoint.config, train_config, run, out, **options)


def _new(o):
    if sum((o.text is not None, o.shakespeare, bool(o.data))) != 1:
        raise typer.BadParameter("give one of --text, --shakespeare, --data and --resume.")
    if o.val and not o.data:
        raise typer.BadParameter("--val goes with --data; a text is split by nbtrain itself.")
    if o.init is not None and (wrong := o.given & {"preset", *SIZES, "vocab_size"}):
        raise typer.BadParameter(f"--{sorted(wrong)[0].replace('_', '-')} is fixed by the weights of --init.")
    if {"micro", "total_batch_tokens"} <= o.given:
        raise typer.BadParameter("give one of --micro and --total-batch-tokens.")
    from nbtrain.config import GPTConfig, TrainConfig
    from nbtrain.device.place import compute_capability, resolve_device
    from nbtrain.precision import resolve_dtype
    from nbtrain.run import RunConfig, check_available, dtype_name, micro_batches
    from nbtrain.run import train as run_train
    from nbtrain.train import make_train_step

    train_config = TrainConfig(
        lr=o.lr,
        schedule=o.schedule.value,
        warmup=min(100, o.steps // 10) if o.warmup is None else o.warmup,
        total=o.steps,
        decay=_decay(o),
        min_lr=o.lr / 10 if o.min_lr is None else o.min_lr,
        betas=tuple(o.betas),
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip=o.clip,
        remat=o.remat,
        loss_scale=_number(o.loss_scale),
    )
    # What is wrong is said before a text is read and its tokens are written.
    place, why_device = resolve_device(o.device)
    storage, why_dtype = resolve_dtype(o.dtype.value, place, compute_capability(place))
    check_available(place, o.capture, o.tensorboard)
    start: tuple | None = None
    brought = None
    if o.init is None:
        changes = {name: getattr(o, name) for name in SIZES if getattr(o, name) is not None}
        config = GPTConfig.preset(o.preset, **changes, dropout=o.dropout)
    else:
        from nbtrain.huggingface import load_init

        dropout = o.dropout if "dropout" in o.given else None
        loaded = load_init(o.init, dtype_name(storage), place, dropout=dropout, seed=o.seed)
        config, start, brought = loaded[0], loaded[1:3], loaded[3]
        if o.device == "auto":
            reporter().say(f"device {place}: {why_device}")
        if o.dtype is Dtype.auto:
            reporter().say(f"dtype {dtype_name(storage)}: {why_dtype}")
    make_train_step(config, train_config)
    micro = o.micro
    if o.total_batch_tokens is not None:
        micro = micro_batches(o.total_batch_tokens, o.batch_size, config.block_size)
    run = dict(
        format=o.format.value, steps=o.steps, B=o.batch_size, micro=micro, seed=o.seed,
        eval_every=o.eval_every, eval_batches=o.eval_batches, save_every=o.save_every, keep_last=o.keep_last,
        keep_every=o.keep_every, warn_z=o.warn_z, skip_outliers=o.skip_outliers,
    )  # fmt: skip
    RunConfig(train=(), **run)
    train_files, val_files, kind = _data(o, brought)
    if start is None:
        config = _with_vocabulary(config, o, kind)
    elif kind is not None and kind.vocab_size > config.vocab_size:
        raise typer.BadParameter(
            f"the tokenizer has {kind.vocab_size:,} ids, the weights of --init only {config.vocab_size:,}. "
            "Take their own tokenizer."
        )
    return run_train(
        config,
        train_config,
        RunConfig(train=train_files, val=val_files, **run),
        o.out,
        tokenizer=kind,
        dtype=o.dtype.value,
        device=o.device,
        start=start,
        captured=o.capture,
        tensorboard=o.tensorboard,
        settings=_settings(
            o, config, train_config, micro, dtype_name(storage), place, train_files, val_files
        ),
        report=reporter(),
    )


def _decay(o) -> int:
    if o.schedule is not Schedule.wsd:
        return 0
    return max(1, o.steps // 10) if o.decay is None else o.decay


def _number(loss_scale: str) -> float | str:
    try:
        return float(loss_scale)
    except ValueError:
        return loss_scale


def _with_vocabulary(config, o, kind):
    """The configuration with the vocabulary of --vocab-size, of the tokenizer, or of GPT-2."""
    import dataclasses

    if o.vocab_size is not None:
        return dataclasses.replace(config, vocab_size=o.vocab_size)
    if kind is not None:
        return dataclasses.replace(config, vocab_size=kind.vocab_size)
    if o.preset.startswith("gpt2"):
        return config
    raise typer.BadParameter(
        "no tokenizer.json lies beside --data, so --vocab-size must say how many ids there are."
    )


def _settings(o, config, train_config, micro, dtype, place, train_files, val_files) -> dict:
    """Every option as it was resolved, for config.toml."""
    values = vars(o) | dict(
        micro=micro, dtype=dtype, device=place, warmup=train_config.warmup, min_lr=train_config.min_lr,
        decay=train_config.decay, dropout=config.dropout,
    )  # fmt: skip
    if o.init is None:
        values |= {name: getattr(config, name) for name in (*SIZES, "vocab_size")}
    else:
        del values["preset"]
    if o.data:
        values |= {"data": train_files, "val": val_files}
    if o.schedule is not Schedule.wsd:
        del values["decay"]
    for name in ("given", "config", "resume", "total_batch_tokens"):
        del values[name]
    settings = {}
    for name, value in values.items():
        if isinstance(value, Path):
            value = str(value.absolute())
        elif isinstance(value, StrEnum):
            value = value.value
        elif isinstance(value, tuple):
            value = list(value)
        if value is not None and value != []:
            settings[name] = value
    return settings


def _data(o, brought):
    """(token files to train on, to validate on, tokenizer or None); a text becomes token files in
    --out/data. `brought`: the tokenizer of --init, which a text is written with."""
    from nbtrain.text import prepare_text, read_text, shakespeare_text
    from nbtrain.tokenizer import load_tokenizer

    if o.data:
        beside = Path(o.data[0]).parent / "tokenizer.json"
        absolute = (tuple(str(Path(path).absolute()) for path in paths or ()) for paths in (o.data, o.val))
        return *absolute, load_tokenizer(beside) if beside.is_file() else brought
    read = shakespeare_text() if o.shakespeare else read_text(o.text)
    chosen = make_tokenizer(o.tokenizer, read, o.vocab_size) if brought is None else brought
    prepared = prepare_text(read, o.out / "data", chosen)
    reporter().say(
        f"text: {len(read):,} characters, {prepared.n_train:,} tokens to train on, {prepared.n_val:,} to "
        "validate on"
    )
    return (str(prepared.train.absolute()),), (str(prepared.val.absolute()),), chosen
