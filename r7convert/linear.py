"""Dense EXL3 products on the GPU: y = had(had(x * suh) @ decode(trellis)) * svh with the trellis decoded inside the product.

The door of kernels/linear.cu, for shared experts in K6. codec.linear_forward is the truth, and what runs without a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from r7convert import codec
from r7convert.codec import BLOCK, Matrix
from r7convert.errors import Offences, UsageError, complain
from r7convert.nvrtc import Kernel, load_kernel
from r7convert.product import Cut, choose_token_blocks, cut_product, processors

KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def linear_forward(x: Tensor, matrices: Sequence[Matrix], *, dtype: torch.dtype | None = None) -> Tensor:
    """One matrix, or two of one shape, K and suh (a shared expert's gate and up) in one product; outputs side by side.

    Shapes:  x [tokens, in] bfloat16 or float16; matrices as in codec, sides multiples of 128, K 3..6, on x's device.
             Returns [tokens, out] or [tokens, 2*out] in `dtype`: float32, or x's dtype, which is the default.
    Units:   float16 into the product, float32 to the end, one rounding.
    Raises:  UsageError for shapes, dtypes and devices that do not fit.
    Source:  FORMAT.md sections 1 and 9.
    Kernel:  kernels/linear.cu; relative L2 against codec.linear_forward under 4e-3.
    """
    dtype = x.dtype if dtype is None else dtype
    _check(x, matrices, dtype)
    if x.device.type != "cuda":
        return torch.cat([codec.linear_forward(x, matrix) for matrix in matrices], dim=1).to(dtype)
    first, second = matrices[0], matrices[-1]
    tokens, in_side = x.shape
    out_side, count = first.svh.shape[0], len(matrices)
    out = torch.empty(tokens, count * out_side, dtype=dtype, device=x.device)
    if not tokens:
        return out
    cut = _cut(tokens, in_side, out_side, count, processors(x.device))
    rotated = torch.empty(tokens * in_side * (2 if cut.terms_apart else 1), dtype=torch.float16, device=x.device)
    products = torch.empty(cut.splits * out.numel(), dtype=torch.float32, device=x.device)

    def launch(door: str, grid: int | tuple[int, ...], block: int, *arguments: object, shared_bytes: int = 0, overlap: bool = True) -> None:
        _kernel(door, x.device).launch(grid, block, *arguments, shared_bytes=shared_bytes, overlap=overlap)

    prepare = (x, KINDS[x.dtype], first.suh, tokens, in_side, rotated)
    launch(f"linear_prepare<{str(cut.terms_apart).lower()}>", -(-tokens * (in_side // BLOCK) // 8), 256, *prepare, overlap=False)
    product = (first.trellis, second.trellis, first.bits, rotated, tokens, in_side, out_side, products)
    grid = (-(-tokens // cut.item_tokens), cut.column_blocks, cut.splits)
    launch(f"linear_product{cut.instance}", grid, 32 * cut.warps, *product, shared_bytes=cut.shared_bytes(first.bits))
    finish = (products, cut.splits, first.svh, second.svh, tokens, out_side, out, KINDS[dtype])
    launch(f"linear_finish<{count}>", -(-tokens * count * (out_side // BLOCK) // 8), 256, *finish)
    return out


@cache
def _cut(tokens: int, in_side: int, out_side: int, count: int, processors: int) -> Cut:
    blocks = choose_token_blocks(tokens)
    return cut_product(in_side, out_side, items=-(-tokens // (8 * blocks)), token_blocks=blocks, matrices=count, processors=processors)


@cache
def _kernel(door: str, device: torch.device) -> Kernel:
    return load_kernel("linear.cu", door, device=device)


def _check(x: Tensor, matrices: Sequence[Matrix], dtype: torch.dtype) -> None:
    if len(matrices) not in (1, 2):
        raise UsageError(complain("linear_forward", "matrices", expected="one or two", found=len(matrices)))
    wrong = Offences()

    def expect(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
        good = tuple(tensor.shape) == shape and tensor.dtype in dtypes and tensor.device == x.device and tensor.is_contiguous()
        if not good or tensor.data_ptr() % 16:
            expected = f"contiguous {' or '.join(map(str, dtypes))} {[*shape]} on {x.device}, aligned to 16"
            wrong.add(f"linear_forward: {name}", "tensor", expected=expected, found=f"{tensor.dtype} {[*tensor.shape]} on {tensor.device}")

    bits, in_side, out_side = matrices[0].bits, matrices[0].suh.shape[0], matrices[0].svh.shape[0]
    for name, found in {"in": in_side, "out": out_side}.items():
        if found % BLOCK or not found:
            wrong.add("linear_forward", name, expected=f"a multiple of {BLOCK}", found=found)
    if not 3 <= bits <= 6:
        wrong.add("linear_forward", "K", expected="3..6", found=bits)
    expect("x", x, (torch.bfloat16, torch.float16), (x.shape[0] if x.ndim else 0, in_side))
    for nth, matrix in enumerate(matrices):
        expect(f"trellis {nth}", matrix.trellis, (torch.int16,), (in_side // 16, out_side // 16, 16 * bits))
        expect(f"suh {nth}", matrix.suh, (torch.float16,), (in_side,))
        expect(f"svh {nth}", matrix.svh, (torch.float16,), (out_side,))
    if dtype not in (torch.float32, x.dtype):
        wrong.add("linear_forward", "dtype", expected=f"float32 or {x.dtype}", found=dtype)
    wrong.check(UsageError)
    suh, other = matrices[0].suh, matrices[-1].suh
    if suh.data_ptr() != other.data_ptr() and not torch.equal(suh, other):  # the comparison waits for the GPU: not in a graph
        raise UsageError(
            complain("linear_forward", "two matrices with one suh", expected="equal bytes", found="different", do="Call it twice.")
        )
