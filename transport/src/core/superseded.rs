//! Starts of engines that a later start replaced.

use std::collections::VecDeque;

use kvferry_protocol::PeerId;

/// How many are remembered; older ones could come back, long after their process was replaced this many times.
const MAX_REMEMBERED: usize = 4096;

/// Peers of which nothing is accepted any more.
#[derive(Default)]
pub(crate) struct Superseded {
    replaced: VecDeque<PeerId>,
    /// The start of each engine's place that was met last, with a session or without one by now.
    met: VecDeque<PeerId>,
}

impl Superseded {
    /// A session with this start begins: the one that was met before it is replaced, also if it is away just now.
    pub(crate) fn meet(&mut self, peer: &PeerId) {
        if self.met.contains(peer) {
            return;
        }
        let before = self.met.iter().position(|known| is_other_start(known, peer));
        if let Some(before) = before.and_then(|at| self.met.remove(at)) {
            remember(&mut self.replaced, before);
        }
        remember(&mut self.met, peer.clone());
    }

    pub(crate) fn contains(&self, peer: &PeerId) -> bool {
        self.replaced.contains(peer)
    }
}

fn remember(peers: &mut VecDeque<PeerId>, peer: PeerId) {
    if peers.len() >= MAX_REMEMBERED {
        peers.pop_front();
    }
    peers.push_back(peer);
}

/// Whether both are the same place in the same engine, but of different starts.
pub(crate) fn is_other_start(a: &PeerId, b: &PeerId) -> bool {
    a.engine == b.engine && a.pp_rank == b.pp_rank && a.tp_rank == b.tp_rank && a.incarnation != b.incarnation
}
