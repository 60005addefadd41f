"""The `paceline` command."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from paceline import __version__
from paceline.errors import PacelineError, ParameterError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
LOG_LEVELS = ("debug", "info", "warning", "error")

# Newer versions of Typer bring their own copy of click, older ones use the package: the base of
# Typer's public BadParameter is the class of all usage errors in both.
_UsageError = cast(type[Exception], typer.BadParameter.__base__)

# command -> its function or Typer, in the module of paceline.cli with the command's name
_COMMANDS = {
    "run": "run",
    "chat": "chat",
    "serve": "serve",
    "embed": "embed",
    "info": "info",
    "pull": "pull",
    "list": "list_models",
    "trace": "trace",
    "bench": "app",
    "roofline": "roofline",
    "explain": "explain",
    "cache": "app",
    "quantize": "quantize",
    "eval": "evaluate",
    "price": "price",
}
_SETTINGS: dict[str, Any] = {
    "rich_markup_mode": "markdown",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class _Commands(TyperGroup):
    """Imports a command and reads its options when it is called: the others cost no start."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"paceline.cli.{cmd_name}")
        found = getattr(module, _COMMANDS[cmd_name])
        if isinstance(found, typer.Typer):  # a command with commands of its own
            group = typer.main.get_group(found)
            group.name = cmd_name
            return group
        alone = typer.Typer(add_completion=False, **_SETTINGS)
        alone.command(cmd_name)(found)
        return typer.main.get_command(alone)


app = typer.Typer(
    name="paceline",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    **_SETTINGS,
    help=(
        "Paceline runs and serves language models, and shows where every millisecond goes.\n\n"
        "**Begin with** `paceline run smollm2-135m 'Why is the sky blue?'`"
    ),
    epilog=(
        "**Environment**\n\n"
        "- `PACELINE_HOME`: where models lie (default `~/.cache/paceline`)\n\n"
        "- `PACELINE_LOG`: debug, info, warning or error\n\n"
        "- `PACELINE_NUM_THREADS`: threads where `--threads` says nothing\n\n"
        "- `PACELINE_ISA`: scalar, avx2, avx512, avx512bf16 or neon instead of the best"
    ),
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options before the command's name."""


def set_up_logging() -> None:
    """Log to stderr from the level that PACELINE_LOG names: debug, info, warning or error."""
    level = os.environ.get("PACELINE_LOG", "warning").lower()
    if level not in LOG_LEVELS:
        raise ParameterError(f"PACELINE_LOG is {level!r}: choose one of {', '.join(LOG_LEVELS)}")
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )


def set_up_streams() -> None:
    """Make text that the terminal's encoding lacks show as `?`, and give closed streams a place.

    A closed stream is None to Python, and its number would go to the next file that is opened.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open to the end
        elif mode == "w":
            stream.reconfigure(errors="replace")


def _os_error(error: OSError) -> str:
    if error.filename is not None:
        return str(error)
    return f"the output cannot be written: {error.strerror or error}; send it elsewhere"


def _printable(text: str) -> str:
    """Return what a terminal shows as text: what it would obey comes as an escape."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def main() -> None:
    """Run the command line: exit code 1 is an error of ours, 2 of usage, 130 Ctrl-C."""
    # NumPy only holds arrays here: starting threads for its linear algebra would delay the answer.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    set_up_streams()
    try:
        set_up_logging()
        code = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except _UsageError as error:
        cast(Any, error).show()
        code = EXIT_USAGE
    except PacelineError as error:
        print(f"paceline: {_printable(str(error))}", file=sys.stderr)
        code = EXIT_ERROR
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # there the reader of our output has left
            print(f"paceline: {_printable(_os_error(error))}", file=sys.stderr)
        # Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_ERROR
    sys.exit(code)
