//! Starts of engines that a later start replaced.

use std::collections::VecDeque;

use kvferry_protocol::PeerId;

/// How many are remembered; older ones could come back, long after their process was replaced this many times.
const MAX_REMEMBERED: usize = 4096;

/// Peers of which nothing is accepted any more.
#[derive(Default)]
pub(crate) struct Superseded(VecDeque<PeerId>);

impl Superseded {
    pub(crate) fn add(&mut self, peer: PeerId) {
        if self.contains(&peer) {
            return;
        }
        if self.0.len() >= MAX_REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back(peer);
    }

    pub(crate) fn contains(&self, peer: &PeerId) -> bool {
        self.0.contains(peer)
    }
}

/// Whether both are the same place in the same engine, but of different starts.
pub(crate) fn is_other_start(a: &PeerId, b: &PeerId) -> bool {
    a.engine == b.engine && a.pp_rank == b.pp_rank && a.tp_rank == b.tp_rank && a.incarnation != b.incarnation
}
