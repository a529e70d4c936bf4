// Gather, scatter and digest: a copy plan followed over any two layouts.
//
// The unit is a run: one token of one head of one plane of one layer, which lies in one piece on both sides. LANES threads
// share a run, sixteen bytes each at a time, and work on RUNS runs at once, so that many loads are in flight before the first
// store. Runs are numbered along the axis that is closer in memory, so neighbouring threads read and write neighbouring bytes.
// Work is dealt out to warps, not to blocks: a strip of few runs (one head after a cut by tensor-parallel ranks) keeps a warp
// busy, but not a block.
//
// Addresses are 64-bit integers throughout: `bases[layer][plane] + block * stride + head * stride + token * stride`.
#include "digest.cuh"

// The layout of these structs is also that of kernels/src/cuda/copy.rs.
struct Span {
    uint32_t src_block, src_token, dst_block, dst_token;
    // The first token's place in the sequence, and how many there are.
    uint32_t token, tokens;
};

struct Strides {
    uint64_t block, head, token;
};

struct PlaneCopy {
    Strides src, dst;
    uint32_t run_bytes;
    // Whether heads lie closer together than tokens.
    uint32_t heads_inside;
};

struct CopyParams {
    // u64 [layers][planes]: where block 0, head 0, token 0 lie.
    uint64_t src_bases, dst_bases;
    // Span [spans].
    uint64_t spans;
    // u64: the digest is added to it.
    uint64_t digest;
    PlaneCopy planes[2];
    uint32_t layers, plane_count, heads;
    uint32_t first_layer, first_head;
    // Each (span, layer, plane) is cut into chunks of so many runs, a multiple of a tile's.
    uint32_t chunks, chunk_runs;
    uint32_t items;
    // Bytes that all addresses, strides and run lengths are multiples of: 1, 2, 4 or 8 where a kernel is narrow.
    uint32_t width;
};

enum Mode { COPY, COPY_AND_DIGEST, DIGEST };

constexpr uint32_t THREADS = 256;
// Runs that a thread works on at once.
constexpr uint32_t RUNS = 4;

struct Run {
    uint64_t src, dst, key;
};

// Sixteen bytes of a run from narrower loads; past its end zeros, as the digest wants them.
template <class T>
DEVICE Bytes16 load_narrow(uint64_t address, uint32_t bytes) {
    uint64_t words[2] = {0, 0};
#pragma unroll
    for (uint32_t at = 0; at < 16; at += sizeof(T)) {
        if (at < bytes) words[at / 8] |= uint64_t(load<T>(address + at)) << (at % 8 * 8);
    }
    return {words[0], words[1]};
}

template <class T>
DEVICE void store_narrow(uint64_t address, Bytes16 v, uint32_t bytes) {
    uint64_t words[2] = {v.low, v.high};
#pragma unroll
    for (uint32_t at = 0; at < 16; at += sizeof(T)) {
        if (at < bytes) store<T>(address + at, T(words[at / 8] >> (at % 8 * 8)));
    }
}

template <bool WIDE>
DEVICE Bytes16 load_piece(uint64_t address, uint32_t bytes, uint32_t width) {
    if (WIDE) return load_once_16(address);
    switch (width) {
    case 8: return load_narrow<uint64_t>(address, bytes);
    case 4: return load_narrow<uint32_t>(address, bytes);
    case 2: return load_narrow<uint16_t>(address, bytes);
    default: return load_narrow<uint8_t>(address, bytes);
    }
}

template <bool WIDE>
DEVICE void store_piece(uint64_t address, Bytes16 v, uint32_t bytes, uint32_t width) {
    if (WIDE) {
        store_once_16(address, v);
        return;
    }
    switch (width) {
    case 8: store_narrow<uint64_t>(address, v, bytes); break;
    case 4: store_narrow<uint32_t>(address, v, bytes); break;
    case 2: store_narrow<uint16_t>(address, v, bytes); break;
    default: store_narrow<uint8_t>(address, v, bytes); break;
    }
}

// What all runs of one item have in common.
struct Strip {
    uint64_t src, dst;
    const PlaneCopy *plane;
    uint32_t layer, plane_index, token;
    uint32_t tokens;
    // Runs of the strip, and those of this item.
    uint32_t begin, end;
};

DEVICE Strip strip_of(const CopyParams &p, uint32_t item) {
    uint32_t chunk = item % p.chunks;
    uint32_t rest = item / p.chunks;
    uint32_t plane_index = rest % p.plane_count;
    rest /= p.plane_count;
    uint32_t layer = rest % p.layers;
    uint64_t at = p.spans + uint64_t(rest / p.layers) * sizeof(Span);
    Span span = {load<uint32_t>(at),      load<uint32_t>(at + 4),  load<uint32_t>(at + 8),
                 load<uint32_t>(at + 12), load<uint32_t>(at + 16), load<uint32_t>(at + 20)};
    const PlaneCopy &plane = p.planes[plane_index];
    uint64_t base = (uint64_t(layer) * p.plane_count + plane_index) * 8;
    uint32_t runs = p.heads * span.tokens;
    uint32_t begin = min(chunk * p.chunk_runs, runs);
    return {load<uint64_t>(p.src_bases + base) + span.src_block * plane.src.block + span.src_token * plane.src.token,
            load<uint64_t>(p.dst_bases + base) + span.dst_block * plane.dst.block + span.dst_token * plane.dst.token,
            &plane,
            p.first_layer + layer,
            plane_index,
            span.token,
            span.tokens,
            begin,
            min(begin + p.chunk_runs, runs)};
}

template <bool HASH>
DEVICE Run run_of(const CopyParams &p, const Strip &strip, uint32_t index) {
    const PlaneCopy &plane = *strip.plane;
    uint32_t inner = plane.heads_inside ? p.heads : strip.tokens;
    uint32_t slow = index / inner;
    uint32_t quick = index - slow * inner;
    uint32_t head = plane.heads_inside ? quick : slow;
    uint32_t token = plane.heads_inside ? slow : quick;
    return {strip.src + head * plane.src.head + token * plane.src.token,
            strip.dst + head * plane.dst.head + token * plane.dst.token,
            HASH ? digest::run_key(strip.layer, strip.plane_index, p.first_head + head, strip.token + token) : 0};
}

// The sums of RUNS runs, spread over LANES threads, become the hash of runs that each thread finishes for all: at each step a
// thread keeps half of its runs and gives the other half's sums to the thread `offset` away, which keeps those.
template <uint32_t LANES>
DEVICE uint64_t hashes(digest::Sums (&sums)[RUNS], uint64_t my_key, uint32_t run_bytes, uint32_t valid, uint32_t lane) {
    uint32_t kept = RUNS;
    uint32_t first = 0;
#pragma unroll
    for (uint32_t offset = LANES / 2; offset >= 2; offset /= 2) {
        bool upper = lane & offset;
        if (kept > 1) {
            kept /= 2;
            first += upper ? kept : 0;
#pragma unroll
            for (uint32_t i = 0; i < RUNS / 2; i++) {
                if (i >= kept) break;
                digest::Sums give = upper ? sums[i] : sums[i + kept];
                digest::Sums keep = upper ? sums[i + kept] : sums[i];
                sums[i].first = keep.first + __shfl_xor_sync(FULL_WARP, give.first, offset);
                sums[i].second = keep.second + __shfl_xor_sync(FULL_WARP, give.second, offset);
            }
        } else {
            sums[0].first += __shfl_xor_sync(FULL_WARP, sums[0].first, offset);
            sums[0].second += __shfl_xor_sync(FULL_WARP, sums[0].second, offset);
        }
    }
    // Threads that have the same run: of them one pair counts.
    constexpr uint32_t SAME = LANES > 8 ? LANES / 4 : 2;
    bool counts = lane % SAME == 0;
    uint64_t sum = 0;
#pragma unroll
    for (uint32_t i = 0; i < (LANES == 4 ? 2 : 1); i++) {
        uint64_t key = __shfl_sync(FULL_WARP, my_key, (threadIdx.x & (WARP - 1) & ~(RUNS - 1)) | (first + i));
        uint64_t half = digest::half(sums[i], key, lane & 1);
        half += __shfl_xor_sync(FULL_WARP, half, 1);
        if (counts && (valid >> (first + i) & 1)) sum += digest::finish(half, run_bytes);
    }
    return sum;
}

template <Mode MODE, uint32_t LANES, bool WIDE>
DEVICE uint64_t copy_item(const CopyParams &p, const Strip &strip) {
    constexpr bool HASH = MODE != COPY;
    constexpr uint32_t GROUPS = WARP / LANES;
    uint32_t lane = threadIdx.x % LANES;
    uint32_t group = threadIdx.x % WARP / LANES;
    uint32_t run_bytes = strip.plane->run_bytes;
    uint32_t pieces = (run_bytes + 15) / 16;
    // A half-empty stripe is hashed as if zeros followed.
    uint32_t hashed = HASH ? (pieces + 1) / 2 * 2 : pieces;
    uint64_t digest = 0;
    for (uint32_t tile = strip.begin; tile < strip.end; tile += GROUPS * RUNS) {
        // Each thread works out one run's addresses and key, and its neighbours hand theirs over.
        uint32_t mine = tile + group + threadIdx.x % RUNS * GROUPS;
        Run run = run_of<HASH>(p, strip, min(mine, strip.end - 1));
        uint64_t src[RUNS], dst[RUNS], keys[RUNS];
        digest::Sums sums[RUNS];
        uint32_t valid = 0;
#pragma unroll
        for (uint32_t u = 0; u < RUNS; u++) {
            uint32_t from = (threadIdx.x & (WARP - 1) & ~(RUNS - 1)) | u;
            src[u] = __shfl_sync(FULL_WARP, run.src, from);
            if (MODE != DIGEST) dst[u] = __shfl_sync(FULL_WARP, run.dst, from);
            if (HASH) keys[u] = __shfl_sync(FULL_WARP, run.key, from);
            sums[u] = {0, 0};
            valid |= (tile + group + u * GROUPS < strip.end ? 1u : 0u) << u;
        }
        for (uint32_t piece = lane; piece < hashed; piece += LANES) {
            bool there = piece < pieces;
            uint32_t bytes = there ? min(run_bytes - piece * 16, 16u) : 0;
            Bytes16 v[RUNS];
#pragma unroll
            for (uint32_t u = 0; u < RUNS; u++) {
                v[u] = {0, 0};
                if (there && (valid >> u & 1)) v[u] = load_piece<WIDE>(src[u] + piece * 16, bytes, p.width);
            }
#pragma unroll
            for (uint32_t u = 0; u < RUNS; u++) {
                if (!(valid >> u & 1)) continue;
                if (MODE != DIGEST && there) store_piece<WIDE>(dst[u] + piece * 16, v[u], bytes, p.width);
                if (HASH) digest::add_piece(sums[u], keys[u], piece, v[u]);
            }
        }
        if (HASH) digest += hashes<LANES>(sums, run.key, run_bytes, valid, lane);
    }
    return digest;
}

struct WarpSums {
    uint64_t of[THREADS / WARP];
};

// Adds up what all threads of the block found.
DEVICE void add_digest(uint64_t address, uint64_t digest) {
    SHARED(WarpSums, sums);
#pragma unroll
    for (uint32_t offset = WARP / 2; offset > 0; offset /= 2) digest += __shfl_xor_sync(FULL_WARP, digest, offset);
    if (threadIdx.x % WARP == 0) sums.of[threadIdx.x / WARP] = digest;
    __syncthreads();
    if (threadIdx.x != 0) return;
    uint64_t total = 0;
    for (uint32_t warp = 0; warp < THREADS / WARP; warp++) total += sums.of[warp];
    atomic_add(address, total);
}

template <Mode MODE, uint32_t LANES, bool WIDE>
DEVICE void copy(const CopyParams &p) {
    uint64_t digest = 0;
    uint64_t warp = uint64_t(blockIdx.x) * (THREADS / WARP) + threadIdx.x / WARP;
    for (uint64_t item = warp; item < p.items; item += uint64_t(gridDim.x) * (THREADS / WARP)) {
        digest += copy_item<MODE, LANES, WIDE>(p, strip_of(p, uint32_t(item)));
    }
    if constexpr (MODE != COPY) add_digest(p.digest, digest);
}

#define COPY_KERNEL(name, MODE, LANES, WIDE) \
    extern "C" __global__ void __launch_bounds__(THREADS, WIDE ? (MODE == COPY ? 3 : 2) : 1) name(const __grid_constant__ CopyParams params) { \
        copy<MODE, LANES, WIDE>(params); \
    } \
    KERNEL(name)

#define COPY_KERNELS(name, MODE) \
    COPY_KERNEL(name##_narrow, MODE, 8, false) \
    COPY_KERNEL(name##_4, MODE, 4, true) \
    COPY_KERNEL(name##_8, MODE, 8, true) \
    COPY_KERNEL(name##_16, MODE, 16, true) \
    COPY_KERNEL(name##_32, MODE, 32, true)

COPY_KERNELS(kvferry_copy, COPY)
COPY_KERNELS(kvferry_copy_digest, COPY_AND_DIGEST)
COPY_KERNELS(kvferry_digest, DIGEST)
