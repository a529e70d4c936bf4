//! The two threads on which a tier may wait: one that stores, one that fetches. Their queues are short; what does not fit is
//! dropped. They are not joined: a call that never returns must not hold up the engine's end, and owns all that it touches.

use std::fmt;
use std::sync::Arc;

use crossbeam_channel::{Sender, bounded};
use kvferry_protocol::BlockId;
use kvferry_protocol::digest::Digest;

use super::Input;
use super::inlet::Inlet;
use crate::error::ConnectorError;
use crate::tier::{Tier, TierError};

/// The way to the two threads.
pub(super) struct TierThreads {
    stores: Sender<(u64, BlockId, BlockId, Digest)>,
    fetches: Sender<(u64, usize, BlockId)>,
}

/// What the tier said.
#[derive(Debug)]
pub(super) enum TierAnswer {
    /// To one store.
    Stored { order: u64, outcome: Result<(), TierError> },
    /// To one block of a restore.
    Fetched { order: u64, block: usize, outcome: Result<(BlockId, Digest), TierError> },
}

impl TierThreads {
    pub(super) fn start(tier: &Arc<dyn Tier>, inputs: &Inlet) -> Result<Self, ConnectorError> {
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            let spawned = std::thread::Builder::new().name(name.into()).spawn(body);
            spawned.map(|_| ()).map_err(|source| ConnectorError::Thread { source })
        };
        let (stores, queue) = bounded::<(u64, BlockId, BlockId, Digest)>(QUEUE);
        let (own, answers) = (Arc::clone(tier), inputs.clone());
        spawn(
            "kvferry-keep",
            Box::new(move || {
                for (order, frame, berth, digest) in queue {
                    let outcome = own.store(frame, berth, digest);
                    if answers.send(Input::Tier(TierAnswer::Stored { order, outcome })).is_err() {
                        return;
                    }
                }
            }),
        )?;
        let (fetches, queue) = bounded::<(u64, usize, BlockId)>(QUEUE);
        let (own, answers) = (Arc::clone(tier), inputs.clone());
        spawn(
            "kvferry-bring",
            Box::new(move || {
                for (order, block, frame) in queue {
                    let outcome = own.fetch(frame);
                    if answers.send(Input::Tier(TierAnswer::Fetched { order, block, outcome })).is_err() {
                        return;
                    }
                }
            }),
        )?;
        Ok(Self { stores, fetches })
    }

    /// Hands a filled berth over; `false` if the queue is full.
    pub(super) fn store(&self, order: u64, frame: BlockId, berth: BlockId, digest: Digest) -> bool {
        self.stores.try_send((order, frame, berth, digest)).is_ok()
    }

    /// Asks for a block; `false` if the queue is full.
    pub(super) fn fetch(&self, order: u64, block: usize, frame: BlockId) -> bool {
        self.fetches.try_send((order, block, frame)).is_ok()
    }
}

impl fmt::Debug for TierThreads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TierThreads({} stores and {} fetches wait)", self.stores.len(), self.fetches.len())
    }
}

/// Calls that wait for the tier, in each direction: enough that a tier which is only scheduled late loses none.
const QUEUE: usize = 1024;
