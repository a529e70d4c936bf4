//! What executes the kernels, by kernels that are right and kernels that are wrong.
#![expect(unsafe_code, reason = "launches")]

use kvferry_cuda_sim::{Fault, SimDevice, SimError, SimMemory, SimStream};
use kvferry_kernels::cuda::{Argument, DevicePtr, Geometry, Kernel, Launcher};

const SEEDS: u64 = 16;

fn launch(
    stream: &SimStream,
    name: &'static str,
    geometry: Geometry,
    arguments: &[Argument<'_>],
) -> Result<(), SimError> {
    let kernel = Kernel { family: "selftest", name };
    // SAFETY: the simulated device checks every access, whatever a kernel is told.
    unsafe { stream.launch(kernel, geometry, arguments) }
}

fn bytes_of<T: Copy, const N: usize>(numbers: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    numbers.iter().flat_map(|&number| bytes(number)).collect()
}

fn u32s(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect()
}

fn u64s(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|&bytes| u64::from_le_bytes(bytes)).collect()
}

/// Runs a kernel over some numbers, which it is told the address of.
fn over(name: &'static str, seed: u64, threads: u32, shared_bytes: u32, input: &[u8]) -> Result<Vec<u8>, SimError> {
    let stream = SimDevice::new().stream(seed);
    let memory = stream.upload(input);
    let geometry = Geometry { shared_bytes, ..Geometry::row(1, threads) };
    launch(&stream, name, geometry, &[Argument::of(&memory.ptr())])?;
    stream.download(&memory)
}

fn fault(result: Result<Vec<u8>, SimError>) -> Fault {
    match result {
        Err(SimError::Fault { fault, .. }) => fault,
        other => panic!("no fault but {other:?}"),
    }
}

#[test]
fn a_missing_barrier_is_found_and_a_barrier_that_is_there_holds() {
    let numbers: Vec<u32> = (0..128).collect();
    let input = bytes_of(&numbers, u32::to_le_bytes);
    let want: Vec<u32> = (0..128).rev().collect();
    for seed in 0..SEEDS {
        let right = over("reverse_right", seed, 128, 512, &input).unwrap();
        assert_eq!(u32s(&right), want, "seed {seed}");
        let wrong = over("reverse_without_barrier", seed, 128, 512, &input).unwrap();
        assert_ne!(u32s(&wrong), want, "seed {seed} did not show that the barrier is missing");
    }
}

#[test]
fn a_missing_wait_is_found_and_a_wait_that_is_there_holds() {
    let numbers: Vec<u64> = (0..256).collect();
    let input = bytes_of(&numbers, u64::to_le_bytes);
    let want: Vec<u64> = (0..256).map(|at| at + u64::from(at % 2 == 0)).collect();
    for seed in 0..SEEDS {
        let right = over("add_one_right", seed, 64, 0, &input).unwrap();
        assert_eq!(u64s(&right), want, "seed {seed}");
        let wrong = over("add_one_without_wait", seed, 64, 0, &input).unwrap();
        assert_ne!(u64s(&wrong), want, "seed {seed} did not show that the wait is missing");
    }
}

/// A pool of 4 blocks, and copies of those that are named.
fn take_blocks(ids: &[u32]) -> Result<Vec<u8>, SimError> {
    let device = SimDevice::new();
    let stream = device.stream(7);
    let numbers: Vec<u32> = (0..4 * 64).collect();
    let pool = stream.upload(&bytes_of(&numbers, u32::to_le_bytes));
    // What lies right behind the pool or before it is somebody else's and must not be taken for it.
    let _neighbours: Vec<SimMemory> = (0..16).map(|_| device.allocate(1024)).collect();
    let ids_there = stream.upload(&bytes_of(ids, u32::to_le_bytes));
    let out = device.allocate(ids.len() * 256);
    let addresses = [pool.ptr(), ids_there.ptr(), out.ptr()];
    launch(&stream, "take_blocks", Geometry::row(ids.len() as u32, 64), &addresses.each_ref().map(Argument::of))?;
    stream.download(&out)
}

#[test]
fn a_block_that_is_out_of_range_is_found() {
    let found = u32s(&take_blocks(&[2, 0, 3]).unwrap());
    assert_eq!((found[0], found[64], found[191]), (128, 0, 255));
    let error = take_blocks(&[2, 4, 3]).unwrap_err();
    let SimError::Fault { block: [1, 0, 0], fault: Fault::OutOfRange { bytes: 4, write: false, .. }, .. } = error
    else {
        panic!("{error}");
    };
    assert!(error.to_string().contains("take_blocks of selftest.cu, block [1, 0, 0]"), "{error}");
    assert!(take_blocks(&[u32::MAX]).is_err());
}

#[test]
fn memory_that_was_freed_is_out_of_range() {
    let stream = SimDevice::new().stream(1);
    let memory = stream.upload(&[0; 512]);
    let address = memory.ptr();
    launch(&stream, "half_at_a_barrier", Geometry::row(1, 16), &[Argument::of(&address)]).unwrap();
    drop(memory);
    assert!(matches!(stream.synchronize(), Err(SimError::Fault { fault: Fault::OutOfRange { write: true, .. }, .. })));
}

#[test]
fn an_access_must_be_aligned_to_its_size() {
    let found = fault(over("load_misaligned", 1, 1, 0, &[0; 16]));
    assert!(matches!(found, Fault::Misaligned { alignment: 4, .. }), "{found}");
}

#[test]
fn a_barrier_that_some_threads_do_not_reach_is_told_with_where_all_stand() {
    for seed in 0..SEEDS {
        let Fault::Deadlock { threads } = fault(over("half_at_a_barrier", seed, 64, 0, &[0; 256])) else { panic!() };
        assert!(threads.contains("threads 0-15, 32-47: at the barrier of selftest.cu:"), "{threads}");
        assert!(threads.contains("threads 16-31, 48-63: done"), "{threads}");
        let found = fault(over("half_in_a_shuffle", seed, 32, 0, &[0; 128]));
        let Fault::Deadlock { threads } = found else { panic!("{found}") };
        assert!(threads.contains("with the lanes 0xffffffff") && threads.contains("threads 16-31: done"), "{threads}");
        let found = fault(over("two_barriers", seed, 64, 0, &[0; 256]));
        assert!(matches!(found, Fault::Divergent { .. }), "{found}");
    }
}

#[test]
fn parts_of_a_warp_exchange_without_waiting_for_each_other() {
    let numbers: Vec<u64> = (0..64).map(|at| at * 1001).collect();
    let votes: u64 = (0..32).filter(|lane| lane % 3 == 0).map(|lane| 1 << lane).sum();
    let sum = |at: usize| numbers[at / 16 * 16..][..16].iter().sum::<u64>();
    // The upper half adds up three times: after the first all 16 lanes have the sum.
    let want: Vec<u64> = (0..64).map(|at| sum(at) * if at % 32 < 16 { 1 } else { 256 } + (votes << 32)).collect();
    for seed in 0..SEEDS {
        let found = over("warp_sums", seed, 64, 0, &bytes_of(&numbers, u64::to_le_bytes)).unwrap();
        assert_eq!(u64s(&found), want, "seed {seed}");
    }
}

#[test]
fn memory_that_nobody_wrote_is_nan() {
    let stream = SimDevice::new().stream(1);
    let memory = SimDevice::new().allocate(8);
    assert!(u32s(&stream.download(&memory).unwrap()).iter().all(|&bits| f32::from_bits(bits).is_nan()));
    // Shared memory, whatever an earlier block left there.
    let numbers: Vec<u64> = (0..256).collect();
    over("add_one_right", 3, 64, 0, &bytes_of(&numbers, u64::to_le_bytes)).unwrap();
    let found = over("read_shared", 1, 64, 0, &[0; 512]).unwrap();
    assert!(found.iter().all(|&byte| byte == 0xff));
}

#[test]
fn wrong_launches_are_refused() {
    let stream = SimDevice::new().stream(1);
    let address = DevicePtr::new(0);
    let refused = |name, geometry, arguments: &[Argument<'_>]| launch(&stream, name, geometry, arguments).unwrap_err();
    let one = [Argument::of(&address)];
    assert!(matches!(refused("no_such", Geometry::row(1, 1), &one), SimError::NoKernel { .. }));
    let error = refused("take_blocks", Geometry::row(1, 1), &one);
    assert_eq!(error.to_string(), "take_blocks of selftest.cu takes parameters of [8, 8, 8] bytes; it was given [8]");
    for geometry in [Geometry::row(1, 0), Geometry::row(0, 1), Geometry::row(1, 1025)] {
        assert!(matches!(refused("reverse_right", geometry, &one), SimError::Geometry { .. }), "{geometry:?}");
    }
    let much = Geometry { shared_bytes: 228 << 10, ..Geometry::row(1, 1) };
    assert!(matches!(refused("reverse_right", much, &one), SimError::Geometry { .. }));
    // A queue stays failed.
    launch(&stream, "load_misaligned", Geometry::row(1, 1), &one).unwrap();
    let error = stream.synchronize().unwrap_err();
    assert_eq!(refused("reverse_right", Geometry::row(1, 1), &one), error);
}

/// Each helper of device.cuh that is emulated, against the same operation elsewhere.
#[test]
fn emulated_instructions_are_equal_to_the_real_ones() {
    let device = SimDevice::new();
    let stream = device.stream(1);
    let (floats, back) = (device.allocate(4 << 16), device.allocate(2 << 16));
    let addresses = [floats.ptr(), back.ptr()];
    launch(&stream, "halves", Geometry::row(256, 256), &addresses.each_ref().map(Argument::of)).unwrap();
    let (floats, back) = (stream.download(&floats).unwrap(), stream.download(&back).unwrap());
    for (bits, found) in u32s(&floats).into_iter().enumerate() {
        let half = half::f16::from_bits(bits as u16);
        let (found, want) = (f32::from_bits(found), half.to_f32());
        assert!(found.to_bits() == want.to_bits() || found.is_nan() && want.is_nan(), "{bits:#06x}: {found} {want}");
        let back = half::f16::from_le_bytes([back[2 * bits], back[2 * bits + 1]]);
        assert!(back.to_bits() == half.to_bits() || back.is_nan() && half.is_nan(), "{bits:#06x}");
    }
    // Around every half and every midpoint between two, and far away.
    let mut inputs: Vec<f32> = (0..1 << 16)
        .flat_map(|bits| {
            let at = half::f16::from_bits(bits as u16).to_f32().to_bits();
            [at.wrapping_sub(1), at + 1, at ^ 0x1000, at ^ 0x1001, (at ^ 0x1000).wrapping_sub(1)].map(f32::from_bits)
        })
        .collect();
    inputs.extend([65519.9, 65520.0, 1e9, f32::INFINITY, f32::MIN_POSITIVE, 5.9e-8, 2.9e-8, -2.9e-8]);
    inputs.resize(inputs.len().next_multiple_of(256), 0.0);
    let from = stream.upload(&bytes_of(&inputs, f32::to_le_bytes));
    let to = device.allocate(inputs.len() * 2);
    let addresses = [from.ptr(), to.ptr()];
    let geometry = Geometry::row(inputs.len() as u32 / 256, 256);
    launch(&stream, "round_to_halves", geometry, &addresses.each_ref().map(Argument::of)).unwrap();
    for (found, x) in stream.download(&to).unwrap().as_chunks().0.iter().zip(inputs) {
        let (found, want) = (half::f16::from_le_bytes(*found), half::f16::from_f32(x));
        assert!(found.to_bits() == want.to_bits() || found.is_nan() && want.is_nan(), "{x:e}: {found} {want}");
    }
    let [x, y, sum] = [0xdead_beef_0123_4567_u64, 0x9e37_79b9_7f4a_7c15, 5];
    let memory = stream.upload(&bytes_of(&[x, y, sum], u64::to_le_bytes));
    // a * b + c where rounding the product first gives another sum.
    let [a, b, c] = [1.0 + f32::EPSILON, 1.0 - f32::EPSILON, -1.0_f32];
    let address = memory.ptr();
    let arguments = [Argument::of(&address), Argument::of(&a), Argument::of(&b), Argument::of(&c)];
    launch(&stream, "arithmetic", Geometry::row(1, 1), &arguments).unwrap();
    let high = ((u128::from(x) * u128::from(y)) >> 64) as u64;
    let fused = u64::from(a.mul_add(b, c).to_bits());
    assert_ne!(a.mul_add(b, c), a * b + c);
    assert_eq!(u64s(&stream.download(&memory).unwrap()), [high, fused, x + sum]);
}
