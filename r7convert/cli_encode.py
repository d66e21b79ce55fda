"""Commands that change numbers: they need torch, and run on a GPU where there is one. Each one imports its stage when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from r7convert.cli_options import AGAIN, AsJson, Device, DryRun, Quiet, Verbose, parse_layers
from r7convert.terminal import Terminal, command, format_table, wrap
from r7convert.units import in_bytes, in_time

if TYPE_CHECKING:
    from r7convert.encode_shared import SharedReport


def encode_shared(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that repack wrote, or any with --output.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="Write a new folder there; OUT is then left as it is.", show_default=False)] = None,
    bits: Annotated[int, typer.Option(help="K of the encoded matrices.")] = 6,
    device: Device = "auto",
    source: Annotated[Path | None, typer.Option(metavar="SRC", help="Take the BF16 weights from there.", show_default=False)] = None,
    layers: Annotated[str | None, typer.Option(metavar="A-B", help="Only these layers' shared experts.")] = None,
    min_snr: Annotated[float | None, typer.Option(metavar="DB", help="A matrix under so many decibels counts as failed.")] = None,
    on_failure: Annotated[Literal["stop", "keep"], typer.Option(help="What becomes of a matrix that cannot be encoded.")] = "stop",
    link: Annotated[bool, typer.Option("--link", help="With --output: hard-link shards that do not change.")] = False,
    dry_run: DryRun = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what an earlier run left unfinished.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Encode BF16 shared experts, once. Servers otherwise do it at every start. Repeat the command to finish a run that was cut short."""
    from r7convert.encode_shared import encode_shared as encode
    from r7convert.team import join_team

    with join_team() as team:
        terminal = Terminal(as_json=as_json, quiet=quiet or not team.is_first, verbose=verbose)
        done = encode(
            folder,
            output=output,
            bits=bits,
            device=device,
            source=source,
            layers=parse_layers(layers),
            min_snr=min_snr,
            on_failure=on_failure,
            link=link,
            dry_run=dry_run,
            restart=restart,
            team=team,
            progress=terminal.progress(),
        )
        if team.is_first:
            step = command("verify", done.folder, "--source", "SRC")
            terminal.result(done.to_json(), _shared_lines(done, verbose), AGAIN if dry_run else step)


def _shared_lines(done: SharedReport, verbose: bool) -> Iterator[str]:
    if done.encoded:
        by_error = sorted(done.encoded.items(), key=lambda item: -item[1]["relative_error"])
        shown = by_error if verbose else by_error[:3]
        rows = [(module, f"{figures['relative_error']:.3g}", f"{figures['proxy_error']:.3g}") for module, figures in shown]
        yield from format_table(("worst first" if not verbose else "module", "relative error", "proxy error"), rows)
    for module, reason in done.kept.items():
        yield from wrap(f"note: {module} stays as it is: {reason}")
    if done.already:
        yield f"note: {len(done.already):,} matrices had K{done.bits} already"
    sizes = f"{in_bytes(done.bytes_before)} -> {in_bytes(done.bytes_after)}"
    if done.estimate_s is not None:
        yield from wrap(f"would encode {sizes} on {', '.join(done.devices)}, in about {in_time(done.estimate_s)}; nothing was touched")
    elif not done.written:
        yield f"{done.folder}: nothing to encode"
    else:
        spent = f"{in_time(done.seconds)} on {', '.join(done.devices)}"
        yield from wrap(f"{done.folder}: {len(done.encoded):,} matrices at K{done.bits}, {sizes}, {spent}, sealed by MANIFEST.json")


COMMANDS: tuple[Callable[..., None], ...] = (encode_shared,)
