//! The device that runs late: what its streams and events order, and that what they do not order is found, whatever the schedule.
#![expect(unsafe_code, reason = "queues copies and launches")]

use std::ptr::NonNull;
use std::sync::Arc;

use kvferry_cuda_sim::LateDevice;
use kvferry_kernels::HostRegion;
use kvferry_kernels::cuda::Element;
use kvferry_kernels::device::{
    CopyEnd, Device, DeviceError, DeviceKvCache, DeviceMemory, Lane, PinnedRegion, StagedRun, Stream,
};
use kvferry_protocol::BlockId;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CacheView, KvLayout, KvShape, Selection, Shard, plan};

const BYTES: usize = 256;

/// Three stretches of memory and two streams.
struct Bench {
    device: LateDevice,
    streams: [Arc<dyn Stream>; 2],
    memory: [DeviceMemory; 2],
    host: PinnedRegion,
}

impl Bench {
    fn new(seed: u64) -> Self {
        let device = LateDevice::new(seed);
        let streams = ["a", "b"].map(|name| device.stream(name).unwrap());
        let memory = [(); 2].map(|()| device.allocate(BYTES).unwrap());
        let host = device.pin(Arc::new(HostRegion::new(BYTES).unwrap())).unwrap();
        Self { device, streams, memory, host }
    }

    fn host_at(&self) -> NonNull<u8> {
        self.host.region().as_ptr()
    }

    fn host_byte(&self) -> u8 {
        // SAFETY: the region is mapped, and the device copies there only while somebody calls it: this thread.
        unsafe { self.host_at().read_volatile() }
    }

    fn set_host(&self, byte: u8) {
        // SAFETY: as above.
        unsafe { self.host_at().write_bytes(byte, BYTES) };
    }

    fn end(&self, index: usize) -> CopyEnd {
        match index {
            2 => CopyEnd::Host(self.host_at()),
            device => CopyEnd::Device(self.memory[device].ptr()),
        }
    }

    /// Queues a copy between two of the stretches; 2 is the host's.
    fn copy(&self, stream: usize, from: usize, to: usize) -> Result<(), DeviceError> {
        // SAFETY: all of them are so long and live for as long as the device; it checks who else uses them.
        unsafe { self.streams[stream].copy(self.end(from), self.end(to), BYTES) }
    }

    /// Stream 1 goes on behind what stream 0 has, if `orders`.
    fn order(&self, orders: bool) -> Result<(), DeviceError> {
        if orders { self.streams[1].wait(&*self.streams[0].record()?) } else { Ok(()) }
    }
}

/// Something that must be ordered, with its order or without.
type Case = (&'static str, fn(&Bench, bool) -> Result<(), DeviceError>, [&'static str; 2]);

const CASES: [Case; 6] = [
    (
        "a read after a write in another stream",
        |bench, orders| {
            bench.copy(0, 2, 0)?;
            bench.order(orders)?;
            bench.copy(1, 0, 1)
        },
        ["from host to device", "from device to device"],
    ),
    (
        "a write after a read in another stream",
        |bench, orders| {
            bench.copy(0, 0, 1)?;
            bench.order(orders)?;
            bench.copy(1, 2, 0)
        },
        ["from device to device", "from host to device"],
    ),
    (
        "a write after a write in another stream",
        |bench, orders| {
            bench.copy(0, 2, 0)?;
            bench.order(orders)?;
            bench.copy(1, 1, 0)
        },
        ["from host to device", "from device to device"],
    ),
    (
        "the host reads what a copy brings",
        |bench, orders| {
            bench.copy(0, 0, 2)?;
            let event = bench.streams[0].record()?;
            if orders {
                event.wait()?;
            }
            bench.device.host_reads(bench.host_at(), BYTES);
            Ok(())
        },
        ["from device to host", "the host"],
    ),
    (
        "the host writes what a copy reads",
        |bench, orders| {
            bench.copy(0, 2, 0)?;
            let event = bench.streams[0].record()?;
            while orders && !event.is_done()? {}
            bench.device.host_writes(bench.host_at(), BYTES);
            Ok(())
        },
        ["from host to device", "the host"],
    ),
    (
        "an event that was recorded too early",
        |bench, orders| {
            let early = bench.streams[0].record()?;
            bench.copy(0, 2, 0)?;
            let late = bench.streams[0].record()?;
            bench.streams[1].wait(if orders { &*late } else { &*early })?;
            bench.copy(1, 0, 1)
        },
        ["from host to device", "from device to device"],
    ),
];

#[test]
fn a_missing_order_is_found_in_every_schedule_and_names_both() {
    for (name, run, parts) in CASES {
        for seed in 0..200 {
            let bench = Bench::new(seed);
            let refused = run(&bench, true).err().map(|error| format!("{error:?}"));
            assert_eq!((refused, bench.device.settle()), (None, Ok(())), "{name}, in order, seed {seed}");
            let bench = Bench::new(seed);
            let refused = run(&bench, false);
            let error = bench.device.settle().expect_err(name).to_string();
            assert!(error.ends_with("nothing orders the two"), "{name}, seed {seed}: {error}");
            assert!(parts.iter().all(|part| error.contains(part)), "{name}, seed {seed}: {error}");
            if let Err(refused) = refused {
                let source = std::error::Error::source(&refused).unwrap().to_string();
                assert_eq!(source, error, "{name}: a call that fails tells the same");
            }
            assert!(bench.copy(0, 2, 0).is_err() && bench.streams[0].record().is_err(), "{name}: it has failed");
        }
    }
}

#[test]
fn a_copy_lands_late_and_an_event_says_when() {
    let mut late = 0;
    for seed in 0..100 {
        let bench = Bench::new(seed);
        bench.device.fill(bench.memory[0].ptr(), &[7; BYTES]);
        bench.set_host(1);
        bench.copy(0, 0, 2).unwrap();
        late += u32::from(bench.host_byte() == 1);
        bench.streams[0].record().unwrap().wait().unwrap();
        assert_eq!(bench.host_byte(), 7, "seed {seed}");
    }
    assert!((20..100).contains(&late), "{late} of 100 copies landed after the call");
}

#[test]
fn streams_run_in_many_orders_and_each_in_its_own() {
    let mut firsts = [0, 0];
    for seed in 0..100 {
        let bench = Bench::new(seed);
        let events = [0, 1, 0, 1].map(|stream| {
            bench.copy(stream, stream, stream).unwrap();
            bench.streams[stream].record().unwrap()
        });
        let first = loop {
            // Each question may let something run, so who is asked first is drawn, too.
            let asked = 2 + (seed % 2) as usize;
            if let Some(done) = [asked, 5 - asked].into_iter().find(|&index| events[index].is_done().unwrap()) {
                break done;
            }
        };
        assert!(events[first - 2].is_done().unwrap(), "a stream keeps its order");
        firsts[first - 2] += 1;
    }
    assert!(firsts.iter().all(|&first| first > 10), "{firsts:?}");
}

#[test]
fn copies_outside_of_memory_are_refused() {
    let bench = Bench::new(1);
    let beyond = CopyEnd::Device(bench.memory[0].ptr().offset(1));
    // SAFETY: the device refuses it.
    unsafe { bench.streams[0].copy(beyond, bench.end(2), BYTES) }.unwrap();
    assert!(bench.device.settle().unwrap_err().to_string().contains("leaves the memory"));
    let bench = Bench::new(2);
    let mut own = [0_u8; BYTES];
    let loose = CopyEnd::Host(NonNull::from(&mut own).cast());
    // SAFETY: the device refuses memory that is not pinned.
    unsafe { bench.streams[0].copy(bench.end(0), loose, BYTES) }.unwrap();
    assert!(bench.device.settle().unwrap_err().to_string().contains("pinned"));
    // SAFETY: refused at once.
    let refused = unsafe { bench.streams[0].copy(loose, loose, 1) };
    assert!(matches!(refused, Err(DeviceError::Foreign { .. })));
    let other = Bench::new(3);
    let event = other.streams[0].record().unwrap();
    assert!(matches!(bench.streams[0].wait(&*event), Err(DeviceError::Foreign { .. })));
}

/// A cache whose engine writes 1 layer of 2 blocks, a lane, and the plan of all that between the cache and a slab.
#[test]
fn a_lane_carries_pages_out_and_in_again_behind_the_engines_work() {
    for seed in 0..60 {
        let device = LateDevice::new(seed);
        let dynamic: Arc<dyn Device> = Arc::new(device.clone());
        let engine = device.stream("engine").unwrap();
        let shape = |blocks| KvShape { layers: 2, blocks, heads: 2, tokens_per_block: 4, run_bytes: vec![32, 32] };
        let cache = |order: &str| {
            let order = order.parse().unwrap();
            DeviceKvCache::allocate(Arc::clone(&dynamic), Arc::clone(&engine), shape(6), Element::F16, order).unwrap()
        };
        let (from, to) = (cache("LPBNHC"), cache("BHLPNC"));
        let slab = KvLayout::packed(shape(3), "BLNHPC".parse().unwrap()).unwrap();
        let bytes = shape(3).block_bytes() as usize * 3;
        let mut lane = Lane::new(&dynamic, bytes, 4096).unwrap();
        let host = device.pin(Arc::new(HostRegion::new(bytes).unwrap())).unwrap();
        let at = host.region().as_ptr();
        let [ours, packed, theirs] = [[4, 0, 3], [0, 1, 2], [1, 5, 2]].map(|ids| ids.map(BlockId::new));
        let view = |layout, blocks| CacheView { layout, shard: Shard::default(), blocks, first_token: 8 };
        let all = Selection { layers: 0..2, heads: 0..2, tokens: 9..19 };
        let out = plan(&view(from.layout(), &ours), &view(&slab, &packed), &all).unwrap();
        let back = plan(&view(&slab, &packed), &view(to.layout(), &theirs), &all).unwrap();

        // The engine's work: what it stores comes from memory of its own.
        let whole = from.layout().shape().block_bytes() as usize * 6;
        let content: Vec<u8> = (0..whole).map(|at| ((at * 31) >> 3) as u8).collect();
        let stored = device.allocate(whole).unwrap();
        device.fill(stored.ptr(), &content);
        let pages = from.pages(0).map(|_| engine_start(&from)).unwrap();
        // SAFETY: both are so long and the engine's own; the lane waits for the event.
        unsafe { engine.copy(CopyEnd::Device(stored.ptr()), CopyEnd::Device(pages), whole) }.unwrap();
        let computed = engine.record().unwrap();
        // SAFETY: the slab's host memory is pinned and nobody else's; the pages are not written again.
        let digest = unsafe { lane.gather(&out, &from, Some(&*computed), at, bytes) }.unwrap();
        assert_ne!(digest, Digest::ZERO);
        let free = engine.record().unwrap();
        let runs = [StagedRun { start: at, offset: 0, bytes }];
        // SAFETY: as above; nobody uses the target's pages before the event.
        let there = unsafe { lane.scatter(&back, &to, Some(&*free), &runs) }.unwrap();
        engine.wait(&*there).unwrap();
        let read = device.allocate(whole).unwrap();
        // SAFETY: as above.
        unsafe { engine.copy(CopyEnd::Device(engine_start(&to)), CopyEnd::Device(read.ptr()), whole) }.unwrap();
        engine.record().unwrap().wait().unwrap();
        let arrived = device.read(read.ptr(), whole).unwrap();
        let place = |of: &KvLayout, layer, blocks: &[BlockId], plane, head, token: u32| {
            of.place(layer, blocks[(token / 4) as usize], plane, head, token % 4).offset as usize
        };
        for (layer, plane, head, token) in
            (0..2).flat_map(|l| (0..2).flat_map(move |p| (0..2).flat_map(move |h| (1..11).map(move |t| (l, p, h, t)))))
        {
            let source = place(from.layout(), layer, &ours, plane, head, token);
            let target = place(to.layout(), layer, &theirs, plane, head, token);
            assert_eq!(content[source..source + 32], arrived[target..target + 32], "seed {seed}");
        }
        assert_eq!(device.settle(), Ok(()));
    }
}

fn engine_start(cache: &DeviceKvCache) -> kvferry_kernels::cuda::DevicePtr {
    cache.regions().start(0).unwrap()
}
