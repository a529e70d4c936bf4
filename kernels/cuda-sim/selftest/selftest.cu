// Kernels that test what executes them; the wrong ones must be found.
#include "device.cuh"

// Reverses 128 numbers by shared memory, with or without the barrier that this needs.
template <bool BARRIER>
DEVICE void reverse(uint64_t numbers) {
    DYNAMIC_SHARED(raw);
    uint32_t *shared = reinterpret_cast<uint32_t *>(raw);
    uint32_t at = threadIdx.x;
    shared[at] = load<uint32_t>(numbers + at * 4);
    if (BARRIER) __syncthreads();
    store<uint32_t>(numbers + at * 4, shared[blockDim.x - 1 - at]);
}

extern "C" __global__ void reverse_right(uint64_t numbers) {
    reverse<true>(numbers);
}
KERNEL(reverse_right)

extern "C" __global__ void reverse_without_barrier(uint64_t numbers) {
    reverse<false>(numbers);
}
KERNEL(reverse_without_barrier)

struct Staged {
    Bytes16 of[2][64];
};

// Adds one to 128 pieces of 16 bytes, staged by asynchronous copies in two groups; `LEFT` is how many may be under way when the
// first group is read.
template <int LEFT>
DEVICE void add_one(uint64_t pieces) {
    SHARED(Staged, staged);
    uint32_t at = threadIdx.x;
    for (uint32_t group = 0; group < 2; group++) {
        async_copy_16(&staged.of[group][at], pieces + (group * 64 + at) * 16);
        async_commit();
    }
    for (uint32_t group = 0; group < 2; group++) {
        if (group == 0) async_wait<LEFT>();
        else async_wait<0>();
        __syncthreads();
        // Another thread's.
        Bytes16 v = staged.of[group][63 - at];
        v.low += 1;
        store(pieces + (group * 64 + 63 - at) * 16, v);
    }
}

extern "C" __global__ void add_one_right(uint64_t pieces) {
    add_one<1>(pieces);
}
KERNEL(add_one_right)

extern "C" __global__ void add_one_without_wait(uint64_t pieces) {
    add_one<2>(pieces);
}
KERNEL(add_one_without_wait)

// Copies the blocks of 64 numbers that `ids` name; nothing keeps an id from being out of range.
extern "C" __global__ void take_blocks(uint64_t pool, uint64_t ids, uint64_t out) {
    uint32_t id = load<uint32_t>(ids + blockIdx.x * 4);
    uint32_t v = load<uint32_t>(pool + (uint64_t(id) * 64 + threadIdx.x) * 4);
    store(out + (uint64_t(blockIdx.x) * 64 + threadIdx.x) * 4, v);
}
KERNEL(take_blocks)

extern "C" __global__ void load_misaligned(uint64_t numbers) {
    store(numbers, load<uint32_t>(numbers + 2));
}
KERNEL(load_misaligned)

extern "C" __global__ void half_at_a_barrier(uint64_t numbers) {
    if (threadIdx.x % 32 < 16) __syncthreads();
    store(numbers + threadIdx.x * 4, 1u);
}
KERNEL(half_at_a_barrier)

extern "C" __global__ void two_barriers(uint64_t numbers) {
    if (threadIdx.x < 32) __syncthreads();
    else
        __syncthreads();
    store(numbers + threadIdx.x * 4, 1u);
}
KERNEL(two_barriers)

extern "C" __global__ void half_in_a_shuffle(uint64_t numbers) {
    uint32_t lane = threadIdx.x;
    uint32_t v = lane;
    if (lane < 16) v = __shfl_sync(FULL_WARP, lane, 3);
    store(numbers + lane * 4, v);
}
KERNEL(half_in_a_shuffle)

// Shuffles of parts of a warp that do not wait for each other, ballots, and 64-bit values.
extern "C" __global__ void warp_sums(uint64_t numbers) {
    uint32_t lane = threadIdx.x % WARP;
    uint64_t at = numbers + threadIdx.x * 8;
    uint64_t v = load<uint64_t>(at);
    uint32_t part = lane < 16 ? 0x0000ffffu : 0xffff0000u;
    for (uint32_t turn = 0; turn < (lane < 16 ? 1 : 3); turn++) {
        for (uint32_t by = 8; by > 0; by /= 2) v += __shfl_xor_sync(part, v, by);
    }
    __syncwarp();
    store(at, v + (uint64_t(__ballot_sync(FULL_WARP, lane % 3 == 0)) << 32));
}
KERNEL(warp_sums)

// What nobody wrote.
extern "C" __global__ void read_shared(uint64_t numbers) {
    SHARED(Staged, staged);
    store(numbers + threadIdx.x * 8, staged.of[0][threadIdx.x].low);
}
KERNEL(read_shared)

// Each half, as float and back.
extern "C" __global__ void halves(uint64_t floats, uint64_t back) {
    uint32_t bits = blockIdx.x * blockDim.x + threadIdx.x;
    float x = half_to_float(uint16_t(bits));
    store(floats + bits * 4, x);
    store(back + bits * 2, float_to_half(x));
}
KERNEL(halves)

extern "C" __global__ void round_to_halves(uint64_t floats, uint64_t out) {
    uint32_t at = blockIdx.x * blockDim.x + threadIdx.x;
    store(out + at * 2, float_to_half(load<float>(floats + at * 4)));
}
KERNEL(round_to_halves)

extern "C" __global__ void arithmetic(uint64_t numbers, float a, float b, float c) {
    uint64_t x = load<uint64_t>(numbers);
    uint64_t y = load<uint64_t>(numbers + 8);
    store(numbers, multiply_high(x, y));
    store<uint64_t>(numbers + 8, to_bits(fused_multiply_add(a, b, c)));
    atomic_add(numbers + 16, x);
}
KERNEL(arithmetic)
