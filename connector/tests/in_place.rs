//! Blocks of a peer on the same host are read where they lie: who reads what, until when, and what happens when it is not there any more.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{DIM, Engine, HEADS, LAYERS, PATIENCE, Setup, fetch, keep, start_load, wait_until_free};
use kvferry::config::ConnectorConfig;
use kvferry::contract::{EngineFinish, Hold, Request, Scheduler, Worker};
use kvferry::open_transport;
use kvferry_kernels::{
    AttentionBatch, AttentionOptions, AttentionSequence, HostKvCache, HostRegion, Threads, paged_attention,
};
use kvferry_protocol::digest::{Digest, run_hash};
use kvferry_protocol::layout::WindowShape;
use kvferry_protocol::message::{Abort, Grant, Message, Reason, Verdict, Wrote};
use kvferry_protocol::pages::{Extent, Pages, Piece};
use kvferry_protocol::transfer::Rect;
use kvferry_protocol::wire::ClusterKey;
use kvferry_protocol::{BlockId, LayerId, PeerId, RegionId, codec};
use kvferry_transport::testing::{Proxy, ProxyPlan};
use kvferry_transport::{
    Event, GrantKey, Memory, MemoryFile, MemoryKind, PeerAddress, Source, Tcp, TcpConfig, TcpConfigFile, Transport,
    Write,
};

const KEY: &str = "a key for a test of one host";
const TOKENS: u32 = 22;
/// No time decides anything here, and layers come one by one.
const IN_PLACE: &str = "same_host = 'in-place'\ntransfer_deadline_ms = 600000\nprogress_deadline_ms = 600000\n\
                        lease_ttl_ms = 600000\nabsent_deadline_ms = 600000\nlayer_group = 1";

fn setup(of: Setup) -> Setup {
    Setup { layout: "BLPNHC", extra: IN_PLACE, psk: Some(KEY), ..of }
}

fn opened(config: &ConnectorConfig, greeting: bytes::Bytes) -> Arc<dyn Transport> {
    open_transport(config, greeting).unwrap()
}

/// A prompt whose KV one engine has and another reads.
struct HandOver {
    prefill: Engine,
    decode: Engine,
    kept: (Request, Vec<BlockId>),
    read: (Request, Vec<BlockId>),
    /// Prefill has its blocks back.
    is_released: bool,
}

impl HandOver {
    /// Up to the moment when decode has loaded the prompt and prefill is done with it.
    fn new(prefill: &Setup, decode: &Setup) -> Self {
        let prefill = Engine::new(prefill, &opened);
        let address = prefill.address();
        Self::between(prefill, Engine::new(decode, &opened), address)
    }

    fn between(mut prefill: Engine, mut decode: Engine, address: PeerAddress) -> Self {
        let read = fetch("d", 1, TOKENS, address);
        let blocks = decode.blocks(3, TOKENS);
        start_load(&mut decode, &read, &blocks, 0);
        let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
        let kept = keep("p", 1, TOKENS, Some(peer));
        let source = prefill.blocks(2, TOKENS);
        prefill.scheduler.allocated(&kept, &source, 0, 0).unwrap();
        prefill.prefill_step(&kept, &source, 0..8);
        prefill.prefill_step(&kept, &source, 8..TOKENS);
        let hold = prefill.finish(&kept, &source, EngineFinish::Complete);
        assert!(matches!(hold, Hold::Until { .. }), "{hold:?}");
        let mut this = Self { prefill, decode, kept: (kept, source), read: (read, blocks), is_released: false };
        let deadline = Instant::now() + PATIENCE;
        // Both have their verdict, and decode's scheduler knows.
        while !(this.is_done(&this.prefill) && this.is_done(&this.decode)) || this.decode.scheduler.has_pending() {
            let applied = this.decode.idle_step();
            assert!(applied.failed.is_empty(), "{applied:?}");
            this.is_released |= !this.prefill.idle_step().released.is_empty();
            assert!(Instant::now() < deadline, "{:?}", this.decode.metrics.snapshot());
        }
        this
    }

    fn wait_until_released(&mut self) {
        if !self.is_released {
            self.prefill.idle_until("the release", |applied| applied.released.len() == 1);
        }
    }

    fn is_done(&self, engine: &Engine) -> bool {
        engine.metrics.snapshot().transfers_done_total.total() == 1
    }

    /// Which of decode's blocks are read where prefill has them; all layers of a block are, or none.
    fn aliased(&self) -> Vec<bool> {
        let of = |&block: &BlockId| {
            let layers: Vec<_> = (0..LAYERS).map(|layer| self.decode.cache.is_aliased(layer, block)).collect();
            assert!(layers.iter().all(|is| *is == layers[0]), "{layers:?}");
            layers[0]
        };
        self.read.1.iter().map(of).collect()
    }

    fn attention_is_alike(&self) {
        let (ours, theirs) = (attend(&self.decode.cache, &self.read.1), attend(&self.prefill.cache, &self.kept.1));
        assert_eq!(ours, theirs);
    }

    fn wait_until_copied(&mut self) {
        let of = |decode: &Engine, block| !decode.cache.is_aliased(0, block);
        let first = self.read.1[0];
        let deadline = Instant::now() + PATIENCE;
        while !of(&self.decode, first) {
            let applied = self.decode.idle_step();
            assert!(applied.failed.is_empty(), "{applied:?}");
            assert!(Instant::now() < deadline, "{:?}", self.decode.metrics.snapshot());
        }
        assert_eq!(self.aliased(), [false; 6]);
    }

    /// Prefill gets its blocks back, and decode has its own copy then.
    fn finish_copied(mut self) {
        self.wait_until_released();
        assert_eq!(self.decode.read(&self.read.1, TOKENS), self.prefill.read(&self.kept.1, TOKENS));
        self.attention_is_alike();
        let snapshot = self.decode.metrics.snapshot();
        assert_eq!(snapshot.in_place_copied_pages_total, 5 * u64::from(LAYERS));
        assert_eq!((snapshot.withdrawn_requests_total, self.decode.scheduler.unknown_results()), (0, 0));
        assert_eq!(self.decode.finish(&self.read.0, &self.read.1, EngineFinish::Complete), Hold::Free);
        wait_until_free(&mut self.prefill, &mut self.decode);
        assert_eq!(self.prefill.metrics.snapshot().held_bytes, 0);
    }
}

/// Attention of the last token over all layers, as bits.
fn attend(cache: &HostKvCache, blocks: &[BlockId]) -> Vec<u32> {
    let heads = usize::from(HEADS);
    let queries: Vec<f32> = (0..heads * DIM).map(|i| (i as f32 * 0.3).sin() * 1e-4).collect();
    let sequences = [AttentionSequence { blocks, context_len: TOKENS as usize, queries: 0..1 }];
    let batch = AttentionBatch { queries: &queries, q_heads: heads, sequences: &sequences };
    let mut bits = Vec::new();
    for layer in 0..LAYERS {
        let mut out = vec![0.0; heads * DIM];
        paged_attention(cache, layer, &batch, &AttentionOptions::causal(0.3), &Threads::single(), &mut out).unwrap();
        bits.extend(out.into_iter().map(f32::to_bits));
    }
    bits
}

/// K/V bytes of the prompt.
fn all_bytes() -> u64 {
    u64::from(TOKENS) * u64::from(LAYERS) * u64::from(HEADS) * 2 * 4 * DIM as u64
}

#[test]
fn a_prompt_is_read_where_prefill_has_it_until_its_request_ends() {
    let mut it = HandOver::new(&setup(Setup::prefill()), &setup(Setup::decode()));
    // The last block has room for more tokens, which decode computes: it is decode's own.
    assert_eq!(it.aliased(), [true, true, true, true, true, false]);
    assert!(!it.is_released, "its blocks are read");
    it.attention_is_alike();
    let (ours, theirs) = (it.decode.metrics.snapshot(), it.prefill.metrics.snapshot());
    assert_eq!((ours.adopted_bytes_total, theirs.handed_bytes_total), (all_bytes(), all_bytes()));
    assert_eq!(
        (theirs.lent_bytes_total, theirs.transfer_bytes_total.total()),
        (0, all_bytes()),
        "nothing was copied over"
    );
    assert_eq!(theirs.held_bytes, all_bytes());
    it.decode.store(0, &it.read.1, TOKENS..TOKENS + 1);

    assert_eq!(it.decode.finish(&it.read.0, &it.read.1, EngineFinish::Complete), Hold::Free);
    // Whoever gets the blocks next writes them.
    assert!(it.decode.scheduler.has_pending());
    it.decode.idle_step();
    assert_eq!(it.aliased(), [false; 6]);
    (0..LAYERS).for_each(|layer| it.decode.store(layer, &it.read.1, 0..TOKENS));
    it.wait_until_released();
    wait_until_free(&mut it.prefill, &mut it.decode);
    let ours = it.decode.metrics.snapshot();
    assert_eq!((ours.in_place_copied_pages_total, ours.withdrawn_requests_total), (0, 0));
}

#[test]
fn who_does_not_say_so_or_lies_otherwise_is_copied_from() {
    let copies = Setup { extra: "layer_group = 1", ..setup(Setup::prefill()) };
    for (name, prefill, decode, is_lent) in [
        ("prefill copies", copies.clone(), setup(Setup::decode()), false),
        ("decode copies", setup(Setup::prefill()), Setup { extra: copies.extra, ..setup(Setup::decode()) }, false),
        (
            "decode's memory is its engine's",
            setup(Setup::prefill()),
            Setup { raw: true, ..setup(Setup::decode()) },
            false,
        ),
        ("another layout", setup(Setup::prefill()), Setup { layout: "BHLPNC", ..setup(Setup::decode()) }, true),
    ] {
        let mut it = HandOver::new(&prefill, &decode);
        assert_eq!(it.aliased(), [false; 6], "{name}");
        assert_eq!(it.decode.metrics.snapshot().adopted_bytes_total > 0, is_lent, "{name}");
        it.attention_is_alike();
        it.wait_until_released();
        let _ = it.decode.finish(&it.read.0, &it.read.1, EngineFinish::Complete);
        wait_until_free(&mut it.prefill, &mut it.decode);
    }
}

#[test]
fn prefill_that_is_short_of_blocks_gets_them_back_and_decode_has_a_copy() {
    let mut it = HandOver::new(&setup(Setup::prefill()), &setup(Setup::decode()));
    it.prefill.scheduler.short_of_blocks();
    let _ = it.prefill.idle_step();
    it.wait_until_copied();
    it.wait_until_released();
    it.is_released = true;
    assert!(it.prefill.metrics.snapshot().recalled_writes_total > 0);
    it.finish_copied();
}

#[test]
fn a_session_that_is_cut_costs_a_copy_and_nothing_else() {
    let prefill = Engine::new(&setup(Setup::prefill()), &opened);
    let PeerAddress::Tcp(address) = prefill.address() else { panic!("{:?}", prefill.address()) };
    let proxy = Proxy::new(address, ProxyPlan::default());
    let decode = Engine::new(&setup(Setup::decode()), &opened);
    let mut it = HandOver::between(prefill, decode, PeerAddress::Tcp(proxy.address()));
    assert_eq!(it.aliased(), [true, true, true, true, true, false]);
    proxy.cut_all();
    it.wait_until_copied();
    it.finish_copied();
}

#[test]
fn an_owner_that_ends_waits_until_its_readers_have_a_copy() {
    let mut it = HandOver::new(&setup(Setup::prefill()), &setup(Setup::decode()));
    let (want, prefill) = (attend(&it.prefill.cache, &it.kept.1), &mut it.prefill.worker);
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| prefill.shutdown(PATIENCE));
        let deadline = Instant::now() + PATIENCE;
        while !ending.is_finished() {
            let applied = it.decode.idle_step();
            assert!(applied.failed.is_empty() && Instant::now() < deadline, "{applied:?}");
        }
    });
    assert_eq!((it.aliased(), attend(&it.decode.cache, &it.read.1)), (vec![false; 6], want));
    assert_eq!(it.decode.metrics.snapshot().withdrawn_requests_total, 0);
}

#[test]
fn memory_that_no_peer_can_map_is_refused_at_the_start_unless_it_only_reads() {
    let make = |role: &'static str| {
        let engine = std::panic::catch_unwind(|| {
            drop(Engine::new(&Setup { raw: true, role, ..setup(Setup::prefill()) }, &opened));
        });
        engine.is_ok()
    };
    assert_eq!((make("decode"), make("prefill"), make("both")), (true, false, false));
}

#[test]
fn an_owner_that_gives_up_is_found_out_before_anything_of_the_step_is_used() {
    let mut it = HandOver::new(&setup(Setup::prefill()), &setup(Setup::decode()));
    // No grace: its readers are not waited for.
    it.prefill.worker.shutdown(Duration::ZERO);
    // The next pages that it computes may lie there.
    it.prefill.store_as(0, &it.kept.1, 0..TOKENS, |_, _, _, _, _| 7.0);
    let meta = it.decode.step(&it.read.0, &it.read.1, TOKENS - 1..TOKENS);
    it.decode.worker.begin_step(meta).unwrap();
    it.decode.worker.wait_saved();
    let results = it.decode.worker.poll();
    let applied = it.decode.scheduler.apply(vec![results]);
    let [failure] = &applied.failed[..] else { panic!("{applied:?}") };
    assert_eq!((failure.request.as_str(), failure.good_tokens), ("d", 0));
    assert!(failure.reason.contains("gave up its memory"), "{}", failure.reason);
    // It is computed again, in its own blocks.
    assert_eq!(it.aliased(), [false; 6]);
    it.decode.store(0, &it.read.1, 0..TOKENS);
    assert_eq!(it.decode.metrics.snapshot().withdrawn_requests_total, 1);
    assert_eq!(it.decode.idle_step().failed, [], "it is told once");
}

#[test]
fn an_aborted_load_reads_nothing_and_holds_nothing() {
    let mut prefill = Engine::new(&setup(Setup::prefill()), &opened);
    let mut decode = Engine::new(&setup(Setup::decode()), &opened);
    let (read, blocks) = (fetch("d", 1, TOKENS, prefill.address()), decode.blocks(3, TOKENS));
    start_load(&mut decode, &read, &blocks, 0);
    let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
    let (kept, source) = (keep("p", 1, TOKENS, Some(peer)), prefill.blocks(2, TOKENS));
    prefill.scheduler.allocated(&kept, &source, 0, 0).unwrap();
    prefill.prefill_step(&kept, &source, 0..8);
    // Two whole blocks are read in place when the engine gives up.
    let deadline = Instant::now() + PATIENCE;
    while (0..LAYERS).any(|layer| !decode.cache.is_aliased(layer, blocks[1])) {
        decode.idle_step();
        assert!(Instant::now() < deadline, "{:?}", decode.metrics.snapshot());
    }
    assert!(matches!(decode.finish(&read, &blocks, EngineFinish::Aborted), Hold::Until { .. }));
    decode.idle_until("the release", |applied| applied.released.len() == 1);
    assert!((0..LAYERS).all(|layer| blocks.iter().all(|&block| !decode.cache.is_aliased(layer, block))));
    let _ = prefill.finish(&kept, &source, EngineFinish::Aborted);
    wait_until_free(&mut prefill, &mut decode);
    while prefill.metrics.snapshot().held_bytes > 0 {
        prefill.idle_step();
        assert!(Instant::now() < deadline, "{:?}", prefill.metrics.snapshot());
    }
}

/// It waits until nobody reads them, which may be long if nobody asks.
#[test]
fn blocks_of_a_request_that_is_preempted_are_asked_back() {
    let mut it = HandOver::new(&setup(Setup::prefill()), &setup(Setup::decode()));
    let (prefill, decode, id) = (&mut it.prefill, &mut it.decode, it.kept.0.id.clone());
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::SeqCst) {
                assert!(decode.idle_step().failed.is_empty());
            }
        });
        prefill.worker.preempted(&[id]);
        is_over.store(true, Ordering::SeqCst);
    });
    assert_eq!(it.aliased(), [false; 6]);
    assert!(it.prefill.metrics.snapshot().recalled_writes_total > 0);
    it.attention_is_alike();
    it.finish_copied();
}

/// All of a load is held until its end, and a sender may have so many writes in a peer's hands.
#[test]
fn a_load_of_very_many_writes_is_copied() {
    const BLOCK: u32 = 128;
    for (extra, in_place) in [("chunk_bytes = 4096", false), ("chunk_bytes = 8192", true)] {
        let liar = Liar::new();
        let extra = [IN_PLACE, extra].join("\n").leak();
        let setup = Setup { tokens_per_block: BLOCK, extra, ..setup(Setup::decode()) };
        let mut decode = Engine::new(&setup, &opened);
        let request = fetch("d", 1, 43 * BLOCK, liar.transport.local_address());
        let blocks = decode.blocks(3, 43 * BLOCK);
        start_load(&mut decode, &request, &blocks, 0);
        let (peer, key, ..) = liar.wait_grant();
        assert_eq!(liar.transport.is_in_place(&peer, key), in_place, "{extra}");
    }
}

/// A sender without a connector, that lends zeros and says of them what it likes.
struct Liar {
    transport: Tcp,
    _memory: HostRegion,
}

impl Liar {
    fn new() -> Self {
        let made = std::cell::RefCell::new(None);
        let make = |config: &ConnectorConfig, greeting: bytes::Bytes| -> Arc<dyn Transport> {
            let (tcp, key) =
                (TcpConfig::try_from(TcpConfigFile::default()).unwrap(), ClusterKey::new(KEY.as_bytes()).unwrap());
            *made.borrow_mut() = Some(Tcp::bind(tcp, key, config.peer().clone(), greeting.clone()).unwrap());
            opened(config, greeting)
        };
        drop(Engine::new(&setup(Setup::prefill()), &make));
        let transport: Tcp = made.into_inner().unwrap();
        let memory = HostRegion::shareable(4 << 20).unwrap();
        let file = MemoryFile { file: Arc::clone(memory.file().unwrap()), offset: 0 };
        let region = Memory { address: memory.as_ptr(), bytes: memory.len(), kind: MemoryKind::Host, file: Some(file) };
        // SAFETY: the transport is dropped before the memory, which nobody writes.
        unsafe { transport.register(region) }.unwrap();
        Self { transport, _memory: memory }
    }

    /// The peer that grants, its grant's window, and where what it asks for goes.
    fn wait_grant(&self) -> (PeerId, GrantKey, WindowShape, Grant) {
        let (deadline, mut events) = (Instant::now() + PATIENCE, Vec::new());
        loop {
            self.transport.poll(&mut events, Duration::from_millis(10));
            for event in events.drain(..) {
                let Event::Message { peer, message } = event else { continue };
                if let Ok(Message::Grant(grant)) = codec::decode(*codec::VERSIONS.end(), &message) {
                    let windows: Vec<(GrantKey, Rect, WindowShape)> =
                        codec::decode_value("windows", grant.window.as_slice()).unwrap();
                    let (key, _, shape) = windows[0].clone();
                    return (peer, key, shape, grant);
                }
            }
            assert!(Instant::now() < deadline);
        }
    }

    /// Lends all that a grant asks for, and says that it has a digest.
    fn lend(&self, peer: &PeerId, key: GrantKey, shape: &WindowShape, grant: &Grant, digest: Digest) {
        let (transfer, generation) = (grant.transfer, grant.generation);
        let rect = grant.missing.as_slice()[0];
        let wrote = Wrote { transfer, generation, sequence: 0, rect, digest };
        let pieces = vec![Piece { region: RegionId::new(0), offset: 0, loops: vec![], run_bytes: shape.bytes() }];
        let source = Source::Pages(vec![Pages { bases: vec![0], pieces }]);
        let notification = codec::encode_wrote(*codec::VERSIONS.end(), &wrote).unwrap().into();
        let extents = vec![Extent::contiguous(0, shape.bytes())];
        self.transport.post(peer, Write { grant: key, sequence: 0, extents, source, notification }).unwrap();
    }

    /// Until the memory is the sender's again.
    fn wait_back(&self) {
        let (deadline, mut events, mut ended) = (Instant::now() + PATIENCE, Vec::new(), false);
        while !ended {
            self.transport.poll(&mut events, Duration::from_millis(10));
            ended |= events.drain(..).any(|event| matches!(event, Event::Posted { .. }));
            assert!(Instant::now() < deadline);
        }
    }
}

#[test]
fn bytes_that_are_not_what_their_sender_said_are_found_where_they_lie() {
    let liar = Liar::new();
    let mut decode = Engine::new(&setup(Setup::decode()), &opened);
    // Two whole blocks, of which the second is the last.
    let (request, blocks) = (fetch("d", 1, 8, liar.transport.local_address()), decode.blocks(3, 8));
    start_load(&mut decode, &request, &blocks, 0);
    let (peer, key, shape, grant) = liar.wait_grant();
    assert!(liar.transport.is_in_place(&peer, key));
    liar.lend(&peer, key, &shape, &grant, Digest::ZERO);
    let applied = decode.idle_until("the failure", |applied| !applied.failed.is_empty());
    assert_eq!(applied.failed[0].good_tokens, 0);
    assert_eq!(decode.metrics.snapshot().digest_mismatches_total, 1);
    assert!(!decode.cache.is_aliased(0, blocks[0]));
    (0..LAYERS).for_each(|layer| decode.store(layer, &blocks, 0..8));
    liar.wait_back();
}

/// All of it is lent and right, but the end of its transfer is decided while it is looked at.
#[test]
fn what_is_found_right_after_its_end_was_decided_is_not_taken_for_loaded() {
    let liar = Liar::new();
    let mut decode = Engine::new(&setup(Setup { tokens_per_block: LONG_BLOCK, ..Setup::decode() }), &opened);
    let blocks = decode.blocks(3, LONG);
    let (mut loaded, mut failed) = (0, 0);
    for number in 1..=100 {
        let request = fetch(&format!("d{number}"), number, LONG, liar.transport.local_address());
        start_load(&mut decode, &request, &blocks, 0);
        let (peer, key, shape, grant) = liar.wait_grant();
        assert!(liar.transport.is_in_place(&peer, key));
        liar.lend(&peer, key, &shape, &grant, zeros());
        let abort = Abort { transfer: grant.transfer, why: Verdict::failed(Reason::Stalled, "it gives up") };
        let abort = codec::encode(*codec::VERSIONS.end(), &Message::Abort(abort)).unwrap();
        liar.transport.send(&peer, abort.into()).unwrap();
        let applied = decode.idle_until("the end", |applied| !applied.failed.is_empty() || !applied.loaded.is_empty());
        let aliased = (0..LAYERS).all(|layer| decode.cache.is_aliased(layer, blocks[0]));
        match &applied.failed[..] {
            [] => assert!(aliased, "nobody reads it where it lies"),
            [failure] => assert_eq!((failure.good_tokens, aliased), (0, false)),
            more => panic!("{more:?}"),
        }
        loaded += applied.loaded.len();
        failed += applied.failed.len();
        // A load that began may go on when it is reported.
        if let Hold::Until { .. } = decode.finish(&request, &blocks, EngineFinish::Complete) {
            decode.idle_until("the release", |applied| applied.released == [request.id.clone()]);
        }
        decode.idle_step();
        assert!(!decode.cache.is_aliased(0, blocks[0]));
        liar.wait_back();
    }
    eprintln!("{loaded} were loaded, {failed} failed");
    assert!(failed > 0, "the end came too late each time");
}

/// Tokens whose digest takes longer than a message, in as many blocks as there can be.
const LONG: u32 = 40 * LONG_BLOCK;
const LONG_BLOCK: u32 = 64;

/// The digest of as many tokens of zeros.
fn zeros() -> Digest {
    let mut digest = Digest::ZERO;
    for (layer, plane) in (0..LAYERS).flat_map(|layer| [(layer, 0), (layer, 1)]) {
        for (head, token) in (0..HEADS).flat_map(|head| (0..LONG).map(move |token| (head, token))) {
            digest.add_run(run_hash(LayerId::new(layer), plane, head, token, &[0; 4 * DIM]));
        }
    }
    digest
}
