// The trellis search's memory and its way back: node costs are stored as the walk goes on, and one warp a tile follows the best path
// through them. See search.cu.
#pragma once
#include "search_shape.cuh"

namespace r7 {

// What a thread stores of the node costs: a piece of 16 bytes of every THREADS, or of one pair where a pair has fewer.
template <int K, int PAIRS>
struct History {
    using S = Shape<K>;
    static constexpr int PIECES = S::NODES / 4;
    static constexpr int EACH = PIECES > THREADS ? PIECES / THREADS : 1;   // of a pair, by a thread
    static constexpr int HANDS = PIECES < THREADS ? THREADS / PIECES : 1;  // pairs that the threads cover at once
    static constexpr i64 WORDS = i64(PAIRS) * S::SLOTS * S::NODES;         // of a block
    uint4* to;
    int word;

    __device__ __forceinline__ explicit History(u32* history) {
        const int pair = threadIdx.x / PIECES, piece = threadIdx.x % PIECES;
        to = reinterpret_cast<uint4*>(history) + pair * S::SLOTS * PIECES + piece;
        word = pair * S::WORDS + (S::ROWS ? piece / (S::BRANCHES / 4) * S::PITCH + piece % (S::BRANCHES / 4) * 4 : piece * 4);
    }

    // `costs` as they stand before a step; the next call stores the next step.
    __device__ __forceinline__ void store(const u32 (&costs)[PAIRS][S::WORDS]) {
        static_assert(!S::ROWS || EACH == 1);
        if (HANDS <= PAIRS || threadIdx.x < PAIRS * PIECES) {
#pragma unroll
            for (int pair = 0; pair < PAIRS; pair += HANDS)
#pragma unroll
                for (int n = 0; n < EACH; ++n)
                    __stcg(to + pair * S::SLOTS * PIECES + n * THREADS, *reinterpret_cast<const uint4*>(costs[pair] + word + n * THREADS * 4));
        }
        to += PIECES;
    }
};

// Tiles whose path did not close, for the second launch. `count` is zero before the first.
struct Queue {
    u32 count, unused;
    struct Entry {
        u32 tile, closing;
    } entry[1];
};

// The way back of one tile, by one warp, a stored step at a time: `fetch` asks memory, `advance` uses the answer.
template <int K>
struct Trace {
    using S = Shape<K>;
    static constexpr u32 NODES = S::NODES, BRANCHES = S::BRANCHES, GROUPS = S::GROUPS;
    static constexpr u32 CANDIDATES = S::STRIDE == 2 ? BRANCHES * BRANCHES : BRANCHES;
    static constexpr int EACH = CANDIDATES / 32;  // candidates a lane

    const __half* history;  // of this tile: every other half is its pair's other tile
    const __half* x;        // likewise
    int* states;            // nullptr: only the way matters
    u32 node;
    int position, kept;

    __device__ __forceinline__ bool busy() const { return position >= 0; }
    __device__ __forceinline__ void begin(u32 from_node, int before, int* to) { node = from_node, position = before - S::STRIDE, states = to; }

    // Candidate n comes through branch `last(n)` and, where two steps are taken at once, through branch `first(n)` before it.
    static __device__ __forceinline__ u32 last(u32 n) { return n / (CANDIDATES / BRANCHES); }
    static __device__ __forceinline__ u32 first(u32 n) { return n % BRANCHES; }

    // A lane's candidates are n = lane + 32*r. What belongs to r is added as a constant, so that it costs next to nothing.
    static constexpr u32 LAST_OF_32 = S::STRIDE == 2 ? 32 / BRANCHES : 32;                       // last(32)
    static constexpr u32 SLOT_OF_32 = S::STRIDE == 2 ? LAST_OF_32 * GROUPS / BRANCHES : 32;      // stored words that far apart

    // Opaque, so that nothing computed from it is kept in registers over the steps of a walk.
    static __device__ __forceinline__ u32 lane_now() {
        u32 lane = threadIdx.x % 32;
        asm volatile("" : "+r"(lane));
        return lane;
    }

    __device__ __forceinline__ void fetch(__half (&cost)[EACH]) const {
        const u32 lane = lane_now(), through = last(lane) * GROUPS + node / BRANCHES;
        const u32 word = stored_slot<K>(S::STRIDE == 2 ? first(lane) * GROUPS + through / BRANCHES : through);
        const __half* row = history + position / S::STRIDE * (S::NODES * 2);
#pragma unroll
        for (int r = 0; r < EACH; ++r) {
            const u32 swizzle = S::ROWS ? 0 : (r * SLOT_OF_32 >> 5 & 3) << 2;
            cost[r] = __ldcg(row + (word ^ swizzle) * 2 + r * SLOT_OF_32 * 2);
        }
    }

    static __device__ __forceinline__ __half add_step(__half cost, __half x, u32 product) {
        const __half miss = __hfma(mcg_value_of_product(product), __float2half_rn(-SCALE), x);
        return __hfma(miss, miss, cost);
    }

    // `closing` and `first_closing` are this warp's places in shared memory. A path that does not close is tried once from where it
    // came from.
    __device__ __forceinline__ void advance(const __half (&cost)[EACH], u32* closing, const u32* first_closing) {
        const u32 lane = lane_now(), through = last(lane) * GROUPS + node / BRANCHES;
        const u32 first_product = (first(lane) * NODES + through) * MCG, last_product = (last(lane) * NODES + node) * MCG;
        u32 best = ALL;
#pragma unroll
        for (int r = 0; r < EACH; ++r) {
            __half total = cost[r];
            if (S::STRIDE == 2) total = add_step(total, x[position * 2], first_product + r * (LAST_OF_32 * GROUPS * MCG));
            total = add_step(total, x[(position + S::STRIDE - 1) * 2], last_product + r * (LAST_OF_32 * NODES * MCG));
            best = min(best, u32(__half_as_ushort(total)) << 16 | (lane + 32 * r));  // the lowest branch among equals
        }
        const u32 winner = __reduce_min_sync(ALL, best) & 0xFFFF;
#pragma unroll
        for (int back = S::STRIDE - 1; back >= 0; --back) {
            const u32 state = (back == S::STRIDE - 1 ? last(winner) : first(winner)) * NODES + node;
            if (lane == (position + back) % 32) kept = int(state);
            node = state / BRANCHES;
        }
        if (position % 32 == 0 && states) states[position + lane] = kept;
        position -= S::STRIDE;

        if (S::STRIDE == 2 && position < 0 && states && node != *closing && *closing == *first_closing) {
            __syncwarp();
            if (lane == 0) *closing = node;
            __syncwarp();
            position = TILE - S::STRIDE;
        }
    }

    __device__ __forceinline__ void finish(u32* closing, const u32* first_closing) {
        while (busy()) {
            __half cost[EACH];
            fetch(cost);
            advance(cost, closing, first_closing);
        }
    }
};

}  // namespace r7
