"""nbtrain train"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nbtrain.cli.app import INTERRUPTED, Dtype, Format, TokenizerKind, command
from nbtrain.cli.prepare import make_tokenizer
from nbtrain.cli.progress import reporter
from nbtrain.cli.sample import print_sample


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


RESUMABLE = ("resume", "steps", "data", "val", "device", "sample_tokens")  # options that go with --resume


@command
def train(
    context: typer.Context,
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
    tokenizer: Annotated[
        TokenizerKind, typer.Option(help="For --text and --shakespeare.")
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
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 1e-3,
    schedule: Annotated[
        Schedule, typer.Option(help="Of the learning rate, after the warm-up.")
    ] = Schedule.cosine,
    warmup: Annotated[
        int | None, typer.Option(help="Steps from 0 to --lr.", show_default="100, or a tenth of short runs")
    ] = None,
    min_lr: Annotated[
        float | None, typer.Option(help="Learning rate at the end.", show_default="a tenth of --lr")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="Of matrices and embeddings.")] = 0.1,
    clip: Annotated[float, typer.Option(help="Largest L2 norm of the gradient; 0 does not clip.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of weights, dropout and the order of the data.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and activations.")] = Dtype.auto,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, hip:0 or auto.")] = "auto",
    remat: Annotated[
        str, typer.Option(help="Recompute activations to save memory: none, every:k or full.")
    ] = "none",
    eval_every: Annotated[int, typer.Option(help="Steps between evaluations; 0: at the end only.")] = 250,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; 0: at the end only.")] = 0,
    out: Annotated[
        Path, typer.Option(help="Folder of the run; an older run's files in it are replaced.")
    ] = Path("runs/latest"),
    sample_tokens: Annotated[int, typer.Option(help="Tokens of text to print at the end; 0: none.")] = 400,
) -> None:
    """Train a model, from scratch or from a checkpoint.

    The folder --out receives log.jsonl, loss.png and checkpoints/. The first Ctrl-C saves and leaves, the
    second leaves at once.

    Example: nbtrain train --shakespeare --out runs/demo
    """
    sources = [text is not None, shakespeare, bool(data), resume is not None]
    if resume is not None:
        from nbtrain.checkpoint import load

        given = {name for name in context.params if _given(context, name)}
        if wrong := given - set(RESUMABLE):
            raise typer.BadParameter(
                f"--{sorted(wrong)[0].replace('_', '-')} is fixed by the run that --resume goes on with."
            )
        result = _resume(load(resume, device), steps if "steps" in given else None, data, val, device)
    else:
        if sum(sources) != 1:
            raise typer.BadParameter("give one of --text, --shakespeare, --data and --resume.")
        if val and not data:
            raise typer.BadParameter("--val goes with --data; a text is split by nbtrain itself.")
        from nbtrain.config import GPTConfig, TrainConfig
        from nbtrain.device.place import compute_capability, resolve_device
        from nbtrain.precision import resolve_dtype
        from nbtrain.run import RunConfig
        from nbtrain.run import train as run_train
        from nbtrain.train import make_train_step

        train_config = TrainConfig(
            lr=lr,
            schedule=schedule.value,
            warmup=min(100, steps // 10) if warmup is None else warmup,
            total=steps,
            decay=max(1, steps // 10) if schedule is Schedule.wsd else 0,
            min_lr=lr / 10 if min_lr is None else min_lr,
            betas=(0.9, 0.99),  # a small batch wants a longer memory of squares than GPT-2's 0.95
            weight_decay=weight_decay,
            clip=clip,
            remat=remat,
        )
        sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size)
        changes = {name: value for name, value in sizes.items() if value is not None} | {"dropout": dropout}
        # What is wrong with these is said before a text is read and its tokens are written.
        config = GPTConfig.preset(preset, **changes)
        make_train_step(config, train_config)
        place, _ = resolve_device(device)
        resolve_dtype(dtype.value, place, compute_capability(place))
        train_files, val_files, kind = _data(text, shakespeare, data, val, tokenizer, out)
        if kind is not None:
            changes["vocab_size"] = kind.vocab_size
        if vocab_size is not None:
            changes["vocab_size"] = vocab_size
        elif kind is None and not preset.startswith("gpt2"):
            raise typer.BadParameter(
                "no tokenizer.json lies beside --data, so --vocab-size must say how many ids there are."
            )
        config = GPTConfig.preset(preset, **changes)
        run = RunConfig(
            train=train_files,
            val=val_files,
            format=format.value,
            steps=steps,
            B=batch_size,
            micro=micro,
            seed=seed,
            eval_every=eval_every,
            save_every=save_every,
        )
        result = run_train(
            config,
            train_config,
            run,
            out,
            tokenizer=kind,
            dtype=dtype.value,
            device=device,
            report=reporter(),
        )
    from nbtrain.checkpoints import run_folder

    folder = run_folder(result.checkpoint.meta["path"])
    if result.interrupted:
        print(f"nbtrain: go on with: nbtrain train --resume {folder}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if result.val_loss is not None:
        print(f"final validation loss {result.val_loss:.4f}")
    if sample_tokens and result.checkpoint.tokenizer is not None:
        print()
        print_sample(result.checkpoint, None, sample_tokens, temperature=0.8, top_k=None, seed=0)


def _given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _resume(checkpoint, steps, data, val, device):
    from nbtrain.checkpoints import run_folder
    from nbtrain.run import resumed
    from nbtrain.run import train as run_train

    changes = {"steps": steps, "train": data and tuple(data), "val": val and tuple(val)}
    run, train_config = resumed(
        checkpoint, **{name: value for name, value in changes.items() if value is not None}
    )
    out = run_folder(checkpoint.meta["path"])
    options = dict(tokenizer=checkpoint.tokenizer, device=device, resume=checkpoint, report=reporter())
    return run_train(checkpoint.config, train_config, run, out, **options)


def _data(text, shakespeare, data, val, kind, out):
    """(token files to train on, to validate on, tokenizer or None); a text becomes token files in
    `out`/data."""
    from nbtrain.text import prepare_text, read_text, shakespeare_text
    from nbtrain.tokenizer import load_tokenizer

    if data:
        beside = Path(data[0]).parent / "tokenizer.json"
        absolute = (tuple(str(Path(path).absolute()) for path in paths or ()) for paths in (data, val))
        return *absolute, load_tokenizer(beside) if beside.is_file() else None
    read = shakespeare_text() if shakespeare else read_text(text)
    chosen = make_tokenizer(kind, read)
    prepared = prepare_text(read, out / "data", chosen)
    reporter().say(
        f"text: {len(read):,} characters, {prepared.n_train:,} tokens to train on, {prepared.n_val:,} to "
        "validate on"
    )
    return (str(prepared.train.absolute()),), (str(prepared.val.absolute()),), chosen
