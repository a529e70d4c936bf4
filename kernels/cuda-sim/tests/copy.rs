//! Gather, scatter and digest of `kernels/cuda/copy.cu` against the naive model and the CPU's own.
#![expect(unsafe_code, reason = "launches")]

#[path = "../../../transport/protocol/tests/layout_model/mod.rs"]
mod layout_model;

use kvferry_cuda_sim::{Fault, SimDevice, SimError, SimMemory, SimStream};
use kvferry_kernels::copy::CopyError;
use kvferry_kernels::cuda::{CopyJob, DevicePtr, DeviceRegions};
use kvferry_protocol::digest::{Digest, run_hash};
use kvferry_protocol::layout::{CopyPlan, KvShape, Selection, Shard, Side, plan, plan_in_place};
use kvferry_protocol::{BlockId, LayerId, RegionId};
use layout_model::{
    Allocation, Memory, ORDERS, OneSide, any_allocation, any_selection, any_side, each_run, layout, naive_copy,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// The sum of the hashes of single runs, read from the source one by one.
fn naive_digest(src: &OneSide, selection: &Selection, memory: &Memory) -> Digest {
    let mut sum = Digest::ZERO;
    each_run(src, src, selection, |layer, plane, head, token, at, _, bytes| {
        sum.add_run(run_hash(LayerId::new(layer), plane as u8, head, token, memory.read(at, bytes)));
    });
    sum
}

/// A model's memory on the device. Regions are vectors numbered from 0 without gaps.
fn upload(stream: &SimStream, memory: &Memory) -> Vec<SimMemory> {
    memory.0.values().map(|bytes| stream.upload(bytes)).collect()
}

fn download(stream: &SimStream, memory: &[SimMemory]) -> Memory {
    let region = |(at, one): (usize, &SimMemory)| (RegionId::new(at as u32), stream.download(one).unwrap());
    Memory(memory.iter().enumerate().map(region).collect())
}

/// Launches a job and gives the digest, if one is asked for.
fn run(stream: &SimStream, job: &CopyJob, digest: bool) -> Result<Option<Digest>, SimError> {
    let tables = stream.upload(job.tables());
    let sum = stream.upload(&0_u64.to_le_bytes());
    // SAFETY: the simulated device checks every access, and nobody else uses the memory.
    unsafe { job.launch(stream, tables.ptr(), digest.then(|| sum.ptr())) }?;
    let bytes = stream.download(&sum)?;
    Ok(digest.then(|| Digest::new(u64::from_le_bytes(bytes.try_into().unwrap()))))
}

fn check_case(name: &str, src: &OneSide, dst: &OneSide, selection: &Selection, seed: u64) {
    let from = Memory::telling(&src.layout);
    let want = naive_copy(src, dst, selection, &from);
    let digest_want = naive_digest(src, selection, &from);
    let plan = plan(&src.view(), &dst.view(), selection).unwrap();
    let stream = SimDevice::new().stream(seed);
    let from = upload(&stream, &from);
    let to = upload(&stream, &Memory::untouched(&dst.layout));
    let (src_regions, dst_regions) = (SimMemory::regions(&from), SimMemory::regions(&to));

    let job = CopyJob::copy(&plan, &src_regions, &dst_regions).unwrap();
    assert_eq!(run(&stream, &job, true).unwrap(), Some(digest_want), "{name}: digest of the copy");
    assert!(download(&stream, &to) == want, "{name}: copied bytes");

    let again = upload(&stream, &Memory::untouched(&dst.layout));
    let job = CopyJob::copy(&plan, &src_regions, &SimMemory::regions(&again)).unwrap();
    run(&stream, &job, false).unwrap();
    assert!(download(&stream, &again) == want, "{name}: bytes copied without a digest");

    for (side, regions) in [(Side::Source, &src_regions), (Side::Destination, &dst_regions)] {
        let job = CopyJob::digest(&plan, side, regions).unwrap();
        assert_eq!(run(&stream, &job, true).unwrap(), Some(digest_want), "{name}: digest of the {side}");
    }
}

struct Holder {
    order: &'static str,
    allocation: Allocation,
    tokens_per_block: u32,
    /// Which of the model's KV heads it holds.
    heads: std::ops::Range<u16>,
}

/// A side that holds 3 layers and the first 75 tokens, in blocks of random order.
fn side(of: &Holder, run_bytes: &[u32], seed: u64) -> OneSide {
    let count = 75_u32.div_ceil(of.tokens_per_block);
    let blocks = count + 3;
    let shape = KvShape {
        layers: 3,
        blocks,
        heads: of.heads.len() as u16,
        tokens_per_block: of.tokens_per_block,
        run_bytes: run_bytes.to_vec(),
    };
    let mut ids: Vec<u32> = (0..blocks).collect();
    let mut state = seed;
    for at in (1..ids.len()).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ids.swap(at, (state >> 33) as usize % (at + 1));
    }
    OneSide {
        layout: layout(shape, of.order, of.allocation),
        shard: Shard { first_layer: LayerId::new(2), first_head: of.heads.start },
        blocks: ids.into_iter().take(count as usize).map(BlockId::new).collect(),
        first_token: 0,
    }
}

#[test]
fn layouts_in_the_field_are_copied_into_each_other() {
    use Allocation::{LayerRegions, Packed, Padded};
    let packed = |order, tokens_per_block, heads| Holder { order, allocation: Packed, tokens_per_block, heads };
    let bf16 = [256, 256];
    let cases = [
        ("per layer to blocks across layers", packed("LPBNHC", 16, 0..4), packed("BLPNHC", 16, 0..4), &bf16[..]),
        ("NHD to HND", packed("BLPNHC", 16, 0..4), packed("BLHNPC", 16, 0..4), &bf16),
        ("HND to NHD", packed("LBPHNC", 16, 0..4), packed("LPBNHC", 16, 0..4), &bf16),
        ("K and V side by side", packed("LBNHPC", 16, 0..4), packed("BLPNHC", 16, 0..4), &bf16),
        ("TP 1 to 2", packed("LPBNHC", 16, 0..4), packed("BLPNHC", 16, 2..4), &bf16),
        ("TP 2 to 1", packed("BHLPNC", 16, 0..2), packed("LPBNHC", 16, 0..4), &bf16),
        ("TP 2 to 4, head slices", packed("LPBNHC", 16, 2..4), packed("BHLNPC", 16, 3..4), &bf16),
        ("blocks of 16 to 64", packed("LPBNHC", 16, 0..2), packed("BLPNHC", 64, 0..2), &bf16),
        ("blocks of 32 to 8", packed("BLPNHC", 32, 0..2), packed("LBPNHC", 8, 0..2), &bf16),
        ("MLA bf16, 576", packed("LBNC", 64, 0..1), packed("BLNC", 16, 0..1), &[1152]),
        ("MLA fp8, 656 a token", packed("LBNC", 64, 0..1), packed("BLNC", 64, 0..1), &[656]),
        ("f32, head size 80", packed("LPBNHC", 16, 0..2), packed("BLHNPC", 16, 0..2), &[320, 320]),
        ("fp8, head size 64", packed("LPBNHC", 16, 0..4), packed("BLPNHC", 32, 0..4), &[64, 64]),
        ("fp8, head size 80, K and V unlike", packed("LPBNHC", 16, 0..2), packed("BLPNHC", 32, 0..2), &[80, 128]),
        ("f16, head size 96", packed("LPBNHC", 16, 0..2), packed("LBHNPC", 16, 0..2), &[192, 192]),
        ("f16, head size 256", packed("LPBNHC", 16, 0..2), packed("BLPNHC", 16, 0..2), &[512, 512]),
        ("a head of 12 bytes", packed("LPBNHC", 16, 0..3), packed("BLPNHC", 8, 0..3), &[12, 12]),
        ("a head of 37 bytes", packed("LPBNHC", 16, 0..3), packed("BLPNHC", 8, 0..3), &[37, 37]),
    ];
    for (seed, (name, from, to, runs)) in (1..).zip(cases) {
        let (src, dst) = (side(&from, runs, seed), side(&to, runs, seed + 100));
        let mut selection = Selection::common(&src.view(), &dst.view());
        selection.tokens = 3..75;
        check_case(name, &src, &dst, &selection, seed);
    }
    for allocation in [LayerRegions, Padded(16), Padded(6), Allocation::UnevenLayers] {
        let from = Holder { order: "LPBNHC", allocation, tokens_per_block: 16, heads: 0..2 };
        let (src, dst) = (side(&from, &bf16, 5), side(&packed("BLPNHC", 16, 0..2), &bf16, 6));
        let selection = Selection { layers: 3..5, heads: 0..2, tokens: 0..75 };
        check_case(&format!("{allocation:?}"), &src, &dst, &selection, 7);
    }
}

#[test]
fn any_layout_is_copied_into_any_other_as_the_model_does() {
    let orders = (0..2_usize).prop_flat_map(|_| [(); 2].map(|()| prop::sample::select(ORDERS.to_vec())));
    let run = prop_oneof![Just(16_u32), Just(32), Just(64), 1..70_u32, Just(128)];
    let runs = prop_oneof![
        2 => run.clone().prop_map(|bytes| vec![bytes, bytes]),
        1 => (run.clone(), run.clone()).prop_map(|(k, v)| vec![k, v]),
        1 => run.prop_map(|bytes| vec![bytes]),
    ];
    let cases = (orders, any_selection(), runs, any_allocation(), any_allocation(), any::<u64>()).prop_flat_map(
        |([src, dst], selection, runs, from, to, seed)| {
            let src = any_side(src.into(), from, runs.clone(), selection.clone());
            let dst = any_side(dst.into(), to, runs, selection.clone());
            (src, dst, Just(selection), Just(seed))
        },
    );
    let mut runner =
        TestRunner::new(Config { cases: 40, max_shrink_iters: 40, failure_persistence: None, ..Config::default() });
    runner
        .run(&cases, |(src, dst, selection, seed)| {
            check_case("random", &src, &dst, &selection, seed);
            Ok(())
        })
        .unwrap();
}

fn small() -> (OneSide, Selection, CopyPlan) {
    let of = Holder { order: "LPBNHC", allocation: Allocation::Packed, tokens_per_block: 16, heads: 0..2 };
    let src = side(&of, &[64, 64], 1);
    let selection = Selection { layers: 2..5, heads: 0..2, tokens: 0..75 };
    let plan = plan_in_place(&src.view(), &selection).unwrap();
    (src, selection, plan)
}

#[test]
fn digests_of_several_jobs_add_up_in_one_place() {
    let (src, selection, _) = small();
    let memory = Memory::telling(&src.layout);
    let stream = SimDevice::new().stream(3);
    let there = upload(&stream, &memory);
    let sum = stream.upload(&0_u64.to_le_bytes());
    let mut tables = Vec::new();
    for layer in selection.layers.clone() {
        let part = Selection { layers: layer..layer + 1, ..selection.clone() };
        let plan = plan_in_place(&src.view(), &part).unwrap();
        let job = CopyJob::digest(&plan, Side::Source, &SimMemory::regions(&there)).unwrap();
        tables.push(stream.upload(job.tables()));
        let at = tables.last().unwrap().ptr();
        // SAFETY: the simulated device checks every access, and nobody else uses the memory.
        unsafe { job.launch(&stream, at, Some(sum.ptr())) }.unwrap();
    }
    let found = u64::from_le_bytes(stream.download(&sum).unwrap().try_into().unwrap());
    assert_eq!(Digest::new(found), naive_digest(&src, &selection, &memory));
}

#[test]
fn a_digest_sees_one_wrong_byte() {
    let (src, selection, plan) = small();
    let mut memory = Memory::telling(&src.layout);
    let good = naive_digest(&src, &selection, &memory);
    let at = src.layout.place(1, src.blocks[4], 1, 1, 10);
    memory.0.get_mut(&at.region).unwrap()[at.offset as usize + 63] ^= 0x40;
    let stream = SimDevice::new().stream(3);
    let there = upload(&stream, &memory);
    let job = CopyJob::digest(&plan, Side::Source, &SimMemory::regions(&there)).unwrap();
    let found = run(&stream, &job, true).unwrap().unwrap();
    assert_ne!(found, good);
    assert_eq!(found, naive_digest(&src, &selection, &memory));
}

#[test]
fn a_plan_past_a_regions_end_is_refused_and_a_region_that_is_smaller_than_said_is_found() {
    let (src, _, plan) = small();
    let memory = Memory::telling(&src.layout);
    let whole = memory.0[&RegionId::new(0)].len() as u64;
    let at = DevicePtr::new(1 << 20);
    let end = plan.ends(Side::Source)[0].1;
    let short = DeviceRegions::new(vec![(at, end - 1)]);
    let (side, region) = (Side::Source, RegionId::new(0));
    let refused = CopyJob::digest(&plan, side, &short).unwrap_err();
    assert_eq!(refused, CopyError::Bounds { side, region, bytes: end as usize - 1, end });
    let refused = CopyJob::copy(&plan, &DeviceRegions::default(), &short).unwrap_err();
    assert_eq!(refused, CopyError::Region { side, region });
    // What the host is told of the device may be wrong; then the device's own check speaks.
    let stream = SimDevice::new().stream(3);
    let there = stream.upload(&memory.0[&region][..end as usize - 16]);
    let said = DeviceRegions::new(vec![(there.ptr(), whole)]);
    let job = CopyJob::digest(&plan, side, &said).unwrap();
    let found = run(&stream, &job, true).unwrap_err();
    assert!(
        matches!(found, SimError::Fault { fault: Fault::OutOfRange { bytes: 16, write: false, .. }, .. }),
        "{found}"
    );
}

#[test]
fn an_empty_plan_launches_nothing() {
    let (src, selection, _) = small();
    let none = Selection { tokens: 5..5, ..selection };
    let plan = plan_in_place(&src.view(), &none).unwrap();
    let job = CopyJob::digest(&plan, Side::Source, &DeviceRegions::default()).unwrap();
    assert!(job.tables().is_empty());
    let stream = SimDevice::new().stream(3);
    assert_eq!(run(&stream, &job, true).unwrap(), Some(Digest::ZERO));
}
