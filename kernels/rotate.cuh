// What surrounds the products: the Hadamard transform in a warp, the order activations are kept in, and types of x and out.
#pragma once
#include <cuda_bf16.h>

#include "trellis.cuh"

namespace r7 {

constexpr int BLOCK = 128;  // channels of a Hadamard block; a lane holds four in a row

enum Kind : int { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// The next kernel in the stream may be brought up once all blocks of this one are (programmatic dependent launch).
__device__ __forceinline__ void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The kernel before this one in the stream has written all it will (nothing to wait for where the launch did not ask for it), and
// the next one may be brought up.
__device__ __forceinline__ void wait_for_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    let_next_start();
}

// Walsh-Hadamard transform of 128 numbers, four a lane, scaled by 1/sqrt(128). Butterflies in codec.hadamard_128's order.
__device__ __forceinline__ void hadamard_128(float (&v)[4], int lane) {
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
    v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float other = __shfl_xor_sync(0xFFFFFFFFu, v[i], distance);
            v[i] = lane & distance ? other - v[i] : v[i] + other;
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= 0.08838834764831845f;
}

struct alignas(8) Half4 {
    __half2 low, high;
};

__device__ __forceinline__ void load_half4(float (&v)[4], const __half* from) {
    const Half4 h = *reinterpret_cast<const Half4*>(from);
    const float2 low = __half22float2(h.low), high = __half22float2(h.high);
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
}

// Numbers at..at+3 (a multiple of 4) of a tensor of 16-bit floats.
__device__ __forceinline__ void load_activations(float (&v)[4], const void* tensor, i64 at, int kind) {
    if (kind == FLOAT16) return load_half4(v, static_cast<const __half*>(tensor) + at);
    const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const u16*>(tensor) + at);
    v[0] = __uint_as_float(bits.x << 16), v[1] = __uint_as_float(bits.x & 0xFFFF0000u);
    v[2] = __uint_as_float(bits.y << 16), v[3] = __uint_as_float(bits.y & 0xFFFF0000u);
}

__device__ __forceinline__ void store_result(const float (&v)[4], void* tensor, i64 at, int kind) {
    if (kind == FLOAT32) {
        *reinterpret_cast<float4*>(static_cast<float*>(tensor) + at) = make_float4(v[0], v[1], v[2], v[3]);
    } else if (kind == FLOAT16) {
        const Half4 h{__floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3])};
        *reinterpret_cast<Half4*>(static_cast<__half*>(tensor) + at) = h;
    } else {
        const __nv_bfloat162 h[2] = {__floats2bfloat162_rn(v[0], v[1]), __floats2bfloat162_rn(v[2], v[3])};
        uint2 bits;
        memcpy(&bits, h, 8);
        *reinterpret_cast<uint2*>(static_cast<u16*>(tensor) + at) = bits;
    }
}

// Fragment order: within each 16 channels, quarter t holds 2t, 2t+1, 2t+8, 2t+9, what lane%4 == t feeds to mma.m16n8k16.
// REPEAT keeps every number twice (product.cuh, terms apart). `block` is the row at the lane's block of 128 channels.
template <bool REPEAT>
__device__ __forceinline__ void store_fragments(const float (&v)[4], __half* block, int lane) {
    const int quarter = lane % 2 * 2, half = lane / 2 % 2;
    const __half2 pairs[2] = {__floats2half2_rn(v[0], v[1]), __floats2half2_rn(v[2], v[3])};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int at = lane / 4 * 8 + (quarter + i) * 2 + half;  // in pairs
        if constexpr (REPEAT) {
            reinterpret_cast<Half4*>(block)[at] = {__low2half2(pairs[i]), __high2half2(pairs[i])};
        } else {
            reinterpret_cast<__half2*>(block)[at] = pairs[i];
        }
    }
}

__device__ __forceinline__ void add_float4(float* v, const float* from, float weight = 1.0f) {
    const float4 f = *reinterpret_cast<const float4*>(from);
    v[0] += weight * f.x, v[1] += weight * f.y, v[2] += weight * f.z, v[3] += weight * f.w;
}

}  // namespace r7
