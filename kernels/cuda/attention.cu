// Attention of rows (one query token each) over a paged cache. In a decode step each sequence has one row; a chunk of a prompt is as
// many rows of one sequence, each of which sees one position more than the one before. Rows do not share what they read, so a chunk
// gets the very bits that decode steps would give, and no more speed.
//
// Why the bits never vary: as on the CPU (kernels/src/attention/rows.rs), each query head is computed by a sequence of operations
// that depends on absolute positions alone. Positions are cut into tiles of 32 and segments of SEGMENT, beginning at multiples of
// it. A block takes a segment for some query heads that share a KV head; its warps take tiles in turn, and their states are
// merged in the order of the warps; a second kernel merges segments in ascending order. Blocks of tokens, the layout, the batch
// and the schedule decide which addresses are read and when, but no operand and no order.
//
// A warp copies the keys of a tile to shared memory while it weighs the values of the one before, and the values while it scores
// the keys: lane j scores position j for all heads, so a dot product needs no shuffle; then each lane has columns of the values.
#include "elements.cuh"

// The layout of these structs is also that of kernels/src/cuda/attention.rs.
struct PageStrides {
    uint64_t block, head, token;
};

struct DecodeParams {
    // [rows, q_heads, dim] of `type`.
    uint64_t queries, out;
    // Where block 0, head 0, token 0 of the layer lie.
    uint64_t keys, values;
    // u32 [sequences, table_stride] and u32 [rows]: positions that the query may see, its own among them.
    uint64_t tables, lengths;
    // u32 [rows]: which sequence a row is of; or 0, if each has one row.
    uint64_t sequences;
    // f32 [rows, q_heads, segments, dim + 2].
    uint64_t partials;
    // f32 [q_heads], or 0.
    uint64_t sinks;
    PageStrides key, value;
    uint32_t table_stride, tokens_per_block, dim, group, q_heads, segments;
    // Positions that the query sees, its own among them.
    uint32_t window;
    uint32_t type;
    // What scores are multiplied by, the keys' scale included; and the values' scale.
    float scale, value_scale;
};

constexpr uint32_t WARPS = 4;
constexpr uint32_t TILE = 32;
constexpr uint32_t SEGMENT = 512;

// Below every score.
constexpr uint32_t MINUS_INFINITY = 0xff800000u;

// e^x for x <= 0 or minus infinity, to 2 units in the last place; the same operations on every machine. NaN stays NaN.
DEVICE float exp_of(float x) {
    if (x < -87.0f) return 0.0f;
    constexpr float ROUND = 12582912.0f;
    float n = fused_multiply_add(x, 1.44269504f, ROUND) - ROUND;
    float r = fused_multiply_add(n, -0.693359375f, x);
    r = fused_multiply_add(n, 2.12194440e-4f, r);
    float sum = 1.9875691500e-4f;
    sum = fused_multiply_add(sum, r, 1.3981999507e-3f);
    sum = fused_multiply_add(sum, r, 8.3334519073e-3f);
    sum = fused_multiply_add(sum, r, 4.1665795894e-2f);
    sum = fused_multiply_add(sum, r, 1.6666665459e-1f);
    sum = fused_multiply_add(sum, r, 5.0000001201e-1f);
    sum = fused_multiply_add(sum, r * r, r) + 1.0f;
    if (x != x) return x;
    return sum * from_bits(uint32_t(int32_t(n) + 127) << 23);
}

// By what a state is multiplied when the maximum grows: 0 where nothing was seen yet.
DEVICE float decay(float before, float after) {
    return before == after ? 1.0f : exp_of(before - after);
}

// The larger one; NaN where one is.
DEVICE float larger(float a, float b) {
    return a != a || b <= a ? a : b;
}

DEVICE uint32_t element_bits(const Bytes16 &v, uint32_t at, uint32_t bytes) {
    uint64_t word = at * bytes < 8 ? v.low : v.high;
    uint32_t bits = uint32_t(word >> (at * bytes % 8 * 8));
    return bytes == 1 ? bits & 0xff : bits & 0xffff;
}

// Copies a tile's rows to shared memory; `row` is the address of this lane's. Rows outside of [low, high) are left alone.
DEVICE void stage(unsigned char *to, uint64_t row, uint32_t low, uint32_t high, uint32_t units, uint32_t stride) {
    uint32_t lane = threadIdx.x % WARP;
    uint32_t j = lane / units;
    uint32_t unit = lane - j * units;
    for (uint32_t step = 0; step < units; step++) {
        uint64_t from = __shfl_sync(FULL_WARP, row, j);
        if (j >= low && j < high) async_copy_16(to + j * stride + unit * 16, from + unit * 16);
        unit += WARP;
        while (unit >= units) {
            unit -= units;
            j++;
        }
    }
    async_commit();
}

template <class T, uint32_t HEADS, uint32_t COLUMNS>
DEVICE void decode(const DecodeParams &p) {
    constexpr uint32_t BYTES = sizeof(typename T::Bits);
    constexpr uint32_t EACH = 16 / BYTES;
    uint32_t lane = threadIdx.x % WARP;
    uint32_t warp = threadIdx.x / WARP;
    uint32_t row = blockIdx.z;
    uint32_t chunks = (p.group + HEADS - 1) / HEADS;
    uint32_t kv_head = blockIdx.y / chunks;
    uint32_t first_in_group = blockIdx.y % chunks * HEADS;
    uint32_t first_head = kv_head * p.group + first_in_group;
    uint32_t heads = min(p.group - first_in_group, HEADS);

    uint32_t length = load<uint32_t>(p.lengths + uint64_t(row) * 4);
    uint32_t seen_from = length > p.window ? length - p.window : 0;
    uint32_t begin = max(blockIdx.x * SEGMENT, seen_from);
    uint32_t end = min((blockIdx.x + 1) * SEGMENT, length);
    if (begin >= end) return;

    // Shared memory: the queries, then for each warp its keys, its values and its probabilities.
    DYNAMIC_SHARED(shared);
    uint32_t units = p.dim * BYTES / 16;
    // An odd number of sixteen bytes: lanes that read one column of all rows meet no bank twice.
    uint32_t stride = (units | 1) * 16;
    float *queries = reinterpret_cast<float *>(shared);
    uint32_t warp_bytes = 2 * TILE * stride + TILE * HEADS * 4;
    unsigned char *mine = shared + HEADS * p.dim * 4 + warp * warp_bytes;
    unsigned char *keys = mine;
    unsigned char *values = mine + TILE * stride;
    float *weights = reinterpret_cast<float *>(mine + 2 * TILE * stride);

    for (uint32_t at = threadIdx.x; at < HEADS * p.dim; at += WARPS * WARP) {
        uint32_t head = at / p.dim;
        uint64_t index = (uint64_t(row) * p.q_heads + first_head + min(head, heads - 1)) * p.dim + at % p.dim;
        queries[at] = load_element(p.type, p.queries, index) * p.scale;
    }
    __syncthreads();

    float largest[HEADS], total[HEADS], sums[HEADS][COLUMNS][2];
#pragma unroll
    for (uint32_t h = 0; h < HEADS; h++) {
        largest[h] = from_bits(MINUS_INFINITY);
        total[h] = 0;
#pragma unroll
        for (uint32_t c = 0; c < COLUMNS; c++) sums[h][c][0] = sums[h][c][1] = 0;
    }

    uint32_t sequence = p.sequences == 0 ? row : load<uint32_t>(p.sequences + uint64_t(row) * 4);
    uint64_t table = p.tables + uint64_t(sequence) * p.table_stride * 4;
    uint64_t key_rows = p.keys + kv_head * p.key.head;
    uint64_t value_rows = p.values + kv_head * p.value.head;
    // Where this lane's position of a tile lies; any place that is seen for a position that is not.
    auto rows = [&](uint32_t tile, uint64_t &key, uint64_t &value) {
        uint32_t position = min(max(tile + lane, begin), end - 1);
        uint32_t index = position / p.tokens_per_block;
        uint64_t block = load<uint32_t>(table + uint64_t(index) * 4);
        uint64_t token = position - index * p.tokens_per_block;
        key = key_rows + block * p.key.block + token * p.key.token;
        value = value_rows + block * p.value.block + token * p.value.token;
    };
    auto low = [&](uint32_t tile) { return max(tile, begin) - tile; };
    auto high = [&](uint32_t tile) { return min(tile + TILE, end) - tile; };

    // The warp's first tile: they take turns from the segment's begin, whether a tile is seen or not.
    uint32_t tile = blockIdx.x * SEGMENT + warp * TILE;
    while (tile + TILE <= begin) tile += WARPS * TILE;
    uint64_t key = 0, value = 0;
    if (tile < end) {
        rows(tile, key, value);
        stage(keys, key, low(tile), high(tile), units, stride);
    }
    for (; tile < end; tile += WARPS * TILE) {
        stage(values, value, low(tile), high(tile), units, stride);
        async_wait<1>();
        __syncwarp();

        float scores[HEADS];
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h++) scores[h] = 0;
        for (uint32_t unit = 0; unit < units; unit++) {
            Bytes16 v = *reinterpret_cast<const Bytes16 *>(keys + lane * stride + unit * 16);
#pragma unroll
            for (uint32_t i = 0; i < EACH; i++) {
                float k = T::decode(element_bits(v, i, BYTES));
#pragma unroll
                for (uint32_t h = 0; h < HEADS; h++) {
                    scores[h] = fused_multiply_add(queries[h * p.dim + unit * EACH + i], k, scores[h]);
                }
            }
        }
        bool seen = lane >= low(tile) && lane < high(tile);
#pragma unroll
        for (uint32_t h = 0; h < HEADS; h++) {
            float score = seen ? scores[h] : from_bits(MINUS_INFINITY);
            float found = score;
#pragma unroll
            for (uint32_t by = WARP / 2; by > 0; by /= 2) found = larger(found, __shfl_xor_sync(FULL_WARP, found, by));
            float grown = larger(largest[h], found);
            float weight = seen ? exp_of(score - grown) : 0;
            weights[lane * HEADS + h] = weight;
#pragma unroll
            for (uint32_t by = WARP / 2; by > 0; by /= 2) weight += __shfl_xor_sync(FULL_WARP, weight, by);
            float shrink = decay(largest[h], grown);
            total[h] = fused_multiply_add(total[h], shrink, weight);
#pragma unroll
            for (uint32_t c = 0; c < COLUMNS; c++) {
                sums[h][c][0] *= shrink;
                sums[h][c][1] *= shrink;
            }
            largest[h] = grown;
        }
        // All lanes have read the keys, and all weights are written.
        __syncwarp();
        uint32_t from = low(tile), to = high(tile);
        if (tile + WARPS * TILE < end) {
            rows(tile + WARPS * TILE, key, value);
            stage(keys, key, low(tile + WARPS * TILE), high(tile + WARPS * TILE), units, stride);
            async_wait<1>();
        } else {
            async_wait<0>();
        }
        __syncwarp();
        for (uint32_t j = from; j < to; j++) {
#pragma unroll
            for (uint32_t c = 0; c < COLUMNS; c++) {
                uint32_t column = (c * WARP + lane) * 2;
                if (column >= p.dim) continue;
                const unsigned char *at = values + j * stride + column * BYTES;
                uint32_t pair = BYTES == 1 ? *reinterpret_cast<const uint16_t *>(at) : *reinterpret_cast<const uint32_t *>(at);
                float first = T::decode(BYTES == 1 ? pair & 0xff : pair & 0xffff);
                float second = T::decode(BYTES == 1 ? pair >> 8 : pair >> 16);
#pragma unroll
                for (uint32_t h = 0; h < HEADS; h++) {
                    float weight = weights[j * HEADS + h];
                    sums[h][c][0] = fused_multiply_add(weight, first, sums[h][c][0]);
                    sums[h][c][1] = fused_multiply_add(weight, second, sums[h][c][1]);
                }
            }
        }
        // The values and the weights may be overwritten.
        __syncwarp();
    }

    // The states of all warps, over what they staged: sums [HEADS, dim], then maxima and totals.
    __syncthreads();
    float *state = reinterpret_cast<float *>(mine);
#pragma unroll
    for (uint32_t h = 0; h < HEADS; h++) {
#pragma unroll
        for (uint32_t c = 0; c < COLUMNS; c++) {
            uint32_t column = (c * WARP + lane) * 2;
            if (column >= p.dim) continue;
            state[h * p.dim + column] = sums[h][c][0];
            state[h * p.dim + column + 1] = sums[h][c][1];
        }
        if (lane == 0) {
            state[HEADS * p.dim + h] = largest[h];
            state[HEADS * p.dim + HEADS + h] = total[h];
        }
    }
    __syncthreads();
    for (uint32_t at = threadIdx.x; at < heads * p.dim; at += WARPS * WARP) {
        uint32_t h = at / p.dim;
        float most = from_bits(MINUS_INFINITY), weight = 0, sum = 0;
        for (uint32_t w = 0; w < WARPS; w++) {
            const float *other = reinterpret_cast<const float *>(shared + HEADS * p.dim * 4 + w * warp_bytes);
            float grown = larger(most, other[HEADS * p.dim + h]);
            float mine_by = decay(most, grown), other_by = decay(other[HEADS * p.dim + h], grown);
            weight = fused_multiply_add(other[HEADS * p.dim + HEADS + h], other_by, weight * mine_by);
            sum = fused_multiply_add(other[at], other_by, sum * mine_by);
            most = grown;
        }
        uint64_t state_of = ((uint64_t(row) * p.q_heads + first_head + h) * p.segments + blockIdx.x) * (p.dim + 2);
        uint64_t to = p.partials + state_of * 4;
        store(to + (at - h * p.dim) * 4, sum);
        if (at == h * p.dim) {
            store(to + p.dim * 4, most);
            store(to + p.dim * 4 + 4, weight);
        }
    }
}

// Merges the segments of a query head: blockIdx.x is the head, blockIdx.y the row.
DEVICE void merge(const DecodeParams &p) {
    uint32_t head = blockIdx.x, token = blockIdx.y;
    uint32_t length = load<uint32_t>(p.lengths + uint64_t(token) * 4);
    uint32_t seen_from = length > p.window ? length - p.window : 0;
    uint32_t end = (length + SEGMENT - 1) / SEGMENT;
    uint64_t row = uint64_t(token) * p.q_heads + head;
    for (uint32_t column = threadIdx.x; column < p.dim; column += blockDim.x) {
        float most = from_bits(MINUS_INFINITY), weight = 0, sum = 0;
        // A sink is a score without a value.
        if (p.sinks != 0) {
            most = load<float>(p.sinks + head * 4);
            weight = most == from_bits(MINUS_INFINITY) ? 0 : 1;
        }
        for (uint32_t segment = seen_from / SEGMENT; segment < end; segment++) {
            uint64_t from = p.partials + (row * p.segments + segment) * (p.dim + 2) * 4;
            float found = load<float>(from + p.dim * 4);
            float grown = larger(most, found);
            float mine_by = decay(most, grown), found_by = decay(found, grown);
            weight = fused_multiply_add(load<float>(from + p.dim * 4 + 4), found_by, weight * mine_by);
            sum = fused_multiply_add(load<float>(from + column * 4), found_by, sum * mine_by);
            most = grown;
        }
        // Nothing is seen in an empty sequence: zeros.
        float x = length == 0 ? 0 : sum / weight * p.value_scale;
        store_element(p.type, p.out, row * p.dim + column, x);
    }
}

extern "C" __global__ void __launch_bounds__(128) kvferry_decode_merge(const __grid_constant__ DecodeParams params) {
    merge(params);
}
KERNEL(kvferry_decode_merge)

#define DECODE_KERNEL(name, T, HEADS, COLUMNS) \
    extern "C" __global__ void __launch_bounds__(WARPS * WARP, COLUMNS > 2 ? 2 : 3) \
        name(const __grid_constant__ DecodeParams params) { \
        decode<T, HEADS, COLUMNS>(params); \
    } \
    KERNEL(name)

#define DECODE_KERNELS_OF(type, T, HEADS) \
    DECODE_KERNEL(kvferry_decode_##type##_##HEADS##_64, T, HEADS, 1) \
    DECODE_KERNEL(kvferry_decode_##type##_##HEADS##_128, T, HEADS, 2) \
    DECODE_KERNEL(kvferry_decode_##type##_##HEADS##_192, T, HEADS, 3) \
    DECODE_KERNEL(kvferry_decode_##type##_##HEADS##_256, T, HEADS, 4)

#define DECODE_KERNELS(type, T) \
    DECODE_KERNELS_OF(type, T, 1) \
    DECODE_KERNELS_OF(type, T, 4) \
    DECODE_KERNELS_OF(type, T, 8)

DECODE_KERNELS(f16, F16)
DECODE_KERNELS(bf16, Bf16)
DECODE_KERNELS(e4m3, E4m3)
