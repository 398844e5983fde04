"""nbtrain eval"""

from pathlib import Path
from typing import Annotated

import typer

from nbtrain.cli.app import Format, command


@command
def eval_(
    directory: Annotated[Path, typer.Argument(help="Folder of a run or a checkpoint.")],
    data: Annotated[list[str], typer.Option(help="Token files: a path or pattern.")],
    format: Annotated[Format, typer.Option(help="Format of the token files.")] = Format.auto,
    batch_size: Annotated[int, typer.Option(help="Sequences computed together.")] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, hip:0 or auto.")] = "auto",
) -> None:
    """Print a model's loss and perplexity on token files.

    Example: nbtrain eval runs/demo --data "runs/demo/data/val_*.bin"
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
