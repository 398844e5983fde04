"""nbtrain train"""

import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import typer

from nbtrain.cli.app import INTERRUPTED, Dtype, Format, TokenizerKind, command
from nbtrain.cli.begin import SIZES, Schedule, begin
from nbtrain.cli.config_file import from_file
from nbtrain.cli.sample import print_sample

SOURCES = ("text", "shakespeare", "data")
# An option on the command line, and the options of a config file that are void beside it.
SUPERSEDES = {name: (*SOURCES, "val", "vocab_size") for name in SOURCES} | {
    "preset": (*SIZES, "vocab_size", "init"),
    "init": ("preset", *SIZES, "vocab_size"),
    "micro": ("total_batch_tokens",),
    "total_batch_tokens": ("micro",),
}


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
        Path | None,
        typer.Option(
            help="Go on with the run in this folder, or from one of its checkpoints, up to --steps; in "
            "--out, where that is given. auto: with the run in --out, where there is one; else begin."
        ),
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
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = 2000,
    batch_size: Annotated[int, typer.Option(help="Sequences of a micro-batch.", min=1)] = 12,
    micro: Annotated[int, typer.Option(help="Micro-batches a step; their gradients add up.", min=1)] = 1,
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
        str,
        typer.Option(help="Recompute activations to save memory: none, light (GELU alone), every:k or full."),
    ] = "light",
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
        Path,
        typer.Option(
            help="Folder of the run; an older run's files in it are replaced. With --resume: another folder "
            "to go on in."
        ),
    ] = Path("runs/latest"),
    sample_tokens: Annotated[
        int, typer.Option(help="Tokens of text to print at the end; 0: none.", min=0)
    ] = 400,
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
    result = begin(options, train.__annotations__)
    if result is None:
        return
    from nbtrain.checkpoints import run_folder
    from nbtrain.log import perplexity

    if result.interrupted:
        folder = shlex.quote(str(run_folder(result.checkpoint.meta["path"])))
        todo = f"every step is done and saved in {folder}"
        if result.step < result.checkpoint.meta["extra"]["run"]["steps"]:
            todo = f"go on with: nbtrain train --resume {folder}"
        print(f"nbtrain: {todo}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED)
    if result.val_loss is not None:
        loss = result.val_loss
        print(f"final validation loss {loss:.4f}, perplexity {perplexity(loss):.2f}")
    if sample_tokens and result.checkpoint.tokenizer is not None:
        print()
        print_sample(result.checkpoint, None, sample_tokens, temperature=0.8, top_k=None, seed=0)


def _options(context: typer.Context) -> SimpleNamespace:
    """The options, in `given` the names of those that were not left to their defaults, and in `from_file` of
    those that a config file says. What it says is void where the command line says otherwise."""
    params = [param for param in context.command.params if param.name in context.params]
    sources = {str(param.name): _source(context, param.name) for param in params}
    void = {
        other
        for name, others in SUPERSEDES.items()
        for other in others
        if sources[name] == "COMMANDLINE" and sources[other] == "DEFAULT_MAP"
    }
    if context.params["tokenizer"] == TokenizerKind.bpe and sources["init"] != "COMMANDLINE":
        void.discard("vocab_size")  # it is the tokenizer's, whatever the text
    defaults = {str(param.name): param.default for param in params if param.name in void}
    given = {name for name, source in sources.items() if source in ("COMMANDLINE", "DEFAULT_MAP")} - void
    from_file = {name for name in given if sources[name] == "DEFAULT_MAP"}
    return SimpleNamespace(**context.params | defaults, given=given, from_file=from_file)


def _source(context: typer.Context, option) -> str | None:
    source = context.get_parameter_source(option)
    return None if source is None else source.name
