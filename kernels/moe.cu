// Routed experts from slabs, one rank: [moe_route ->] moe_rotate -> moe_product (gate, up) -> moe_product (down) -> moe_combine.
// Truth: moe.moe_reference over codec.expert_forward. Layout of slabs: FORMAT.md section 5.
//
// A pair is (token, slot) = token * topk + slot; every intermediate row is a pair's. An item is up to 8*NB pairs of one
// expert: what a block of moe_product takes. With few pairs each block finds its item itself and moe_route is left out.
// Nothing is summed by atomics, so results are the same bits in every run. Expert ids outside 0..experts-1 take no part.
// Offsets are 64 bits.
//
// The block of gate and up that is the last to bring its sums for some channels of an item activates them; the blocks of the down
// product wait for their item alone. Launches overlap (programmatic dependent launch), so that down's first blocks work while the last
// of gate and up still do. Nobody starves: down starts when all blocks of gate and up have a place, and where launches do not
// overlap, when they are done. What a kernel reads before it waits, ids, items, descriptors and trellis words, is older than moe_rotate.
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

// Groups pairs by expert: `order` holds pairs, experts ascending, those of one in order; `items` (expert, first, count, 0), the rest
// expert -1. The order decides which pairs share an item, and with how many others the sums of a pair are shared out to warps: it has
// to be the same in every run, so nothing here is counted by atomics. One block; warps take the pairs in shares of `span`.
template <int THREADS>
__global__ void __launch_bounds__(THREADS) moe_route(
    const void* __restrict__ topk_ids, i64 ids_wide, i64 expert_count, i64 pairs, i64 item_tokens_wide, i64 max_items,
    int* __restrict__ order, int4* __restrict__ items) {
    wait_for_inputs();
    constexpr int warps = THREADS / 32;
    const Ids ids{topk_ids, ids_wide, expert_count};
    const int experts = int(expert_count), item_tokens = int(item_tokens_wide);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    extern __shared__ int counts[];  // [experts] each:
    int* firsts = counts + experts;
    int* item_starts = firsts + experts;
    u16* taken = reinterpret_cast<u16*>(item_starts + experts);  // [warps][experts]: pairs of a warp, then of the warps before it
    __shared__ int item_count;
    for (int i = threadIdx.x; i < warps * experts; i += THREADS) taken[i] = 0;
    __syncthreads();
    u16* own = taken + warp * experts;
    const i64 span = (pairs + THREADS - 1) / THREADS * 32, begin = warp * span, end = min(begin + span, pairs);
    for (i64 base = begin; base < end; base += 32) {
        const int e = base + lane < end ? ids[base + lane] : -1;
        const u32 same = __match_any_sync(0xFFFFFFFFu, e);
        if (e >= 0 && lane == __ffs(same) - 1) own[e] += u16(__popc(same));
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        int total = 0;
        for (int w = 0; w < warps; ++w) {
            const int count = taken[w * experts + e];
            taken[w * experts + e] = u16(total);
            total += count;
        }
        counts[e] = total;
    }
    __syncthreads();
    if (warp == 0) {  // exclusive sums over experts, 32 at a time
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
                firsts[base + lane] = first + pairs_through - count;
                item_starts[base + lane] = item + items_through - own_items;
            }
            first += __shfl_sync(0xFFFFFFFFu, pairs_through, 31);
            item += __shfl_sync(0xFFFFFFFFu, items_through, 31);
        }
        if (lane == 0) item_count = item;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < experts; e += THREADS) {
        for (int done = 0, item = item_starts[e]; done < counts[e]; done += item_tokens, ++item)
            items[item] = make_int4(e, firsts[e] + done, min(item_tokens, counts[e] - done), 0);
    }
    for (i64 item = item_count + threadIdx.x; item < max_items; item += THREADS) items[item] = make_int4(-1, 0, 0, 0);
    for (i64 base = begin; base < end; base += 32) {
        const int e = base + lane < end ? ids[base + lane] : -1;
        const u32 same = __match_any_sync(0xFFFFFFFFu, e);
        if (e >= 0) order[firsts[e] + own[e] + __popc(same & ((1u << lane) - 1))] = int(base + lane);
        __syncwarp();
        if (e >= 0 && lane == __ffs(same) - 1) own[e] += u16(__popc(same));
        __syncwarp();
    }
}

// had(x * suh) in fragment order. With one suh row for all experts a row of the result is a token's, else a pair's. up_in is
// null where up's vectors are gate's. One warp, one row, 128 channels. The products' counters are set to 0 on the way.
template <bool REPEAT>
__global__ void __launch_bounds__(256) moe_rotate(
    const void* __restrict__ x, i64 x_kind, const void* __restrict__ topk_ids, i64 ids_wide, i64 experts,
    const __half* __restrict__ gate_suh, const __half* __restrict__ up_suh, i64 suh_rows, __half* __restrict__ gate_in,
    __half* __restrict__ up_in, i64 tokens, i64 topk, i64 hidden, int* __restrict__ counters, i64 counter_count) {
    wait_for_inputs();
    for (i64 i = blockIdx.x * i64(blockDim.x) + threadIdx.x; i < counter_count; i += gridDim.x * i64(blockDim.x)) counters[i] = 0;
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

// The item of a block where nothing was routed: item b stands for pair b. If the pairs of the same expert before it fill whole
// items, it begins one: it and those that follow, up to `most`. One warp; `to` gets the pairs; returns their number, else 0.
__device__ __forceinline__ int find_item(const Ids& ids, int own, int pairs, int most, u32* to) {
    const int lane = threadIdx.x % 32, expert = ids[own];
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

constexpr int SMALL_WARPS = 8;  // of a block of moe_combine

// A task of `group` warps: each has summed a part, and the first of them gets the total, in the order of the warps; what the
// others get is of no use, but they get it without a branch: shuffles after one that might split a warp cost more. `parts` is shared
// memory: N * 32 numbers a warp.
template <int N>
__device__ __forceinline__ void sum_group(float (&v)[N], int group, float* parts) {
    if (group == 1) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = int(blockDim.x) / 32;
#pragma unroll
    for (int i = 0; i < N; ++i) parts[(warp * N + i) * 32 + lane] = v[i];
    __syncthreads();
    for (int other = 1; other < group; ++other) {
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] += parts[((warp + other) % warps * N + i) * 32 + lane];
    }
}

// Sums of gate and up, and what becomes of them.
struct Activation {
    const float* products;  // [splits][2][pairs][inner]
    const __half* scales;   // the expert's row of the rotation table
    __half* down_in;
    i64 pairs;
    i64 inner;
    int splits;
};

// `channels` from `first_channel` on of an item's pairs: gate and up summed over splits, rotated and scaled; silu(gate) * up, in fp32
// throughout; scaled by down's suh, rotated, rounded once. A task is one pair, 128 channels; all warps of a block share them.
template <bool REPEAT>
__device__ __forceinline__ void activate(const Activation& a, int first_channel, int channels, int count, const u32* pairs, float* parts) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = int(blockDim.x) / 32;
    const int pieces = channels / BLOCK, tasks = count * pieces;
    int group = 1;
    while (2 * group * tasks <= warps) group *= 2;
    for (int first = 0; first < tasks; first += warps / group) {
        const int task = first + warp / group, member = warp % group;
        const bool real = task < tasks;
        const i64 pair = pairs[real ? task / pieces : 0], at = first_channel + task % pieces * BLOCK + 4 * lane;
        float gate_svh[4], up_svh[4], down_suh[4], sums[8] = {};  // gate's four channels, then up's
        load_half4(gate_svh, a.scales + at);
        load_half4(up_svh, a.scales + a.inner + at);
        load_half4(down_suh, a.scales + 2 * a.inner + at);
        const i64 up_at = a.pairs * a.inner;
        const float* part = a.products + (2 * member * a.pairs + pair) * a.inner + at;
#pragma unroll 4
        for (int split = member; split < (real ? a.splits : 0); split += group, part += 2 * group * up_at) {
            add_float4(sums, part);
            add_float4(sums + 4, part + up_at);
        }
        sum_group(sums, group, parts);
        float gate[4] = {sums[0], sums[1], sums[2], sums[3]}, up[4] = {sums[4], sums[5], sums[6], sums[7]};
        hadamard_128(gate, lane);
        hadamard_128(up, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float g = gate[i] * gate_svh[i];
            gate[i] = g / (1.0f + __expf(-g)) * (up[i] * up_svh[i]) * down_suh[i];
        }
        hadamard_128(gate, lane);
        if (real && member == 0) store_fragments<REPEAT>(gate, a.down_in + (pair * a.inner + at - 4 * lane) * (REPEAT ? 2 : 1), lane);
    }
}

__device__ __forceinline__ int load_acquire(const int* from) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// One block counts itself in, after all it has written; true for the one that makes `all`.
__device__ __forceinline__ bool arrive(int* counter, int all) {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        is_last = atomicAdd(counter, 1) == all - 1;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

// Gate and up (down_in is not null; gate's planes first in a tier, then up's) or down, block (split of the in-channels, column block,
// item): items that come first are done first. gate's column blocks come before up's. `items` is null where few pairs find their items
// themselves. `descriptors` is the first projection's row of `stride`. products is [splits][projections][pairs][out_side]. arrived
// [item][column block of gate] counts blocks of gate and up, ready [item] the column blocks that are activated, of `gate_columns`.
template <int NB, int DEPTH>
__global__ void __launch_bounds__(32 * MAX_WARPS, blocks_a_processor<NB>) moe_product(
    const void* __restrict__ topk_ids, i64 ids_wide, i64 experts, const int4* __restrict__ items, const int* __restrict__ order,
    const int* __restrict__ descriptors, i64 stride, const uint4* __restrict__ tier0, const uint4* __restrict__ tier1,
    const uint4* __restrict__ tier2, i64 tier_bits, i64 first_n, const __half* __restrict__ first_in,
    const __half* __restrict__ second_in, i64 pairs_a_row, i64 in_side, i64 out_side, i64 pairs, float* products,
    const __half* __restrict__ rotations, __half* down_in, int* arrived, int* ready, i64 gate_columns) {
    extern __shared__ uint4 staged[];
    __shared__ u32 from[8 * NB], to[8 * NB], found;
    const Ids ids{topk_ids, ids_wide, experts};
    const bool is_down = down_in == nullptr;
    const int own = int(blockIdx.z), split = int(blockIdx.x), splits = int(gridDim.x);
    if (is_down) let_next_start();
    const int warps = int(blockDim.x) / 32;
    int4 item = make_int4(-1, 0, 0, 0);
    if (items) {
        item = items[own];
    } else {
        item.x = ids[own];
    }
    const int width = warps * STRIP;  // tiles of out-channels a block takes
    const int row_tiles = int(out_side / 16), column_blocks = row_tiles / width;
    const int projection = blockIdx.y / column_blocks, column = blockIdx.y % column_blocks, first_tile = column * width;
    const int descriptor = item.x < 0 ? 0 : descriptors[projection * stride + item.x];  // on its way while the item is found
    if (items) {
        for (int i = threadIdx.x; i < item.z; i += blockDim.x) {
            to[i] = u32(order[item.y + i]);
            from[i] = to[i] / u32(pairs_a_row);
        }
    } else if (threadIdx.x < 32) {
        const int pairs_of_item = find_item(ids, own, int(pairs), 8 * NB, to);
        __syncwarp();
        for (int i = threadIdx.x; i < pairs_of_item; i += 32) from[i] = to[i] / u32(pairs_a_row);
        if (threadIdx.x == 0) found = u32(pairs_of_item);
    }
    __syncthreads();
    const int count = items ? item.z : int(found);
    if (count == 0) {
        if (!is_down) wait_for_inputs();  // the next kernel relies on moe_rotate's end
        return;
    }

    const int tier = descriptor >> 8, plane = (descriptor & 255) + (projection ? packed(first_n, tier) : 0);
    const int bits = packed(tier_bits, tier);
    const int steps = int(in_side / (16 * STEP));
    const int begin = steps * split / splits * STEP, end = steps * (split + 1) / splits * STEP;
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
        products + (split * projections + projection) * pairs * out_side + first_tile * 16,
        u32(out_side),
        count,
        from,
        to,
    };
    multiply<NB, DEPTH>(bits, share, staged, [&] {
        if (!is_down) return wait_for_inputs();
        if (threadIdx.x == 0)
            while (load_acquire(ready + own) != int(gate_columns)) __nanosleep(32);
        __syncthreads();
    });
    if (is_down || !arrive(arrived + own * gate_columns + column, 2 * splits)) return;
    const Activation activation{products, rotations + i64(item.x) * 3 * out_side, down_in, pairs, out_side, splits};
    activate<terms_apart<NB>>(activation, first_tile * 16, width * 16, count, to, reinterpret_cast<float*>(staged));
    arrive(ready + own, 0);
}

// One token, 128 channels, `group` warps: the weighted sum over slots of had(down) * svh. The transform is linear, so with one
// svh row for all experts (ONE_SVH) it is taken once, after the sum. products is [splits][pairs][hidden].
template <bool ONE_SVH>
__global__ void __launch_bounds__(32 * SMALL_WARPS) moe_combine(
    const float* __restrict__ products, i64 splits, const void* __restrict__ topk_ids, i64 ids_wide, i64 experts,
    const float* __restrict__ topk_weights, const __half* __restrict__ down_svh, i64 tokens, i64 topk, i64 hidden,
    void* __restrict__ out, i64 out_kind, i64 group) {
    const int lane = threadIdx.x % 32, member = threadIdx.x / 32 % int(group);
    const i64 task = (blockIdx.x * i64(blockDim.x) + threadIdx.x) / 32 / group;
    const i64 token = task / (hidden / BLOCK), at = task % (hidden / BLOCK) * BLOCK + 4 * lane;
    const int each = (int(topk) + int(group) - 1) / int(group), begin = each * member;
    const int end = token < tokens ? min(begin + each, int(topk)) : 0;
    const Ids ids{topk_ids, ids_wide, experts};
    const i64 split_pitch = tokens * topk * hidden;
    int own_expert = -1;  // lane i: of slot i; a slot without an expert has no products
    float own_weight = 0.0f;
    if (token < tokens && lane < int(topk)) {
        own_expert = ids[token * topk + lane];
        own_weight = topk_weights[token * topk + lane];
    }
    float sum[4] = {}, svh[4];
    wait_for_inputs();
    const auto add = [&](float(&v)[4], int slot, int split) {
        const int expert = __shfl_sync(0xFFFFFFFFu, own_expert, slot);
        const float weight = __shfl_sync(0xFFFFFFFFu, own_weight, slot);
        if (slot < end && expert >= 0) add_float4(v, products + (split * tokens * topk + token * topk + slot) * hidden + at, weight);
    };
    if constexpr (ONE_SVH) {
        for (int slot = begin, split = 0; slot < end;) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // loads in flight at once
                add(sum, slot, split);
                if (++split == int(splits)) split = 0, ++slot;
            }
        }
    } else {
#pragma unroll 1
        for (int slot = begin; slot < end; ++slot) {
            float v[4] = {};
#pragma unroll 4
            for (int split = 0; split < int(splits); ++split) add(v, slot, split);
            hadamard_128(v, lane);  // of zeros where there is no expert: a branch around shuffles costs more
            load_half4(svh, down_svh + max(__shfl_sync(0xFFFFFFFFu, own_expert, slot), 0) * hidden + at);
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[i] += v[i] * svh[i];
        }
    }
    __shared__ float parts[SMALL_WARPS * 4 * 32];
    sum_group(sum, int(group), parts);
    if constexpr (ONE_SVH) {
        hadamard_128(sum, lane);
        load_half4(svh, down_svh + at);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[i] *= svh[i];
    }
    if (member == 0 && token < tokens) store_result(sum, out, token * hidden + at, int(out_kind));
}
