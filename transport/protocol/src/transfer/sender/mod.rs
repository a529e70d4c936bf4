//! The sending end of one transfer to one peer endpoint.
//!
//! States: `Waiting` (no grant to post under) ⇄ `Granted` (computed and missing cells are posted) → `Aborting` (no more is sent,
//! the receiver's word is awaited) → `Ending` (the verdict is known, posts drain) → `Closed`. The receiver's word decides: this
//! side is `Done` only on the receiver's `Done`. The lease is released after the last post that reads the blocks.

mod config;
mod message;

use std::collections::{BTreeMap, VecDeque};

use super::coverage::Coverage;
use super::input::{InputCounts, InputError};
use super::lease::Lease;
#[cfg(feature = "sim")]
use super::lease::LeaseVisits;
use super::output::{Order, PostOutcome, SenderOutput};
use super::planted::{Bug, Planted};
use super::rect::Rect;
use super::table::SenderState;
use super::time::Time;
use crate::ids::{Generation, TransferId};
use crate::message::{Abort, Ended, Message, Offer, Reason, Stopped, Verdict};

pub use config::SenderConfig;

/// The sending end of one transfer; its module says how it is driven.
#[derive(Debug)]
#[cfg_attr(feature = "sim", derive(Clone))]
pub struct Sender {
    config: SenderConfig,
    state: State,
    lease: Lease,
    lease_reported: bool,
    link: Link,
    computed: Coverage,
    /// The rectangles of the grant in use, as the receiver cut them: a post lies inside one of them.
    windows: Vec<Rect>,
    /// Asked for under the grant, not posted yet.
    asked: Coverage,
    /// The part of it that is computed.
    ready: Coverage,
    /// The highest generation heard of; grants up to it are not taken any more.
    heard: Option<Generation>,
    next_sequence: u32,
    in_flight: BTreeMap<(Generation, u32), Rect>,
    /// A `Stop` that is answered when nothing up to its generation is in flight.
    stop: Option<Generation>,
    outputs: VecDeque<SenderOutput>,
    stats: SenderStats,
    bug: Bug,
}

/// What a sender counted; monotonic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SenderStats {
    /// Inputs that were not taken.
    pub ignored: InputCounts,
    /// Grants taken.
    pub grants: u64,
    /// Posts asked of the driver.
    pub posts: u64,
    /// Posts that did not reach their end.
    pub posts_lost: u64,
}

/// The session with the peer.
#[derive(Debug, Clone, Copy)]
struct Link {
    up: bool,
    last_session: Option<u64>,
    /// Once there was a session and while it is down: how long the peer may be away.
    absent_by: Option<Time>,
}

#[derive(Debug, Clone)]
enum State {
    /// `word_by` runs once there was a grant: then it is for the receiver to speak.
    Waiting {
        word_by: Option<Time>,
    },
    /// `word_by` runs once all that was asked for is posted, and the posts ended.
    Granted {
        generation: Generation,
        word_by: Option<Time>,
    },
    Aborting {
        why: Verdict,
        word_by: Time,
    },
    Ending {
        verdict: Verdict,
    },
    Closed,
}

impl Sender {
    /// Begins a transfer with a lease over its blocks. Tell it the session with [`Sender::peer_up`], now or later, and hand it
    /// the grant if that came first.
    #[must_use]
    pub fn new(now: Time, config: SenderConfig) -> Self {
        Self {
            lease: Lease::new(now, config.lease_ttl, config.lease_max),
            lease_reported: false,
            config,
            state: State::Waiting { word_by: None },
            link: Link { up: false, last_session: None, absent_by: None },
            computed: Coverage::new(),
            windows: Vec::new(),
            asked: Coverage::new(),
            ready: Coverage::new(),
            heard: None,
            next_sequence: 0,
            in_flight: BTreeMap::new(),
            stop: None,
            outputs: VecDeque::new(),
            stats: SenderStats::default(),
            bug: Bug::default(),
        }
    }

    /// A session with the peer's endpoint is up; sessions are numbered upwards.
    ///
    /// # Errors
    /// [`InputError::Session`] if it is not newer than the last; [`InputError::State`] if one is up, or all is over.
    pub fn peer_up(&mut self, now: Time, session: u64) -> Result<(), InputError> {
        if let Some(last) = self.link.last_session.filter(|&last| session <= last) {
            return Err(self.ignore(InputError::Session { transfer: self.config.transfer, found: session, last }));
        }
        if self.link.up || matches!(self.state, State::Closed) {
            return Err(self.misfit("peer_up"));
        }
        self.link = Link { up: true, last_session: Some(session), absent_by: None };
        match self.state.clone() {
            State::Waiting { .. } => {
                let word_by = self.heard.map(|_| now + self.config.word);
                self.state = State::Waiting { word_by };
                if self.config.order == Order::PrefillFirst && self.heard.is_none() {
                    self.say(Message::Offer(Offer { transfer: self.config.transfer, held: self.config.held }));
                }
            }
            // The receiver may not have heard it in the last session.
            State::Aborting { why, .. } => self.say(Message::Abort(Abort { transfer: self.config.transfer, why })),
            State::Granted { .. } | State::Ending { .. } | State::Closed => {}
        }
        Ok(())
    }

    /// The session with the peer ended; all posts to it have ended, or will with [`PostOutcome::Lost`].
    ///
    /// # Errors
    /// [`InputError::State`] if none was up, or all is over.
    pub fn peer_down(&mut self, now: Time) -> Result<(), InputError> {
        if !self.link.up || self.is_closed() {
            return Err(self.misfit("peer_down"));
        }
        self.link.up = false;
        self.link.absent_by = Some(now + self.config.absent);
        self.stop = None;
        match &self.state {
            State::Granted { generation, .. } => {
                let generation = *generation;
                self.cancel_posts(generation);
                self.state = State::Waiting { word_by: None };
            }
            State::Waiting { .. } => self.state = State::Waiting { word_by: None },
            State::Aborting { .. } | State::Ending { .. } | State::Closed => {}
        }
        Ok(())
    }

    /// The peer's engine restarted: its word will never come. An end that is decided stands.
    ///
    /// # Errors
    /// [`InputError::State`] if all is over.
    pub fn peer_restarted(&mut self, now: Time) -> Result<(), InputError> {
        if self.is_closed() {
            return Err(self.misfit("peer_restarted"));
        }
        if self.link.up {
            self.peer_down(now)?;
        }
        match &self.state {
            State::Waiting { .. } | State::Granted { .. } | State::Aborting { .. } => {
                self.decide(Verdict::failed(Reason::NoWord, "the receiver's engine started anew"));
            }
            State::Ending { .. } | State::Closed => {}
        }
        Ok(())
    }

    /// The engine computed these cells, and their bytes may be read.
    ///
    /// # Errors
    /// [`InputError::Computed`] if they are not in the transfer; [`InputError::State`] if nothing more is sent.
    pub fn computed(&mut self, now: Time, rect: Rect) -> Result<(), InputError> {
        match &self.state {
            State::Waiting { .. } | State::Granted { .. } => {}
            State::Aborting { .. } | State::Ending { .. } | State::Closed => return Err(self.misfit("computed")),
        }
        let (transfer, held) = (self.config.transfer, self.config.held);
        if !held.contains(rect) {
            let problem = format!("the transfer holds {held}");
            return Err(self.ignore(InputError::Computed { transfer, rect, problem }));
        }
        let ready = self.asked.intersect(&rect.into()).and_then(|new| self.ready.union(&new));
        match (self.computed.union(&rect.into()), ready) {
            (Ok(computed), Ok(ready)) => (self.computed, self.ready) = (computed, ready),
            (Err(error), _) | (_, Err(error)) => {
                let problem = error.to_string();
                return Err(self.ignore(InputError::Computed { transfer, rect, problem }));
            }
        }
        self.post(now);
        Ok(())
    }

    /// A post ended: the transport reads its source no more.
    ///
    /// # Errors
    /// [`InputError::Sequence`] if it is not in flight.
    pub fn posted(
        &mut self,
        now: Time,
        generation: Generation,
        sequence: u32,
        outcome: PostOutcome,
    ) -> Result<(), InputError> {
        let Some(rect) = self.in_flight.remove(&(generation, sequence)) else {
            let transfer = self.config.transfer;
            return Err(self.ignore(InputError::Sequence { transfer, input: "posted", sequence }));
        };
        self.lease.end_read();
        if outcome == PostOutcome::Lost {
            self.stats.posts_lost += 1;
        }
        match (&self.state, outcome) {
            (State::Granted { generation: live, .. }, PostOutcome::Lost) if *live == generation => {
                if self.bug.is(Planted::RepostUnderSameGrant) {
                    self.asked = self.asked.union(&rect.into()).unwrap_or_default();
                    self.ready = self.ready.union(&rect.into()).unwrap_or_default();
                    self.post(now);
                    return Ok(());
                }
                // Nothing is sent again under a grant that lost a write; a new one names what is missing.
                self.cancel_posts(generation);
                self.state = State::Waiting { word_by: Some(now + self.config.word) };
            }
            (State::Granted { .. }, _) => self.post(now),
            (State::Waiting { .. } | State::Aborting { .. } | State::Ending { .. } | State::Closed, _) => {}
        }
        self.settle();
        Ok(())
    }

    /// The engine gives up the transfer, e.g. because the computation failed.
    ///
    /// # Errors
    /// [`InputError::State`] if the end is already decided or asked for.
    pub fn fail(&mut self, now: Time, text: &str) -> Result<(), InputError> {
        self.abort_by(now, Verdict::failed(Reason::Engine, text), "fail")
    }

    /// The engine wants the transfer no more. Posts stop and the lease ends; the verdict is the receiver's.
    ///
    /// # Errors
    /// [`InputError::State`] if the end is already decided or asked for.
    pub fn cancel(&mut self, now: Time) -> Result<(), InputError> {
        self.abort_by(now, Verdict::Cancelled, "cancel")
    }

    /// Does what is due by `now`.
    pub fn timeout(&mut self, now: Time) {
        if self.lease.has_run_out(now) {
            if self.bug.is(Planted::ExpiryIsRelease) && !self.lease_reported {
                self.lease_reported = true;
                self.outputs.push_back(SenderOutput::ReleaseLease);
            }
            self.abort(now, Verdict::failed(Reason::LeaseExpired, "the lease ran out and was not renewed"));
        }
        let absent = self.link.absent_by.is_some_and(|by| by <= now);
        match &self.state {
            State::Waiting { .. } | State::Granted { .. } | State::Aborting { .. } if absent => {
                let text = format!("no session with the receiver for {:?}", self.config.absent);
                self.decide(Verdict::failed(Reason::NoWord, text));
            }
            _ if self.bug.is(Planted::NoWordDeadline) => {}
            State::Waiting { word_by: Some(by) } | State::Granted { word_by: Some(by), .. } if *by <= now => {
                let text = format!("the receiver was silent for {:?}", self.config.word);
                self.decide(Verdict::failed(Reason::NoWord, text));
            }
            State::Aborting { word_by, why } if *word_by <= now => {
                let text = format!("the receiver was silent for {:?} after the sender: {why}", self.config.word);
                self.decide(Verdict::failed(Reason::NoWord, text));
            }
            State::Waiting { .. }
            | State::Granted { .. }
            | State::Aborting { .. }
            | State::Ending { .. }
            | State::Closed => {}
        }
    }

    /// When [`Sender::timeout`] has something to do, and why; `None` if only an input can move it.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let lease = self.lease.expires().map(|by| (by, "lease"));
        let absent = self.link.absent_by.map(|by| (by, "peer absent"));
        let word = match &self.state {
            State::Waiting { word_by } | State::Granted { word_by, .. } => *word_by,
            State::Aborting { word_by, .. } => Some(*word_by),
            State::Ending { .. } | State::Closed => return None,
        };
        let word = word.filter(|_| !self.bug.is(Planted::NoWordDeadline)).map(|by| (by, "receiver's word"));
        lease.into_iter().chain(absent).chain(word).min()
    }

    /// The next thing to do; call until `None` after every input.
    pub fn poll_output(&mut self) -> Option<SenderOutput> {
        self.outputs.pop_front()
    }

    /// Whether all is over and the machine may be dropped.
    #[must_use]
    pub const fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    /// How it ends, once that is decided and while posts drain.
    #[must_use]
    pub const fn verdict(&self) -> Option<&Verdict> {
        match &self.state {
            State::Ending { verdict } => Some(verdict),
            State::Waiting { .. } | State::Granted { .. } | State::Aborting { .. } | State::Closed => None,
        }
    }

    /// Which transfer.
    #[must_use]
    pub const fn transfer(&self) -> TransferId {
        self.config.transfer
    }

    /// Posts that have not ended.
    #[must_use]
    pub fn posts_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// What was counted so far.
    #[must_use]
    pub const fn stats(&self) -> SenderStats {
        self.stats
    }

    /// The state, as far as it decides which input fits.
    #[must_use]
    pub const fn kind(&self) -> SenderState {
        match &self.state {
            State::Waiting { word_by: None } => SenderState::Waiting,
            State::Waiting { word_by: Some(_) } => SenderState::WaitingWord,
            State::Granted { word_by: None, .. } => SenderState::Granted,
            State::Granted { word_by: Some(_), .. } => SenderState::GrantedPosted,
            State::Aborting { .. } => SenderState::Aborting,
            State::Ending { .. } => SenderState::Ending,
            State::Closed => SenderState::Closed,
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

    /// How often its lease was given each input in each state.
    #[cfg(feature = "sim")]
    #[must_use]
    pub const fn lease_visits(&self) -> &LeaseVisits {
        self.lease.visits()
    }

    /// All that it is, but for what it counted: equal before and after an input that is refused.
    #[cfg(feature = "sim")]
    #[must_use]
    pub fn snapshot(&self) -> String {
        format!("{:?}", Self { stats: SenderStats::default(), ..self.clone() })
    }

    /// Plants a bug, so that a test can prove that it is seen.
    #[cfg(feature = "sim")]
    pub const fn plant(&mut self, bug: Option<Planted>) {
        self.bug = Bug::plant(bug);
    }
}

impl Sender {
    /// Posts what is ready, as far as the limit of posts in flight allows.
    fn post(&mut self, now: Time) {
        let State::Granted { generation, word_by } = self.state else { return };
        let uncomputed = self.bug.is(Planted::PostUncomputed);
        let beyond = usize::from(self.bug.is(Planted::PostsBeyondLimit));
        while self.in_flight.len() < self.config.max_posts_in_flight.get() as usize + beyond {
            let source = if uncomputed { &self.asked } else { &self.ready };
            let Some(rect) = source.first().map(|rect| self.config.first_post(self.inside_a_window(rect))) else {
                break;
            };
            let (Ok(asked), Ok(ready)) = (self.asked.minus(&rect.into()), self.ready.minus(&rect.into())) else {
                self.abort(now, Verdict::failed(Reason::Limit, "what is left to post is too shredded"));
                return;
            };
            if self.lease.begin_read().is_err() {
                return;
            }
            (self.asked, self.ready) = (asked, ready);
            let sequence = self.next_sequence;
            self.next_sequence += 1;
            self.in_flight.insert((generation, sequence), rect);
            self.stats.posts += 1;
            self.outputs.push_back(SenderOutput::Post { generation, sequence, rect });
        }
        let all_posted = self.asked.is_empty() && self.in_flight.is_empty();
        if all_posted && word_by.is_none() {
            if self.bug.is(Planted::DoneWithoutWord) {
                self.decide(Verdict::Done);
                return;
            }
            self.state = State::Granted { generation, word_by: Some(now + self.config.word) };
        }
    }

    /// The first part of a rectangle that lies inside one rectangle of the grant: a receiver may keep a window for each.
    fn inside_a_window(&self, rect: Rect) -> Rect {
        let (token, layer) = (rect.tokens().start, rect.layers().start);
        let holds = |window: &&Rect| window.tokens().contains(&token) && window.layers().contains(&layer);
        self.windows.iter().find(holds).and_then(|window| window.intersect(rect)).unwrap_or(rect)
    }

    /// Whether the receiver wants what the engine has not computed, and nothing else is left to send.
    fn waits_for_compute(&self) -> bool {
        matches!(self.state, State::Granted { .. }) && self.in_flight.is_empty() && !self.asked.is_empty()
    }

    fn cancel_posts(&mut self, generation: Generation) {
        self.asked = Coverage::new();
        self.ready = Coverage::new();
        self.outputs.push_back(SenderOutput::CancelPosts { generation });
    }

    fn abort_by(&mut self, now: Time, why: Verdict, input: &'static str) -> Result<(), InputError> {
        if self.abort(now, why) { Ok(()) } else { Err(self.misfit(input)) }
    }

    /// Sends no more and asks for the receiver's word, unless the end is already asked for; returns whether it was open.
    fn abort(&mut self, now: Time, why: Verdict) -> bool {
        match &self.state {
            State::Waiting { .. } => {}
            State::Granted { generation, .. } => {
                let generation = *generation;
                self.cancel_posts(generation);
            }
            State::Aborting { .. } | State::Ending { .. } | State::Closed => return false,
        }
        // A receiver that never came has nothing to say; should it come, it is told that it is too late.
        if matches!(why, Verdict::Failed(_)) && self.link.last_session.is_none() {
            self.decide(why);
            return true;
        }
        self.say(Message::Abort(Abort { transfer: self.config.transfer, why: why.clone() }));
        self.state = State::Aborting { why, word_by: now + self.config.word };
        self.lease.release();
        self.settle();
        true
    }

    /// The verdict is known: what is posted drains, then all is over.
    fn decide(&mut self, verdict: Verdict) {
        match &self.state {
            State::Granted { generation, .. } => {
                let generation = *generation;
                self.cancel_posts(generation);
            }
            State::Waiting { .. } | State::Aborting { .. } | State::Ending { .. } | State::Closed => {}
        }
        self.state = State::Ending { verdict };
        self.lease.release();
        self.settle();
    }

    /// Says and does what waited for posts to end.
    fn settle(&mut self) {
        if let Some(generation) = self.stop {
            let drained = self.in_flight.first_key_value().is_none_or(|(&(oldest, _), _)| oldest > generation);
            if drained || self.bug.is(Planted::StoppedTooEarly) {
                self.stop = None;
                self.say(Message::Stopped(Stopped { transfer: self.config.transfer, generation }));
            }
        }
        let over = self.lease.expires().is_none();
        if (self.lease.is_released() || (over && self.bug.is(Planted::ReleaseBeforeDrain))) && !self.lease_reported {
            self.lease_reported = true;
            self.outputs.push_back(SenderOutput::ReleaseLease);
        }
        if let State::Ending { verdict } = &self.state
            && self.lease.is_released()
        {
            let verdict = verdict.clone();
            self.say(Message::Ended(Ended { transfer: self.config.transfer, verdict: verdict.clone() }));
            self.outputs.push_back(SenderOutput::Finished(verdict));
            self.state = State::Closed;
        }
    }

    fn say(&mut self, message: Message) {
        if self.link.up {
            self.outputs.push_back(SenderOutput::Send(message));
        }
    }

    fn misfit(&mut self, input: &'static str) -> InputError {
        let (transfer, state) = (self.config.transfer, self.state());
        self.ignore(InputError::State { transfer, side: "sender", state, input })
    }

    const fn ignore(&mut self, error: InputError) -> InputError {
        self.stats.ignored.count(error)
    }
}

#[cfg(test)]
mod tests;
