//! `kernels/cuda/store.cu`: every pair of types, against conversions worked out in another way.
#![expect(unsafe_code, reason = "launches")]

mod common;

use common::{Numbers, bits_at, bytes_of, decode, encode};
use kvferry_cuda_sim::{SimDevice, SimMemory};
use kvferry_kernels::cuda::{DevicePages, DevicePtr, DeviceRegions, Element, JobError, Rows, StoreJob};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::{KvLayout, KvShape};

const FROM: [Element; 3] = [Element::F32, Element::F16, Element::Bf16];
const TO: [Element; 5] = [Element::F32, Element::F16, Element::Bf16, Element::E4m3, Element::E5m2];

struct Case {
    order: &'static str,
    from: Element,
    to: Element,
    heads: u16,
    dims: Vec<u32>,
    scales: Vec<f32>,
    /// Bytes between the rows of two tokens.
    gap: u64,
}

const BLOCKS: u32 = 5;
const TOKENS_PER_BLOCK: u32 = 4;

/// Stores 9 tokens, two of which are padding, in random slots, and compares the whole cache.
fn check(case: &Case, input: &mut dyn FnMut() -> f32, seed: u64) {
    let Case { order, from, to, heads, dims, scales, gap } = case;
    let (from, to, heads) = (*from, *to, *heads);
    let run_bytes = dims.iter().map(|dim| dim * to.bytes()).collect();
    let shape = KvShape { layers: 2, blocks: BLOCKS, heads, tokens_per_block: TOKENS_PER_BLOCK, run_bytes };
    let layout = KvLayout::packed(shape.clone(), order.parse().unwrap()).unwrap();
    let mut slots: Vec<i64> =
        Numbers::new(seed).shuffled(BLOCKS * TOKENS_PER_BLOCK).into_iter().take(9).map(i64::from).collect();
    (slots[2], slots[8]) = (-1, i64::MIN);
    let stream = SimDevice::new().stream(seed);
    let cache = stream.upload(&vec![0xee; (shape.block_bytes() * u64::from(BLOCKS)) as usize]);
    let slots_there = stream.upload(&slots.iter().flat_map(|slot| slot.to_le_bytes()).collect::<Vec<u8>>());
    let mut want = vec![0xee; cache.bytes()];
    let (mut memory, mut rows) = (Vec::new(), Vec::new());
    for (plane, (&dim, scale)) in dims.iter().zip(scales).enumerate() {
        let mut bytes = Vec::new();
        for &slot in &slots {
            for head in 0..heads {
                let bits: Vec<u32> = (0..dim).map(|_| encode(from, input())).collect();
                if let Ok(slot) = u32::try_from(slot) {
                    let block = BlockId::new(slot / TOKENS_PER_BLOCK);
                    let at = layout.place(1, block, plane, head, slot % TOKENS_PER_BLOCK).offset as usize;
                    let stored = bits.iter().map(|&bits| encode(to, decode(from, bits) as f32 / scale));
                    let stored = bytes_of(to, stored);
                    want[at..at + stored.len()].copy_from_slice(&stored);
                }
                bytes.extend(bytes_of(from, bits));
            }
            bytes.extend(vec![0xff; *gap as usize]);
        }
        memory.push(stream.upload(&bytes));
        let head_bytes = u64::from(dim * from.bytes());
        rows.push(Rows { start: memory[plane].ptr(), token_bytes: head_bytes * u64::from(heads) + gap, head_bytes });
    }
    let regions = SimMemory::regions(std::slice::from_ref(&cache));
    let pages = DevicePages::new(&layout, to, 1, &regions).unwrap();
    let job = StoreJob::new(&pages, &rows, from, scales, slots_there.ptr(), slots.len() as u32).unwrap();
    // SAFETY: the simulated device checks every access, and nobody else uses the memory.
    unsafe { job.launch(&stream) }.unwrap();
    let found = stream.download(&cache).unwrap();
    for at in (0..want.len()).step_by(to.bytes() as usize) {
        let (found, want) = (bits_at(to, &found, at), bits_at(to, &want, at));
        let nan = decode(to, found).is_nan() && decode(to, want).is_nan();
        assert!(found == want || nan, "{order} {from} to {to}: byte {at} is of {found:#x}, not {want:#x}");
    }
}

#[test]
fn tokens_are_stored_in_their_slots_in_every_type() {
    for (seed, from) in (1..).zip(FROM) {
        for to in TO {
            for (order, heads, dims, gap) in [
                ("LPBNHC", 2, vec![64, 64], 0),
                ("BLHNPC", 2, vec![80, 80], 32),
                ("LBNC", 1, vec![72], 0),
                ("BPHLNC", 3, vec![5, 3], 4),
            ] {
                let scales = dims.iter().map(|&dim| if dim == 80 { 0.37 } else { 1.0 }).collect();
                let mut numbers = Numbers::new(seed);
                let mut input = || numbers.real() * [1.0, 1e-2, 600.0, 1e5][numbers.below(4)];
                check(&Case { order, from, to, heads, dims, scales, gap }, &mut input, seed);
            }
        }
    }
}

/// Every number of FP8, every midpoint between two, and what lies next to both; infinities and NaN.
#[test]
fn fp8_is_rounded_to_nearest_with_ties_to_even_and_saturates() {
    for to in [Element::E4m3, Element::E5m2] {
        let numbers: Vec<f32> = (0..0x7f).map(|bits| decode(to, bits) as f32).filter(|x| x.is_finite()).collect();
        let middles = numbers.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0);
        let mut inputs: Vec<f32> =
            numbers.iter().copied().chain(middles).flat_map(|x| [x, x.next_up(), x.next_down()]).collect();
        inputs.extend([464.0, 465.0, 61440.0, 61441.0, 1e30, f32::INFINITY, f32::NAN, f32::MIN_POSITIVE]);
        inputs.extend(inputs.clone().iter().map(|x| -x));
        let mut next = inputs.iter().cycle();
        // Each plane takes every input about three times, and two of its nine tokens are skipped.
        let case = Case {
            order: "LPBNHC",
            from: Element::F32,
            to,
            heads: 4,
            dims: vec![128, 128],
            scales: vec![1.0; 2],
            gap: 0,
        };
        assert!(2 * inputs.len() < 7 * 4 * 128);
        check(&case, &mut || *next.next().unwrap(), 3);
    }
}

#[test]
fn a_wrong_store_is_refused() {
    let shape = KvShape { layers: 2, blocks: 4, heads: 2, tokens_per_block: 4, run_bytes: vec![64, 64] };
    let layout = KvLayout::packed(shape.clone(), "LPBNHC".parse().unwrap()).unwrap();
    let whole = shape.block_bytes() * 4;
    let regions = |bytes| DeviceRegions::new(vec![(DevicePtr::new(4096), bytes)]);
    let pages = |element, layer, bytes| DevicePages::new(&layout, element, layer, &regions(bytes));
    assert_eq!(pages(Element::F16, 2, whole).unwrap_err(), JobError::Layer { layer: 2, layers: 2 });
    let error = pages(Element::F16, 1, whole - 1).unwrap_err().to_string();
    assert_eq!(error, "the layout reaches byte 8192 of region 0, which has 8191 bytes");
    let pages = pages(Element::F16, 1, whole).unwrap();
    let row = Rows { start: DevicePtr::new(0), token_bytes: 128, head_bytes: 64 };
    let job = |rows: &[Rows], element, scales: &[f32]| {
        StoreJob::new(&pages, rows, element, scales, DevicePtr::new(0), 1).unwrap_err()
    };
    assert!(matches!(job(&[row], Element::F32, &[1.0]), JobError::Planes { planes: 2, .. }));
    assert!(matches!(job(&[row; 2], Element::E4m3, &[1.0; 2]), JobError::Element { .. }));
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(matches!(job(&[row; 2], Element::F32, &[1.0, scale]), JobError::Number { what: "scale", .. }));
    }
}
