"""docs/api.md: what Python programs may call, from signatures and docstrings. Nothing is imported; the syntax tree has it all."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

from tests.make_errors import escape
from tests.test_architecture import PACKAGE

INTRO = """# Python

Written by `make docs` from docstrings; a test keeps it current, and runs this:

```python
from pathlib import Path

from r7convert import open_slabs
from r7convert.repack import repack
from r7convert.sample import write_sample
from r7convert.verify import verify

source, out = Path("source"), Path("out")
write_sample(source)
done = repack(source, out, target="slabs", tp=2)
verify(out, source=source, tp=2, device="cpu").check()
slabs = open_slabs(out, layer=3, rank=0)
print(done.plan.target, slabs.tiers, [tuple(w.shape) for w in slabs.w13])
```

A stage is one function in a module of its name: paths and keywords in, a frozen result with `to_json()` out, a class of
[Errors](errors.md) raised where it refuses. Stages print nothing; give a `Progress` to hear of them. What is not on this page may
change between minor versions. All sizes: H hidden, E experts of a layer, I\\_r intermediate channels of a rank, B tokens.
"""
PAGE = {
    "Read what was written": ("slabs.open_slabs", "slabs.Slabs"),
    "Compute from it": ("moe.load_experts", "moe.moe_forward", "moe.moe_scratch_bytes", "moe.moe_reference", "linear.linear_forward"),
    "Look": ("checkpoint.read_checkpoint", "inspect.inspect", "report.report"),
    "Stages": (
        "download.download", "restamp.restamp", "repack.repack", "stream.stream", "encode_shared.encode_shared", "verify.verify",
        "push.push", "fix_hub.fix_hub", "convert.convert",
    ),
    "The codec": (
        "codec.Matrix", "trellis.decode_tiles", "codec.decode_matrix", "codec.encode_matrix", "codec.reencode_matrix",
        "codec.linear_forward", "codec.expert_forward",
    ),
    "What they take": ("address.locate", "recipe.read_recipe", "progress.Progress"),
}  # fmt: skip
LABEL = re.compile(r"^(Shapes|Units|Raises|Kernel|Note|Source)(?: \([^)]*\))?: ", re.MULTILINE)
WIDTH = 100


def render_api() -> str:
    """The page."""
    lines = [INTRO]
    for title, names in PAGE.items():
        lines.append(f"\n## {title}\n")
        for name in names:
            lines += _entry(*name.split("."))
    return "".join(lines)


def _entry(module: str, name: str) -> Iterator[str]:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    node = next(node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name)
    yield f"\n### {name}\n\n```python\nfrom r7convert.{module} import {name}\n\n"
    yield from (f"{line}\n" for line in (_signature(node) if isinstance(node, ast.FunctionDef) else _fields(node)))
    yield "```\n\n"
    text = re.sub(r"FORMAT\.md(?: sections? \d+(?:(?:, | and )\d+)*)?", "format.md", ast.get_docstring(node) or "")
    labels = [*LABEL.finditer(text)]
    prose = text[: labels[0].start()] if labels else text
    assert prose.strip(), f"{module}.{name} does not say what it is"
    yield "\n\n".join(escape(" ".join(part.split())) for part in prose.strip().split("\n\n")) + "\n"
    cuts = [*(label.start() for label in labels), len(text)]
    told = [(label[1], text[label.end() : cuts[n + 1]]) for n, label in enumerate(labels) if label[1] != "Source"]
    yield "".join(f"\n- *{name}:* {escape(' '.join(said.split()))}" for name, said in told) + ("\n" if told else "")


def _signature(node: ast.FunctionDef) -> list[str]:
    """The call as the source has it: one line, or a line a parameter."""
    arguments = re.sub(r"(?<=[\w\]])=", " = ", ast.unparse(node.args))
    whole = f"{node.name}({arguments}) -> {ast.unparse(node.returns) if node.returns else 'None'}"
    if len(whole) <= WIDTH:
        return [whole]
    parts = re.split(r", (?=\*|\w+:)", arguments)
    return [f"{node.name}(", *(f"    {part}," for part in parts), whole[whole.rindex(") -> ") :]]


def _fields(node: ast.ClassDef) -> list[str]:
    """A class by its public fields, or else by its public methods."""
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_")]
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and not part.name.startswith("_")]
    lines = [f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}" for field in fields]
    if not lines:
        lines = [
            f"def {method.name}({ast.unparse(method.args)}): ...  # {(ast.get_docstring(method) or '').partition(chr(10))[0]}"
            for method in methods
        ]
    return [f"class {node.name}:", *(textwrap.indent(line, "    ") for line in lines)]
