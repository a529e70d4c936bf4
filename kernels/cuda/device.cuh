// What a thread asks of the machine: one instruction each, and the only code that differs between the two builds.
//
// nvcc compiles the upper half. The lower half emulates it for the host compiler (kernels/cuda-sim), where addresses of device
// memory are no addresses of the host: a kernel that reads or writes global memory in any other way than by these helpers
// crashes there.
#pragma once

#if defined(KVFERRY_SIM)
#include "sim.h"
#else
#include <cstdint>

// Lists a kernel; here nobody asks for a list.
#define KERNEL(name)
#endif

#define DEVICE __device__ __forceinline__

constexpr uint32_t WARP = 32;
constexpr uint32_t FULL_WARP = 0xffffffffu;

// Sixteen bytes, as they lie in memory.
struct alignas(16) Bytes16 {
    uint64_t low, high;
};

#if !defined(KVFERRY_SIM)

// A block's shared memory of type `Type` by the name `name`; its contents are undefined at first.
#define SHARED(Type, name) __shared__ Type name

// The launch's dynamic shared memory, aligned to 16 bytes.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

// Global memory that nobody writes while the kernel runs, and that is read once: past the first-level cache.
DEVICE Bytes16 load_once_16(uint64_t address) {
    Bytes16 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u64 {%0, %1}, [%2];" : "=l"(v.low), "=l"(v.high) : "l"(address));
    return v;
}

// Global memory that is written and not read again by the kernel.
DEVICE void store_once_16(uint64_t address, Bytes16 v) {
    asm volatile("st.global.L1::no_allocate.v2.u64 [%0], {%1, %2};" : : "l"(address), "l"(v.low), "l"(v.high) : "memory");
}

template <class T>
DEVICE T load(uint64_t address) {
    return *reinterpret_cast<const T *>(address);
}

template <class T>
DEVICE void store(uint64_t address, T value) {
    *reinterpret_cast<T *>(address) = value;
}

DEVICE void atomic_add(uint64_t address, uint64_t value) {
    atomicAdd(reinterpret_cast<unsigned long long *>(address), value);
}

// Begins to copy sixteen bytes of global memory to shared memory.
DEVICE void async_copy_16(void *shared, uint64_t address) {
    uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(to), "l"(address) : "memory");
}

// Makes a group of this thread's copies that are in no group yet.
DEVICE void async_commit() {
    asm volatile("cp.async.commit_group;" : : : "memory");
}

// Waits until at most `LEFT` of this thread's groups are under way.
template <int LEFT>
DEVICE void async_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(LEFT) : "memory");
}

DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) {
    return __umul64hi(a, b);
}

DEVICE float fused_multiply_add(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}

DEVICE float from_bits(uint32_t bits) {
    return __uint_as_float(bits);
}

DEVICE uint32_t to_bits(float x) {
    return __float_as_uint(x);
}

DEVICE float half_to_float(uint16_t half) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
}

// Rounds to nearest, ties to even.
DEVICE uint16_t float_to_half(float x) {
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(x));
    return half;
}

#else

#define SHARED(Type, name) \
    static char name##_key; \
    Type &name = *static_cast<Type *>(kvferry_sim_shared(&name##_key, sizeof(Type)))

#define DYNAMIC_SHARED(name) unsigned char *name = static_cast<unsigned char *>(kvferry_sim_dynamic_shared())

DEVICE Bytes16 load_once_16(uint64_t address) {
    return sim::load<Bytes16>(address);
}

DEVICE void store_once_16(uint64_t address, Bytes16 v) {
    sim::store(address, v);
}

template <class T>
DEVICE T load(uint64_t address) {
    return sim::load<T>(address);
}

template <class T>
DEVICE void store(uint64_t address, T value) {
    sim::store(address, value);
}

DEVICE void atomic_add(uint64_t address, uint64_t value) {
    sim::atomic_add(address, value);
}

DEVICE void async_copy_16(void *shared, uint64_t address) {
    kvferry_sim_async_copy(shared, address, 16);
}

DEVICE void async_commit() {
    kvferry_sim_async_commit();
}

template <int LEFT>
DEVICE void async_wait() {
    kvferry_sim_async_wait(LEFT);
}

DEVICE uint64_t multiply_high(uint64_t a, uint64_t b) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(a) * b) >> 64);
}

DEVICE float fused_multiply_add(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}

DEVICE float from_bits(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

DEVICE uint32_t to_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

DEVICE float half_to_float(uint16_t half) {
    return sim::half_to_float(half);
}

DEVICE uint16_t float_to_half(float x) {
    return sim::float_to_half(x);
}

#endif
