//! Memory of a GPU, from one card's queue pairs to another's, past all processors.
#![expect(unsafe_code, reason = "registers memory")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvferry::device_memory;
use kvferry_kernels::cuda::{CudaDevice, CudaMemory};
use kvferry_protocol::pages::{Extent, Pages, Piece};
use kvferry_protocol::wire::ClusterKey;
use kvferry_protocol::{EngineId, Incarnation, PeerId, PpRank, RegionId, TpRank};
use kvferry_transport::{Event, PathKind, Source, Tcp, TcpConfig, TcpConfigFile, Transport, Write};

const BYTES: usize = 8 << 20;

fn endpoint(name: &str) -> (Tcp, PeerId) {
    let (engine, incarnation) = (EngineId::new(name).unwrap(), Incarnation::new(1));
    let peer = PeerId { engine, incarnation, pp_rank: PpRank::new(0), tp_rank: TpRank::new(0) };
    let file = TcpConfigFile { paths: vec![PathKind::Rdma, PathKind::Tcp], ..TcpConfigFile::default() };
    let key = ClusterKey::new(b"a key of sixteen").unwrap();
    (Tcp::bind(TcpConfig::try_from(file).unwrap(), key, peer.clone(), Bytes::new()).unwrap(), peer)
}

fn register(transport: &Tcp, device: &Arc<CudaDevice>, memory: &CudaMemory) -> RegionId {
    let memory = device_memory(device, memory.ptr(), memory.bytes()).unwrap();
    // SAFETY: the test drops the memory after the transport, and its kernels use it only where no post or grant is live.
    unsafe { transport.register(memory) }.unwrap()
}

fn wait<T>(transport: &Tcp, mut is_it: impl FnMut(Event) -> Option<T>) -> T {
    let (start, mut events) = (Instant::now(), Vec::new());
    while start.elapsed() < Duration::from_secs(30) {
        transport.poll(&mut events, Duration::from_secs(1));
        if let Some(found) = events.drain(..).find_map(&mut is_it) {
            return found;
        }
    }
    panic!("it did not come");
}

#[test]
#[ignore = "needs a GPU and an RDMA card"]
fn bytes_of_a_gpu_arrive_in_a_gpu() {
    let device = CudaDevice::open(0).unwrap();
    let queue = device.queue().unwrap();
    let bytes: Vec<u8> = (0..BYTES).map(|at| ((at * 7919) >> 5) as u8).collect();
    let [from, to] = [&bytes, &vec![0; BYTES]].map(|bytes| queue.upload(bytes).unwrap());
    queue.synchronize().unwrap();
    let ((a, a_peer), (b, b_peer)) = (endpoint("a"), endpoint("b"));
    let (source, target) = (register(&a, &device, &from), register(&b, &device, &to));
    a.connect(&b.local_address()).unwrap();
    for transport in [&a, &b] {
        let path = wait(transport, |event| match event {
            Event::Up { path, .. } => Some(path),
            _ => None,
        });
        assert_eq!(path.kind, PathKind::Rdma, "{path:?}");
    }
    let pages = |region| {
        let piece = Piece { region, offset: 0, loops: vec![], run_bytes: BYTES as u64 };
        Pages { bases: vec![0], pieces: vec![piece] }
    };
    let grant = b.grant(&a_peer, pages(target)).unwrap();
    b.send(&a_peer, Bytes::from_static(b"granted")).unwrap();
    wait(&a, |event| matches!(event, Event::Message { .. }).then_some(()));
    let (extents, source) = (vec![Extent::contiguous(0, BYTES as u64)], Source::Pages(vec![pages(source)]));
    let write = Write { grant, sequence: 0, extents, source, notification: Bytes::new() };
    let post = a.post(&b_peer, write).unwrap();
    wait(&b, |event| matches!(event, Event::Landed { .. }).then_some(()));
    let landed = queue.download(&to).unwrap();
    wait(&a, |event| matches!(event, Event::Posted { post: ended, outcome: Ok(()) } if ended == post).then_some(()));
    assert!(landed == bytes);
}
