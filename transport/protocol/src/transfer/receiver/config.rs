//! What a receiver is told at the start.

use std::time::Duration;

use super::super::coverage::Coverage;
use super::super::output::Order;
use crate::ids::TransferId;
use crate::message::Missing;

/// What is wanted, from when on, and for how long.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReceiverConfig {
    /// Which transfer.
    pub transfer: TransferId,
    /// The cells that the engine wants; not empty.
    pub wanted: Coverage,
    /// Who speaks first.
    pub order: Order,
    /// The whole transfer ends by then.
    pub deadline: Duration,
    /// How long nothing may be verified under a live grant, without the sender's word that it still computes. It is asked for
    /// that word, with each renewal, at a third of this time.
    pub progress: Duration,
    /// How long the peer may be without a session, at the start and after a cut.
    pub absent: Duration,
    /// How long the sender is asked to keep its lease; renewed at a third of it, or of `progress` if that is shorter.
    pub lease_ttl: Duration,
    /// Ask the sender to stop, and wait this long for its word, before a grant is revoked that may be in use; for transports
    /// whose fence hits others, too. `None` where the fence is cheap.
    pub ask_before_revoke: Option<Duration>,
    /// How long after its end the receiver repeats its word to a sender that has not answered.
    pub linger: Duration,
    /// How many cuts of the session are survived.
    pub max_cuts: u32,
}

/// Why a receiver cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReceiverConfigError {
    /// Nothing is wanted.
    #[error("transfer {transfer}: nothing is wanted; do not begin a transfer for no tokens")]
    Nothing {
        /// Which transfer.
        transfer: TransferId,
    },
    /// The wanted set does not fit a grant.
    #[error("transfer {transfer}: {found} rectangles are wanted, at most {limit} fit a grant; want larger ones")]
    Rects {
        /// Which transfer.
        transfer: TransferId,
        /// How many are wanted.
        found: usize,
        /// How many may be.
        limit: usize,
    },
    /// The lease's time does not fit the message.
    #[error("transfer {transfer}: a lease of {lease_ttl:?} cannot be asked for; give 3 ms to 49 days")]
    LeaseTtl {
        /// Which transfer.
        transfer: TransferId,
        /// The time given.
        lease_ttl: Duration,
    },
}

impl ReceiverConfig {
    /// The most rectangles that may be wanted: a quarter of a grant's, so that holes made by partial arrival fit as well.
    pub const MAX_WANTED_RECTS: usize = Missing::MAX_RECTS / 4;

    pub(super) fn check(&self) -> Result<(), ReceiverConfigError> {
        let transfer = self.transfer;
        let (found, limit) = (self.wanted.rects().count(), Self::MAX_WANTED_RECTS);
        match found {
            0 => return Err(ReceiverConfigError::Nothing { transfer }),
            1..=Self::MAX_WANTED_RECTS => {}
            _ => return Err(ReceiverConfigError::Rects { transfer, found, limit }),
        }
        match self.lease_ttl.as_millis() {
            3..=0xffff_ffff => Ok(()),
            _ => Err(ReceiverConfigError::LeaseTtl { transfer, lease_ttl: self.lease_ttl }),
        }
    }

    pub(super) fn ttl_ms(&self) -> u32 {
        u32::try_from(self.lease_ttl.as_millis()).unwrap_or(u32::MAX)
    }

    pub(super) fn renew_interval(&self) -> Duration {
        self.lease_ttl.min(self.progress) / 3
    }
}
