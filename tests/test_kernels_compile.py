"""Every kernel, every instantiation, every architecture, by NVRTC: no GPU needed (`make kernels`)."""

from __future__ import annotations

import re

import pytest

from r7convert import kernels, nvrtc
from r7convert.data import data_dir
from r7convert.errors import R7Error
from r7convert.product import DEPTH, TOKEN_BLOCKS

INSTANTIATIONS = {
    "decode.cu": [
        *(f"decode_tiles<{bits}>" for bits in range(1, 9)),
        *(f"decode_matrix<{bits}, {type_}>" for bits in range(1, 9) for type_ in ("float", "__half", "__nv_bfloat16")),
    ],
    "hadamard.cu": [f"{name}<{type_}>" for name in ("hadamard_rows", "hadamard_columns") for type_ in ("float", "__half", "__nv_bfloat16")],
    "pack.cu": [f"{name}<{bits}>" for name in ("pack_symbols", "unpack_states") for bits in range(1, 9)],
    "moe.cu": [
        "moe_route<1024>",
        *(f"moe_product<{blocks},{DEPTH}>" for blocks in TOKEN_BLOCKS),
        *(f"{name}<{flag}>" for name in ("moe_rotate", "moe_combine") for flag in ("false", "true")),
    ],
    "linear.cu": [
        *(f"linear_product<{blocks},{DEPTH}>" for blocks in TOKEN_BLOCKS),
        *(f"linear_prepare<{flag}>" for flag in ("false", "true")),
        *(f"linear_finish<{matrices}>" for matrices in (1, 2)),
    ],
}
SHARED_KIB = {
    "sm_80": 163,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_120": 99,
}  # a block; how many pairs of tiles search.cu takes at once depends on it


def instantiations(arch: str) -> list[tuple[str, str]]:
    pairs = {bits: kernels.search_shape(bits, SHARED_KIB[arch] << 10)[0] for bits in kernels.SEARCH_BITS}
    search = [f"search_tiles<{bits}, {pairs[bits]}, {held}>" for bits in pairs for held in ("false", "true")]
    return [(file, symbol) for file, symbols in {**INSTANTIATIONS, "search.cu": search}.items() for symbol in symbols]


@pytest.mark.parametrize(("arch", "file", "symbol"), [(arch, *case) for arch in nvrtc.ARCHITECTURES for case in instantiations(arch)])
def test_instantiation_compiles(arch: str, file: str, symbol: str) -> None:
    cubin = nvrtc.compile_kernel(file, symbol, arch=arch)
    assert cubin.code[:4] == b"\x7fELF"
    assert symbol.split("<")[0] in cubin.symbol
    assert 0 < cubin.registers <= 255
    # A few words on the stack outside of the search's inner loop are no harm.
    assert cubin.spill_bytes <= (16 if arch == "sm_90" else 64)


def test_every_kernel_is_listed() -> None:
    doors = {
        (path.name, name)
        for path in data_dir("kernels").glob("*.cu")
        for name in re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(", path.read_text())
    }
    assert len(doors) >= 3
    assert doors == {(file, symbol.split("<")[0]) for file, symbol in instantiations("sm_90")}


def test_a_broken_kernel_is_an_error_with_the_compilers_words(tmp_path, monkeypatch) -> None:
    (tmp_path / "broken.cu").write_text("__global__ void broken() { undeclared = 1; }")
    monkeypatch.setattr(nvrtc, "data_dir", lambda name: tmp_path)
    with pytest.raises(R7Error, match="undeclared"):
        nvrtc.compile_kernel("broken.cu", "broken", arch="sm_90")


class TestCache:
    SOURCE = '#include "other.cuh"\n__global__ void k(int* p) { *p = VALUE; }'

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("R7CONVERT_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(nvrtc, "data_dir", lambda name: tmp_path)
        (tmp_path / "k.cu").write_text(self.SOURCE)
        (tmp_path / "other.cuh").write_text("#define VALUE 1\n")
        return tmp_path

    def entries(self) -> list[str]:
        return sorted(p.name for p in nvrtc.cache_dir().iterdir())

    def test_second_compilation_is_a_read(self, monkeypatch) -> None:
        first = nvrtc.compile_kernel("k.cu", "k", arch="sm_90")
        monkeypatch.setattr(nvrtc, "_compile", lambda *_: pytest.fail("compiled again"))
        assert nvrtc.compile_kernel("k.cu", "k", arch="sm_90") == first
        assert len(self.entries()) == 1

    def test_header_architecture_and_defines_are_part_of_the_key(self, folder) -> None:
        nvrtc.compile_kernel("k.cu", "k", arch="sm_90")
        nvrtc.compile_kernel("k.cu", "k", arch="sm_80")
        nvrtc.compile_kernel("k.cu", "k", arch="sm_90", defines={"OTHER": 1})
        (folder / "other.cuh").write_text("#define VALUE 2\n")
        nvrtc.compile_kernel("k.cu", "k", arch="sm_90")
        assert len(self.entries()) == 4

    def test_damaged_entry_is_replaced(self) -> None:
        first = nvrtc.compile_kernel("k.cu", "k", arch="sm_90")
        (name,) = self.entries()
        path = nvrtc.cache_dir() / name
        path.write_bytes(path.read_bytes()[:-1])
        assert nvrtc.compile_kernel("k.cu", "k", arch="sm_90") == first
        assert nvrtc._read_cubin(path) == first

    def test_cache_that_cannot_be_written_is_no_error(self, folder, monkeypatch) -> None:
        (folder / "file").write_text("")
        monkeypatch.setenv("R7CONVERT_CACHE", str(folder / "file"))
        assert nvrtc.compile_kernel("k.cu", "k", arch="sm_90").registers > 0
