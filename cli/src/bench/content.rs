//! What blocks contain, so that each byte says where it came from.

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const BLOCK: u64 = 0xbf58_476d_1ce4_e5b9;
/// What a target holds before a transfer: no word of any block, or once in 2^64.
const POISON: u8 = 0xa5;

/// Word `at` of block `block`.
fn word(block: u32, at: u64) -> u64 {
    at.wrapping_mul(STEP) ^ (u64::from(block) + 1).wrapping_mul(BLOCK)
}

/// Writes the content of block 0, 1, 2, ... of `block_bytes` each.
pub(crate) fn fill(bytes: &mut [u8], block_bytes: u64) {
    fill_from(bytes, block_bytes, 0);
}

/// The same from another block on.
pub(crate) fn fill_from(bytes: &mut [u8], block_bytes: u64, first: u32) {
    for (block, bytes) in (first..).zip(bytes.chunks_exact_mut(block_bytes as usize)) {
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (at, place) in (0..).zip(words) {
            *place = word(block, at).to_le_bytes();
        }
    }
}

/// Overwrites what an earlier transfer left.
pub(crate) fn poison(bytes: &mut [u8]) {
    bytes.fill(POISON);
}

/// How many of `targets` do not hold exactly the content of the block of `sources` at the same place.
pub(crate) fn wrong_blocks(bytes: &[u8], block_bytes: u64, sources: &[u32], targets: &[u32]) -> u64 {
    let is_wrong = |(source, target): &(&u32, &u32)| {
        let start = **target as usize * block_bytes as usize;
        let (words, _) = bytes[start..][..block_bytes as usize].as_chunks::<8>();
        (0..).zip(words).any(|(at, found)| *found != word(**source, at).to_le_bytes())
    };
    sources.iter().zip(targets).filter(is_wrong).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_byte_a_swap_and_poison_are_seen() {
        let mut bytes = vec![0; 4 * 512];
        fill(&mut bytes, 512);
        assert_eq!(wrong_blocks(&bytes, 512, &[0, 3], &[0, 3]), 0);
        assert_eq!(wrong_blocks(&bytes, 512, &[3, 0], &[0, 3]), 2);
        bytes[512 + 511] ^= 1;
        assert_eq!(wrong_blocks(&bytes, 512, &[0, 1, 2, 3], &[0, 1, 2, 3]), 1);
        poison(&mut bytes);
        assert_eq!(wrong_blocks(&bytes, 512, &[0, 1, 2, 3], &[0, 1, 2, 3]), 4);
    }
}
