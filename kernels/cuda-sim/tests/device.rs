//! The driver's launcher: what it says where there is no device; and, where there is one, the same bits as on the CPU.
#![expect(unsafe_code, reason = "launches")]

use kvferry_cuda_sim::{SimDevice, SimMemory};
use kvferry_kernels::cuda::{CopyJob, CudaDevice, CudaError, DeviceRegions};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::{CacheView, CopyPlan, KvLayout, KvShape, Selection, Shard, plan};

#[test]
fn a_device_that_is_not_there_is_an_error_that_says_why() {
    match CudaDevice::open(4096).map(|_| ()) {
        Err(error @ CudaError::NoDevice { ordinal: 4096, .. }) => {
            assert!(error.to_string().starts_with("no CUDA device 4096: "), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

/// Blocks of 16 tokens from a layout per layer to one across layers.
fn gather(src: &KvLayout, dst: &KvLayout) -> CopyPlan {
    let [from, to] = [[3, 1, 6, 2], [0, 1, 2, 3]].map(|ids| ids.map(BlockId::new));
    let view = |layout, blocks| CacheView { layout, shard: Shard::default(), blocks, first_token: 0 };
    let selection = Selection { layers: 0..2, heads: 0..2, tokens: 5..60 };
    plan(&view(src, &from), &view(dst, &to), &selection).unwrap()
}

#[test]
#[ignore = "needs a GPU"]
fn a_device_gathers_and_digests_as_the_cpu_does() {
    let shape = |blocks| KvShape { layers: 2, blocks, heads: 2, tokens_per_block: 16, run_bytes: vec![256, 256] };
    let [src, dst] = [(8, "LPBNHC"), (4, "BLHNPC")]
        .map(|(blocks, order)| KvLayout::packed(shape(blocks), order.parse().unwrap()).unwrap());
    let bytes: Vec<u8> = (0..shape(8).block_bytes() * 8).map(|at| ((at * 7919) >> 5) as u8).collect();
    let untouched = vec![0xee; (shape(4).block_bytes() * 4) as usize];
    let plan = gather(&src, &dst);

    let stream = SimDevice::new().stream(1);
    let [from, to, sum] = [&bytes[..], &untouched, &[0; 8]].map(|bytes| stream.upload(bytes));
    let regions = |memory| SimMemory::regions(std::slice::from_ref(memory));
    let job = CopyJob::copy(&plan, &regions(&from), &regions(&to)).unwrap();
    let tables = stream.upload(job.tables());
    // SAFETY: the simulated device checks every access.
    unsafe { job.launch(&stream, tables.ptr(), Some(sum.ptr())) }.unwrap();
    let want = [&to, &sum].map(|memory| stream.download(memory).unwrap());

    let queue = CudaDevice::open(0).unwrap().queue().unwrap();
    let [from, to, sum] = [&bytes[..], &untouched, &[0; 8]].map(|bytes| queue.upload(bytes).unwrap());
    let regions = |at: &kvferry_kernels::cuda::CudaMemory| DeviceRegions::new(vec![(at.ptr(), at.bytes() as u64)]);
    let job = CopyJob::copy(&plan, &regions(&from), &regions(&to)).unwrap();
    let tables = queue.upload(job.tables()).unwrap();
    // SAFETY: the memory is as long as was said, lives until the downloads are done, and nobody else uses it.
    unsafe { job.launch(&queue, tables.ptr(), Some(sum.ptr())) }.unwrap();
    assert!([&to, &sum].map(|memory| queue.download(memory).unwrap()) == want);
}
