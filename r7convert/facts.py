"""What the facts of a manifest say, read once for the card and the report: who loads the folder and how, what became of the
source's tensors, what encoding anew cost. Facts are JSON that anybody may have written: whatever is not as expected is left out.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Any
Census = Mapping[int, Sequence[tuple[int, int, int]]]
"""K of gate, up and down of each expert, by layer."""

# target -> (what loads it, how to serve it: {model} for a shell, {string} for Python)
READERS: Mapping[str, tuple[str, str]] = {
    "rank-sliced": (
        "stock Gilded Gnosis vLLM, release {reader} or later, at tensor-parallel size {tp} exactly",
        "vllm serve {model} --tensor-parallel-size {tp}",
    ),
    "r7": (
        "R7-aware loaders: Gilded Gnosis r34 or later, and the Infernal Invocation line; any legal tensor-parallel size",
        "vllm serve {model} --tensor-parallel-size 4",
    ),
    "exl3": (
        "exllamav3 0.0.43 or later, and other readers of topology-neutral EXL3",
        "from exllamav3 import Config, Model; Model.from_config(Config.from_directory({string})).load()",
    ),
    "slabs": (
        "kernels that map the slabs themselves (`r7convert.open_slabs`), at tensor-parallel size {tp} exactly",
        "import r7convert; print(r7convert.open_slabs({string}, layer={layer}, rank=0))",
    ),
}


@dataclass(frozen=True, slots=True)
class ErrorStep:
    """Relative squared errors of all matrices that went from one form to another; `name` is the worst one's."""

    step: str
    matrices: int
    mean: float
    worst: float
    name: str


def who_loads(facts: Mapping[str, Json]) -> str:
    loads, _ = READERS.get(str(facts.get("target")), ("readers of this target", ""))
    return loads.format(tp=facts.get("tp"), reader=facts.get("reader") or "r28")


def serve_command(facts: Mapping[str, Json], model: str, *, layer: int, is_repo: bool) -> str:
    """The command that serves `model`, a folder or a repository of the Hub, quoted for a shell."""
    _, serve = READERS.get(str(facts.get("target")), ("", ""))
    if not serve:
        return f"r7convert inspect {shlex.quote(model)}"
    if "{string}" not in serve:
        return serve.format(model=shlex.quote(model), tp=facts.get("tp"))
    # These readers take folders alone.
    code = serve.format(string=json.dumps("model" if is_repo else model), layer=layer)
    fetch = f"hf download {shlex.quote(model)} --local-dir model && " if is_repo else ""
    return f"{fetch}python -c {shlex.quote(code)}"


def source_repo(facts: Mapping[str, Json]) -> str | None:
    source = facts.get("source")
    repo = source.get("repo") if isinstance(source, dict) else None
    return repo if isinstance(repo, str) else None


def command_line(facts: Mapping[str, Json]) -> str:
    """The commands that make such a folder again, without the paths of the machine that made this one."""
    words = ["r7convert repack", source_repo(facts) or "SOURCE", "OUT", f"--target {facts.get('target')}"]
    for name, option in (("tp", "--tp"), ("reader", "--reader"), ("rotation_layout", "--rotation-layout")):
        if facts.get(name) is not None:
            words.append(f"{option} {facts[name]}")
    policy = facts.get("policy")
    if isinstance(policy, dict):
        words.append(f"--mixed-k {policy.get('name')}")
        words += [f"--budget {policy['budget']}"] if policy.get("budget") is not None else []
        words += ["--importance WEIGHTS.json"] if policy.get("importance") is not None else []
        words += ["--reference ORIGINALS"] if policy.get("reference") is not None else []
    if facts.get("drop_mtp"):
        words.append("--drop-mtp")
    lines = [" ".join(words)]
    if bits := sorted({str(figures.get("bits")) for _, figures in matrix_figures(facts.get("encoded"))}):
        lines.append(f"r7convert encode-shared OUT --bits {bits[0]}")
    return "\n".join(lines)


def tensor_counts(facts: Mapping[str, Json]) -> dict[str, int]:
    """Source tensors by what became of them, zeros left out."""
    accounting = facts.get("accounting")
    if not isinstance(accounting, dict):
        return {}
    counts = {kind: entry.get("tensors") if isinstance(entry, dict) else entry for kind, entry in accounting.items()}
    return {kind: count for kind, count in counts.items() if isinstance(count, int) and count}


def matrix_figures(value: Json, name: str = "") -> Iterator[tuple[str, Mapping[str, Json]]]:
    """(matrix, figures) of everything in a manifest fact that states a relative error, however deep."""
    if not isinstance(value, dict):
        return
    if _is_number(value.get("relative_error")):
        yield name, value
        return
    for key, inner in value.items():
        yield from matrix_figures(inner, str(key))


def error_steps(facts: Mapping[str, Json]) -> list[ErrorStep]:
    """What was encoded anew, against what it came from, by the step of K."""
    steps: dict[str, list[tuple[float, str]]] = {}
    for fact in ("reencoded", "encoded"):
        for name, figures in matrix_figures(facts.get(fact)):
            before, after = figures.get("from"), figures.get("to", figures.get("bits"))
            step = f"{f'K{before}' if isinstance(before, int) else before} to K{after}"
            steps.setdefault(step, []).append((float(figures["relative_error"]), name))
    return [ErrorStep(step, len(errors), sum(e for e, _ in errors) / len(errors), *max(errors)) for step, errors in sorted(steps.items())]


def count_k(census: Census, at: int) -> Counter[int]:
    """How many matrices of one projection have which K."""
    return Counter(row[at] for rows in census.values() for row in rows)


def mean_of(counts: Mapping[int, int]) -> float:
    return sum(k * n for k, n in counts.items()) / sum(counts.values())


def _is_number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300
