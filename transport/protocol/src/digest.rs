//! The digest of KV bytes: an algebra that matches the layout's.
//!
//! The digest of some KV is the wrapping 64-bit sum of one hash a *run* (one token of one head of one plane of one layer), each
//! keyed by the run's logical place. So it does not depend on layout, order, chunking, block size or tensor-parallel size, and
//! the digests of parts add up to the digest of the whole.
//!
//! It finds corruption: late, stale, torn, missing, doubled or misplaced bytes. It is **no defence against an adversary**, who
//! can compute it; what a peer is trusted with is decided at the handshake.
//!
//! # Specification
//!
//! All arithmetic is on unsigned 64-bit integers modulo 2^64. `fold(a, b)` is the exclusive or of the low and the high 64 bits
//! of the 128-bit product `a * b`. The constants are in the table at the end.
//!
//! 1. *Head key*: `x = G + layer + head * 2^16 + plane * 2^32`, then
//!    `x ^= x >> 30; x *= M1; x ^= x >> 27; x *= M2; x ^= x >> 31`. `layer` counts over all pipeline stages, `head` over all
//!    tensor-parallel ranks; `plane` is 0 for K, 1 for V.
//! 2. *Run key*: `key = fold(headkey + token * G, M1)`; `token` is the place in the sequence.
//! 3. The run, `len` bytes, is cut into stripes of 32 bytes, the last one filled up with zero bytes. A stripe is four
//!    little-endian words `w[0..4]`. From `k[i] = key + L[i]` and `p[i] = s[i] = 0`, for each stripe and each `i` in `0..4`:
//!    `x = w[i] ^ k[i]; p[i] += (x mod 2^32) * (x >> 32); s[i] += w[i]; k[i] += S`.
//! 4. `a[i] = p[i] + s[i ^ 1]`, and `h = fold(a[0] ^ key, a[1] ^ F1) + fold(a[2] ^ F2, a[3] ^ F3) + len * G`, then
//!    `h ^= h >> 37; h *= M3; h ^= h >> 32`. The run's hash is `h`.
//!
//! The multiply step, 32 by 32 bits with the word itself added to the neighbour's sum, is the one of Yann Collet's XXH3: it runs
//! in vectors on every processor, and a change of one word always changes a sum, whatever the product does. Step 1 is the
//! finaliser of Sebastiano Vigna's SplitMix64.
//!
//! | name | value | | name | value |
//! |---|---|---|---|---|
//! | G | `9e3779b97f4a7c15` | | L\[0\] | `243f6a8885a308d3` |
//! | M1 | `bf58476d1ce4e5b9` | | L\[1\] | `13198a2e03707345` |
//! | M2 | `94d049bb133111eb` | | L\[2\] | `a4093822299f31d1` |
//! | M3 | `165667919e3779f9` | | L\[3\] | `082efa98ec4e6c89` |
//! | S | `452821e638d01377` | | F1 | `be5466cf34e90c6d` |
//! | F2 | `c0ac29b7c97c50dd` | | F3 | `3f84d5b5b5470917` |

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

use crate::ids::LayerId;

/// The digest of a set of runs; sets that share no run add up.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(u64);

/// What the runs of one head of one plane of one layer have in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeadKey(u64);

/// A run's place, ready to hash its bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RunKey(u64);

/// Bytes of a stripe: what [`RunState::stripe`] takes at a time.
pub const STRIPE_BYTES: usize = 32;

/// What a lane's key is above the run's, in the first stripe: `L` of the specification.
pub const LANE_KEYS: [u64; 4] = L;

/// What is added to each lane's key from a stripe to the next: `S` of the specification.
pub const KEY_STEP: u64 = S;

/// The hash of one run: `bytes` are one token of one head.
///
/// `layer`, `head` and `token` are the model's and the sequence's own numbers; `plane` is 0 for K and 1 for V.
#[must_use]
pub fn run_hash(layer: LayerId, plane: u8, head: u16, token: u32, bytes: &[u8]) -> u64 {
    HeadKey::new(layer, plane, head).run(token).hash(bytes)
}

impl Digest {
    /// The digest of no run.
    pub const ZERO: Self = Self(0);

    /// Wraps a sum of run hashes, as a kernel returns it.
    #[must_use]
    pub const fn new(sum: u64) -> Self {
        Self(sum)
    }

    /// The sum, for wire formats.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Adds one run's hash.
    #[inline]
    pub const fn add_run(&mut self, hash: u64) {
        self.0 = self.0.wrapping_add(hash);
    }
}

impl HeadKey {
    /// Step 1 of the specification.
    #[inline]
    #[must_use]
    pub const fn new(layer: LayerId, plane: u8, head: u16) -> Self {
        let mut x = G.wrapping_add(layer.get() as u64 + ((head as u64) << 16) + ((plane as u64) << 32));
        x = (x ^ (x >> 30)).wrapping_mul(M1);
        x = (x ^ (x >> 27)).wrapping_mul(M2);
        Self(x ^ (x >> 31))
    }

    /// Step 2: the key of one token's run.
    #[inline]
    #[must_use]
    pub const fn run(self, token: u32) -> RunKey {
        RunKey(fold(self.0.wrapping_add((token as u64).wrapping_mul(G)), M1))
    }
}

impl RunKey {
    /// The key itself, for kernels.
    #[inline(always)]
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Step 4 from `a`, for kernels that take step 3 with [`LANE_KEYS`] and [`KEY_STEP`]; the run is `len` bytes long.
    #[inline(always)]
    #[must_use]
    pub const fn finish(self, a: [u64; 4], len: usize) -> u64 {
        let mut h = fold(a[0] ^ self.0, a[1] ^ F1)
            .wrapping_add(fold(a[2] ^ F2, a[3] ^ F3))
            .wrapping_add((len as u64).wrapping_mul(G));
        h = (h ^ (h >> 37)).wrapping_mul(M3);
        h ^ (h >> 32)
    }

    /// Steps 3 and 4 over bytes in memory.
    #[inline]
    #[must_use]
    pub fn hash(self, bytes: &[u8]) -> u64 {
        let (stripes, rest) = bytes.as_chunks::<STRIPE_BYTES>();
        let mut state = RunState::new(self);
        for stripe in stripes {
            state.stripe(*stripe);
        }
        if !rest.is_empty() {
            let mut stripe = [0; STRIPE_BYTES];
            stripe[..rest.len()].copy_from_slice(rest);
            state.stripe(stripe);
        }
        state.finish(bytes.len())
    }
}

/// A run half hashed: for bytes that cannot be borrowed as a slice.
#[derive(Clone, Copy, Debug)]
pub struct RunState {
    key: u64,
    lane_keys: [u64; 4],
    products: [u64; 4],
    sums: [u64; 4],
}

impl RunState {
    /// Begins a run.
    #[inline(always)]
    #[must_use]
    pub fn new(RunKey(key): RunKey) -> Self {
        Self { key, lane_keys: L.map(|lane| key.wrapping_add(lane)), products: [0; 4], sums: [0; 4] }
    }

    /// Step 3 for one stripe; the last one is filled up with zero bytes.
    #[inline(always)]
    pub fn stripe(&mut self, bytes: [u8; STRIPE_BYTES]) {
        let (words, _) = bytes.as_chunks::<8>();
        for (lane, word) in words.iter().map(|word| u64::from_le_bytes(*word)).enumerate() {
            let x = word ^ self.lane_keys[lane];
            self.products[lane] = self.products[lane].wrapping_add((x & 0xffff_ffff) * (x >> 32));
            self.sums[lane] = self.sums[lane].wrapping_add(word);
            self.lane_keys[lane] = self.lane_keys[lane].wrapping_add(S);
        }
    }

    /// Step 4: the hash of the run, `len` bytes long without what filled its last stripe.
    #[inline(always)]
    #[must_use]
    pub fn finish(self, len: usize) -> u64 {
        RunKey(self.key).finish(std::array::from_fn(|lane| self.products[lane].wrapping_add(self.sums[lane ^ 1])), len)
    }
}

impl Add for Digest {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.wrapping_add(other.0))
    }
}

impl AddAssign for Digest {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sum for Digest {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[inline]
const fn fold(a: u64, b: u64) -> u64 {
    let product = (a as u128) * (b as u128);
    (product as u64) ^ ((product >> 64) as u64)
}

// G, M1 and M2 are SplitMix64's, M3 is XXH3's; the others are the hexadecimal digits of pi, made odd.
const G: u64 = 0x9e37_79b9_7f4a_7c15;
const M1: u64 = 0xbf58_476d_1ce4_e5b9;
const M2: u64 = 0x94d0_49bb_1331_11eb;
const M3: u64 = 0x1656_6791_9e37_79f9;
const S: u64 = 0x4528_21e6_38d0_1377;
const L: [u64; 4] = [0x243f_6a88_85a3_08d3, 0x1319_8a2e_0370_7345, 0xa409_3822_299f_31d1, 0x082e_fa98_ec4e_6c89];
const F1: u64 = 0xbe54_66cf_34e9_0c6d;
const F2: u64 = 0xc0ac_29b7_c97c_50dd;
const F3: u64 = 0x3f84_d5b5_b547_0917;
