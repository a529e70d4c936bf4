//! What the digest must tell apart, and what it must not depend on.

use kvferry_protocol::LayerId;
use kvferry_protocol::digest::{Digest, HeadKey, RunState, run_hash};
use proptest::prelude::*;

/// Bytes that a simple rule gives, so that another implementation can make them too: `byte[i] = (i * 7 + salt) mod 251`.
fn bytes(length: usize, salt: usize) -> Vec<u8> {
    (0..length).map(|i| ((i * 7 + salt) % 251) as u8).collect()
}

/// Made by an independent implementation in Python from the specification alone. A change here breaks every peer of an older
/// version: it is a new digest, with a new name at the handshake.
#[test]
fn golden_values_of_the_specification() {
    for (layer, plane, head, token, length, salt, want) in GOLDEN {
        let got = run_hash(LayerId::new(layer), plane, head, token, &bytes(length, salt));
        assert_eq!(got, want, "layer {layer}, plane {plane}, head {head}, token {token}, {length} bytes: {got:#018x}");
    }
}

#[test]
fn a_half_hashed_run_ends_like_a_whole_one() {
    let run = bytes(100, 3);
    let key = HeadKey::new(LayerId::new(1), 1, 2).run(77);
    let mut state = RunState::new(key);
    for stripe in run.chunks(32) {
        let mut filled = [0; 32];
        filled[..stripe.len()].copy_from_slice(stripe);
        state.stripe(filled);
    }
    assert_eq!(state.finish(100), key.hash(&run));
}

#[test]
fn every_bit_flip_changes_about_half_of_the_hash() {
    let (mut flips, mut changed) = (0_u64, 0_u64);
    let mut by_bit = [0_u64; 64];
    for length in [16, 24, 32, 64, 100, 128, 192, 256, 512] {
        for (salt, fill) in [(0, None), (1, Some(0_u8)), (2, Some(0xff))] {
            let mut run = fill.map_or_else(|| bytes(length, salt), |byte| vec![byte; length]);
            let hash = |run: &[u8]| run_hash(LayerId::new(5), 1, 3, 1000, run);
            let before = hash(&run);
            for bit in 0..8 * length {
                run[bit / 8] ^= 1 << (bit % 8);
                let difference = before ^ hash(&run);
                assert!(difference.count_ones() >= 6, "bit {bit} of {length} bytes: {difference:#x}");
                for (at, count) in by_bit.iter_mut().enumerate() {
                    *count += difference >> at & 1;
                }
                flips += 1;
                changed += u64::from(difference.count_ones());
                run[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }
    let mean = changed as f64 / flips as f64;
    assert!((31.8..32.2).contains(&mean), "{mean} bits change on average");
    for (bit, count) in by_bit.iter().enumerate() {
        let share = *count as f64 / flips as f64;
        assert!((0.48..0.52).contains(&share), "bit {bit} of the hash changes in {share} of all flips");
    }
}

#[test]
fn lengths_and_zeros_are_told_apart() {
    let mut seen = std::collections::BTreeSet::new();
    for length in 0..=512 {
        assert!(seen.insert(run_hash(LayerId::new(0), 0, 0, 0, &vec![0; length])), "{length} zero bytes");
    }
    for token in 0..4096 {
        assert!(seen.insert(run_hash(LayerId::new(0), 0, 0, token + 1, &[0; 256])), "zeros at token {token}");
        assert!(seen.insert(run_hash(LayerId::new(0), 0, 0, token + 1, &[])), "nothing at token {token}");
    }
}

#[test]
fn no_two_places_hash_the_same_bytes_alike() {
    let run = bytes(64, 9);
    let mut seen = std::collections::BTreeSet::new();
    for layer in [0, 1, 2, 31, 32, 255, 256, u16::MAX] {
        for plane in 0..2 {
            for head in [0, 1, 2, 7, 8, 255, 256, u16::MAX] {
                for token in (0..64).chain([1 << 16, 1 << 20, u32::MAX]) {
                    let hash = run_hash(LayerId::new(layer), plane, head, token, &run);
                    assert!(seen.insert(hash), "layer {layer}, plane {plane}, head {head}, token {token}");
                }
            }
        }
    }
}

/// One place of a small cache, and its bytes.
type Cell = (u16, u8, u16, u32);

fn digest(cells: &[(Cell, Vec<u8>)]) -> Digest {
    let hash = |&((layer, plane, head, token), ref bytes): &(Cell, Vec<u8>)| {
        Digest::new(run_hash(LayerId::new(layer), plane, head, token, bytes))
    };
    cells.iter().map(hash).sum()
}

fn any_cells() -> impl Strategy<Value = Vec<(Cell, Vec<u8>)>> {
    let cell = (0..4_u16, 0..2_u8, 0..4_u16, 0..64_u32);
    let run = prop::collection::vec(any::<u8>(), 1..80);
    prop::collection::btree_map(cell, run, 2..24).prop_map(|cells| cells.into_iter().collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn parts_add_up_to_the_whole_in_any_order(mut cells in any_cells(), cut in any::<prop::sample::Index>(), turn in any::<prop::sample::Index>()) {
        let whole = digest(&cells);
        let at = cut.index(cells.len());
        cells.rotate_left(turn.index(24) % 24 % 2);
        let (a, b) = cells.split_at(at);
        prop_assert_eq!(digest(a) + digest(b), whole);
        cells.reverse();
        prop_assert_eq!(digest(&cells), whole);
    }

    #[test]
    fn bytes_at_each_others_places_are_seen(mut cells in any_cells(), a in any::<prop::sample::Index>(), b in any::<prop::sample::Index>()) {
        let before = digest(&cells);
        let (a, b) = (a.index(cells.len()), b.index(cells.len()));
        prop_assume!(cells[a].1 != cells[b].1);
        let moved = std::mem::take(&mut cells[a].1);
        let moved = std::mem::replace(&mut cells[b].1, moved);
        cells[a].1 = moved;
        prop_assert_ne!(digest(&cells), before);
    }

    #[test]
    fn two_words_that_change_places_are_seen(mut run in prop::collection::vec(any::<u64>(), 2..64), a in any::<prop::sample::Index>(), b in any::<prop::sample::Index>()) {
        let hash = |words: &[u64]| {
            run_hash(LayerId::new(1), 0, 1, 1, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())
        };
        let before = hash(&run);
        let (a, b) = (a.index(run.len()), b.index(run.len()));
        prop_assume!(run[a] != run[b]);
        run.swap(a, b);
        prop_assert_ne!(hash(&run), before);
    }

    #[test]
    fn a_missing_or_doubled_run_is_seen(mut cells in any_cells(), at in any::<prop::sample::Index>()) {
        let before = digest(&cells);
        let at = at.index(cells.len());
        let doubled = cells[at].clone();
        cells.push(doubled);
        prop_assert_ne!(digest(&cells), before);
        cells.pop();
        cells.remove(at);
        prop_assert_ne!(digest(&cells), before);
    }
}

/// (layer, plane, head, token, length, salt, hash)
type Golden = (u16, u8, u16, u32, usize, usize, u64);

const GOLDEN: [Golden; 12] = [
    (0, 0, 0, 0, 0, 0, 0xcf89_e049_df4d_f310),
    (0, 0, 0, 0, 1, 0, 0x7e7c_5c10_a926_a8ff),
    (0, 0, 0, 0, 32, 0, 0x43b1_a6e5_f95f_cffb),
    (1, 0, 0, 0, 128, 1, 0x18d8_c93e_f264_e7ea),
    (0, 1, 0, 0, 128, 1, 0xf2be_035a_1b56_789a),
    (0, 0, 1, 0, 128, 1, 0xa039_0a39_45a7_9cbd),
    (0, 0, 0, 1, 128, 1, 0xbe3a_5e05_089f_6977),
    (31, 1, 7, 131071, 256, 2, 0x40d1_9095_6169_3f76),
    (60, 0, 0, 4096, 1152, 3, 0x6382_3dbe_0db3_251f),
    (65535, 1, 65535, 4294967295, 100, 4, 0x414b_3f62_dd3d_a9e1),
    (3, 1, 2, 17, 16, 5, 0x527a_2506_e4aa_1e53),
    (3, 1, 2, 17, 513, 6, 0xbb17_7850_d262_18f0),
];
