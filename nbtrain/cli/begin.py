"""From the options of `nbtrain train` to a run: begun, or gone on with."""

import contextlib
import itertools
import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from nbtrain.cli.app import TokenizerKind
from nbtrain.cli.config_file import read
from nbtrain.cli.prepare import make_tokenizer
from nbtrain.cli.progress import reporter
from nbtrain.cli.token_files import check_beside, tokenizer_beside


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


SIZES = ("n_layer", "n_head", "n_embd", "block_size")
AUTO = Path("auto")  # of --resume
CHANGEABLE = ("steps", "save_every", "keep_last", "keep_every")  # fields of a RunConfig
RESUMABLE = (  # options that go with --resume
    *("resume", "config", "data", "val", "device", "capture", "tensorboard", "sample_tokens"),
    *CHANGEABLE,
)


def begin(o, annotations: dict[str, Any]):
    """The Result of the run that the options `o` of `nbtrain train` ask for; None where --resume auto finds
    nothing left to do. annotations: those of the command, for its config files."""
    from nbtrain.checkpoint import STEPS, has_checkpoint

    if o.resume is None or o.resume == AUTO and not has_checkpoint(o.out / STEPS):
        return _new(o)
    return _resume(o, annotations)


def _resume(o, annotations):
    from nbtrain.checkpoint import STEPS, load
    from nbtrain.checkpoints import run_folder
    from nbtrain.lock import only_writer
    from nbtrain.run import resumed
    from nbtrain.run import train as run_train

    folder = o.out if o.resume == AUTO else o.resume
    fixed = o.given - set(RESUMABLE) - {"out"}
    if o.resume != AUTO and (wrong := fixed - o.from_file):
        raise typer.BadParameter(
            f"--{sorted(wrong)[0].replace('_', '-')} is fixed by the run that --resume goes on with."
        )
    home = run_folder(folder)
    elsewhere = o.resume != AUTO and "out" in o.given - o.from_file and o.out.resolve() != home
    _check_same(o, fixed, home / "config.toml", annotations)
    with contextlib.ExitStack() as stack:
        if (home / STEPS).is_dir() and not elsewhere:  # what is loaded is the newest still when it is used
            stack.enter_context(only_writer(home))
        checkpoint = load(folder, o.device)
        if not (home / STEPS).is_dir() and not elsewhere:
            raise typer.BadParameter(
                f"{folder} lies in no run's folder. Say with --out where to go on from it."
            )
        changes = {name: getattr(o, name) for name in CHANGEABLE if name in o.given}
        if o.resume == AUTO and (done := _done(checkpoint, changes)) is not None:
            print(f"the run in {home} has done {done}")
            return None
        changes |= {name: _absolute(files) for name, files in (("train", o.data), ("val", o.val)) if files}
        for files in (o.data, o.val):
            check_beside(files or (), checkpoint.tokenizer, f"the run in {home}")
        run, train_config = resumed(checkpoint, **changes)
        options = dict(tokenizer=checkpoint.tokenizer, device=o.device, resume=checkpoint, report=reporter())
        options |= dict(captured=o.capture, tensorboard=o.tensorboard)
        if elsewhere:
            options["settings"] = _settings_of(home / "config.toml", out=o.out, **changes)
        return run_train(checkpoint.config, train_config, run, o.out if elsewhere else home, **options)


def _done(checkpoint, changes: dict) -> str | None:
    """What is said of a run that has no step left; None where it has."""
    told, state = checkpoint.meta["extra"].get("run"), checkpoint.opt_state
    steps = changes.get("steps", told.get("steps") if isinstance(told, dict) else None)
    if state is None or not isinstance(steps, int) or state.step.item() < steps:
        return None
    return f"{state.step.item():,} steps, and {steps:,} were asked for"


def _settings_of(file: Path, **changes) -> dict | None:
    """The settings in a run's config.toml, for one that goes on from it elsewhere; None without one."""
    if not file.is_file():
        return None
    names = {"train": "data"}
    changed = {names.get(name, name): _plain(value) for name, value in changes.items()}
    settings = tomllib.loads(file.read_text(encoding="utf-8")) | changed
    if "data" in changed:
        settings = {name: value for name, value in settings.items() if name not in ("text", "shakespeare")}
    return settings


def _check_same(o, names: set[str], file: Path, annotations) -> None:
    """Raises where one of the options `names`, which a run fixes, is not what its config.toml says: with
    --resume auto or --config all of a command may be given, and must be what the run was begun with."""
    if not names or not file.is_file():
        return
    settings = read(file, annotations)
    if {"lr", "steps", "schedule"} <= set(settings):
        settings = _what_follows(settings["lr"], settings["steps"], settings["schedule"]) | settings
    for name in sorted(names):
        given, there = _plain(getattr(o, name)), _plain(settings.get(name))
        if name == "total_batch_tokens" and "block_size" in settings:
            there = settings["micro"] * settings["batch_size"] * settings["block_size"]
        elif name == "total_batch_tokens" or given == "auto" or name == "decay" and there is None:
            continue
        if given != there:
            raise typer.BadParameter(
                f"--{name.replace('_', '-')} is {given}, and {there} in the run in {file.parent} that "
                "--resume goes on with. Give what the run was begun with, or begin another in another --out."
            )


def _new(o):
    if sum((o.text is not None, o.shakespeare, bool(o.data))) != 1:
        raise typer.BadParameter("give one of --text, --shakespeare, --data and --resume.")
    if o.val and not o.data:
        raise typer.BadParameter("--val goes with --data; a text is split by nbtrain itself.")
    if o.init is not None and (wrong := o.given & {"preset", *SIZES, "vocab_size"}):
        raise typer.BadParameter(f"--{sorted(wrong)[0].replace('_', '-')} is fixed by the weights of --init.")
    if {"micro", "total_batch_tokens"} <= o.given:
        raise typer.BadParameter("give one of --micro and --total-batch-tokens.")
    if o.tokenizer is TokenizerKind.bpe and not o.data and o.init is None and o.vocab_size is None:
        raise typer.BadParameter("--tokenizer bpe needs --vocab-size: how many ids to learn, as 4096.")
    from nbtrain.checkpoint import check_tokenizer
    from nbtrain.config import GPTConfig, TrainConfig
    from nbtrain.device import dtype_name
    from nbtrain.lock import only_writer
    from nbtrain.precision import choose
    from nbtrain.run import RunConfig, check_available, micro_batches
    from nbtrain.run import train as run_train
    from nbtrain.train import make_train_step

    follows = _what_follows(o.lr, o.steps, o.schedule)
    follows |= {name: getattr(o, name) for name in follows if getattr(o, name) is not None}
    train_config = TrainConfig(
        lr=o.lr,
        schedule=o.schedule.value,
        total=o.steps,
        **follows | ({} if o.schedule is Schedule.wsd else {"decay": 0}),
        betas=tuple(o.betas),
        eps=o.eps,
        weight_decay=o.weight_decay,
        clip=o.clip,
        remat=o.remat,
        loss_scale=_number(o.loss_scale),
    )
    run = dict(
        format=o.format.value, steps=o.steps, B=o.batch_size, micro=o.micro, seed=o.seed,
        eval_every=o.eval_every, eval_batches=o.eval_batches, save_every=o.save_every, keep_last=o.keep_last,
        keep_every=o.keep_every, warn_z=o.warn_z, skip_outliers=o.skip_outliers,
    )  # fmt: skip
    # What is wrong is said before a text is read and its tokens are written.
    RunConfig(train=(), **run)
    chosen: list[str] = []
    place, storage = choose(o.dtype.value, o.device, chosen.append)
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
        for line in chosen:  # a run that begins with random weights says it itself
            reporter().say(line)
    make_train_step(config, train_config)
    if o.total_batch_tokens is not None:
        run["micro"] = micro_batches(o.total_batch_tokens, o.batch_size, config.block_size)
    text = None if o.data else _text(o)
    if text is not None and o.tokenizer is TokenizerKind.bpe and brought is None:
        reporter().say(f"learning {o.vocab_size:,} ids from {len(text):,} characters")
    kind = _tokenizer(o, text, brought)
    if start is None:
        config = _with_vocabulary(config, o, kind)
    if kind is not None:
        check_tokenizer(kind, config)
    with only_writer(o.out):
        train_files, val_files = _data(o, text, kind)
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
            settings=_settings(o, config, run["micro"], dtype_name(storage), place, train_files, val_files),
            report=reporter(),
        )


def _what_follows(lr: float, steps: int, schedule: str) -> dict:
    """Options that follow from others where nobody gives them. A run's config.toml does not hold them then:
    who gives it with another lr or more steps gets those that follow from these."""
    decay = max(1, steps // 10) if schedule == Schedule.wsd else None
    return {"warmup": min(100, steps // 10), "min_lr": lr / 10, "decay": decay}


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


def _settings(o, config, micro, dtype, place, train_files, val_files) -> dict:
    """Every option as it was resolved, but for what follows from others, for config.toml."""
    values = vars(o) | dict(micro=micro, dtype=dtype, device=place, dropout=config.dropout)
    if o.init is None:
        values |= {name: getattr(config, name) for name in (*SIZES, "vocab_size")}
    else:
        del values["preset"]
    if o.data:
        values |= {"data": train_files, "val": val_files}
    for name in ("given", "from_file", "config", "resume", "total_batch_tokens"):
        del values[name]
    plain = {name: _plain(value) for name, value in values.items()}
    return {name: value for name, value in plain.items() if value is not None and value != []}


def _plain(value):
    """An option's value as TOML has it."""
    if isinstance(value, Path):
        return str(value.absolute())
    if isinstance(value, StrEnum):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _absolute(paths) -> tuple[str, ...]:
    return tuple(str(Path(path).absolute()) for path in paths or ())


def _text(o) -> str:
    from nbtrain.text import read_text, shakespeare_text

    return shakespeare_text() if o.shakespeare else read_text(o.text)


def _tokenizer(o, text: str | None, brought):
    """The tokenizer of the text, of the token files, or None. `brought`: that of --init."""
    if text is None:
        if brought is not None:
            check_beside(o.data, brought, "--init")
        beside = brought or tokenizer_beside(o.data)
        check_beside(o.val or (), beside, "--data")
        return beside
    return make_tokenizer(o.tokenizer, text, o.vocab_size) if brought is None else brought


def _data(o, text: str | None, tokenizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Token files to train on, and to validate on; a text becomes such files in --out/data, or in data_2 and
    so on: an older run's data stays as long as somebody may go on with that run."""
    from nbtrain.prepare import Occupied
    from nbtrain.text import prepare_text

    if text is None:
        return _absolute(o.data), _absolute(o.val)
    for i in itertools.count(1):
        try:
            folder = o.out / ("data" if i == 1 else f"data_{i}")
            prepared = prepare_text(text, folder, tokenizer, overwrite=False)
            break
        except Occupied:
            pass
    reporter().say(
        f"text: {len(text):,} characters, {prepared.n_train:,} tokens to train on, {prepared.n_val:,} to "
        "validate on"
    )
    return _absolute([prepared.train]), _absolute([prepared.val])
