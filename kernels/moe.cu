// Routed experts from slabs, one rank:
// [moe_route ->] moe_rotate -> moe_product (gate, up) -> moe_activate -> moe_product (down) -> moe_combine.
// Truth: moe.moe_reference over codec.expert_forward. Layout of slabs: FORMAT.md section 5.
//
// A pair is (token, slot) = token * topk + slot; every intermediate row is a pair's. An item is up to 8*NB pairs of one
// expert: what a block of moe_product takes. With few pairs each block finds its item itself and moe_route is left out.
// Nothing is summed by atomics, so results are the same bits in every run. Expert ids outside 0..experts-1 take no part.
// Offsets are 64 bits.
//
// Launches overlap (programmatic dependent launch): what moe_product reads before wait_for_inputs(), ids, items, descriptors and
// trellis words, is older than the kernel before it.
//
// Bound: see product.cuh. The small kernels are bound by latency (batch 1) or by bytes that mostly stay in L2.
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

// Groups pairs by expert: `order` holds pairs, experts ascending; `items` (expert, first, count, 0), the rest expert -1.
// Within an expert the order is free: pairs do not meet. One block; a template so that it is compiled only where it is asked for.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) moe_route(
    const void* __restrict__ topk_ids, i64 ids_wide, i64 expert_count, i64 pairs, i64 item_tokens_wide, i64 max_items,
    int* __restrict__ order, int4* __restrict__ items) {
    wait_for_inputs();
    const Ids ids{topk_ids, ids_wide, expert_count};
    const int experts = int(expert_count), item_tokens = int(item_tokens_wide);
    extern __shared__ int counts[];  // [experts], then cursors and item_starts
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

// had(x * suh) in fragment order. With one suh row for all experts a row of the result is a token's, else a pair's. up_in is
// null where up's vectors are gate's. One warp, one row, 128 channels.
template <bool REPEAT>
__global__ void __launch_bounds__(256) moe_rotate(
    const void* __restrict__ x, i64 x_kind, const void* __restrict__ topk_ids, i64 ids_wide, i64 experts,
    const __half* __restrict__ gate_suh, const __half* __restrict__ up_suh, i64 suh_rows, __half* __restrict__ gate_in,
    __half* __restrict__ up_in, i64 tokens, i64 topk, i64 hidden) {
    wait_for_inputs();
    const int lane = threadIdx.x % 32;
    const i64 task = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32;
    const i64 blocks = hidden / BLOCK, rows = suh_rows == 1 ? tokens : tokens * topk;
    const i64 row = task / blocks % rows, at = task % blocks * BLOCK + 4 * lane, vector = task / blocks / rows;
    if (vector >= (up_in ? 2 : 1)) return;
    const int expert = suh_rows == 1 ? 0 : Ids{topk_ids, ids_wide, experts}[row];
    if (expert < 0) return;
    float v[4], suh[4];
    load_activations(v, x, (suh_rows == 1 ? row : row / topk) * hidden + at, int(x_kind));
    load_half4(suh, (vector ? up_suh : gate_suh) + expert * hidden + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= suh[i];
    hadamard_128(v, lane);
    store_fragments<REPEAT>(v, (vector ? up_in : gate_in) + (row * hidden + at - 4 * lane) * (REPEAT ? 2 : 1), lane);
}

// The item of a block where nothing was routed: block b stands for pair b. If the pairs of the same expert before it fill whole
// items, it begins one: it and those that follow, up to `most`. One warp; `to` gets the pairs; returns their number, else 0.
__device__ __forceinline__ int find_item(const Ids& ids, int pairs, int most, u32* to) {
    const int lane = threadIdx.x % 32, own = int(blockIdx.x), expert = ids[own];
    int before = 0, found = 0;
#pragma unroll 4
    for (int base = 0; base < pairs; base += 32) {
        const int pair = base + lane;
        const bool same = pair < pairs && ids[pair] == expert;
        before += __popc(__ballot_sync(0xFFFFFFFFu, same && pair < own));
        const u32 later = __ballot_sync(0xFFFFFFFFu, same && pair >= own);
        const int at = found + __popc(later & ((1u << lane) - 1));
        if (same && pair >= own && at < most) to[at] = pair;
        found += __popc(later);
    }
    return expert < 0 || before % most ? 0 : min(found, most);
}

// Gate and up (grid.y = 2 * column blocks; gate's planes first in a tier, then up's) or down (grid.y = column blocks).
// `items` is null where few pairs find their items themselves. `descriptors` is the first projection's row of `stride`.
// grid.z splits the in-channels; out is [grid.z][projections][pairs][out_side].
template <int NB, int DEPTH>
__global__ void __launch_bounds__(32 * MAX_WARPS, blocks_a_processor<NB>) moe_product(
    const void* __restrict__ topk_ids, i64 ids_wide, i64 experts, const int4* __restrict__ items, const int* __restrict__ order,
    const int* __restrict__ descriptors, i64 stride, const uint4* __restrict__ tier0, const uint4* __restrict__ tier1,
    const uint4* __restrict__ tier2, i64 tier_bits, i64 first_n, const __half* __restrict__ first_in,
    const __half* __restrict__ second_in, i64 pairs_a_row, i64 in_side, i64 out_side, i64 pairs, float* __restrict__ out) {
    extern __shared__ uint4 staged[];
    __shared__ u32 from[8 * NB], to[8 * NB], found;
    const Ids ids{topk_ids, ids_wide, experts};
    const int warps = int(blockDim.x) / 32;
    int4 item = make_int4(-1, 0, 0, 0);
    if (items) {
        item = items[blockIdx.x];
    } else {
        item.x = ids[blockIdx.x];
    }
    const int width = warps * STRIP;  // tiles of out-channels a block takes
    const int row_tiles = int(out_side / 16), column_blocks = row_tiles / width;
    const int projection = blockIdx.y / column_blocks, first_tile = blockIdx.y % column_blocks * width;
    const int descriptor = item.x < 0 ? 0 : descriptors[projection * stride + item.x];  // on its way while the item is found
    if (items) {
        for (int i = threadIdx.x; i < item.z; i += blockDim.x) {
            to[i] = u32(order[item.y + i]);
            from[i] = to[i] / u32(pairs_a_row);
        }
    } else if (threadIdx.x < 32) {
        const int own = find_item(ids, int(pairs), 8 * NB, to);
        __syncwarp();
        for (int i = threadIdx.x; i < own; i += 32) from[i] = to[i] / u32(pairs_a_row);
        if (threadIdx.x == 0) found = u32(own);
    }
    __syncthreads();
    const int count = items ? item.z : int(found);
    if (count == 0) return wait_for_inputs();  // no block may be done before the kernels that came before

    const int tier = descriptor >> 8, plane = (descriptor & 255) + (projection ? packed(first_n, tier) : 0);
    const int bits = packed(tier_bits, tier);
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
        u32(in_side / 16) * token_pieces<NB>,
        out + (blockIdx.z * projections + projection) * pairs * out_side + first_tile * 16,
        u32(out_side),
        count,
        from,
        to,
    };
    multiply<NB, DEPTH>(bits, share, staged);
}

constexpr int SMALL_WARPS = 8;  // of a block of the two kernels below

// A task of `group` warps: each has summed a part, and the first of them gets the total, in the order of the warps; what the
// others get is of no use, but they get it without a branch: shuffles after one that might split a warp cost more.
template <int N>
__device__ __forceinline__ void sum_group(float (&v)[N], int group) {
    __shared__ float parts[SMALL_WARPS][N][32];
    if (group == 1) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < N; ++i) parts[warp][i][lane] = v[i];
    __syncthreads();
    for (int other = 1; other < group; ++other) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] += parts[(warp + other) % SMALL_WARPS][i][lane];
    }
}

// One pair, 128 channels, `group` warps: gate and up summed over splits, rotated and scaled; silu(gate) * up, in fp32 throughout;
// scaled by down's suh, rotated, rounded once. products is [splits][2][pairs][inner].
template <bool REPEAT>
__global__ void __launch_bounds__(32 * SMALL_WARPS) moe_activate(
    const float* __restrict__ products, i64 splits, const void* __restrict__ topk_ids, i64 ids_wide, i64 experts,
    const __half* __restrict__ rotations, i64 pairs, i64 inner, __half* __restrict__ down_in, i64 group) {
    const int lane = threadIdx.x % 32, member = threadIdx.x / 32 % int(group);
    const i64 task = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32 / group;
    const i64 pair = task / (inner / BLOCK), at = task % (inner / BLOCK) * BLOCK + 4 * lane;
    const int expert = pair < pairs ? Ids{topk_ids, ids_wide, experts}[pair] : -1;
    float gate_svh[4], up_svh[4], down_suh[4];
    const __half* scales = rotations + max(expert, 0) * 3 * inner + at;
    load_half4(gate_svh, scales);
    load_half4(up_svh, scales + inner);
    load_half4(down_suh, scales + 2 * inner);
    wait_for_inputs();
    float sums[8] = {};  // gate's four channels, then up's
    const i64 up_at = pairs * inner;
    const float* part = products + (2 * member * pairs + pair) * inner + at;
#pragma unroll 2
    for (int first = 0; first < int(splits); first += int(group), part += 2 * group * up_at) {
        if (expert >= 0 && first + member < int(splits)) {
            add_float4(sums, part);
            add_float4(sums + 4, part + up_at);
        }
    }
    sum_group(sums, int(group));
    float gate[4] = {sums[0], sums[1], sums[2], sums[3]}, up[4] = {sums[4], sums[5], sums[6], sums[7]};
    hadamard_128(gate, lane);
    hadamard_128(up, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float g = gate[i] * gate_svh[i];
        gate[i] = g / (1.0f + __expf(-g)) * (up[i] * up_svh[i]) * down_suh[i];
    }
    hadamard_128(gate, lane);
    if (member == 0 && expert >= 0) store_fragments<REPEAT>(gate, down_in + (pair * inner + at - 4 * lane) * (REPEAT ? 2 : 1), lane);
}

// One token, 128 channels, `group` warps: the weighted sum over slots of had(down) * svh. The transform is linear, so with one
// svh row for all experts (ONE_SVH) it is taken once, after the sum. products is [splits][pairs][hidden].
template <bool ONE_SVH>
__global__ void __launch_bounds__(32 * SMALL_WARPS) moe_combine(
    const float* __restrict__ products, i64 splits, const void* __restrict__ topk_ids, i64 ids_wide, i64 experts,
    const float* __restrict__ topk_weights, const __half* __restrict__ down_svh, i64 tokens, i64 topk, i64 hidden,
    void* __restrict__ out, i64 out_kind, i64 group) {
    constexpr int together = ONE_SVH ? 4 : 1;  // slots whose loads are in flight at once
    const int lane = threadIdx.x % 32, member = threadIdx.x / 32 % int(group);
    const i64 task = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32 / group;
    const i64 token = task / (hidden / BLOCK), at = task % (hidden / BLOCK) * BLOCK + 4 * lane;
    const int each = (int(topk) + int(group) - 1) / int(group), begin = each * member;
    const int end = token < tokens ? min(begin + each, int(topk)) : 0;
    const Ids ids{topk_ids, ids_wide, experts};
    const i64 split_pitch = tokens * topk * hidden;
    float sum[4] = {}, svh[4];
    wait_for_inputs();
#pragma unroll 1
    for (int first = begin; first < begin + each; first += together) {
        const i64 pair = token * topk + first;
        int expert[together];
        float weight[together];
#pragma unroll
        for (int i = 0; i < together; ++i) {
            expert[i] = first + i < end ? ids[pair + i] : -1;  // -1: its products were never written
            weight[i] = expert[i] >= 0 ? topk_weights[pair + i] : 0.0f;
        }
        const float* part = products + pair * hidden + at;
        float v[4] = {};
#pragma unroll(ONE_SVH ? 2 : 1)
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
    sum_group(sum, int(group));
    if constexpr (ONE_SVH) {
        hadamard_128(sum, lane);
        load_half4(svh, down_svh + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] *= svh[i];
    }
    if (member == 0 && token < tokens) store_result(sum, out, token * hidden + at, int(out_kind));
}
