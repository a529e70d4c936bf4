//! Who is reachable, and under which address.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kvferry_protocol::PeerId;
use kvferry_protocol::message::Ended;
use kvferry_transport::PeerAddress;

use super::card::WorkerCard;

/// The peers that proved who they are and hold the same KV cache.
#[derive(Debug, Default)]
pub(super) struct Peers {
    up: BTreeMap<PeerId, Session>,
    by_address: BTreeMap<PeerAddress, PeerId>,
    dialled: BTreeSet<PeerAddress>,
    /// Addresses that failed their last handshake.
    doubtful: BTreeSet<PeerAddress>,
    /// Why the last attempt at an address, or its last session, came to nothing; as many as are dialled.
    missed: BTreeMap<PeerAddress, String>,
    /// Last words for who answers at an address that is being dialled; at most [`FAREWELLS`] an address.
    farewells: BTreeMap<PeerAddress, Vec<Ended>>,
}

#[derive(Debug)]
struct Session {
    number: u64,
    /// The protocol version that is spoken in it.
    version: u16,
    address: Option<PeerAddress>,
    heads: Range<u16>,
    tp_size: u16,
}

impl Peers {
    /// Whether the address must still be dialled; remembers that it was.
    pub(super) fn must_dial(&mut self, address: PeerAddress) -> bool {
        self.dialled.insert(address)
    }

    /// The address is not dialled any more.
    pub(super) fn forget_address(&mut self, address: PeerAddress) {
        self.dialled.remove(&address);
        self.farewells.remove(&address);
    }

    /// Something to tell who answers at an address, as soon as somebody does; over the limit it is left to the peer's deadline.
    pub(super) fn farewell(&mut self, address: PeerAddress, ended: Ended) {
        let words = self.farewells.entry(address).or_default();
        if words.len() < FAREWELLS {
            words.push(ended);
        }
    }

    /// What was to be told.
    pub(super) fn take_farewells(&mut self, address: PeerAddress) -> Vec<Ended> {
        self.farewells.remove(&address).unwrap_or_default()
    }

    /// An address failed a handshake; returns whether it did the time before, too.
    pub(super) fn distrust(&mut self, address: PeerAddress) -> bool {
        !self.doubtful.insert(address)
    }

    /// An attempt at an address, or its session, came to nothing.
    pub(super) fn missed(&mut self, address: PeerAddress, why: &str) {
        self.missed.insert(address, why.to_owned());
    }

    /// Why there is no session with who is at an address, if anything is known of it.
    pub(super) fn why_missed(&self, address: PeerAddress) -> Option<&str> {
        self.missed.get(&address).map(String::as_str)
    }

    /// A session came up and was accepted: its number, and the version that is spoken in it.
    pub(super) fn up(
        &mut self,
        peer: PeerId,
        address: Option<PeerAddress>,
        (number, version): (u64, u16),
        card: &WorkerCard,
    ) {
        if let Some(address) = address {
            self.by_address.insert(address, peer.clone());
            self.doubtful.remove(&address);
            self.missed.remove(&address);
        }
        self.up.insert(peer, Session { number, version, address, heads: card.held_heads(), tp_size: card.tp_size });
    }

    /// A session ended; returns whether it was accepted before.
    pub(super) fn down(&mut self, peer: &PeerId) -> bool {
        let Some(session) = self.up.remove(peer) else { return false };
        if let Some(address) = session.address {
            self.by_address.remove(&address);
        }
        true
    }

    /// The number of the session with a peer that is up.
    pub(super) fn session(&self, peer: &PeerId) -> Option<u64> {
        self.up.get(peer).map(|session| session.number)
    }

    /// The protocol version that is spoken with a peer that is up.
    pub(super) fn version(&self, peer: &PeerId) -> Option<u16> {
        self.up.get(peer).map(|session| session.version)
    }

    /// Who answers at an address, and in which session.
    pub(super) fn at(&self, address: PeerAddress) -> Option<(PeerId, u64)> {
        let peer = self.by_address.get(&address)?;
        Some((peer.clone(), self.session(peer)?))
    }

    /// Which KV heads of the model a peer that is up holds, and of how many ranks it is one.
    pub(super) fn place(&self, peer: &PeerId) -> Option<(Range<u16>, u16)> {
        self.up.get(peer).map(|session| (session.heads.clone(), session.tp_size))
    }

    /// How many are up.
    pub(super) fn count(&self) -> usize {
        self.up.len()
    }
}

/// Words that wait for one address.
const FAREWELLS: usize = 256;
