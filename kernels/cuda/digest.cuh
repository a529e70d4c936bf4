// The digest of KV bytes: the specification is transport/protocol/src/digest.rs, whose names and steps are used here.
//
// A run's sums are cut by pieces of 16 bytes: an even piece is words 0 and 1 of a stripe, an odd one words 2 and 3. As
// a[i] = p[i] + s[i ^ 1], a piece adds to two sums of the run, and the sums of pieces add up whichever threads have them.
#pragma once

#include "device.cuh"

namespace digest {

constexpr uint64_t G = 0x9e3779b97f4a7c15u;
constexpr uint64_t M1 = 0xbf58476d1ce4e5b9u;
constexpr uint64_t M2 = 0x94d049bb133111ebu;
constexpr uint64_t M3 = 0x165667919e3779f9u;
constexpr uint64_t S = 0x452821e638d01377u;
constexpr uint64_t L0 = 0x243f6a8885a308d3u;
constexpr uint64_t L1 = 0x13198a2e03707345u;
constexpr uint64_t L2 = 0xa4093822299f31d1u;
constexpr uint64_t L3 = 0x082efa98ec4e6c89u;
constexpr uint64_t F1 = 0xbe5466cf34e90c6du;
constexpr uint64_t F2 = 0xc0ac29b7c97c50ddu;
constexpr uint64_t F3 = 0x3f84d5b5b5470917u;

DEVICE uint64_t fold(uint64_t a, uint64_t b) {
    return (a * b) ^ multiply_high(a, b);
}

// Steps 1 and 2.
DEVICE uint64_t run_key(uint32_t layer, uint32_t plane, uint32_t head, uint32_t token) {
    uint64_t x = G + layer + (uint64_t(head) << 16) + (uint64_t(plane) << 32);
    x = (x ^ (x >> 30)) * M1;
    x = (x ^ (x >> 27)) * M2;
    x ^= x >> 31;
    return fold(x + token * G, M1);
}

// a[0] and a[1] of even pieces, or a[2] and a[3] of odd ones.
struct Sums {
    uint64_t first, second;
};

DEVICE uint64_t product(uint64_t x) {
    return uint64_t(uint32_t(x)) * uint32_t(x >> 32);
}

// Step 3 for one piece of a run.
DEVICE void add_piece(Sums &sums, uint64_t key, uint32_t piece, Bytes16 v) {
    bool odd = piece & 1;
    uint64_t base = key + (piece >> 1) * S;
    sums.first += product(v.low ^ (base + (odd ? L2 : L0))) + v.high;
    sums.second += product(v.high ^ (base + (odd ? L3 : L1))) + v.low;
}

// The half of step 4 that one pair of sums gives; `finish` takes the sum of both halves.
DEVICE uint64_t half(Sums sums, uint64_t key, bool odd) {
    return fold(sums.first ^ (odd ? F2 : key), sums.second ^ (odd ? F3 : F1));
}

DEVICE uint64_t finish(uint64_t halves, uint32_t run_bytes) {
    uint64_t h = halves + run_bytes * G;
    h = (h ^ (h >> 37)) * M3;
    return h ^ (h >> 32);
}

} // namespace digest
