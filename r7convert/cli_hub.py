"""Commands that speak to the Hub. Each one imports its stage when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from r7convert.cli_options import AGAIN, AsJson, DryRun, Quiet, Target, Verbose, parse_layers, wants_bars
from r7convert.errors import UsageError, complain
from r7convert.terminal import Terminal, command, wrap
from r7convert.units import in_bytes, in_time

if TYPE_CHECKING:
    from r7convert.address import Repo
    from r7convert.convert import Converted
    from r7convert.download import Downloaded
    from r7convert.fix_hub import FixedHub
    from r7convert.push import Pushed

RepoArgument = Annotated[str, typer.Argument(metavar="REPO[@REV]", help="A model repository: org/name, hf://org/name.", show_default=False)]


def download(
    repo: RepoArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the files go.", show_default=False)],
    layers: Annotated[str | None, typer.Option(metavar="A-B", help="Only the shards of these layers, and those of no layer.")] = None,
    allow: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Only files of these names; may be repeated.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="No files of these names; may be repeated.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Forget an unfinished download; fetch the newest commit.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Fetch a checkpoint from the Hub. At one commit, every file checked, what a conversion needs and no more; repeat it to resume."""
    from r7convert.download import download as fetch

    terminal = _terminal(as_json, quiet, verbose)
    span = parse_layers(layers)
    result = fetch(
        _repo(repo),
        folder,
        layers=range(span[0], span[1] + 1) if span else None,
        allow=allow or (),
        ignore=ignore or (),
        restart=restart,
        dry_run=dry_run,
        progress=terminal.progress(),
    )
    step = AGAIN if dry_run else command("inspect", folder)
    terminal.result(result.to_json(), _download_lines(result, folder, verbose), step)


def _download_lines(result: Downloaded, folder: Path, verbose: bool) -> Iterator[str]:
    if verbose:
        yield from (f"left out: {name}" for name in result.left_out)
    size, fetched = in_bytes(result.total_bytes), in_bytes(result.fetched_bytes)
    if result.dry_run:
        yield from wrap(f"{result.repo} at {result.commit}: {len(result.files)} files, {size}, of which {fetched} to fetch")
        return
    yield from wrap(f"{folder}: {len(result.files)} files, {size}, from {result.repo} at {result.commit}; {fetched} fetched")


def push(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="A sealed and verified folder.", show_default=False)],
    repo: RepoArgument,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private if it is to be made.")] = False,
    revision: Annotated[str | None, typer.Option(metavar="BRANCH", help="The branch; made if it is not there.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Propose it as a pull request, a draft until it is whole.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Take another checkpoint down while this one goes up.")] = False,
    tag: Annotated[str | None, typer.Option(help="Tag the last commit.")] = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Publish a converted checkpoint. Weights go first, config and index in the last commit; repeat it to resume."""
    from r7convert.address import Repo
    from r7convert.push import push as send

    terminal = _terminal(as_json, quiet, verbose, client_bars=True)
    place = _repo(repo)
    if revision is not None:
        if place.revision is not None:
            raise UsageError(complain(repo, "branch given twice", expected="one of @REV and --revision", found="both"))
        place = Repo(place.id, revision)
    result = send(
        folder,
        place,
        private=private,
        create_pr=create_pr,
        replace=replace,
        tag=tag,
        dry_run=dry_run,
        progress=terminal.progress(),
    )
    step = AGAIN if dry_run else f"look at {result.url}, and merge it" if create_pr else f"look at {result.url}"
    terminal.result(result.to_json(), _push_lines(result, verbose), step)


def _push_lines(result: Pushed, verbose: bool) -> Iterator[str]:
    will = "would send" if result.dry_run else "sent"
    if verbose:
        yield from (f"{will}: {name}" for name in result.sent)
    yield from wrap(
        f"{result.repo}@{result.ref}: {will} {len(result.sent)} files, {in_bytes(result.sent_bytes)}, in {result.commits} commits; "
        f"{result.already_there} were there"
    )
    if not result.dry_run:
        yield result.url


def fix_hub(
    repo: RepoArgument,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Propose the repair as a pull request.")] = False,
    target: Annotated[Target | None, typer.Option(help="What the tensors are laid out for. By default their names say.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Repair the stamp of a published repository. Says what is due, and proposes it there if asked; no weight is touched."""
    from r7convert.fix_hub import fix_hub as fix

    terminal = _terminal(as_json, quiet, verbose)
    result = fix(_repo(repo), create_pr=create_pr, target=target, progress=terminal.progress())
    step = command("download", repo, "DIR") if not result.due else f"look at {result.url}, and merge it"
    if result.due and result.url is None:
        step = f"{command('fix-hub', repo, '--create-pr')}  # proposes the repair"
    terminal.result(result.to_json(), _fix_lines(result), step)


def _fix_lines(result: FixedHub) -> Iterator[str]:
    yield from (line for change in result.report.repaired.changes for line in wrap(f"  {change}"))
    if not result.due:
        yield f"{result.repo}: the stamp is right for target {result.report.target}, nothing to change"
    elif result.url is None:
        yield f"{result.repo}: {len(result.report.repaired.changes)} fields to change"
    else:
        yield result.url


def convert(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A .toml file, or the name of one that comes along.", show_default=False)],
    work: Annotated[Path | None, typer.Option(metavar="DIR", help="Where everything goes; else a folder of its name.")] = None,
    source: Annotated[
        str | None, typer.Option(metavar="SRC", help="A folder or org/name@commit, for a recipe that names none.", show_default=False)
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what an earlier run left in DIR.")] = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a whole chain from a recipe. Download, repack, encode-shared, verify, push; repeat it to resume."""
    from r7convert.address import locate
    from r7convert.convert import convert as run
    from r7convert.recipe import find_recipe, read_recipe

    terminal = _terminal(as_json, quiet, verbose)
    path = find_recipe(recipe)
    given = locate(source) if source is not None else None
    place = work if work is not None else Path(path.stem)
    done = run(read_recipe(path), place, source=given, restart=restart, dry_run=dry_run, progress=terminal.progress())
    step = AGAIN if dry_run else f"look at {done.url}" if done.url else f"{command('report', done.output)}  # how to serve it"
    terminal.result(done.to_json(), _convert_lines(done), step)


def _convert_lines(done: Converted) -> Iterator[str]:
    yield done.title
    for name, said in done.stages.items():
        yield from wrap(f"  {name}: {', '.join(_fact(key, value) for key, value in (said or {}).items())}".rstrip(": "))
    if done.dry_run:
        yield "nothing was touched"
    else:
        yield done.url or str(done.output)


def _fact(key: str, value: object) -> str:
    """What a stage of a chain noted, with its unit. verify's part "bytes" has a state and no size."""
    if isinstance(value, (int, float)) and key.endswith("bytes"):
        return f"{key} {in_bytes(value)}"
    if isinstance(value, (int, float)) and key == "seconds":
        return in_time(value)
    return f"{key} {value}"


# ---- arguments --------------------------------------------------------------------------------------------------------


def _repo(text: str) -> Repo:
    from r7convert.address import parse_repo

    return parse_repo(text)


def _terminal(as_json: bool, quiet: bool, verbose: bool, *, client_bars: bool = False) -> Terminal:
    """With `client_bars` the Hub's client draws, where there is a terminal to draw on: only it sees an upload's bytes."""
    from r7convert.hub import tame_client

    bars = client_bars and sys.stderr.isatty() and wants_bars() and not quiet
    tame_client(quiet=quiet, bars=bars)
    return Terminal(as_json=as_json, quiet=quiet, verbose=verbose, bars=wants_bars() and not bars)


COMMANDS: tuple[Callable[..., None], ...] = (download, push, fix_hub, convert)
