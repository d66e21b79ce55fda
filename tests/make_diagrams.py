"""The diagrams of docs/format.md, drawn from the code that they explain: windows as trellis.unpack_states reads them, planes in the
order of slab_layout.plan_slabs. SVG by hand, light and dark, no fonts or scripts of anybody's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from r7convert.slab_layout import plan_slabs

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1d2733}.s{fill:#5b6673}.c{text-anchor:middle}.m{font-family:ui-monospace,monospace}"
    ".bg{fill:#fff}.box{stroke:#5b6673;fill:none}.a{fill:#bcd9f7}.b{fill:#6aa5e6}.d{fill:#f6cf9b}.e{fill:#cfe8cf}.o{fill:#e3e6ea}"
    ".l{stroke:#c2410c;stroke-width:2;fill:none}"
    "@media(prefers-color-scheme:dark){text{fill:#e6e9ed}.s{fill:#a9b3bf}.bg{fill:#14181d}.box{stroke:#a9b3bf}"
    ".a{fill:#1c3f66}.b{fill:#2565b3}.d{fill:#7a4a12}.e{fill:#23502a}.o{fill:#333b45}.l{stroke:#fb923c}}"
)


def _svg(width: int, height: int, what: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{what}">'
    return "\n".join([head, f"<title>{what}</title><style>{STYLE}</style>", _box(0, 0, width, height, "bg"), *parts, "</svg>\n"])


def _box(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{words}</text>'


# ---- a tile -----------------------------------------------------------------------------------------------------------


def draw_tile() -> str:
    """Symbols of K3 in their ring of bits, and the windows of two neighbours."""
    k, first, bit, left, top = 3, 40, 14, 40, 64
    shown = range(first - 6, first + 2)
    parts = [
        _text(left, 26, f"A tile's stream: 256 symbols of K = {k} bits, closed to a ring of {256 * k} bits"),
        _text(14, top + 19, "…", "s"),
    ]
    for nth, symbol in enumerate(shown):
        x = left + nth * k * bit
        parts += [_box(x, top, k * bit, 28, "b" if symbol == first else "a"), _box(x, top, k * bit, 28, "box")]
        parts.append(_text(x + k * bit / 2, top + 19, f"s{symbol}", "c m"))
    end = left + len(shown) * k * bit
    parts.append(_text(end + 10, top + 19, "…", "s"))
    for row, symbol in enumerate((first, first + 1)):
        stop = left + (symbol + 1 - shown[0]) * k * bit
        begin, y = stop - 16 * bit, top + 46 + 34 * row
        parts.append(f'<path class="l" d="M{begin} {y - 8}v8H{stop}v-8"/>')
        parts.append(_text(stop + 14, y + 4, f"state {symbol}: the 16 bits that end with s{symbol}"))
    parts.append(_text(left + 30, top + 124, f"two neighbours share {16 - k} bits, so symbols are chosen together", "s"))
    y = top + 176
    steps = ("state × 0xCBAC1FED", "&amp; 0x8FFF8FFF", "^ 0x3B603B60", "low + high half in float16")
    parts.append(_text(left, y - 14, "The codebook mcg, the same at every K:"))
    parts.append(_text(left, y + 10, "  →  ".join(steps), "m"))
    return _svg(760, 262, "Neighbouring weights share bits of one stream", parts)


# ---- the cut ----------------------------------------------------------------------------------------------------------


def draw_cut() -> str:
    """Which side of gate, up and down a rank owns, and which vectors go with it."""
    parts = [_text(20, 26, "tp 2: rank 1's part. What is beside a cut side is cut with it; the other vector is whole on every rank.")]
    for nth, (name, rows, columns) in enumerate((("gate", "H", "I"), ("up", "H", "I"), ("down", "I", "H"))):
        x, y, wide, high = 70 + 235 * nth, 96, 130, 110
        cut_columns = name != "down"
        parts.append(_text(x + wide / 2, y - 40, f"{name} [{rows}, {columns}]", "c"))
        half = (x + wide / 2, y, wide / 2, high) if cut_columns else (x, y + high / 2, wide, high / 2)
        parts += [_box(x, y, wide, high, "o"), _box(*half, "b"), _box(x, y, wide, high, "box")]
        beside = (x - 22, y, 12, high) if cut_columns else (x - 22, y + high / 2, 12, high / 2)
        above = (x + wide / 2, y - 22, wide / 2, 12) if cut_columns else (x, y - 22, wide, 12)
        parts += [_box(x - 22, y, 12, high, "o"), _box(*beside, "d" if cut_columns else "b"), _box(x - 22, y, 12, high, "box")]
        parts += [_box(x, y - 22, wide, 12, "o"), _box(*above, "b" if cut_columns else "d"), _box(x, y - 22, wide, 12, "box")]
        parts += [_text(x - 46, y + high / 2, "suh", "m s"), _text(x + wide + 6, y - 12, "svh", "m s")]
        parts.append(_text(x + wide / 2, y + high / 2 + 4, "trellis", "c m"))
    parts += [
        _box(70, 228, 14, 12, "b"),
        _text(92, 239, "rank 1's own"),
        _box(220, 228, 14, 12, "d"),
        _text(242, 239, "whole, on every rank"),
    ]
    return _svg(760, 256, "Gate and up are cut along their output, down along its input", parts)


# ---- a file -----------------------------------------------------------------------------------------------------------

BITS = ((3, 4, 4), (4, 4, 5), (3, 3, 4))  # gate, up and down of three experts


def draw_file() -> str:
    """The planes of a small layer in the file's order; widths by bytes."""
    layout = plan_slabs([list(row) for row in BITS], hidden=1024, inner=512)
    planes: list[tuple[str, str, float, str]] = []  # kind, label, bytes, slab
    for t, k in enumerate(layout.tiers):
        for kind, proj, ids in (("a", "gate", layout.gates[t]), ("b", "up", layout.ups[t])):
            planes += [(kind, f"{proj} {e}", k, f"w13, K{k}") for e in ids]
    for t, k in enumerate(layout.tiers):
        planes += [("d", f"down {e}", k, f"w2, K{k}") for e in layout.downs[t]]
    unit, x, y, parts = (
        16.5,
        56.0,
        94,
        [_text(16, 26, "A rank's file of one layer: three experts, K of gate, up, down " + ", ".join(map(str, BITS)))],
    )
    parts += [_text(16, 54, "a slab reader maps ranges:"), _text(16, 166, "a stock reader finds tensors, each under its name:")]
    parts += [_box(16, y, 40, 30, "o"), _box(16, y, 40, 30, "box"), _text(36, y + 20, "JSON", "c s")]
    begun: dict[str, float] = {}
    for kind, label, k, slab in planes:
        begun.setdefault(slab, x)
        parts += [_box(x, y, k * unit, 30, kind), _box(x, y, k * unit, 30, "box"), _text(x + k * unit / 2, y + 20, label, "c")]
        x += k * unit
    ends = [*list(begun.values())[1:], x]
    for (slab, start), end in zip(begun.items(), ends, strict=True):
        parts += [f'<path class="l" d="M{start + 2:g} {y - 4}v-6H{end - 2:g}v6"/>', _text((start + end) / 2, y - 14, slab, "c m")]
    for label, width in (("rotations", 74), ("vectors", 60), ("markers", 60)):
        parts += [_box(x, y, width, 30, "e"), _box(x, y, width, 30, "box"), _text(x + width / 2, y + 20, label, "c")]
        x += width
    e, t = layout.gates[0][0], layout.tiers[0]
    parts.append(_text(36, 190, f"…experts.{e}.gate_proj.rank0.trellis is the first plane of w13, K{t}", "m"))
    parts.append(_text(36, 212, "rotations: each expert's gate svh, up svh, down suh, so that [E, 3·I_r] is one range too", "s"))
    return _svg(int(x + 16), 228, "One file serves two readers", parts)


DIAGRAMS: dict[str, Callable[[], str]] = {"img/tile.svg": draw_tile, "img/cut.svg": draw_cut, "img/file.svg": draw_file}
