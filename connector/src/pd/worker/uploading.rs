//! A load whose pages are on a device: its frames of staging, and what landed in them on its way to the pages.

use std::sync::Arc;

use kvferry_kernels::device::Event;
use kvferry_protocol::message::Verdict;
use kvferry_protocol::transfer::{GrantRefusal, ReceiverState, Rect};
use kvferry_protocol::{Generation, TransferId};

use super::device::{Staged, Upload};
use super::driver::{Driver, Side};
use super::jobs::{Job, WriteKey};

/// A grant that a machine asked for and that waits for frames.
#[derive(Debug)]
pub(super) struct WaitingGrant {
    transfer: TransferId,
    generation: Generation,
    missing: Vec<Rect>,
}

impl Driver {
    /// Makes a grant, or has it wait until there are frames for it. Who asked first is granted first.
    pub(super) fn grant_or_wait(&mut self, transfer: TransferId, generation: Generation, missing: Vec<Rect>) {
        let waiting = WaitingGrant { transfer, generation, missing };
        let waiting = if self.waiting_grants.is_empty() { self.try_grant(waiting) } else { Some(waiting) };
        if let Some(waiting) = waiting {
            self.board.metrics.staging_waits_total.add(1);
            self.waiting_grants.push_back(waiting);
        }
    }

    /// Makes the grants for which there are frames, and answers machines that want none any more.
    pub(super) fn push_grants(&mut self) {
        let mut index = 0;
        while let Some(WaitingGrant { transfer, generation, .. }) = self.waiting_grants.get(index) {
            let (transfer, generation) = (*transfer, *generation);
            let state = self.receiving.get(&transfer).map(|entry| entry.machine.kind());
            if state == Some(ReceiverState::Granting) {
                index += 1;
                continue;
            }
            // Its end, or that of its session, goes before: it asks again if it goes on.
            self.waiting_grants.remove(index);
            self.with_receiving(transfer, |entry, now| {
                entry.machine.grant_refused(now, generation, GrantRefusal::NotConnected)
            });
        }
        while let Some(waiting) = self.waiting_grants.pop_front() {
            let transfer = waiting.transfer;
            match self.try_grant(waiting) {
                Some(waiting) => return self.waiting_grants.push_front(waiting),
                None => self.turn(transfer, Side::Receiving),
            }
        }
    }

    /// Makes a grant, or tells the machine why it cannot be; gives it back if there are not enough frames. What the machine wants then
    /// is for the caller to do.
    fn try_grant(&mut self, waiting: WaitingGrant) -> Option<WaitingGrant> {
        let WaitingGrant { transfer, generation, missing } = &waiting;
        match self.stage(*transfer, missing) {
            Ok(Some(staged)) => self.make_grant(*transfer, *generation, missing, staged),
            Ok(None) => return Some(waiting),
            Err(problem) => {
                let now = self.now();
                if let Some(entry) = self.receiving.get_mut(transfer) {
                    let refusal = GrantRefusal::Impossible(problem);
                    let taken = entry.machine.grant_refused(now, *generation, refusal);
                    self.note(taken);
                }
            }
        }
        None
    }

    /// Frames for each rectangle; none where peers write into the pages themselves.
    fn stage(&self, transfer: TransferId, missing: &[Rect]) -> Result<Option<Vec<Arc<Staged>>>, String> {
        let Some(staging) = &self.staging else { return Ok(Some(Vec::new())) };
        let Some(entry) = self.receiving.get(&transfer) else { return Ok(Some(Vec::new())) };
        let Some(load) = self.loads.get(&entry.load) else { return Ok(Some(Vec::new())) };
        let mut staged = Vec::with_capacity(missing.len());
        for &rect in missing {
            let (blocks, first_token) = load.blocks_of(rect, self.caches.tokens_per_block());
            match staging.take(blocks, first_token, entry.heads.clone())? {
                Some(frames) => staged.push(frames),
                // What was taken is free again.
                None => return Ok(None),
            }
        }
        Ok(Some(staged))
    }

    /// The machine has judged what landed in frames. What is verified goes on to the pages; the rest is over.
    pub(super) fn judged(&mut self, write: WriteKey, (rect, staged): (Rect, Arc<Staged>)) {
        let Some(entry) = self.receiving.get_mut(&write.transfer) else { return };
        let load = self.loads.get(&entry.load);
        let is_good = entry.machine.verified().contains(rect);
        match load.filter(|_| is_good) {
            Some(load) => {
                let after = load.after.clone();
                self.verify(Job::Upload(Upload { write, rect, staged, after }));
            }
            None => {
                entry.verifying -= 1;
                drop(staged);
                self.finish_receiving(write.transfer);
            }
        }
    }

    /// A mover has queued the work that brings a write to the pages: whoever computes behind `begun` finds it there.
    pub(super) fn uploading(&mut self, write: WriteKey, rect: Rect, begun: Result<Arc<dyn Event>, String>) {
        let Some(entry) = self.receiving.get(&write.transfer) else { return };
        let (load, heads) = (entry.load, entry.heads.clone());
        match begun {
            Ok(event) => {
                if let Some(load) = self.loads.get(&load) {
                    let first = self.caches.layers().start;
                    let layers = rect.layers().start - first..rect.layers().end - first;
                    self.board.progress.on_its_way(&load.request, layers, &event);
                }
                self.verified(load, write.transfer, &heads, rect);
            }
            Err(problem) => self.upload_failed(write, problem),
        }
    }

    /// Nothing of a write is on its way to the pages any more.
    pub(super) fn uploaded(&mut self, write: WriteKey, ended: Result<(), String>) {
        if let Err(problem) = ended {
            self.upload_failed(write, problem);
        }
        if let Some(entry) = self.receiving.get_mut(&write.transfer) {
            entry.verifying -= 1;
        }
        self.finish_receiving(write.transfer);
    }

    /// The bytes came, and are not in the pages: nothing of the part counts as good, whatever its machine knows.
    fn upload_failed(&mut self, write: WriteKey, problem: String) {
        tracing::error!(transfer = %write.transfer, problem, "what landed was not brought to the device");
        let Some(entry) = self.receiving.get_mut(&write.transfer) else { return };
        entry.spoiled.get_or_insert(format!("what landed was not brought to the device: {problem}"));
        if entry.is_live() {
            self.with_receiving(write.transfer, |entry, now| entry.machine.cancel(now));
        }
    }
}

/// Why a part has failed although its verdict may say otherwise, and how far it is good then.
pub(super) fn spoiled_end(verdict: &Verdict, spoiled: &str) -> String {
    match verdict {
        Verdict::Done => spoiled.to_owned(),
        verdict => format!("{spoiled} ({verdict})"),
    }
}
