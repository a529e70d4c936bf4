//! A peer that holds the key and lies.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Engine, HEADS, LAYERS, PATIENCE, Setup, fetch, keep, start_load, wait_until_free};
use kvferry::config::ConnectorConfig;
use kvferry::contract::{Scheduler, Worker};
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{RawWindow, Shard, WindowShape};
use kvferry_protocol::message::{
    Ended, Grant, HashBytes, Message, Missing, OpaqueKey, Renew, Spare, Verdict, WindowBytes, Working, Wrote,
};
use kvferry_protocol::pages::Extent;
use kvferry_protocol::transfer::Rect;
use kvferry_protocol::{EngineId, Generation, Incarnation, LayerId, PeerId, PpRank, TpRank, TransferId, codec};
use kvferry_transport::testing::{Flow, Proxy, ProxyPlan, Towards};
use kvferry_transport::{
    Event, FaultPlan, GrantKey, LoopbackConfig, LoopbackNetwork, PeerAddress, Slab, Source, Transport, Write,
};

/// A transport without a connector, that says what it likes.
struct Liar {
    transport: Arc<dyn Transport>,
    waiting: Vec<Event>,
}

#[derive(Debug)]
struct Bytes(Vec<u8>);

impl Slab for Bytes {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}

/// What a session between two endpoints of this release speaks.
const VERSION: u16 = *codec::VERSIONS.end();

/// What the connector puts into a Grant for each window.
type Windows = Vec<(GrantKey, Rect, WindowShape)>;

impl Liar {
    fn new(network: &LoopbackNetwork, setup: &Setup) -> Self {
        let transport = std::cell::RefCell::new(None);
        let make = |config: &ConnectorConfig, greeting: bytes::Bytes| -> Arc<dyn Transport> {
            // An engine is made for its greeting only, under another name and on a network of its own.
            let made =
                network.endpoint(config.peer().clone(), greeting.clone(), LoopbackConfig::default(), FaultPlan::NONE);
            *transport.borrow_mut() = Some(Arc::new(made) as Arc<dyn Transport>);
            let other = LoopbackNetwork::new();
            Arc::new(other.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE))
        };
        drop(Engine::new(setup, &make));
        Self { transport: transport.into_inner().unwrap(), waiting: Vec::new() }
    }

    fn address(&self) -> PeerAddress {
        self.transport.local_address()
    }

    fn wait<T>(&mut self, mut wanted: impl FnMut(&Event) -> Option<T>) -> T {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for (at, event) in self.waiting.iter().enumerate() {
                if let Some(found) = wanted(event) {
                    self.waiting.remove(at);
                    return found;
                }
            }
            assert!(Instant::now() < deadline, "{:?}", self.waiting);
            self.transport.poll(&mut self.waiting, Duration::from_millis(10));
        }
    }

    fn wait_grant(&mut self) -> (PeerId, Grant, Windows) {
        self.wait(|event| {
            let Event::Message { peer, message } = event else { return None };
            let Ok(Message::Grant(grant)) = codec::decode(VERSION, message) else { return None };
            let windows = codec::decode_value("windows", grant.window.as_slice()).unwrap();
            Some((peer.clone(), grant, windows))
        })
    }

    /// Says a word, in whatever version.
    fn say(&self, peer: &PeerId, version: u16, message: &Message) {
        self.transport.send(peer, codec::encode(version, message).unwrap().into()).unwrap();
    }

    fn write(&self, peer: &PeerId, key: GrantKey, wrote: &Wrote, extents: Vec<Extent>, bytes: Vec<u8>) {
        let notification = codec::encode_wrote(VERSION, wrote).unwrap().into();
        let source = Source::Packed(Arc::new(Bytes(bytes)));
        self.transport
            .post(peer, Write { grant: key, sequence: wrote.sequence, extents, source, notification })
            .unwrap();
    }
}

#[test]
fn nothing_changes_under_a_guard_once_a_layer_is_verified() {
    let network = LoopbackNetwork::new();
    let mut liar = Liar::new(&network, &Setup::prefill());
    let make = |config: &ConnectorConfig, greeting: bytes::Bytes| -> Arc<dyn Transport> {
        Arc::new(network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE))
    };
    // One block of four tokens, layers outside planes inside the block: layer 0 is the window's first stretch.
    let mut decode = Engine::new(&Setup { layout: "BLPNHC", ..Setup::decode() }, &make);
    let request = fetch("d", 1, 4, liar.address());
    let blocks = decode.blocks(0, 4);
    start_load(&mut decode, &request, &blocks, 0);
    let (peer, grant, windows) = liar.wait_grant();
    let (key, _, shape) = &windows[0];
    let layer_bytes = shape.bytes() / u64::from(LAYERS);
    // Layer 0 as it should be: zeros, whose digest the receiver's own memory tells.
    let digest_of = |engine: &Engine, layers: std::ops::Range<u16>| -> Digest {
        use kvferry_kernels::copy::{self, RegionTable};
        use kvferry_protocol::layout::{CacheView, Selection};
        let regions = engine.cache.regions().iter().map(|region| (region.as_ptr(), region.len())).collect();
        // SAFETY: the cache is alive; this is a test.
        let table = unsafe { RegionTable::new(regions) };
        let view =
            CacheView { layout: engine.cache.layout(), shard: Shard::default(), blocks: &blocks, first_token: 0 };
        copy::digest(&view, &Selection { layers, heads: 0..HEADS, tokens: 0..4 }, &table).unwrap()
    };
    let transfer = grant.transfer;
    let generation: Generation = grant.generation;
    let wrote = |sequence, layers: std::ops::Range<u16>, digest| Wrote {
        transfer,
        generation,
        sequence,
        rect: Rect::new(0..4, layers).unwrap(),
        digest,
    };
    let good = digest_of(&decode, 0..1);
    let first = Extent::contiguous(0, layer_bytes);
    liar.write(&peer, *key, &wrote(0, 0..1, good), vec![first.clone()], vec![0; layer_bytes as usize]);
    // The engine may run: layer 0 is verified.
    decode.idle_until("the start", |applied| !applied.loaded.is_empty());
    let guard = decode.cache.guard_read(&blocks, 0..1).unwrap();
    let before = digest_of(&decode, 0..1);
    assert_eq!(before, good);
    // The liar writes layer 0 once more, and says that it was the others. Their bytes are what it never sent.
    let rest = digest_of(&decode, 1..2);
    liar.write(&peer, *key, &wrote(1, 1..2, rest), vec![first], vec![0xff; layer_bytes as usize]);
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_millis(500) {
        assert_eq!(digest_of(&decode, 0..1), good, "bytes changed under a read guard, after they were verified");
    }
    drop(guard);
}

#[test]
fn a_digest_of_what_landed_is_no_word_about_what_did_not() {
    use kvferry_protocol::digest::run_hash;
    let network = LoopbackNetwork::new();
    let mut liar = Liar::new(&network, &Setup::prefill());
    let make = |config: &ConnectorConfig, greeting: bytes::Bytes| -> Arc<dyn Transport> {
        Arc::new(network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE))
    };
    let mut decode = Engine::new(&Setup { layout: "BLPNHC", ..Setup::decode() }, &make);
    let request = fetch("d", 1, 4, liar.address());
    let blocks = decode.blocks(0, 4);
    start_load(&mut decode, &request, &blocks, 0);
    let (peer, grant, windows) = liar.wait_grant();
    let (key, _, shape) = &windows[0];
    let layer_bytes = shape.bytes() / u64::from(LAYERS);
    let run_bytes = shape.layout().shape().run_bytes[0] as usize;
    let mut digest = Digest::ZERO;
    for (plane, head) in (0..2).flat_map(|plane| (0..HEADS).map(move |head| (plane, head))) {
        let run = vec![7; run_bytes];
        (0..4).for_each(|token| digest.add_run(run_hash(LayerId::new(0), plane, head, token, &run)));
    }
    // Layer 0 lands, with its own digest; but it is said to be layer 1.
    let Grant { transfer, generation, .. } = grant;
    let wrote = Wrote { transfer, generation, sequence: 0, rect: Rect::new(0..4, 1..2).unwrap(), digest };
    let bytes = vec![7; layer_bytes as usize];
    liar.write(&peer, *key, &wrote, vec![Extent::contiguous(0, layer_bytes)], bytes);
    let applied = decode.idle_until("the failure", |applied| !applied.failed.is_empty());
    assert!(applied.failed[0].reason.contains("digest"), "{:?}", applied.failed);
}

#[test]
fn preempting_a_send_does_not_wait_for_its_receivers_word() {
    let network = LoopbackNetwork::new();
    let mut liar = Liar::new(&network, &Setup::decode());
    let make = |config: &ConnectorConfig, greeting: bytes::Bytes| -> Arc<dyn Transport> {
        Arc::new(network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE))
    };
    let mut prefill = Engine::new(
        &Setup { extra: "transfer_deadline_ms = 60000\nverdict_timeout_ms = 60000", ..Setup::prefill() },
        &make,
    );
    liar.transport.connect(&prefill.address()).unwrap();
    liar.wait(|event| matches!(event, Event::Up { .. }).then_some(()));
    let source = keep("p", 1, 8, Some(peer("decode")));
    let blocks = prefill.blocks(0, 8);
    prefill.scheduler.allocated(&source, &blocks, 0, 0).unwrap();
    prefill.prefill_step(&source, &blocks, 0..4);
    // The other side never answers.
    let begin = Instant::now();
    prefill.worker.preempted(std::slice::from_ref(&source.id));
    assert!(begin.elapsed() < PATIENCE, "the model's thread stood still for {:?}", begin.elapsed());
    drop(prefill.cache.guard_write(&blocks, 0..LAYERS).expect("nothing reads the pages"));
}

#[test]
fn preempting_a_send_does_not_wait_for_a_receiver_that_takes_bytes_and_answers_nothing() {
    let make = |config: &ConnectorConfig, greeting| kvferry::open_transport(config, greeting).unwrap();
    // The payload goes through the proxy.
    let extra =
        "paths = ['tcp']\ntransfer_deadline_ms = 600000\nverdict_timeout_ms = 600000\nsilence_deadline_ms = 600000";
    let common = Setup { psk: Some("a key for the whole cluster"), extra, ..Setup::prefill() };
    let mut prefill = Engine::new(&common, &make);
    let mut decode = Engine::new(&Setup { name: "decode", role: "decode", ..common }, &make);
    let PeerAddress::Tcp(address) = prefill.address() else { panic!("TCP") };
    let proxy = Proxy::new(address, ProxyPlan::default());
    let wanted = fetch("d", 1, 16, PeerAddress::Tcp(proxy.address()));
    let target = decode.blocks(0, 16);
    start_load(&mut decode, &wanted, &target, 0);
    let (peer, _) = prefill.worker.messages().recv_timeout(PATIENCE).unwrap();
    // The grant follows the question; it must be here before nothing comes through any more.
    let began = Instant::now();
    while prefill.metrics.snapshot().early_grants_live == 0 {
        assert!(began.elapsed() < PATIENCE, "no grant came");
        std::thread::yield_now();
    }
    let source = keep("p", 1, 16, Some(peer));
    let blocks = prefill.blocks(0, 16);
    prefill.scheduler.allocated(&source, &blocks, 0, 0).unwrap();
    proxy.set_flow(Towards::Target, Flow::Hold);
    let before = proxy.carried(Towards::Dialler);
    prefill.prefill_step(&source, &blocks, 0..16);
    // The prompt's K/V is longer than all that is said beside it.
    let bytes = 16 * u64::from(LAYERS) * u64::from(HEADS) * 2 * 32;
    let began = Instant::now();
    while proxy.carried(Towards::Dialler) < before + bytes / 2 {
        assert!(began.elapsed() < PATIENCE, "nothing is sent");
        std::thread::yield_now();
    }
    let (done, is_done) = crossbeam_channel::bounded(1);
    std::thread::scope(|scope| {
        let worker = &mut prefill.worker;
        let id = source.id.clone();
        scope.spawn(move || {
            worker.preempted(&[id]);
            done.send(()).unwrap();
        });
        let outcome = is_done.recv_timeout(PATIENCE);
        proxy.set_flow(Towards::Target, Flow::Pass);
        outcome.expect("the model's thread does not stand still");
    });
    drop(prefill.cache.guard_write(&blocks, 0..LAYERS).expect("nothing reads the pages"));
    decode.idle_until("the load's end", |applied| !applied.failed.is_empty() || !applied.loaded.is_empty());
    wait_until_free(&mut prefill, &mut decode);
}

#[test]
fn grants_without_end_take_no_memory() {
    const GRANTS: u32 = 2000;
    let network = LoopbackNetwork::new();
    let mut liar = Liar::new(&network, &Setup::decode());
    let make = |config: &ConnectorConfig, greeting: bytes::Bytes| -> Arc<dyn Transport> {
        Arc::new(network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE))
    };
    let mut prefill = Engine::new(&Setup::prefill(), &make);
    liar.transport.connect(&prefill.address()).unwrap();
    liar.wait(|event| matches!(event, Event::Up { .. }).then_some(()));
    let source = keep("p", 1, 8, Some(peer("decode")));
    let blocks = prefill.blocks(0, 8);
    prefill.scheduler.allocated(&source, &blocks, 0, 0).unwrap();
    prefill.prefill_step(&source, &blocks, 0..4);
    let rect = Rect::new(4..8, 0..LAYERS).unwrap();
    let shape = WindowShape::try_from(RawWindow {
        order: "BLPNHC".parse().unwrap(),
        tokens_per_block: 4,
        blocks: 2,
        run_bytes: vec![32; 2],
        layers: 0..LAYERS,
        heads: 0..HEADS,
        first_token: 0,
    })
    .unwrap();
    let windows: Windows = vec![(GrantKey(1), rect, shape); 1500];
    let window = WindowBytes::new(codec::encode_value("windows", VERSION, &windows).unwrap()).unwrap();
    let before = resident_bytes();
    for generation in 0..GRANTS {
        let grant = Grant {
            transfer: TransferId::new(1),
            generation: Generation::new(generation),
            key: OpaqueKey::new(1),
            ttl_ms: 10_000,
            window: window.clone(),
            missing: Missing::new(vec![rect]).unwrap(),
        };
        let message: bytes::Bytes = codec::encode(VERSION, &Message::Grant(grant)).unwrap().into();
        while liar.transport.send(&peer("prefill"), message.clone()).is_err() {
            std::thread::yield_now();
        }
    }
    // The lease answers the last of them only when it has taken all before.
    let renew = Message::Renew(Renew { transfer: TransferId::new(1), ttl_ms: 10_000 });
    liar.transport.send(&peer("prefill"), codec::encode(VERSION, &renew).unwrap().into()).unwrap();
    liar.wait(|event| {
        let Event::Message { message, .. } = event else { return None };
        matches!(codec::decode(VERSION, message), Ok(Message::Working(_))).then_some(())
    });
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 100 << 20, "{} MiB for one transfer", grown >> 20);
}

#[test]
fn a_word_in_another_version_than_the_sessions_ends_the_session() {
    let network = LoopbackNetwork::new();
    let mut liar = Liar::new(&network, &Setup::decode());
    let make = |config: &ConnectorConfig, greeting: bytes::Bytes| -> Arc<dyn Transport> {
        Arc::new(network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE))
    };
    let prefill = Engine::new(&Setup::prefill(), &make);
    liar.transport.connect(&prefill.address()).unwrap();
    let version = liar.wait(|event| if let Event::Up { version, .. } = event { Some(*version) } else { None });
    assert_eq!(version, VERSION);
    let word = Message::Working(Working { transfer: TransferId::new(1) });
    // As agreed on; then as the release before would write it.
    liar.say(&peer("prefill"), VERSION, &word);
    liar.say(&peer("prefill"), VERSION - 1, &word);
    let reason =
        liar.wait(|event| if let Event::Down { reason, .. } = event { Some(reason.to_string()) } else { None });
    let want = format!("version {} is spoken in a session of version {VERSION}", VERSION - 1);
    assert!(reason.contains(&want), "{reason}");
}

#[test]
fn an_offer_about_somebody_elses_transfer_disturbs_nobody() {
    let network = LoopbackNetwork::new();
    let mut liar = Liar::new(&network, &Setup { name: "liar", ..Setup::decode() });
    let make = |config: &ConnectorConfig, greeting: bytes::Bytes| -> Arc<dyn Transport> {
        Arc::new(network.endpoint(config.peer().clone(), greeting, LoopbackConfig::default(), FaultPlan::NONE))
    };
    // Without the receiver's word the lease is held for longer than the test waits, and nothing makes the receiver say it again.
    // The payload goes through the proxy.
    let extra = "paths = ['tcp']\ntransfer_deadline_ms = 600000\nverdict_timeout_ms = 600000\nlease_ttl_ms = 600000";
    let mut prefill = Engine::new(&Setup { extra, ..Setup::prefill() }, &make);
    let mut decode = Engine::new(&Setup { extra, ..Setup::decode() }, &make);
    liar.transport.connect(&prefill.address()).unwrap();
    liar.wait(|event| matches!(event, Event::Up { .. }).then_some(()));
    let source = keep("p", 1, 8, Some(peer("decode")));
    let blocks = prefill.blocks(0, 8);
    prefill.scheduler.allocated(&source, &blocks, 0, 0).unwrap();
    prefill.prefill_step(&source, &blocks, 0..8);
    let hashes = HashBytes::new(vec![7; HashBytes::EACH]).unwrap();
    let transfer = TransferId::new(1);
    for first_token in [0, u32::MAX - 3] {
        let spare = Spare { transfer, first_token, tokens_per_block: 4, hashes: hashes.clone() };
        liar.say(&peer("prefill"), VERSION, &Message::Spare(spare));
        // It is refused; the word that would follow such a refusal is the liar's, and no one else's.
        liar.wait(|event| {
            let Event::Message { message, .. } = event else { return None };
            let refused = Message::Ended(Ended { transfer, verdict: Verdict::Cancelled });
            (codec::decode(VERSION, message) == Ok(refused)).then_some(())
        });
    }
    let wanted = fetch("d", 1, 8, prefill.address());
    let target = decode.blocks(0, 8);
    start_load(&mut decode, &wanted, &target, 0);
    decode.idle_until("the load", |applied| !applied.loaded.is_empty());
    let metrics = Arc::clone(&prefill.metrics);
    prefill.idle_until("the receiver's word", |_| metrics.snapshot().transfers_done_total.total() == 1);
}

/// An engine's only worker, in its first start.
fn peer(engine: &str) -> PeerId {
    PeerId {
        engine: EngineId::new(engine).unwrap(),
        incarnation: Incarnation::new(1),
        pp_rank: PpRank::new(0),
        tp_rank: TpRank::new(0),
    }
}

fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 4096
}
