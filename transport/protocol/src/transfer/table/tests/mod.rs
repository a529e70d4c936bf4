//! Every machine in every state that inputs lead to, with every input: what comes of it is what the table says.

mod early;
mod lease;
mod receiver;
mod sender;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use crate::digest::Digest;
use crate::ids::{Generation, TransferId};
use crate::manifest::{Fingerprint, KvDtype, Manifest, Options, Planes, Rope, RopeStyle, ScalePer, Scales};
use crate::message::{
    Abort, Ended, EngineBytes, Grant, HashBytes, Message, Missing, Offer, OpaqueKey, Reason, Renew, Spare, Stop,
    Stopped, Verdict, WindowBytes, Working,
};
use crate::transfer::{MessageKind, Rect, Time};

const TOKENS: u32 = 4;
const LAYERS: u16 = 1;

fn id() -> TransferId {
    TransferId::new(1)
}

fn all() -> Rect {
    Rect::new(0..TOKENS, 0..LAYERS).unwrap()
}

fn later(now: Time) -> Time {
    now + Duration::from_secs(3600)
}

/// A message of a kind; `other` names another transfer, or gives the second of two texts.
fn message(kind: MessageKind, transfer: TransferId, generation: Generation, variant: usize) -> Message {
    let why = if variant == 0 { Verdict::Cancelled } else { Verdict::failed(Reason::Engine, "engine") };
    match kind {
        MessageKind::Manifest => Message::Manifest(Box::new(manifest())),
        MessageKind::Offer => {
            let held = if variant == 0 { all() } else { Rect::new(0..1, 0..LAYERS).unwrap() };
            Message::Offer(Offer { transfer, held })
        }
        MessageKind::Grant => {
            let missing = if variant == 0 { all() } else { Rect::new(0..TOKENS + 1, 0..LAYERS).unwrap() };
            let (missing, window) = (Missing::new(vec![missing]).unwrap(), WindowBytes::default());
            Message::Grant(Grant { transfer, generation, key: OpaqueKey::new(7), ttl_ms: 1000, window, missing })
        }
        MessageKind::Renew => Message::Renew(Renew { transfer, ttl_ms: 1000 }),
        MessageKind::Stop => Message::Stop(Stop { transfer, generation }),
        MessageKind::Stopped => Message::Stopped(Stopped { transfer, generation }),
        MessageKind::Abort => Message::Abort(Abort { transfer, why }),
        MessageKind::Ended => {
            let verdict = if variant == 0 { Verdict::Done } else { why };
            Message::Ended(Ended { transfer, verdict })
        }
        MessageKind::Engine => Message::Engine(EngineBytes::new(vec![1]).unwrap()),
        MessageKind::Working => Message::Working(Working { transfer }),
        MessageKind::Spare => {
            let hashes = HashBytes::new(vec![7; HashBytes::EACH]).unwrap();
            Message::Spare(Spare { transfer, first_token: 0, tokens_per_block: 16, hashes })
        }
    }
}

fn manifest() -> Manifest {
    Manifest {
        model: "model".into(),
        model_fingerprint: Fingerprint([7; 32]),
        kv_dtype: KvDtype::Bf16,
        layers: LAYERS,
        kv_heads: 1,
        head_size_k: 64,
        head_size_v: 64,
        planes: Planes::KeyValue,
        rope: Rope {
            style: RopeStyle::Half,
            theta_bits: 10_000.0f64.to_bits(),
            rotary_elements: 64,
            scaling: "none".into(),
        },
        scales: Scales { per: ScalePer::Layer, fingerprint: Fingerprint([9; 32]) },
        hash_scheme: "h1".into(),
        digest_scheme: "d1".into(),
        options: Options::default(),
    }
}

fn digest() -> Digest {
    Digest::new(7)
}

/// One machine with what its driver knows of it.
trait Run: Clone {
    /// An input, in one of its forms.
    type Step: Copy;
    type Key: Ord;

    /// What makes two runs alike: one of them is followed.
    fn key(&self) -> Self::Key;
    fn steps() -> Vec<Self::Step>;
    /// Gives an input and checks what comes of it; `false` if it cannot be given here.
    fn give(&mut self, step: Self::Step, seen: &mut Seen) -> bool;
    /// Notes the state that it is in.
    fn note(&self, seen: &mut Seen);
}

/// States, and pairs of a state and an input, that were seen.
#[derive(Default)]
struct Seen {
    states: BTreeSet<(&'static str, bool)>,
    pairs: BTreeSet<(&'static str, bool, &'static str)>,
}

/// Follows all inputs from all runs that are not alike, breadth first.
fn explore<R: Run>(starts: Vec<R>, seen: &mut Seen) {
    let (mut known, mut next) = (BTreeSet::new(), VecDeque::new());
    for start in starts {
        start.note(seen);
        known.insert(start.key());
        next.push_back(start);
    }
    let steps = R::steps();
    while let Some(run) = next.pop_front() {
        for &step in &steps {
            let mut then = run.clone();
            if then.give(step, seen) && known.insert(then.key()) {
                then.note(seen);
                next.push_back(then);
            }
        }
    }
}
