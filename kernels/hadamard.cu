// hadamard_128: had128(x * pre) * post in blocks of 128, fp32 inside, one rounding. Truth: codec.hadamard_128, bitwise: the same
// butterflies in the same order, and no multiplication is fused with an addition. Bound: bytes.
#include <cuda_bf16.h>

#include "trellis.cuh"

using namespace r7;

constexpr int BLOCK = 128;
constexpr float NORM = 0.08838834764831845f;  // 1/sqrt(128)

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void narrow(float x, float& out) { out = x; }
__device__ __forceinline__ void narrow(float x, __half& out) { out = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

template <typename T>
struct alignas(4 * sizeof(T)) Four {
    T at[4];
};

// Along the last dimension: a warp transforms a block, four adjacent values a lane.
template <typename T>
__global__ void __launch_bounds__(256) hadamard_rows(const Four<T>* __restrict__ x, Four<T>* __restrict__ out, const float4* __restrict__ pre, const float4* __restrict__ post, i64 blocks, i64 blocks_a_row) {
    const int lane = threadIdx.x % 32;
    const i64 block = blockIdx.x * i64(blockDim.x / 32) + threadIdx.x / 32;
    if (block >= blocks) return;
    const i64 place = block % blocks_a_row * 32 + lane;

    const Four<T> in = x[block * 32 + lane];
    float v[4] = {widen(in.at[0]), widen(in.at[1]), widen(in.at[2]), widen(in.at[3])};
    if (pre) {
        const float4 p = pre[place];
        v[0] = __fmul_rn(v[0], p.x), v[1] = __fmul_rn(v[1], p.y), v[2] = __fmul_rn(v[2], p.z), v[3] = __fmul_rn(v[3], p.w);
    }
    float w[4] = {v[0] + v[1], v[0] - v[1], v[2] + v[3], v[2] - v[3]};
    v[0] = w[0] + w[2], v[1] = w[1] + w[3], v[2] = w[0] - w[2], v[3] = w[1] - w[3];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], distance);
            v[i] = lane & distance ? other - v[i] : v[i] + other;
        }
    }
    float4 s = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    if (post) s = post[place];
    Four<T> result;
    narrow(__fmul_rn(__fmul_rn(v[0], NORM), s.x), result.at[0]);
    narrow(__fmul_rn(__fmul_rn(v[1], NORM), s.y), result.at[1]);
    narrow(__fmul_rn(__fmul_rn(v[2], NORM), s.z), result.at[2]);
    narrow(__fmul_rn(__fmul_rn(v[3], NORM), s.w), result.at[3]);
    out[block * 32 + lane] = result;
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
#pragma unroll
    for (int distance = 1; distance < BLOCK; distance *= 2) {
#pragma unroll
        for (int r = 0; r < BLOCK; ++r) {
            if (!(r & distance)) {
                const float a = v[r], b = v[r + distance];
                v[r] = a + b, v[r + distance] = a - b;
            }
        }
    }
#pragma unroll
    for (int r = 0; r < BLOCK; ++r) {
        const float y = __fmul_rn(v[r], NORM);
        narrow(post ? __fmul_rn(y, post[place + r]) : y, out[r * columns]);
    }
}
