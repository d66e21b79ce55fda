"""The command line: arguments in, one call, one line out. torch is imported inside commands, never here."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from r7convert import __version__, cli_convert, cli_encode, cli_hub, cli_local, cli_report
from r7convert.errors import EXIT_INTERRUPTED
from r7convert.terminal import report_error

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would take 0.1 s of every --help
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"r7convert {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Turn an R7 EXL3 checkpoint into one that stock servers load: once, offline, with proof."""


# In the order in which one needs them; a command that is not here comes last.
CHAIN = ("inspect", "download", "stamp", "repack", "encode_shared", "verify", "report", "push", "convert", "fix_hub", "sample", "env")


def _place(command: Callable[..., None]) -> int:
    return CHAIN.index(command.__name__) if command.__name__ in CHAIN else len(CHAIN)


for command in sorted(
    (*cli_local.COMMANDS, *cli_convert.COMMANDS, *cli_encode.COMMANDS, *cli_hub.COMMANDS, *cli_report.COMMANDS), key=_place
):
    app.command()(command)


def run() -> NoReturn:
    """Run the command line; every way out of the process passes here."""
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path the terminal's encoding has no letters for is shown escaped
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="r7convert")
    except SystemExit as leaving:
        if leaving.code == EXIT_INTERRUPTED:  # Typer's own answer to Ctrl-C
            _leave(report_error(KeyboardInterrupt()))
        raise
    except BaseException as error:
        _leave(report_error(error))
    sys.exit(0)


def _leave(code: int) -> NoReturn:
    """End a failed run at once: a thread that waits for a stalled server would hold the process for minutes."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
