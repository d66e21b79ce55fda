"""The import graph of r7convert points one way: a module imports lower levels only (DESIGN.md, "The tree")."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "r7convert"
MAX_LINES = 400

LEVELS = {
    "errors": 0,
    "families": 0,
    "progress": 0,
    "units": 0,
    "address": 1,
    "format": 1,
    "whole_file": 1,
    "findings": 1,
    "data": 1,
    "trellis": 1,
    "team": 1,
    "experts": 2,
    "slab_layout": 2,
    "stamp": 2,
    "store": 2,
    "codec": 2,
    "nvrtc": 2,
    "ktable": 2,
    "knapsack": 2,
    "geometry": 2,
    "kinds": 3,
    "signs": 3,
    "moves": 3,
    "journal": 3,
    "source": 3,
    "hub": 3,
    "sidecars": 3,
    "vectors": 4,
    "cpu": 3,
    "policy": 3,
    "slabs": 3,
    "evidence": 3,
    "branch": 4,
    "checkpoint": 4,
    "source_files": 4,
    "kernels": 4,
    "moe": 4,
    "linear": 4,
    "product": 3,
    "sample_shape": 3,
    "sample_tensors": 4,
    "sample_config": 5,
    "verdict": 4,
    "seal": 4,
    "contract_config": 4,
    "contract_layers": 4,
    "contract_slabs": 4,
    "contract_values": 4,
    "verify_bytes": 4,
    "verify_claims": 5,
    "verify_errors": 4,
    "verify_files": 4,
    "contract": 5,
    "card": 5,
    "facts": 4,
    "carry": 5,
    "recipe": 5,
    "rules": 5,
    "targets": 5,
    "download": 5,
    "devices": 5,
    "shared_plan": 5,
    "verify_layer": 5,
    "verify_numbers": 6,
    "push": 6,
    "plan": 6,
    "copying": 6,
    "originals": 5,
    "mixed_k": 6,
    "recode": 6,
    "shared_layer": 6,
    "sample": 6,
    "restamp": 6,
    "verify": 7,
    "remote": 6,
    "fetcher": 6,
    "env": 6,
    "shared_output": 7,
    "fix_hub": 7,
    "inspect": 7,
    "repack_run": 7,
    "repack": 8,
    "encode_shared": 8,
    "report": 8,
    "report_html": 9,
    "report_png": 9,
    "stream": 9,
    "terminal": 8,
    "cli_options": 8,
    "convert": 10,
    "cli_local": 11,
    "cli_convert": 11,
    "cli_hub": 12,
    "cli": 13,
    "__init__": 14,
    "__main__": 14,
    "cli_encode": 11,
    "cli_report": 10,
}


def internal_imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level == 1:
                module = f"r7convert.{module}" if module else "r7convert"
            if module == "r7convert":
                found |= {alias.name for alias in node.names if (PACKAGE / f"{alias.name}.py").exists()}
            elif module.startswith("r7convert."):
                found.add(module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("r7convert.")}
    return found


def test_modules_import_lower_levels_only() -> None:
    modules = sorted(PACKAGE.glob("*.py"))
    assert {path.stem for path in modules} == set(LEVELS), "the level table and the package differ"
    for path in modules:
        level = LEVELS[path.stem]
        for imported in internal_imports(path):
            assert LEVELS[imported] < level, f"{path.stem} (level {level}) imports {imported} (level {LEVELS[imported]})"


def test_judges_share_no_code_with_writers() -> None:
    """What a judge imports, directly or not, is the format, the disk and data: never what read the source or planned the output."""
    imports = {path.stem: internal_imports(path) for path in PACKAGE.glob("*.py")}
    writers = {"experts", "signs", "kinds", "checkpoint", "moves", "rules", "targets", "plan", "copying", "carry", "vectors", "repack_run"}
    judges = [name for name in imports if name.startswith("contract") or name in ("evidence", "findings", "seal", "verdict")]
    assert writers <= set(imports)
    assert len(judges) >= 9
    for judge in judges:
        reached, ahead = set[str](), {judge}
        while ahead:
            reached |= ahead
            ahead = {found for name in ahead for found in imports[name]} - reached
        assert not reached & writers, f"{judge} reaches {sorted(reached & writers)}"


def test_no_module_is_an_attic() -> None:
    for path in PACKAGE.glob("*.py"):
        assert len(path.read_text().splitlines()) <= MAX_LINES, f"{path.name} has grown past {MAX_LINES} lines: split it by meaning"
