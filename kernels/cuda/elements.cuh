// The element types of queries and caches, as bits and as float; the numbers are those of kernels/src/cuda/element.rs.
#pragma once

#include "device.cuh"

enum ElementType : uint32_t { TYPE_F32, TYPE_F16, TYPE_BF16, TYPE_E4M3, TYPE_E5M2 };

struct F32 {
    typedef uint32_t Bits;
    static DEVICE float decode(uint32_t bits) {
        return from_bits(bits);
    }
    static DEVICE uint32_t encode(float x) {
        return to_bits(x);
    }
};

struct F16 {
    typedef uint16_t Bits;
    static DEVICE float decode(uint32_t bits) {
        return half_to_float(uint16_t(bits));
    }
    static DEVICE uint32_t encode(float x) {
        return float_to_half(x);
    }
};

struct Bf16 {
    typedef uint16_t Bits;
    static DEVICE float decode(uint32_t bits) {
        return from_bits(bits << 16);
    }
    static DEVICE uint32_t encode(float x) {
        uint32_t bits = to_bits(x);
        // A NaN stays one, whatever its low bits were.
        if ((bits & 0x7fffffff) > 0x7f800000) return bits >> 16 | 0x40;
        return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    }
};

// Rounds to nearest, ties to even, to a number of `MANTISSA` bits after the point and the exponent's bias `BIAS`; what is larger
// than `largest` becomes that (as cvt.satfinite does).
template <uint32_t MANTISSA, uint32_t BIAS>
DEVICE uint32_t encode_small(float x, float largest, uint32_t nan) {
    uint32_t bits = to_bits(x);
    uint32_t sign = bits >> 31 << 7;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return nan;
    bits = min(bits, to_bits(largest));
    constexpr uint32_t SHIFT = 23 - MANTISSA;
    if (bits < (127 - BIAS + 1) << 23) {
        // Subnormal: the last place of the sum is that of the smallest number, so the addition rounds.
        constexpr uint32_t POINT = (127 + SHIFT + 1 - BIAS) << 23;
        return sign | (to_bits(from_bits(bits) + from_bits(POINT)) - POINT);
    }
    bits += (1u << (SHIFT - 1)) - 1 + (bits >> SHIFT & 1);
    return sign | ((bits >> SHIFT) - ((127 - BIAS) << MANTISSA));
}

// Source: "FP8 Formats for Deep Learning", arXiv 2209.05433: no infinities, one NaN, at most 448.
struct E4m3 {
    typedef uint8_t Bits;
    static DEVICE float decode(uint32_t bits) {
        if ((bits & 0x7f) == 0x7f) return from_bits(0x7fc00000);
        // The exponent's bias differs by 120; the product is exact, for subnormal numbers too.
        float x = from_bits((bits & 0x7f) << 20) * from_bits((127 + 120) << 23);
        return from_bits(to_bits(x) | (bits & 0x80) << 24);
    }
    static DEVICE uint32_t encode(float x) {
        return encode_small<3, 7>(x, 448.0f, 0x7f);
    }
};

// The upper half of binary16; infinities are not written.
struct E5m2 {
    typedef uint8_t Bits;
    static DEVICE float decode(uint32_t bits) {
        return half_to_float(uint16_t(bits << 8));
    }
    static DEVICE uint32_t encode(float x) {
        return encode_small<2, 15>(x, 57344.0f, 0x7f);
    }
};

// One element of an array in global memory.
DEVICE float load_element(uint32_t type, uint64_t array, uint64_t index) {
    switch (type) {
    case TYPE_F32: return from_bits(load<uint32_t>(array + index * 4));
    case TYPE_F16: return F16::decode(load<uint16_t>(array + index * 2));
    default: return Bf16::decode(load<uint16_t>(array + index * 2));
    }
}

DEVICE void store_element(uint32_t type, uint64_t array, uint64_t index, float x) {
    switch (type) {
    case TYPE_F32: store<uint32_t>(array + index * 4, to_bits(x)); break;
    case TYPE_F16: store<uint16_t>(array + index * 2, uint16_t(F16::encode(x))); break;
    default: store<uint16_t>(array + index * 2, uint16_t(Bf16::encode(x)));
    }
}
