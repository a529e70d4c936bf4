//! Blocks of answers that go back: decode offers them in writing, and prefill takes them, or refuses.

use crate::ids::TransferId;
use crate::message::{Abort, Ended, HashBytes, Message, Reason, Spare, Verdict};
use crate::transfer::EarlyInput;

use super::node::Inbox;
use super::plan::MS;
use super::scheduler::Step;
use super::versions;
use super::world::World;

/// Refused offers that a rank remembers.
const MAX_REFUSED: usize = 8;

impl World {
    /// Whether there is a session with the peer in which blocks can be offered.
    pub(super) fn may_offer(&self, index: usize, part: usize) -> bool {
        let view = self.nodes[index].views.get(&self.plan.parts[part].link);
        view.is_some_and(|view| view.up && versions::has(view.version, &self.spare_of(part)))
    }

    /// The first rank of the sending engine offers what all of them lend.
    pub(super) fn offer_spares(&mut self, index: usize, part: usize) -> Result<(), String> {
        if self.plan.nodes[index].rank != 0 {
            return Ok(());
        }
        self.report.count("offers of blocks");
        let spare = self.spare_of(part);
        self.send(index, self.plan.parts[part].link, spare)
    }

    /// A peer offers blocks: the scheduler decides. What is no offer of this peer, or is in use, is refused.
    pub(super) fn spare(&mut self, index: usize, link: usize, spare: Spare) -> Result<(), String> {
        let transfer = spare.transfer;
        let blocks = spare.hashes.as_slice().len() / HashBytes::EACH;
        let offered = self.part_of(transfer).filter(|&part| {
            let plan = &self.plan.parts[part];
            let ours = (plan.link, plan.receiver) == (link, index) && self.plan.requests[plan.request].returns;
            ours && blocks > 0 && spare.end_token(blocks).is_some()
        });
        let Some(part) = offered else { return self.refuse_spare(index, link, transfer) };
        let (request, engine) = (self.plan.parts[part].request, self.plan.nodes[index].engine);
        if self.ledger.is_new(request) {
            let wait = self.rng.within(0..20 * MS);
            self.engine_later(engine, wait, Step::Offered { request });
        }
        Ok(())
    }

    /// A scheduler gives blocks to what a peer offers, or refuses on every rank.
    pub(super) fn offered(&mut self, engine: usize, request: usize) -> Result<(), String> {
        if !self.ledger.is_new(request) {
            // It was said twice.
            return Ok(());
        }
        self.ledger.began(request, true)?;
        let from = self.plan.requests[request].from;
        let same_blocks = self.plan.engines[from].tokens_per_block == self.engines[engine].tokens_per_block;
        if same_blocks && self.start(engine, request) {
            self.report.count("offered blocks taken");
            return Ok(());
        }
        self.ledger.request_ended(request, true)?;
        self.tell(engine, |_| true, || Inbox::RefuseSpare { request });
        Ok(())
    }

    /// The engine does not want what a peer offered: its ranks say so, each to its twin.
    pub(super) fn refuse_spares(&mut self, index: usize, request: usize) -> Result<(), String> {
        for part in self.parts_here(index, request) {
            let (link, transfer) = (self.plan.parts[part].link, self.plan.parts[part].transfer);
            self.refuse_spare(index, link, transfer)?;
        }
        Ok(())
    }

    fn refuse_spare(&mut self, index: usize, link: usize, transfer: TransferId) -> Result<(), String> {
        self.report.count("offered blocks refused");
        let refused = &mut self.nodes[index].refused;
        if refused.len() >= MAX_REFUSED {
            refused.pop_first();
        }
        refused.insert((link, transfer));
        self.send(index, link, Message::Ended(Ended { transfer, verdict: Verdict::Cancelled }))
    }

    /// Blocks that were to go back are not lent any more: a grant that comes too late is answered at once.
    pub(super) fn offer_no_more(&mut self, index: usize, part: usize) -> Result<(), String> {
        let now = self.nodes[index].clock(self.now);
        let (link, transfer) = (self.plan.parts[part].link, self.plan.parts[part].transfer);
        let node = &mut self.nodes[index];
        let Some(view) = node.views.get(&link).filter(|view| view.up) else { return Ok(()) };
        if node.early.is_declined(&view.id, transfer) {
            return Ok(());
        }
        self.report.visits.early(node.early.state(&view.id, transfer), EarlyInput::Decline);
        let text = "it waited too long";
        let answer = node.early.decline(now, &view.id, transfer, text);
        self.check_early(index)?;
        let word = || Message::Abort(Abort { transfer, why: Verdict::failed(Reason::Unknown, text) });
        self.send(index, link, answer.unwrap_or_else(word))
    }
}
