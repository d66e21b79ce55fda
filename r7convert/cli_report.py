"""The `report` command: a sealed folder for people, on the terminal, as a page, as pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from r7convert.cli_options import AsJson, Quiet, Verbose
from r7convert.errors import ResourceError, UsageError, complain
from r7convert.terminal import Terminal, command, format_table, wrap
from r7convert.units import in_bytes

if TYPE_CHECKING:
    from r7convert.report import Report


def report(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A sealed folder.", show_default=False)],
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write one self-contained page.", show_default=False)] = None,
    png: Annotated[Path | None, typer.Option(metavar="DIR", help="Write pictures; needs the extra `plot`.", show_default=False)] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show what a converted folder holds, what it cost, how it was judged and how to serve it. Reads headers, no payload."""
    from r7convert.report import report as describe

    terminal = Terminal(as_json=as_json, quiet=quiet, verbose=verbose)
    for option, path in (("--html", html), ("--png", png)):
        if path is not None and path.resolve().is_relative_to(folder.resolve()):
            do = "Name a place outside."
            raise UsageError(complain(option, "a file in OUT would not be under its seal", expected="another folder", found=path, do=do))
    found = describe(folder)
    if html is not None:
        from r7convert.report_html import render_html

        write_page(html, render_html(found))
    pictures = []
    if png is not None:
        from r7convert.report_png import write_pngs

        pictures = write_pngs(found, png)
    for path in ([html] if html is not None else []) + pictures:
        terminal.say(f"wrote {path}")
    terminal.result(found.to_json(), _report_lines(found, verbose), _after_report(found, folder))


def _after_report(found: Report, folder: Path) -> str:
    if found.verdict.state == "ok":
        return f"{command('push', folder, 'ORG/NAME')}  # to publish it"
    if found.verdict.state == "failed":
        return f"{command('verify', folder)}  # says why; do not serve it"
    return command("verify", folder, "--source", "SRC")


def write_page(path: Path, page: str) -> None:
    """Raises:  ResourceError if it cannot be written."""
    from r7convert.store import write_bytes

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, page.encode("utf-8", "replace"))
    except OSError as error:
        raise ResourceError(complain(path, "cannot write the page", expected="a writable folder", found=error.strerror)) from None


def _report_lines(found: Report, verbose: bool) -> Iterator[str]:
    from r7convert.facts import count_k, mean_of
    from r7convert.format import PROJECTIONS
    from r7convert.units import ranges

    g = found.geometry
    tp = f", tp {found.tp}" if found.tp else ""
    yield f"{found.name}: target {found.target}{tp}, {in_bytes(found.bytes_after)} of payload, by {found.tool}"
    yield f"hidden {g.hidden}, intermediate {g.intermediate}, {g.experts} routed experts in layers {ranges(found.census) or 'none'}"
    yield ""
    if found.census:
        values = sorted({k for rows in found.census.values() for row in rows for k in row})
        rows = []
        for at, proj in enumerate(PROJECTIONS):
            counts = count_k(found.census, at)
            rows.append((proj, *(f"{counts[k]:,}" for k in values), f"{mean_of(counts):.2f}"))
        yield from format_table(("matrices", *(f"K{k}" for k in values), "mean K"), rows)
        yield ""
    sizes = [(row.name, "not stated" if row.before is None else in_bytes(row.before), in_bytes(row.after)) for row in found.bytes_by_class]
    before = found.bytes_before
    sizes.append(("all", "not stated" if before is None else in_bytes(before), in_bytes(found.bytes_after)))
    yield from format_table(("bytes of", "before", "after"), sizes)
    yield ""
    if found.steps:
        steps = [(s.step, f"{s.matrices:,}", f"{s.mean:.3g}", f"{s.worst:.3g}") for s in found.steps]
        yield from format_table(("encoded anew", "matrices", "mean error", "worst"), steps)
    else:
        yield "lossless: no weight was decoded or encoded again"
    yield ""
    for part in found.verdict.parts:
        yield from wrap(f"  {part.name}: {part.state}" + (f": {part.scope}" if verbose or part.state != "passed" else ""))
    why = f": {found.verdict.why}" if found.verdict.why else ""
    yield from wrap(f"verdict: {found.verdict.state}{why}")
    yield from wrap(f"loads in {found.loads}:")
    yield f"  {found.serve}"


COMMANDS: tuple[Callable[..., None], ...] = (report,)
