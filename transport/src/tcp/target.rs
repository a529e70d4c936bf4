//! An address that is to be reached, and kept reached.
//!
//! States: `Waiting -> Dialling -> Up(session)`, back to `Waiting` from either. `Waiting` while the peer is up over a
//! session of another address, or that it dialled itself, changes nothing: the time comes again.

use std::time::{Duration, Instant};

use kvferry_protocol::PeerId;

use crate::core::SessionKey;

pub(crate) struct Target {
    /// Who was there the last time.
    pub(crate) peer: Option<PeerId>,
    pub(crate) state: TargetState,
    /// When it was dialled last.
    pub(crate) dialled_at: Option<Instant>,
    back_off: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TargetState {
    Waiting,
    Dialling,
    Up(SessionKey),
}

/// Waits that double, each shortened by a random part of its half.
pub(crate) struct BackOff {
    pub(crate) first: Duration,
    pub(crate) longest: Duration,
    pub(crate) random: u64,
}

impl Target {
    pub(crate) fn new(back_off: &BackOff) -> Self {
        Self { peer: None, state: TargetState::Waiting, dialled_at: None, back_off: back_off.first }
    }

    pub(crate) fn reached(&mut self, peer: &PeerId, session: SessionKey, back_off: &BackOff) {
        self.peer = Some(peer.clone());
        self.state = TargetState::Up(session);
        self.back_off = back_off.first;
    }

    /// Gives when to dial again.
    pub(crate) fn retry(&mut self, now: Instant, back_off: &mut BackOff) -> Instant {
        // xorshift64: any seed but 0.
        let mut random = back_off.random | 1;
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        back_off.random = random;
        let shorter = self.back_off.mul_f64((random % 1000) as f64 / 2000.0);
        self.state = TargetState::Waiting;
        let at = now + self.back_off - shorter;
        self.back_off = (self.back_off * 2).min(back_off.longest);
        at
    }
}
