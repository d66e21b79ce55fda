"""Names of every family: read into one set of words, spelled again as they were, and held apart from each other."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from r7convert import families
from r7convert.checkpoint import read_checkpoint
from r7convert.families import CANONICAL, SPELLINGS
from r7convert.format import PROJECTIONS, ExpertName, SharedExpertName, is_expert_name, mtp_layer, parse_name
from r7convert.inspect import inspect
from r7convert.kinds import Kind
from tests.folders import load, sample

ROOTS = ("model.layers", "model.language_model.layers", "language_model.model.layers", "layers", "mtp.layers", "mtp")


@given(st.sampled_from(ROOTS), st.integers(0, 999), st.integers(0, 999), st.sampled_from(sorted(SPELLINGS)), st.sampled_from(PROJECTIONS))
def test_names_of_routed_experts_are_read_and_spelled_again(root: str, layer: int, expert: int, spelling: str, proj: str) -> None:
    row = SPELLINGS[spelling]
    module = f"{root}.{layer}.{row.block}.experts.{expert}.{row.routed[PROJECTIONS.index(proj)]}"
    for rank, suffix in ((None, ""), (3, ".rank3")):
        name = parse_name(f"{module}{suffix}.trellis")
        assert name == ExpertName(root, layer, expert, proj, "trellis", rank, spelling)
        assert isinstance(name, ExpertName)
        assert name.module == module
        assert is_expert_name(f"{module}{suffix}.trellis")


def test_the_table_is_one_to_one() -> None:
    assert CANONICAL in SPELLINGS
    assert SPELLINGS[CANONICAL].routed == PROJECTIONS
    for block, row in SPELLINGS.items():
        assert block == row.block
        assert len(set(row.routed)) == len(set(row.shared)) == 3


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        (
            "model.layers.3.block_sparse_moe.experts.7.w2.suh",
            ExpertName("model.layers", 3, 7, "down_proj", "suh", None, "block_sparse_moe"),
        ),
        ("layers.3.ffn.experts.7.w1.mul1", ExpertName("layers", 3, 7, "gate_proj", "mul1", None, "ffn")),
        ("mtp.0.ffn.experts.7.w3.mcg", ExpertName("mtp", 0, 7, "up_proj", "mcg", None, "ffn")),
        (
            "model.layers.3.block_sparse_moe.shared_experts.up_proj.weight",
            SharedExpertName("model.layers", 3, "shared_experts", "up_proj", "weight", "block_sparse_moe"),
        ),
        ("layers.3.ffn.shared_experts.w3.weight", SharedExpertName("layers", 3, "shared_experts", "up_proj", "weight", "ffn")),
        ("model.layers.3.mlp.shared_mlp.up_proj.weight", SharedExpertName("model.layers", 3, "shared_mlp", "up_proj", "weight")),
        # The words of one family in the block of another say nothing.
        ("model.layers.3.mlp.experts.7.w2.suh", None),
        ("model.layers.3.block_sparse_moe.experts.7.gate_proj.suh", None),
        ("model.layers.3.block_sparse_moe.shared_experts.w1.weight", None),
        ("model.layers.3.block_sparse_moe.shared_expert.up_proj.weight", None),
        ("model.layers.3.block_sparse_moe.experts.r7_shared.down_svh", None),
        ("model.layers.3.ffn.experts.shared_h.w1.rank0.suh", None),
        ("model.layers.3.mlp.shared_expert_gate.weight", None),
        ("model.layers.3.moe.experts.7.w2.suh", None),
        ("xmtp.0.ffn.experts.7.w3.mcg", None),
    ],
)
def test_names(name: str, meaning: Any) -> None:
    assert parse_name(name) == meaning


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("model.layers.9.mlp.gate.weight", None),
        ("model.layers.10.mlp.gate.weight", 10),
        ("model.layers.12.eh_proj.weight", 12),
        ("mtp.fc.weight", 10),
        ("mtp.layers.1.mlp.gate.weight", 11),
        ("model.mtp.layers.2.mlp.gate.weight", 12),
        ("mtp.3.attn.wq_a.weight", 13),
        ("model.language_model.mtp.layers.0.norm.weight", 10),
        ("model.layers.9.mtp.weight", None),
        ("smtp.fc.weight", None),
    ],
)
def test_mtp_layers_count_from_the_last_layer(name: str, layer: int | None) -> None:
    assert mtp_layer(name, 10) == layer


def test_the_page_has_every_row_of_the_table() -> None:
    page = (Path(__file__).parents[1] / "docs/sources.md").read_text()
    patterns = [f"`{row.block}.experts.{{E}}.{{{','.join(row.routed)}}}`" for row in SPELLINGS.values()]
    modules = [f"`{row.block}.{module}" for row in SPELLINGS.values() for module in row.modules]
    keys = [*families.ROUTED_EXPERTS, *families.EXPERT_SIZE, *families.EXPERT_SIZE_BESIDE.values(), *families.SHARED_EXPERTS]
    keys += [families.SHARED_EXPERT_SIZE, *families.MTP_LAYERS, *families.FIRST_DENSE, families.FREQUENCY, families.STEP]
    keys += [families.DENSE_ONLY, families.LAYER_TYPES]
    kinds = [f"| `{kind}` |" for kind in get_args(Kind)]
    assert [text for text in (*patterns, *modules, *(f"`{key}`" for key in keys), *kinds) if text not in page] == []
    assert len(keys) == 19
    assert len(kinds) == 5


# ---- what exllamav3 writes ----------------------------------------------------------------------------------------------

NOT_READ = {"gemma4": "no block between layer and experts", "nemotronh": "no gate", "step3_5": "a block `moe`, a shared expert outside it"}


def _exllamav3() -> Iterator[tuple[str, str, dict[str, str]]]:
    """(architecture's file, block, key of each projection) of every mixture of experts that exllamav3 builds, out of its sources."""
    spec = importlib.util.find_spec("exllamav3")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("exllamav3's sources are not on PYTHONPATH")
    for path in sorted(Path(spec.submodule_search_locations[0], "architecture").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "BlockSparseMLP":
                given = {keyword.arg: ast.unparse(keyword.value).strip("f'") for keyword in node.keywords}
                keys = {proj: given.get(f"key_{proj.removesuffix('_proj')}", "None") for proj in PROJECTIONS}
                # A key that is handed in whole is the module's own, which all of those call mlp.
                block = given["key"].rpartition("}.")[2].rpartition(".")[2] if "}" in given["key"] else CANONICAL
                yield path.stem, block, keys


def test_names_that_exllamav3_writes_are_read() -> None:
    read, not_read = set[str](), set[str]()
    for stem, block, keys in _exllamav3():
        names = {proj: f"model.layers.7.{block}.{key.format(expert_idx=3)}.trellis" for proj, key in keys.items()}
        found = {proj: parse_name(name) for proj, name in names.items()}
        is_read = all(isinstance(name, ExpertName) and (name.proj, name.expert) == (proj, 3) for proj, name in found.items())
        (read if is_read else not_read).add(stem)
    assert not_read == set(NOT_READ)
    assert len(read) >= 25


# ---- whole checkpoints ------------------------------------------------------------------------------------------------

GUD = "{gate_proj,up_proj,down_proj}"
W = "{w1,w3,w2}"
FAMILIES: list[tuple[dict[str, Any], str, list[int], set[int]]] = [
    ({"family": "glm", "dense_too": (4,)}, f"model.layers.{{L}}.mlp.experts.{{E}}.{GUD}", [3, 5], {3, 5}),
    ({"family": "glm", "nested": True}, f"model.language_model.layers.{{L}}.mlp.experts.{{E}}.{GUD}", [3, 4, 5], {3, 4, 5}),
    ({"family": "glm", "mtp_layers": 3}, f"model.layers.{{L}}.mlp.experts.{{E}}.{GUD}", [3, 4, 5, 6, 7], {3, 4, 5, 6, 7}),
    ({"family": "deepseek", "dense_too": (4,)}, f"model.layers.{{L}}.mlp.experts.{{E}}.{GUD}", [3, 5], {3, 5}),
    (
        {"family": "qwen", "dense": 0, "dense_too": (1, 3), "mtp_layers": 2},
        f"model.layers.{{L}}.mlp.experts.{{E}}.{GUD}; mtp.layers.{{L}}.mlp.experts.{{E}}.{GUD}",
        [0, 2, 4, 5, 6],
        {0, 2, 4, 5, 6},
    ),
    ({"family": "kimi", "mtp": "none"}, f"model.layers.{{L}}.block_sparse_moe.experts.{{E}}.{W}", [3, 4], {3, 4}),
    ({"family": "minimax", "mtp": "none", "dense": 0}, f"model.layers.{{L}}.block_sparse_moe.experts.{{E}}.{W}", [0, 1, 2, 3, 4], set()),
    (
        {"family": "deepseek-v4", "dense": 0, "layers": 2, "mtp_layers": 2},
        f"layers.{{L}}.ffn.experts.{{E}}.{W}; mtp.{{L}}.ffn.experts.{{E}}.{W}",
        [0, 1, 2, 3],
        {0, 1, 2, 3},
    ),
]


@pytest.mark.parametrize(
    ("choices", "names", "layers", "shared"), FAMILIES, ids=[f"{c['family']}{n}" for n, (c, *_) in enumerate(FAMILIES)]
)
def test_families(tmp_path: Path, choices: dict[str, Any], names: str, layers: list[int], shared: set[int]) -> None:
    folder = sample(tmp_path / "s", kind="exl3", hidden=128, intermediate=128, experts=3, **choices)
    found = inspect(read_checkpoint(folder))
    made = found.checkpoint
    assert found.names == names
    assert list(made.experts) == layers
    assert set(made.shared_experts) == shared
    assert made.mtp.problem is None
    assert made.mtp.layers == tuple(range(made.geometry.layers, made.geometry.layers + made.geometry.mtp_layers))
    tensors = {name: tensor for file in made.headers for name, tensor in load(folder / file).items()}
    looked = 0
    for layer in made.experts.values():
        for expert in range(3):
            for proj in PROJECTIONS:
                for field in layer.fields:
                    (entry,) = layer.parts(expert, proj, field)
                    assert entry.name == f"{layer.module(expert, proj)}.{field}"
                    assert list(entry.shape) == list(tensors[entry.name].shape)
                    looked += 1
        assert layer.is_canonical == (layer.spelling == CANONICAL and layer.root != "mtp.layers")
    assert looked == len(layers) * 3 * 3 * 4 == sum(len(layer.tensors) for layer in made.experts.values())
