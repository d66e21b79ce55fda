"""The K policy of one repack: its name, budget and weights, bound to the checkpoint whose K it chooses.

A KChoice is what plan_repack calls with the K tables. It adds what headers do not say: the energy of every matrix, from its
scale vectors, and the importance of every expert, if somebody counted. And it keeps what was chosen, for the report.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from r7convert import policy
from r7convert.checkpoint import Checkpoint
from r7convert.errors import UsageError, complain
from r7convert.experts import ExpertLayer
from r7convert.format import PROJECTIONS, TILE
from r7convert.ktable import Budget, FloatArray, KTable, Problem, parse_importance
from r7convert.source import Folder

Json = Any

POLICIES = ("refuse", "lift", "fit")
CODEBOOK_MEAN_SQUARE = 1.2441**2


@dataclass
class KChoice:
    """`budget` is of `fit`; `importance` is the JSON of docs/policies.md; `from_originals` prices encodes of the originals."""

    checkpoint: Checkpoint
    name: str = "refuse"
    budget: Budget | None = None
    importance: Json = None
    from_originals: bool = False
    problem: Problem | None = field(default=None, init=False)
    chosen: policy.Plan | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise UsageError(complain("--mixed-k", "policy", expected=f"one of {', '.join(POLICIES)}", found=self.name))
        if self.budget is not None and self.name == "lift":
            raise UsageError(complain("--budget", "of --mixed-k lift", expected="none: a lift costs what it costs", found="one"))

    def __call__(self, tables: Problem) -> policy.Plan:
        self.problem = self._weighed(tables)
        budget_bytes = self.budget.in_bytes(self.problem) if self.budget is not None else None
        if self.name == "refuse":
            self.chosen = policy.refuse(self.problem, budget_bytes)
        else:
            self.chosen = policy.lift(self.problem) if self.name == "lift" else policy.fit(self.problem, budget_bytes)
        return self.chosen

    def prices(self) -> dict[str, policy.Plan | str]:
        """What each policy would do with the problem that was put, or why it cannot."""
        if self.problem is None:
            return {}
        return policy.price_policies(self.problem, self.budget.in_bytes(self.problem) if self.budget is not None else None)

    def facts(self) -> dict[str, Json] | None:
        """What the manifest states of the choice; None where nothing had to be chosen."""
        if self.chosen is None or self.name == "refuse":
            return None
        # The bytes that held, named or not: `fit` without --budget keeps the payload's own.
        made: dict[str, Json] = {"name": self.name, "budget": self.chosen.budget_bytes, "importance": None}
        if self.importance is not None:
            made["importance"] = hashlib.sha256(repr(sorted(self.importance.items())).encode()).hexdigest()
        table = repr([(layer.layer, layer.expert_bits.tolist()) for layer in self.chosen.layers])
        made["bits_sha256"] = hashlib.sha256(table.encode()).hexdigest()
        return made | {"expected_error_before": self.chosen.error_before, "expected_error_after": self.chosen.error_after}

    def _weighed(self, tables: Problem) -> Problem:
        mixed = any(not table.is_stock_shaped for table in tables.tables)
        importance: Mapping[int, FloatArray] = {}
        if self.importance is not None:
            importance = parse_importance(self.importance, {table.layer: len(table.bits) for table in tables.tables})
        made = []
        for table in tables.tables:
            # On the Hub the vectors would be tens of thousands of requests: there every matrix weighs the same.
            local = mixed and isinstance(self.checkpoint.source, Folder)
            energy = energies(self.checkpoint, self.checkpoint.experts[table.layer]) if local else None
            made.append(KTable(table.layer, table.bits, energy, importance.get(table.layer)))
        return Problem(tuple(made), tables.matrix_weights, tables.targets, self.from_originals)


def bytes_budget(budget_bytes: int | None) -> Budget | None:
    return None if budget_bytes is None else Budget("bytes", Fraction(budget_bytes))


def energies(checkpoint: Checkpoint, layer: ExpertLayer) -> FloatArray:
    """||W||^2 of every matrix, [E, 3], from its scales alone: rotated values are codebook values, of one mean square, and the
    Hadamard transform keeps lengths, so that ||W||^2 is near mean square x |suh|^2 x |svh|^2. What is not finite counts as 0.

    Source:  FORMAT.md section 7, "Error of a matrix".
    """
    known: dict[str, float] = {}

    def square(expert: int, proj: str, name: str) -> float:
        total = 0.0
        entries = layer.parts(expert, proj, name)
        is_copies = name == ("svh" if proj == "down_proj" else "suh")
        for entry in entries[:1] if is_copies else entries:
            if entry.name not in known:
                values = np.frombuffer(checkpoint.source.read(entry.file, entry.offset, entry.nbytes), "<f2").astype(np.float64)
                known[entry.name] = float(np.square(values[np.isfinite(values)]).sum())
            total += known[entry.name]
        return total

    rows = [[square(e, proj, "suh") * square(e, proj, "svh") for proj in PROJECTIONS] for e in range(len(layer.bits))]
    return np.array(rows, dtype=np.float64) * CODEBOOK_MEAN_SQUARE


# ---- prices -----------------------------------------------------------------------------------------------------------


def price_json(choice: KChoice, device: str) -> dict[str, Json]:
    """What each policy would cost: matrices, bytes, expected error, and seconds of encoding on the devices at hand."""
    from r7convert.devices import find_devices, seconds_to_encode

    made: dict[str, Json] = {}
    problem = choice.problem
    for name, plan in choice.prices().items():
        if isinstance(plan, str) or problem is None:
            made[name] = {"impossible": plan}
            continue
        seconds = seconds_to_encode(plan.encodes, problem.matrix_weights // TILE**2, find_devices(device))
        made[name] = {
            "lifted": plan.lifted,
            "lowered": plan.lowered,
            "bytes_before": plan.bytes_before,
            "bytes_after": plan.bytes_after,
            "expected_error_before": plan.error_before,
            "expected_error_after": plan.error_after,
            "encode_s": round(seconds, 1),
        }
    return made


def time_lines(choice: KChoice, device: str) -> list[str]:
    """The same times as lines of an error message."""
    prices = price_json(choice, device).items()
    return [f"encoding here, --mixed-k {name}: about {price['encode_s']:,.0f} s" for name, price in prices if "encode_s" in price]


def reencoded_facts(facts: Mapping[str, Json]) -> dict[str, Json]:
    """What the manifest says of matrices that were encoded again, from the journal's facts of each file: by module from K, to K and
    error, and the errors in short.
    """
    every = {module: said for fact in facts.values() for module, said in fact.get("reencoded", {}).items()}
    if not every:
        return {}
    errors: dict[str, float] = {}
    for kind, sign in (("lifted", 1), ("lowered", -1)):
        if of_kind := [said["relative_error"] for said in every.values() if sign * (said["to"] - said["from"]) > 0]:
            errors |= {f"mean_of_{kind}": math.fsum(of_kind) / len(of_kind), f"worst_of_{kind}": max(of_kind)}
    return {"reencoded": dict(sorted(every.items())), "errors": errors}
