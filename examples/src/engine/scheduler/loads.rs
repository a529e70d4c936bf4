//! What the connector brought, and what it did not.

use kvferry::config::LoadFailurePolicy;
use kvferry::contract::{self, LoadFailure, RequestId};

use super::request::take_out;
use super::{Event, FinishReason, Scheduler};

impl<C: contract::Scheduler> Scheduler<C> {
    /// A request's KV is there, or will be by the time that a layer reads it.
    pub(super) fn loaded(&mut self, id: &RequestId) -> Option<Event> {
        let request = take_out(&mut self.loading, id)?;
        // The contract's second call: the request is admitted now, and nothing more is brought.
        let accepted = self.connector.allocated(&request.seen, request.block_ids(), request.local as u32, 0);
        self.running.push(request);
        accepted.err().and_then(|error| self.finish(id, FinishReason::Failed(error.to_string())))
    }

    /// A request's KV did not come, or not all of it.
    pub(super) fn lost(&mut self, failure: LoadFailure) -> Option<Event> {
        let LoadFailure { request: id, good_tokens, good_blocks, reason } = failure;
        if self.config.on_load_failure == LoadFailurePolicy::Fail {
            self.failed_loads += 1;
            return self.finish(&id, FinishReason::Failed(reason));
        }
        tracing::warn!(request = %id, good_tokens, reason, "KV was lost in transit; computing the rest here");
        self.recomputed += self.compute_from(LoadFailure { request: id, good_tokens, reason, good_blocks }) as u64;
        None
    }

    /// The rest of a request behind its good prefix is computed here; returns how many tokens were to be brought.
    pub(super) fn compute_from(&mut self, failure: LoadFailure) -> usize {
        let LoadFailure { request: id, good_tokens, .. } = failure;
        if let Some(request) = take_out(&mut self.loading, &id) {
            self.running.push(request);
        }
        let Some(request) = self.running.iter_mut().find(|request| request.seen.id == id) else { return 0 };
        // The step that this verdict voids may have computed the last token already, and all before it may be good. What others share
        // with it is not computed again: nobody writes those blocks.
        let good = (good_tokens as usize).min(request.computed).min(request.most_brought()).max(request.local);
        let lost = (request.local + request.brought).saturating_sub(good);
        request.brought = request.brought.min(good.saturating_sub(request.local));
        request.computed = good;
        lost
    }
}
