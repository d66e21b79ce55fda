"""What a bug report needs to say about a machine: versions, devices, room. No host, user or folder names."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from r7convert import __version__

Json = Any

PACKAGES = ("torch", "numba", "numpy", "safetensors", "huggingface_hub", "hf-xet", "typer", "cuda-core", "cuda-bindings")


def describe_env() -> dict[str, Json]:
    """Everything `r7convert env` prints. Imports torch to ask for its devices; never fails over a part that is missing."""
    return {
        "r7convert": __version__,
        "python": f"{platform.python_version()} {platform.python_implementation()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "cpu": {"count": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), "model": _cpu_model()},
        "memory_bytes": _memory_bytes(),
        "cuda": _cuda(),
        "nvrtc": _nvrtc(),
        "disk": {"here_free_bytes": _free(Path.cwd()), "temporary_free_bytes": _free(Path(tempfile.gettempdir()))},
        "caches": _caches(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or None)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _cuda() -> Json:
    try:
        import torch
    except Exception as error:  # a broken torch is what this command is there to show
        return {"error": f"torch cannot be imported: {type(error).__name__}"}
    devices = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        devices.append({"name": found.name, "compute": f"{found.major}.{found.minor}", "memory_bytes": found.total_memory})
    return {"torch_built_for": torch.version.cuda, "devices": devices}


def _nvrtc() -> str | None:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception:  # no package, or one whose library does not load: both mean there is none
        return None
    return f"{major}.{minor}"


def _free(folder: Path) -> int | None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _caches() -> Json:
    """Where caches are by the variable that says so, not by path: paths carry names."""
    from r7convert.nvrtc import cache_dir

    variables = {
        "huggingface": (("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"), "~/.cache/huggingface"),
        "kernels": (("R7CONVERT_CACHE", "XDG_CACHE_HOME"), "~/.cache/r7convert"),
    }
    found = {}
    for name, (names, default) in variables.items():
        by = next((variable for variable in names if os.environ.get(variable)), None)
        root = Path(os.environ[by]) if by else Path(default).expanduser()
        found[name] = {"where": f"set by {by}" if by else default, "free_bytes": _free(root)}
    found["kernels"]["files"] = len(list(cache_dir().glob("*"))) if cache_dir().is_dir() else 0
    return found
