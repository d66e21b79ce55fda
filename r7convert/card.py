"""The model card: what a conversion is, what it keeps, what it cost, how it was checked, and how to serve it.

Rendered from the manifest, the verdict and the payload's K alone, so that it says nothing the folder does not. Metadata and
body of the source's README stay: the metadata is completed, the body stands below the card.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from r7convert.facts import (
    Census,
    command_line,
    count_k,
    error_steps,
    matrix_figures,
    mean_of,
    serve_command,
    source_repo,
    tensor_counts,
    who_loads,
)
from r7convert.format import PROJECTIONS
from r7convert.journal import Manifest

Json = Any
CARD = "README.md"
LICENCE = "LICENSE"
BEGIN, END = "<!-- r7convert: begin -->", "<!-- r7convert: end -->"
PROJECT_TAGS = ("exl3", "trellis", "r7convert")
_FRONT = re.compile(r"\A\s*---\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|\Z)", re.DOTALL)
_BARS = " ▁▂▃▄▅▆▇█"

_LOSSLESS = {
    "kept": "carried over byte for byte",
    "sliced": "cut or copied into ranks, every byte kept",
    "joined": "ranks put together again, every byte kept",
    "spread": "copied to every expert, every byte kept",
    "gathered": "the same for all experts, so kept once a layer",
    "lifted": "re-encoded at a higher K, so that an expert has one K",
    "lowered": "re-encoded at a lower K, so that an expert has one K",
    "encoded": "encoded from 16-bit weights to EXL3",
    "dropped": "left out by request",
}


def render_card(repo: str, manifest: Manifest, verdict: Json, before: str, census: Census) -> str:
    """README.md for `repo`, from what its folder states. `before` is the README it replaces, ours or the source's.

    Source:  the same card for the same folder: no dates, no machine.
    """
    metadata, body = _split(before)
    facts = manifest.facts
    target = str(facts.get("target", ""))
    base = source_repo(facts)
    loads, serve = who_loads(facts), serve_command(facts, repo, layer=min(census, default=0), is_repo=True)
    parts = [
        _front_matter(metadata, base, target, has_licence=LICENCE in manifest.files),
        BEGIN,
        f"# {repo.split('/')[-1]}",
        _opening(manifest, base),
        f"## Serve\n\nLoads in {loads}.\n\n```\n{serve}\n```",
        "## What was kept, and what was not\n\n" + _accounting(facts),
    ]
    if census:
        parts.append("## Bits a weight\n\n" + _census(census))
    parts += ["## Verified\n\n" + _verification(verdict), "## Limits\n\n" + _limits(facts, verdict), END]
    if body.strip():
        parts.append("---\n\n" + body.strip())
    return "\n\n".join(parts) + "\n"


# ---- metadata -----------------------------------------------------------------------------------------------------------


def _split(readme: str) -> tuple[dict[str, Json], str]:
    """Metadata and body of a README, without a card of ours that it may hold. Broken metadata is left to the reader as text."""
    import yaml

    metadata: dict[str, Json] = {}
    if match := _FRONT.match(readme):
        try:
            parsed = yaml.safe_load(match[1])
        except (yaml.YAMLError, ValueError, RecursionError):  # a date of month 99 is a ValueError
            parsed = None
        if isinstance(parsed, dict):
            metadata, readme = parsed, readme[match.end() :]
    begin, end = readme.find(BEGIN), readme.rfind(END)
    if 0 <= begin < end:
        below = readme[end + len(END) :].lstrip()
        readme = readme[:begin] + below.removeprefix("---")
    return metadata, readme


def _front_matter(metadata: Mapping[str, Json], base: str | None, target: str, *, has_licence: bool) -> str:
    """The source's own metadata (licence, language, pipeline), completed with where this comes from."""
    import yaml

    made = dict(metadata)
    if "license" not in made and has_licence:
        made |= {"license": "other", "license_link": LICENCE}
    if base is not None:
        made["base_model"] = base
    if made.get("base_model"):
        made["base_model_relation"] = "quantized"
    named = made.get("tags")
    tags = [tag for tag in (named if isinstance(named, list) else [named]) if isinstance(tag, str)]
    made["tags"] = [*tags, *(tag for tag in (*PROJECT_TAGS, target) if tag and tag not in tags)]
    return f"---\n{yaml.safe_dump(made, sort_keys=False, allow_unicode=True).strip()}\n---"


# ---- sections -----------------------------------------------------------------------------------------------------------


def _opening(manifest: Manifest, base: str | None) -> str:
    facts = manifest.facts
    commit = facts["source"].get("commit") if base is not None else None
    origin = f"[{base}](https://huggingface.co/{base})" if base else "an EXL3 checkpoint"
    at = f" at commit `{commit}`" if commit else ""
    lines = [f"Converted from {origin}{at} by {manifest.tool}, offline and once, for the `{facts.get('target')}` target."]
    lines.append(f"\n```\n{command_line(facts)}\n```")
    return "\n".join(lines)


def _accounting(facts: Mapping[str, Json]) -> str:
    counts = tensor_counts(facts)
    if not counts:
        return "The manifest states no accounting."
    rows = [f"| {kind} | {count:,} | {_LOSSLESS.get(kind, '')} |" for kind, count in counts.items()]
    table = "\n".join(
        ["| source tensors | count | |", "|---|---:|---|", *rows, f"| **sum** | **{sum(counts.values()):,}** | every one, once |"]
    )
    touched = sum(counts.get(kind, 0) for kind in ("lifted", "lowered", "encoded"))
    if not touched:
        return f"{table}\n\nLossless: no weight was decoded or encoded again."
    words = f"{touched:,} tensors were encoded anew; all others are bit for bit the source's."
    return "\n\n".join(text for text in (table, words, _error_table(facts), _against_originals(facts)) if text)


def _error_table(facts: Mapping[str, Json]) -> str:
    """Relative squared error of what was encoded anew, against what it came from, by the step of K."""
    rows = [f"| {s.step} | {s.matrices:,} | {s.mean:.3g} | {s.worst:.3g} (`{s.name}`) |" for s in error_steps(facts)]
    if not rows:
        return ""
    return "\n".join(["| step | matrices | mean relative squared error | worst |", "|---|---:|---:|---|", *rows])


def _against_originals(facts: Mapping[str, Json]) -> str:
    """The same matrices against the 16-bit originals, where the encoder had them."""
    pairs = [(f["original_error_before"], f["original_error"]) for _, f in matrix_figures(facts.get("reencoded")) if "original_error" in f]
    if not pairs:
        return ""
    before, after = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    return f"Against the 16-bit originals these {len(pairs):,} matrices had a mean relative squared error of {before:.3g}; now {after:.3g}."


def _census(census: Census) -> str:
    """Counts by projection and K, and a strip with one mark a layer: the mean K of its experts."""
    values = sorted({k for rows in census.values() for row in rows for k in row})
    lines = ["| projection | " + " | ".join(f"K{k}" for k in values) + " | mean |", "|---|" + "---:|" * (len(values) + 1)]
    strips = []
    for at, proj in enumerate(PROJECTIONS):
        counts = count_k(census, at)
        lines.append(f"| {proj} | " + " | ".join(f"{counts[k]:,}" for k in values) + f" | {mean_of(counts):.2f} |")
        means = [sum(row[at] for row in rows) / len(rows) for _, rows in sorted(census.items())]
        strips.append(f"{proj:<9} {''.join(_bar(m, values) for m in means)}")
    scale = f"layers {min(census)} to {max(census)}, one mark a layer: mean K from {values[0]} ({_BARS[1]}) to {values[-1]} ({_BARS[8]})"
    return "\n".join([*lines, "", "```", *strips, scale, "```"])


def _bar(mean: float, values: Sequence[int]) -> str:
    span = values[-1] - values[0]
    return _BARS[1 + round(7 * (mean - values[0]) / span)] if span else _BARS[8]


def _verification(verdict: Json) -> str:
    rows: list[str] = []
    checks: list[str] = []
    for part in verdict["parts"]:
        scope = "; ".join(str(line) for line in part.get("scope") or [])
        if part.get("state") == "skipped":
            scope = str(part.get("why", ""))
        checks += [f"- {part['name']}: {check['name']}: {check['looked_at']}" for check in part.get("checks") or []]
        rows.append(f"| {part['name']} | {part['state']} | {scope} |".replace("\n", " "))
    seal = f"Bound to the manifest with SHA-256 `{verdict['manifest_sha256']}`; the whole verdict is in VERDICT.json."
    lines = ["| part | result | what it compared |", "|---|---|---|", *rows, "", seal]
    if checks:
        lines += ["", f"<details><summary>All {len(checks)} checks</summary>", "", *checks, "", "</details>"]
    return "\n".join(lines)


def _limits(facts: Mapping[str, Json], verdict: Json) -> str:
    lines = []
    if facts.get("target") in ("rank-sliced", "slabs"):
        lines.append(f"Made for tensor-parallel size {facts.get('tp')} and no other: another size needs another conversion of the source.")
    lines += [f"Not judged: {part['name']} ({part.get('why', '')})." for part in verdict["parts"] if part.get("state") == "skipped"]
    dropped = facts.get("dropped")
    if isinstance(dropped, list) and dropped:
        lines.append(f"{len(dropped):,} tensors were left out by request, for example `{dropped[0]}`.")
    nonfinite = facts.get("nonfinite")
    if isinstance(nonfinite, list) and nonfinite:
        lines.append(f"{len(nonfinite):,} tensors hold values that are not finite, as the source does.")
    lines.append("Whatever the source model cannot do, this one cannot either: see its card below and its licence.")
    return "\n".join(f"- {line}" for line in lines)
