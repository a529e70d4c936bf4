//! What the receiver says to a sender.

use std::time::Duration;

use super::{Planted, Sender, State};
use crate::message::{Abort, Ended, Failure, Grant, Message, Reason, Renew, Stop, Verdict, Working};
use crate::transfer::output::SenderOutput;
use crate::transfer::{Coverage, InputError, Time};

impl Sender {
    /// A message of the receiver.
    ///
    /// # Errors
    /// [`InputError`] if it is of another transfer or an older grant, or does not fit: such as come late or twice, or are for a
    /// receiver.
    pub fn message(&mut self, now: Time, message: Message) -> Result<(), InputError> {
        let (transfer, found, input) = (self.config.transfer, message.transfer(), message.name());
        if found != Some(transfer) {
            return Err(self.ignore(InputError::Transfer { transfer, input, found }));
        }
        match message {
            Message::Grant(grant) => self.grant(now, grant),
            Message::Renew(renew) => self.renew(now, renew),
            Message::Stop(stop) => self.stop(now, stop),
            Message::Ended(ended) => self.ended(ended),
            Message::Manifest(_)
            | Message::Offer(_)
            | Message::Working(_)
            | Message::Stopped(_)
            | Message::Abort(_)
            | Message::Spare(_)
            | Message::Engine(_) => Err(self.misfit(input)),
        }
    }

    fn grant(&mut self, now: Time, grant: Grant) -> Result<(), InputError> {
        let (transfer, found) = (self.config.transfer, grant.generation);
        if self.heard.is_some_and(|heard| found <= heard) && !self.bug.is(Planted::OldGrantTaken) {
            return Err(self.ignore(InputError::Generation { transfer, input: "Grant", found, expected: self.heard }));
        }
        match self.state.clone() {
            State::Waiting { .. } => {}
            State::Granted { generation, .. } => self.cancel_posts(generation),
            // It crossed our word, or ours was lost.
            State::Aborting { why, .. } => {
                self.heard = Some(found);
                self.say(Message::Abort(Abort { transfer, why }));
                return Ok(());
            }
            State::Ending { .. } | State::Closed => return Err(self.misfit("Grant")),
        }
        self.heard = Some(found);
        self.state = State::Waiting { word_by: Some(now + self.config.word) };
        let held = self.config.held;
        if let Some(beyond) = grant.missing.as_slice().iter().find(|&&rect| !held.contains(rect)) {
            let text = format!("the grant asks for {beyond}, the sender holds {held}");
            self.abort(now, Verdict::failed(Reason::Range, text));
            return Ok(());
        }
        let asked = Coverage::of(grant.missing.as_slice());
        let ready = asked.as_ref().map_err(Clone::clone).and_then(|asked| asked.intersect(&self.computed));
        let (Ok(asked), Ok(ready)) = (asked, ready) else {
            self.abort(now, Verdict::failed(Reason::Limit, "the grant asks for too many rectangles"));
            return Ok(());
        };
        (self.asked, self.ready) = (asked, ready);
        self.windows = grant.missing.as_slice().to_vec();
        self.next_sequence = 0;
        self.stats.grants += 1;
        // The lease is held in these states, so this cannot fail; `timeout` notices if it is at its limit.
        let _held = self.lease.renew(now, Duration::from_millis(grant.ttl_ms.into()));
        self.state = State::Granted { generation: found, word_by: None };
        self.outputs.push_back(SenderOutput::Adopt(grant));
        self.post(now);
        Ok(())
    }

    fn renew(&mut self, now: Time, renew: Renew) -> Result<(), InputError> {
        match &self.state {
            State::Waiting { .. } | State::Granted { .. } => {
                let _held = self.lease.renew(now, Duration::from_millis(renew.ttl_ms.into()));
                if self.waits_for_compute() {
                    self.say(Message::Working(Working { transfer: self.config.transfer }));
                }
                Ok(())
            }
            State::Aborting { .. } | State::Ending { .. } | State::Closed => Err(self.misfit("Renew")),
        }
    }

    fn stop(&mut self, now: Time, stop: Stop) -> Result<(), InputError> {
        if matches!(self.state, State::Closed) {
            return Err(self.misfit("Stop"));
        }
        if let State::Granted { generation, .. } = self.state
            && generation <= stop.generation
        {
            self.cancel_posts(generation);
            self.state = State::Waiting { word_by: Some(now + self.config.word) };
        }
        // A grant that this overtook is dead, too.
        self.heard = self.heard.max(Some(stop.generation));
        self.stop = self.stop.max(Some(stop.generation));
        self.settle();
        Ok(())
    }

    /// The receiver's word: it decides. A sender that asked for an end keeps its reason where the pair of verdicts allows it.
    fn ended(&mut self, ended: Ended) -> Result<(), InputError> {
        let own = match &self.state {
            State::Waiting { .. } | State::Granted { .. } => None,
            State::Aborting { why, .. } => Some(why.clone()),
            State::Ending { .. } | State::Closed => return Err(self.misfit("Ended")),
        };
        let verdict = match (ended.verdict, own) {
            // There may have been a receiver that was done and is forgotten: this is no word.
            (Verdict::Failed(Failure { reason: Reason::Unknown, text }), _) => Verdict::failed(Reason::NoWord, text),
            (Verdict::Done, _) => Verdict::Done,
            (Verdict::Failed(_) | Verdict::Cancelled, Some(Verdict::Failed(own))) => Verdict::Failed(own),
            (Verdict::Failed(theirs), _) => Verdict::Failed(theirs),
            (Verdict::Cancelled, _) => Verdict::Cancelled,
        };
        self.decide(verdict);
        Ok(())
    }
}
