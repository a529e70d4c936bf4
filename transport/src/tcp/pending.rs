//! A session whose control lane is proved and whose data lanes are still coming.

use std::net::SocketAddr;
use std::time::Instant;

use kvferry_protocol::wire::{LaneSecret, PeerIdentity};

use super::path::Choice;
use super::stream::Stream;

/// The address that we dialled, and the listener's number.
pub(crate) type PendingKey = (Option<SocketAddr>, u64);

pub(crate) struct Pending {
    /// The listener's number of the session.
    pub(crate) number: u64,
    /// Which address we dialled; `None` if the peer dialled us.
    pub(crate) dialled: Option<SocketAddr>,
    /// `None` until the verdict was sent.
    pub(crate) control: Option<Stream>,
    pub(crate) identity: PeerIdentity,
    pub(crate) version: u16,
    pub(crate) secret: LaneSecret,
    pub(crate) lanes: Vec<Option<Stream>>,
    /// How payload goes, and why not otherwise.
    pub(crate) choice: Choice,
    pub(crate) deadline: Instant,
}

impl Pending {
    pub(crate) fn key(&self) -> PendingKey {
        (self.dialled, self.number)
    }

    /// Whether lane `lane` has its place and nobody in it.
    pub(crate) fn awaits(&self, lane: u16) -> bool {
        matches!(self.lanes.get(usize::from(lane)), Some(None))
    }

    /// Binds a lane; returns whether that was the last one.
    pub(crate) fn bind(&mut self, lane: u16, stream: Stream) -> bool {
        if let Some(place) = self.lanes.get_mut(usize::from(lane)) {
            place.get_or_insert(stream);
        }
        self.lanes.iter().all(Option::is_some)
    }
}
