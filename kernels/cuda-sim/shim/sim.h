// What nvcc knows by itself, for the host's compiler: included before every line of a .cu file.
//
// The functions called kvferry_sim_* are Rust's (src/ffi.rs). Those that wait (barriers and what a warp does together) switch to
// another thread of the block, and return once all that have to have arrived.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

struct uint3 {
    uint32_t x, y, z;
};

// The layout is also that of `Place` in src/ffi.rs.
struct SimPlace {
    uint3 thread, block, threads, blocks;
};

extern "C" {
// Where the running thread is in its grid.
extern thread_local const SimPlace *kvferry_sim_place;

void kvferry_sim_barrier(const char *file, int line);
// `op`: 0 sync, 1 exchange (takes `value`, returns that of lane `from`), 2 ballot (of value != 0).
uint64_t kvferry_sim_warp(uint32_t op, uint32_t mask, uint64_t value, uint32_t from, const char *file, int line);
// The host's address of device memory that may be used; does not return where it may not.
void *kvferry_sim_resolve(uint64_t address, uint64_t bytes, uint64_t alignment, bool write);
void *kvferry_sim_shared(const void *key, uint64_t bytes);
void *kvferry_sim_dynamic_shared();
void kvferry_sim_async_copy(void *shared, uint64_t address, uint64_t bytes);
void kvferry_sim_async_commit();
void kvferry_sim_async_wait(uint32_t left);
}

#define threadIdx (kvferry_sim_place->thread)
#define blockIdx (kvferry_sim_place->block)
#define blockDim (kvferry_sim_place->threads)
#define gridDim (kvferry_sim_place->blocks)

namespace sim {

template <class T>
inline T load(uint64_t address) {
    T value;
    __builtin_memcpy(&value, kvferry_sim_resolve(address, sizeof(T), alignof(T), false), sizeof(T));
    return value;
}

template <class T>
inline void store(uint64_t address, const T &value) {
    __builtin_memcpy(kvferry_sim_resolve(address, sizeof(T), alignof(T), true), &value, sizeof(T));
}

// Blocks run on several threads of the host.
inline void atomic_add(uint64_t address, uint64_t value) {
    auto *at = static_cast<uint64_t *>(kvferry_sim_resolve(address, 8, 8, true));
    __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}

inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

inline float half_to_float(uint16_t half) {
    uint32_t sign = uint32_t(half & 0x8000) << 16;
    uint32_t magnitude = half & 0x7fff;
    if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    // The exponent's bias differs by 112; the product is exact, for subnormal numbers too.
    float x = float_of(magnitude << 13) * float_of((127 + 112) << 23);
    return sign ? -x : x;
}

inline uint16_t float_to_half(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return 0x7fff;
    if (bits >= 0x47800000) return sign | 0x7c00;
    if (bits < 0x38800000) {
        // Subnormal: the sum with 0.5 has its last place where the half's is, so the addition rounds.
        float sum = float_of(bits) + 0.5f;
        uint32_t rounded;
        __builtin_memcpy(&rounded, &sum, 4);
        return sign | uint16_t(rounded - 0x3f000000);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | uint16_t((bits - (112u << 23)) >> 13);
}

template <class T>
inline uint64_t to_word(T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "warps exchange numbers of 4 or 8 bytes");
    uint64_t word = 0;
    __builtin_memcpy(&word, &value, sizeof(T));
    return word;
}

template <class T>
inline T from_word(uint64_t word) {
    T value;
    __builtin_memcpy(&value, &word, sizeof(T));
    return value;
}

inline uint32_t lane() {
    const SimPlace &at = *kvferry_sim_place;
    return (at.thread.x + at.threads.x * (at.thread.y + at.threads.y * at.thread.z)) % 32;
}

struct Kernel {
    const char *name;
    void (*entry)(void **);
    const size_t *sizes;
    size_t count;
    Kernel *next;
};

// The kernels of this file.
static Kernel *kernels = nullptr;

struct Registered : Kernel {
    template <class... A>
    Registered(const char *name, void (*entry)(void **), void (*)(A...)) : Kernel{name, entry, nullptr, sizeof...(A), kernels} {
        static const size_t bytes[] = {sizeof(A)..., 0};
        sizes = bytes;
        kernels = this;
    }
};

template <class... A, size_t... I>
inline void call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<A> *>(arguments[I])...);
}

template <class... A>
inline void call(void (*kernel)(A...), void **arguments) {
    call(kernel, arguments, std::index_sequence_for<A...>{});
}

} // namespace sim

#define KERNEL(name) \
    static sim::Registered name##_registered(#name, [](void **arguments) { sim::call(name, arguments); }, name);

inline uint32_t min(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

inline uint32_t max(uint32_t a, uint32_t b) {
    return a > b ? a : b;
}

// Where a barrier stands is told by default arguments: they are evaluated at the call.
inline void __syncthreads(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    kvferry_sim_barrier(file, line);
}

inline void __syncwarp(uint32_t mask = 0xffffffff, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    kvferry_sim_warp(0, mask, 0, 0, file, line);
}

template <class T>
inline T __shfl_sync(uint32_t mask, T value, uint32_t from, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    return sim::from_word<T>(kvferry_sim_warp(1, mask, sim::to_word(value), from % 32, file, line));
}

template <class T>
inline T __shfl_xor_sync(uint32_t mask, T value, uint32_t by, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    return sim::from_word<T>(kvferry_sim_warp(1, mask, sim::to_word(value), (sim::lane() ^ by) % 32, file, line));
}

inline uint32_t __ballot_sync(uint32_t mask, int vote, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
    return uint32_t(kvferry_sim_warp(2, mask, vote != 0, 0, file, line));
}
