"""The report: its numbers against files counted here, its page against hostile names, its pictures looked at."""

from __future__ import annotations

import builtins
import json
import re
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from typer.testing import CliRunner

from r7convert.checkpoint import read_checkpoint
from r7convert.cli import app
from r7convert.errors import FormatError, ResourceError, UsageError
from r7convert.facts import READERS, error_steps, serve_command
from r7convert.format import PROJECTIONS
from r7convert.inspect import inspect
from r7convert.journal import MANIFEST, VERDICT, parse_manifest, read_manifest, write_manifest
from r7convert.repack import repack
from r7convert.report import Judged, Judgement, Report, report
from r7convert.report_html import render_census, render_html
from r7convert.sample import write_sample
from r7convert.verdict import write_verdict
from r7convert.verify import verify
from tests.browser import find_browser, shoot
from tests.outputs import OUTPUTS, SMALLEST, Made
from tests.sealed import judge, write_sealed

EVIL = "<img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "br", "img"}


@pytest.fixture(scope="module")
def lifted(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Experts that mix K, lifted: matrices encoded anew, each with an error in the manifest."""
    folder = tmp_path_factory.mktemp("lifted")
    write_sample(folder / "source", **SMALLEST, mode="mixed", seed=3)
    repack(folder / "source", folder / "output", target="rank-sliced", tp=1, mixed_k="lift", device="cpu")
    made = Made(folder / "source", folder / "output")
    write_verdict(made.output, made.judge())
    return made


@pytest.fixture(scope="module")
def described(lifted: Made) -> Report:
    return report(lifted.output)


def counted(folder: Path) -> dict[tuple[int, str], Counter[int]]:
    """K of every routed expert matrix by layer and projection, from the official reader and a pattern of this test's own."""
    found: dict[tuple[int, str, str], int] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118
                if m := re.search(r"layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+_proj)(?:\.rank\d+)?\.trellis$", name):
                    found[int(m[1]), m[3], m[2]] = reader.get_slice(name).get_shape()[2] // 16
    census: dict[tuple[int, str], Counter[int]] = {}
    for (layer, proj, _), k in found.items():
        census.setdefault((layer, proj), Counter())[k] += 1
    return census


@pytest.mark.parametrize("name", OUTPUTS)
def test_census_and_bytes_are_those_of_the_files(make: Callable[[str], Made], name: str, tmp_path: Path) -> None:
    shared = make(name)  # another test may have left its verdict there
    made = Made(shared.source, tmp_path / "output")
    shutil.copytree(shared.output, made.output, ignore=shutil.ignore_patterns(VERDICT))
    found = report(made.output)
    census = {
        (layer, proj): Counter(row[at] for row in rows) for layer, rows in found.census.items() for at, proj in enumerate(PROJECTIONS)
    }
    assert census == counted(made.output)
    assert len(census) >= 6
    assert {row.name: row.after for row in found.bytes_by_class if row.after} == dict(inspect(read_checkpoint(made.output)).bytes_by_class)
    assert {row.name: row.before for row in found.bytes_by_class if row.before} == dict(
        inspect(read_checkpoint(made.source)).bytes_by_class
    )
    assert found.steps == found.errors == ()
    assert found.verdict.state == "not verified"
    assert "Nothing: no weight was decoded or encoded again." in render_html(found)


def test_a_lifted_folder_says_what_it_cost(lifted: Made, described: Report) -> None:
    stated = json.loads((lifted.output / MANIFEST).read_text())["reencoded"]
    assert sum(step.matrices for step in described.steps) == sum(row.matrices for row in described.errors) == len(stated) > 0
    for row in described.errors:
        own = [f["relative_error"] for name, f in stated.items() if f".{row.layer}.mlp.experts." in name and name.endswith(row.proj)]
        assert (row.matrices, row.worst) == (len(own), max(own))
        assert row.mean == pytest.approx(sum(own) / len(own))
    before = {row.name: row.before for row in described.bytes_by_class}
    assert before == dict(inspect(read_checkpoint(lifted.source)).bytes_by_class)
    trellis = next(row for row in described.bytes_by_class if row.name == "routed experts: trellis")
    assert trellis.before is not None
    assert trellis.after > trellis.before
    assert described.verdict.state == "ok"
    assert '<span class="badge ok">verified: seal, contract, bytes, numbers</span>' in render_html(described)
    assert [part.name for part in described.verdict.parts] == ["seal", "contract", "bytes", "numbers"]
    assert described.serve == "vllm serve output --tensor-parallel-size 1"


def test_encoded_shared_experts_dropped_tensors_and_a_manifest_that_does_not_fit(lifted: Made, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(lifted.output, out)
    manifest = read_manifest(out)
    shared = {f"model.layers.1.mlp.shared_experts.{proj}": {"from": "bfloat16", "bits": 6, "relative_error": 3e-4} for proj in PROJECTIONS}
    accounting = manifest.facts["accounting"] | {"dropped": {"tensors": 2, "bytes": 77}}
    write_manifest(out, replace(manifest, facts=manifest.facts | {"encoded": shared, "accounting": accounting}))
    found = report(out)
    assert [(row.proj, row.bits, row.relative_error) for row in found.shared] == [(proj, 6, 3e-4) for proj in PROJECTIONS]
    assert found.bytes_by_class[-1].name == "left out by request"
    assert found.bytes_by_class[-1].before == 77
    assert found.verdict.state == "not verified"  # the verdict there judged another manifest
    assert "Shared experts: 3 matrices encoded" in render_html(found)

    write_manifest(out, replace(manifest, facts=manifest.facts | {"accounting": {"kept": {"tensors": 1, "bytes": 5}}}))
    assert report(out).bytes_before is None
    assert "not stated" in render_html(report(out))


def test_facts_of_any_shape_are_survived(lifted: Made, tmp_path: Path) -> None:
    value = json.loads((lifted.output / MANIFEST).read_text())
    wrong: list[Any] = [
        None,
        True,
        3,
        "x",
        [],
        [1],
        {},
        {"a": {"relative_error": 10**400}},
        {"a": {"relative_error": True, "tensors": "x"}},
    ]
    for key in ("target", "tp", "reader", "source", "accounting", "reencoded", "encoded"):
        for bad in wrong:
            manifest = parse_manifest(value | {key: bad})
            out = tmp_path / "out"
            if not out.exists():
                shutil.copytree(lifted.output, out)
            write_manifest(out, manifest)
            if key in ("accounting", "encoded"):
                assert render_html(report(out))
            assert isinstance(error_steps(manifest.facts), list)
            assert serve_command(manifest.facts, "m", layer=3, is_repo=False)


def test_unsealed_is_refused_by_name_and_unjudged_is_said(tmp_path: Path) -> None:
    write_sample(tmp_path / "plain", **SMALLEST)
    with pytest.raises(FormatError, match=r"plain: no MANIFEST\.json: this folder is not sealed"):
        report(tmp_path / "plain")
    out = write_sealed(tmp_path / "out")
    assert report(out).verdict.state == "ok"
    (out / VERDICT).unlink()
    assert report(out).verdict == Judgement("not verified", "no VERDICT.json: nobody judged this folder", ())
    assert '<span class="badge none">not verified</span>' in render_html(report(out))
    judge(out, failed=True)
    page = render_html(report(out))
    assert report(out).verdict.state == "failed"
    assert "FAILED: tensor: shape" in page
    assert ">verified" not in page


def test_a_part_of_a_checkpoint_is_refused_by_name(lifted: Made, tmp_path: Path) -> None:
    repack(lifted.source, tmp_path / "part", target="slabs", tp=1, layers=(1, 1))
    with pytest.raises(UsageError, match=r"part: a part of a checkpoint: expected all layers, got .*open_slabs"):
        report(tmp_path / "part")


# ---- the page ---------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Balance and names of tags, and every attribute that could fetch or run something."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.suspects: list[tuple[str, str | None]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.suspects += [(k, v) for k, v in attrs if k in ("src", "href", "xlink:href", "action", "data") or k.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(described: Report, tmp_path: Path) -> None:
    page = render_html(described)
    seen = Reader(page)
    assert seen.open == []
    assert seen.suspects == []
    assert seen.tags["svg"] >= 12
    assert seen.tags["table"] >= 6
    assert not {"script", "img", "link", "iframe", "object", "base"} & set(seen.tags)
    assert not re.search(r"https?:|//|url\(|@import", page)
    assert "prefers-color-scheme:dark" in page
    assert str(tmp_path.parent) not in page
    assert len(re.findall(r"<h2>", page)) == 6


def test_the_drawing_shows_every_expert(described: Report) -> None:
    """The areas of the boxes in the K map add up to the census."""
    maps = re.findall(r'<svg [^>]*aria-label="K of every expert[^>]*>(.*?)</svg>', render_html(described))
    assert len(maps) == 3
    for at, drawn in enumerate(maps):
        areas = {
            int(k): sum(int(high) for high in re.findall(r"h1v(\d+)h-1z", path))
            for k, path in re.findall(r'<path class="k(\d)" d="([^"]*)"/>', drawn)
        }
        assert areas == Counter(row[at] for rows in described.census.values() for row in rows)


def test_hostile_words_stay_words(described: Report) -> None:
    evil_part = Judged(EVIL, EVIL, EVIL, ((EVIL, EVIL),))
    steps = tuple(replace(step, step=EVIL, name=EVIL) for step in described.steps)
    targets = tuple(replace(answer, target=EVIL, why=EVIL, cost=EVIL) for answer in described.targets)
    words = dict.fromkeys(("name", "tool", "target", "reader", "loads", "serve"), EVIL)
    rows = tuple(replace(row, name=EVIL) for row in described.bytes_by_class)
    harmed = replace(
        described,
        **words,  # type: ignore[arg-type]
        steps=steps,
        targets=targets,
        bytes_by_class=rows,
        accounting={EVIL: 1},
        verdict=Judgement(EVIL, EVIL, (evil_part,)),
    )
    page = render_html(harmed)
    assert page.count("&lt;img src=x onerror=alert(1)&gt;") >= 15
    assert "<img" not in page + render_census(EVIL, described.census)
    seen = Reader(page)
    assert seen.tags["img"] == 0
    assert seen.suspects == []


@pytest.mark.parametrize("target", READERS)
def test_a_folders_name_cannot_leave_the_serve_command(target: str) -> None:
    import ast
    import shlex

    name = "a b';$(reboot)\"\\"
    command = serve_command({"target": target, "tp": 2}, name, layer=3, is_repo=False)
    words = shlex.split(command)
    assert words[0] in ("vllm", "python")
    if words[0] == "vllm":
        assert words[2] == name
    else:
        assert name in [node.value for node in ast.walk(ast.parse(words[2])) if isinstance(node, ast.Constant)]
        assert len(words) == 3


def test_same_folder_same_bytes_in_another_place(lifted: Made, described: Report, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "output"
    shutil.copytree(lifted.output, copy)
    assert render_html(report(copy)) == render_html(described)
    assert json.dumps(report(copy).to_json()) == json.dumps(described.to_json())


# ---- commands ---------------------------------------------------------------------------------------------------------


def png_size(path: Path) -> tuple[int, int]:
    raw = path.read_bytes()
    assert raw.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", raw[16:24])
    return width, height


def test_the_command_writes_page_pictures_and_json(lifted: Made, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page, pictures = tmp_path / "deep" / "report.html", tmp_path / "png"
    done = CliRunner().invoke(app, ["report", str(lifted.output), "--html", str(page), "--png", str(pictures), "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert made == json.loads(json.dumps(report(lifted.output).to_json()))
    assert made["format"] == "r7convert-report-v1"
    assert str(lifted.output.parent) not in done.stdout
    assert page.read_text() == render_html(report(lifted.output))
    assert sorted(path.name for path in pictures.iterdir()) == ["bytes.png", "census.png", "errors.png"]
    from matplotlib.image import imread

    for path in pictures.iterdir():
        assert min(png_size(path)) >= 300
        assert len({tuple(pixel) for pixel in imread(path)[::4, ::4].reshape(-1, 4).tolist()}) >= 3, f"{path.name} is blank"
    first = (pictures / "census.png").read_bytes()
    assert CliRunner().invoke(app, ["report", str(lifted.output), "--png", str(pictures), "-q"]).exit_code == 0
    assert (pictures / "census.png").read_bytes() == first


def test_the_terminal_report_fits_80_columns(lifted: Made) -> None:
    done = CliRunner().invoke(app, ["report", str(lifted.output)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "verdict: ok" in lines
    assert lines[-1] == "  vllm serve output --tensor-parallel-size 1"


def test_a_page_inside_the_folder_would_break_its_seal(lifted: Made) -> None:
    done = CliRunner().invoke(app, ["report", str(lifted.output), "--html", str(lifted.output / "report.html")])
    assert isinstance(done.exception, UsageError)
    assert not (lifted.output / "report.html").exists()
    assert verify(lifted.output, source=lifted.source, threads=1).ok


def test_without_matplotlib_the_extra_is_named(lifted: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really_import = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return really_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    done = CliRunner().invoke(app, ["report", str(lifted.output), "--png", str(tmp_path / "png")])
    assert isinstance(done.exception, ResourceError)
    assert 'pip install "r7convert[plot]"' in str(done.exception)
    assert not (tmp_path / "png").exists()


def test_inspect_draws_the_census_of_a_source(lifted: Made, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(lifted.source), "--plot", str(tmp_path / "k.html")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "k.html").read_text()
    assert Reader(page).tags["path"] >= 6
    assert str(lifted.source.parent) not in page
    pytest.importorskip("matplotlib")
    assert CliRunner().invoke(app, ["inspect", str(lifted.source), "--plot", str(tmp_path / "k.png")]).exit_code == 0
    assert min(png_size(tmp_path / "k.png")) >= 300
    assert isinstance(CliRunner().invoke(app, ["inspect", str(lifted.source), "--plot", "k.gif"]).exception, UsageError)


# ---- looked at ----------------------------------------------------------------------------------------------------------


def test_chromium_shows_it_in_light_dark_and_on_a_phone(described: Report, tmp_path: Path) -> None:
    """Ground and ink follow the scheme, and nothing sticks out of a screen 390 pixels wide."""
    find_browser()
    imread = pytest.importorskip("matplotlib.image").imread
    page = tmp_path / "report.html"
    # Twice as wide a screen: what sticks out of the page's 390 pixels is seen in the other half.
    frame = '<body style="margin:0;background:#f0f"><iframe src="report.html" scrolling="no" style="border:0;width:390px;height:1500px">'
    page.write_text(render_html(described))
    (tmp_path / "phone.html").write_text(frame)
    for name, dark, width in (("report", False, 1000), ("report", True, 1000), ("phone", False, 780)):
        shot = tmp_path / f"{name}-{dark}.png"
        shoot(tmp_path / f"{name}.html", shot, width=width, height=1500, dark=dark)
        pixels = imread(shot)[:, :, :3]
        ground = float(pixels[4, 4].mean())
        assert (ground < 0.15) if dark else (ground > 0.9)
        assert len({tuple(pixel) for pixel in pixels[::5, :390:5].reshape(-1, 3).tolist()}) > 20
        if name == "phone":
            # Past the cards' right edge there is ground alone.
            edge = pixels[:, 384:389].reshape(-1, 3)
            assert float(abs(edge - pixels[4, 4]).max()) < 0.02
