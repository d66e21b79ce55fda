// search_tiles: the best tail-biting states of each tile. Truth: codec.search_tiles; the same search with fp16 costs.
//
// A step of the trellis is 2^(16-2K) groups. In each, 2^K nodes lead to 2^K nodes, all to all:
//
//     cost'[g*B + c] = min over b of cost[b*G + g] + (x - value(b, g, c))^2        B = 2^K branches, G = 2^(16-2K) groups
//
// A tile is one walk of 384 steps, over positions 128..255, 0..127 and 128..255, from a free start:
//   after 256 steps, the best path so far is followed back to where it crosses from 255 to 0: that is the closing node;
//   after 384 steps, the best path to the closing node is followed back over all 256 positions. If it comes from the closing
//   node, it is the best closed path there is through that node, and done. If not (K3 to K6: 20, 12, 6, 3% of tiles), the node
//   that it does come from is tried in the same way (K3 and K4, whose way back is short; six in seven close, at less error than
//   the first node's); what is still open is queued for a second launch, whose walk is held to start in the closing node.
// Node costs are written to memory. The way back recomputes the few candidates of one node a step, so no winners are ever
// stored; one warp a tile goes it while the block walks on, because it does nothing but wait for memory.
//
// Bound: packed-half arithmetic. A step evaluates 65,536 states; a thread does two tiles at once in packed halves, with the values of its
// 128 states in 64 registers: subtract, multiply-add and half of a three-way minimum, 2.5 for two states. Two tiles share a
// word, so a cost read from shared memory serves all the nodes that a thread owns, and nothing is duplicated. Costs stay small
// by subtracting their minimum every eighth step, which keeps what fp16 loses near 0.01%
// (K6).
#include "way_back.cuh"

using namespace r7;

template <int K, int PAIRS>
struct Shared {
    using Costs = u32[PAIRS][Shape<K>::WORDS];  // of a pair of tiles, packed
    alignas(16) Costs cost[2];
    alignas(16) __half2 least[PAIRS][THREADS / 32];  // each warp's least node cost
    __half2 x[2][PAIRS][TILE];                       // weights times SCALE, these tiles' and the last ones'
    u32 best[2 * PAIRS];                             // the least cost of each tile, times 65536, plus its node
    u32 spent[PAIRS];                                // bits of all that was subtracted: zero if nothing ever was
    u32 closing[2 * PAIRS], first[2 * PAIRS];        // the closing node being tried on the way back, and the first that was
};

// Values of a thread's 128 states, two nodes a register: value[run][pair of members][incoming].
template <int K>
__device__ __forceinline__ void load_values(u32 (&value)[64]) {
    using S = Shape<K>;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
        const int incoming = i % S::BRANCHES, m = i / S::BRANCHES % (S::MEMBERS / 2) * 2, run = i / S::BRANCHES / (S::MEMBERS / 2);
        const int state = incoming * S::NODES + (first_group<K>() + run) * S::BRANCHES;
        const __half2 v = mcg_pair(state + member<K>(m), state + member<K>(m + 1));
        // The shuffle of a lane with itself hides from the compiler that these are halves: it would keep each in a register of its own.
        value[i] = __shfl_sync(ALL, as_u32(__hadd2(v, v)), threadIdx.x % 32);
    }
}

// Costs of incoming nodes j .. j+3 of each group a thread has nodes in.
template <int K>
__device__ __forceinline__ void load_costs(const u32* cost, int j, u32 (&word)[Shape<K>::RUNS][4]) {
    using S = Shape<K>;
    if constexpr (S::ROWS) {
        const uint4 four = *reinterpret_cast<const uint4*>(cost + first_group<K>() * S::PITCH + j);
        word[0][0] = four.x, word[0][1] = four.y, word[0][2] = four.z, word[0][3] = four.w;
    } else {
        const u32* from = cost + slot<K>(first_group<K>());  // the same for all multiples of GROUPS added
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (S::RUNS == 2) {
                const uint2 two = *reinterpret_cast<const uint2*>(from + (j + i) * S::GROUPS);
                word[0][i] = two.x, word[1][i] = two.y;
            } else {
                word[0][i] = from[(j + i) * S::GROUPS];
            }
        }
    }
}

// x - (v, v), v being one half of `two`: a single instruction, which reads the half in place. In assembler, because the compiler
// would otherwise take the halves apart before the loop and run out of registers.
__device__ __forceinline__ __half2 minus_low(__half2 x, u32 two) {
    u32 out;
    asm("{.reg .b16 l, h; .reg .b32 v; mov.b32 {l, h}, %2; mov.b32 v, {l, l}; sub.f16x2 %0, %1, v;}" : "=r"(out) : "r"(as_u32(x)), "r"(two));
    return as_half2(out);
}
__device__ __forceinline__ __half2 minus_high(__half2 x, u32 two) {
    u32 out;
    asm("{.reg .b16 l, h; .reg .b32 v; mov.b32 {l, h}, %2; mov.b32 v, {h, h}; sub.f16x2 %0, %1, v;}" : "=r"(out) : "r"(as_u32(x)), "r"(two));
    return as_half2(out);
}

// One step: from `cost`, the best cost of each node a thread owns, best[run * MEMBERS + m].
template <int K>
__device__ __forceinline__ void step(const u32* cost, __half2 x, const u32 (&value)[64], __half2 (&best)[Shape<K>::OWN]) {
    using S = Shape<K>;
#pragma unroll
    for (int j = 0; j < S::BRANCHES; j += 4) {
        u32 word[S::RUNS][4];
        load_costs<K>(cost, j, word);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
#pragma unroll
            for (int n = 0; n < S::OWN; ++n) {
                const int run = n / S::MEMBERS;
                const int at = (run * (S::MEMBERS / 2) + n % S::MEMBERS / 2) * S::BRANCHES + j + i;
                const __half2 miss0 = n % 2 ? minus_high(x, value[at]) : minus_low(x, value[at]);
                const __half2 miss1 = n % 2 ? minus_high(x, value[at + 1]) : minus_low(x, value[at + 1]);
                const __half2 least = __hmin2(__hfma2(miss0, miss0, as_half2(word[run][i])), __hfma2(miss1, miss1, as_half2(word[run][i + 1])));
                best[n] = j + i == 0 ? least : __hmin2(best[n], least);
            }
        }
    }
}

template <int K>
__device__ __forceinline__ void store_costs(u32* cost, const __half2 (&best)[Shape<K>::OWN]) {
    using S = Shape<K>;
    const int first = first_group<K>() * S::BRANCHES;
    if constexpr (S::ROWS) {
#pragma unroll
        for (int n = 0; n < S::OWN; ++n) cost[slot<K>(first + member<K>(n))] = as_u32(best[n]);
    } else {  // a thread's nodes are adjacent
#pragma unroll
        for (int n = 0; n < S::OWN; n += 4)
            *reinterpret_cast<uint4*>(cost + slot<K>(first + member<K>(0) + n)) =
                make_uint4(as_u32(best[n]), as_u32(best[n + 1]), as_u32(best[n + 2]), as_u32(best[n + 3]));
    }
}

template <int OWN>
__device__ __forceinline__ __half2 least_of_warp(const __half2 (&best)[OWN]) {
    __half2 least = best[0];
#pragma unroll
    for (int n = 1; n < OWN; ++n) least = __hmin2(least, best[n]);
#pragma unroll
    for (int mask = 16; mask; mask /= 2) least = __hmin2(least, as_half2(__shfl_xor_sync(ALL, as_u32(least), mask)));
    return least;
}

__device__ __forceinline__ __half2 least_of_warps(const __half2 (&warps)[THREADS / 32]) {
    __half2 least = warps[0];
#pragma unroll
    for (int i = 1; i < THREADS / 32; ++i) least = __hmin2(least, warps[i]);
    return least;
}

// Walk HALF positions from `position` on; costs go between the two buffers and end in the first. STORE: in `history` too.
template <int K, int PAIRS, bool STORE>
__device__ __forceinline__ void walk(Shared<K, PAIRS>& sh, int turn, int position, const u32 (&value)[64], History<K, PAIRS>& history, Trace<K>& trace) {
    using S = Shape<K>;
#pragma unroll 1
    for (int s = 0; s < HALF; ++s, ++position) {
        if (STORE && s % S::STRIDE == 0) history.store(sh.cost[s % 2]);
#pragma unroll 1
        for (int pair = 0; pair < PAIRS; ++pair) {
            __half fetched[Trace<K>::EACH];
            const bool tracing = trace.busy();
            if (tracing) trace.fetch(fetched);

            __half2 best[S::OWN];
            step<K>(sh.cost[s % 2][pair], sh.x[turn][pair][position], value, best);
            if (s % 8 == 6) {
                const __half2 least = least_of_warp(best);
                if (threadIdx.x % 32 == 0) sh.least[pair][threadIdx.x / 32] = least;
            }
            if (s % 8 == 7) {
                const __half2 least = least_of_warps(sh.least[pair]);
                if (threadIdx.x == 0) sh.spent[pair] |= as_u32(least);
#pragma unroll
                for (int n = 0; n < S::OWN; ++n) best[n] = __hsub2(best[n], least);
            }
            store_costs<K>(sh.cost[1 - s % 2][pair], best);

            if (tracing) trace.advance(fetched, &sh.closing[threadIdx.x / 32], &sh.first[threadIdx.x / 32]);
        }
        __syncthreads();
    }
}

// The node of least cost in each tile, the lowest among equals.
template <int K, int PAIRS>
__device__ __forceinline__ void find_best(Shared<K, PAIRS>& sh) {
    for (int pair = 0; pair < PAIRS; ++pair) {
        u32 low = ALL, high = ALL;
        for (int node = threadIdx.x; node < Shape<K>::NODES; node += THREADS) {
            const u32 costs = sh.cost[0][pair][slot<K>(node)];
            low = min(low, costs << 16 | node);
            high = min(high, (costs & 0xFFFF0000u) | node);
        }
        low = __reduce_min_sync(ALL, low), high = __reduce_min_sync(ALL, high);
        if (threadIdx.x % 32 == 0) {
            atomicMin(&sh.best[2 * pair], low);
            atomicMin(&sh.best[2 * pair + 1], high);
        }
    }
    __syncthreads();
}

// What the host reserves (kernels.py): the costs, and 2,560 bytes a pair for the rest.
template <int K, int PAIRS>
constexpr bool fits = sizeof(Shared<K, PAIRS>) <= sizeof(typename Shared<K, PAIRS>::Costs) * 2 + PAIRS * 2560;

// HELD: the second launch, over the queue. exact[tile] is set where some path, closed or not, costs nothing.
// history: gridDim.x * History::WORDS words.
template <int K, int PAIRS, bool HELD>
__global__ void __launch_bounds__(THREADS, 1) search_tiles(const float* __restrict__ tiles, int* __restrict__ states, unsigned char* __restrict__ exact, u32* history, Queue* queue, i64 count) {
    using S = Shape<K>;
    constexpr int TILES = 2 * PAIRS;  // a block's at a time
    static_assert(fits<K, PAIRS>);
    extern __shared__ uint4 raw[];
    auto& sh = *reinterpret_cast<Shared<K, PAIRS>*>(raw);
    if (HELD) count = queue->count;
    const int warp = threadIdx.x / 32;
    u32 *closing = &sh.closing[warp % TILES], *first_closing = &sh.first[warp % TILES];  // of the way back that this warp goes
    history += blockIdx.x * History<K, PAIRS>::WORDS;

    u32 value[64];
    load_values<K>(value);
    Trace<K> trace;
    trace.history = reinterpret_cast<const __half*>(history) + warp / 2 * S::SLOTS * S::NODES * 2 + warp % 2;
    trace.position = -1;
    u32 tile = 0;  // whose way back this is
    bool pending = false;

    const i64 groups = (count + TILES - 1) / TILES;
    int turn = 0;
    for (i64 group = blockIdx.x; group < groups; group += gridDim.x, turn ^= 1) {
        for (int i = threadIdx.x; i < TILES * TILE; i += THREADS) {
            const i64 nth = group * TILES + i / TILE;
            const float x = nth < count ? tiles[(HELD ? queue->entry[nth].tile : nth) * TILE + i % TILE] : 0.0f;
            reinterpret_cast<__half*>(sh.x[turn][i / TILE / 2])[i % TILE * 2 + i / TILE % 2] = __float2half_rn(SCALE * fminf(fmaxf(x, -LIMIT), LIMIT));
        }
        if (threadIdx.x < TILES) sh.best[threadIdx.x] = ALL;
        if (threadIdx.x < PAIRS) sh.spent[threadIdx.x] = 0;

        History<K, PAIRS> stored(history);
        if (HELD) {
            for (int pair = 0; pair < PAIRS; ++pair) {
                const i64 nth = group * TILES + 2 * pair;
                const u32 low = nth < count ? queue->entry[nth].closing : 0, high = nth + 1 < count ? queue->entry[nth + 1].closing : 0;
                for (u32 node = threadIdx.x; node < S::NODES; node += THREADS)
                    sh.cost[0][pair][slot<K>(node)] = (node == low ? 0u : 0x7C00u) | (node == high ? 0u : 0x7C000000u);
            }
        } else {
            for (int i = threadIdx.x; i < PAIRS * S::WORDS; i += THREADS) sh.cost[0][0][i] = 0;
            __syncthreads();
            walk<K, PAIRS, false>(sh, turn, HALF, value, stored, trace);
        }
        trace.finish(closing, first_closing);  // of the last tiles, before their history is overwritten
        if (!HELD && pending && trace.node != *closing && threadIdx.x % 32 == 0) queue->entry[atomicAdd(&queue->count, 1u)] = {tile, *first_closing};
        __syncthreads();

        walk<K, PAIRS, true>(sh, turn, 0, value, stored, trace);
        const i64 nth = group * TILES + warp;
        pending = warp < TILES && nth < count;
        trace.x = reinterpret_cast<const __half*>(sh.x[turn][warp / 2]) + warp % 2;
        if (!HELD) {
            find_best<K, PAIRS>(sh);
            if (warp < TILES) trace.begin(sh.best[warp] & 0xFFFF, HALF, nullptr);
        }
        walk<K, PAIRS, true>(sh, turn, HALF, value, stored, trace);
        if (pending) {
            trace.finish(closing, first_closing);
            tile = HELD ? queue->entry[nth].tile : u32(nth);
            const u32 from = HELD ? queue->entry[nth].closing : trace.node;
            if (threadIdx.x % 32 == 0) *closing = *first_closing = from;
            __syncwarp();
            if (!HELD && threadIdx.x % 32 == 0) exact[tile] = sh.best[warp] < 0x10000u && !(sh.spent[warp / 2] >> warp % 2 * 16 & 0xFFFF);
            trace.begin(from, TILE, states + i64(tile) * TILE);
        } else {
            trace.position = -1;
        }
        __syncthreads();
    }
    trace.finish(closing, first_closing);
    if (!HELD && pending && trace.node != *closing && threadIdx.x % 32 == 0) queue->entry[atomicAdd(&queue->count, 1u)] = {tile, *first_closing};
}
