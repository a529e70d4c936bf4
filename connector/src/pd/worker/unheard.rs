//! What peers' engines said that this engine does not take yet.
//!
//! A dropped question would leave its load without an answer until the load's deadline, so a message that finds the engine's queue
//! full waits here, behind those that wait already. Who fills even that is told in the one way that reaches all its loads: its
//! session ends. It asks again in the next one.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use crossbeam_channel::{Sender, TrySendError};
use kvferry_protocol::PeerId;

/// Messages that wait for room in the engine's queue, in the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Unheard {
    waiting: VecDeque<(PeerId, Bytes)>,
    of_peer: BTreeMap<PeerId, Share>,
}

/// What waits of one peer.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    messages: usize,
    bytes: usize,
}

/// A peer has more waiting than it may.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{messages} messages of {bytes} bytes wait for this engine and it takes none: it is stopped or overloaded; ask less of it at \
     once"
)]
pub(super) struct Overflow {
    pub(super) messages: usize,
    pub(super) bytes: usize,
}

impl Unheard {
    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Hands a message to the engine, or lets it wait.
    pub(super) fn hear(
        &mut self,
        engine: &Sender<(PeerId, Bytes)>,
        peer: PeerId,
        message: Bytes,
    ) -> Result<(), Overflow> {
        self.hand_over(engine);
        let message = match self.waiting.is_empty() {
            true => match engine.try_send((peer, message)) {
                Ok(()) => return Ok(()),
                // An engine that is gone takes nothing any more; its connector ends soon.
                Err(TrySendError::Full(message) | TrySendError::Disconnected(message)) => message,
            },
            false => (peer, message),
        };
        let share = self.of_peer.entry(message.0.clone()).or_default();
        let next = Share { messages: share.messages + 1, bytes: share.bytes + message.1.len() };
        if next.messages > PEER_MESSAGES || next.bytes > PEER_BYTES {
            return Err(Overflow { messages: next.messages, bytes: next.bytes });
        }
        *share = next;
        self.waiting.push_back(message);
        Ok(())
    }

    /// Hands over what the engine has room for.
    pub(super) fn hand_over(&mut self, engine: &Sender<(PeerId, Bytes)>) {
        while let Some(message) = self.waiting.pop_front() {
            let (peer, bytes) = (message.0.clone(), message.1.len());
            match engine.try_send(message) {
                Ok(()) => self.forget(&peer, bytes),
                Err(TrySendError::Full(message) | TrySendError::Disconnected(message)) => {
                    return self.waiting.push_front(message);
                }
            }
        }
    }

    /// A peer's session ended: it asks again in the next one. Returns how many messages are dropped.
    pub(super) fn peer_down(&mut self, peer: &PeerId) -> u64 {
        let before = self.waiting.len();
        self.waiting.retain(|(of, _)| of != peer);
        self.of_peer.remove(peer);
        (before - self.waiting.len()) as u64
    }

    fn forget(&mut self, peer: &PeerId, bytes: usize) {
        let Some(share) = self.of_peer.get_mut(peer) else { return };
        *share = Share { messages: share.messages - 1, bytes: share.bytes - bytes };
        if share.messages == 0 {
            self.of_peer.remove(peer);
        }
    }
}

/// Messages of one peer that wait at most: as many as it may have loads at once, unless it is configured otherwise.
const PEER_MESSAGES: usize = 1024;
/// Bytes of one peer's messages that wait at most.
const PEER_BYTES: usize = 16 << 20;

#[cfg(test)]
mod tests {
    use crossbeam_channel::bounded;
    use kvferry_protocol::{EngineId, Incarnation, PpRank, TpRank};

    use super::*;

    fn peer(name: &str) -> PeerId {
        PeerId {
            engine: EngineId::new(name).unwrap(),
            incarnation: Incarnation::new(1),
            tp_rank: TpRank::new(0),
            pp_rank: PpRank::new(0),
        }
    }

    fn message(number: u32) -> Bytes {
        Bytes::copy_from_slice(&number.to_le_bytes())
    }

    #[test]
    fn messages_wait_in_order_until_the_engine_takes_them() {
        let (engine, taken) = bounded(3);
        let mut unheard = Unheard::default();
        for number in 0..100 {
            unheard.hear(&engine, peer(["a", "b"][number as usize % 2]), message(number)).unwrap();
        }
        assert_eq!(unheard.len(), 97);
        for number in 0..100 {
            if number % 2 == 0 {
                unheard.hand_over(&engine);
            }
            assert_eq!(taken.try_recv().unwrap().1, message(number));
        }
        assert!(unheard.is_empty() && unheard.of_peer.is_empty(), "nothing is counted any more");
    }

    #[test]
    fn one_peer_fills_its_own_share_only() {
        let (engine, _taken) = bounded(1);
        let mut unheard = Unheard::default();
        let (a, b) = (peer("a"), peer("b"));
        unheard.hear(&engine, a.clone(), message(0)).unwrap();
        for number in 0..PEER_MESSAGES as u32 {
            unheard.hear(&engine, a.clone(), message(number)).unwrap();
        }
        assert_eq!(unheard.hear(&engine, a.clone(), message(0)).unwrap_err().messages, PEER_MESSAGES + 1);
        let long = Bytes::from(vec![0; PEER_BYTES / 2]);
        unheard.hear(&engine, b.clone(), long.clone()).unwrap();
        unheard.hear(&engine, b.clone(), long.clone()).unwrap();
        assert!(unheard.hear(&engine, b.clone(), message(0)).unwrap_err().bytes > PEER_BYTES);
        assert_eq!(unheard.peer_down(&a), PEER_MESSAGES as u64);
        unheard.hear(&engine, a, message(1)).unwrap();
        assert_eq!((unheard.peer_down(&b), unheard.len()), (2, 1));
    }
}
