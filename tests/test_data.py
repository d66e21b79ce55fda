from __future__ import annotations

from pathlib import Path

import pytest

from r7convert.data import data_dir
from r7convert.errors import ResourceError


def test_the_checkouts_own_folders() -> None:
    assert (data_dir("kernels") / "trellis.cuh").is_file()
    assert data_dir("recipes").is_dir()


def layout(root: Path, *folders: str) -> Path:
    for folder in folders:
        (root / folder).mkdir(parents=True)
    return root / "r7convert"


def test_installed_copy_comes_first(tmp_path: Path) -> None:
    package = layout(tmp_path, "r7convert/_data/kernels", "kernels")
    (tmp_path / "pyproject.toml").write_text("")
    assert data_dir("kernels", package=package) == package / "_data" / "kernels"


def test_a_neighbour_counts_only_in_a_checkout(tmp_path: Path) -> None:
    package = layout(tmp_path, "r7convert", "kernels")
    with pytest.raises(ResourceError, match="_data/kernels"):
        data_dir("kernels", package=package)
    (tmp_path / "pyproject.toml").write_text("")
    assert data_dir("kernels", package=package) == tmp_path / "kernels"
