// The trellis search's shape at K bits: its nodes and groups, who owns which, and where a cost stands. See search.cu.
#pragma once
#include "trellis.cuh"

namespace r7 {

constexpr int THREADS = 512;    // with 128 states each
constexpr int HALF = TILE / 2;  // positions
constexpr float SCALE = 2.0f;   // of values and weights: the least difference of two values, squared, is then just an fp16
constexpr float LIMIT = 30.0f;  // beyond it, 24 deviations, a weight is searched as +-30, or costs could overflow
constexpr u32 ALL = 0xFFFFFFFFu;

template <int K>
struct Shape {
    static constexpr int NODES = 1 << (16 - K), BRANCHES = 1 << K, GROUPS = NODES / BRANCHES;
    static constexpr int OWN = 128 / BRANCHES;                        // nodes a thread owns
    static constexpr int RUNS = OWN > BRANCHES ? OWN / BRANCHES : 1;  // adjacent groups they lie in
    static constexpr int MEMBERS = OWN / RUNS;                        // of each
    // Costs in shared memory. K3, K4: in node order. K5, K6: a row for each group's incoming nodes, so that four are one load.
    static constexpr bool ROWS = K >= 5;
    static constexpr int PITCH = BRANCHES + 4;
    static constexpr int WORDS = ROWS ? GROUPS * PITCH : NODES;
    static constexpr int STRIDE = K <= 4 ? 2 : 1;  // steps between stored node costs
    static constexpr int SLOTS = TILE / STRIDE;
};

// Which groups and nodes a thread owns: lanes laid out so that a warp's stores meet all banks.
template <int K>
__device__ __forceinline__ int first_group() {
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    if (K == 3) return 2 * t;
    if (K == 4) return t / 2;
    if (K == 5) return 2 * (warp / 2 * 4 + lane / 8) + warp % 2;
    return warp;
}

template <int K>
__device__ __forceinline__ int member(int m) {
    const int t = threadIdx.x, lane = t % 32;
    if (K == 3) return m;
    if (K == 4) return t % 2 * 8 + m;
    if (K == 5) return m * 8 + lane % 8;
    return lane / 8 * 16 + lane % 8 + 8 * m;
}

// Where a node's cost stands in shared memory, and in what is stored of it, where rows have no padding.
template <int K>
__device__ __forceinline__ int slot(int node) {
    using S = Shape<K>;
    return S::ROWS ? node % S::GROUPS * S::PITCH + node / S::GROUPS : node ^ (node >> 5 & 3) << 2;
}
template <int K>
__device__ __forceinline__ int stored_slot(int node) {
    using S = Shape<K>;
    return S::ROWS ? node % S::GROUPS * S::BRANCHES + node / S::GROUPS : slot<K>(node);
}

}  // namespace r7
