//! The decode side of write-back: which blocks of an answer go back to the engine that computed its prompt, and when.
//!
//! Every so many complete blocks, and the rest when the request ends. A return holds its blocks until it is over; it is refused
//! or given up soon where nobody wants it.

use std::collections::BTreeMap;

use kvferry_protocol::message::HashBytes;
use kvferry_protocol::{BlockId, TpRank, TransferId};
use kvferry_transport::PeerAddress;

use crate::contract::{EngineFinish, RequestId, Return, ScheduledRequest, Spoken};
use crate::pool::BlockHash;

/// The returns of one scheduler half.
#[derive(Debug)]
pub(super) struct Returning {
    every: usize,
    reporters: usize,
    tokens_per_block: u32,
    following: BTreeMap<RequestId, Following>,
    open: BTreeMap<TransferId, (RequestId, Spoken)>,
    next: Vec<Return>,
}

/// One request whose answer goes back.
#[derive(Debug)]
struct Following {
    transfer: TransferId,
    to: Vec<PeerAddress>,
    hashes: Vec<BlockHash>,
    blocks: Vec<BlockId>,
    /// Blocks that are complete, and those of them that were offered or came from there.
    complete: usize,
    offered: usize,
    returns: u128,
}

impl Returning {
    pub(super) fn new(every: u32, reporters: u16, tokens_per_block: u32) -> Self {
        let (following, open, next) = Default::default();
        let every = (every as usize).clamp(1, MOST);
        Self { every, reporters: reporters.into(), tokens_per_block, following, open, next }
    }

    /// A request was admitted whose prompt comes from a peer.
    pub(super) fn follow(
        &mut self,
        request: &RequestId,
        (transfer, to): (TransferId, &[PeerAddress]),
        hashes: &[BlockHash],
        prompt_tokens: u32,
    ) {
        let offered = (prompt_tokens / self.tokens_per_block) as usize;
        if hashes.len() == offered {
            self.following.entry(request.clone()).or_insert_with(|| Following {
                transfer,
                to: to.to_vec(),
                hashes: hashes.to_vec(),
                blocks: Vec::new(),
                complete: 0,
                offered,
                returns: 0,
            });
        }
    }

    pub(super) fn hashed(&mut self, request: &RequestId, more: &[BlockHash]) {
        if let Some(following) = self.following.get_mut(request) {
            following.hashes.extend(more);
        }
    }

    /// A step computes some tokens of a request.
    pub(super) fn scheduled(&mut self, request: &ScheduledRequest) {
        let Some(following) = self.following.get_mut(&request.id) else { return };
        following.complete = ((request.tokens.end / self.tokens_per_block) as usize)
            .min(following.hashes.len())
            .min(request.blocks.len());
        if following.complete >= following.offered + self.every {
            following.blocks.clone_from(&request.blocks);
            self.give_back(&request.id);
        } else if following.complete > following.offered {
            following.blocks.clone_from(&request.blocks);
        }
    }

    /// A request is over: the rest of its complete blocks goes back.
    pub(super) fn finished(&mut self, request: &RequestId, how: EngineFinish) {
        if how == EngineFinish::Complete {
            self.give_back(request);
        }
        self.following.remove(request);
    }

    fn give_back(&mut self, request: &RequestId) {
        let Some(following) = self.following.get_mut(request) else { return };
        while following.offered < following.complete && self.open.len() < OPEN {
            let (from, to) = (following.offered, following.complete.min(following.offered + MOST));
            following.offered = to;
            following.returns += 1;
            let transfer = TransferId::new(following.transfer.get().wrapping_add(STEP.wrapping_mul(following.returns)));
            self.open.insert(transfer, (request.clone(), Spoken::new()));
            self.next.push(Return {
                request: request.clone(),
                transfer,
                to: following.to.clone(),
                blocks: following.blocks[..to].to_vec(),
                first_token: from as u32 * self.tokens_per_block,
                hashes: following.hashes[from..to].to_vec(),
            });
        }
        // What did not fit is not offered again.
        following.offered = following.offered.max(following.complete);
    }

    /// A rank tells that a return is over; its request, if that was the last. `Err` if it is not known.
    pub(super) fn returned(&mut self, rank: TpRank, transfer: TransferId) -> Result<Option<RequestId>, ()> {
        let (_, spoken) = self.open.get_mut(&transfer).ok_or(())?;
        if !spoken.insert(rank) {
            return Err(());
        }
        if spoken.len() < self.reporters {
            return Ok(None);
        }
        Ok(self.open.remove(&transfer).map(|(request, _)| request))
    }

    /// Whether blocks of a request are still read.
    pub(super) fn uses(&self, request: &RequestId) -> bool {
        self.open.values().any(|(of, _)| of == request)
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.open.is_empty()
    }

    pub(super) fn take(&mut self) -> Vec<Return> {
        std::mem::take(&mut self.next)
    }
}

/// The most blocks in one return: as many hashes as a message takes.
const MOST: usize = HashBytes::MAX_BYTES / HashBytes::EACH;
/// Returns at once; the blocks of more are not offered.
const OPEN: usize = 256;
/// From one return's id to the next: odd, so that none comes twice, and large, so that none is another request's.
const STEP: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u8) -> BlockHash {
        BlockHash::new([n; 32])
    }

    fn scheduled(end: u32) -> ScheduledRequest {
        ScheduledRequest { id: RequestId::new("a"), tokens: end - 1..end, blocks: (0..9).map(BlockId::new).collect() }
    }

    #[test]
    fn every_so_many_blocks_go_back_and_the_rest_at_the_end() {
        let mut returning = Returning::new(2, 1, 4);
        let id = RequestId::new("a");
        // A prompt of 10 tokens: the third block is completed by the answer.
        returning.follow(&id, (TransferId::new(7), &[PeerAddress::Loopback(1)]), &[hash(0), hash(1)], 10);
        for n in 2..7 {
            returning.hashed(&id, &[hash(n)]);
        }
        let mut seen = Vec::new();
        for end in 10..=23 {
            returning.scheduled(&scheduled(end));
            seen.extend(returning.take());
        }
        returning.finished(&id, EngineFinish::Complete);
        seen.extend(returning.take());
        let what: Vec<_> = seen.iter().map(|r| (r.first_token, r.blocks.len(), r.hashes.clone())).collect();
        assert_eq!(what, [(8, 4, vec![hash(2), hash(3)]), (16, 5, vec![hash(4)])]);
        assert!(seen[0].transfer != seen[1].transfer && seen[0].transfer != TransferId::new(7));
        assert!(returning.uses(&id));
        assert_eq!(returning.returned(TpRank::new(0), seen[1].transfer), Ok(Some(id.clone())));
        assert_eq!(returning.returned(TpRank::new(0), seen[1].transfer), Err(()));
        assert_eq!(returning.returned(TpRank::new(0), seen[0].transfer), Ok(Some(id.clone())));
        assert!(!returning.uses(&id) && !returning.has_pending());
    }

    #[test]
    fn an_aborted_request_gives_nothing_back_at_its_end() {
        let mut returning = Returning::new(8, 1, 4);
        let id = RequestId::new("a");
        returning.follow(&id, (TransferId::new(7), &[PeerAddress::Loopback(1)]), &[hash(0)], 7);
        returning.hashed(&id, &[hash(1)]);
        returning.scheduled(&scheduled(8));
        returning.finished(&id, EngineFinish::Aborted);
        assert!(returning.take().is_empty());
    }
}
