//! What goes wrong, and when.

use crate::transfer::{ReceiverState, SenderState};

use super::{MS, Plan, Rng, Size, Weather, index};

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
    /// And something is being hashed.
    pub(in crate::sim) hashing: bool,
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
    /// The other side cancels its part.
    CancelPeer,
    Fail,
    Cut,
    /// The session ends now, on this side.
    Down,
    CrashPeer,
    Stop,
    /// The clock jumps to where every wait is over.
    Jump,
    /// The other side's clock does.
    JumpPeer,
    /// The other side's clock jumps to where its wait for a word is over.
    JumpPeerWord,
    /// What is hashed from now on cannot be hashed.
    Unhash,
    /// The peer says its last words again.
    Repeat,
    /// A peer that lies says all that there is to say.
    Lie,
    /// Grants, fences, hashes and ends of posts take long from now on, and the session ends.
    HoldDown,
    /// The same, and what is being hashed cannot be.
    HoldDownUnhash,
    /// Ends of posts take long from now on, and this side cancels.
    HoldCancel,
    /// The same, and the other side cancels.
    HoldCancelPeer,
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
    /// The driver hears of a write only a while after it landed.
    pub(in crate::sim) late_words: u64,
    /// A grant, a fence, a hash or the end of a post takes long.
    pub(in crate::sim) slow_work: u64,
}

impl Odds {
    pub(super) fn draw(rng: &mut Rng, weather: Weather) -> Self {
        let mut draw = |once_in, odds| if rng.once_in(once_in) { odds } else { 0 };
        let all = Self {
            corrupt: draw(3, 25),
            repeat: draw(2, 3),
            echo: draw(4, 4),
            stray: draw(8, 15),
            slow: draw(2, 20),
            unhashed: draw(4, 10),
            ungranted: draw(3, 20),
            device: draw(3, 2),
            late_posts: draw(2, 2),
            late_words: draw(2, 3),
            slow_work: draw(4, 3),
        };
        match weather {
            Weather::Rough => all,
            Weather::Calm => Self { repeat: 0, echo: 0, stray: 0, ..all },
            Weather::Fair => {
                Self { corrupt: 0, stray: 0, slow: 0, unhashed: 0, ungranted: 0, late_words: 0, slow_work: 0, ..all }
            }
        }
    }
}

impl Ambush {
    /// None, or some of them for one part.
    pub(super) fn draw(rng: &mut Rng) -> Vec<Self> {
        match rng.within(0..12) {
            0..=5 => Vec::new(),
            6..=7 => (0..rng.within(1..3)).map(|_| Self::draw_any(rng)).collect(),
            _ => Self::draw_script(rng),
        }
    }

    fn draw_any(rng: &mut Rng) -> Self {
        let state = if rng.once_in(2) {
            AmbushState::Receiver(ReceiverState::ALL[index(rng, 0..ReceiverState::ALL.len())])
        } else {
            AmbushState::Sender(SenderState::ALL[index(rng, 0..SenderState::ALL.len())])
        };
        Self { state, up: !rng.once_in(3), hashing: false, act: Act::draw(rng) }
    }

    /// Some in a row: the first ones lead to a state that is short and seldom, the last waits there.
    fn draw_script(rng: &mut Rng) -> Vec<Self> {
        use ReceiverState as R;
        let receiver = |state, up, act| Self { state: AmbushState::Receiver(state), up, hashing: false, act };
        let sender = |state, up, act| Self { state: AmbushState::Sender(state), up, hashing: false, act };
        let (mut act, up) = (Act::draw(rng), !rng.once_in(3));
        if rng.once_in(2) {
            act = [Act::JumpPeerWord, Act::JumpPeerWord, Act::Jump, Act::CrashPeer][index(rng, 0..4)];
        }
        let again = [receiver(R::Granted, true, Act::Down), receiver(R::Granting, true, Act::Down)];
        let hold = if rng.once_in(4) { Act::HoldDownUnhash } else { Act::HoldDown };
        match rng.within(0..16) {
            0 => vec![receiver(R::Granting, true, hold), receiver(R::GrantingRegrant, up, act)],
            1..=2 => vec![receiver(R::Granted, true, hold), receiver(R::FencingRegrant, up, act)],
            3..=6 => {
                let first = Self { hashing: true, ..receiver(R::Granted, true, hold) };
                vec![first, receiver(R::JudgingRegrant, up, act)]
            }
            // No grant without a session: what the session still says finds the receiver without one.
            7 => vec![receiver(R::Granting, true, Act::Down), receiver(R::Waiting, false, act)],
            // The same, and the sender has heard of a grant before.
            8..=9 => [&again[..], &[receiver(R::Waiting, false, act)]].concat(),
            10..=11 => {
                let last = [receiver(R::Waiting, false, Act::Cancel), receiver(R::Lingering, false, act)];
                [&again[..], &last].concat()
            }
            12..=13 => {
                let last = [receiver(R::Granting, true, hold), receiver(R::GrantingRegrant, up, act)];
                [&again[..1], &last].concat()
            }
            14 => vec![
                sender(SenderState::Granted, true, Act::HoldCancel),
                sender(SenderState::Aborting, true, if up { Act::Down } else { act }),
            ],
            _ => vec![sender(SenderState::Granted, true, Act::HoldCancelPeer), sender(SenderState::Ending, up, act)],
        }
    }
}

impl Act {
    /// Whether nothing more lies in wait for the state that it leads to.
    pub(in crate::sim) const fn leads_nowhere(self) -> bool {
        match self {
            Self::Cancel
            | Self::CancelPeer
            | Self::Fail
            | Self::Cut
            | Self::CrashPeer
            | Self::Stop
            | Self::Jump
            | Self::JumpPeer
            | Self::JumpPeerWord
            | Self::Repeat
            | Self::Lie => true,
            Self::Down
            | Self::Unhash
            | Self::HoldDown
            | Self::HoldDownUnhash
            | Self::HoldCancel
            | Self::HoldCancelPeer => false,
        }
    }

    fn draw(rng: &mut Rng) -> Self {
        match rng.within(0..18) {
            0..=2 => Self::Cancel,
            3 => Self::CancelPeer,
            4 => Self::Fail,
            5 => Self::Cut,
            6 => Self::Down,
            7..=8 => Self::CrashPeer,
            9 => Self::Stop,
            10..=11 => Self::Jump,
            12 => Self::JumpPeer,
            13..=14 => Self::JumpPeerWord,
            15 => Self::Unhash,
            _ => Self::Repeat,
        }
    }
}

pub(super) fn draw(rng: &mut Rng, plan: &Plan, size: Size, span: u64) -> Vec<(u64, Fault)> {
    match plan.weather {
        Weather::Fair => draw_fair(rng, plan, span),
        Weather::Calm => Vec::new(),
        Weather::Rough => draw_rough(rng, plan, size, span),
    }
}

/// Faults that no transfer may fail of: one cut or short partition a link, one short stop or slow spell a rank.
fn draw_fair(rng: &mut Rng, plan: &Plan, span: u64) -> Vec<(u64, Fault)> {
    let mut faults = Vec::new();
    for link in 0..plan.links.len() {
        let at = rng.within(0..2 * span);
        match rng.within(0..4) {
            0 => faults.push((at, Fault::Cut { link })),
            1 => {
                let to = [[true, true], [true, false], [false, true]][index(rng, 0..3)];
                faults.push((at, Fault::Partition { link, to, lasts: rng.within(1..150) * MS }));
            }
            _ => {}
        }
    }
    for node in 0..plan.nodes.len() {
        let (at, lasts) = (rng.within(0..2 * span), rng.within(1..100) * MS);
        match rng.within(0..4) {
            0 => faults.push((at, Fault::Stop { node, lasts })),
            1 => faults.push((at, Fault::Slow { node, lasts, pace: 3 * MS })),
            _ => {}
        }
    }
    faults
}

fn draw_rough(rng: &mut Rng, plan: &Plan, size: Size, span: u64) -> Vec<(u64, Fault)> {
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
