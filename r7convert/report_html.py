"""The report as one page: its own style, drawings as inline SVG, no script, nothing fetched. Readable in light, dark and on a phone.

Every word of a folder passes `escape`: names and verdicts come from files that anybody may have written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from r7convert.facts import Census, count_k, mean_of
from r7convert.format import PROJECTIONS, ExpertName, SharedExpertName, parse_name
from r7convert.inspect import TargetAnswer
from r7convert.report import LayerErrors, Report
from r7convert.units import in_bytes

STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--card:#fff;--ink:#1b1c1e;--soft:#62666d;--line:#e3e4e6;--cell:#eef0f2;--hot:#c2410c;
--ok:#15703f;--bad:#b42318;--none:#8a6100;--k3:#bcd9f7;--k4:#6aa5e6;--k5:#2565b3;--k6:#0d2f63;--other:#9a6fd0;--code:#f3f4f5}
@media(prefers-color-scheme:dark){:root{--bg:#131416;--card:#1b1d20;--ink:#ececee;--soft:#a0a4ab;--line:#303338;--cell:#272a2e;
--hot:#fb923c;--ok:#4cc38a;--bad:#ff7b72;--none:#e0b04a;--k3:#1f4470;--k4:#3a7cc9;--k5:#83b8f2;--k6:#dcecff;--other:#b794f6;--code:#131416}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:960px;margin:0 auto;padding:28px 16px 48px}
h1{font-size:26px;margin:0 0 4px;overflow-wrap:anywhere;line-height:1.2}h2{font-size:17px;margin:0 0 10px}
h3{font-size:13px;font-weight:600;margin:16px 0 4px}
p{margin:0 0 10px}.soft{color:var(--soft);font-size:13px}
section{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:18px 20px;margin-top:16px;overflow:hidden}
.badge{display:inline-block;border:1px solid currentColor;border-radius:99px;padding:1px 10px;font-size:13px;font-weight:600;
overflow-wrap:anywhere}
.ok{color:var(--ok)}.failed{color:var(--bad)}.none{color:var(--none)}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:12px;margin-top:16px}
.tiles div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 16px}
.tiles b{display:block;font-size:20px;font-variant-numeric:tabular-nums}.tiles span{color:var(--soft);font-size:13px}
table{border-collapse:collapse;width:100%;font-size:14px}td,th{padding:5px 12px 5px 0;text-align:left;vertical-align:top;
border-bottom:1px solid var(--line);overflow-wrap:anywhere}th{font-weight:600;color:var(--soft);font-size:13px;overflow-wrap:normal}
tr:last-child td{border-bottom:0}td:last-child,th:last-child{padding-right:0}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.w{white-space:nowrap}
pre{background:var(--code);border:1px solid var(--line);border-radius:8px;padding:10px 12px;margin:0;white-space:pre-wrap;
overflow-wrap:anywhere;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,"DejaVu Sans Mono",monospace}
svg{display:block;width:100%;background:var(--cell)}
.strip{display:grid;grid-template-columns:64px 1fr;gap:2px 8px;align-items:center;font-size:12px;color:var(--soft)}
.strip svg{height:14px}.strip .gap{grid-column:1/-1;height:4px}.axis{display:flex;justify-content:space-between}
.legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:12px;color:var(--soft);margin:8px 0}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:5px;vertical-align:-1px}
.maps{display:grid;grid-template-columns:repeat(auto-fit,minmax(240px,1fr));gap:8px 18px}.maps h3{margin:4px 0}
.k3{fill:var(--k3);background:var(--k3)}.k4{fill:var(--k4);background:var(--k4)}.k5{fill:var(--k5);background:var(--k5)}
.k6{fill:var(--k6);background:var(--k6)}.other{fill:var(--other);background:var(--other)}
.share{fill:var(--k5)}.hot{fill:var(--hot)}.was{fill:var(--soft);opacity:.45}.now{fill:var(--k4)}
details{margin-top:10px}summary{cursor:pointer;font-size:13px;color:var(--soft)}details table{margin-top:6px}
footer{color:var(--soft);font-size:12px;margin-top:20px;overflow-wrap:anywhere}
@media(max-width:520px){main{padding:18px 10px 32px}section{padding:14px 12px}td,th{padding-right:8px}table{font-size:13px}
.tiles{grid-template-columns:1fr 1fr}.tiles b{font-size:17px}}
"""
SHORT = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
VERDICT_CLASS = {"ok": "ok", "passed": "ok", "failed": "failed"}


def render_html(report: Report) -> str:
    """The whole page; the same report gives the same bytes."""
    return _page(report.name, "".join(_sections(report)))


def render_census(name: str, census: Census) -> str:
    """A page with the K census alone: what `inspect --plot` draws of a source."""
    return _page(name, f"<h1>{escape(name)}</h1>{_census(census)}")


def _page(title: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}: r7convert report</title><style>{STYLE}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def _sections(report: Report) -> Iterator[str]:
    kind = VERDICT_CLASS.get(report.verdict.state, "none")
    passed = ", ".join(part.name for part in report.verdict.parts if part.state == "passed")
    word = f"verified: {passed}" if report.verdict.state == "ok" else report.verdict.state
    shape = f"target {report.target}" + (f", tp {report.tp}" if report.tp else "") + (f", reader {report.reader}" if report.reader else "")
    yield f'<h1>{escape(report.name)}</h1><p class="soft">{escape(shape)} <span class="badge {kind}">{escape(word)}</span></p>'
    yield _tiles(report)
    yield _section("Serve", f"<p>Loads in {escape(report.loads)}.</p><pre>{escape(report.serve)}</pre>")
    yield _census(report.census)
    yield _section("Bytes, before and after", _bytes(report))
    yield _section("Encoded anew", _encoded(report))
    yield _section("Verdict", _verdict(report))
    yield _section("Targets", _targets(report.targets))
    yield (
        f"<footer>Made by {escape(report.tool)}, described from headers, MANIFEST.json and VERDICT.json; no payload was read. "
        f"SHA-256 of the manifest: {report.manifest_sha256}</footer>"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>\n"


def _tiles(report: Report) -> str:
    g, before = report.geometry, report.bytes_before
    size = in_bytes(report.bytes_after)
    grown = f"payload, {100 * (report.bytes_after / before - 1):+z.1f}% of the source's {in_bytes(before)}" if before else "payload"
    tiles = [(size, grown), (f"{len(report.census)} × {g.experts}", "layers × routed experts")]
    if report.census:
        mean = sum(mean_of(count_k(report.census, at)) for at in range(3)) / 3
        tiles.append((f"{mean:.2f}", "mean K of routed experts"))
    anew = sum(step.matrices for step in report.steps)
    tiles.append((f"{anew:,}", "matrices encoded anew" if anew else "matrices encoded anew: lossless"))
    return '<div class="tiles">' + "".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in tiles) + "</div>"


# ---- K census ---------------------------------------------------------------------------------------------------------


def _census(census: Census) -> str:
    if not census:
        return _section("Bits a weight", "<p>No EXL3 routed experts.</p>")
    values = sorted({k for rows in census.values() for row in rows for k in row})
    rows = []
    for at, proj in enumerate(PROJECTIONS):
        counts = count_k(census, at)
        rows.append([SHORT[proj], *(f"{counts[k]:,}" for k in values), f"{mean_of(counts):.2f}"])
    body = _table(["", *(f"K{k}" for k in values), "mean K"], rows, numbers=range(1, len(values) + 2))
    body += '<h3>Share of each K, by layer</h3><p class="soft">The stronger a cell, the more of the layer\'s experts.</p>'
    layers = sorted(census)
    strips = []
    for at, proj in enumerate(PROJECTIONS):
        strips += ['<span class="gap"></span>'] if at else []
        for k in values:
            shares = [sum(row[at] == k for row in census[layer]) / len(census[layer]) for layer in layers]
            titles = [f"layer {layer}, {SHORT[proj]} K{k}: {share:.0%}" for layer, share in zip(layers, shares, strict=True)]
            strips.append(f"<span>{SHORT[proj]} K{k}</span>{_strip(shares, titles, 'share')}")
    body += _strips(strips, layers)
    body += "<h3>K of every expert</h3>" + _legend(values)
    maps = "".join(f"<div><h3>{SHORT[proj]}</h3>{_expert_map(census, at)}{_axis(layers)}</div>" for at, proj in enumerate(PROJECTIONS))
    body += f'<div class="maps">{maps}</div><p class="soft">Layers from left to right, experts from top to bottom.</p>'
    return _section("Bits a weight", body)


def _expert_map(census: Census, at: int) -> str:
    """One path a K, with a run of equal neighbours as one box: a model of 75 x 256 experts stays under 300 kB a projection."""
    layers = sorted(census)
    height = max(len(census[layer]) for layer in layers)
    paths: dict[int, list[str]] = {}
    for x, layer in enumerate(layers):
        column = [row[at] for row in census[layer]]
        start = 0
        for y in range(1, len(column) + 1):
            if y == len(column) or column[y] != column[start]:
                paths.setdefault(column[start], []).append(f"M{x} {start}h1v{y - start}h-1z")
                start = y
    drawn = "".join(f'<path class="{_k_class(k)}" d="{"".join(path)}"/>' for k, path in sorted(paths.items()))
    pixels = min(max(height * 14, 84), 260)
    return _svg(len(layers), height, drawn, f"K of every expert, {height} experts in {len(layers)} layers", pixels)


def _k_class(k: int) -> str:
    return f"k{k}" if 3 <= k <= 6 else "other"


def _legend(values: Sequence[int]) -> str:
    return '<p class="legend">' + "".join(f'<span><i class="{_k_class(k)}"></i>K{k}</span>' for k in values) + "</p>"


# ---- drawing ----------------------------------------------------------------------------------------------------------


def _svg(width: int, height: float, inner: str, label: str, pixels: int | None = None) -> str:
    style = f' style="height:{pixels}px"' if pixels else ""
    return (
        f'<svg viewBox="0 0 {width} {height}" preserveAspectRatio="none" shape-rendering="crispEdges" role="img" '
        f'aria-label="{escape(label)}"{style}>{inner}</svg>'
    )


def _strip(shares: Sequence[float | None], titles: Sequence[str], kind: str) -> str:
    """A row of a heat map: a cell a layer, its ink as strong as the share; None leaves the ground."""
    cells = [
        f'<rect class="{kind}" x="{x}" width="1" height="1" opacity="{share:.2f}"><title>{escape(title)}</title></rect>'
        for x, (share, title) in enumerate(zip(shares, titles, strict=True))
        if share
    ]
    return _svg(len(shares), 1, "".join(cells), "; ".join(titles) if len(titles) <= 4 else f"{titles[0]} ... {titles[-1]}")


def _strips(strips: Iterable[str], layers: Sequence[int]) -> str:
    return f'<div class="strip">{"".join(strips)}<span>layer</span>{_axis(layers)}</div>'


def _axis(layers: Sequence[int]) -> str:
    ends = (layers[0], layers[-1]) if len(layers) > 1 else (layers[0],)
    return '<div class="axis soft">' + "".join(f"<span>{n}</span>" for n in ends) + "</div>"


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = (), whole: Sequence[int] = ()) -> str:
    """Cells are text, and escaped here; `numbers` are columns set flush right, `whole` columns that never wrap."""

    kinds = dict.fromkeys(numbers, ' class="n"') | dict.fromkeys(whole, ' class="w"')

    def line(tag: str, row: Sequence[str]) -> str:
        cells = (f"<{tag}{kinds.get(n, '')}>{escape(text)}</{tag}>" for n, text in enumerate(row))
        return f"<tr>{''.join(cells)}</tr>"

    return f"<table>{line('th', headers)}{''.join(line('td', row) for row in rows)}</table>"


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


# ---- the other sections -----------------------------------------------------------------------------------------------


def _bytes(report: Report) -> str:
    most = max([1, *(max(row.before or 0, row.after) for row in report.bytes_by_class)])
    rows, bars = [], []
    for row in report.bytes_by_class:
        rows.append([row.name, "not stated" if row.before is None else in_bytes(row.before), in_bytes(row.after)])
        was = f'<rect class="was" width="{1000 * row.before // most}" height="1"/>' if row.before is not None else ""
        drawn = f'{was}<rect class="now" y="1.2" width="{1000 * row.after // most}" height="1"/>'
        bars.append(f"<h3>{escape(row.name)}</h3>{_svg(1000, 2.2, drawn, row.name, 16)}")
    before = report.bytes_before
    rows.append(["all", "not stated" if before is None else in_bytes(before), in_bytes(report.bytes_after)])
    accounted = ", ".join(f"{count:,} {kind}" for kind, count in report.accounting.items())
    note = f'<p class="soft">Tensors of the source: {escape(accounted)}.</p>' if accounted else ""
    legend = '<p class="legend"><span>upper bar: before</span><span>lower bar: after</span></p>'
    return _table(["payload", "before", "after"], rows, numbers=(1, 2)) + note + legend + "".join(bars)


def _encoded(report: Report) -> str:
    if not report.steps:
        return "<p>Nothing: no weight was decoded or encoded again.</p>"
    rows = [[step.step, f"{step.matrices:,}", f"{step.mean:.3g}", f"{step.worst:.3g}", _matrix(step.name)] for step in report.steps]
    body = '<p class="soft">Relative squared error against what each matrix came from.</p>'
    body += _table(["step", "matrices", "mean", "worst", "the worst one"], rows, numbers=(1, 2, 3), whole=(0,))
    if report.errors:
        body += "<h3>Re-encoded experts: mean error by layer and projection</h3>" + _error_map(report.errors)
        errors = [[str(e.layer), SHORT[e.proj], f"{e.matrices:,}", f"{e.mean:.3g}", f"{e.worst:.3g}"] for e in report.errors]
        body += _details("The same in numbers", _table(["layer", "", "matrices", "mean", "worst"], errors, numbers=(0, 2, 3, 4)))
    if report.shared:
        shared = [[str(s.layer), SHORT[s.proj], f"K{s.bits}" if s.bits else "", f"{s.relative_error:.3g}"] for s in report.shared]
        table = _table(["layer", "", "K", "relative error"], shared, numbers=(0, 3))
        body += _details(f"Shared experts: {len(shared):,} matrices encoded", table)
    return body


def _matrix(module: str) -> str:
    """A module's name in few words, so that a phone can show it; a name of no known form as it is."""
    name = parse_name(f"{module}.trellis")
    if isinstance(name, ExpertName):
        return f"layer {name.layer}, expert {name.expert}, {SHORT[name.proj]}"
    if isinstance(name, SharedExpertName):
        return f"layer {name.layer}, shared expert, {SHORT[name.proj]}"
    return module


def _error_map(errors: Sequence[LayerErrors]) -> str:
    """Ink by the logarithm of the mean, from a tenth of the worst mean up: steps of K differ by factors of four."""
    layers = list(range(errors[0].layer, errors[-1].layer + 1))
    found = {(e.layer, e.proj): e for e in errors}
    most = max(e.mean for e in errors)

    def ink(mean: float) -> float:
        return max(0.15, 1 + 0.85 * math.log10(mean / most)) if mean > 0 < most else 0.15

    strips = []
    for proj in PROJECTIONS:
        cells = [found.get((layer, proj)) for layer in layers]
        titles = [
            f"layer {layer}, {SHORT[proj]}: " + (f"{cell.matrices} matrices, mean {cell.mean:.3g}" if cell else "as the source has it")
            for layer, cell in zip(layers, cells, strict=True)
        ]
        strips.append(f"<span>{SHORT[proj]}</span>{_strip([ink(c.mean) if c else None for c in cells], titles, 'hot')}")
    return _strips(strips, layers) + f'<p class="soft">Strongest colour: {most:.3g}. Empty: as the source has it.</p>'


def _verdict(report: Report) -> str:
    verdict = report.verdict
    kind = VERDICT_CLASS.get(verdict.state, "none")
    head = f'<p><span class="badge {kind}">{escape(verdict.state)}</span> {escape(verdict.why)}</p>'
    if not verdict.parts:
        return head
    rows = [[part.name, part.state, part.scope] for part in verdict.parts]
    checks = [[part.name, name, looked] for part in verdict.parts for name, looked in part.checks]
    table = _table(["part", "result", "what it compared"], rows, whole=(0, 1))
    return head + table + (_details(f"All {len(checks)} checks", _table(["part", "check", "looked at"], checks)) if checks else "")


def _targets(targets: Sequence[TargetAnswer]) -> str:
    rows = []
    for answer in targets:
        word = "no" if not answer.accepted else "lossless" if answer.lossless else "with loss"
        cost = f"; {answer.cost}" if answer.cost not in ("", "nothing") else ""
        size = in_bytes(answer.bytes_after) if answer.bytes_after is not None else ""
        rows.append([answer.target, word, size, answer.why + cost])
    note = '<p class="soft">What each target would make of this folder, as a source.</p>'
    return note + _table(["target", "takes it", "payload", "who reads it, or why not"], rows, numbers=(2,), whole=(0, 1))
