"""verify against sha256sum of the same folder, paired in one run: python -m tests.bench_verify FOLDER [--experts E] [--layers N]

Judging reads the output twice (seal, bytes) and the source once; sha256sum reads the output once.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import subprocess
import time
from pathlib import Path

from r7convert.repack import repack
from r7convert.sample import write_sample
from r7convert.verify import verify


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    for name, default in (("hidden", 2048), ("intermediate", 1024), ("experts", 64), ("layers", 9), ("tp", 4), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    source, output = args.folder / "source", args.folder / "output"
    sizes = {name: getattr(args, name) for name in ("hidden", "intermediate", "experts", "layers")}
    write_sample(source, dense=1, mode="uniform", mtp="none", **sizes)
    # In a process of its own, so that the peak below is that of judging.
    script = f"from pathlib import Path; from {repack.__module__} import repack; "
    script += f"repack(Path({str(source)!r}), Path({str(output)!r}), target='rank-sliced', tp={args.tp})"
    subprocess.run(["python", "-c", script], check=True)
    files = sorted(map(str, output.iterdir()))
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run(["sha256sum", *files], check=True, stdout=subprocess.DEVNULL)
        hashed = time.perf_counter() - start
        start, cpu = time.perf_counter(), time.process_time()
        verdict = verify(output, source=source, threads=args.threads)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        verdict.check()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
        print(f"sha256sum {hashed:.1f} s; verify {wall:.1f} s ({wall / hashed:.2f} x), {cpu:.1f} s of CPU, peak RSS {peak} MiB")
    print(verdict.parts[0].scope[0], "|", verdict.parts[1].scope[0])
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
