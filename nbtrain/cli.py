"""The command line: nbtrain train | sample | prepare | eval | doctor.

Exit codes: 0; 1 a failure, told in one line on stderr; 2 usage; 130 interrupted. What is heavy is imported by
the command that needs it, so that --help is quick.
"""

import functools
import sys
import unicodedata
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

import nbtrain
from nbtrain.errors import InvalidValue, NbtrainError

app = typer.Typer(
    help="Trains GPT-style language models with kernels written in Python.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
INTERRUPTED = 130


class TokenizerKind(StrEnum):
    char = "char"
    byte = "byte"


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


class Dtype(StrEnum):
    auto = "auto"
    fp32 = "fp32"
    fp16 = "fp16"
    bf16 = "bf16"


class Format(StrEnum):
    auto = "auto"
    nbtrain = "nbtrain"
    llmc = "llm.c"
    nanogpt = "nanogpt"


def main(args: list[str] | None = None) -> None:
    """The entry point; ends with SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII only must not end a run
    app(args=args, prog_name="nbtrain")


def _command(function):
    """A command of `app` whose failures are one line and an exit code."""

    @functools.wraps(function)
    def guarded(*args, **options):
        try:
            return function(*args, **options)
        except BrokenPipeError:
            raise  # the reader of our output has left; typer ends quietly
        except (NbtrainError, OSError, MemoryError) as error:
            print(f"nbtrain: {error or type(error).__name__}", file=sys.stderr)
            raise typer.Exit(1) from None

    return app.command(function.__name__.removesuffix("_"))(guarded)


def _version(asked: bool) -> None:
    if asked:
        print(f"nbtrain {nbtrain.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


# ----------------------------------------------------------------------------
# train

RESUMABLE = ("resume", "steps", "data", "val", "device", "sample_tokens")  # options that go with --resume


@_command
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

    The folder --out receives log.jsonl, loss.png and checkpoint/. The first Ctrl-C saves and leaves, the
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
            config, train_config, run, out, tokenizer=kind, dtype=dtype.value, device=device, report=_report()
        )
    folder = result.checkpoint.meta["path"].parent
    if result.interrupted:
        print(f"nbtrain: go on with: nbtrain train --resume {folder}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if result.val_loss is not None:
        print(f"final validation loss {result.val_loss:.4f}")
    if sample_tokens and result.checkpoint.tokenizer is not None:
        print()
        _print_sample(result.checkpoint, None, sample_tokens, temperature=0.8, top_k=None, seed=0)


def _given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def _resume(checkpoint, steps, data, val, device):
    from nbtrain.run import resumed
    from nbtrain.run import train as run_train

    changes = {"steps": steps, "train": data and tuple(data), "val": val and tuple(val)}
    run, train_config = resumed(
        checkpoint, **{name: value for name, value in changes.items() if value is not None}
    )
    out = checkpoint.meta["path"].parent
    options = dict(tokenizer=checkpoint.tokenizer, device=device, resume=checkpoint, report=_report())
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
    chosen = _tokenizer(kind, read)
    prepared = prepare_text(read, out / "data", chosen)
    _report().say(
        f"text: {len(read):,} characters, {prepared.n_train:,} tokens to train on, {prepared.n_val:,} to "
        "validate on"
    )
    return (str(prepared.train.absolute()),), (str(prepared.val.absolute()),), chosen


def _tokenizer(kind: TokenizerKind, text: str):
    from nbtrain.tokenizer import ByteTokenizer, CharTokenizer

    return CharTokenizer.from_text(text) if kind is TokenizerKind.char else ByteTokenizer()


def _report():
    """Where a run tells how it goes: a progress bar on a terminal, lines elsewhere."""
    from nbtrain.run import Report

    return _bar() if sys.stdout.isatty() else Report()


def _bar():
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    from nbtrain.run import Report, clock

    class Bar(Report):
        def __init__(self):
            super().__init__()
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn(
                    "loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} tokens/s  {task.fields[left]} "
                    "left"
                ),
                console=Console(highlight=False),
            )
            self._task = None

        def say(self, text: str) -> None:
            self._progress.console.print(text, markup=False)

        def step(self, step, steps, loss, tokens_per_s, left_s) -> None:
            told = dict(loss=loss, speed=tokens_per_s, left=clock(left_s))
            if self._task is None:
                self._progress.start()
                self._task = self._progress.add_task("", total=steps, **told)
            self._progress.update(self._task, completed=step, **told)

        def close(self) -> None:
            self._progress.stop()

    return Bar()


# ----------------------------------------------------------------------------
# The others


@_command
def sample(
    directory: Annotated[Path, typer.Argument(help="Folder of a run or a checkpoint.")],
    prompt: Annotated[
        str | None, typer.Option(help="Text to go on with.", show_default="a line's beginning")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add.")] = 400,
    temperature: Annotated[
        float, typer.Option(help="Below 1 likelier tokens are favoured; 0 takes the likeliest.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens that reach p together.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, hip:0 or auto.")] = "auto",
) -> None:
    """Print text that a model writes.

    Example: nbtrain sample runs/demo --prompt "ROMEO" --max-new-tokens 200
    """
    from nbtrain.checkpoint import load

    checkpoint = load(directory, device)
    if checkpoint.tokenizer is None:
        raise InvalidValue(
            f"{checkpoint.meta['path']} holds no tokenizer, so its tokens are no text here. Use "
            "nbtrain.generate on ids."
        )
    _print_sample(
        checkpoint, prompt, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )


def _print_sample(checkpoint, prompt: str | None, max_new_tokens: int, **options) -> None:
    """Prints the prompt and, as it comes, what the model makes of it."""
    from nbtrain.generate import generate_stream

    tokenizer = checkpoint.tokenizer
    if prompt is None:
        try:
            ids = tokenizer.encode("\n")
        except InvalidValue:  # a vocabulary without lines
            ids = [0]
    else:
        ids = tokenizer.encode(prompt)
        print(printable(prompt), end="", flush=True)
    printed, tokens = 0, []
    stream = generate_stream(
        checkpoint.params, checkpoint.config, ids, max_new_tokens=max_new_tokens, **options
    )
    for token in stream:
        tokens.append(int(token))
        text = tokenizer.decode(tokens)
        whole = text.rstrip("\ufffd")  # bytes at the end may be the first of a character
        print(printable(whole[printed:]), end="", flush=True)
        printed = max(printed, len(whole))
    print(printable(tokenizer.decode(tokens)[printed:]) if tokens else "")


def printable(text: str) -> str:
    """`text` without what a terminal would obey: control characters but newline and tab, format characters,
    surrogates."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs"))


@_command
def prepare(
    text: Annotated[
        Path | None, typer.Argument(help="A text file, or a folder of .txt and .md files.")
    ] = None,
    shakespeare: Annotated[bool, typer.Option("--shakespeare", help="Shakespeare's plays instead.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for train.bin, val.bin, tokenizer.json and meta.json.")
    ] = Path("data"),
    tokenizer: Annotated[
        TokenizerKind, typer.Option(help="One id a character, or one a byte.")
    ] = TokenizerKind.char,
    val_fraction: Annotated[float, typer.Option(help="Share of the text, at its end, for validation.")] = 0.1,
) -> None:
    """Turn a text into token files.

    Example: nbtrain prepare novels/ --out data --tokenizer byte
    """
    if (text is not None) == shakespeare:
        raise typer.BadParameter("give a text file or folder, or --shakespeare.")
    from nbtrain.text import prepare_text, read_text, shakespeare_text

    read = read_text(text) if text is not None else shakespeare_text()
    prepared = prepare_text(read, out, _tokenizer(tokenizer, read), val_fraction)
    print(f"{prepared.train}: {prepared.n_train:,} tokens")
    print(f"{prepared.val}: {prepared.n_val:,} tokens")
    print(f"{prepared.tokenizer}: {tokenizer.value}, {prepared.vocab_size:,} ids")


@_command
def eval_(
    directory: Annotated[Path, typer.Argument(help="Folder of a run or a checkpoint.")],
    data: Annotated[list[str], typer.Option(help="Token files: a path or pattern.")],
    format: Annotated[Format, typer.Option(help="Format of the token files.")] = Format.auto,
    batch_size: Annotated[int, typer.Option(help="Sequences computed together.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, hip:0 or auto.")] = "auto",
) -> None:
    """Print a model's loss and perplexity on token files.

    Example: nbtrain eval runs/demo --data runs/demo/data/val.bin
    """
    import math

    from nbtrain.checkpoint import load
    from nbtrain.data import eval_batches
    from nbtrain.device.place import use
    from nbtrain.run import evaluate
    from nbtrain.train import make_eval_step

    checkpoint = load(directory, device)
    config, place = checkpoint.config, checkpoint.params.device
    with use(place):
        files: dict = dict(format=format.value, vocab_size=config.vocab_size, device=place)
        chosen = eval_batches(data, B=batch_size, T=config.block_size, **files)
        loss, n = evaluate(make_eval_step(config), checkpoint.params, chosen)
    print(f"loss {loss:.4f} nats per token, perplexity {math.exp(loss):.2f}, {n:,} tokens")


@_command
def doctor(
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the GPU with the CPU; takes minutes.")
    ] = False,
) -> None:
    """Tell what is installed, what would run here and why, and what to install for more.

    Example: nbtrain doctor
    Example: nbtrain doctor --verify
    """
    from nbtrain.doctor import report

    for line in report():
        print(line)
    if verify:
        from nbtrain.verify import verify as compare

        for line in compare():
            print(line, flush=True)
        if not line.endswith(" 0 failed"):
            raise typer.Exit(1)


if __name__ == "__main__":
    main()
