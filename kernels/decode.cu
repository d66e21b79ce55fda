// decode_tiles: trellis -> fp16 matrix. Truth: codec.decode_tiles, bitwise.
// Bound: bytes. A weight costs K/8 + 2 of them and about 10 instructions of the 30 that the time of those bytes allows (H200).
#include "trellis.cuh"

using namespace r7;

constexpr int WARPS = 4;
constexpr int STRIP = 8;                    // tiles a warp decodes side by side, so that it writes rows of 256 bytes
constexpr int PITCH = STRIP * 16 + 8;       // halves; 16 bytes of padding spread eight rows over all banks

template <int K>
__global__ void __launch_bounds__(32 * WARPS) decode_tiles(const u32* __restrict__ trellis, __half* __restrict__ out, i64 tile_rows, i64 tile_columns) {
    __shared__ alignas(16) __half staged[WARPS][16 * PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 strips = (tile_columns + STRIP - 1) / STRIP;
    const i64 item = blockIdx.x * i64(WARPS) + warp;
    if (item >= tile_rows * strips) return;
    const i64 tile_row = item / strips, first = item % strips * STRIP;
    const int count = int(min(i64(STRIP), tile_columns - first));

    const u32* tile = trellis + (tile_row * tile_columns + first) * tile_words<K>;
    __half* mine = staged[warp] + lane / 4 * PITCH + lane % 4 * 2;
#pragma unroll
    for (int t = 0; t < STRIP; ++t) {
        if (t < count) {
            __half2 fragment[4];
            tile_fragments<K>(tile + t * tile_words<K>, lane, fragment);
#pragma unroll
            for (int n = 0; n < 4; ++n)  // fragment n: in-channels 8*(n%2).., out-channels 8*(n/2)..
                *reinterpret_cast<__half2*>(mine + n % 2 * 8 * PITCH + t * 16 + n / 2 * 8) = transpose_8x8(fragment[n]);
        }
    }
    __syncwarp();

    __half* corner = out + (tile_row * tile_columns * 16 + first) * 16;
    const int per_row = 2 * count;  // pieces of 16 bytes
    for (int piece = lane; piece < 16 * per_row; piece += 32) {
        const int row = count == STRIP ? piece / (2 * STRIP) : piece / per_row;
        const int column = (count == STRIP ? piece % (2 * STRIP) : piece % per_row) * 8;
        *reinterpret_cast<uint4*>(corner + row * tile_columns * 16 + column) = *reinterpret_cast<const uint4*>(staged[warp] + row * PITCH + column);
    }
}
