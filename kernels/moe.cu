// Routed experts from slabs, one rank: moe_prepare -> moe_product (gate, up) -> moe_activate -> moe_product (down) -> moe_combine.
// Truth: moe.moe_reference over codec.expert_forward. Layout of slabs: FORMAT.md section 5.
//
// A pair is (token, slot) = token * topk + slot; every intermediate row is a pair's. An item is up to 8*NB pairs of one
// expert: what a block of moe_product takes. Nothing is summed by atomics, so results are the same bits in every run.
// Expert ids outside 0..experts-1 take no part. Offsets are 64 bits.
//
// Bound: see product.cuh. The three small kernels are bound by their launch (batch 1) or by bytes that mostly stay in L2.
#include "product.cuh"
#include "rotate.cuh"

using namespace r7;

struct Ids {
    const void* ids;
    i64 wide;  // 64-bit ids, else 32
    i64 experts;

    __device__ __forceinline__ int operator[](i64 pair) const {
        const i64 id = wide ? static_cast<const i64*>(ids)[pair] : i64(static_cast<const int*>(ids)[pair]);
        return id >= 0 && id < experts ? int(id) : -1;
    }
};

// Three numbers of 16 bits in one argument.
__device__ __forceinline__ int packed(i64 numbers, int index) { return int(numbers >> (16 * index) & 0xFFFF); }

// Block 0 groups pairs by expert: `order` holds pairs, experts ascending; `items` (expert, first, count, 0), the rest expert -1.
// Within an expert the order is free: pairs do not meet.
__device__ void route(Ids ids, i64 pairs, int item_tokens, i64 max_items, int* order, int4* items) {
    extern __shared__ int counts[];  // [experts], then cursors [experts]
    const int experts = int(ids.experts);
    int* cursors = counts + experts;
    int* item_starts = cursors + experts;
    __shared__ int item_count;
    for (int e = threadIdx.x; e < experts; e += blockDim.x) counts[e] = 0;
    __syncthreads();
    for (i64 pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const int e = ids[pair];
        if (e >= 0) atomicAdd(counts + e, 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {  // exclusive sums over experts, 32 at a time
        const int lane = threadIdx.x;
        int first = 0, item = 0;
        for (int base = 0; base < experts; base += 32) {
            const int count = base + lane < experts ? counts[base + lane] : 0;
            const int own_items = (count + item_tokens - 1) / item_tokens;
            int pairs_through = count, items_through = own_items;
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int p = __shfl_up_sync(0xFFFFFFFFu, pairs_through, distance);
                const int i = __shfl_up_sync(0xFFFFFFFFu, items_through, distance);
                if (lane >= distance) pairs_through += p, items_through += i;
            }
            if (base + lane < experts) {
                cursors[base + lane] = first + pairs_through - count;
                item_starts[base + lane] = item + items_through - own_items;
            }
            first += __shfl_sync(0xFFFFFFFFu, pairs_through, 31);
            item += __shfl_sync(0xFFFFFFFFu, items_through, 31);
        }
        if (lane == 0) item_count = item;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += blockDim.x) {
        for (int done = 0, item = item_starts[e]; done < counts[e]; done += item_tokens, ++item)
            items[item] = make_int4(e, cursors[e] + done, min(item_tokens, counts[e] - done), 0);
    }
    for (i64 item = item_count + threadIdx.x; item < max_items; item += blockDim.x) items[item] = make_int4(-1, 0, 0, 0);
    __syncthreads();
    for (i64 pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
        const int e = ids[pair];
        if (e >= 0) order[atomicAdd(cursors + e, 1)] = int(pair);
    }
}

// Routes, and rotates x: had(x * suh) in fragment order. With one suh row for all experts a row of the result is a token's,
// else a pair's. up_in is null where up's vectors are gate's.
template <bool REPEAT>
__global__ void __launch_bounds__(1024) moe_prepare(
    const void* __restrict__ x, i64 x_kind, const void* __restrict__ topk_ids, i64 ids_wide, const __half* __restrict__ gate_suh,
    const __half* __restrict__ up_suh, i64 suh_rows, __half* __restrict__ gate_in, __half* __restrict__ up_in, i64 tokens, i64 topk,
    i64 hidden, i64 experts, i64 item_tokens, i64 max_items, int* __restrict__ order, int4* __restrict__ items) {
    wait_for_inputs();
    const Ids ids{topk_ids, ids_wide, experts};
    if (blockIdx.x == 0) return route(ids, tokens * topk, int(item_tokens), max_items, order, items);

    const int lane = threadIdx.x % 32;
    const i64 task = ((blockIdx.x - 1) * i64(blockDim.x) + threadIdx.x) / 32;
    const i64 blocks = hidden / BLOCK, rows = suh_rows == 1 ? tokens : tokens * topk;
    const i64 row = task / blocks % rows, at = task % blocks * BLOCK + 4 * lane, vector = task / blocks / rows;
    if (vector >= (up_in ? 2 : 1)) return;
    const int expert = suh_rows == 1 ? 0 : ids[row];
    if (expert < 0) return;
    float v[4], suh[4];
    load_activations(v, x, (suh_rows == 1 ? row : row / topk) * hidden + at, int(x_kind));
    load_half4(suh, (vector ? up_suh : gate_suh) + expert * hidden + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= suh[i];
    hadamard_128(v, lane);
    store_fragments<REPEAT>(v, (vector ? up_in : gate_in) + (row * hidden + at - 4 * lane) * (REPEAT ? 2 : 1), lane);
}

// Gate and up (grid.y = 2 * column blocks; gate's planes first in a tier, then up's) or down (grid.y = column blocks).
// `descriptors` is the first projection's row of `stride`. grid.z splits the in-channels; out is [grid.z][projections][pairs][out_side].
template <int NB, int DEPTH>
__global__ void __launch_bounds__(32 * MAX_WARPS, NB == 1 ? 3 : NB <= 4 ? 2 : 1) moe_product(
    const int4* __restrict__ items, const int* __restrict__ order, const int* __restrict__ descriptors, i64 stride,
    const uint4* __restrict__ tier0, const uint4* __restrict__ tier1, const uint4* __restrict__ tier2, i64 tier_bits, i64 first_n,
    const __half* __restrict__ first_in, const __half* __restrict__ second_in, i64 pairs_a_row, i64 in_side, i64 out_side, i64 pairs,
    float* __restrict__ out) {
    extern __shared__ uint4 staged[];
    __shared__ int from[8 * NB], to[8 * NB];
    wait_for_inputs();
    const int4 item = items[blockIdx.x];
    if (item.x < 0) return;
    const int width = int(blockDim.x) / 32 * STRIP;  // tiles of out-channels a block takes
    const int row_tiles = int(out_side / 16), column_blocks = row_tiles / width;
    const int projection = blockIdx.y / column_blocks, first_tile = blockIdx.y % column_blocks * width;
    const int descriptor = descriptors[projection * stride + item.x];
    if (descriptor < 0) return;
    const int tier = descriptor >> 8, plane = (descriptor & 255) + (projection ? packed(first_n, tier) : 0);
    const int bits = packed(tier_bits, tier);
    for (int i = threadIdx.x; i < item.z; i += blockDim.x) {
        const int pair = order[item.y + i];
        from[i] = int(pair / pairs_a_row);
        to[i] = pair;
    }
    __syncthreads();

    const int steps = int(in_side / (16 * STEP));
    const int begin = steps * int(blockIdx.z) / int(gridDim.z) * STEP, end = steps * int(blockIdx.z + 1) / int(gridDim.z) * STEP;
    const i64 pitch = i64(row_tiles) * 2 * bits;
    const uint4* slab = tier == 0 ? tier0 : tier == 1 ? tier1 : tier2;
    const uint4* tokens = reinterpret_cast<const uint4*>(projection ? second_in : first_in);
    const i64 projections = gridDim.y / column_blocks;
    const Share share{
        slab + (plane * (in_side / 16) + begin) * pitch + first_tile * 2 * bits,
        pitch,
        end - begin,
        tokens + begin * token_pieces<NB>,
        in_side / 16 * token_pieces<NB>,
        out + (blockIdx.z * projections + projection) * pairs * out_side + first_tile * 16,
        out_side,
        item.z,
        from,
        to,
    };
    multiply<NB, DEPTH>(bits, share, staged);
}

// One warp, one pair, 128 channels: gate and up summed over splits, rotated and scaled; silu(gate) * up, in fp32 throughout; scaled by down's
// suh, rotated, rounded once. products is [splits][2][pairs][inner].
template <bool REPEAT>
__global__ void __launch_bounds__(256) moe_activate(
    const float* __restrict__ products, i64 splits, const void* __restrict__ topk_ids, i64 ids_wide, i64 experts,
    const __half* __restrict__ rotations, i64 pairs, i64 inner, __half* __restrict__ down_in) {
    wait_for_inputs();
    const int lane = threadIdx.x % 32;
    const i64 task = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32;
    const i64 pair = task / (inner / BLOCK), at = task % (inner / BLOCK) * BLOCK + 4 * lane;
    if (pair >= pairs) return;
    const int expert = Ids{topk_ids, ids_wide, experts}[pair];
    if (expert < 0) return;
    float gate[4] = {}, up[4] = {}, gate_svh[4], up_svh[4], down_suh[4];
    const __half* scales = rotations + expert * 3 * inner + at;
    load_half4(gate_svh, scales);
    load_half4(up_svh, scales + inner);
    load_half4(down_suh, scales + 2 * inner);
#pragma unroll 4
    for (i64 split = 0; split < splits; ++split) {
        add_float4(gate, products + (split * 2 * pairs + pair) * inner + at);
        add_float4(up, products + ((split * 2 + 1) * pairs + pair) * inner + at);
    }
    hadamard_128(gate, lane);
    hadamard_128(up, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float g = gate[i] * gate_svh[i];
        gate[i] = g / (1.0f + __expf(-g)) * (up[i] * up_svh[i]) * down_suh[i];
    }
    hadamard_128(gate, lane);
    store_fragments<REPEAT>(gate, down_in + (pair * inner + at - 4 * lane) * (REPEAT ? 2 : 1), lane);
}

// One warp, one token, 128 channels: the weighted sum over slots of had(down) * svh. The transform is linear, so with one
// svh row for all experts (ONE_SVH) it is taken once, after the sum. products is [splits][pairs][hidden].
template <bool ONE_SVH>
__global__ void __launch_bounds__(256) moe_combine(
    const float* __restrict__ products, i64 splits, const void* __restrict__ topk_ids, i64 ids_wide, i64 experts,
    const float* __restrict__ topk_weights, const __half* __restrict__ down_svh, i64 tokens, i64 topk, i64 hidden,
    void* __restrict__ out, i64 out_kind) {
    wait_for_inputs();
    const int lane = threadIdx.x % 32;
    const i64 task = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32;
    const i64 token = task / (hidden / BLOCK), at = task % (hidden / BLOCK) * BLOCK + 4 * lane;
    if (token >= tokens) return;
    const Ids ids{topk_ids, ids_wide, experts};
    const i64 split_pitch = tokens * topk * hidden;
    float sum[4] = {}, svh[4];
    constexpr int together = ONE_SVH ? 4 : 1;  // slots whose loads are in flight at once
#pragma unroll 1
    for (int first = 0; first < int(topk); first += together) {
        const i64 pair = token * topk + first;
        int expert[together];
        float weight[together];
#pragma unroll
        for (int i = 0; i < together; ++i) {
            expert[i] = first + i < int(topk) ? ids[pair + i] : -1;  // -1: its products were never written
            weight[i] = expert[i] >= 0 ? topk_weights[pair + i] : 0.0f;
        }
        const float* part = products + pair * hidden + at;
        float v[4] = {};
#pragma unroll 2
        for (int split = 0; split < int(splits); ++split, part += split_pitch) {
#pragma unroll
            for (int i = 0; i < together; ++i)
                if (expert[i] >= 0) add_float4(v, part + i * hidden, weight[i]);
        }
        if constexpr (!ONE_SVH) {
            hadamard_128(v, lane);  // of zeros where there is no expert: a branch around shuffles costs more
            load_half4(svh, down_svh + max(expert[0], 0) * hidden + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] *= svh[i];
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] += v[i];
    }
    if constexpr (ONE_SVH) {
        hadamard_128(sum, lane);
        load_half4(svh, down_svh + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] *= svh[i];
    }
    store_result(sum, out, token * hidden + at, int(out_kind));
}
