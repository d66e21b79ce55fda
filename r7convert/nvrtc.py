"""The compile door: a .cu file and a symbol in, a kernel that launches on torch's stream out.

    door = load_kernel("decode.cu", "decode_tiles<6>", device=x.device)
    door.launch((tiles,), 128, x, out, tiles)

`compile_kernel` needs NVRTC and CUDA's headers but no GPU; `load_kernel` needs the GPU. Neither needs nvcc or a C++
compiler. Cubins are cached under the user's cache folder by the digest of everything that shaped them, so a cache is
never stale and may be shared between versions; it is written beside its name and renamed, so it is never half there.

The kernels' own convention, which `launch` relies on: pointers, and counts as `long long`, arrive as 64 bits; real
numbers as `float`. Offsets that scale with experts or tiles are computed in 64 bits.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from r7convert.data import data_dir
from r7convert.errors import R7Error, ResourceError, complain

if TYPE_CHECKING:
    import torch

ARCHITECTURES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120")
"""What `make kernels` compiles for. Others from sm_80 up are compiled when met."""

_DEFAULT_SHARED_BYTES = 32 * 1024  # 48 KiB is the limit, and a kernel's static tables count too
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class Cubin:
    """Machine code of one instantiation, and what ptxas says it costs."""

    code: bytes
    symbol: str
    registers: int
    spill_bytes: int
    stack_bytes: int


def compile_kernel(file: str, symbol: str, *, arch: str, defines: Mapping[str, int] | None = None) -> Cubin:
    """Compile one kernel of kernels/FILE for one architecture, or take it from the cache.

    `symbol` is a C++ name expression: a template instantiation ("decode_tiles<6>") or a plain function.

    Raises:  ResourceError without NVRTC or CUDA's headers; R7Error with the compiler's log if it refuses the source.
    """
    options = {"arch": arch, "std": "c++17", "defines": sorted((defines or {}).items())}
    source = _source(file)
    key = json.dumps([source, symbol, options, _compiler_version(), _header_dirs()])
    path = cache_dir() / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    cubin = _read_cubin(path)
    if cubin is None:
        cubin = _compile(file, source, symbol, arch, defines or {})
        _write_cubin(path, cubin)
    return cubin


class Kernel:
    """A compiled kernel, loaded, bound to one device."""

    def __init__(self, cubin: Cubin, device: torch.device) -> None:
        import torch
        from cuda.core import Device, LaunchConfig, ObjectCode

        self.cubin = cubin
        self.device = device
        Device(device.index).set_current()
        self._code = ObjectCode.from_cubin(cubin.code)
        self._kernel = self._code.get_kernel(cubin.symbol)
        self._shared_bytes = _DEFAULT_SHARED_BYTES
        has_overlap = hasattr(LaunchConfig, "programmatic_stream_serialization")  # cuda-core 1.2 on
        self._may_overlap = has_overlap and torch.cuda.get_device_capability(device) >= (9, 0)

    def launch(self, grid: int | tuple[int, ...], block: int, *args: object, shared_bytes: int = 0, overlap: bool = False) -> None:
        """Launch on torch's current stream of the device; returns at once.

        With `overlap`, blocks may be brought up while the kernel before is still ending (sm_90 on); the kernel itself waits, by
        griddepcontrol.wait, before it reads or writes global memory.

        A tensor is passed as its address, an int as 64 bits, a float as 32 bits, numpy scalars as they are. The caller keeps
        tensors alive as for any torch operation: torch's allocator hands memory on in stream order.
        """
        import torch
        from cuda.core import LaunchConfig, launch

        with torch.cuda.device(self.device):
            if shared_bytes > self._shared_bytes:
                self._allow_shared(shared_bytes)
            stream = _stream(self.device.index, torch.cuda.current_stream(self.device).cuda_stream)
            config = LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)
            if overlap and self._may_overlap:
                config = LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes, programmatic_stream_serialization=True)
            launch(stream, config, self._kernel, *(_argument(a) for a in args))

    def _allow_shared(self, shared_bytes: int) -> None:
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, self._kernel.handle, self.device.index)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise ResourceError(complain(self.cubin.symbol, "shared memory", expected=f"{shared_bytes} bytes a block", found=status.name))
        self._shared_bytes = shared_bytes


def load_kernel(file: str, symbol: str, *, device: torch.device, defines: Mapping[str, int] | None = None) -> Kernel:
    """The kernel for the device at hand, compiled at first use.

    Raises:  ResourceError if the device is older than sm_80, or cuda-core is missing.
    """
    return _load_kernel(file, symbol, _index(device), tuple(sorted((defines or {}).items())))


@cache
def _load_kernel(file: str, symbol: str, index: int, defines: tuple[tuple[str, int], ...]) -> Kernel:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    if major < 8:
        raise ResourceError(complain(f"cuda:{index}", "GPU", expected="compute capability 8.0 or later", found=f"{major}.{minor}"))
    cubin = compile_kernel(file, symbol, arch=f"sm_{major}{minor}", defines=dict(defines))
    return Kernel(cubin, torch.device("cuda", index))


def most_shared_bytes(device: torch.device) -> int:
    """Shared memory that one block may have on this device: 99 KiB on sm_89 and sm_120, 227 KiB on sm_90 and sm_100."""
    from cuda.core import Device

    return int(Device(_index(device)).properties.max_shared_memory_per_block_optin)


def cache_dir() -> Path:
    """Where cubins are kept: $R7CONVERT_CACHE, else $XDG_CACHE_HOME/r7convert, else ~/.cache/r7convert."""
    own = os.environ.get("R7CONVERT_CACHE")
    root = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "r7convert"
    return root / "cubin"


def _index(device: torch.device) -> int:
    import torch

    return torch.cuda.current_device() if device.index is None else device.index


def _source(file: str) -> dict[str, str]:
    """The file and, by name, every header of ours that it includes, directly or not."""
    folder = data_dir("kernels")
    found: dict[str, str] = {}
    wanted = [file]
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = (folder / name).read_text()
            wanted += _INCLUDE.findall(found[name])
    return found


@cache
def _compiler_version() -> tuple[int, ...]:
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:  # pathfinder's DynamicLibNotFoundError is a RuntimeError
        raise ResourceError(complain("NVRTC", f"cannot be loaded: {error}", do='Install "r7convert[cu13]" (or [cu12]).')) from error
    return int(major), int(minor)


@cache
def _header_dirs() -> tuple[str, ...]:
    """CUDA's headers: the pip package's first; crt/ from the toolkit where no pip package brings it."""
    from cuda.pathfinder import find_nvidia_header_directory

    candidates = [
        find_nvidia_header_directory("cudart"),
        *(os.environ.get(v) and os.environ[v] + "/include" for v in ("CUDA_HOME", "CUDA_PATH")),
    ]
    candidates += ["/usr/local/cuda/include"]
    chosen: list[str] = []
    missing = ["cuda_fp16.h", "crt/host_defines.h"]
    for folder in candidates:
        if folder and any((Path(folder) / header).is_file() for header in missing):
            chosen.append(folder)
            missing = [header for header in missing if not (Path(folder) / header).is_file()]
    if missing:
        raise ResourceError(complain("CUDA headers", f"{', '.join(missing)} not found", do='Install "r7convert[cu13]" (or [cu12]).'))
    return tuple(chosen)


def _compile(file: str, source: Mapping[str, str], symbol: str, arch: str, defines: Mapping[str, int]) -> Cubin:
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name=file,
        arch=arch,
        std="c++17",
        include_path=[str(data_dir("kernels")), *_header_dirs()],
        define_macro=[(name, str(value)) for name, value in sorted(defines.items())] or None,
        ptxas_options=["-v"],
    )
    log = io.StringIO()
    try:
        program = Program(source[file], "c++", options)
        code = program.compile("cubin", name_expressions=(symbol,), logs=log)
    except Exception as error:  # cuda-core raises its own NVRTCError, not exported
        raise R7Error(complain(f"kernels/{file}", f"{symbol} does not compile for {arch}") + f"\n{log.getvalue()}{error}") from error
    lowered = code.symbol_mapping[symbol]
    report = log.getvalue()
    return Cubin(
        code=bytes(code.code),
        symbol=lowered.decode() if isinstance(lowered, bytes) else lowered,
        registers=_figure(r"Used (\d+) registers", report),
        spill_bytes=_figure(r"(\d+) bytes spill stores", report),
        stack_bytes=_figure(r"(\d+) bytes stack frame", report),
    )


def _figure(pattern: str, report: str) -> int:
    """The largest figure of its kind in ptxas's report (device functions that were not inlined have their own lines)."""
    return max((int(n) for n in re.findall(pattern, report)), default=-1)


def _read_cubin(path: Path) -> Cubin | None:
    """A cached cubin: one line of JSON, then the code. None if absent or damaged."""
    try:
        head, _, code = path.read_bytes().partition(b"\n")
        fields: dict[str, Any] = json.loads(head)
        if fields.pop("sha256") != hashlib.sha256(code).hexdigest():
            return None
        return Cubin(code=code, **fields)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cubin(path: Path, cubin: Cubin) -> None:
    fields = {k: v for k, v in asdict(cubin).items() if k != "code"} | {"sha256": hashlib.sha256(cubin.code).hexdigest()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own, for several processes compile at once; not by tempfile, whose files nobody else may read.
        partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
        partial.write_bytes(json.dumps(fields).encode() + b"\n" + cubin.code)
        partial.replace(path)
    except OSError:
        pass  # a cache that cannot be written costs the next process a compilation, nothing else


class _TorchStream:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@lru_cache(maxsize=64)
def _stream(index: int, handle: int) -> Any:
    from cuda.core import Device

    device = Device(index)
    device.set_current()
    return device.create_stream(_TorchStream(handle))


def _argument(value: object) -> object:
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    if isinstance(value, float):
        import numpy

        return numpy.float32(value)
    return 0 if value is None else value
