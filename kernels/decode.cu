// decode_tiles: trellis -> fp16 matrix. Truth: codec.decode_tiles, bitwise.
// Bound: bytes. A weight costs K/8 + 2 of them and about 10 instructions of the 30 that the time of those bytes allows (H200).
//
// decode_matrix: with both rotations and scales, in one pass over memory. Truth: codec.decode_matrix, bitwise. About 26
// instructions a weight, a tenth of them shuffles: bound by both.
#include "butterfly.cuh"

using namespace r7;

constexpr int WARPS = 4;
constexpr int STRIP = 8;                    // tiles a warp decodes side by side, so that it writes rows of 256 bytes
constexpr int PITCH = STRIP * 16 + 8;       // halves; 16 bytes of padding spread eight rows over all banks

// Four 8x8 matrices of a tile, in-channel by out-channel, into shared memory: fragment n holds in-channels 8*(n%2).. and
// out-channels 8*(n/2).., out-channels down its rows, so it goes in transposed. `corner` is the tile's.
__device__ __forceinline__ void stage_tile(const __half2 (&fragment)[4], __half* corner, int lane) {
#if __CUDA_ARCH__ >= 900
    const __half* row = corner + lane % 16 * PITCH + lane / 16 * 8;  // of matrix lane/8, its row lane%8
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(u32(__cvta_generic_to_shared(row))),
                 "r"(as_u32(fragment[0])), "r"(as_u32(fragment[1])), "r"(as_u32(fragment[2])), "r"(as_u32(fragment[3]))
                 : "memory");
#else
    __half* mine = corner + lane / 4 * PITCH + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 4; ++n) *reinterpret_cast<__half2*>(mine + n % 2 * 8 * PITCH + n / 2 * 8) = transpose_8x8(fragment[n]);
#endif
}

template <int K, int COUNT>
__device__ __forceinline__ void decode_strip(const u32* tile, int count, __half* staged) {
    const int lane = threadIdx.x % 32;
    Window window[STRIP];  // all loads in flight before the first is used
#pragma unroll
    for (int t = 0; t < STRIP; ++t)
        if (COUNT == STRIP || t < count) window[t] = lane_window<K>(tile + t * tile_words<K>, lane);
#pragma unroll
    for (int t = 0; t < STRIP; ++t) {
        if (COUNT == STRIP || t < count) {
            __half2 fragment[4];
            window_fragments<K>(window[t], fragment);
            stage_tile(fragment, staged + t * 16, lane);
        }
    }
    __syncwarp();
}

template <int K>
__global__ void __launch_bounds__(32 * WARPS) decode_tiles(const u32* __restrict__ trellis, __half* __restrict__ out, i64 tile_rows, i64 tile_columns) {
    __shared__ alignas(16) __half staged[WARPS][16 * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 strips = (tile_columns + STRIP - 1) / STRIP;
    const i64 item = blockIdx.x * i64(WARPS) + warp;
    if (item >= tile_rows * strips) return;
    const i64 tile_row = item / strips, first = item % strips * STRIP;
    const u32* tile = trellis + (tile_row * tile_columns + first) * tile_words<K>;
    __half* corner = out + (tile_row * tile_columns * 16 + first) * 16;
    const i64 row_halves = tile_columns * 16;

    if (first + STRIP <= tile_columns) {
        decode_strip<K, STRIP>(tile, STRIP, staged[warp]);
        corner += lane / 16 * row_halves + lane % 16 * 8;
        const __half* from = staged[warp] + lane / 16 * PITCH + lane % 16 * 8;
#pragma unroll
        for (int row = 0; row < 16; row += 2)
            *reinterpret_cast<uint4*>(corner + row * row_halves) = *reinterpret_cast<const uint4*>(from + row * PITCH);
    } else {
        const int count = int(tile_columns - first), pieces = 2 * count;  // of 16 bytes, a row
        decode_strip<K, 0>(tile, count, staged[warp]);
        for (int piece = lane; piece < 16 * pieces; piece += 32) {
            const int row = piece / pieces, column = piece % pieces * 8;
            *reinterpret_cast<uint4*>(corner + row * row_halves + column) = *reinterpret_cast<const uint4*>(staged[warp] + row * PITCH + column);
        }
    }
}

constexpr int COLUMN_WARPS = 8;        // a block decodes 128 x 128 weights, a warp 8 tiles one above another
constexpr int BLOCK_PITCH = 128 + 8;   // floats: rows two apart lie 16 banks apart

template <int K, typename T>
__global__ void __launch_bounds__(32 * COLUMN_WARPS, 2) decode_matrix(const u32* __restrict__ trellis, const float* __restrict__ suh, const float* __restrict__ svh, T* __restrict__ out, i64 tile_columns) {
    extern __shared__ float4 staging[];
    float* staged = reinterpret_cast<float*>(staging);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const i64 block_row = blockIdx.x / (tile_columns / 8), block_column = blockIdx.x % (tile_columns / 8);

    // Along in-channels. H128 = H8 x H16: H16 within a tile is one product with +-1, H8 over tiles is butterflies. The sums are of
    // 128 fp16 values, multiples of 2^-13 below 4: they are exact in fp32, whatever their order.
    const u32 plus = 0x3C00u | (__popc(g & 2 * t) & 1) << 15 | (0x3C00u | (__popc(g & (2 * t + 1)) & 1) << 15) << 16;
    const u32 minus = plus ^ 0x80008000u;
    float v[2][4][8];  // [out-channels 0..7, 8..15][(row g, g+8) x (column 2t, 2t+1)][tile]
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const u32* tile = trellis + ((block_row * 8 + i) * tile_columns + block_column * 8 + warp) * tile_words<K>;
        __half2 fragment[4];
        tile_fragments<K>(tile, lane, fragment);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float d[4];
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %5}, {%6, %7}, {%8, %8, %8, %8};"
                : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                : "r"(plus), "r"(minus), "r"(as_u32(fragment[2 * n])), "r"(as_u32(fragment[2 * n + 1])), "f"(0.0f));
#pragma unroll
            for (int e = 0; e < 4; ++e) v[n][e][i] = d[e];
        }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) butterflies(v[n][e]);

    // Along out-channels: distances 1 and 8 in registers, 2 and 4 between lanes; 16, 32 and 64 between warps, below.
    const float sign2 = t & 1 ? -1.0f : 1.0f, sign4 = t & 2 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float w[2][4];
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const int row = i * 16 + g + 4 * e;
            const float scale = suh[block_row * 128 + row];
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const float a = __fmul_rn(__fmul_rn(v[n][e][i], NORM), scale), b = __fmul_rn(__fmul_rn(v[n][e + 1][i], NORM), scale);
                w[n][e] = a + b, w[n][e + 1] = a - b;
            }
        }
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) w[n][e] = __fmaf_rn(sign2, w[n][e], __shfl_xor_sync(0xFFFFFFFFu, w[n][e], 1));
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) w[n][e] = __fmaf_rn(sign4, w[n][e], __shfl_xor_sync(0xFFFFFFFFu, w[n][e], 2));
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            float* at = staged + (i * 16 + g + 4 * e) * BLOCK_PITCH + warp * 16 + 2 * t;
            *reinterpret_cast<float2*>(at) = make_float2(w[0][e] + w[1][e], w[0][e + 1] + w[1][e + 1]);
            *reinterpret_cast<float2*>(at + 8) = make_float2(w[0][e] - w[1][e], w[0][e + 1] - w[1][e + 1]);
        }
    }
    __syncthreads();

    // A thread takes four adjacent columns of each tile in a row; the lanes' rows are dealt so that eight of them meet all banks.
    const int first_row = (g & 1) * 2 + (g >> 1 & 1) + (g >> 2) * 4 + warp * 16, first_column = 4 * t;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half;
        float w[4][8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(staged + row * BLOCK_PITCH + i * 16 + first_column);
            w[0][i] = four.x, w[1][i] = four.y, w[2][i] = four.z, w[3][i] = four.w;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) butterflies(w[e]);
        T* to = out + (block_row * 128 + row) * tile_columns * 16 + block_column * 128 + first_column;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float4 scale = *reinterpret_cast<const float4*>(svh + block_column * 128 + i * 16 + first_column);
            Several<T, 4> four;
            narrow(__fmul_rn(__fmul_rn(w[0][i], NORM), scale.x), four.at[0]);
            narrow(__fmul_rn(__fmul_rn(w[1][i], NORM), scale.y), four.at[1]);
            narrow(__fmul_rn(__fmul_rn(w[2][i], NORM), scale.z), four.at[2]);
            narrow(__fmul_rn(__fmul_rn(w[3][i], NORM), scale.w), four.at[3]);
            *reinterpret_cast<Several<T, 4>*>(to + i * 16) = four;
        }
    }
}
