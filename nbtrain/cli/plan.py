"""nbtrain plan"""

from enum import StrEnum
from typing import Annotated

import typer

from nbtrain.cli.app import Dtype, command


class Mode(StrEnum):
    auto = "auto"
    pure = "pure"
    donate = "donate"
    capture = "capture"


@command
def plan(
    preset: Annotated[
        str,
        typer.Option(
            help="Model size: shakespeare-small, shakespeare, gpt2, gpt2-medium, gpt2-large, gpt2-xl."
        ),
    ] = "gpt2",
    n_layer: Annotated[int | None, typer.Option(help="Blocks, instead of the preset's.")] = None,
    n_head: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    n_embd: Annotated[int | None, typer.Option(help="Channels, a multiple of the heads.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Ids of the vocabulary.")] = None,
    dropout: Annotated[float, typer.Option(help="Dropout probability.")] = 0.0,
    vram: Annotated[
        str | None,
        typer.Option(help="Memory of the card: 8GB, 24GiB, 80e9.", show_default="that of the GPU here"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Sequences of a micro-batch.", show_default="the most that fit")
    ] = None,
    micro: Annotated[int, typer.Option(help="Micro-batches a step; their gradients add up.")] = 1,
    remat: Annotated[
        str | None,
        typer.Option(
            help="Recomputation: none, light, every:k or full.",
            show_default="none, light, every:k for some k, and full",
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and activations.")] = Dtype.auto,
    mode: Annotated[
        Mode, typer.Option(help="How the step is run; auto: as nbtrain train does on that device.")
    ] = Mode.auto,
    evaluate: Annotated[
        bool, typer.Option(help="With the memory of evaluating --batch-size sequences at a time.")
    ] = True,
    device: Annotated[
        str,
        typer.Option(
            help="cuda, hip, cpu, or one of this machine: cuda:0.", show_default="the GPU here, else cuda"
        ),
    ] = "auto",
) -> None:
    """Tell, by part, the memory that a run will take, and what fits a card. Nothing is allocated.

    Example: nbtrain plan --preset gpt2 --vram 8GB
    Example: nbtrain plan --preset gpt2-large --batch-size 8 --remat full
    """
    from nbtrain.config import GPTConfig, TrainConfig
    from nbtrain.plan import fastest, fits, memory_here, parse_bytes
    from nbtrain.plan import plan as make_plan
    from nbtrain.run import describe

    sizes = dict(n_layer=n_layer, n_head=n_head, n_embd=n_embd, block_size=block_size, vocab_size=vocab_size)
    given = {name: value for name, value in sizes.items() if value is not None}
    config = GPTConfig.preset(preset, **given, dropout=dropout)
    options: dict = dict(micro=micro, dtype=dtype.value, mode=mode.value, evaluate=evaluate, device=device)
    card = parse_bytes(vram) if vram is not None else memory_here(device)
    if card is None and batch_size is None:
        raise typer.BadParameter("give --vram, --batch-size or both: there is no GPU here to plan for.")
    if batch_size is not None:
        shown = make_plan(config, B=batch_size, remat=remat or TrainConfig.remat, **options)
    print(describe(config))
    if card is None:
        print(f"{_how(shown, evaluate)}, B = {shown.B}, remat {shown.remat}:\n\n{shown}")
        return

    found = fits(config, card, remat=remat, **options)
    print(f"{_how(found[0].smallest, evaluate)}, on a card of {card / 1e6:,.0f} MB:\n")
    print(f"{'remat':10} {'largest B':>9} {'memory MB':>10} {'recomputed blocks':>18} {'speed':>6}")
    for fit in found:
        told, blocks = fit.largest, f"{fit.smallest.recomputed} of {config.n_layer}"
        if told is None:
            print(f"{fit.remat:10} {'none':>9} {'':10} {blocks:>18}")
        else:
            print(f"{fit.remat:10} {told.B:9,} {told.total / 1e6:10,.0f} {blocks:>18} {told.speed:6.2f}")
    print("\nspeed: an estimate, of tokens/s beside a large batch without recomputation\n")

    B = 1 if batch_size is None else batch_size
    asked = [make_plan(config, B=B, remat=fit.remat, **options) for fit in found]
    if batch_size is None:
        chosen = fastest(found)
    else:  # those that recompute least stand first
        chosen = next((plan for plan in asked if plan.total <= card), None)
    if chosen is None:
        need = min(asked, key=lambda plan: plan.total)
        print(f"Nothing fits. The least that B = {B} takes, with remat {need.remat}:\n\n{need}")
        raise typer.Exit(1)
    print(f"the fastest that fits: --batch-size {chosen.B} --remat {chosen.remat}\n\n{chosen}")


def _how(plan, evaluate: bool) -> str:
    """As: cuda, bf16, sequences of 1024, a donated step, evaluation."""
    micro = f", {plan.micro} micro-batches" if plan.micro > 1 else ""
    done = {"pure": "a pure step", "donate": "a donated step", "capture": "a captured step"}[plan.mode]
    return f"{plan.device}, {plan.dtype}, sequences of {plan.T}{micro}, {done}" + (
        ", evaluation" if evaluate else ""
    )
