"""Every kernel of the fused experts and the dense product at small odd sizes, for compute-sanitizer to watch: `make sanitize`.

Each configuration is also compared with the truth, so that a run that computed nothing is no clean run.
"""

from __future__ import annotations

import torch

from r7convert import codec
from r7convert.codec import Matrix
from r7convert.linear import linear_forward
from r7convert.moe import load_experts, moe_forward, moe_reference, moe_scratch_bytes
from tests.random_slabs import random_bits, random_call, random_scales, random_slabs, relative_l2

DEVICE = "cuda"
BOUND = 1e-3

# (pool of K, hidden, inner, experts, per_expert, two_suh)
LAYERS = [((3, 4), 384, 128, 6, False, False), ((3, 5), 128, 384, 5, True, True), ((4, 6), 256, 256, 300, True, False)]
CALLS = [(1, 1), (3, 4), (33, 2), (70, 4)]  # blocks of 8, 16 and 32 tokens; tables made by the blocks and by moe_route


def main() -> None:
    looked = 0
    for pool, hidden, inner, count, per_expert, two_suh in LAYERS:
        bits = random_bits(count, pool, 7)
        slabs, _ = random_slabs(bits, hidden=hidden, inner=inner, per_expert=per_expert, two_suh=two_suh, device=DEVICE)
        experts = load_experts(slabs, DEVICE)
        for batch, topk in CALLS:
            x, ids, weights = random_call(batch, topk, slabs, device=DEVICE)
            ids[-1, -1] = -1
            ids[: batch // 2, 0] = 1  # one expert with many pairs
            out = torch.full(x.shape, torch.nan, device=DEVICE)
            scratch = torch.full((moe_scratch_bytes(experts, batch, topk),), 0xFF, dtype=torch.uint8, device=DEVICE)
            moe_forward(x, ids, weights, experts, scratch=scratch, out=out)
            want = moe_reference(x, ids, weights, slabs)
            error = relative_l2(out, want) if want.any() else float(out.abs().max())
            assert error <= BOUND, (pool, batch, topk, error)
            looked += 1
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for bits, in_side, out_side in ((3, 256, 128), (6, 128, 640)):
        suh = random_scales(in_side, unit=in_side**-0.5, generator=generator)
        pair = []
        for _ in range(2):
            words = torch.randint(-32768, 32768, (in_side // 16, out_side // 16, 16 * bits), generator=generator, device=DEVICE).short()
            pair.append(Matrix(words, suh, random_scales(out_side, unit=1.0, generator=generator), bits))
        for tokens in (1, 9, 40):
            x = torch.randn(tokens, in_side, generator=generator, device=DEVICE).half()
            want = torch.cat([codec.linear_forward(x, m, dtype=torch.float64) for m in pair], dim=1)
            assert relative_l2(linear_forward(x, pair, dtype=torch.float32), want) <= BOUND
            looked += 1
    torch.cuda.synchronize()
    print(f"sanitize: {looked} configurations computed and compared")


if __name__ == "__main__":
    main()
