// The mcg trellis in registers: shared by every kernel. FORMAT.md section 10; the truth is r7convert/codec.py.
//
// A tile is 256 symbols of K bits, 8K words of 32 bits, each word 32 stream bits with the first bit highest. Weight
// i = 8*lane + j of a tile belongs to `lane` of a warp. Its eight weights j = 0..7 are the B fragments of two
// mma.m16n8k16 (k = in-channel, n = out-channel): pairs (0,1) and (2,3) are the two B registers of out-channels 0..7 of
// the tile, pairs (4,5) and (6,7) those of out-channels 8..15. So a warp decodes a tile straight into what the tensor
// cores take.
#pragma once
#include <cuda_fp16.h>

namespace r7 {

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

constexpr u32 MCG = 0xCBAC1FEDu;
constexpr int TILE = 256;

template <int K>
constexpr int tile_words = 8 * K;  // 32-bit words a tile

__device__ __forceinline__ __half2 as_half2(u32 bits) {
    __half2 h;
    memcpy(&h, &bits, 4);
    return h;
}

__device__ __forceinline__ u32 as_u32(__half2 h) {
    u32 bits;
    memcpy(&bits, &h, 4);
    return bits;
}

// Two fp16 numbers whose sum is the value of a state, of which `product` is MCG times its 16 bits. The mask and the exclusive or
// are one LOP3; the compiler alone makes two, to keep both constants as immediates.
__device__ __forceinline__ u32 mcg_terms(u32 product) {
    u32 terms;
    asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(terms) : "r"(product), "r"(0x8FFF8FFFu), "r"(0x3B603B60u));
    return terms;
}

__device__ __forceinline__ __half mcg_value_of_product(u32 product) {
    const __half2 terms = as_half2(mcg_terms(product));
    return __hadd(__low2half(terms), __high2half(terms));
}

__device__ __forceinline__ __half mcg_value(u32 state) { return mcg_value_of_product(state * MCG); }

// Values of two states, `first` in the low half: two multiplications, one packed addition.
__device__ __forceinline__ __half2 mcg_pair(u32 first, u32 second) {
    u32 a = mcg_terms(first * MCG), b = mcg_terms(second * MCG);
    return __hadd2(as_half2(__byte_perm(a, b, 0x5410)), as_half2(__byte_perm(a, b, 0x7632)));
}

// The stream bits behind a lane's eight states: 7K + 16 of them, right-aligned in (high, middle, low).
struct Window {
    u32 low, middle, high;
};

// `tile` may be shared or global memory; up to three words are read, the stream being a ring.
template <int K>
__device__ __forceinline__ Window lane_window(const u32* tile, int lane) {
    constexpr int words = tile_words<K>;
    constexpr int largest_shift = K % 4 == 0 ? 0 : K % 2 == 0 ? 16 : 24;
    constexpr int needed = 7 * K + 16 + largest_shift;  // bits, counted from the end of the last word
    const int end = 8 * K * (lane + 1);
    const int last = (end - 1) >> 5;
    const int shift = -end & 31;
    const u32 w0 = tile[last];
    const u32 w1 = tile[last >= 1 ? last - 1 : last - 1 + words];
    const u32 w2 = needed > 64 ? tile[last >= 2 ? last - 2 : last - 2 + words] : 0;
    if constexpr (largest_shift == 0) return {w0, w1, w2};
    return {__funnelshift_r(w0, w1, shift), __funnelshift_r(w1, w2, shift), w2 >> shift};
}

// State j (0..7) of the window; j must be a constant after unrolling.
template <int K>
__device__ __forceinline__ u32 window_state(const Window& w, int j) {
    const int at = (7 - j) * K;
    if (at + 16 <= 32) return (w.low >> at) & 0xFFFFu;
    if (at < 32) return __funnelshift_r(w.low, w.middle, at) & 0xFFFFu;
    if (at + 16 <= 64) return (w.middle >> (at - 32)) & 0xFFFFu;
    return __funnelshift_r(w.middle, w.high, at - 32) & 0xFFFFu;
}

// The four B-fragment registers of a lane: values of weights (0,1), (2,3), (4,5), (6,7).
template <int K>
__device__ __forceinline__ void window_fragments(const Window& w, __half2 (&fragment)[4]) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair)
        fragment[pair] = mcg_pair(window_state<K>(w, 2 * pair), window_state<K>(w, 2 * pair + 1));
}

template <int K>
__device__ __forceinline__ void tile_fragments(const u32* tile, int lane, __half2 (&fragment)[4]) {
    window_fragments<K>(lane_window<K>(tile, lane), fragment);
}

// An 8x8 matrix of halves spread over a warp (lane holds row lane/4, columns 2*(lane%4) and the next), transposed.
__device__ __forceinline__ __half2 transpose_8x8(__half2 in) {
    u32 out;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(as_u32(in)));
    return as_half2(out);
}

}  // namespace r7
