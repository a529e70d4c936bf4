// Writes the keys and values of new tokens into their slots: a block takes a token at a time, a thread eight elements of a head.
#include "elements.cuh"

// The layout of these structs is also that of kernels/src/cuda/store.rs.
struct StorePlane {
    // The input: [tokens, heads, dim], and the bytes from a token and from a head to the next.
    uint64_t rows, row_token, row_head;
    // The cache: where block 0, head 0, token 0 of the layer lie, and bytes to the next of each.
    uint64_t base, block, head, token;
    uint32_t dim;
    // What is stored is the input divided by it.
    float scale;
};

struct StoreParams {
    StorePlane planes[2];
    // i64 [tokens]: block * tokens_per_block + token in the block; a negative one is not stored.
    uint64_t slots;
    uint32_t tokens, plane_count, heads, tokens_per_block;
};

// Elements that a thread converts at a time, in 16-byte loads.
constexpr uint32_t VECTOR = 8;

template <class T>
DEVICE void load_vector(uint64_t address, float (&x)[VECTOR]) {
    constexpr uint32_t EACH = 16 / sizeof(typename T::Bits);
#pragma unroll
    for (uint32_t at = 0; at < VECTOR; at += EACH) {
        Bytes16 v = load_once_16(address + at * sizeof(typename T::Bits));
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            uint64_t word = i < EACH / 2 ? v.low : v.high;
            x[at + i] = T::decode(uint32_t(typename T::Bits(word >> (i % (EACH / 2) * sizeof(typename T::Bits) * 8))));
        }
    }
}

template <class T>
DEVICE void store_vector(uint64_t address, const float (&x)[VECTOR]) {
    constexpr uint32_t BYTES = VECTOR * sizeof(typename T::Bits);
    uint64_t words[BYTES / 8] = {};
#pragma unroll
    for (uint32_t i = 0; i < VECTOR; i++) {
        uint32_t at = i * sizeof(typename T::Bits);
        words[at / 8] |= uint64_t(T::encode(x[i])) << (at % 8 * 8);
    }
    if constexpr (BYTES == 8) {
        store(address, words[0]);
    } else {
#pragma unroll
        for (uint32_t word = 0; word < BYTES / 8; word += 2) store_once_16(address + word * 8, {words[word], words[word + 1]});
    }
}

template <class From, class To, bool WIDE>
DEVICE void store_kv(const StoreParams &p) {
    constexpr uint32_t STEP = WIDE ? VECTOR : 1;
    for (uint32_t token = blockIdx.x; token < p.tokens; token += gridDim.x) {
        int64_t slot = load<int64_t>(p.slots + uint64_t(token) * 8);
        if (slot < 0) continue;
        uint64_t block = uint64_t(slot) / p.tokens_per_block;
        uint64_t place = uint64_t(slot) - block * p.tokens_per_block;
        for (uint32_t index = 0; index < p.plane_count; index++) {
            const StorePlane &plane = p.planes[index];
            uint64_t from = plane.rows + token * plane.row_token;
            uint64_t to = plane.base + block * plane.block + place * plane.token;
            uint32_t steps = plane.dim / STEP;
            for (uint32_t at = threadIdx.x; at < steps * p.heads; at += blockDim.x) {
                uint32_t head = at / steps;
                uint32_t element = (at - head * steps) * STEP;
                uint64_t source = from + head * plane.row_head + element * sizeof(typename From::Bits);
                uint64_t target = to + head * plane.head + element * sizeof(typename To::Bits);
                if constexpr (WIDE) {
                    float x[VECTOR];
                    load_vector<From>(source, x);
#pragma unroll
                    for (uint32_t i = 0; i < VECTOR; i++) x[i] = x[i] / plane.scale;
                    store_vector<To>(target, x);
                } else {
                    float x = From::decode(load<typename From::Bits>(source)) / plane.scale;
                    store(target, typename To::Bits(To::encode(x)));
                }
            }
        }
    }
}

#define STORE_KERNEL(name, From, To, WIDE) \
    extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ StoreParams params) { \
        store_kv<From, To, WIDE>(params); \
    } \
    KERNEL(name)

#define STORE_KERNELS(from, From, to, To) \
    STORE_KERNEL(kvferry_store_##from##_##to, From, To, true) \
    STORE_KERNEL(kvferry_store_##from##_##to##_narrow, From, To, false)

#define STORE_KERNELS_FROM(from, From) \
    STORE_KERNELS(from, From, f32, F32) \
    STORE_KERNELS(from, From, f16, F16) \
    STORE_KERNELS(from, From, bf16, Bf16) \
    STORE_KERNELS(from, From, e4m3, E4m3) \
    STORE_KERNELS(from, From, e5m2, E5m2)

STORE_KERNELS_FROM(f32, F32)
STORE_KERNELS_FROM(f16, F16)
STORE_KERNELS_FROM(bf16, Bf16)
