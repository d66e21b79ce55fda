"""The report's pictures as PNGs for cards, drawn by matplotlib (extra `plot`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from r7convert.errors import ResourceError, complain
from r7convert.facts import Census
from r7convert.format import PROJECTIONS
from r7convert.report import Report
from r7convert.units import in_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {3: "#bcd9f7", 4: "#6aa5e6", 5: "#2565b3", 6: "#0d2f63"}
OTHER = "#9a6fd0"
DPI = 150


def write_pngs(report: Report, folder: Path) -> list[Path]:
    """Write census.png, bytes.png and, where matrices were encoded anew, errors.png. The same report gives the same bytes.

    Raises:  ResourceError without matplotlib or without a folder to write to.
    """
    pictures = {"bytes.png": _draw_bytes(report)}
    if report.census:
        pictures["census.png"] = draw_census(report.census)
    if report.errors:
        pictures["errors.png"] = _draw_errors(report)
    return [save_png(figure, folder / name) for name, figure in sorted(pictures.items())]


def draw_census(census: Census) -> Figure:
    """Above: K shares by layer, a panel a projection. Below: K of every expert."""
    import numpy as np

    figure = _new_figure(10, 6)
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    layers = sorted(census)
    values = sorted({k for rows in census.values() for row in rows for k in row})
    colours = [COLOURS.get(k, OTHER) for k in values]
    panels = figure.subplots(2, 3, sharex=True, height_ratios=(1, 2))
    edges = (layers[0] - 0.5, layers[-1] + 0.5)
    for at, proj in enumerate(PROJECTIONS):
        shares = np.array(
            [[sum(row[at] == k for row in census[n]) / len(census[n]) if n in census else 0 for n in _span(layers)] for k in values]
        )
        above, below = panels[0][at], panels[1][at]
        above.imshow(shares, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=(*edges, len(values) - 0.5, -0.5), interpolation="nearest")
        above.set_yticks(range(len(values)), [f"K{k}" for k in values])
        above.set_title(proj)
        experts = max(len(rows) for rows in census.values())
        grid = np.full((experts, len(_span(layers))), np.nan)
        for n, rows in census.items():
            grid[: len(rows), n - layers[0]] = [values.index(row[at]) for row in rows]
        below.imshow(
            grid, aspect="auto", cmap=ListedColormap(colours), vmin=-0.5, vmax=len(values) - 0.5,
            extent=(*edges, experts - 0.5, -0.5), interpolation="nearest",
        )  # fmt: skip
        below.set_xlabel("layer")
        below.xaxis.set_major_locator(MaxNLocator(integer=True))
        below.yaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0][0].set_ylabel("share of experts")
    panels[1][0].set_ylabel("expert")
    keys = [Patch(color=colour, label=f"K{k}") for k, colour in zip(values, colours, strict=True)]
    figure.legend(handles=keys, loc="outside upper right", ncols=len(keys), frameon=False)
    return figure


def _draw_bytes(report: Report) -> Figure:
    figure = _new_figure(8, 1 + 0.5 * max(len(report.bytes_by_class), 1))
    from matplotlib.ticker import MaxNLocator

    panel = figure.subplots()
    rows = list(reversed(report.bytes_by_class))
    at = range(len(rows))
    panel.barh([n + 0.2 for n in at], [row.before or 0 for row in rows], 0.36, color="#b5b8bd", label="before")
    panel.barh([n - 0.2 for n in at], [row.after for row in rows], 0.36, color="#2565b3", label="after")
    panel.set_yticks(list(at), [row.name for row in rows])
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.xaxis.set_major_formatter(lambda count, _: in_bytes(count))
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_errors(report: Report) -> Figure:
    figure = _new_figure(8, 3)
    from matplotlib.ticker import MaxNLocator

    panel = figure.subplots()
    for proj, colour in zip(PROJECTIONS, ("#2565b3", "#c2410c", "#15703f"), strict=True):
        rows = [row for row in report.errors if row.proj == proj]
        if rows:
            panel.plot([row.layer for row in rows], [row.mean for row in rows], ".", color=colour, markersize=8, label=proj)
    panel.set_yscale("log")
    panel.set_xlabel("layer")
    panel.set_ylabel("mean relative squared error")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    panel.spines[["top", "right"]].set_visible(False)
    return figure


def _span(layers: list[int]) -> range:
    return range(layers[0], layers[-1] + 1)


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ResourceError(complain("PNG", "matplotlib is not installed", do='Use: pip install "r7convert[plot]".')) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_png(figure: Figure, path: Path) -> Path:
    """Without matplotlib's own words, so that another version of it alone does not change the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None})
    except OSError as error:
        raise ResourceError(complain(path, "cannot write the picture", expected="a writable folder", found=error.strerror)) from None
    return path
