"""docs/errors.md: every message that the code can refuse something with, read from its call sites, and what to do about it.

A refusal is a call of `complain`, or of `add` on an `Offences`; what verify finds is a check by name. Both are found in the syntax
tree, so that a message which is not on the page does not exist. What no call site says, the advice of a group, stands here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from r7convert import errors
from tests.test_architecture import PACKAGE

FIELDS = ("where", "what", "expected", "found", "do")
INTRO = """# Errors, and what to do

Written by `make docs` from the code: the tables hold every call that can refuse something, a test keeps them current.

A message is `where: what: expected X, got Y. Do Z.`, a line for each offender, at most twenty and then a count. Values stand here as
*names*. A check collects all it finds before it speaks, so one repair is enough for one message. `R7_DEBUG=1` adds the traceback.

## Exit codes

| code | class | means | if the message says nothing itself |
|---|---|---|---|
"""
AFTER = """| 130 | | interrupted by Ctrl-C or SIGTERM | repeat the command: no file is left half-written |

`stamp --check` ends with 3 if a repair is due. Typer's own usage errors end with 2.
"""


@dataclass(frozen=True)
class Group:
    title: str
    modules: tuple[str, ...]
    advice: str


GROUPS = (
    Group(
        "The command line",
        ("address", "cli_convert", "cli_hub", "cli_local", "cli_options", "cli_report", "data", "recipe"),
        """Nothing was read or written. A folder of the name wins over a repository; `hf://org/name` always means the repository.""",
    ),
    Group(
        "A checkpoint's files, headers and JSON",
        ("checkpoint", "experts", "format", "geometry", "kinds", "sidecars", "signs", "source", "source_files", "store"),
        """The source is not what its own JSON or its headers say. Nothing is guessed, cast or left out silently. A file that is cut,
stale or a pointer is fetched again: `r7convert download` compares each one with the Hub. A config that is wrong is corrected by hand;
`r7convert inspect SRC` then reads all of it again in seconds.""",
    ),
    Group(
        "The stamp",
        ("fix_hub", "restamp", "stamp"),
        """`r7convert stamp SRC --check` says what is due and touches nothing. What names and JSON do not tell is asked for with
`--target`.""",
    ),
    Group(
        "What a target takes",
        ("ktable", "mixed_k", "originals", "plan", "policy", "repack", "rules", "shared_layer", "shared_plan", "vectors"),
        """The checkpoint is sound, and this reader cannot hold it as it is. `r7convert inspect SRC` asks every target;
`r7convert repack SRC OUT --target rank-sliced --tp N --dry-run` prices the ways out, which [K policies](policies.md) explains.""",
    ),
    Group(
        "A run and its folder",
        ("convert", "copying", "encode_shared", "fetcher", "journal", "repack_run", "sample", "sample_shape", "stream", "team"),
        """What is finished stays finished: the same command goes on where it stopped, another one needs another folder or
`--restart`. The source is never written to.""",
    ),
    Group(
        "Judging a folder",
        ("evidence", "report", "verdict", "verify", "verify_numbers"),
        """A folder that fails is not served and not pushed. If its files changed after the conversion, repack into a new folder; if
they did not, report it.""",
    ),
    Group(
        "The Hub",
        ("branch", "download", "hub", "push", "remote"),
        """Repeat the command: what arrived is not moved again, and a branch never looks whole before it is. Access comes from
`HF_TOKEN` or `hf auth login`.""",
    ),
    Group(
        "The machine",
        ("devices", "nvrtc", "report_png"),
        """`r7convert env` shows what is there. Everything runs on the CPU too (`--device cpu`), encoding more slowly.""",
    ),
    Group(
        "From Python",
        ("codec", "linear", "moe", "slabs", "trellis"),
        """Functions that take tensors check shapes, dtypes and places before they start.""",
    ),
)
PARTS = {
    "seal": ("seal",),
    "contract": ("contract", "contract_config", "contract_layers", "contract_slabs", "contract_values"),
    "bytes": ("verify", "verify_bytes", "verify_files"),
    "numbers": ("verify_errors", "verify_layer", "verify_numbers"),
}
FINDINGS = """
## What verify can find

Each part is a list of checks; `r7convert verify OUT --verbose` prints them with how much each looked at. A failed check ends with
exit code 4.

| part | checks |
|---|---|
"""
DEFINITIONS = ("errors", "findings")  # the grammar itself


def render_errors() -> str:
    """The page."""
    lines = [INTRO, *_tree(), AFTER]
    by_module = {path.stem: list(refusals(path)) for path in sorted(PACKAGE.glob("*.py")) if path.stem not in DEFINITIONS}
    others = tuple(sorted({name for name, found in by_module.items() if found} - {name for group in GROUPS for name in group.modules}))
    for group in (*GROUPS, *([Group("Other", others, "")] if others else [])):
        rows = {_row(refusal): None for name in group.modules for refusal in by_module[name]}
        lines += [f"\n## {group.title}\n\n{group.advice}\n\n| what | expected | do | exit |\n|---|---|---|---|\n", *rows]
    lines.append(FINDINGS)
    for part, modules in PARTS.items():
        checks = sorted({name for module in modules for name in findings(PACKAGE / f"{module}.py")})
        lines.append(f"| {part} | {'; '.join(checks)} |\n")
    return "".join(lines)


def _row(refusal: Refusal) -> str:
    code = getattr(errors, refusal.raised).exit_code
    return f"| {refusal.what} | {refusal.expected} | {refusal.do} | {code} |\n"


def _tree() -> Iterator[str]:
    """The classes of errors.py with what its docstring says of each."""
    said = dict(re.findall(r"(\w+Error) +\d +(.+)", errors.__doc__ or ""))
    for name, meaning in said.items():
        kind = getattr(errors, name)
        yield f"| {kind.exit_code} | {name} | {meaning} | {kind.next_step} |\n"


@dataclass(frozen=True)
class Refusal:
    """One call site: what it says, and the class it is raised as."""

    module: str
    what: str
    expected: str
    do: str
    raised: str


def refusals(path: Path) -> Iterator[Refusal]:
    tree = ast.parse(path.read_text())
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    constants = _assigned(tree.body)
    collects = any(isinstance(node, ast.alias) and node.name == errors.Offences.__name__ for node in ast.walk(tree))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not _refuses(node, collects):
            continue
        function = next((above for above in _above(node, parents) if isinstance(above, ast.FunctionDef)), None)
        known = constants | (_assigned(ast.walk(function)) if function is not None else {})
        said = dict(zip(FIELDS, node.args, strict=False)) | {str(word.arg): word.value for word in node.keywords}
        what, expected, do = (words(said[name], known) if name in said else "" for name in ("what", "expected", "do"))
        yield Refusal(path.stem, what, expected, do, _raised(node, [*([function] if function else []), tree], parents))


def findings(path: Path) -> Iterator[str]:
    """The names of the checks a module of verify makes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "check" and node.args:
            name = node.args[0]
            if isinstance(name, (ast.JoinedStr, ast.IfExp)) or (isinstance(name, ast.Constant) and isinstance(name.value, str)):
                yield words(name, {})


def _refuses(node: ast.Call, collects: bool) -> bool:
    if isinstance(node.func, ast.Name):
        return node.func.id == "complain"
    return collects and isinstance(node.func, ast.Attribute) and node.func.attr == "add" and len(node.args) + len(node.keywords) >= 2


def _above(node: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while node in parents:
        node = parents[node]
        yield node


def _raised(node: ast.Call, scopes: Sequence[ast.AST], parents: Mapping[ast.AST, ast.AST]) -> str:
    """The class in the `raise` around the call, or the one that the collection's `check` names: in this function, else in this module,
    else `check`'s own.
    """
    for above in _above(node, parents):
        if isinstance(above, ast.Raise) and isinstance(above.exc, ast.Call) and isinstance(above.exc.func, ast.Name):
            return above.exc.func.id
    for scope in scopes if isinstance(node.func, ast.Attribute) else ():
        for call in ast.walk(scope):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == f"{ast.unparse(node.func.value)}.check" and call.args:  # type: ignore[attr-defined]
                return ast.unparse(call.args[0])
    return errors.FormatError.__name__


def _assigned(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    """Names that are given a value once, and the value: `do = "..."` above its use; as `name()` what a function returns."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Return) and node.body[-1].value is not None:
            found.setdefault(f"{node.name}()", []).append(node.body[-1].value)
    return {name: values[0] for name, values in found.items() if len(values) == 1}


# ---- an expression in words -------------------------------------------------------------------------------------------


def words(node: ast.expr, known: Mapping[str, ast.expr]) -> str:
    """What an expression says, in Markdown: text as it is, values as *names*."""
    if isinstance(node, ast.Constant):
        return "" if node.value is None else escape(" ".join(f"x{node.value}x".split())[1:-1])
    if isinstance(node, ast.JoinedStr):
        return "".join(words(part, known) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return words(node.value, known)
    if isinstance(node, ast.Name) and node.id in known:
        return words(known[node.id], {name: value for name, value in known.items() if name != node.id})
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and f"{node.func.id}()" in known:
        return words(known[f"{node.func.id}()"], {})
    if isinstance(node, ast.IfExp):
        return " / ".join(filter(None, (words(node.body, known), words(node.orelse, known))))
    return f"*{_name(node)}*"


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id.replace("_", " ").strip().lower()
    if isinstance(node, ast.Attribute):
        return node.attr.replace("_", " ").strip()
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return _name(node.value)
    if isinstance(node, (ast.List, ast.Tuple)) and node.elts:
        return _name(node.elts[0])
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in ("len", "sum"):
            return "count"
        if called.endswith((".join", "map")):
            return "names"
        if called in ("repr", "str", "sorted", "list", "in_bytes", "in_time", "ranges", "max", "min", "type") and node.args:
            return _name(node.args[0])
        return called.rpartition(".")[2].replace("_", " ").strip()
    return "value"


def escape(text: str) -> str:
    """Markdown's own characters, but not inside backticks."""
    parts = text.split("`")
    special = r"([*<|]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|\](?=[(\[]))"
    return "`".join(part if n % 2 else re.sub(special, r"\\\1", part) for n, part in enumerate(parts))
