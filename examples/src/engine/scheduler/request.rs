//! One request from its submission to its end.

use kvferry::contract::{self, RequestId, TransferParams};
use kvferry::pool::{RequestTable, Text};
use kvferry_protocol::BlockId;

use super::submission::Submission;

pub(super) struct Request {
    /// The order of submission: the youngest is put back first.
    pub(super) number: u64,
    pub(super) seen: contract::Request,
    pub(super) submission: Submission,
    /// Prompt and generated tokens.
    pub(super) text: Text,
    /// Tokens whose KV is in the cache, or will be when the load is over.
    pub(super) computed: usize,
    /// So many of them were in the cache when it was admitted.
    pub(super) local: usize,
    /// So many of the next ones are the connector's, until they were lost.
    pub(super) brought: usize,
    /// None while the request waits.
    pub(super) table: Option<RequestTable>,
    /// Whether the connector knows of it: it was admitted at least once.
    pub(super) is_known: bool,
    /// Whether a step since its admission was computed and not void, so that nothing is brought any more.
    pub(super) has_stepped: bool,
}

impl Request {
    pub(super) fn new(number: u64, seen: contract::Request, submission: Submission, text: Text) -> Self {
        let (computed, local, brought, table) = Default::default();
        let (is_known, has_stepped) = (false, false);
        Self { number, seen, submission, text, computed, local, brought, table, is_known, has_stepped }
    }

    /// Forgets its blocks; what it has generated stays.
    pub(super) fn put_back(&mut self) {
        (self.computed, self.local, self.brought, self.table, self.has_stepped) = (0, 0, 0, None, false);
    }

    pub(super) fn tokens(&self) -> usize {
        self.text.tokens().len()
    }

    pub(super) fn generated(&self) -> usize {
        self.tokens() - self.submission.prompt.len()
    }

    /// Tokens whose KV may come from elsewhere: the last one is always computed here, since its logits choose the next.
    pub(super) fn most_brought(&self) -> usize {
        self.tokens() - usize::from(self.submission.max_tokens > 0)
    }

    /// Whether a peer waits for its KV, which would be lost with its blocks.
    pub(super) const fn is_kept_for_a_peer(&self) -> bool {
        matches!(self.seen.params, Some(TransferParams::Keep { .. }))
    }

    pub(super) fn block_ids(&self) -> &[BlockId] {
        self.table.as_ref().map_or(&[], RequestTable::ids)
    }
}

pub(super) fn take_out(requests: &mut Vec<Request>, id: &RequestId) -> Option<Request> {
    let at = requests.iter().position(|request| request.seen.id == *id)?;
    Some(requests.remove(at))
}
