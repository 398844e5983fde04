"""nbtrain eval"""

import functools
from pathlib import Path
from typing import Annotated

import typer

from nbtrain.cli.app import Format, command
from nbtrain.cli.progress import progress
from nbtrain.cli.token_files import check_beside
from nbtrain.errors import InvalidValue


@command
def eval_(
    directory: Annotated[Path, typer.Argument(help="Folder of a run or a checkpoint.")],
    data: Annotated[
        list[str] | None, typer.Option(help="Token files, a path or pattern: their loss and perplexity.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text file: its loss, by the checkpoint's tokenizer.")
    ] = None,
    choices: Annotated[
        list[Path] | None,
        typer.Option(help="JSON-lines file of ctx, endings and label, as HellaSwag's: accuracy."),
    ] = None,
    format: Annotated[Format, typer.Option(help="Format of the token files.")] = Format.auto,
    batch_size: Annotated[int, typer.Option(help="Sequences computed together.", min=1)] = 16,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, hip:0 or auto.")] = "auto",
) -> None:
    """Print a model's loss and perplexity on tokens or text, or how often it picks the right ending.

    Example: nbtrain eval runs/demo --data "runs/demo/data/val_*.bin"
    Example: nbtrain eval runs/demo --choices questions.jsonl
    """
    if not (data or text or choices):
        raise typer.BadParameter("give at least one of --data, --text and --choices.")
    import math

    from nbtrain.checkpoint import load
    from nbtrain.device.place import use
    from nbtrain.evaluation import loss_of_tokens, multiple_choice, read_questions
    from nbtrain.text import read_text

    # Files first: what cannot be read is said before a model is loaded.
    texts = [(path, read_text(path)) for path in text or ()]
    questions = [(path, read_questions(path)) for path in choices or ()]
    checkpoint = load(directory, device)
    params, config, tokenizer = checkpoint.params, checkpoint.config, checkpoint.tokenizer
    if tokenizer is None and (texts or questions):
        raise InvalidValue(
            f"{checkpoint.meta['path']} holds no tokenizer, so text is no tokens here. Give token files with "
            "--data."
        )
    check_beside(data or (), tokenizer, str(checkpoint.meta["path"]))
    with use(params.device):
        if data:
            _print_loss_of_files(params, config, data, format.value, batch_size)
        for path, content in texts:
            try:
                ids = tokenizer.encode(content)
                with progress() as report:
                    told = functools.partial(report, str(path))
                    found = loss_of_tokens(params, config, ids, batch_size=batch_size, report=told)
            except InvalidValue as error:
                raise InvalidValue(f"{path}: {error}") from None
            n_bytes = len(content.encode("utf-8", "surrogatepass"))
            bits = found.loss * found.n_tokens / n_bytes / math.log(2)
            print(
                f"{path}: loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.2f}, "
                f"{bits:.4f} bits per byte, {found.n_tokens:,} tokens, {n_bytes:,} bytes"
            )
        for path, rows in questions:
            with progress() as report:
                told = functools.partial(report, str(path))
                score = multiple_choice(params, config, tokenizer, rows, batch_size=batch_size, report=told)
            print(f"{path}: acc {score.acc:.4f}, acc_norm {score.acc_norm:.4f}, {score.n:,} questions")


def _print_loss_of_files(params, config, data, format, batch_size) -> None:
    from nbtrain.data import TokenFile, eval_batches, resolve
    from nbtrain.evaluation import TextLoss
    from nbtrain.run import evaluate
    from nbtrain.train import make_eval_step

    files: dict = dict(format=format, vocab_size=config.vocab_size, device=params.device)
    chosen = eval_batches(data, B=batch_size, T=config.block_size, **files)
    n_tokens = sum(len(TokenFile(path, format)) - 1 for path in resolve(data))

    def told(report):
        done = 0
        for batch in chosen:
            yield batch
            done += batch.tokens.size
            report("token files", min(done, n_tokens), n_tokens)

    with progress() as report:
        found = TextLoss(*evaluate(make_eval_step(config), params, told(report)))
    print(
        f"loss {found.loss:.4f} nats per token, perplexity {found.perplexity:.2f}, {found.n_tokens:,} tokens"
    )
