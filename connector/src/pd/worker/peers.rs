//! Who is reachable, and under which address.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kvferry_protocol::message::Ended;
use kvferry_protocol::transfer::Time;
use kvferry_protocol::{EngineId, PeerId, TpRank};
use kvferry_transport::{PathReport, PeerAddress};

use super::card::WorkerCard;

/// The peers that proved who they are and hold the same KV cache.
#[derive(Debug, Default)]
pub(super) struct Peers {
    up: BTreeMap<PeerId, Session>,
    by_address: BTreeMap<PeerAddress, PeerId>,
    dialled: BTreeSet<PeerAddress>,
    /// Addresses that are to be reached whether a request asks for it or not.
    kept: BTreeSet<PeerAddress>,
    /// Addresses that failed their last handshake.
    doubtful: BTreeSet<PeerAddress>,
    /// Why the last attempt at an address, or its last session, came to nothing; as many as are dialled.
    missed: BTreeMap<PeerAddress, Missed>,
    /// Last words for who answers at an address that is being dialled; at most [`FAREWELLS`] an address.
    farewells: BTreeMap<PeerAddress, Farewells>,
}

#[derive(Debug)]
struct Missed {
    why: String,
    /// How often in a row.
    times: u32,
}

#[derive(Debug)]
struct Farewells {
    words: Vec<Ended>,
    /// When they have waited long enough.
    until: Time,
}

#[derive(Debug)]
struct Session {
    number: u64,
    /// The protocol version that is spoken in it.
    version: u16,
    path: PathReport,
    heads: Range<u16>,
    tp_size: u16,
    /// Its blocks were found to be none that can be read in place.
    only_copied: bool,
}

impl Peers {
    /// Whether the address must still be dialled; remembers that it was.
    pub(super) fn must_dial(&mut self, address: PeerAddress) -> bool {
        self.dialled.insert(address)
    }

    /// The address is to be reached from now on, and after each end of its session.
    pub(super) fn keep(&mut self, address: PeerAddress) {
        self.kept.insert(address);
    }

    /// Whether the address is to be reached although no transfer needs it.
    pub(super) fn is_kept(&mut self, address: PeerAddress, now: Time) -> bool {
        self.farewells.retain(|_, farewells| farewells.until > now);
        self.kept.contains(&address) || self.farewells.contains_key(&address)
    }

    /// The address is dialled anew when it is wanted next.
    pub(super) fn forget_address(&mut self, address: PeerAddress) {
        self.dialled.remove(&address);
        self.farewells.remove(&address);
    }

    /// Nobody wants the address any more: nothing is known of it.
    pub(super) fn drop_address(&mut self, address: PeerAddress) {
        self.forget_address(address);
        self.doubtful.remove(&address);
        self.missed.remove(&address);
    }

    /// How many addresses are reached, or tried.
    pub(super) fn dialled(&self) -> usize {
        self.dialled.len()
    }

    /// Something to tell who answers at an address, if somebody does by then; over the limit it is left to the peer's deadline.
    pub(super) fn farewell(&mut self, address: PeerAddress, ended: Ended, until: Time) {
        let farewells = self.farewells.entry(address).or_insert(Farewells { words: Vec::new(), until });
        if farewells.words.len() < FAREWELLS {
            farewells.words.push(ended);
            farewells.until = until;
        }
    }

    /// What was to be told.
    pub(super) fn take_farewells(&mut self, address: PeerAddress) -> Vec<Ended> {
        self.farewells.remove(&address).map(|farewells| farewells.words).unwrap_or_default()
    }

    /// An address failed a handshake; returns whether it did the time before, too.
    pub(super) fn distrust(&mut self, address: PeerAddress) -> bool {
        !self.doubtful.insert(address)
    }

    /// An attempt at an address, or its session, came to nothing. Returns how often in a row for the same reason.
    pub(super) fn missed(&mut self, address: PeerAddress, why: &str) -> u32 {
        let missed = self.missed.entry(address).or_insert_with(|| Missed { why: why.to_owned(), times: 0 });
        if missed.why != why {
            *missed = Missed { why: why.to_owned(), times: 0 };
        }
        missed.times = missed.times.saturating_add(1);
        missed.times
    }

    /// Why there is no session with who is at an address, if anything is known of it.
    pub(super) fn why_missed(&self, address: PeerAddress) -> Option<&str> {
        self.missed.get(&address).map(|missed| missed.why.as_str())
    }

    /// A session came up and was accepted: its number, and the version that is spoken in it.
    pub(super) fn up(
        &mut self,
        peer: PeerId,
        address: Option<PeerAddress>,
        (number, version): (u64, u16),
        path: PathReport,
        card: &WorkerCard,
    ) {
        if let Some(address) = address {
            self.by_address.insert(address, peer.clone());
            self.doubtful.remove(&address);
            self.missed.remove(&address);
        }
        let (heads, tp_size) = (card.held_heads(), card.tp_size);
        self.up.insert(peer, Session { number, version, path, heads, tp_size, only_copied: false });
    }

    /// An address leads to a peer; returns the number of its session, if it is up and was accepted.
    pub(super) fn found(&mut self, peer: &PeerId, address: PeerAddress) -> Option<u64> {
        let session = self.session(peer)?;
        self.by_address.insert(address, peer.clone());
        self.doubtful.remove(&address);
        self.missed.remove(&address);
        Some(session)
    }

    /// A session ended; returns the addresses that led to it, if it was accepted before.
    pub(super) fn down(&mut self, peer: &PeerId) -> Option<Vec<PeerAddress>> {
        self.up.remove(peer)?;
        let led: Vec<_> = self.by_address.iter().filter(|(_, of)| *of == peer).map(|(&address, _)| address).collect();
        led.iter().for_each(|address| drop(self.by_address.remove(address)));
        Some(led)
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

    /// The same, or the rank of an engine whose name is known, whoever dialled whom.
    pub(super) fn find(&self, address: PeerAddress, engine: Option<&EngineId>, rank: TpRank) -> Option<(PeerId, u64)> {
        let named = |engine: &EngineId| {
            let (peer, session) = self.up.iter().find(|(peer, _)| is_rank(peer, engine, rank))?;
            Some((peer.clone(), session.number))
        };
        self.at(address).or_else(|| engine.and_then(named))
    }

    /// Which KV heads of the model a peer that is up holds, and of how many ranks it is one.
    pub(super) fn place(&self, peer: &PeerId) -> Option<(Range<u16>, u16)> {
        self.up.get(peer).map(|session| (session.heads.clone(), session.tp_size))
    }

    /// Which way payload goes to a peer that is up.
    pub(super) fn path(&self, peer: &PeerId) -> Option<&PathReport> {
        self.up.get(peer).map(|session| &session.path)
    }

    /// Whether a peer's blocks were found to be none that can be read in place, in its session.
    pub(super) fn is_only_copied(&self, peer: &PeerId) -> bool {
        self.up.get(peer).is_some_and(|session| session.only_copied)
    }

    /// A peer's blocks cannot be read in place. Returns whether that is new.
    pub(super) fn note_only_copied(&mut self, peer: &PeerId) -> bool {
        self.up.get_mut(peer).is_some_and(|session| !std::mem::replace(&mut session.only_copied, true))
    }

    /// Which way each session's payload goes.
    pub(super) fn paths(&self) -> impl Iterator<Item = &PathReport> {
        self.up.values().map(|session| &session.path)
    }

    /// How many are up.
    pub(super) fn count(&self) -> usize {
        self.up.len()
    }
}

/// Whether a peer is one tensor-parallel rank of an engine; peers that hold other layers were refused.
pub(super) fn is_rank(peer: &PeerId, engine: &EngineId, rank: TpRank) -> bool {
    peer.engine == *engine && peer.tp_rank == rank
}

/// Words that wait for one address.
const FAREWELLS: usize = 256;
