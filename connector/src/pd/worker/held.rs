//! Reading in place, as the driver sees it, on both sides of it.
//!
//! Of what this worker reads ([`InPlace`](super::in_place::InPlace)): what a peer lends counts as landed, is digested where it lies, and is
//! aliased when it is verified, under the load's own guards. Of what this worker lends: a post that the receiver has counts as taken, so that
//! its transfer goes on and ends as any other, but the blocks stay held, by the guards and by the engine, until the post itself has ended.

use std::collections::BTreeMap;

use bytes::Bytes;
use kvferry_kernels::{PageGuards, Settle};
use kvferry_protocol::transfer::PostOutcome;
use kvferry_protocol::{PeerId, TransferId};
use kvferry_transport::{Adopted, GrantKey, PathKind, PathReport, PostId};

use super::driver::Driver;
use super::in_place::Lent;
use super::jobs::WriteKey;
use super::loading::Loading;
use super::reading::{Found, Look};
use super::receiving::{FoundPages, Receiving};
use crate::config::SameHost;
use crate::contract::RequestId;

/// Posts that peers hold in place, or are about to: until the transport says that they ended.
#[derive(Debug, Default)]
pub(super) struct HeldPosts {
    posts: BTreeMap<PostId, HeldPost>,
}

#[derive(Debug)]
struct HeldPost {
    peer: PeerId,
    /// The part of a transfer that it belongs to.
    part: TransferId,
    /// Whose blocks these are.
    lease: TransferId,
}

/// What of a lease peers hold in place.
#[derive(Debug, Default)]
pub(super) struct LeaseHold {
    posts: usize,
    /// Of parts that are over.
    guards: Vec<PageGuards>,
}

impl LeaseHold {
    pub(super) const fn is_held(&self) -> bool {
        self.posts > 0
    }

    /// A part is over: its pages stay as they are while something of the lease is held.
    pub(super) fn keep(&mut self, guards: Vec<PageGuards>) {
        if self.is_held() {
            self.guards.extend(guards);
        }
    }
}

impl HeldPosts {
    pub(super) fn is_empty(&self) -> bool {
        self.posts.is_empty()
    }
}

impl Driver {
    /// Whether a part's sender may hand its blocks over where they lie: there is nothing against it, and all heads of this worker come from it.
    pub(super) fn may_read_in_place(&self, entry: &Receiving) -> bool {
        self.config.network().same_host == SameHost::InPlace
            && entry.heads == self.caches.heads()
            && self.loads.get(&entry.load).is_some_and(|load| self.is_held_in_few_writes(load))
            && entry.peer.as_ref().is_some_and(|peer| {
                !self.peers.is_only_copied(peer)
                    && self.peers.path(peer).is_some_and(|path| self.why_copied(path).is_none())
            })
    }

    /// Whether a load has no more writes than its sender may have in a receiver's hands at once, if both cut alike: nothing of a load is let go
    /// before its end, so one that has more would never come to it.
    fn is_held_in_few_writes(&self, load: &Loading) -> bool {
        const MOST: u64 = 1024;
        let layers = u64::from(self.caches.layout().shape().layers);
        let bytes = load.tokens_wanted() * layers * self.caches.bytes_per_cell(&self.caches.heads());
        bytes <= MOST * self.config.limits().chunk_bytes
    }

    /// Why payload that goes this way is copied and not read in place, as far as this side knows.
    fn why_copied(&self, path: &PathReport) -> Option<String> {
        match path.kind {
            _ if !self.caches.can_alias() => Some("this engine's attention reads its own memory only".to_owned()),
            PathKind::SharedMemory => None,
            other => Some(format!("it goes by {other}; shm: {}", path.not_taken())),
        }
    }

    /// Says how a peer's payload is taken, if it was asked to be read in place.
    pub(super) fn tell_how(&self, peer: &PeerId, path: &PathReport) {
        if self.config.network().same_host == SameHost::InPlace {
            match self.why_copied(path) {
                None => {
                    tracing::info!(%peer, "payload is read in place, if the peer says the same and its blocks lie in this worker's order")
                }
                Some(reason) => tracing::info!(%peer, reason, "payload is copied, not read in place"),
            }
        }
    }

    /// Payload of a peer is copied from now on.
    pub(super) fn copy_from_now_on(&mut self, peer: &PeerId, reason: &str) {
        if self.peers.note_only_copied(peer) {
            tracing::info!(%peer, reason, "payload is copied from now on, not read in place");
        }
    }

    /// A peer's write may be read where it lies: that counts as landed.
    pub(super) fn lent(
        &mut self,
        peer: &PeerId,
        (grant, bytes): (GrantKey, u64),
        notification: &Bytes,
        adopted: Adopted,
    ) {
        let Some(wrote) = self.wrote(peer, grant, bytes, notification) else { return };
        let Some(entry) = self.receiving.get_mut(&wrote.transfer) else { return };
        // What is not taken is let go by being dropped.
        if entry.lend(wrote.generation, wrote.sequence, adopted) {
            self.with_receiving(wrote.transfer, |entry, now| entry.machine.landed(now, wrote));
        }
    }

    /// A mover looked at what a peer lends.
    pub(super) fn looked(&mut self, look: Look, found: Result<Found, String>) {
        let Look { write, adopted, window, rect, .. } = look;
        let Some(entry) = self.receiving.get_mut(&write.transfer) else { return };
        let peer = entry.peer.clone();
        let (digest, unlike) = match found {
            Ok(Found { digest, pages, unlike }) => {
                let mut blocks: Vec<_> = pages.iter().map(|page| page.block).collect();
                blocks.dedup();
                entry.found = peer.clone().filter(|_| !pages.is_empty()).map(|peer| {
                    let lent = Lent { peer, grant: window.key, sequence: write.sequence, adopted, blocks };
                    FoundPages { rect, pages, lent }
                });
                (Ok(digest), unlike)
            }
            Err(problem) => (Err(problem), 0),
        };
        if let Some(peer) = peer.filter(|_| unlike > 0) {
            self.copy_from_now_on(
                &peer,
                "its blocks lie in another order than this worker's: give both caches one layout",
            );
        }
        self.digested(write, digest);
        if let Some(entry) = self.receiving.get_mut(&write.transfer) {
            // Its digest was wrong, or the transfer is over.
            entry.found = None;
        }
    }

    /// Pages of a verified write are read where they lie from now on.
    pub(super) fn read_in_place(&mut self, load: TransferId, found: FoundPages) -> Result<(), String> {
        let FoundPages { pages, lent, .. } = found;
        let load = self.loads.get_mut(&load).ok_or("its load is over")?;
        let (owner, request) = (lent.owner(), load.request.clone());
        // The rectangle was not verified before, so its pages are guarded.
        let guards = load.guards().ok_or("its pages are not guarded")?;
        let aliased = pages.iter().try_for_each(|page| page.alias(guards, &owner));
        // Asked back, or its session went, while it was looked at.
        let is_over = self.recalled.remove(&(lent.grant, lent.sequence)) || !self.granted.contains_key(&lent.grant);
        self.board.in_place.enter(&request, lent, is_over.then_some(Settle::Copy));
        aliased.map_err(|error| error.to_string())
    }

    /// A peer wants its memory back.
    pub(super) fn recalled(&mut self, peer: &PeerId, grant: GrantKey, sequence: u32) {
        tracing::debug!(%peer, sequence, "what is read in place is asked back");
        if !self.ask_back(peer, Some((grant, sequence))) && self.granted.contains_key(&grant) {
            // It is not verified yet.
            self.recalled.insert((grant, sequence));
        }
    }

    /// What is read of a peer's is copied and let go, at the engine's next step. Returns whether there is such.
    pub(super) fn ask_back(&self, peer: &PeerId, write: Option<(GrantKey, u32)>) -> bool {
        let found = self.board.in_place.ask_back(peer, write);
        if found {
            // A full channel has woken it already.
            let _ = self.wake.try_send(());
        }
        found
    }

    /// A post in place was handed over: its lease holds the blocks until it has ended.
    pub(super) fn hold(&mut self, post: PostId, peer: PeerId, write: WriteKey) {
        let Some(entry) = self.sending.get(&write.transfer) else { return };
        let lease = entry.lease;
        self.posting.held.posts.insert(post, HeldPost { peer, part: write.transfer, lease });
        if let Some(lease) = self.leases.get_mut(&lease) {
            lease.hold.posts += 1;
        }
    }

    /// The receiver has all of a post that it reads in place.
    pub(super) fn post_held(&mut self, post: PostId) {
        if let Some((write, at)) = self.posting.take_posted(post) {
            self.shipped(write, at);
            self.posted(write, PostOutcome::Taken);
        }
    }

    /// A post ended; if a peer held it in place, that is over.
    pub(super) fn hold_ended(&mut self, post: PostId) {
        let Some(HeldPost { lease: id, .. }) = self.posting.held.posts.remove(&post) else { return };
        let Some(lease) = self.leases.get_mut(&id) else { return };
        lease.hold.posts -= 1;
        if !lease.hold.is_held() {
            lease.hold.guards.clear();
            self.lease_let_go(id);
        }
        self.answer_waiting();
    }

    /// Makes room for a write to a peer, or says that there is none to be made: asks for the oldest post that the peer holds, or, if what all
    /// peers hold is too much (`of_all`), any peer. Only posts of transfers that are over are asked for: a receiver lets go of nothing while it loads.
    pub(super) fn recall_for(&self, peer: &PeerId, of_all: bool) -> bool {
        let is_over = |part: &TransferId| self.sending.get(part).is_none_or(|entry| entry.over);
        let mut over = self.posting.held.posts.iter().filter(|(_, held)| is_over(&held.part));
        let found = match of_all {
            true => over.next(),
            false => over.find(|(_, held)| held.peer == *peer),
        };
        if let Some((&post, held)) = found {
            self.transport.recall(&held.peer, post);
        }
        found.is_some()
    }

    /// Asks for what peers hold in place of some requests' blocks.
    pub(super) fn recall_of(&self, requests: &[RequestId]) {
        for (&post, held) in &self.posting.held.posts {
            if self.leases.get(&held.lease).is_some_and(|lease| requests.contains(&lease.request)) {
                self.transport.recall(&held.peer, post);
            }
        }
    }

    /// Asks for all that peers hold in place. Asking again is harmless.
    pub(super) fn recall_all(&self) {
        self.posting.held.posts.iter().for_each(|(&post, held)| self.transport.recall(&held.peer, post));
    }
}
