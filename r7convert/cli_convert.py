"""Commands that convert a folder and judge the outcome. Each one imports its stage when it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from r7convert.cli_options import (
    AGAIN,
    AsJson,
    Device,
    DryRun,
    Quiet,
    Reader,
    SourceOrRepo,
    Target,
    Verbose,
    open_checkpoint,
    parse_layers,
    parse_size,
    wants_bars,
)
from r7convert.errors import UsageError, complain
from r7convert.terminal import Terminal, command, format_table, wrap
from r7convert.units import in_bytes, in_time

if TYPE_CHECKING:
    from r7convert.repack import Repacked
    from r7convert.stream import Streamed
    from r7convert.verdict import Verdict


def repack(
    source: SourceOrRepo,
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A new folder, or one of an unfinished run.", show_default=False)],
    target: Annotated[Target, typer.Option(help="Who is to read it.", show_default=False)],
    tp: Annotated[int | None, typer.Option(help="Ranks of the server, for the sliced targets.", show_default=False)] = None,
    reader: Annotated[Reader, typer.Option(help="Oldest stock release that must load it.")] = "r28",
    rotation_layout: Annotated[
        Literal["shared_h_v1", "per_expert_v1"] | None,
        typer.Option(help="Where hidden-side vectors stand. By default the smallest that reader and vectors allow."),
    ] = None,
    mixed_k: Annotated[
        Literal["refuse", "lift", "fit"], typer.Option(help="What to do with experts that mix K, for target rank-sliced.")
    ] = "refuse",
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Of --mixed-k fit: 300GB, 105%, +5% or 3.6bpw. By default the payload's size.", show_default=False
        ),
    ] = None,
    importance: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Weights of experts for fit, such as routing counts.", show_default=False)
    ] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="SRC", help="BF16 originals, a folder or a repository, to encode from.", show_default=False)
    ] = None,
    device: Device = "auto",
    layers: Annotated[str | None, typer.Option(metavar="A-B", help="Only these layers' experts: a part, nothing loads it alone.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Files written at a time.")] = None,
    link: Annotated[bool, typer.Option("--link", help="Hard-link shards that do not change.")] = False,
    dry_run: DryRun = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what an earlier run left in OUT.")] = False,
    drop_mtp: Annotated[bool, typer.Option("--drop-mtp", help="Leave the multi-token-prediction layers out.")] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Copy NaN and Inf in vectors, and mark them in the manifest.")
    ] = False,
    stream: Annotated[bool, typer.Option("--stream", help="From the Hub: fetch a file, convert it, drop it.")] = False,
    max_disk: Annotated[
        str | None, typer.Option(metavar="SIZE", help="With --stream: bytes of fetched files at most, such as 40GB.", show_default=False)
    ] = None,
    push_as_you_go: Annotated[
        str | None, typer.Option(metavar="REPO", help="With --stream: finished weights go there and from this disk.", show_default=False)
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push-as-you-go: a new repository is private.")] = False,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="With --push-as-you-go: into a pull request.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Convert a checkpoint for another reader. Repeat the command to finish a run that was cut short."""
    from r7convert.address import locate, parse_repo
    from r7convert.ktable import parse_budget
    from r7convert.store import read_json

    place = locate(source)
    terminal = Terminal(as_json=as_json, quiet=quiet, verbose=verbose, bars=isinstance(place, Path) or wants_bars())
    choices: dict[str, Any] = {
        "target": target,
        "tp": tp,
        "reader": reader,
        "rotation_layout": rotation_layout,
        "mixed_k": mixed_k,
        "budget": parse_budget(budget) if budget is not None else None,
        "importance": read_json(importance) if importance is not None else None,
        "layers": parse_layers(layers),
        "drop_mtp": drop_mtp,
    }
    common: dict[str, Any] = {"device": device, "reference": open_checkpoint(reference) if reference is not None else None}
    common |= {"dry_run": dry_run, "restart": restart, "allow_nonfinite": allow_nonfinite}
    common["progress"] = terminal.progress()
    if isinstance(place, Path):
        for option, given in (("--stream", stream), ("--max-disk", max_disk), ("--push-as-you-go", push_as_you_go)):
            if given:
                raise UsageError(complain(option, "for a repository of the Hub", expected="org/name", found=source))
        from r7convert.repack import repack as convert
        from r7convert.team import join_team

        with join_team() as team:
            if not team.is_first:
                common["progress"] = None
            done = convert(place, output, threads=threads, link=link, team=team, **choices, **common)
            if team.is_first:
                terminal.result(done.to_json(), _repack_lines(done, verbose), _after_repack(done, source))
        return
    if not stream and not dry_run:
        do = f"Use --stream, or first: r7convert download {place} DIR."
        raise UsageError(complain(source, "a repository of the Hub", expected="a folder", do=do))
    from r7convert.hub import tame_client
    from r7convert.stream import stream as convert_streamed

    tame_client(quiet=quiet)
    streamed = convert_streamed(
        place,
        output,
        max_disk_bytes=parse_size("--max-disk", max_disk),
        push_to=parse_repo(push_as_you_go) if push_as_you_go is not None else None,
        private=private,
        create_pr=create_pr,
        **choices,
        **common,
    )
    went = streamed.url is not None and push_as_you_go
    step = command("download", went, "DIR") + ", then verify it there" if went else _after_repack(streamed.repacked, None)
    terminal.result(streamed.to_json(), _stream_lines(streamed, verbose), step)


def _after_repack(done: Repacked, source: str | None) -> str:
    """`source` is None where no folder holds it."""
    if done.dry_run:
        return AGAIN
    if done.plan.is_partial:
        return "look at it with r7convert.open_slabs; a part of a checkpoint is not for serving"
    ranks = ("--tp", done.plan.tp) if done.plan.tp is not None else ()
    return command("verify", done.output, *(("--source", source) if source is not None else ()), *ranks)


def _stream_lines(streamed: Streamed, verbose: bool) -> Iterator[str]:
    yield from (f"note: {line}" for note in streamed.notes for line in wrap(note))
    yield from _repack_lines(streamed.repacked, verbose)
    if not streamed.repacked.dry_run:
        yield f"at most {in_bytes(streamed.peak_bytes)} on disk besides what stays"
    if streamed.url is not None:
        yield streamed.url


def _repack_lines(done: Repacked, verbose: bool) -> Iterator[str]:
    plan = done.plan
    choices = (f"tp {plan.tp}", f"reader {plan.reader}", f"rotation layout {plan.rotation_layout}")
    chosen = [f"target {plan.target}", *(choice for choice in choices if not choice.endswith(" None"))]
    yield from wrap(f"{done.output}: {', '.join(chosen)}")
    if verbose:
        yield from (line for change in plan.changes for line in wrap(f"  {change}"))
    rows = [(kind, f"{count:,}", in_bytes(nbytes)) for kind, (count, nbytes) in plan.accounting.items()]
    total = [sum(column) for column in zip(*plan.accounting.values(), strict=True)]
    yield from format_table(("of the source", "tensors", "bytes"), [*rows, ("all", f"{total[0]:,}", in_bytes(total[1]))])
    for note in plan.notes:
        yield from wrap(f"note: {note}")
    for name in plan.left_out:
        yield from wrap(f"left out: {name}")
    if done.findings.zeros:
        yield f"note: exact zeros in {len(done.findings.zeros):,} vectors, as in the source"
    if done.findings.nonfinite:
        yield f"note: non-finite values in {len(done.findings.nonfinite):,} vectors, marked in the manifest"
    for name, price in done.prices.items():
        yield from wrap(f"--mixed-k {name}: {_price(price)}")
    if done.dry_run:
        yield f"would write {in_bytes(plan.payload_bytes)} of payload; nothing was touched"
        return
    written = sum(record.size for record in done.files.values())
    resumed = f", {done.resumed} of them by an earlier run" if done.resumed else ""
    yield f"{len(done.files)} files, {in_bytes(written)}, sealed by MANIFEST.json{resumed}"


def _price(price: Mapping[str, Any]) -> str:
    if "impossible" in price:
        return str(price["impossible"])
    growth = 100 * (price["bytes_after"] / price["bytes_before"] - 1)
    error = price["expected_error_after"] / price["expected_error_before"] if price["expected_error_before"] else 1.0
    matrices = f"{price['lifted']:,} matrices lifted, {price['lowered']:,} lowered"
    return (
        f"{matrices}, {in_bytes(price['bytes_after'])} ({growth:+.1f}%), error x {error:.2f}, encoded here in {in_time(price['encode_s'])}"
    )


def verify(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A folder that r7convert wrote.", show_default=False)],
    source: Annotated[Path | None, typer.Option(metavar="SRC", help="The checkpoint it was made from, to compare every tensor.")] = None,
    tp: Annotated[int | None, typer.Option(help="Ranks of the server that will load it.", show_default=False)] = None,
    reader: Annotated[Reader | None, typer.Option(help="Stock release that will load it.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Hash, compare and compute a sample, and say which.")] = False,
    activations: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A safetensors file with one tensor [N, H] to compute with.", show_default=False),
    ] = None,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="Files read at a time.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Judge a converted folder. Its seal, its reader's contract, bytes and numbers against the source. Writes VERDICT.json for push."""
    from r7convert.team import join_team
    from r7convert.verify import verify as judge

    with join_team() as team:
        terminal = Terminal(as_json=as_json, quiet=quiet or not team.is_first, verbose=verbose)
        choices: dict[str, Any] = {"tp": tp, "reader": reader, "threads": threads, "device": device, "quick": quick}
        choices |= {"source": source, "activations": activations}
        verdict = judge(folder, team=team, progress=terminal.progress(), **choices)
        if not team.is_first:
            return
        steps = _after_verify(folder, source) if verdict.ok else ()  # otherwise the error below says it
        terminal.result(verdict.to_json(), _verify_lines(folder, verdict, verbose), *steps)
    verdict.check()


def _after_verify(folder: Path, source: Path | None) -> tuple[str, ...]:
    if source is None:
        return (f"{command('verify', folder, '--source', 'SRC')}  # to compare every tensor",)
    return (f"{command('report', folder)}  # how to serve it",)


def _verify_lines(folder: Path, verdict: Verdict, verbose: bool) -> Iterator[str]:
    rows: list[tuple[str, str, str, str]] = []
    for part in verdict.parts:
        said = part.why_skipped or "; ".join(part.scope) or f"{len(part.checks)} checks"
        rows.append((part.name, part.state, f"{part.failures:,}" if not part.why_skipped else "", said))
        if verbose and not part.why_skipped:
            rows += [("", "", f"{check.failures:,}", f"{check.name}: {check.looked_at:,} {check.unit}") for check in part.checks.values()]
    yield from format_table(("part", "state", "failures", "what it looked at"), rows)
    for part in verdict.parts:
        for check in part.checks.values():
            for note in check.notes:
                yield from wrap(f"note: {note}")
    yield f"{folder}: {'ok' if verdict.ok else 'NOT ok'} for target {verdict.target or 'unknown'}"


COMMANDS: tuple[Callable[..., None], ...] = (repack, verify)
