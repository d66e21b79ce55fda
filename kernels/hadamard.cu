// hadamard_128: had128(x * pre) * post in blocks of 128, fp32 inside, one rounding. Truth: codec.hadamard_128, bitwise: the same
// butterflies in the same order, and no multiplication is fused with an addition. Bound: bytes.
#include "butterfly.cuh"

using namespace r7;

constexpr int BLOCK = 128;
constexpr int AT_ONCE = 2;  // pairs of blocks a warp has in flight

// Along the last dimension: half a warp transforms a block, eight adjacent values a lane.
template <typename T>
__global__ void __launch_bounds__(256) hadamard_rows(const Several<T, 8>* __restrict__ x, Several<T, 8>* __restrict__ out, const Several<float, 8>* __restrict__ pre, const Several<float, 8>* __restrict__ post, i64 blocks, i64 blocks_a_row) {
    const int lane = threadIdx.x % 16;
    const i64 first = (blockIdx.x * i64(blockDim.x / 32) + threadIdx.x / 32) * 2 * AT_ONCE + threadIdx.x % 32 / 16;
    i64 place = pre || post ? first % blocks_a_row : 0;  // of the block in its row

    Several<T, 8> in[AT_ONCE] = {};
#pragma unroll
    for (int b = 0; b < AT_ONCE; ++b)
        if (first + 2 * b < blocks) in[b] = x[(first + 2 * b) * 16 + lane];
#pragma unroll
    for (int b = 0; b < AT_ONCE; ++b) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = widen(in[b].at[i]);
        if (pre) {
            const Several<float, 8> scale = pre[place * 16 + lane];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(v[i], scale.at[i]);
        }
        butterflies(v);
#pragma unroll
        for (int distance = 1; distance < 16; distance *= 2) {
            const float sign = lane & distance ? -1.0f : 1.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = __fmaf_rn(sign, v[i], __shfl_xor_sync(0xFFFFFFFFu, v[i], distance));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(v[i], NORM);
        if (post) {
            const Several<float, 8> scale = post[place * 16 + lane];
#pragma unroll
            for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(v[i], scale.at[i]);
        }
        Several<T, 8> result;
#pragma unroll
        for (int i = 0; i < 8; ++i) narrow(v[i], result.at[i]);
        if (first + 2 * b < blocks) out[(first + 2 * b) * 16 + lane] = result;
        if (pre || post)
            for (place += 2; place >= blocks_a_row;) place -= blocks_a_row;
    }
}

// Along another dimension, as [rows, columns] with blocks of 128 rows: a thread transforms a block's column in registers.
template <typename T>
__global__ void __launch_bounds__(BLOCK) hadamard_columns(const T* __restrict__ x, T* __restrict__ out, const float* __restrict__ pre, const float* __restrict__ post, i64 columns, i64 blocks_a_side) {
    const i64 across = (columns + BLOCK - 1) / BLOCK;
    const i64 block = blockIdx.x / across, column = blockIdx.x % across * BLOCK + threadIdx.x;
    if (column >= columns) return;
    const i64 place = block % blocks_a_side * BLOCK;
    x += block * BLOCK * columns + column;
    out += block * BLOCK * columns + column;

    float v[BLOCK];
#pragma unroll
    for (int r = 0; r < BLOCK; ++r) v[r] = widen(x[r * columns]);
    if (pre) {
#pragma unroll
        for (int r = 0; r < BLOCK; ++r) v[r] = __fmul_rn(v[r], pre[place + r]);
    }
    butterflies(v);
#pragma unroll
    for (int r = 0; r < BLOCK; ++r) {
        const float y = __fmul_rn(v[r], NORM);
        narrow(post ? __fmul_rn(y, post[place + r]) : y, out[r * columns]);
    }
}
