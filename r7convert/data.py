"""Where the files that are not Python stand: kernels/ and recipes/, in a wheel and in a checkout."""

from __future__ import annotations

from pathlib import Path

from r7convert.errors import ResourceError, complain

_PACKAGE = Path(__file__).resolve().parent


def data_dir(name: str, *, package: Path = _PACKAGE) -> Path:
    """The folder `name` ("kernels", "recipes") of this installation.

    A wheel carries it as r7convert/_data/NAME. A checkout has it beside the package, and is a checkout only if
    pyproject.toml stands there: beside an installed package, in site-packages, a folder called `kernels` would be
    somebody else's.

    Raises:  ResourceError if neither is there.
    """
    installed = package / "_data" / name
    if installed.is_dir():
        return installed
    root = package.parent
    if (root / "pyproject.toml").is_file() and (root / name).is_dir():
        return root / name
    raise ResourceError(complain(installed, "data folder is missing", do="Reinstall r7convert."))
