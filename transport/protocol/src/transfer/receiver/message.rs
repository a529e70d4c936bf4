//! What the sender says to a receiver.

use super::{Next, Planted, Receiver, State};
use crate::message::{Abort, Ended, Message, Offer, Reason, Stopped, Verdict};
use crate::transfer::{InputError, Time};

impl Receiver {
    /// A message of the sender.
    ///
    /// # Errors
    /// [`InputError`] if it is of another transfer, or does not fit: such as come late or twice, or are for a sender.
    pub fn message(&mut self, now: Time, message: Message) -> Result<(), InputError> {
        let (transfer, found, input) = (self.config.transfer, message.transfer(), message.name());
        if found != Some(transfer) {
            return Err(self.ignore(InputError::Transfer { transfer, input, found }));
        }
        match message {
            Message::Offer(offer) => self.offer(now, &offer),
            Message::Working(_) => self.working(now),
            Message::Stopped(stopped) => self.stopped(now, stopped),
            Message::Abort(abort) => self.abort(now, abort),
            Message::Ended(ended) => self.ended(now, ended),
            Message::Manifest(_)
            | Message::Grant(_)
            | Message::Renew(_)
            | Message::Stop(_)
            | Message::Spare(_)
            | Message::Engine(_) => Err(self.misfit(input)),
        }
    }

    /// The sender's engine still computes, or has not come to the request: the wait for its first bytes begins anew. The
    /// transfer's own deadline goes on.
    fn working(&mut self, now: Time) -> Result<(), InputError> {
        match &mut self.state {
            State::Granted { stalled_by, .. } => {
                *stalled_by = now + self.config.progress;
                Ok(())
            }
            State::Waiting
            | State::Granting { .. }
            | State::Stopping { .. }
            | State::Fencing { .. }
            | State::Lingering { .. }
            | State::Closed => Err(self.misfit("Working")),
        }
    }

    fn offer(&mut self, now: Time, offer: &Offer) -> Result<(), InputError> {
        match &self.state {
            State::Waiting => {
                let held = offer.held;
                let beyond = self.config.wanted.rects().find(|&wanted| !held.contains(wanted));
                if let Some(beyond) = beyond {
                    let text = format!("wanted {beyond}, the sender holds {held}");
                    self.end(now, Verdict::failed(Reason::Range, text));
                    return Ok(());
                }
                self.offered = true;
                self.try_grant(now);
                Ok(())
            }
            // The sender has not heard how it ended.
            State::Lingering { .. } => {
                self.repeat_word();
                Ok(())
            }
            State::Granting { .. }
            | State::Granted { .. }
            | State::Stopping { .. }
            | State::Fencing { .. }
            | State::Closed => Err(self.misfit("Offer")),
        }
    }

    fn stopped(&mut self, now: Time, stopped: Stopped) -> Result<(), InputError> {
        match self.state.clone() {
            State::Stopping { generation, verdict, .. } if generation == stopped.generation => {
                self.fence(now, generation, true, Next::End(verdict));
                Ok(())
            }
            State::Stopping { .. } => Err(self.other_generation("Stopped", stopped.generation)),
            State::Waiting
            | State::Granting { .. }
            | State::Granted { .. }
            | State::Fencing { .. }
            | State::Lingering { .. }
            | State::Closed => Err(self.misfit("Stopped")),
        }
    }

    fn abort(&mut self, now: Time, abort: Abort) -> Result<(), InputError> {
        let verdict = match abort.why {
            Verdict::Done if self.bug.is(Planted::AbortIsDone) || self.bug.is(Planted::AbortDoneTaken) => Verdict::Done,
            Verdict::Done => self.violation("it aborted with the verdict Done"),
            Verdict::Failed(_) | Verdict::Cancelled if self.bug.is(Planted::AbortIsDone) => Verdict::Done,
            Verdict::Failed(failure) => Verdict::Failed(failure),
            Verdict::Cancelled => Verdict::Cancelled,
        };
        match &self.state {
            State::Lingering { .. } => self.repeat_word(),
            State::Closed => return Err(self.misfit("Abort")),
            // An end that is decided stands; the sender hears it.
            State::Waiting
            | State::Granting { .. }
            | State::Granted { .. }
            | State::Stopping { .. }
            | State::Fencing { .. } => {
                self.end(now, verdict);
            }
        }
        Ok(())
    }

    /// The sender ended, and nothing of it is posted any more.
    fn ended(&mut self, now: Time, ended: Ended) -> Result<(), InputError> {
        match self.state.clone() {
            State::Lingering { .. } => {
                self.state = State::Closed;
                return Ok(());
            }
            State::Closed => return Err(self.misfit("Ended")),
            State::Stopping { generation, verdict, .. } => {
                self.sender_ended = true;
                self.fence(now, generation, true, Next::End(verdict));
            }
            State::Waiting | State::Granting { .. } | State::Granted { .. } | State::Fencing { .. } => {
                self.sender_ended = true;
                let verdict = match ended.verdict {
                    Verdict::Failed(failure) => Verdict::Failed(failure),
                    Verdict::Done if self.bug.is(Planted::EndedDoneTaken) => Verdict::Done,
                    Verdict::Done | Verdict::Cancelled => self.violation("it ended before the receiver's word"),
                };
                self.end(now, verdict);
            }
        }
        Ok(())
    }

    pub(super) fn violation(&mut self, what: &str) -> Verdict {
        self.stats.violations += 1;
        Verdict::failed(Reason::Protocol, format!("the sender broke the protocol: {what}"))
    }
}
