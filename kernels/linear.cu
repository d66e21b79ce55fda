// One or two dense EXL3 matrices that share suh (a shared expert's gate and up; its down alone), on the machine of moe.cu:
// linear_prepare -> linear_product -> linear_finish. Truth: codec.linear_forward. Bound: see product.cuh.
#include "product.cuh"
#include "rotate.cuh"

using namespace r7;

// had(x * suh) in fragment order. One warp, one token, 128 channels.
template <bool REPEAT>
__global__ void __launch_bounds__(256) linear_prepare(
    const void* __restrict__ x, i64 x_kind, const __half* __restrict__ suh, i64 tokens, i64 in_side, __half* __restrict__ rotated) {
    wait_for_inputs();
    const int lane = threadIdx.x % 32;
    const i64 task = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32;
    const i64 token = task / (in_side / BLOCK), at = task % (in_side / BLOCK) * BLOCK + 4 * lane;
    if (token >= tokens) return;
    float v[4], scale[4];
    load_activations(v, x, token * in_side + at, int(x_kind));
    load_half4(scale, suh + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= scale[i];
    hadamard_128(v, lane);
    store_fragments<REPEAT>(v, rotated + (token * in_side + at - 4 * lane) * (REPEAT ? 2 : 1), lane);
}

// grid: blocks of 8*NB tokens; column blocks, the second matrix's after the first's; splits of the in-channels.
// out is [splits][tokens][matrices * out_side].
template <int NB, int DEPTH>
__global__ void __launch_bounds__(32 * MAX_WARPS, blocks_a_processor<NB>) linear_product(
    const uint4* __restrict__ first, const uint4* __restrict__ second, i64 bits, const __half* __restrict__ rotated, i64 tokens,
    i64 in_side, i64 out_side, float* __restrict__ out) {
    extern __shared__ uint4 staged[];
    __shared__ u32 rows[8 * NB];
    const i64 first_token = blockIdx.x * i64(8 * NB);
    const int warps = int(blockDim.x) / 32, width = warps * STRIP, row_tiles = int(out_side / 16), column_blocks = row_tiles / width;
    const int matrix = blockIdx.y / column_blocks, first_tile = blockIdx.y % column_blocks * width;
    for (int i = threadIdx.x; i < 8 * NB; i += blockDim.x) rows[i] = i;
    __syncthreads();
    const int steps = int(in_side / (16 * STEP));
    const int begin = steps * int(blockIdx.z) / int(gridDim.z) * STEP, end = steps * int(blockIdx.z + 1) / int(gridDim.z) * STEP;
    const i64 pitch = i64(row_tiles) * 2 * bits, tokens_pitch = in_side / 16 * token_pieces<NB>;
    const i64 out_pitch = gridDim.y / column_blocks * out_side;
    const Share share{
        (matrix ? second : first) + begin * pitch + first_tile * 2 * bits,
        pitch,
        end - begin,
        reinterpret_cast<const uint4*>(rotated) + first_token * tokens_pitch + begin * token_pieces<NB>,
        u32(tokens_pitch),
        out + (blockIdx.z * tokens + first_token) * out_pitch + matrix * out_side + first_tile * 16,
        u32(out_pitch),
        int(min(i64(8 * NB), tokens - first_token)),
        rows,
        rows,
    };
    multiply<NB, DEPTH>(int(bits), share, staged, wait_for_inputs);
}

// Sums the splits, rotates, scales, rounds once. One warp, one token, 128 channels; a row of out is the first matrix's
// channels and then the second's. A template so that it is compiled only where it is asked for.
template <int MATRICES>
__global__ void __launch_bounds__(256) linear_finish(
    const float* __restrict__ products, i64 splits, const __half* __restrict__ first_svh, const __half* __restrict__ second_svh,
    i64 tokens, i64 out_side, void* __restrict__ out, i64 out_kind) {
    wait_for_inputs();
    const int lane = threadIdx.x % 32;
    const i64 pitch = MATRICES * out_side, task = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32;
    const i64 token = task / (pitch / BLOCK), at = task % (pitch / BLOCK) * BLOCK + 4 * lane;
    if (token >= tokens) return;
    float sum[4] = {}, svh[4];
    load_half4(svh, at < out_side ? first_svh + at : second_svh + (at - out_side));
#pragma unroll 4
    for (i64 split = 0; split < splits; ++split) add_float4(sum, products + (split * tokens + token) * pitch + at);
    hadamard_128(sum, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] *= svh[i];
    store_result(sum, out, token * pitch + at, int(out_kind));
}
