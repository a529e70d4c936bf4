//! What a peer says of a transfer before this side's engine knows of it.
//!
//! Either side may be first, so a grant, an offer or an abort is kept until the engine asks for it; bounded in number and
//! time, and answered in the negative when it cannot be kept, or nobody came for it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::planted::{Bug, Planted};
use super::table::EarlyState;
use super::time::Time;
use crate::ids::{PeerId, TransferId};
use crate::message::{Abort, Ended, Message, Reason, Stopped, Verdict, Working};

/// Early messages of all peers, at most one for each (peer, transfer).
#[derive(Debug)]
#[cfg_attr(feature = "sim", derive(Clone))]
pub struct Early {
    config: EarlyConfig,
    kept: BTreeMap<(PeerId, TransferId), Kept>,
    /// Transfers that the engine will not take, and why; as limited as the messages.
    declined: BTreeMap<(PeerId, TransferId), Declined>,
    stats: EarlyStats,
    bug: Bug,
}

/// How much is kept, and for how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EarlyConfig {
    /// The most messages in all, and the most refusals that are remembered.
    pub max_messages: usize,
    /// The most messages of one peer, and the most refusals.
    pub max_messages_per_peer: usize,
    /// How long one is kept.
    pub ttl: Duration,
}

/// What was counted; monotonic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct EarlyStats {
    /// Messages kept.
    pub kept: u64,
    /// Messages taken by an engine.
    pub taken: u64,
    /// Messages refused because the table was full.
    pub refused: u64,
    /// Messages that nobody came for.
    pub expired: u64,
    /// Messages of unknown transfers that mean nothing early: late ones, mostly.
    pub dropped: u64,
}

#[derive(Debug, Clone)]
struct Declined {
    text: String,
    expires: Time,
}

#[derive(Debug, Clone)]
struct Kept {
    message: Message,
    expires: Time,
}

impl Early {
    /// An empty table.
    #[must_use]
    pub fn new(config: EarlyConfig) -> Self {
        Self {
            config,
            kept: BTreeMap::new(),
            declined: BTreeMap::new(),
            stats: EarlyStats::default(),
            bug: Bug::default(),
        }
    }

    /// Takes a message of a transfer for which there is no machine; returns what to answer.
    pub fn message(&mut self, now: Time, peer: &PeerId, message: Message) -> Option<Message> {
        let transfer = message.transfer()?;
        let key = (peer.clone(), transfer);
        if let Some(declined) = self.declined.get(&key)
            && let Some(answer) = negative(transfer, &message, &declined.text)
        {
            return Some(answer);
        }
        match message {
            Message::Grant(_) | Message::Offer(_) | Message::Abort(_) => self.keep(now, key, message),
            Message::Renew(_) => match self.kept.get_mut(&key) {
                Some(Kept { message: Message::Grant(_), expires }) => {
                    *expires = now + self.config.ttl;
                    Some(Message::Working(Working { transfer }))
                }
                Some(_) | None => {
                    self.stats.dropped += 1;
                    Some(negative_abort(transfer, "no lease; it ran out, or the request is unknown"))
                }
            },
            Message::Stop(stop) => {
                if let Some(Kept { message: Message::Grant(grant), .. }) = self.kept.get(&key)
                    && grant.generation <= stop.generation
                {
                    self.kept.remove(&key);
                }
                Some(Message::Stopped(Stopped { transfer, generation: stop.generation }))
            }
            Message::Ended(ended) => {
                match self.kept.remove(&key).map(|kept| kept.message) {
                    // The sender gave up: whoever comes for its offer must hear that.
                    Some(Message::Offer(_) | Message::Abort(_)) => {
                        let why = match ended.verdict {
                            Verdict::Failed(failure) => Verdict::Failed(failure),
                            Verdict::Done | Verdict::Cancelled => Verdict::Cancelled,
                        };
                        self.keep(now, key, Message::Abort(Abort { transfer, why }));
                    }
                    // The receiver's word ends what it asked for, also if the request comes later.
                    Some(_) | None => {
                        self.stats.dropped += 1;
                        self.decline(now, peer, transfer, "its peer ended it before it began");
                    }
                }
                None
            }
            Message::Stopped(_)
            | Message::Working(_)
            | Message::Manifest(_)
            | Message::Spare(_)
            | Message::Engine(_) => {
                self.stats.dropped += 1;
                None
            }
        }
    }

    /// Hands out what a peer said early, for a machine that has just begun: feed it to the machine after `peer_up`.
    pub fn take(&mut self, peer: &PeerId, transfer: TransferId) -> Option<Message> {
        let kept = self.kept.remove(&(peer.clone(), transfer))?;
        self.stats.taken += 1;
        Some(kept.message)
    }

    /// The engine will not take a transfer that a peer asked for: what the peer said, or will say, is answered with the reason.
    /// Returns what to answer now.
    pub fn decline(&mut self, now: Time, peer: &PeerId, transfer: TransferId, text: &str) -> Option<Message> {
        let key = (peer.clone(), transfer);
        let said = self.kept.remove(&key);
        if !self.declined.contains_key(&key) {
            self.forget_a_refusal(peer);
        }
        let expires = now + self.config.ttl;
        self.declined.insert(key, Declined { text: text.to_owned(), expires });
        said.and_then(|said| negative(transfer, &said.message, text))
    }

    /// Whether a transfer is over before it began: its peer ended it, or this side declined it.
    #[must_use]
    pub fn is_declined(&self, peer: &PeerId, transfer: TransferId) -> bool {
        self.declined.contains_key(&(peer.clone(), transfer))
    }

    /// The same of a transfer whose peer is not known, for any peer that could be it.
    #[must_use]
    pub fn was_declined_by(&self, transfer: TransferId, could_be: impl Fn(&PeerId) -> bool) -> bool {
        self.declined.keys().any(|(peer, of)| *of == transfer && could_be(peer))
    }

    /// Who spoke early of a transfer; the first by name if several did.
    #[must_use]
    pub fn peer_of(&self, transfer: TransferId) -> Option<&PeerId> {
        self.kept.keys().find(|(_, of)| *of == transfer).map(|(peer, _)| peer)
    }

    /// Forgets what a peer said: its session ended, and its grants with it.
    pub fn peer_down(&mut self, peer: &PeerId) {
        self.kept.retain(|(of, _), _| of != peer);
        self.declined.retain(|(of, _), _| of != peer);
    }

    /// Gives up what nobody came for; returns what to answer to whom.
    pub fn timeout(&mut self, now: Time) -> Vec<(PeerId, Message)> {
        self.declined.retain(|_, declined| declined.expires > now);
        if self.bug.is(Planted::EarlyKeptForever) {
            return Vec::new();
        }
        let due: Vec<_> =
            self.kept.iter().filter(|(_, kept)| kept.expires <= now).map(|(key, _)| key.clone()).collect();
        let mut answers = Vec::new();
        for key in due {
            let Some(kept) = self.kept.remove(&key) else { continue };
            self.stats.expired += 1;
            let waited = self.config.ttl;
            let text = format!("no request for this transfer came within {waited:?}");
            let (peer, transfer) = key;
            answers.extend(negative(transfer, &kept.message, &text).map(|answer| (peer, answer)));
        }
        answers
    }

    /// When [`Early::timeout`] has something to do, and why.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let kept = self.kept.values().filter(|_| !self.bug.is(Planted::EarlyKeptForever)).map(|kept| kept.expires);
        kept.chain(self.declined.values().map(|declined| declined.expires)).min().map(|at| (at, "early message"))
    }

    /// What is known of a transfer with a peer.
    #[must_use]
    pub fn state(&self, peer: &PeerId, transfer: TransferId) -> EarlyState {
        let key = (peer.clone(), transfer);
        match self.kept.get(&key).map(|kept| &kept.message) {
            Some(Message::Grant(_)) => EarlyState::KeptGrant,
            Some(Message::Offer(_)) => EarlyState::KeptOffer,
            // Nothing else is kept.
            Some(_) => EarlyState::KeptAbort,
            None if self.declined.contains_key(&key) => EarlyState::Declined,
            None if self.has_room(peer) => EarlyState::Unknown,
            None => EarlyState::Full,
        }
    }

    /// How many refusals to a peer are remembered.
    #[must_use]
    pub fn declined_to(&self, peer: &PeerId) -> usize {
        let first = (peer.clone(), TransferId::new(0));
        let last = (peer.clone(), TransferId::new(u128::MAX));
        self.declined.range(first..=last).count()
    }

    /// How many refusals are remembered.
    #[must_use]
    pub fn declined_len(&self) -> usize {
        self.declined.len()
    }

    /// How many messages of a peer are kept.
    #[must_use]
    pub fn kept_of(&self, peer: &PeerId) -> usize {
        let first = (peer.clone(), TransferId::new(0));
        let last = (peer.clone(), TransferId::new(u128::MAX));
        self.kept.range(first..=last).count()
    }

    /// How many messages are kept.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether none is kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// What was counted so far.
    #[must_use]
    pub const fn stats(&self) -> EarlyStats {
        self.stats
    }

    /// Plants a bug, so that a test can prove that it is seen.
    #[cfg(feature = "sim")]
    pub const fn plant(&mut self, bug: Option<Planted>) {
        self.bug = Bug::plant(bug);
    }

    /// Makes room for one more refusal to a peer. What a peer says leads to refusals, so one that says much loses its own first.
    fn forget_a_refusal(&mut self, peer: &PeerId) {
        let whose = if self.bug.is(Planted::DeclinedUnshared) {
            if self.declined.len() < self.config.max_messages {
                return;
            }
            None
        } else if self.declined_to(peer) >= self.config.max_messages_per_peer {
            Some(peer.clone())
        } else if self.declined.len() >= self.config.max_messages {
            let mut refusals: BTreeMap<&PeerId, usize> = BTreeMap::new();
            self.declined.keys().for_each(|(of, _)| *refusals.entry(of).or_default() += 1);
            refusals.into_iter().max_by_key(|&(_, refusals)| refusals).map(|(of, _)| of.clone())
        } else {
            return;
        };
        let of_them = self.declined.iter().filter(|((of, _), _)| whose.as_ref().is_none_or(|whose| of == whose));
        let oldest = of_them.min_by_key(|(_, declined)| declined.expires).map(|(key, _)| key.clone());
        oldest.and_then(|oldest| self.declined.remove(&oldest));
    }

    fn has_room(&self, peer: &PeerId) -> bool {
        self.kept.len() < self.config.max_messages && self.kept_of(peer) < self.config.max_messages_per_peer
    }

    fn keep(&mut self, now: Time, key: (PeerId, TransferId), message: Message) -> Option<Message> {
        let expires = now + self.config.ttl;
        if let Some(kept) = self.kept.get_mut(&key) {
            *kept = Kept { message, expires };
            return None;
        }
        if !self.has_room(&key.0) && !self.bug.is(Planted::EarlyUnbounded) {
            self.stats.refused += 1;
            return negative(key.1, &message, "too many transfers wait for their request");
        }
        self.kept.insert(key, Kept { message, expires });
        self.stats.kept += 1;
        None
    }
}

/// The answer to whoever waits for this message's counterpart. It is always [`Reason::Unknown`]: a machine may have been here
/// and ended, and how is not known any more.
fn negative(transfer: TransferId, message: &Message, text: &str) -> Option<Message> {
    match message {
        Message::Grant(_) => Some(negative_abort(transfer, text)),
        Message::Offer(_) | Message::Abort(_) => {
            Some(Message::Ended(Ended { transfer, verdict: Verdict::failed(Reason::Unknown, text) }))
        }
        Message::Manifest(_)
        | Message::Renew(_)
        | Message::Stop(_)
        | Message::Stopped(_)
        | Message::Ended(_)
        | Message::Working(_)
        | Message::Spare(_)
        | Message::Engine(_) => None,
    }
}

fn negative_abort(transfer: TransferId, text: &str) -> Message {
    Message::Abort(Abort { transfer, why: Verdict::failed(Reason::Unknown, text) })
}

#[cfg(test)]
mod tests;
