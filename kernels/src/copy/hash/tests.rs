//! Every backend against the specification's plain form.

use kvferry_protocol::LayerId;
use proptest::prelude::*;

use super::*;

fn check(runs: &Runs<'_>, want: Digest) {
    // SAFETY: the runs lie in a vector that this thread owns.
    let mut found = vec![("best", unsafe { digest(runs) })];
    // SAFETY: as above.
    found.push(("portable", unsafe { Portable.digest(runs) }));
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // SAFETY: as above.
        found.extend(Avx2::detect().map(|backend| ("avx2", unsafe { backend.digest(runs) })));
        // SAFETY: as above.
        found.extend(Avx512::detect().map(|backend| ("avx512", unsafe { backend.digest(runs) })));
    }
    for (name, digest) in found {
        assert_eq!(digest, want, "{name}");
    }
}

proptest! {
    #[test]
    fn all_backends_agree_with_the_specification(
        run_bytes in 1_usize..300,
        heads in 1_usize..4,
        tokens in 1_usize..4,
        first in 0_u32..1000,
        (gap, offset) in (0_usize..9, 0_usize..9),
        tokens_outside in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let inner = run_bytes + gap;
        let (head_stride, token_stride) =
            if tokens_outside { (inner, inner * heads + gap) } else { (inner * tokens + gap, inner) };
        let bytes = offset + (heads - 1) * head_stride + (tokens - 1) * token_stride + run_bytes;
        let mut memory: Vec<u8> = (0..bytes as u64).map(|at| ((seed ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        let keys: Vec<HeadKey> = (0..heads as u16).map(|head| HeadKey::new(LayerId::new(3), 1, head)).collect();
        let mut want = Digest::ZERO;
        for (h, key) in keys.iter().enumerate() {
            for (n, token) in (first..).take(tokens).enumerate() {
                let start = offset + h * head_stride + n * token_stride;
                want.add_run(key.run(token).hash(&memory[start..start + run_bytes]));
            }
        }
        // SAFETY: the offset is inside the vector.
        let start = unsafe { NonNull::new(memory.as_mut_ptr()).unwrap().add(offset) };
        let tokens = first..first + tokens as u32;
        check(&Runs { start, head_stride, token_stride, run_bytes, keys: &keys, tokens }, want);
    }
}
