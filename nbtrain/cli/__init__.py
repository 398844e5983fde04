"""The command line: nbtrain train | sample | prepare | eval | plan | import | export | doctor; a module each.

Exit codes: 0; 1 a failure, told in one line on stderr; 2 usage; 130 interrupted. What is heavy is imported by
the command that needs it, so that --help is quick.
"""

import sys

from nbtrain.cli import doctor, evaluate, export, import_, plan, prepare, sample, train
from nbtrain.cli.app import app

__all__ = ["doctor", "evaluate", "export", "import_", "main", "plan", "prepare", "sample", "train"]

ORDER = ("train", "sample", "prepare", "eval", "plan", "import", "export", "doctor")  # of --help
app.registered_commands.sort(key=lambda command: ORDER.index(str(command.name)))


def main(args: list[str] | None = None) -> None:
    """The entry point; ends with SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII only must not end a run
    app(args=args, prog_name="nbtrain")
