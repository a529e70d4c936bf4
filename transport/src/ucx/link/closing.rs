//! A link's end: what is under way is let through, then UCX lets go of everything.

use std::rc::Rc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::super::error::UcxError;
use super::super::events::UcxEvent;
use super::{Link, Purpose, Stage, tell};

impl Link {
    pub(super) fn begin_closing(&mut self, reason: UcxError, now: Instant) {
        if let Stage::Closing { .. } = self.stage {
            return;
        }
        tracing::debug!(link = %self.id, %reason, "link ends");
        // What is under way to a peer that is alive is let through: one that emulates puts does not bear it that a connection ends
        // between two of them (see `lanes`).
        let until = match self.stage {
            Stage::Connecting { since } if self.is_greeting_stuck() => since + self.connect,
            _ if matches!(reason, UcxError::Closed { .. }) => now + self.drain,
            _ => now,
        };
        self.stage = Stage::Closing { until, is_closed: false };
        self.worker.inbox().shut();
        self.reason = Some(reason);
        self.queued.clear();
        self.to_flush.clear();
        self.close_drained(now);
    }

    /// Whether UCX would abort the process if the endpoint were closed now.
    ///
    /// An endpoint that has not sent its first request yet, because the peer's ud does not answer, holds it in a queue; UCX before
    /// 1.14, built with assertions as Debian's is, fails one when it empties that queue (openucx/ucx pull request 8175). Closing then
    /// waits for the greeting, as long as connecting may take, and if that never leaves the worker is left to the process. The peer has
    /// heard nothing through it and knows of no window that it could write.
    fn is_greeting_stuck(&self) -> bool {
        !self.was_ready
            && self.endpoint.is_some()
            && self.counts.under_way() > 0
            && self.worker.aborts_if_closed_early()
    }

    pub(super) fn close_drained(&mut self, now: Instant) {
        let Stage::Closing { until, is_closed: false } = self.stage else { return };
        if self.counts.under_way() > 0 && now < until {
            return;
        }
        self.is_abandoned = self.is_greeting_stuck();
        self.stage = Stage::Closing { until: now + self.drain, is_closed: true };
        let ticket = self.ticket(Purpose::Close);
        if let Some(endpoint) = self.endpoint.as_mut().filter(|_| !self.is_abandoned) {
            endpoint.close(&ticket);
        }
        ticket.seal();
        self.closing = Some(ticket);
    }

    /// Whether UCX may be told to let go of everything.
    pub(in crate::ucx) fn is_over(&self, now: Instant) -> bool {
        matches!(self.stage, Stage::Closing { until, is_closed: true } if self.is_drained() || now >= until)
    }

    /// Whether UCX reads and writes nothing of ours any more. The closing of the endpoint itself is not waited for: the worker is
    /// destroyed next, and driving it meanwhile would let the peer's emulated puts in.
    fn is_drained(&self) -> bool {
        self.counts.under_way() == self.closing.as_ref().map_or(0, |closing| closing.under_way())
    }

    /// Destroys endpoint and worker, then ends what was left. After this no byte of the peer lands through this link, and UCX
    /// reads nothing of its posts.
    pub(in crate::ucx) fn finish(mut self, out: &mut Vec<UcxEvent>) {
        if self.is_abandoned {
            tracing::warn!(link = %self.id, "UCX cannot close an endpoint whose peer never answered; its worker is left");
            // What UCX may still read of it: the greeting. Everything else is the worker's own.
            std::mem::forget((self.endpoint.take(), Rc::clone(&self.worker), std::mem::take(&mut self.headers)));
        }
        let is_drained = self.is_drained();
        if let Some(mut endpoint) = self.endpoint.take() {
            if is_drained {
                endpoint.set_drained();
            } else {
                tracing::warn!(link = %self.id, under_way = self.counts.under_way(), "UCX did not end all operations in time");
            }
        }
        let strangers = self.worker.inbox().strangers();
        if strangers > 0 {
            tracing::warn!(link = %self.id, strangers, "active messages without the peer's token were dropped");
        }
        let Self { worker, mut posts, gate, id, reason, waiting, tickets, is_abandoned, .. } = self;
        debug_assert!(is_abandoned || Rc::strong_count(&worker) == 1, "an endpoint would keep it");
        drop(worker);
        drop(tickets);
        let reason = reason.unwrap_or(UcxError::NoLink { link: id });
        let mut ended: Vec<u64> = posts.keys().copied().collect();
        ended.sort_unstable();
        for post in ended {
            let Some(flying) = posts.remove(&post) else { continue };
            let outcome = if flying.cancelled.is_some() { UcxError::Cancelled } else { reason.clone() };
            gate.posts.fetch_sub(1, Ordering::Relaxed);
            out.push(UcxEvent::Posted { link: id, post, outcome: Err(outcome) });
            flying.waiting.iter().for_each(tell);
        }
        out.push(UcxEvent::Down { link: id, reason });
        waiting.iter().for_each(tell);
    }
}
