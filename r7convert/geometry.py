"""Sizes from config.json, by the keys of every family in families.py. Two keys that differ are refused, never ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from r7convert import families
from r7convert.errors import FormatError, UnsupportedError, complain
from r7convert.format import HADAMARD, MAX_COUNT, MAX_SIZE, Geometry, is_int
from r7convert.units import ranges

Json = Any


def parse_geometry(config: Mapping[str, Json], where: str = "config.json") -> Geometry:
    """Sizes from config.json, from its `text_config` where that is the one that holds them.

    Raises:  FormatError for a missing or non-integer size and for keys that differ; UnsupportedError where H or I is no multiple
             of 128, and for expert counts or sizes that differ by layer.
    Source:  FORMAT.md sections 1 and 2; families.py.
    """
    if not isinstance(config, Mapping):
        raise FormatError(complain(where, "JSON", expected="an object", found=type(config).__name__))
    text = config.get("text_config")
    nested = isinstance(text, Mapping) and "hidden_size" in text
    sizes = _Sizes(text if nested and isinstance(text, Mapping) else config, f"{where}: text_config" if nested else where)
    layers = sizes.number(("num_hidden_layers",))
    geometry = Geometry(
        hidden=sizes.number(("hidden_size",), most=MAX_SIZE),
        intermediate=sizes.number(_expert_size_keys(sizes.config), layers=layers, most=MAX_SIZE),
        experts=sizes.number(families.ROUTED_EXPERTS, layers=layers),
        shared_experts=_shared_experts(sizes),
        layers=layers,
        moe_layers=tuple(_moe_layers(sizes, layers)),
        mtp_layers=sizes.number(families.MTP_LAYERS, default=0, least=0),
        nested=nested,
    )
    for name, size in (("hidden_size", geometry.hidden), ("moe_intermediate_size", geometry.intermediate)):
        if size % HADAMARD:
            raise UnsupportedError(complain(sizes.where, name, expected=f"a multiple of {HADAMARD}", found=size))
    return geometry


class _Sizes:
    """Numbers of one JSON object, each under one of several keys."""

    def __init__(self, config: Mapping[str, Json], where: str) -> None:
        self.config = config
        self.where = where

    def number(
        self, keys: Sequence[str], default: int | None = None, least: int = 1, most: int = MAX_COUNT, layers: int | None = None
    ) -> int:
        """The integer that every key present agrees on; with `layers`, also a list of that many, all equal."""
        found: dict[str, int] = {}
        for key in keys:
            value = self.config.get(key)
            if isinstance(value, list) and layers is not None and len(value) == layers and value:
                value = self._one_of(key, value)
            if value is None:
                continue
            if not is_int(value) or not least <= value <= most:
                raise FormatError(complain(self.where, key, expected=f"an integer from {least} to {most}", found=repr(value)))
            found[key] = int(value)
        if len(set(found.values())) > 1:
            said = " and ".join(f"{key} {value}" for key, value in found.items())
            raise FormatError(complain(self.where, "keys of one size", expected="one value", found=said, do="Keep the right one."))
        if found:
            return next(iter(found.values()))
        if default is not None:
            return default
        raise FormatError(
            complain(self.where, "geometry", expected=" or ".join(keys), found="none of them", do="Is this a mixture-of-experts config?")
        )

    def flags(self, key: str, layers: int, words: Sequence[Json]) -> list[bool] | None:
        """A list of one word a layer, out of two, the second meaning routed experts; None where it is no list. Some go on over the
        MTP layers.
        """
        value = self.config.get(key)
        if not isinstance(value, list):
            return None
        if len(value) < layers or any(item not in words or isinstance(item, bool) for item in value):
            expected = f"{layers} of {words[0]!r} and {words[1]!r}, one a layer"
            raise FormatError(complain(self.where, key, expected=expected, found=repr(value)[:80]))
        return [item == words[1] for item in value]

    def _one_of(self, key: str, value: list[Json]) -> Json:
        wrong = [item for item in value if not is_int(item)]
        if wrong:
            raise FormatError(complain(self.where, key, expected="integers, one a layer", found=repr(wrong[0])))
        if len(set(value)) > 1:
            said = "; ".join(f"{n} in layers {ranges(layer for layer, item in enumerate(value) if item == n)}" for n in sorted(set(value)))
            do = "Counts and sizes that differ by layer are not supported."
            raise UnsupportedError(complain(self.where, key, expected="one number for all layers", found=said, do=do))
        return value[0]


def _expert_size_keys(config: Mapping[str, Json]) -> tuple[str, ...]:
    if any(config.get(key) is not None for key in families.EXPERT_SIZE):
        return families.EXPERT_SIZE
    beside = [size for count, size in families.EXPERT_SIZE_BESIDE.items() if config.get(count) is not None]
    return tuple(beside) or families.EXPERT_SIZE


def _shared_experts(sizes: _Sizes) -> int:
    one = int(sizes.number((families.SHARED_EXPERT_SIZE,), default=0, least=0, most=MAX_SIZE) > 0)
    return sizes.number(families.SHARED_EXPERTS, default=one, least=0)


def _moe_layers(sizes: _Sizes, layers: int) -> list[int]:
    """Layers with routed experts: those that no key makes dense. With no such key, all."""
    first = sizes.number(families.FIRST_DENSE, default=0, least=0)
    by_list = sizes.flags(families.FREQUENCY, layers, (0, 1))
    frequency = 1 if by_list is not None else sizes.number((families.FREQUENCY,), default=1)
    by_type = sizes.flags(families.LAYER_TYPES, layers, ("dense", "sparse"))
    step = sizes.number((families.STEP,), default=1)
    only = sizes.config.get(families.DENSE_ONLY) or []
    if not isinstance(only, list) or not all(is_int(layer) and 0 <= layer < layers for layer in only):
        raise FormatError(complain(sizes.where, families.DENSE_ONLY, expected=f"layers below {layers}", found=repr(only)[:80]))
    return [
        layer
        for layer in range(first, layers)
        if layer % frequency == 0
        and (layer + 1) % step == 0
        and layer not in only
        and (by_list is None or by_list[layer])
        and (by_type is None or by_type[layer])
    ]
