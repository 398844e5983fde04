"""nbtrain export"""

from pathlib import Path
from typing import Annotated

import typer

from nbtrain.cli.app import command


@command
def export(
    directory: Annotated[Path, typer.Argument(help="Folder of a run or a checkpoint.")],
    out: Annotated[Path, typer.Option(help="Folder to write; an earlier export in it is replaced.")],
) -> None:
    """Turn a model into a folder that Hugging Face's transformers loads.

    Example: nbtrain export runs/demo --out exported
    """
    from nbtrain.checkpoint import load
    from nbtrain.huggingface import check_exportable, save_pretrained

    check_exportable(out)
    checkpoint = load(directory, "cpu")
    state = checkpoint.opt_state
    weights = checkpoint.params if state is None else state.master
    save_pretrained(out, weights, checkpoint.config, checkpoint.tokenizer)
    print(f"{out}: {', '.join(sorted(entry.name for entry in out.iterdir()))}")
    print(f"load it with transformers.GPT2LMHeadModel.from_pretrained({str(out)!r})")
