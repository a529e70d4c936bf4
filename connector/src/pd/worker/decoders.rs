//! What a peer's bytes go through in a worker, as functions of those bytes: what the fuzz targets run, and the test that replays
//! their corpora. None may panic, or keep a mover busy for what a short message claims.

use kvferry_protocol::layout::{CacheView, KvLayout, KvShape, Selection, Shard, plan, window_pages};
use kvferry_protocol::manifest::{self, Manifest, Planes, Rope, RopeStyle, ScalePer, Scales};
use kvferry_protocol::message::WindowBytes;
use kvferry_protocol::transfer::{Order, Rect};
use kvferry_protocol::{BlockId, EngineId, Incarnation, LayerId, PeerId, PpRank, TpRank, codec};
use kvferry_transport::GrantKey;

use super::card::WorkerCard;
use super::window::{GrantedWindow, Windows};

/// A decoder and its name, which is that of its fuzz target and of its corpus.
pub type Decoder = (&'static str, fn(&[u8]));

/// All of them.
pub const DECODERS: &[Decoder] = &[("greeting", greeting), ("windows", windows)];

/// What a peer says of itself when its session comes up.
///
/// # Panics
/// If a card is taken that is not this worker's kind of cache.
pub fn greeting(bytes: &[u8]) {
    let peer = PeerId {
        engine: EngineId::new("peer").expect("a legal name"),
        incarnation: Incarnation::new(1),
        tp_rank: TpRank::new(0),
        pp_rank: PpRank::new(0),
    };
    let ours = own_card();
    if let Ok(theirs) = ours.check(&peer, bytes) {
        assert_eq!((theirs.layers, theirs.order), (ours.layers, ours.order));
        assert!(theirs.held_heads().end <= theirs.manifest.kv_heads);
    }
}

/// What a grant carries: it is read, and planned for as a sender does.
///
/// # Panics
/// If a plan leaves the window that it was made for.
pub fn windows(bytes: &[u8]) {
    let Ok(bytes) = WindowBytes::new(bytes.to_vec()) else { return };
    let Ok(windows) = Windows::decode(&bytes) else { return };
    let source = KvLayout::packed(own_shape(), "LPBNHC".parse().expect("an order")).expect("it is small");
    let held: Vec<_> = (0..own_shape().blocks).map(BlockId::new).collect();
    // As many as an honest receiver sends.
    for window in windows.iter().take(8) {
        let shape = &window.shape;
        if shape.selection().tokens.end > own_shape().blocks * own_shape().tokens_per_block {
            continue; // The sender has no such tokens, and plans nothing.
        }
        let (layout, blocks) = (shape.layout(), shape.block_ids());
        let from = CacheView { layout: &source, shard: Shard::default(), blocks: &held, first_token: 0 };
        let (layers, tokens) = (window.rect.layers(), window.rect.tokens());
        let selection = Selection { layers, heads: shape.selection().heads, tokens };
        let Ok(plan) = plan(&from, &shape.view(&layout, &blocks), &selection) else { continue };
        for extent in plan.window_extents().into_iter().flatten().chain(window.margins().into_iter().flatten()) {
            let reach: u64 =
                extent.loops.iter().map(|each| u64::from(each.count.saturating_sub(1)) * each.stride).sum();
            assert!(extent.offset + reach + extent.run_bytes <= shape.bytes(), "{extent:?} of {shape:?}");
        }
    }
}

/// Seeds of the corpora: a good one of each decoder.
#[must_use]
pub fn seeds() -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let card = own_card();
    let other = WorkerCard { order: Order::PrefillFirst, ..own_card() };
    let greetings = [&card, &other].map(WorkerCard::encode).into_iter();
    let granted = |order: &str, tokens_per_block: u32, blocks: std::ops::Range<u32>| {
        let shape = KvShape { tokens_per_block, ..own_shape() };
        let layout = KvLayout::packed(shape, order.parse().expect("an order")).expect("it is small");
        let (layers, tokens) = (0..own_shape().layers, blocks.start * tokens_per_block..blocks.end * tokens_per_block);
        let ids: Vec<_> = blocks.rev().map(BlockId::new).collect();
        let shape = window_pages(&layout, Shard::default(), &ids, tokens.start, layers.clone(), 0..2).expect("it fits");
        let rect = Rect::new(tokens, layers).expect("it is not empty");
        GrantedWindow { key: GrantKey(9), rect, shape: shape.0 }
    };
    let one = vec![granted("BLPNHC", 4, 0..3)];
    let two = vec![granted("BHLPNC", 8, 1..2), granted("LPBNHC", 4, 4..8)];
    let version = *codec::VERSIONS.start();
    let windows = [one, two].map(|windows| Windows::encode(version, &windows).expect("it fits").as_slice().to_vec());
    vec![
        ("greeting", greetings.chain([vec![0; 4]]).collect()),
        ("windows", windows.into_iter().chain([vec![1, 0, 0]]).collect()),
    ]
}

fn own_shape() -> KvShape {
    KvShape { layers: 3, blocks: 8, heads: 2, tokens_per_block: 4, run_bytes: vec![16, 16] }
}

fn own_card() -> WorkerCard {
    let manifest = Manifest {
        model: "fuzz".into(),
        model_fingerprint: manifest::Fingerprint::default(),
        kv_dtype: manifest::KvDtype::Bf16,
        layers: 3,
        kv_heads: 2,
        head_size_k: 8,
        head_size_v: 8,
        planes: Planes::KeyValue,
        rope: Rope { style: RopeStyle::None, theta_bits: 0, rotary_elements: 0, scaling: "none".into() },
        scales: Scales { per: ScalePer::None, fingerprint: manifest::Fingerprint::default() },
        hash_scheme: "none".into(),
        digest_scheme: "kvferry-1".into(),
        options: manifest::Options::default(),
    };
    let shard = Shard { first_layer: LayerId::new(0), first_head: 0 };
    WorkerCard {
        version: WorkerCard::VERSION,
        manifest,
        shard,
        layers: 3,
        heads: 2,
        tp_size: 1,
        order: Order::DecodeFirst,
    }
}
