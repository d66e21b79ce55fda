"""What MANIFEST.json states beside the files, held against what is found: each fact has a rule here, and one that has none is refused.

What was asked for cannot be found again in what was made: the budget and the importances of a policy, `drop_mtp` where there was no
MTP layer, `allow_nonfinite` where every value is finite, the tool's version. Of those the form is judged.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from r7convert.address import read_origin
from r7convert.evidence import Evidence, Payloads, is_ours
from r7convert.findings import Check, Part
from r7convert.format import PER_EXPERT_V1, SLICED, is_int
from r7convert.journal import MANIFEST, Manifest
from r7convert.store import read_json
from r7convert.verify_files import is_r7

Json = Any

FACTS = {"target", "tp", "reader", "rotation_layout", "layers", "drop_mtp", "source", "moe_layers", "partial", "accounting", "policy"}
FACTS |= {"allow_nonfinite", "zeros", "nonfinite", "reencoded", "errors", "encoded", "not_encoded"}
SOURCE = {"repo", "commit", "headers_sha256"}
POLICY = {"name", "budget", "importance", "bits_sha256", "expected_error_before", "expected_error_after", "reference"}
ENCODED = {"from", "bits", "seed_name", "proxy_error", "relative_error", "worst_column"}
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_DIGEST, _COMMIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


def check_stated(part: Part, manifest: Manifest, output: Evidence) -> None:
    """The facts that the output itself can speak for, and the form of all."""
    facts, target = manifest.facts, manifest.facts["target"]
    check = part.check("every fact of the manifest is known, sound and true of the files", "facts")
    check.expect(is_ours(manifest.tool), MANIFEST, "tool", expected="r7convert and its version", found=manifest.tool)
    check.same_json(f"{MANIFEST}: facts", expected=sorted(facts.keys() & FACTS), found=sorted(facts))
    layout = _layout(output, target, check)
    if target != "rank-sliced":
        check.same(MANIFEST, "reader", expected=None, found=facts.get("reader"))
    if "rotation_layout" in facts:
        stated = facts["rotation_layout"]
        due = (None, layout) if target == "r7" else (layout,)  # only a tail that was cut anew has one there
        check.expect(stated in due, MANIFEST, "rotation_layout", expected=layout, found=stated)
    if target not in SLICED:
        tp = facts.get("tp")
        whole = tp is None or (target == "r7" and isinstance(tp, int) and is_int(tp) and tp > 0)
        check.expect(whole, MANIFEST, "tp", expected="none, or of target r7 a number of ranks", found=tp)
    partial = _object(facts.get("partial"))
    check.same(MANIFEST, "layers", expected=partial.get("layers"), found=facts.get("layers"))
    if "moe_layers" in facts:
        found, stated = sorted(output.expert_tensors), facts["moe_layers"]
        sound = (
            isinstance(stated, list) and all(map(is_int, stated)) and (stated == found if target in SLICED else set(stated) <= set(found))
        )
        check.expect(sound, MANIFEST, "moe_layers", expected=found, found=stated)
    for key in ("drop_mtp", "allow_nonfinite"):
        check.expect(isinstance(facts.get(key, False), bool), MANIFEST, key, expected="true or false", found=facts.get(key))
    if facts.get("nonfinite"):
        check.expect(facts.get("allow_nonfinite") is True, MANIFEST, "allow_nonfinite", expected="true", found=facts.get("allow_nonfinite"))
    _check_origin(check, facts)
    if "policy" in facts:
        _check_policy(check, _object(facts["policy"]), output)
    for module, said in _object(facts.get("encoded")).items():
        _check_encoded(check, module, _object(said))
    for module, why in _object(facts.get("not_encoded")).items():
        stays = isinstance(why, str) and any(f"{module}.{field}" in output.tensors for field in ("weight", "trellis"))
        check.expect(stays, f"{MANIFEST}: not_encoded", module, expected="a module of these files, and the reason", found=why)


def check_against_source(part: Part, facts: Mapping[str, Json], source: Evidence, output: Evidence, dropped: Collection[str]) -> None:
    """The facts that name the source, and what its vectors hold; only repack states them."""
    if "source" not in facts:
        return
    check = part.check("the manifest names this source, and what its vectors hold", "facts")
    stated = _object(facts["source"])
    check.same(f"{MANIFEST}: source", "headers_sha256", expected=_headers_sha256(source), found=stated.get("headers_sha256"))
    origin = read_origin(source.folder)
    if origin is not None:
        known = {"repo": origin.id, "commit": origin.revision}
        check.same_json(f"{MANIFEST}: source", expected=known, found={key: stated.get(key) for key in known})
    stays = facts.get("target") == "exl3" or (facts.get("target") == "r7" and is_r7(source.folder))  # but what must change its form
    there = source.headers if stays else {}
    anew = [layer for layer, entries in sorted(output.expert_tensors.items()) if entries[0].file not in there]
    check.same(MANIFEST, "moe_layers, those in files of their own", expected=anew, found=facts.get("moe_layers"))
    zeros, nonfinite = _scan(source, dropped, check)
    for key, due in (("zeros", zeros), ("nonfinite", nonfinite)):
        check.same_json(f"{MANIFEST}: {key}", expected=due, found=facts.get(key, {}))
    for module, said in _object(facts.get("encoded")).items():
        weight = source.tensors.get(f"{module}.weight")
        if weight is not None:
            found = _object(said).get("from")
            check.same(f"{MANIFEST}: encoded: {module}", "from", expected=weight.dtype, found=DTYPES.get(str(found), found))


def _layout(output: Evidence, target: str, check: Check) -> Json:
    """The rotation layout that the output's JSON states for its reader."""
    config: Json = {}
    with check.collecting(0):
        config = read_json(output.folder / "config.json")
    tail = _object(_object(config).get("hybrid_tr3_tail"))
    layout = None
    if target in ("rank-sliced", "r7"):
        layout = tail.get("rotation_layout", PER_EXPERT_V1)
    elif target == "slabs":
        with check.collecting(0):
            layout = _object(read_json(output.folder / "slabs.json")).get("rotation_layout")
    return layout


def _check_origin(check: Check, facts: Mapping[str, Json]) -> None:
    if "source" not in facts:
        return
    stated = _object(facts["source"])
    repo, commit, digest = (stated.get(key) for key in ("repo", "commit", "headers_sha256"))
    sound = stated.keys() == SOURCE and _matches(_DIGEST, digest)
    sound &= repo is None or (isinstance(repo, str) and "/" in repo)
    sound &= commit is None or _matches(_COMMIT, commit)
    check.expect(sound, MANIFEST, "source", expected="repo, commit and headers_sha256", found=facts["source"])


def _check_policy(check: Check, policy: Mapping[str, Json], output: Evidence) -> None:
    """The policy's form, and that the K of the experts are those it chose."""
    where = f"{MANIFEST}: policy"
    check.expect(POLICY - {"reference"} <= policy.keys() <= POLICY, where, "keys", expected=sorted(POLICY), found=sorted(policy))
    name, budget, importance = (policy.get(key) for key in ("name", "budget", "importance"))
    check.expect(name in ("lift", "fit"), where, "name", expected="lift or fit", found=name)
    check.expect(budget is None if name == "lift" else is_int(budget), where, "budget", expected="bytes, of fit alone", found=budget)
    check.expect(importance is None or _matches(_DIGEST, importance), where, "importance", expected="a digest", found=importance)
    expected = [policy.get(f"expected_error_{when}") for when in ("before", "after")]
    sound = all(isinstance(value, float) and math.isfinite(value) and value >= 0 for value in expected)
    check.expect(sound, where, "expected errors", expected="two figures", found=expected)
    reference = policy.get("reference")
    check.expect(reference is None or isinstance(reference, dict), where, "reference", expected="none, or an object", found=reference)
    table = [(layer, [max(row) for _, row in output.layer(layer).k_rows()]) for layer in sorted(output.expert_tensors)]
    due = hashlib.sha256(repr(table).encode()).hexdigest()
    check.same(where, "digest of the K of every expert", expected=due, found=policy.get("bits_sha256"))


def _check_encoded(check: Check, module: str, said: Mapping[str, Json]) -> None:
    where = f"{MANIFEST}: encoded: {module}"
    check.same(where, "keys", expected=sorted(ENCODED), found=sorted(said))
    check.expect(said.get("from") in DTYPES, where, "from", expected=f"one of {sorted(DTYPES)}", found=said.get("from"))
    base, _, name = module.rpartition(".")
    due = f"{base}.{'down_proj' if name == 'down_proj' else 'gate_up_proj'}"
    check.same(where, "seed_name", expected=due, found=said.get("seed_name"))
    for key in ("proxy_error", "relative_error"):
        value = said.get(key)
        check.expect(isinstance(value, float) and 0 <= value < 1, where, key, expected="a figure of 0 to 1", found=value)


def _headers_sha256(source: Evidence) -> str:
    """As the page says: every file by name with its size and where data begins, every tensor in it with dtype, shape and place."""
    digest = hashlib.sha256()
    for file, header in sorted(source.headers.items()):
        digest.update(f"{file} {header.size} {header.data_start}\n".encode())
        for entry in header.tensors.values():
            digest.update(f"{entry.name} {entry.dtype} {entry.shape} {entry.offset}\n".encode())
    return digest.hexdigest()


def _scan(source: Evidence, dropped: Collection[str], check: Check) -> tuple[dict[str, Json], dict[str, Json]]:
    """Exact zeros, and values that are not finite, in every scale vector of the source: first index and count, by name."""
    zeros: dict[str, Json] = {}
    nonfinite: dict[str, Json] = {}
    with check.collecting(), Payloads(source.folder) as payloads:
        for name in sorted(source.tensors.keys() - set(dropped)):
            entry = source.tensors[name]
            if entry.dtype != "F16" or not name.endswith(("suh", "svh")):
                continue
            values = payloads.array(entry)
            odd = np.flatnonzero(~np.isfinite(values))
            none = np.flatnonzero(values == 0)
            if len(odd):
                nonfinite[name] = {"first": int(odd[0]), "count": len(odd), "value": str(values.reshape(-1)[odd[0]])}
            elif len(none):
                zeros[name] = {"first": int(none[0]), "count": len(none)}
    return zeros, nonfinite


def _matches(pattern: re.Pattern[str], value: Json) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _object(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}
