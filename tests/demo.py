"""`make demo`: a small R7 checkpoint through the real commands, from the poisoned stamp to a verified folder for each reader.

    python -m tests.demo [FOLDER]

Every line after a `$` is a command that works on a real checkpoint too.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

FOLDERS = ("source", "one-k", "r7", "slabs", "exl3", "stock", "lifted")


def main(root: Path) -> int:
    began = time.monotonic()
    root.mkdir(parents=True, exist_ok=True)
    for name in FOLDERS:  # what an earlier demo left, and nothing else
        shutil.rmtree(root / name, ignore_errors=True)
    source, one_k = root / "source", root / "one-k"

    tell("A small checkpoint in the published shape: R7 experts with an own K per projection, an MTP layer, an old producer's stamp.")
    run("sample", source)
    tell("What is in it, and what each reader would make of it.")
    run("inspect", source)
    tell("The stamp alone, repaired into a folder of links: enough for R7-aware servers.")
    run("stamp", source, "--output", root / "r7")
    tell("For slab readers: every slab one contiguous range, K of each projection kept.")
    convert(source, root / "slabs", "slabs", tp=2)
    tell("For exllamav3 and its kin: whole matrices.")
    convert(source, root / "exl3", "exl3")
    tell("Stock servers take one K an expert and two a layer. This checkpoint has that, so the cut loses nothing.")
    run("sample", one_k, "--mode", "uniform", "--tail-tp", "2")
    convert(one_k, root / "stock", "rank-sliced", tp=4)
    tell("The first one has not: `lift` encodes the lower matrices of each expert again, at its largest K, and measures each.")
    convert(source, root / "lifted", "rank-sliced", "--mixed-k", "lift", "--device", "cpu", tp=2)
    tell("Servers encode BF16 shared experts at every start. Once is enough; verify then judges the encoded ones too.")
    run("encode-shared", root / "lifted", "--device", "cpu")
    run("verify", root / "lifted", "--source", source, "--tp", 2)

    tell("What a slab reader does at start: map a layer's tables, without a copy.")
    show_slabs(root / "slabs", layer=3, rank=0)
    tell("The last one as people see it: on the terminal, and as one page to look at or send.")
    run("report", root / "lifted", "--html", root / "report.html")
    tell(f"Done in {time.monotonic() - began:.0f} s. The folders are in {root}.")
    return 0


def convert(source: Path, output: Path, target: str, *options: str, tp: int | None = None) -> None:
    """repack, then verify against the source, as one would before serving."""
    ranks = () if tp is None else ("--tp", tp)
    run("repack", source, output, "--target", target, *ranks, *options)
    run("verify", output, "--source", source, *ranks)


def show_slabs(folder: Path, *, layer: int, rank: int) -> None:
    from r7convert import open_slabs

    open_slabs(folder, layer, rank + 1)  # parses slabs.json, once a process, and brings torch in
    began = time.perf_counter()
    slabs = open_slabs(folder, layer, rank)
    spent_us = (time.perf_counter() - began) * 1e6
    print(f"layer {layer}, rank {rank}, opened in {spent_us:.0f} us")
    for nth, bits in enumerate(slabs.tiers):
        print(f"  K{bits}: w13 {list(slabs.w13[nth].shape)}, w2 {list(slabs.w2[nth].shape)}")


def run(*words: object) -> None:
    print("$ r7convert", *words, flush=True)
    subprocess.run([sys.executable, "-m", "r7convert", *map(str, words)], check=True)


def tell(line: str) -> None:
    print(f"\n# {line}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo")))
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
