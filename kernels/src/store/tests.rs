use half::{bf16, f16};
use kvferry_protocol::layout::{KvShape, LayoutOrder};

use super::*;
use crate::dtype::KvDtype;
use crate::error::Held;
use crate::memory::Placement;

fn shape(dtype: KvDtype, dims: &[usize]) -> KvShape {
    let run_bytes = dims.iter().map(|dim| (dim * dtype.bytes()) as u32).collect();
    KvShape { layers: 2, blocks: 3, heads: 2, tokens_per_block: 4, run_bytes }
}

#[expect(unsafe_code, reason = "looks at the stored bytes")]
fn element(cache: &HostKvCache, layer: u16, slot: u64, plane: usize, head: u16, index: usize) -> f32 {
    let place = cache.layout().place(layer, BlockId::new((slot / 4) as u32), plane, head, (slot % 4) as u32);
    let start = cache.region(place.region).unwrap().as_ptr().as_ptr();
    let at = start.wrapping_add(place.offset as usize + index * cache.dtype().bytes());
    match cache.dtype() {
        // SAFETY: the layout placed this element inside its region, and no other thread runs.
        KvDtype::F32 => unsafe { at.cast::<f32>().read_unaligned() },
        // SAFETY: as above.
        KvDtype::F16 => f16::from_bits(unsafe { at.cast::<u16>().read_unaligned() }).to_f32(),
        // SAFETY: as above.
        KvDtype::Bf16 => bf16::from_bits(unsafe { at.cast::<u16>().read_unaligned() }).to_f32(),
    }
}

fn rows(tokens: usize, dim: usize, salt: f32) -> Vec<f32> {
    (0..tokens * 2 * dim).map(|i| salt + i as f32).collect()
}

#[test]
fn each_run_lands_in_its_place_in_every_layout() {
    let (keys, values) = (rows(3, 3, 0.0), rows(3, 5, 1000.0));
    let slots = [Slot::new(9), Slot::from_mapping(-1), Slot::new(2)];
    for name in LayoutOrder::LISTED {
        for placement in [Placement::OneRegion, Placement::RegionPerLayer] {
            for dtype in KvDtype::ALL {
                let cache = HostKvCache::new(shape(dtype, &[3, 5]), dtype, name.parse().unwrap(), placement).unwrap();
                store_kv(&cache, 1, &slots, &keys, Some(&values)).unwrap();
                let round = |x: f32| if dtype == KvDtype::Bf16 { bf16::from_f32(x).to_f32() } else { x };
                for (token, slot) in [(0, 9), (2, 2)] {
                    for (head, index) in [(0, 0), (1, 2)] {
                        let key = keys[(token * 2 + head) * 3 + index];
                        assert_eq!(element(&cache, 1, slot, 0, head as u16, index), round(key), "{name}");
                        let value = values[(token * 2 + head) * 5 + index];
                        assert_eq!(element(&cache, 1, slot, 1, head as u16, index), round(value), "{name}");
                    }
                }
                let stored: f32 = (0..12).map(|slot| element(&cache, 1, slot, 0, 1, 1).abs()).sum();
                assert_eq!(stored, round(keys[4]) + round(keys[16]), "{name}: a slot was written that none names");
                assert_eq!(element(&cache, 0, 9, 1, 1, 2), 0.0, "{name}: the other layer was written");
            }
        }
    }
}

#[test]
fn elements_are_rounded_to_nearest_even() {
    for (dtype, x, want) in [
        (KvDtype::Bf16, 1.0 + 1.0 / 256.0, 1.0),
        (KvDtype::Bf16, 1.0 + 3.0 / 256.0, 1.0 + 4.0 / 256.0),
        (KvDtype::Bf16, f32::MAX, f32::INFINITY),
        (KvDtype::F16, 1.0 + 1.0 / 2048.0, 1.0),
        (KvDtype::F16, 1.0 + 3.0 / 2048.0, 1.0 + 4.0 / 2048.0),
        (KvDtype::F16, 65_520.0, f32::INFINITY),
        (KvDtype::F16, -65_519.0, -65_504.0),
        (KvDtype::F32, 1.0 + f32::EPSILON, 1.0 + f32::EPSILON),
    ] {
        // Long enough for the vector and the scalar part of the conversion.
        let dim = 67;
        let order = "BLNC".parse().unwrap();
        let cache = HostKvCache::new(shape(dtype, &[dim]), dtype, order, Placement::OneRegion).unwrap();
        store_kv(&cache, 0, &[Slot::new(5)], &vec![x; 2 * dim], None).unwrap();
        for index in 0..dim {
            assert_eq!(element(&cache, 0, 5, 0, 1, index), want, "{dtype} {x} at {index}");
        }
    }
}

#[test]
fn a_wrong_call_is_refused_and_stores_nothing() {
    let order = "BLPNHC".parse().unwrap();
    let cache = HostKvCache::new(shape(KvDtype::F32, &[1, 1]), KvDtype::F32, order, Placement::OneRegion).unwrap();
    let (slots, two) = ([Slot::new(0)], [7.0; 2]);
    for (message, result) in [
        ("layer 2 is out of range", store_kv(&cache, 2, &slots, &two, Some(&two))),
        ("slot 12 of token 1", store_kv(&cache, 0, &[slots[0], Slot::new(12)], &[7.0; 4], Some(&[7.0; 4]))),
        ("keys f32 [tokens, heads, key_dim]: 1 elements, expected 2", store_kv(&cache, 0, &slots, &[7.0], Some(&two))),
        ("value_dim]: 3 elements, expected 2", store_kv(&cache, 0, &slots, &two, Some(&[7.0; 3]))),
        ("pass values beside the keys", store_kv(&cache, 0, &slots, &two, None)),
    ] {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
    assert_eq!(element(&cache, 0, 0, 0, 0, 0), 0.0);
    assert!(cache.guard_write(&[BlockId::new(0)], 0..2).is_ok(), "a page was left held");
}

#[test]
fn a_page_that_is_held_for_reading_is_not_stored_into() {
    let order = "BLPNHC".parse().unwrap();
    let cache = HostKvCache::new(shape(KvDtype::F32, &[1, 1]), KvDtype::F32, order, Placement::OneRegion).unwrap();
    let (slots, rows) = ([Slot::new(0), Slot::new(4)], [7.0; 4]);
    let mut reader = cache.guard_read(&[BlockId::new(1)], 0..1).unwrap();
    let refused = store_kv(&cache, 0, &slots, &rows, Some(&rows));
    assert!(matches!(refused, Err(KernelError::PageBusy { layer: 0, held: Held::Reader, .. })));
    assert_eq!(element(&cache, 0, 0, 0, 0, 0), 0.0, "the free page was stored into all the same");
    store_kv(&cache, 1, &slots, &rows, Some(&rows)).unwrap();
    reader.release_layers(0..1);
    store_kv(&cache, 0, &slots, &rows, Some(&rows)).unwrap();
    assert_eq!(element(&cache, 0, 4, 1, 1, 0), 7.0);
}

#[test]
fn a_slot_follows_the_block_table() {
    let blocks = [BlockId::new(7), BlockId::new(2)];
    assert_eq!(Slot::of_position(0, &blocks, 16), Some(Slot::new(112)));
    assert_eq!(Slot::of_position(31, &blocks, 16), Some(Slot::new(47)));
    assert_eq!(Slot::of_position(32, &blocks, 16), None);
    assert_eq!(Slot::from_mapping(i64::MAX).get(), i64::MAX as u64);
}
