"""The command line: arguments in, one call, one line out. torch is imported inside commands, never here."""

from __future__ import annotations

from typing import Annotated

import typer

from r7convert import __version__

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"r7convert {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Turn an R7 EXL3 checkpoint into one that stock servers load: once, offline, with proof."""


def run() -> None:
    app()
