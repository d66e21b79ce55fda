// pack_symbols and unpack_states: the bit stream of a tile, both ways. Truth: codec.py, bitwise. Bound: bytes.
#include "trellis.cuh"

using namespace r7;

// One thread a 32-bit word: the word's bits come from at most 32/K + 2 consecutive symbols.
template <int K>
__global__ void __launch_bounds__(256) pack_symbols(const int* __restrict__ symbols, u32* __restrict__ trellis, i64 tiles) {
    const i64 index = blockIdx.x * i64(blockDim.x) + threadIdx.x;
    if (index >= tiles * tile_words<K>) return;
    const int first_bit = int(index % tile_words<K>) * 32;
    const int* tile = symbols + index / tile_words<K> * TILE;
    u32 word = 0;
    for (int i = first_bit / K; i * K < first_bit + 32; ++i) {
        const u32 symbol = u32(tile[i]) & ((1u << K) - 1);
        const int shift = first_bit + 32 - (i + 1) * K;  // of the symbol's last bit, from the word's
        word |= shift >= 0 ? symbol << shift : symbol >> -shift;
    }
    trellis[index] = word;
}

// One warp a tile, eight states a lane.
template <int K>
__global__ void __launch_bounds__(256) unpack_states(const u32* __restrict__ trellis, int4* __restrict__ states, i64 tiles) {
    const int lane = threadIdx.x % 32;
    const i64 tile = blockIdx.x * i64(blockDim.x / 32) + threadIdx.x / 32;
    if (tile >= tiles) return;
    const Window w = lane_window<K>(trellis + tile * tile_words<K>, lane);
    int s[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) s[j] = int(window_state<K>(w, j));
    states[tile * 64 + 2 * lane] = make_int4(s[0], s[1], s[2], s[3]);
    states[tile * 64 + 2 * lane + 1] = make_int4(s[4], s[5], s[6], s[7]);
}
