//! Proves queue pairs before they are used: each side writes a random pattern, over every payload lane, into memory that the other
//! keeps for that; the other says over the control lane what came, and each compares.
//!
//! States of a side: *waiting* (the peer is not connected) -> *writing* (until its echo) -> *agreed* (its echo was right, and it said
//! so; the peer has not) -> *over*. Who has said `Right` never says `Wrong` after it: so the two take the path, or neither does. If
//! the peer does not say how it ended after that, nobody can know, and the session is at its end.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Bytes of the pattern that each payload lane carries.
pub(crate) const LANE_PATTERN_BYTES: usize = 512;

/// What is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Output {
    /// Write the pattern into the peer's memory for it.
    Write,
    /// Say what came from the peer.
    Echo(Vec<u8>),
    /// Say that the own echo was right.
    Right,
    /// Say that the path is not taken.
    Wrong(String),
    /// It has ended; nothing follows.
    Over(Verdict),
}

/// How it ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Both sides saw their pattern come.
    Proved,
    /// Neither takes the path, for this reason.
    Unproved(String),
    /// The peer may take the path or not: the session cannot go on.
    Undecided(String),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Waiting,
    Writing,
    Agreed,
    Over,
}

/// One side.
pub(crate) struct Proof {
    phase: Phase,
    pattern: Vec<u8>,
    has_echoed: bool,
    peer_agrees: bool,
    limit: Duration,
    until: Instant,
    outputs: VecDeque<Output>,
    #[cfg(test)]
    pub(crate) believes_anything: bool,
}

impl Proof {
    /// Has `limit` for the own part, and as long again for the peer's word.
    pub(crate) fn new(pattern: Vec<u8>, limit: Duration, now: Instant) -> Self {
        Self {
            phase: Phase::Waiting,
            pattern,
            has_echoed: false,
            peer_agrees: false,
            limit,
            until: now + limit,
            outputs: VecDeque::new(),
            #[cfg(test)]
            believes_anything: false,
        }
    }

    pub(crate) fn pattern(&self) -> &[u8] {
        &self.pattern
    }

    pub(crate) fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    pub(crate) fn poll_output(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// The peer is connected.
    pub(crate) fn ready(&mut self) {
        if self.phase == Phase::Waiting {
            self.phase = Phase::Writing;
            self.outputs.push_back(Output::Write);
        }
    }

    /// The peer's pattern has landed, as these bytes.
    pub(crate) fn landed(&mut self, bytes: Vec<u8>) {
        if self.is_over() {
            return;
        }
        if std::mem::replace(&mut self.has_echoed, true) {
            self.failed("the peer wrote its test pattern twice".to_owned());
        } else {
            self.outputs.push_back(Output::Echo(bytes));
        }
    }

    /// The peer says what came there.
    pub(crate) fn echo(&mut self, bytes: &[u8]) {
        if self.phase != Phase::Writing {
            return self.failed("the peer echoed a test pattern that was not written".to_owned());
        }
        if let Some(problem) = self.difference(bytes) {
            return self.failed(problem);
        }
        self.phase = Phase::Agreed;
        self.until += self.limit;
        self.outputs.push_back(Output::Right);
        self.agree();
    }

    /// The peer's echo was right.
    pub(crate) fn right(&mut self) {
        self.peer_agrees = true;
        self.agree();
    }

    /// The peer does not take the path.
    pub(crate) fn wrong(&mut self, reason: &str) {
        self.end(Verdict::Unproved(format!("the peer says: {reason}")));
    }

    /// The queue pairs failed, or the peer breaks the order.
    pub(crate) fn failed(&mut self, reason: String) {
        match self.phase {
            Phase::Waiting | Phase::Writing => {
                self.outputs.push_back(Output::Wrong(reason.clone()));
                self.end(Verdict::Unproved(reason));
            }
            Phase::Agreed => self.end(Verdict::Undecided(reason)),
            Phase::Over => {}
        }
    }

    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        (!self.is_over()).then_some(self.until)
    }

    /// Ends what takes too long.
    pub(crate) fn time_out(&mut self, now: Instant) {
        if self.is_over() || now < self.until {
            return;
        }
        let waited = self.limit.as_millis();
        self.failed(match self.phase {
            Phase::Waiting => format!("the peer's queue pairs were not connected within {waited} ms"),
            Phase::Writing => format!("a test pattern was written and not echoed within {waited} ms"),
            Phase::Agreed | Phase::Over => format!("the peer did not say how its test ended within {waited} ms"),
        });
    }

    fn agree(&mut self) {
        if self.phase == Phase::Agreed && self.peer_agrees {
            self.end(Verdict::Proved);
        }
    }

    fn end(&mut self, verdict: Verdict) {
        if self.phase != Phase::Over {
            self.phase = Phase::Over;
            self.outputs.push_back(Output::Over(verdict));
        }
    }

    fn difference(&self, bytes: &[u8]) -> Option<String> {
        #[cfg(test)]
        if self.believes_anything {
            return None;
        }
        if bytes == self.pattern {
            return None;
        }
        let first = self.pattern.iter().zip(bytes).position(|(sent, came)| sent != came);
        let count = self.pattern.iter().zip(bytes).filter(|(sent, came)| sent != came).count();
        let (first, of) = (first.unwrap_or(bytes.len().min(self.pattern.len())), self.pattern.len());
        Some(format!("a test pattern of {of} bytes came spoilt: {count} bytes, from byte {first} on"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(2);

    fn proof(now: Instant) -> Proof {
        Proof::new(vec![1, 2, 3, 4], LIMIT, now)
    }

    fn outputs(proof: &mut Proof) -> Vec<Output> {
        std::iter::from_fn(|| proof.poll_output()).collect()
    }

    #[test]
    fn both_words_are_needed_in_whatever_order_they_come() {
        for is_peer_first in [false, true] {
            let mut proof = proof(Instant::now());
            proof.ready();
            assert_eq!(outputs(&mut proof), [Output::Write]);
            if is_peer_first {
                proof.right();
            }
            assert_eq!(outputs(&mut proof), []);
            proof.echo(&[1, 2, 3, 4]);
            if !is_peer_first {
                assert_eq!(outputs(&mut proof), [Output::Right]);
                proof.right();
            }
            let last = outputs(&mut proof).pop();
            assert_eq!(last, Some(Output::Over(Verdict::Proved)));
            assert_eq!(proof.poll_timeout(), None);
        }
    }

    #[test]
    fn what_came_otherwise_is_told_to_both() {
        for (name, came) in [("a bit", &[1, 2, 3, 5][..]), ("a byte less", &[1, 2, 3]), ("nothing", &[])] {
            let mut proof = proof(Instant::now());
            proof.ready();
            proof.right();
            proof.echo(came);
            let outputs = outputs(&mut proof);
            assert!(
                matches!(&outputs[1..], [Output::Wrong(_), Output::Over(Verdict::Unproved(_))]),
                "{name}: {outputs:?}"
            );
        }
    }

    #[test]
    fn each_wait_has_an_end_and_who_said_that_it_was_right_does_not_take_it_back() {
        let now = Instant::now();
        let mut waiting = proof(now);
        assert_eq!(waiting.poll_timeout(), Some(now + LIMIT));
        waiting.time_out(now + LIMIT - Duration::from_millis(1));
        assert_eq!(outputs(&mut waiting), []);
        waiting.time_out(now + LIMIT);
        assert!(matches!(&outputs(&mut waiting)[..], [Output::Wrong(_), Output::Over(Verdict::Unproved(_))]));

        let mut agreed = proof(now);
        agreed.ready();
        agreed.echo(&[1, 2, 3, 4]);
        outputs(&mut agreed);
        agreed.time_out(now + LIMIT);
        assert_eq!(outputs(&mut agreed), [], "the peer has its own limit first");
        agreed.time_out(now + 2 * LIMIT);
        assert!(matches!(&outputs(&mut agreed)[..], [Output::Over(Verdict::Undecided(_))]));
    }

    #[test]
    fn a_peer_that_withdraws_or_breaks_the_order_is_not_believed() {
        let mut told = proof(Instant::now());
        told.ready();
        told.echo(&[1, 2, 3, 4]);
        told.wrong("spoilt there");
        let last = outputs(&mut told).pop();
        assert_eq!(last, Some(Output::Over(Verdict::Unproved("the peer says: spoilt there".to_owned()))));
        let mut twice = proof(Instant::now());
        twice.landed(vec![9]);
        assert_eq!(outputs(&mut twice), [Output::Echo(vec![9])]);
        twice.landed(vec![9]);
        assert!(matches!(&outputs(&mut twice)[..], [Output::Wrong(_), Output::Over(Verdict::Unproved(_))]));
        let mut early = proof(Instant::now());
        early.echo(&[1, 2, 3, 4]);
        assert!(matches!(&outputs(&mut early)[..], [Output::Wrong(_), Output::Over(Verdict::Unproved(_))]));
    }
}
