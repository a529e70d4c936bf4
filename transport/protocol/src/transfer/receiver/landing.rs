//! What lands under a grant, and what its digests say.

use super::{Landing, Next, Planted, Receiver, State};
use crate::digest::Digest;
use crate::ids::Generation;
use crate::message::{Reason, Verdict, Wrote};
use crate::transfer::output::ReceiverOutput;
use crate::transfer::sequences::SequenceError;
use crate::transfer::{InputError, Time};

impl Receiver {
    /// The most writes that landed and wait for their digest.
    pub const MAX_UNVERIFIED: usize = 4096;

    /// A write of the peer landed; all its bytes are in place. To be hashed if [`ReceiverOutput::Verify`] follows.
    ///
    /// A write outside the grant, or over bytes that landed before, ends the transfer.
    ///
    /// # Errors
    /// [`InputError`] if it is of another transfer or grant, came before, or came after `fenced`.
    pub fn landed(&mut self, now: Time, wrote: Wrote) -> Result<(), InputError> {
        let (transfer, sequence, rect) = (self.config.transfer, wrote.sequence, wrote.rect);
        if wrote.transfer != transfer {
            let found = Some(wrote.transfer);
            return Err(self.ignore(InputError::Transfer { transfer, input: "landed", found }));
        }
        let generation = match &self.state {
            State::Granted { generation, .. }
            | State::Stopping { generation, .. }
            | State::Fencing { generation, fenced: false, .. } => *generation,
            State::Waiting
            | State::Granting { .. }
            | State::Fencing { fenced: true, .. }
            | State::Lingering { .. }
            | State::Closed => return Err(self.misfit("landed")),
        };
        if wrote.generation != generation {
            return Err(self.other_generation("landed", wrote.generation));
        }
        match self.sequences.take(sequence) {
            Ok(()) => {}
            Err(SequenceError::Before) if self.bug.is(Planted::SequenceTwice) => {}
            Err(SequenceError::Before) => {
                return Err(self.ignore(InputError::Sequence { transfer, input: "landed", sequence }));
            }
            Err(SequenceError::TooFar) => {
                self.break_off(now, &format!("write {sequence} is too far ahead"));
                return Ok(());
            }
        }
        if !self.asked.contains(rect) && !self.bug.is(Planted::OutsideGrantTaken) {
            self.break_off(now, &format!("write {sequence} of {rect} is outside the grant"));
            return Ok(());
        }
        let landed_before = self.unverified.values().any(|other| other.rect.overlaps(rect));
        if (landed_before || self.verified.overlaps(rect)) && !self.bug.is(Planted::OverlapTaken) {
            // Too shredded to be told apart: then nothing is good.
            if self.tainted.insert(rect).is_err() {
                self.tainted = self.config.wanted.clone();
            }
            self.break_off(now, &format!("write {sequence} of {rect} is over bytes that landed before"));
            return Ok(());
        }
        if self.unverified.len() >= Self::MAX_UNVERIFIED {
            let limit = Self::MAX_UNVERIFIED;
            self.end(now, Verdict::failed(Reason::Limit, format!("more than {limit} writes wait for their digest")));
            return Ok(());
        }
        self.stats.writes += 1;
        self.unverified.insert(sequence, Landing { rect, claimed: wrote.digest });
        self.outputs.push_back(ReceiverOutput::Verify { generation, sequence, rect });
        if self.bug.is(Planted::VisibleBeforeDigest) {
            self.outputs.push_back(ReceiverOutput::Verified(rect));
        }
        Ok(())
    }

    /// The digest of the bytes that [`ReceiverOutput::Verify`] named.
    ///
    /// # Errors
    /// [`InputError`] if it was not asked for.
    pub fn digested(
        &mut self,
        now: Time,
        generation: Generation,
        sequence: u32,
        digest: Digest,
    ) -> Result<(), InputError> {
        let Landing { rect, claimed } = self.take_unverified(generation, sequence, "digested")?;
        if digest == claimed || self.bug.is(Planted::DigestIgnored) {
            self.verify(now, rect);
        } else {
            self.stats.digest_mismatches += 1;
            let text = format!("{rect}: {:016x} was sent, {:016x} landed", claimed.get(), digest.get());
            self.end(now, Verdict::failed(Reason::Digest, text));
        }
        self.after_fence(now);
        Ok(())
    }

    /// The bytes that [`ReceiverOutput::Verify`] named cannot be hashed; nothing reads them any more. Ends the transfer.
    ///
    /// # Errors
    /// [`InputError`] if it was not asked for.
    pub fn digest_failed(
        &mut self,
        now: Time,
        generation: Generation,
        sequence: u32,
        problem: &str,
    ) -> Result<(), InputError> {
        let Landing { rect, .. } = self.take_unverified(generation, sequence, "digest_failed")?;
        self.end(now, Verdict::failed(Reason::Digest, format!("{rect} cannot be hashed: {problem}")));
        self.after_fence(now);
        Ok(())
    }

    fn take_unverified(
        &mut self,
        generation: Generation,
        sequence: u32,
        input: &'static str,
    ) -> Result<Landing, InputError> {
        if self.generation != Some(generation) {
            return Err(self.other_generation(input, generation));
        }
        let transfer = self.config.transfer;
        self.unverified
            .remove(&sequence)
            .ok_or_else(|| self.stats.ignored.count(InputError::Sequence { transfer, input, sequence }))
    }

    /// Ends the transfer over a write that should not be. It may have changed verified bytes, so not even `Done` stands.
    fn break_off(&mut self, now: Time, what: &str) {
        let verdict = self.violation(what);
        if let State::Fencing { next: next @ Next::End(Verdict::Done), .. } = &mut self.state {
            *next = Next::End(verdict);
        } else {
            self.end(now, verdict);
        }
    }

    fn verify(&mut self, now: Time, rect: super::Rect) {
        if let Err(error) = self.verified.insert(rect) {
            self.end(now, Verdict::failed(Reason::Limit, error.to_string()));
            return;
        }
        match self.state.clone() {
            State::Granted { generation, renew_at, .. } => {
                self.outputs.push_back(ReceiverOutput::Verified(rect));
                if self.is_complete() {
                    self.fence(now, generation, true, Next::End(Verdict::Done));
                } else {
                    let stalled_by = now + self.config.progress;
                    self.state = State::Granted { generation, stalled_by, renew_at };
                }
            }
            State::Fencing { next: Next::Regrant, .. } => self.outputs.push_back(ReceiverOutput::Verified(rect)),
            // The engine learns from the end what is good.
            State::Fencing { next: Next::End(_), .. } | State::Stopping { .. } => {}
            State::Waiting | State::Granting { .. } | State::Lingering { .. } | State::Closed => {}
        }
    }
}
