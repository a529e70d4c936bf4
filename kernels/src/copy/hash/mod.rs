//! The hash of runs, with the widest vectors that the CPU has; the specification is [`kvferry_protocol::digest`]'s.
//!
//! Vectors take a run of 256 bytes three to four times as fast as the plain form, and twice as fast as one thread copies it from
//! memory (benches/digest.rs): a digest costs little beside a copy.
#![expect(unsafe_code, reason = "vector instructions, and raw loads of an engine's memory")]

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx2;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod avx512;
mod portable;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::ptr::NonNull;

use kvferry_protocol::digest::{Digest, HeadKey, RunKey};

#[cfg(all(target_arch = "x86_64", not(miri)))]
use avx2::Avx2;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use avx512::Avx512;
use portable::Portable;

/// Runs of one plane of one page, at even distances: head `h` of token `n` begins `h * head_stride + n * token_stride` bytes
/// behind `start`.
pub(super) struct Runs<'a> {
    pub(super) start: NonNull<u8>,
    pub(super) head_stride: usize,
    pub(super) token_stride: usize,
    /// Bytes of each run.
    pub(super) run_bytes: usize,
    /// One for each head.
    pub(super) keys: &'a [HeadKey],
    /// Their places in the sequence.
    pub(super) tokens: Range<u32>,
}

/// A backend. A value of the type is the proof that this CPU has its instructions.
trait Hash: Copy {
    /// The hash of one run.
    ///
    /// # Safety
    /// `bytes` are readable at `run`, and nobody writes them meanwhile.
    unsafe fn run(self, run: NonNull<u8>, bytes: usize, key: RunKey) -> u64;

    /// [`digest_with`], as a function of its own, with the backend's instructions switched on.
    ///
    /// # Safety
    /// As [`digest`].
    unsafe fn digest(self, runs: &Runs<'_>) -> Digest;
}

/// The sum of the hashes of all runs.
///
/// # Safety
/// All runs are readable, and nobody writes them meanwhile.
pub(super) unsafe fn digest(runs: &Runs<'_>) -> Digest {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        if let Some(backend) = Avx512::detect() {
            // SAFETY: the caller's promise.
            return unsafe { backend.digest(runs) };
        }
        if let Some(backend) = Avx2::detect() {
            // SAFETY: the caller's promise.
            return unsafe { backend.digest(runs) };
        }
    }
    // SAFETY: the caller's promise.
    unsafe { Portable.digest(runs) }
}

/// In the order in which the runs lie in memory.
///
/// # Safety
/// As [`digest`].
#[inline(always)]
unsafe fn digest_with<H: Hash>(backend: H, runs: &Runs<'_>) -> Digest {
    let mut digest = Digest::ZERO;
    let start_of = |h: usize, n: usize| {
        // SAFETY: the start of a run, which the caller found to lie in mapped memory.
        unsafe { runs.start.add(h * runs.head_stride + n * runs.token_stride) }
    };
    if runs.head_stride < runs.token_stride {
        for (n, token) in runs.tokens.clone().enumerate() {
            for (h, key) in runs.keys.iter().enumerate() {
                // SAFETY: the caller's promise.
                digest.add_run(unsafe { backend.run(start_of(h, n), runs.run_bytes, key.run(token)) });
            }
        }
    } else {
        for (h, key) in runs.keys.iter().enumerate() {
            for (n, token) in runs.tokens.clone().enumerate() {
                // SAFETY: the caller's promise.
                digest.add_run(unsafe { backend.run(start_of(h, n), runs.run_bytes, key.run(token)) });
            }
        }
    }
    digest
}
