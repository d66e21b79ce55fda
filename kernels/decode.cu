// decode_tiles: trellis -> fp16 matrix. Truth: codec.decode_tiles, bitwise.
// Bound: bytes. A weight costs K/8 + 2 of them and about 10 instructions of the 30 that the time of those bytes allows (H200).
//
// decode_matrix: with both rotations and scales, in one pass over memory. Truth: codec.decode_matrix, bitwise. Bound: instructions, 22 a
// weight, and their fetch.
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

constexpr int SIDE = 128;  // a block of threads decodes 128 x 128 weights, a warp 8 tiles side by side

// What a lane holds of the 16-point transform as the tensor cores take it: entries +-1, two columns a register. Three of the four are equal.
// The compiler must not see that, or it makes one of them and copies it before each product: hence the lane's number from its register.
struct Signs {
    u32 at[4];

    __device__ __forceinline__ Signs() {
        u32 lane;
        asm("mov.u32 %0, %%laneid;" : "=r"(lane));
        const u32 row = lane / 4, column = lane % 4 * 2;
        at[0] = pair(row, column), at[1] = pair(row + 8, column), at[2] = pair(row, column + 8), at[3] = pair(row + 8, column + 8);
    }

    __device__ __forceinline__ static u32 pair(u32 row, u32 column) {
        const u32 odd = __popc(row & column);
        return 0x3C003C00u ^ (odd & 1) << 15 ^ ((odd ^ row) & 1) << 31;
    }
};

// The compiler makes four stores of one through a pointer to a struct.
__device__ __forceinline__ void store(void* to, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

template <int K, typename T>
__global__ void __launch_bounds__(256, 3) decode_matrix(const u32* __restrict__ trellis, const float* __restrict__ suh, const float* __restrict__ svh, T* __restrict__ out, i64 tile_columns) {
    extern __shared__ float4 staging[];
    float* staged = reinterpret_cast<float*>(staging);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const u32* tile = trellis + ((i64(blockIdx.y) * 8 + warp) * tile_columns + blockIdx.x * 8) * tile_words<K>;

    // Along in-channels within a tile, one product with +-1. The sums are of 16 fp16 values, multiples of 2^-13 below 4: exact in fp32,
    // whatever their order, as are those of up to 512 values.
    const Signs signs;
    float v[2][4][8];  // [out-channels 0..7, 8..15][(row g, g+8) x (column 2t, 2t+1)][tile]
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        __half2 fragment[4];
        tile_fragments<K>(tile + i * tile_words<K>, lane, fragment);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            float d[4];
            asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
                : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                : "r"(signs.at[0]), "r"(signs.at[1]), "r"(signs.at[2]), "r"(signs.at[3]), "r"(as_u32(fragment[2 * n])), "r"(as_u32(fragment[2 * n + 1])), "f"(0.0f));
#pragma unroll
            for (int e = 0; e < 4; ++e) v[n][e][i] = d[e];
        }
    }

    // Along out-channels: distances 16, 32 and 64 over tiles, 1 and 8 within one; 2 and 4 stay for later. Columns are swizzled so that
    // four rows of 8 bytes a lane, and later every other 16 bytes of a row, meet all banks.
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) butterflies(v[n][e]);
#pragma unroll
    for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const float a = v[0][e][i] + v[0][e + 1][i], b = v[0][e][i] - v[0][e + 1][i];
            const float c = v[1][e][i] + v[1][e + 1][i], d = v[1][e][i] - v[1][e + 1][i];
            float* at = staged + (warp * 16 + g + 4 * e) * SIDE + i / 2 * 32;
            const int column = i % 2 * 16 ^ i / 2 % 2 * 4 ^ 2 * t ^ g % 4 * 8;
            *reinterpret_cast<float2*>(at + column) = make_float2(a + c, b + d);
            *reinterpret_cast<float2*>(at + (column ^ 8)) = make_float2(a - c, b - d);
        }
    __syncthreads();

    // A thread takes eight adjacent columns of eight rows, one of each tile, so that 16 lanes store a row of 128: stores to
    // fewer columns of more rows were what bound this kernel before.
    const int row = threadIdx.x / 16, column = threadIdx.x % 16 * 8, at = column ^ row % 4 * 8 ^ column / 32 % 2 * 4;
    float w[8][8];  // [column][tile]
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float4 low = *reinterpret_cast<const float4*>(staged + (i * 16 + row) * SIDE + at);
        const float4 high = *reinterpret_cast<const float4*>(staged + (i * 16 + row) * SIDE + (at ^ 4));
        float even[4] = {low.x, low.z, high.x, high.z}, odd[4] = {low.y, low.w, high.y, high.w};
        butterflies(even), butterflies(odd);  // distances 2 and 4
#pragma unroll
        for (int c = 0; c < 4; ++c) w[2 * c][i] = even[c], w[2 * c + 1][i] = odd[c];
    }
#pragma unroll
    for (int c = 0; c < 8; ++c) butterflies(w[c]);  // 16, 32 and 64 along in-channels

    suh += blockIdx.y * SIDE + row;
    const Several<float, 8> scales = *reinterpret_cast<const Several<float, 8>*>(svh + blockIdx.x * SIDE + column);
    T* to = out + (i64(blockIdx.y) * SIDE + row) * tile_columns * 16 + blockIdx.x * SIDE + column;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float scale = __fmul_rn(suh[i * 16], 1.0f / SIDE);
        T eight[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) narrow(__fmul_rn(__fmul_rn(w[c][i], scale), scales.at[c]), eight[c]);
        uint4 pieces[sizeof(eight) / 16];
        memcpy(pieces, eight, sizeof(eight));
#pragma unroll
        for (int piece = 0; piece < sizeof(eight) / 16; ++piece) store(to + piece * (16 / sizeof(T)), pieces[piece]);
        to += 16 * tile_columns * 16;
    }
}
