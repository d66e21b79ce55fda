"""Commands that work on this machine's folders. Each one imports its stage when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from r7convert.cli_options import AsJson, Quiet, Source, SourceOrRepo, Target, Verbose, local_folder, open_checkpoint
from r7convert.errors import FormatError, UnsupportedError, UsageError, complain
from r7convert.terminal import Terminal, command, format_table, wrap
from r7convert.units import in_bytes, ranges

if TYPE_CHECKING:
    from r7convert.inspect import Inspection
    from r7convert.restamp import Restamped

MANY_LAYERS = 12


def sample(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.", show_default=False)],
    kind: Annotated[Literal["r7", "rank-sliced", "exl3"], typer.Option(help="What it is: R7, or another form of EXL3 experts.")] = "r7",
    family: Annotated[
        Literal["glm", "deepseek", "deepseek-v4", "qwen", "kimi", "minimax"],
        typer.Option(help="Whose names and config keys it has; deepseek-v4, kimi and minimax are for kind exl3 alone."),
    ] = "glm",
    seed: Annotated[int, typer.Option(help="Same seed, same bytes.")] = 0,
    mode: Annotated[
        str, typer.Option(help="How K falls in a layer: mixed, uniform, odd, one-k, three-k; several with commas, taken in turn.")
    ] = "mixed",
    hidden: Annotated[int, typer.Option(help="Hidden size.")] = 256,
    intermediate: Annotated[int, typer.Option(help="Intermediate size of an expert.")] = 512,
    experts: Annotated[int, typer.Option(help="Routed experts of a layer.")] = 4,
    layers: Annotated[int, typer.Option(help="Decoder layers, the MTP layer not counted.")] = 5,
    dense: Annotated[int, typer.Option(help="Layers without experts, before the others.")] = 3,
    k_values: Annotated[str, typer.Option(help="The K that experts may have, with commas.")] = "3,4,5",
    mtp: Annotated[
        Literal["tail", "r7", "bf16", "none"],
        typer.Option(help="Form of the MTP layer's experts: a tail's (for other kinds than r7 their own), R7, BF16; or no such layer."),
    ] = "tail",
    tail_tp: Annotated[int, typer.Option(help="Ranks of a tail, or of a whole rank-sliced checkpoint.")] = 1,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write a small but complete checkpoint, with random weights."""
    from r7convert.sample import write_sample

    terminal = Terminal(as_json=as_json, quiet=quiet, verbose=verbose)
    try:
        ks = tuple(int(k) for k in k_values.split(","))
    except ValueError:
        raise UsageError(complain("--k-values", "list", expected="integers with commas", found=repr(k_values))) from None
    made = write_sample(
        folder,
        progress=terminal.progress(),
        kind=kind,
        family=family,
        seed=seed,
        mode=mode,
        hidden=hidden,
        intermediate=intermediate,
        experts=experts,
        layers=layers,
        dense=dense,
        k_values=ks,
        mtp=mtp,
        tail_tp=tail_tp,
    )
    files = sorted(folder.iterdir())
    nbytes = sum(path.stat().st_size for path in files)
    data = {"folder": str(folder), "files": len(files), "bytes": nbytes, "kind": kind, "family": family, "seed": seed, "mode": mode}
    data |= {"r7_layers": list(made.r7_layers), "moe_layers": list(made.moe_layers)}
    what = f"R7 layers {ranges(made.r7_layers)}" if made.r7_layers else f"{kind}, experts in layers {ranges(made.moe_layers)}"
    said = f"{folder}: {len(files)} files, {in_bytes(nbytes)}, mode {mode}, {what}"
    terminal.result(data, [said], command("inspect", folder))


def inspect(
    source: SourceOrRepo,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw K of every expert: a page (.html) or a picture (.png).", show_default=False)
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Say what a checkpoint holds and what each target would make of it. Reads headers, no payload."""
    from r7convert.inspect import inspect as inspect_checkpoint

    if plot is not None and plot.suffix not in (".html", ".png"):
        raise UsageError(complain("--plot", "kind of file", expected="a name that ends in .html or .png", found=plot.name))
    found = inspect_checkpoint(open_checkpoint(source))
    if plot is not None:
        _draw(found, plot)
    terminal = Terminal(as_json=as_json, quiet=quiet, verbose=verbose)
    terminal.result(found.to_json(), _inspect_lines(found, verbose), *_after_inspect(found, source))


def _draw(found: Inspection, file: Path) -> None:
    census = {layer: experts.bits for layer, experts in found.checkpoint.experts.items()}
    if file.suffix == ".png":
        from r7convert.report_png import draw_census, save_png

        if not census:
            raise UnsupportedError(complain("--plot", "nothing to draw", expected="EXL3 routed experts", found="none"))
        save_png(draw_census(census), file)
    else:
        from r7convert.cli_report import write_page
        from r7convert.report_html import render_census

        write_page(file, render_census(found.checkpoint.where.rstrip("/").rpartition("/")[2], census))


def _inspect_lines(found: Inspection, verbose: bool) -> Iterator[str]:
    from r7convert.format import legal_tps

    cp, g = found.checkpoint, found.checkpoint.geometry
    yield f"{cp.where}: {len(cp.tensors):,} tensors in {len(cp.headers)} shards, {in_bytes(cp.payload_bytes)}"
    yield from wrap(f"kind: {found.kind}")
    if found.names:
        yield from wrap(f"experts: {found.names}")
    yield f"hidden {g.hidden}, intermediate {g.intermediate} (tp {', '.join(map(str, legal_tps(g.intermediate)))})"
    experts = f"{g.experts} routed, {g.shared_experts} shared"
    yield from wrap(f"{g.layers} layers, experts in {ranges(g.moe_layers) or 'none'}: {experts}; tensors under {cp.root}")
    yield from wrap(f"MTP: {found.mtp}")
    for state, layers in found.shared_experts.items():
        yield f"shared experts: {state} in layers {ranges(layers)}"
    yield ""
    due = {True: "repair due, see `r7convert stamp`", False: "right", None: "cannot be repaired"}[found.stamp_due]
    yield f"stamp: {due}"
    for place in found.places:
        state = "; ".join(place.problems) or ("right" if place.present else "absent")
        yield from wrap(f"  {place.name}: {state}")
    yield ""
    yield from format_table(("bytes of", ""), [(name, in_bytes(count)) for name, count in found.bytes_by_class.items()])
    yield ""
    yield from format_table(("layers", "form", "gate", "up", "down", "mixing K"), _census_rows(found, verbose))
    yield ""
    rows = []
    for answer in found.targets:
        grown = f"{100 * (answer.bytes_after / cp.payload_bytes - 1):+z.1f}%" if answer.bytes_after is not None and cp.payload_bytes else ""
        word = "no" if not answer.accepted else "lossless" if answer.lossless else "with loss"
        rows.append((answer.target, word, grown, answer.why + (f"; {answer.cost}" if answer.cost not in ("", "nothing") else "")))
    yield from format_table(("target", "takes it", "bytes", "who reads it or why not, and what is encoded again"), rows)
    for line in (*(f"not in the index: {name}" for name in cp.foreign), *cp.warnings):
        yield from wrap(f"note: {line}")


def _after_inspect(found: Inspection, source: str) -> Iterator[str]:
    from r7convert.format import SLICED

    is_folder = Path(source).is_dir()
    if is_folder and (Path(source) / "MANIFEST.json").is_file():
        yield command("verify", source)
        return
    if found.stamp_due:
        repair = command("stamp", source, "--in-place") if is_folder else command("fix-hub", source)
        yield f"{repair}  # for R7-aware servers" if found.checkpoint.kind == "r7" else repair
    takes = [answer.target for answer in found.targets if answer.accepted]
    target = next((t for t in ("rank-sliced", "slabs", "exl3", "r7") if t in takes), None)
    if target is None:
        yield "no target takes it; the table says why"
    else:
        ranks = ("--tp", "N") if target in SLICED else ()
        yield f"{command('repack', source, 'OUT', '--target', target, *ranks)}  # or another target"


def _census_rows(found: Inspection, verbose: bool) -> Iterator[tuple[str, ...]]:
    """A row a layer, or, where they are many, a row for all layers of one form and one set of K."""

    groups: dict[tuple[Any, ...], list[Any]] = {}
    for layer in found.census:
        own = layer.layer if verbose or len(found.census) <= MANY_LAYERS else None
        groups.setdefault((layer.tp, layer.hidden, layer.tiers, own), []).append(layer)
    for (tp, hidden, _, _), layers in groups.items():
        form = "whole" if tp is None else f"tp {tp}"
        counts = []
        for proj in layers[0].counts:
            total: dict[int, int] = {}
            for layer in layers:
                for k, count in layer.counts[proj].items():
                    total[k] = total.get(k, 0) + count
            counts.append(" ".join(f"K{k}:{count:,}" for k, count in sorted(total.items())))
        mixed = sum(layer.mixed_experts for layer in layers)
        yield ranges(layer.layer for layer in layers), f"{form}, {hidden}", *counts, f"{mixed:,}"


def stamp(
    source: Source,
    output: Annotated[Path | None, typer.Option(help="Write a whole folder there: corrected JSON, hard links to the weights.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Correct SRC itself; the originals go to .r7convert/before-stamp.")] = False,
    target: Annotated[Target | None, typer.Option(help="What the tensors are laid out for. By default their names say.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only look, and exit with 3 if a repair is due.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Correct the quantization stamp of a checkpoint. No weight is touched."""
    from r7convert.restamp import restamp

    terminal = Terminal(as_json=as_json, quiet=quiet, verbose=verbose)
    if sum((output is not None, in_place, check)) != 1:
        raise UsageError(complain("stamp", "where to", expected="one of --output DIR, --in-place, --check", found="none or several"))
    report = restamp(local_folder(source), output=output, in_place=in_place, target=target, progress=terminal.progress())
    steps = () if check and report.due else (f"serve it, or {command('repack', report.folder or source, 'OUT', '--target', 'TARGET')}",)
    terminal.result(report.to_json(), _stamp_lines(report, verbose), *steps)
    if check and report.due:
        raise FormatError(complain(source, "stamp: a repair is due", do="Use --in-place or --output."))


def _stamp_lines(report: Restamped, verbose: bool) -> Iterator[str]:
    for place in report.places:
        if place.problems or verbose:
            yield from wrap(f"{place.name}: {'; '.join(place.problems) or ('right' if place.present else 'absent, as it should be')}")
    for change in report.repaired.changes:
        yield from wrap(f"  {change}")
    if not report.due:
        yield f"stamp is right for target {report.target}, nothing to change"
    elif report.folder is None:
        yield f"{len(report.repaired.changes)} fields to change for target {report.target}"
    else:
        backup = f", originals in {report.backup}" if report.backup else ""
        yield f"{len(report.repaired.changes)} fields changed in {report.folder} for target {report.target}{backup}"
    if report.folder is not None and not report.due:
        yield f"{report.folder}: a folder of links"


def env(as_json: AsJson = False, quiet: Quiet = False, verbose: Verbose = False) -> None:
    """Describe this machine for a bug report: versions, devices, room. No private paths."""
    from r7convert.env import describe_env

    found = describe_env()
    terminal = Terminal(as_json=as_json, quiet=quiet, verbose=verbose)
    terminal.result(found, format_table(("what", "value"), _rows("", found)), f"{command('env', '--json')}  # for a bug report")


def _rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _rows(f"{name} {key}".strip(), inner)
    elif isinstance(value, list):
        for nth, inner in enumerate(value):
            yield from _rows(f"{name} {nth}", inner)
        if not value:
            yield name, "none"
    elif name.endswith("_bytes") and value is not None:
        yield name.removesuffix("_bytes").replace("_", " "), in_bytes(value)
    else:
        yield name, "none" if value is None else str(value)


COMMANDS: tuple[Callable[..., None], ...] = (inspect, stamp, sample, env)
