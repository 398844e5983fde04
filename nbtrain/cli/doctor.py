"""nbtrain doctor"""

from typing import Annotated

import typer

from nbtrain.cli.app import command


@command
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
