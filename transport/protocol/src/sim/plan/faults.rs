//! What goes wrong, and when.

use crate::transfer::{ReceiverState, SenderState};

use super::{MS, Plan, Rng, Size, index};

#[derive(Debug, Clone, Copy)]
pub(in crate::sim) enum Fault {
    /// The network between two ranks fails, and both learn of it.
    Cut { link: usize },
    /// Nothing gets through to prefill, to decode, or to either, and nobody is told.
    Partition { link: usize, to: [bool; 2], lasts: u64 },
    /// An engine is gone with all its ranks and all they knew; a new incarnation comes.
    Crash { engine: usize, away: u64 },
    /// A rank's process takes no input for a while, and its clock goes on.
    Stop { node: usize, lasts: u64 },
    /// A rank's clock jumps forward.
    Jump { node: usize, by: u64 },
    /// A rank's driver is slow for a while.
    Slow { node: usize, lasts: u64, pace: u64 },
}

/// Something that is done to a machine the moment it is in a state.
#[derive(Debug, Clone, Copy)]
pub(in crate::sim) struct Ambush {
    pub(in crate::sim) state: AmbushState,
    pub(in crate::sim) up: bool,
    pub(in crate::sim) act: Act,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sim) enum AmbushState {
    Receiver(ReceiverState),
    Sender(SenderState),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sim) enum Act {
    Cancel,
    Fail,
    Cut,
    /// The session ends now, on this side.
    Down,
    CrashPeer,
    Stop,
    /// The clock jumps to where every wait is over.
    Jump,
    /// The peer says its last words again.
    Repeat,
}

/// One in so many; never if 0.
#[derive(Debug, Clone, Copy)]
pub(in crate::sim) struct Odds {
    /// A part of a write is changed in flight.
    pub(in crate::sim) corrupt: u64,
    /// A message is said again in the next session.
    pub(in crate::sim) repeat: u64,
    /// A message is said twice in its session.
    pub(in crate::sim) echo: u64,
    /// A message that is not for this side follows a message.
    pub(in crate::sim) stray: u64,
    /// A delay is long.
    pub(in crate::sim) slow: u64,
    /// Bytes that landed cannot be hashed.
    pub(in crate::sim) unhashed: u64,
    /// A grant cannot be made.
    pub(in crate::sim) ungranted: u64,
    /// A write goes by a device that does not need its process, on either side.
    pub(in crate::sim) device: u64,
    /// Posts of a session that ended are told to be over after the session's end, not before it.
    pub(in crate::sim) late_posts: u64,
}

impl Odds {
    pub(super) fn draw(rng: &mut Rng, calm: bool) -> Self {
        let mut draw = |once_in, odds| if rng.once_in(once_in) { odds } else { 0 };
        Self {
            corrupt: draw(3, 25),
            repeat: if calm { 0 } else { draw(2, 3) },
            echo: if calm { 0 } else { draw(4, 12) },
            stray: if calm { 0 } else { draw(8, 15) },
            slow: draw(2, 20),
            unhashed: draw(4, 40),
            ungranted: draw(3, 20),
            device: draw(3, 2),
            late_posts: draw(2, 2),
        }
    }
}

impl Ambush {
    pub(super) fn draw(rng: &mut Rng) -> Option<Self> {
        if !rng.once_in(3) {
            return None;
        }
        let state = if rng.once_in(2) {
            AmbushState::Receiver(ReceiverState::ALL[index(rng, 0..ReceiverState::ALL.len())])
        } else {
            AmbushState::Sender(SenderState::ALL[index(rng, 0..SenderState::ALL.len())])
        };
        let act = match rng.within(0..13) {
            0..=2 => Act::Cancel,
            3..=4 => Act::Fail,
            5 => Act::Cut,
            6..=7 => Act::Down,
            8 => Act::CrashPeer,
            9 => Act::Stop,
            10..=11 => Act::Jump,
            _ => Act::Repeat,
        };
        Some(Self { state, up: !rng.once_in(3), act })
    }
}

pub(super) fn draw(rng: &mut Rng, plan: &Plan, size: Size, span: u64) -> Vec<(u64, Fault)> {
    let count = match size {
        Size::Small => rng.within(0..6),
        Size::Middle => rng.within(0..12),
        Size::Large => rng.within(0..50),
    };
    let mut faults = Vec::new();
    for _ in 0..count {
        let at = rng.within(0..2 * span);
        let (link, node) = (index(rng, 0..plan.links.len()), index(rng, 0..plan.nodes.len()));
        let engine = index(rng, 0..plan.engines.len());
        match rng.within(0..10) {
            0..=2 => faults.push((at, Fault::Cut { link })),
            3..=4 => {
                let to = [[true, true], [true, false], [false, true]][index(rng, 0..3)];
                let lasts = rng.within(20..900) * MS;
                // Of one pair of ranks, or of a whole rank.
                let links = if rng.once_in(2) { vec![link] } else { plan.nodes[node].links.clone() };
                faults.extend(links.into_iter().map(|link| (at, Fault::Partition { link, to, lasts })));
            }
            5 => faults.push((at, Fault::Crash { engine, away: rng.within(1..600) * MS })),
            6..=7 => {
                let lasts = rng.within(20..1500) * MS;
                // One rank, or all of an engine.
                let nodes = if rng.once_in(2) { node..node + 1 } else { plan.engines[engine].nodes.clone() };
                faults.extend(nodes.map(|node| (at, Fault::Stop { node, lasts })));
            }
            8 => faults.push((at, Fault::Jump { node, by: rng.within(1..2000) * MS })),
            _ => {
                let (lasts, pace) = (rng.within(50..1000) * MS, rng.within(5..40) * MS);
                faults.push((at, Fault::Slow { node, lasts, pace }));
            }
        }
    }
    faults
}
