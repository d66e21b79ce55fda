"""Serve one MoE layer from slabs in forty lines: memory maps in, activations out. NumPy is all it needs.

    python examples/serve_layer.py FOLDER LAYER [TOKENS]

A rank maps its tables, decodes an expert when a token asks for it, and adds up; the sum over ranks is the layer's output. What the
tables mean is in docs/format.md; a server decodes inside the product, as kernels/moe.cu does.
"""

import json
from pathlib import Path

import numpy as np

LANE, J = np.divmod(np.arange(256), 8)
ROW, COLUMN = 2 * (LANE % 4) + (J & 1) + 8 * (J >> 1 & 1), LANE // 4 + 8 * (J >= 4)  # where value i of a tile stands
HADAMARD = np.array([[(-1) ** (r & c).bit_count() for c in range(128)] for r in range(128)], np.float32) / 128**0.5


def open_layer(folder: Path, layer: int, rank: int) -> dict:
    """What slabs.json says of the layer, and under each table's name its pieces, mapped."""
    said = json.loads((folder / "slabs.json").read_text())["layers"][str(layer)]
    data = np.memmap(folder / said["ranks"][rank].pop("file"), np.uint8, mode="r")
    for name, places in said["ranks"][rank].items():
        kind = "<u2" if name in ("w13", "w2") else "<f2"
        pieces = [(p["offset"], p["shape"]) for p in (places if isinstance(places, list) else [places])]
        said[name] = [data[at:][: 2 * int(np.prod(shape))].view(kind).reshape(shape) for at, shape in pieces]
    return said


def decode(plane: np.ndarray) -> np.ndarray:
    """[in/16, out/16, 16K] words to the rotated matrix [in, out]."""
    k = plane.shape[-1] // 16
    words = plane.reshape(*plane.shape[:2], -1, 2)[..., ::-1].reshape(plane.shape)  # the two words of each 32 bits change places
    bits = np.unpackbits(words.astype(">u2").view(np.uint8), axis=-1)  # [..., 256K], a ring
    ends = (np.arange(256)[:, None] + 1) * k + np.arange(-16, 0)
    state = bits[..., ends % (256 * k)].astype(np.uint32) @ (1 << np.arange(15, -1, -1, dtype=np.uint32))
    x = ((state * np.uint32(0xCBAC1FED)) & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)
    tiles = np.empty((*plane.shape[:2], 16, 16), np.float32)
    tiles[..., ROW, COLUMN] = (x & 0xFFFF).astype(np.uint16).view(np.float16) + (x >> 16).astype(np.uint16).view(np.float16)
    return tiles.swapaxes(1, 2).reshape(16 * plane.shape[0], 16 * plane.shape[1])


def linear(x: np.ndarray, suh: np.ndarray, plane: np.ndarray, svh: np.ndarray) -> np.ndarray:
    rotated = (x * suh).reshape(-1, 128) @ HADAMARD
    return ((rotated.reshape(len(x), -1) @ decode(plane)).reshape(-1, 128) @ HADAMARD).reshape(len(x), -1) * svh


def expert(maps: dict, e: int, x: np.ndarray) -> np.ndarray:
    """One expert's share of this rank, for tokens x [n, H] in float32."""
    (gt, gi), (ut, ui), (dt, di) = (divmod(maps["descriptors"][row * maps["stride"] + e], 256) for row in range(3))
    gate_svh, up_svh, down_suh = np.split(maps["rotations"][0][e].astype(np.float32), 3)
    gate_suh, up_suh, down_svh = (maps[name][0][min(e, len(maps[name][0]) - 1)] for name in ("gate_suh", "up_suh", "down_svh"))
    g = linear(x, gate_suh, maps["w13"][gt][gi], gate_svh)
    u = linear(x, up_suh, maps["w13"][ut][maps["gate_n"][ut] + ui], up_svh)
    return linear(g / (1 + np.exp(-g)) * u, down_suh, maps["w2"][dt][di], down_svh)


def serve(folder: Path, layer: int, rank: int, x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Tokens x [n, H], each to its experts ids [n, k] with weights [n, k]: this rank's share of the output."""
    maps, out = open_layer(folder, layer, rank), np.zeros_like(x)
    for e in np.unique(ids):
        token, slot = np.nonzero(ids == e)
        out[token] += weights[token, slot, None] * expert(maps, e, x[token])
    return out


if __name__ == "__main__":
    import sys

    folder, layer, tokens = Path(sys.argv[1]), int(sys.argv[2]), int((sys.argv[3:] or [4])[0])
    said, random = json.loads((folder / "slabs.json").read_text()), np.random.default_rng(0)
    x = random.standard_normal((tokens, said["hidden"]), np.float32)
    ids = random.permuted(np.tile(np.arange(said["experts"]), (tokens, 1)), axis=1)[:, :2]
    y = sum(serve(folder, layer, rank, x, ids, np.full(ids.shape, 0.5, np.float32)) for rank in range(said["tp"]))
    print(f"layer {layer}, {tokens} tokens to 2 experts each, {said['tp']} ranks: RMS {np.sqrt(np.mean(y**2)):.4g}")
