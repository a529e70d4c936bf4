//! The receiving end of one transfer from one peer endpoint.
//!
//! States: `Waiting` (for a session, or the offer) → `Granting` (the driver makes a grant) → `Granted` (writes land) →
//! `Stopping` (the sender is asked to stop) → `Fencing` (the grant is being revoked) → `Waiting` again after a cut, or
//! `Lingering` (finished; the sender may not have heard the word) → `Closed`. Blocks are free on `Finished`, never before.

mod config;
mod landing;
mod message;

use std::collections::{BTreeMap, VecDeque};

use super::coverage::Coverage;
use super::input::{InputCounts, InputError};
use super::output::{Order, ReceiverEnd, ReceiverOutput};
use super::planted::{Bug, Planted};
use super::rect::Rect;
use super::sequences::Sequences;
use super::table::ReceiverState;
use super::time::Time;
use crate::digest::Digest;
use crate::ids::{Generation, TransferId};
use crate::message::{Ended, Grant, Message, Missing, OpaqueKey, Reason, Renew, Stop, Verdict, WindowBytes};

pub use config::{ReceiverConfig, ReceiverConfigError};

/// The receiving end of one transfer; its module says how it is driven.
#[derive(Debug)]
#[cfg_attr(feature = "sim", derive(Clone))]
pub struct Receiver {
    config: ReceiverConfig,
    state: State,
    link: Link,
    deadline: Time,
    /// Whether the sender offered in this transfer; a later grant needs no second offer.
    offered: bool,
    /// The last grant that was asked of the driver.
    generation: Option<Generation>,
    /// What that grant permits.
    asked: Coverage,
    sequences: Sequences,
    /// Landed under that grant, digest outstanding; by sequence.
    unverified: BTreeMap<u32, Landing>,
    verified: Coverage,
    /// Cells that were written a second time: not good any more, whatever they were.
    tainted: Coverage,
    /// The sender ended, or is gone for good: nobody waits for our word.
    sender_ended: bool,
    outputs: VecDeque<ReceiverOutput>,
    stats: ReceiverStats,
    bug: Bug,
}

/// What a receiver counted; monotonic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ReceiverStats {
    /// Inputs that were not taken.
    pub ignored: InputCounts,
    /// Grants made, the first included.
    pub grants: u64,
    /// Writes that landed and were taken.
    pub writes: u64,
    /// Writes whose digest did not match.
    pub digest_mismatches: u64,
    /// What the peer did against the protocol.
    pub violations: u64,
}

/// Why a driver could not make a grant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GrantRefusal {
    /// There is no session: the next one is waited for.
    NotConnected,
    /// It cannot be made, for this reason: the transfer fails.
    Impossible(String),
}

#[derive(Debug, Clone, Copy)]
struct Landing {
    rect: Rect,
    claimed: Digest,
}

/// The session with the peer.
#[derive(Debug, Clone, Copy)]
struct Link {
    up: bool,
    last_session: Option<u64>,
    /// While it is down: how long the peer may be away.
    absent_by: Time,
}

#[derive(Debug, Clone)]
enum State {
    Waiting,
    Granting { generation: Generation, then: Option<Next> },
    Granted { generation: Generation, stalled_by: Time, renew_at: Time },
    Stopping { generation: Generation, ask_until: Time, verdict: Verdict },
    Fencing { generation: Generation, fenced: bool, next: Next },
    Lingering { until: Time, verdict: Verdict },
    Closed,
}

/// What follows a fence.
#[derive(Debug, Clone)]
enum Next {
    Regrant,
    End(Verdict),
}

impl Receiver {
    /// Begins a transfer. Tell it the session with [`Receiver::peer_up`], now or later.
    ///
    /// # Errors
    /// [`ReceiverConfigError`].
    pub fn new(now: Time, config: ReceiverConfig) -> Result<Self, ReceiverConfigError> {
        config.check()?;
        Ok(Self {
            deadline: now + config.deadline,
            link: Link { up: false, last_session: None, absent_by: now + config.absent },
            config,
            state: State::Waiting,
            offered: false,
            generation: None,
            asked: Coverage::new(),
            sequences: Sequences::new(),
            unverified: BTreeMap::new(),
            verified: Coverage::new(),
            tainted: Coverage::new(),
            sender_ended: false,
            outputs: VecDeque::new(),
            stats: ReceiverStats::default(),
            bug: Bug::default(),
        })
    }

    /// A session with the peer's endpoint is up; sessions are numbered upwards.
    ///
    /// # Errors
    /// [`InputError::Session`] if it is not newer than the last; [`InputError::State`] if one is up, or all is over.
    pub fn peer_up(&mut self, now: Time, session: u64) -> Result<(), InputError> {
        if let Some(last) = self.link.last_session.filter(|&last| session <= last) {
            return Err(self.ignore(InputError::Session { transfer: self.config.transfer, found: session, last }));
        }
        if self.link.up {
            return Err(self.misfit("peer_up"));
        }
        match &self.state {
            State::Closed => return Err(self.misfit("peer_up")),
            State::Waiting
            | State::Granting { .. }
            | State::Granted { .. }
            | State::Stopping { .. }
            | State::Fencing { .. }
            | State::Lingering { .. } => {}
        }
        self.link.up = true;
        self.link.last_session = Some(session);
        self.try_grant(now);
        // The word may have been lost with the last session.
        self.repeat_word();
        Ok(())
    }

    /// The session with the peer ended; the transport revoked its grants.
    ///
    /// # Errors
    /// [`InputError::State`] if none was up, or all is over.
    pub fn peer_down(&mut self, now: Time) -> Result<(), InputError> {
        if !self.link.up || self.is_closed() {
            return Err(self.misfit("peer_down"));
        }
        self.link.up = false;
        self.link.absent_by = now + self.config.absent;
        match self.state.clone() {
            State::Granting { generation, then } => {
                self.state = State::Granting { generation, then: then.or(Some(Next::Regrant)) };
            }
            State::Granted { generation, .. } => self.fence(now, generation, true, Next::Regrant),
            State::Stopping { generation, verdict, .. } => self.fence(now, generation, true, Next::End(verdict)),
            State::Waiting | State::Fencing { .. } | State::Lingering { .. } | State::Closed => {}
        }
        Ok(())
    }

    /// The peer's engine restarted: it will never speak again.
    ///
    /// # Errors
    /// [`InputError::State`] if all is over.
    pub fn peer_restarted(&mut self, now: Time) -> Result<(), InputError> {
        match &self.state {
            State::Closed => return Err(self.misfit("peer_restarted")),
            State::Lingering { .. } => {
                self.sender_ended = true;
                self.state = State::Closed;
                return Ok(());
            }
            State::Waiting
            | State::Granting { .. }
            | State::Granted { .. }
            | State::Stopping { .. }
            | State::Fencing { .. } => {}
        }
        self.sender_ended = true;
        if self.link.up {
            self.peer_down(now)?;
        }
        self.end(now, Verdict::failed(Reason::PeerRestarted, "the sender's engine started anew"));
        Ok(())
    }

    /// The driver made the grant that [`ReceiverOutput::MakeGrant`] asked for.
    ///
    /// # Errors
    /// [`InputError::State`] or [`InputError::Generation`] if none was asked for; revoke it then.
    pub fn granted(
        &mut self,
        now: Time,
        generation: Generation,
        key: OpaqueKey,
        window: WindowBytes,
    ) -> Result<(), InputError> {
        let then = self.take_granting(generation, "granted")?;
        if let Some(next) = then {
            // The key never left, so nothing can be posted under it.
            self.fence(now, generation, true, next);
            return Ok(());
        }
        let missing = match Missing::new(self.asked.rects().collect()) {
            Ok(missing) => missing,
            Err(error) => {
                self.fence(now, generation, true, Next::End(Verdict::failed(Reason::Limit, error.to_string())));
                return Ok(());
            }
        };
        let (transfer, ttl_ms) = (self.config.transfer, self.ttl_ms(now));
        self.stats.grants += 1;
        self.say(Message::Grant(Grant { transfer, generation, key, ttl_ms, window, missing }));
        self.state = State::Granted {
            generation,
            stalled_by: now + self.config.progress,
            renew_at: now + self.config.renew_interval(),
        };
        Ok(())
    }

    /// The driver could not make the grant that [`ReceiverOutput::MakeGrant`] asked for.
    ///
    /// # Errors
    /// [`InputError::State`] or [`InputError::Generation`] if none was asked for.
    pub fn grant_refused(&mut self, now: Time, generation: Generation, why: GrantRefusal) -> Result<(), InputError> {
        let then = self.take_granting(generation, "grant_refused")?;
        self.state = State::Waiting;
        match (then, why) {
            (Some(Next::End(verdict)), _) => self.finish(now, verdict),
            (_, GrantRefusal::Impossible(problem)) => self.finish(now, Verdict::failed(Reason::Grant, problem)),
            (Some(Next::Regrant), GrantRefusal::NotConnected) => self.try_grant(now),
            // The session's end is on its way; a grant before the next one would be refused again.
            (None, GrantRefusal::NotConnected) if self.link.up => {
                self.link.up = false;
                self.link.absent_by = now + self.config.absent;
            }
            (None, GrantRefusal::NotConnected) => {}
        }
        Ok(())
    }

    /// The driver revoked the grant, and handed in all that landed under it before.
    ///
    /// # Errors
    /// [`InputError::State`] or [`InputError::Generation`] if that was not asked for.
    pub fn fenced(&mut self, now: Time, generation: Generation) -> Result<(), InputError> {
        match &mut self.state {
            State::Fencing { generation: expected, fenced, .. } if *expected == generation && !*fenced => {
                *fenced = true
            }
            State::Fencing { .. } => return Err(self.other_generation("fenced", generation)),
            State::Waiting
            | State::Granting { .. }
            | State::Granted { .. }
            | State::Stopping { .. }
            | State::Lingering { .. }
            | State::Closed => return Err(self.misfit("fenced")),
        }
        self.after_fence(now);
        Ok(())
    }

    /// The engine wants the transfer no more.
    ///
    /// # Errors
    /// [`InputError::State`] if its end is already decided.
    pub fn cancel(&mut self, now: Time) -> Result<(), InputError> {
        if self.end(now, Verdict::Cancelled) { Ok(()) } else { Err(self.misfit("cancel")) }
    }

    /// Does what is due by `now`.
    pub fn timeout(&mut self, now: Time) {
        if self.deadline <= now && !self.bug.is(Planted::NoDeadline) {
            let waited = self.config.deadline;
            self.end(now, Verdict::failed(Reason::Deadline, format!("not complete after {waited:?}")));
        }
        match self.state.clone() {
            State::Waiting if !self.link.up && self.link.absent_by <= now => {
                let waited = self.config.absent;
                self.end(
                    now,
                    Verdict::failed(Reason::PeerAbsent, format!("no session with the sender for {waited:?}")),
                );
            }
            State::Granted { stalled_by, .. } if stalled_by <= now => {
                let waited = self.config.progress;
                self.end(now, Verdict::failed(Reason::Stalled, format!("nothing verified for {waited:?}")));
            }
            State::Granted { generation, stalled_by, renew_at } if renew_at <= now => {
                self.say(Message::Renew(Renew { transfer: self.config.transfer, ttl_ms: self.ttl_ms(now) }));
                self.state = State::Granted { generation, stalled_by, renew_at: now + self.config.renew_interval() };
            }
            State::Stopping { generation, ask_until, verdict } if ask_until <= now => {
                self.fence(now, generation, false, Next::End(verdict));
            }
            State::Lingering { until, .. } if until <= now => self.state = State::Closed,
            State::Waiting
            | State::Granting { .. }
            | State::Granted { .. }
            | State::Stopping { .. }
            | State::Fencing { .. }
            | State::Lingering { .. }
            | State::Closed => {}
        }
    }

    /// When [`Receiver::timeout`] has something to do, and why; `None` if only an input can move it.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let deadline = (!self.bug.is(Planted::NoDeadline)).then_some((self.deadline, "deadline"));
        let own = match &self.state {
            State::Waiting if !self.link.up => Some((self.link.absent_by, "peer absent")),
            State::Waiting | State::Granting { then: None | Some(Next::Regrant), .. } => None,
            State::Granted { stalled_by, renew_at, .. } => Some((*stalled_by, "progress").min((*renew_at, "renew"))),
            State::Stopping { ask_until, .. } => return Some((*ask_until, "sender's word that it stopped")),
            State::Fencing { next: Next::Regrant, .. } => None,
            State::Granting { then: Some(Next::End(_)), .. }
            | State::Fencing { next: Next::End(_), .. }
            | State::Closed => return None,
            State::Lingering { until, .. } => return Some((*until, "linger")),
        };
        own.into_iter().chain(deadline).min()
    }

    /// The next thing to do; call until `None` after every input.
    pub fn poll_output(&mut self) -> Option<ReceiverOutput> {
        self.outputs.pop_front()
    }

    /// Whether all is over and the machine may be dropped.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    /// Which transfer.
    #[must_use]
    pub const fn transfer(&self) -> TransferId {
        self.config.transfer
    }

    /// What is verified so far.
    #[must_use]
    pub const fn verified(&self) -> &Coverage {
        &self.verified
    }

    /// What was counted so far.
    #[must_use]
    pub const fn stats(&self) -> ReceiverStats {
        self.stats
    }

    /// The state, as far as it decides which input fits.
    #[must_use]
    pub const fn kind(&self) -> ReceiverState {
        match &self.state {
            State::Waiting => ReceiverState::Waiting,
            State::Granting { then: None, .. } => ReceiverState::Granting,
            State::Granting { then: Some(Next::Regrant), .. } => ReceiverState::GrantingRegrant,
            State::Granting { then: Some(Next::End(_)), .. } => ReceiverState::GrantingEnd,
            State::Granted { .. } => ReceiverState::Granted,
            State::Stopping { .. } => ReceiverState::Stopping,
            State::Fencing { fenced: false, next: Next::Regrant, .. } => ReceiverState::FencingRegrant,
            State::Fencing { fenced: false, next: Next::End(_), .. } => ReceiverState::FencingEnd,
            State::Fencing { fenced: true, next: Next::Regrant, .. } => ReceiverState::JudgingRegrant,
            State::Fencing { fenced: true, next: Next::End(_), .. } => ReceiverState::JudgingEnd,
            State::Lingering { .. } => ReceiverState::Lingering,
            State::Closed => ReceiverState::Closed,
        }
    }

    /// The state's name, for errors, logs and metrics.
    #[must_use]
    pub const fn state(&self) -> &'static str {
        self.kind().name()
    }

    /// Whether the driver told it of a session that is up.
    #[must_use]
    pub const fn is_up(&self) -> bool {
        self.link.up
    }

    /// All that it is, but for what it counted: equal before and after an input that is refused.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn snapshot(&self) -> String {
        format!("{:?}", Self { stats: ReceiverStats::default(), ..self.clone() })
    }

    /// Plants a bug, so that a test can prove that it is seen.
    #[cfg(feature = "sim")]
    pub const fn plant(&mut self, bug: Option<Planted>) {
        self.bug = Bug::plant(bug);
    }
}

impl Receiver {
    /// Asks for a grant over what is still missing, if its time has come.
    fn try_grant(&mut self, now: Time) {
        let forgets = self.generation.is_some() && self.bug.is(Planted::RegrantForgotten);
        let may = matches!(self.state, State::Waiting) && self.link.up && !forgets;
        if !may || (self.config.order == Order::PrefillFirst && !self.offered) {
            return;
        }
        let verified = if self.bug.is(Planted::VerifiedAskedAgain) { &Coverage::new() } else { &self.verified };
        let missing = match self.config.wanted.minus(verified) {
            Ok(missing) => missing,
            Err(error) => return self.finish(now, Verdict::failed(Reason::Limit, error.to_string())),
        };
        let next = match self.generation {
            Some(last) if self.bug.is(Planted::GenerationReused) => last,
            Some(last) => Generation::new(last.get().saturating_add(1)),
            None => Generation::new(0),
        };
        self.generation = Some(next);
        self.outputs.push_back(ReceiverOutput::MakeGrant { generation: next, missing: missing.rects().collect() });
        self.asked = missing;
        self.sequences = Sequences::new();
        self.state = State::Granting { generation: next, then: None };
    }

    /// Decides the end, unless it is decided; returns whether it was open.
    fn end(&mut self, now: Time, verdict: Verdict) -> bool {
        match self.state.clone() {
            State::Waiting => self.finish(now, verdict),
            State::Granting { generation, then: None | Some(Next::Regrant) } => {
                self.state = State::Granting { generation, then: Some(Next::End(verdict)) };
            }
            State::Granted { generation, .. } => match self.config.ask_before_revoke {
                Some(wait) if self.link.up && !self.sender_ended => {
                    self.say(Message::Stop(Stop { transfer: self.config.transfer, generation }));
                    self.state = State::Stopping { generation, ask_until: now + wait, verdict };
                }
                Some(_) | None => self.fence(now, generation, self.sender_ended, Next::End(verdict)),
            },
            State::Fencing { generation, fenced, next: Next::Regrant } => {
                self.state = State::Fencing { generation, fenced, next: Next::End(verdict) };
            }
            State::Lingering { .. } if self.bug.is(Planted::FinishedTwice) => self.finish(now, verdict),
            State::Granting { then: Some(Next::End(_)), .. }
            | State::Stopping { .. }
            | State::Fencing { next: Next::End(_), .. }
            | State::Lingering { .. }
            | State::Closed => return false,
        }
        true
    }

    fn fence(&mut self, now: Time, generation: Generation, quiet: bool, next: Next) {
        let fenced = self.bug.is(Planted::GrantNotRevoked);
        if !fenced {
            self.outputs.push_back(ReceiverOutput::Revoke { generation, quiet });
        }
        self.state = State::Fencing { generation, fenced, next };
        if fenced || self.bug.is(Planted::FinishBeforeFence) {
            self.after_fence(now);
        }
    }

    /// Goes on once the grant is dead and every landed byte is judged.
    fn after_fence(&mut self, now: Time) {
        let State::Fencing { fenced, next, .. } = &self.state else { return };
        let early = self.bug.is(Planted::FinishBeforeFence) && matches!(next, Next::End(_));
        if !early && (!fenced || !self.unverified.is_empty()) {
            return;
        }
        match next.clone() {
            Next::End(verdict) => self.finish(now, verdict),
            Next::Regrant if self.is_complete() => self.finish(now, Verdict::Done),
            Next::Regrant if self.stats.grants > u64::from(self.config.max_cuts) => {
                let text = format!("the session was cut {} times", self.stats.grants);
                self.finish(now, Verdict::failed(Reason::Cuts, text));
            }
            Next::Regrant => {
                self.state = State::Waiting;
                self.try_grant(now);
            }
        }
    }

    fn finish(&mut self, now: Time, verdict: Verdict) {
        // Where a set is too shredded to be told, nothing of it counts as good.
        let good = self.verified.minus(&self.tainted).unwrap_or_default();
        let missing = self.config.wanted.minus(&good).unwrap_or_else(|_| self.config.wanted.clone());
        let first_missing = missing.first_token().filter(|_| !self.bug.is(Planted::GoodOverReported));
        let good_until_token = first_missing.unwrap_or_else(|| self.config.wanted.end_token());
        self.say(Message::Ended(Ended { transfer: self.config.transfer, verdict: verdict.clone() }));
        self.state = if self.sender_ended {
            State::Closed
        } else {
            State::Lingering { until: now + self.config.linger, verdict: verdict.clone() }
        };
        let good = good.rects().collect();
        self.outputs.push_back(ReceiverOutput::Finished(ReceiverEnd { verdict, good, good_until_token }));
    }

    fn repeat_word(&mut self) {
        if let State::Lingering { verdict, .. } = &self.state {
            let ended = Ended { transfer: self.config.transfer, verdict: verdict.clone() };
            self.say(Message::Ended(ended));
        }
    }

    fn ttl_ms(&self, now: Time) -> u32 {
        if self.bug.is(Planted::AbsoluteTime) {
            return (now + self.config.lease_ttl).elapsed().as_millis() as u32;
        }
        self.config.ttl_ms()
    }

    fn is_complete(&self) -> bool {
        self.verified.contains_all(&self.config.wanted)
    }

    fn say(&mut self, message: Message) {
        if self.link.up {
            self.outputs.push_back(ReceiverOutput::Send(message));
        }
    }

    fn take_granting(&mut self, found: Generation, input: &'static str) -> Result<Option<Next>, InputError> {
        match &mut self.state {
            State::Granting { generation, then } if *generation == found => Ok(then.take()),
            State::Granting { .. } => Err(self.other_generation(input, found)),
            State::Waiting
            | State::Granted { .. }
            | State::Stopping { .. }
            | State::Fencing { .. }
            | State::Lingering { .. }
            | State::Closed => Err(self.misfit(input)),
        }
    }

    fn misfit(&mut self, input: &'static str) -> InputError {
        let (transfer, state) = (self.config.transfer, self.state());
        self.ignore(InputError::State { transfer, side: "receiver", state, input })
    }

    fn other_generation(&mut self, input: &'static str, found: Generation) -> InputError {
        let (transfer, expected) = (self.config.transfer, self.generation);
        self.ignore(InputError::Generation { transfer, input, found, expected })
    }

    const fn ignore(&mut self, error: InputError) -> InputError {
        self.stats.ignored.count(error)
    }
}

#[cfg(test)]
mod tests;
