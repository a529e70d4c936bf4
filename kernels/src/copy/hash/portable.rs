//! Any CPU: in this form the compiler keeps a stripe's lanes in what vectors it may use.

use std::ptr::NonNull;

use kvferry_protocol::digest::{Digest, RunKey, RunState, STRIPE_BYTES};

use super::{Hash, Runs, digest_with};

#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Hash for Portable {
    #[inline(always)]
    unsafe fn run(self, run: NonNull<u8>, bytes: usize, key: RunKey) -> u64 {
        let (whole, rest) = (bytes / STRIPE_BYTES, bytes % STRIPE_BYTES);
        let mut state = RunState::new(key);
        let mut next = run.cast::<[u8; STRIPE_BYTES]>();
        // SAFETY: `whole` stripes lie in the run, so their end is at most the run's.
        let end = unsafe { next.add(whole) };
        while next != end {
            // SAFETY: `next` is one of the `whole` stripes: readable, and nobody writes it meanwhile. Byte arrays need no alignment.
            state.stripe(unsafe { next.read() });
            // SAFETY: `next` is below `end`, so the step ends at `end` at most.
            next = unsafe { next.add(1) };
        }
        if rest > 0 {
            let mut last = [0; STRIPE_BYTES];
            let filled = NonNull::from(&mut last).cast::<u8>();
            // SAFETY: `rest` bytes are left in the run, fewer than `last` has, in memory of its own.
            unsafe { next.cast::<u8>().copy_to_nonoverlapping(filled, rest) };
            state.stripe(last);
        }
        state.finish(bytes)
    }

    unsafe fn digest(self, runs: &Runs<'_>) -> Digest {
        // SAFETY: the caller's promise.
        unsafe { digest_with(self, runs) }
    }
}
