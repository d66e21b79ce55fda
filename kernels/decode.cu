// decode_tiles: trellis -> fp16 matrix. Truth: codec.decode_tiles, bitwise.
// Bound: bytes. A weight costs K/8 + 2 of them and about 10 instructions of the 30 that the time of those bytes allows (H200).
#include "trellis.cuh"

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
