// What the rotations share: had128's factor, butterflies, and the types they read and write. No multiplication may be fused with
// an addition, or results would differ from codec.hadamard_128.
#pragma once
#include <cuda_bf16.h>

#include "trellis.cuh"

namespace r7 {

constexpr float NORM = 0.08838834764831845f;  // 1/sqrt(128)

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void narrow(float x, float& out) { out = x; }
__device__ __forceinline__ void narrow(float x, __half& out) { out = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }

template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Several {
    T at[N];
};

// The transform of SPAN values in registers, but for its factor.
template <int SPAN>
__device__ __forceinline__ void butterflies(float (&v)[SPAN]) {
#pragma unroll
    for (int distance = 1; distance < SPAN; distance *= 2)
#pragma unroll
        for (int i = 0; i < SPAN; ++i)
            if (!(i & distance)) {
                const float a = v[i], b = v[i + distance];
                v[i] = a + b, v[i + distance] = a - b;
            }
}

}  // namespace r7
