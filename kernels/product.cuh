// Activations times a trellis matrix that is decoded on the way into the tensor cores: the machine of moe.cu and linear.cu.
//
// The product is taken transposed, mma.m16n8k16 with the weights as A (16 out-channels) and the tokens as B (8 of them),
// because few tokens meet an expert: a tile is one A fragment and nothing is padded from 8 to 16. A warp owns a strip of tiles of
// out-channels and walks down the in-channels, STEP tiles a stage; a block is several such warps side by side over up to 8*NB tokens.
//
// Everything comes by cp.async, DEPTH stages deep, one barrier a stage. (Warps that fetched for themselves and met at mbarriers for the
// tokens alone ran into fewer barrier stalls and were no faster.)
//
// Bound: instructions. mcg needs, for each weight, its state cut out of the stream, a multiplication and a logic operation: 32 (K4) or
// 37 (K3) instructions a tile and warp, 36 and 41 with the pipeline, in balance between the integer ALU and the multiplier.
// Three turns brought the 32 and 37 down from 43 and more for packing:
//  - A weight is the sum of two fp16 terms (mcg). With few tokens the terms stay apart: a 32-bit product of the codebook
//    already is a pair of fp16, so it goes to the tensor core as two neighbouring k with the activation repeated. That
//    costs one more mma a tile and saves the addition and the packing; it also skips the rounding of the sum to fp16
//    (2e-4 of the weight). With 32 tokens a block the tensor core is no longer idle: there terms are added and packed.
//  - Cutting a state out is a multiplication by a power of two (the multiplier) and a shift down (the ALU), not a shift and
//    a mask (both ALU).
//  - At K = 4 a 32-bit cut holds two states, 16 bits apart. Multiplied whole, its low half is right for the lower state and
//    the high half is off by the upper state's product: x = cut * MCG - (upper * MCG << 16), no mask at all.
#pragma once
#include "rotate.cuh"
#include "trellis.cuh"

namespace r7 {

constexpr int STEP = 4;   // tiles of in-channels a stage
constexpr int STRIP = 4;  // tiles of out-channels a warp owns
constexpr int MAX_WARPS = 4;

template <int NB>
constexpr int blocks_a_processor = NB == 1 ? 6 : 4;  // of MAX_WARPS

// Terms apart (true) or added and rounded to fp16 (false), by blocks of 8 tokens.
template <int NB>
constexpr bool terms_apart = NB <= 2;

// 16-byte pieces that one token's 16 in-channels take in fragment order (see rotate.cuh).
template <int NB>
constexpr int token_pieces = terms_apart<NB> ? 4 : 2;

__device__ __forceinline__ u32 funnel(u32 low, u32 high, u32 shift) {
    u32 out;
    asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(low), "r"(high), "r"(shift));
    return out;
}

// Bits BIT..BIT+15 of a word. Written in PTX because the compiler turns it back into shift and mask.
template <int BIT>
__device__ __forceinline__ u32 cut(u32 word) {
    static_assert(BIT >= 0 && BIT <= 16);
    if constexpr (BIT == 0) return word & 0xFFFFu;
    if constexpr (BIT == 16) return word >> 16;
    u32 raised, out;
    asm("mul.lo.u32 %0, %1, %2;" : "=r"(raised) : "r"(word), "n"(1 << (16 - BIT)));
    asm("shr.u32 %0, %1, 16;" : "=r"(out) : "r"(raised));
    return out;
}

// Where a lane finds its window in a tile: constant over tiles.
template <int K>
struct Look {
    int word[3];
    u32 shift;
    u32 mask;

    // `zero` must be 0 but unknown to the compiler: ptxas rebuilds a constant before every use rather than keep it (4 of 43
    // instructions).
    __device__ __forceinline__ Look(int lane, u32 zero) {
        const int end = 8 * K * (lane + 1), last = (end - 1) >> 5;
#pragma unroll
        for (int back = 0; back < 3; ++back) word[back] = last >= back ? last - back : last - back + tile_words<K>;
        shift = -end & 31;
        mask = 0x8FFF8FFFu ^ zero;
    }
};

// The two fp16 terms, low and high half, of each of a lane's eight weights.
template <int K>
__device__ __forceinline__ void weight_terms(const u32* tile, const Look<K>& look, u32 (&x)[8]) {
    static_assert(K >= 3 && K <= 6);
    const u32 w0 = tile[look.word[0]], w1 = tile[look.word[1]];
    if constexpr (K == 3) {
        const u32 a = funnel(w0, w1, look.shift), b = funnel(w0, w1, look.shift + 5);  // shift is 24 at most
        x[0] = cut<16>(b) * MCG, x[1] = cut<13>(b) * MCG;
        x[2] = cut<15>(a) * MCG, x[3] = cut<12>(a) * MCG, x[4] = cut<9>(a) * MCG;
        x[5] = cut<6>(a) * MCG, x[6] = cut<3>(a) * MCG, x[7] = cut<0>(a) * MCG;
    } else if constexpr (K == 4) {
        const u32 cuts[4] = {funnel(w0, w1, 12), funnel(w0, w1, 8), funnel(w0, w1, 4), w0};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            x[j] = cut<16>(cuts[j]) * MCG;
            x[j + 4] = cuts[j] * MCG + x[j] * 0xFFFF0000u;
        }
    } else {
        const u32 w2 = tile[look.word[2]];
        const u32 a = funnel(w0, w1, look.shift), m = funnel(w1, w2, look.shift);
        if constexpr (K == 5) {
            const u32 b = funnel(a, m, 19);
            x[0] = cut<16>(b) * MCG, x[1] = cut<11>(b) * MCG, x[2] = cut<6>(b) * MCG, x[3] = cut<1>(b) * MCG;
            x[4] = cut<15>(a) * MCG, x[5] = cut<10>(a) * MCG, x[6] = cut<5>(a) * MCG, x[7] = cut<0>(a) * MCG;
        } else {
            const u32 b = funnel(a, m, 14), c = funnel(a, m, 26);
            x[0] = cut<16>(c) * MCG, x[1] = cut<10>(c) * MCG;
            x[2] = cut<16>(b) * MCG, x[3] = cut<10>(b) * MCG, x[4] = cut<4>(b) * MCG;
            x[5] = cut<12>(a) * MCG, x[6] = cut<6>(a) * MCG, x[7] = cut<0>(a) * MCG;
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) x[j] = (x[j] & look.mask) ^ 0x3B603B60u;
}

// Two weights from their terms, as decode_tiles has them. Two additions and one packing leave the ALU, the scarcer unit, one.
__device__ __forceinline__ u32 add_terms(u32 first, u32 second) {
    const __half2 a = as_half2(first), b = as_half2(second);
    return as_u32(__halves2half2(__hadd(__low2half(a), __high2half(a)), __hadd(__low2half(b), __high2half(b))));
}

__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// 16 bytes from global to shared memory, past L1; zeros where not `valid`.
__device__ __forceinline__ void fetch(uint4* to, const uint4* from, bool valid = true) {
    const u32 address = u32(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// `pieces` of 16 bytes after `from`, in one instruction of the multiplier instead of two of the ALU.
__device__ __forceinline__ const uint4* ahead(const uint4* from, u32 pieces) {
    const uint4* out;
    asm("mad.wide.u32 %0, %1, 16, %2;" : "=l"(out) : "r"(pieces), "l"(from));
    return out;
}

__device__ __forceinline__ void fetch_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void fetch_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// One block's share of a product: all of its warps' strips, over `k_tiles` tiles of in-channels.
struct Share {
    const uint4* tiles;   // the block's first tile; the others of the row follow, 2K pieces each
    i64 tiles_pitch;      // pieces from one row of tiles to the next
    int k_tiles;          // a multiple of STEP
    const uint4* tokens;  // activations in fragment order, row 0, at the block's first in-channel
    u32 tokens_pitch;     // pieces a row
    float* out;           // row 0, at the block's first out-channel
    u32 out_pitch;        // numbers a row
    int count;            // tokens, 1..8*NB
    const u32* from;      // shared memory: the row of `tokens` of each token,
    const u32* to;        // and its row of `out`
};

// Dynamic shared memory: DEPTH * (STEP * 8*NB * token_pieces + warps * STEP * STRIP * 2K) pieces of 16 bytes. All threads call it,
// after a barrier behind `from` and `to`; the words of the first stages are under way before wait(), by which all threads wait for
// `tokens`.
template <int K, int NB, int DEPTH, class Wait>
__device__ __forceinline__ void multiply(const Share& share, uint4* staged, const Wait& wait) {
    constexpr int pieces = token_pieces<NB>;
    constexpr int stage_tokens = STEP * 8 * NB * pieces;  // 16-byte pieces of a stage: of activations,
    constexpr int stage_words = STEP * STRIP * 2 * K;     // and of one warp's trellis words
    constexpr int row_words = STRIP * 2 * K;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Look<K> look(lane, u32(share.k_tiles) >> 31);
    const u32 stages = u32(share.k_tiles) / STEP;
    uint4* ring = staged + DEPTH * stage_tokens + warp * (DEPTH * stage_words);

    // A stage of a strip is STEP rows of pieces; the lane's pieces are at fixed places in it.
    const uint4* next_words = share.tiles + warp * row_words;
    u32 words_at[stage_words / 32];
#pragma unroll
    for (int i = 0; i < stage_words / 32; ++i) {
        const int piece = lane + 32 * i;
        words_at[i] = piece / row_words * u32(share.tiles_pitch) + piece % row_words;
    }
    // A stage of activations is [in-tile][token][piece]. A thread's pieces are of one token: blocks have 64 or 128
    // threads, and 8 * NB * pieces is 32 or 64.
    const int token = threadIdx.x / pieces % (8 * NB);
    const bool valid = token < share.count;
    const uint4* next_tokens = share.tokens + u64(share.from[valid ? token : 0]) * share.tokens_pitch +
                               threadIdx.x / (8 * NB * pieces) * pieces + threadIdx.x % pieces;

    auto fetch_words = [&](u32 slot) {  // of the next stage
        uint4* to = ring + slot * stage_words + lane;
#pragma unroll
        for (int i = 0; i < stage_words / 32; ++i) fetch(to + 32 * i, ahead(next_words, words_at[i]));
        next_words += STEP * share.tiles_pitch;
    };
    auto fetch_tokens = [&](u32 slot) {
        const uint4* from = next_tokens;
        for (int piece = threadIdx.x; piece < stage_tokens; piece += blockDim.x, from += blockDim.x / (8 * NB))
            fetch(staged + slot * stage_tokens + piece, from, valid);
        next_tokens += STEP * pieces;
    };

#pragma unroll
    for (u32 stage = 0; stage < DEPTH - 1; ++stage)
        if (stage < stages) fetch_words(stage);
    wait();
#pragma unroll
    for (u32 stage = 0; stage < DEPTH - 1; ++stage) {
        if (stage < stages) fetch_tokens(stage);
        fetch_commit();
    }

    float sums[STRIP][NB][4] = {};
    for (u32 stage = 0; stage < stages; ++stage) {
        fetch_wait<DEPTH - 2>();
        __syncthreads();  // the stage is here for all, and nobody still reads the one before
        const u32 next = stage + DEPTH - 1;
        if (next < stages) {
            fetch_words(next % DEPTH);
            fetch_tokens(next % DEPTH);
        }
        fetch_commit();
        const u32* words = reinterpret_cast<const u32*>(ring + stage % DEPTH * stage_words);
        const uint4* tokens = staged + stage % DEPTH * stage_tokens;
#pragma unroll(NB <= 2 ? STEP : 2)
        for (int row = 0; row < STEP; ++row) {
            if constexpr (terms_apart<NB>) {
                uint4 b[NB];
#pragma unroll
                for (int n = 0; n < NB; ++n) b[n] = tokens[(row * NB + n) * 32 + lane];
#pragma unroll
                for (int t = 0; t < STRIP; ++t) {
                    u32 x[8];
                    weight_terms<K>(words + (row * STRIP + t) * tile_words<K>, look, x);
#pragma unroll
                    for (int n = 0; n < NB; ++n) mma(sums[t][n], x[0], x[4], x[1], x[5], b[n].x, b[n].y);
#pragma unroll
                    for (int n = 0; n < NB; ++n) mma(sums[t][n], x[2], x[6], x[3], x[7], b[n].z, b[n].w);
                }
            } else {
                uint2 b[NB];
#pragma unroll
                for (int n = 0; n < NB; ++n) b[n] = reinterpret_cast<const uint2*>(tokens)[(row * NB + n) * 32 + lane];
#pragma unroll
                for (int t = 0; t < STRIP; ++t) {
                    u32 x[8];
                    weight_terms<K>(words + (row * STRIP + t) * tile_words<K>, look, x);
                    const u32 a0 = add_terms(x[0], x[1]), a1 = add_terms(x[4], x[5]);
                    const u32 a2 = add_terms(x[2], x[3]), a3 = add_terms(x[6], x[7]);
#pragma unroll
                    for (int n = 0; n < NB; ++n) mma(sums[t][n], a0, a1, a2, a3, b[n].x, b[n].y);
                }
            }
        }
    }

    // sums[t][n]: out-channels lane/4 and lane/4 + 8 of tile t, tokens 8n + 2*(lane%4) and the next. Eight lanes write 32 bytes.
    float* out = share.out + warp * STRIP * 16 + lane / 4;
#pragma unroll
    for (int n = 0; n < NB; ++n) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int token = 8 * n + 2 * (lane % 4) + odd;
            if (token < share.count) {
                float* row = out + u64(share.to[token]) * share.out_pitch;
#pragma unroll
                for (int t = 0; t < STRIP; ++t) {
                    row[t * 16] = sums[t][n][odd];
                    row[t * 16 + 8] = sums[t][n][odd + 2];
                }
            }
        }
    }
}

// The same, K being known at run time; K is one for the whole block.
template <int NB, int DEPTH, class Wait>
__device__ __forceinline__ void multiply(int bits, const Share& share, uint4* staged, const Wait& wait) {
    switch (bits) {
        case 3: return multiply<3, NB, DEPTH>(share, staged, wait);
        case 4: return multiply<4, NB, DEPTH>(share, staged, wait);
        case 5: return multiply<5, NB, DEPTH>(share, staged, wait);
        case 6: return multiply<6, NB, DEPTH>(share, staged, wait);
    }
}

}  // namespace r7
