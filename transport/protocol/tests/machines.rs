//! One machine against inputs in any order, from a peer and a driver that may do anything: it never panics, ends once, keeps its
//! promises on every output, and comes to its rest when time passes.

use std::collections::{BTreeMap, BTreeSet};
use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use kvferry_protocol::message::{
    Abort, Ended, Grant, Message, Missing, Offer, OpaqueKey, Reason, Renew, Stop, Stopped, Verdict, WindowBytes, Wrote,
};
use kvferry_protocol::transfer::{
    Coverage, GrantRefusal, Order, PostOutcome, Receiver, ReceiverConfig, ReceiverOutput, Rect, Sender, SenderConfig,
    SenderOutput, Time,
};
use kvferry_protocol::{Digest, Generation, TransferId};
use proptest::prelude::*;

const TOKENS: u32 = 24;
const LAYERS: u16 = 3;

fn id(ours: bool) -> TransferId {
    TransferId::new(if ours { 1 } else { 2 })
}

fn at(ms: u64) -> Time {
    Time::since_epoch(Duration::from_millis(ms))
}

fn any_rect() -> impl Strategy<Value = Rect> {
    (0..TOKENS + 4, 1..TOKENS, 0..LAYERS + 1, 1..=LAYERS)
        .prop_map(|(token, tokens, layer, layers)| Rect::new(token..token + tokens, layer..layer + layers).unwrap())
}

fn any_generation() -> impl Strategy<Value = Generation> {
    prop_oneof![8 => 0..4u32, 1 => Just(u32::MAX)].prop_map(Generation::new)
}

fn any_verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        Just(Verdict::Done),
        Just(Verdict::Cancelled),
        Just(Verdict::failed(Reason::Engine, "engine")),
        Just(Verdict::failed(Reason::Unknown, "unknown")),
    ]
}

fn any_message() -> impl Strategy<Value = Message> {
    (prop::bool::weighted(0.95), any_generation(), any_verdict(), prop::collection::vec(any_rect(), 0..3), 0..8u8)
        .prop_map(|(ours, generation, verdict, rects, kind)| {
            let transfer = id(ours);
            let first = rects.first().copied().unwrap_or(Rect::new(0..TOKENS, 0..LAYERS).unwrap());
            match kind {
                0 => Message::Offer(Offer { transfer, held: first }),
                1 | 7 => Message::Grant(Grant {
                    transfer,
                    generation,
                    key: OpaqueKey::new(5),
                    ttl_ms: 400,
                    window: WindowBytes::default(),
                    missing: Missing::new(rects).unwrap(),
                }),
                2 => Message::Renew(Renew { transfer, ttl_ms: 500 }),
                3 => Message::Stop(Stop { transfer, generation }),
                4 => Message::Stopped(Stopped { transfer, generation }),
                5 => Message::Abort(Abort { transfer, why: verdict }),
                _ => Message::Ended(Ended { transfer, verdict }),
            }
        })
}

#[derive(Debug, Clone)]
enum Op {
    Wait(u64),
    Up,
    Down,
    Restarted,
    Message(Message),
    Cancel,
    /// Answer the oldest question of the machine; the flag says how.
    Answer(bool),
    /// An answer that nobody asked for.
    Stray(Generation, u32),
    Landed(Generation, u32, Rect),
    Computed(Rect),
    Fail,
}

fn any_op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0..300u64).prop_map(Op::Wait),
        4 => Just(Op::Up),
        1 => Just(Op::Down),
        1 => prop::bool::weighted(0.1).prop_map(|restarted| if restarted { Op::Restarted } else { Op::Up }),
        6 => any_message().prop_map(Op::Message),
        1 => prop::bool::weighted(0.2).prop_map(|cancel| if cancel { Op::Cancel } else { Op::Wait(1) }),
        14 => prop::bool::weighted(0.9).prop_map(Op::Answer),
        1 => (any_generation(), 0..6u32).prop_map(|(generation, sequence)| Op::Stray(generation, sequence)),
        12 => (any_generation(), 0..6u32, any_rect()).prop_map(|(g, sequence, rect)| Op::Landed(g, sequence, rect)),
        6 => any_rect().prop_map(Op::Computed),
        1 => prop::bool::weighted(0.2).prop_map(|fail| if fail { Op::Fail } else { Op::Wait(1) }),
    ]
}

/// What a receiver waits for.
#[derive(Debug)]
enum Question {
    Grant(Generation),
    Fence(Generation),
    Hash(Generation, u32, Rect),
}

struct ReceiverRun {
    machine: Receiver,
    now: u64,
    session: u64,
    questions: Vec<Question>,
    wanted: Rect,
    granted: BTreeSet<Generation>,
    revoked: BTreeSet<Generation>,
    /// Hashed, and right.
    matched: Coverage,
    hashing: u32,
    finished: bool,
}

impl ReceiverRun {
    fn new(order: Order, ask: bool) -> Self {
        let wanted = Rect::new(4..TOKENS, 0..LAYERS).unwrap();
        let config = ReceiverConfig {
            transfer: id(true),
            wanted: wanted.into(),
            order,
            deadline: Duration::from_millis(3000),
            progress: Duration::from_millis(1000),
            absent: Duration::from_millis(500),
            lease_ttl: Duration::from_millis(600),
            ask_before_revoke: ask.then_some(Duration::from_millis(100)),
            linger: Duration::from_millis(200),
            max_cuts: 3,
        };
        Self {
            machine: Receiver::new(at(0), config).unwrap(),
            now: 0,
            session: 0,
            questions: Vec::new(),
            wanted,
            granted: BTreeSet::new(),
            revoked: BTreeSet::new(),
            matched: Coverage::new(),
            hashing: 0,
            finished: false,
        }
    }

    fn apply(&mut self, op: Op) {
        let now = at(self.now);
        // Whether an input is taken is the machine's affair; what it does then is checked in `drain`.
        let _taken = match op {
            Op::Wait(ms) => {
                self.now += ms;
                self.timeout();
                Ok(())
            }
            Op::Up => {
                self.session += 1;
                self.machine.peer_up(now, self.session)
            }
            Op::Down => self.machine.peer_down(now),
            Op::Restarted => self.machine.peer_restarted(now),
            Op::Message(message) => self.machine.message(now, message),
            Op::Cancel => self.machine.cancel(now),
            Op::Answer(well) if !self.questions.is_empty() => {
                let question = self.questions.remove(0);
                self.answer(question, well);
                Ok(())
            }
            Op::Stray(generation, sequence) => {
                let asked = |q: &Question| matches!(q, Question::Hash(g, s, _) if (*g, *s) == (generation, sequence));
                if self.questions.iter().any(asked) {
                    Ok(())
                } else {
                    self.machine.digested(now, generation, sequence, Digest::new(0))
                }
            }
            Op::Landed(generation, sequence, rect) => {
                let digest = Digest::new(7);
                self.machine.landed(now, Wrote { transfer: id(true), generation, sequence, rect, digest })
            }
            Op::Answer(_) | Op::Computed(_) | Op::Fail => Ok(()),
        };
        self.drain();
    }

    fn answer(&mut self, question: Question, well: bool) {
        let now = at(self.now);
        match question {
            Question::Grant(generation) if well => {
                self.granted.insert(generation);
                self.machine.granted(now, generation, OpaqueKey::new(1), WindowBytes::default()).unwrap();
            }
            Question::Grant(generation) => {
                let why = if self.now.is_multiple_of(2) {
                    GrantRefusal::NotConnected
                } else {
                    GrantRefusal::Impossible("full".into())
                };
                self.machine.grant_refused(now, generation, why).unwrap();
            }
            Question::Fence(generation) => {
                self.revoked.insert(generation);
                self.machine.fenced(now, generation).unwrap();
            }
            Question::Hash(generation, sequence, rect) => {
                self.hashing -= 1;
                if well {
                    self.matched.insert(rect).unwrap();
                }
                let digest = Digest::new(if well { 7 } else { 8 });
                self.machine.digested(now, generation, sequence, digest).unwrap();
            }
        }
    }

    fn timeout(&mut self) {
        let now = at(self.now);
        self.machine.timeout(now);
        let next = self.machine.poll_timeout();
        assert!(next.is_none_or(|(next, _)| next > now), "{next:?} is due for ever at {now:?}");
    }

    fn drain(&mut self) {
        for count in 0.. {
            let Some(output) = self.machine.poll_output() else { break };
            assert!(count < 8, "one input has too many outputs");
            assert!(!self.finished || matches!(output, ReceiverOutput::Send(_)), "{output:?} after the end");
            match output {
                ReceiverOutput::MakeGrant { generation, missing } => {
                    assert!(self.granted.last().is_none_or(|&last| last < generation), "generations grow");
                    let missing = Coverage::of(&missing).unwrap();
                    assert!(Coverage::from(self.wanted).contains_all(&missing) && !missing.is_empty());
                    assert!(missing.rects().all(|rect| !self.machine.verified().overlaps(rect)));
                    self.questions.push(Question::Grant(generation));
                }
                ReceiverOutput::Send(_) => {}
                ReceiverOutput::Verify { generation, sequence, rect } => {
                    assert!(self.wanted.contains(rect));
                    self.hashing += 1;
                    self.questions.push(Question::Hash(generation, sequence, rect));
                }
                ReceiverOutput::Verified(rect) => assert!(self.matched.contains(rect), "{rect} is not hashed"),
                ReceiverOutput::Revoke { generation, .. } => self.questions.push(Question::Fence(generation)),
                ReceiverOutput::Finished(end) => {
                    self.finished = true;
                    assert_eq!(self.granted, self.revoked, "every grant is fenced");
                    assert_eq!(self.hashing, 0, "nothing is being hashed");
                    assert!(end.good.iter().all(|&rect| self.matched.contains(rect)));
                    if end.verdict == Verdict::Done {
                        assert!(self.matched.contains(self.wanted));
                        assert_eq!(end.good_until_token, TOKENS);
                    }
                }
            }
        }
    }

    /// Lets time pass and answers everything: all must come to rest.
    fn rest(&mut self) {
        for _ in 0..200 {
            while !self.questions.is_empty() {
                let question = self.questions.remove(0);
                self.answer(question, true);
                self.drain();
            }
            if self.machine.is_closed() {
                break;
            }
            let (next, _) = self.machine.poll_timeout().expect("something is due until all is over");
            self.now = u64::try_from(next.elapsed().as_millis()).unwrap();
            self.timeout();
            self.drain();
        }
        assert!(self.machine.is_closed() && self.finished, "it hangs in {}", self.machine.state());
    }
}

struct SenderRun {
    machine: Sender,
    now: u64,
    session: u64,
    held: Rect,
    in_flight: Vec<(Generation, u32)>,
    computed: Coverage,
    granted: BTreeMap<Generation, Vec<Rect>>,
    posted: Coverage,
    adopted: Option<Generation>,
    told_done: bool,
    released: bool,
    finished: bool,
}

const POSTS: u32 = 3;

impl SenderRun {
    fn new(order: Order) -> Self {
        let held = Rect::new(0..TOKENS, 0..LAYERS).unwrap();
        let config = SenderConfig {
            transfer: id(true),
            held,
            order,
            lease_ttl: Duration::from_millis(800),
            lease_max: Duration::from_millis(3000),
            absent: Duration::from_millis(500),
            word: Duration::from_millis(400),
            max_posts_in_flight: NonZeroU32::new(POSTS).unwrap(),
            max_cells_per_post: NonZeroU64::new(12).unwrap(),
            align_tokens: NonZeroU32::new(4).unwrap(),
        };
        Self {
            machine: Sender::new(at(0), config),
            now: 0,
            session: 0,
            held,
            in_flight: Vec::new(),
            computed: Coverage::new(),
            granted: BTreeMap::new(),
            posted: Coverage::new(),
            adopted: None,
            told_done: false,
            released: false,
            finished: false,
        }
    }

    fn apply(&mut self, op: Op) {
        let now = at(self.now);
        let _taken = match op {
            Op::Wait(ms) => {
                self.now += ms;
                self.timeout();
                Ok(())
            }
            Op::Up => {
                self.session += 1;
                self.machine.peer_up(now, self.session)
            }
            Op::Down => self.machine.peer_down(now),
            Op::Restarted => self.machine.peer_restarted(now),
            Op::Message(message) => {
                self.told_done |= matches!(&message, Message::Ended(Ended { verdict: Verdict::Done, .. }));
                self.machine.message(now, message)
            }
            Op::Cancel => self.machine.cancel(now),
            Op::Fail => self.machine.fail(now, "no memory"),
            Op::Answer(well) if !self.in_flight.is_empty() => {
                let (generation, sequence) = self.in_flight.remove(self.in_flight.len() / 2);
                let outcome = if well { PostOutcome::Taken } else { PostOutcome::Lost };
                self.machine.posted(now, generation, sequence, outcome)
            }
            Op::Stray(generation, sequence) if !self.in_flight.contains(&(generation, sequence)) => {
                self.machine.posted(now, generation, sequence, PostOutcome::Taken)
            }
            Op::Computed(rect) => {
                if self.held.contains(rect) {
                    self.computed.insert(rect).unwrap();
                }
                self.machine.computed(now, rect)
            }
            Op::Landed(generation, _, rect) => {
                // A grant that fits more often than one drawn at random.
                let last = self.adopted.map_or(0, Generation::get);
                let generation = Generation::new(last.saturating_add(generation.get().min(2)));
                let missing = Missing::new(vec![rect]).unwrap();
                let (key, window) = (OpaqueKey::new(5), WindowBytes::default());
                let grant = Grant { transfer: id(true), generation, key, ttl_ms: 400, window, missing };
                self.machine.message(now, Message::Grant(grant))
            }
            Op::Answer(_) | Op::Stray(..) => Ok(()),
        };
        self.drain();
    }

    fn timeout(&mut self) {
        let now = at(self.now);
        self.machine.timeout(now);
        let next = self.machine.poll_timeout();
        assert!(next.is_none_or(|(next, _)| next > now), "{next:?} is due for ever at {now:?}");
    }

    fn drain(&mut self) {
        for count in 0.. {
            let Some(output) = self.machine.poll_output() else { break };
            assert!(count < 12, "one input has too many outputs");
            assert!(!self.finished || matches!(output, SenderOutput::Send(_)), "{output:?} after the end");
            match output {
                SenderOutput::Adopt(grant) => {
                    assert!(self.adopted.is_none_or(|last| last < grant.generation), "generations grow");
                    self.adopted = Some(grant.generation);
                    let missing = Coverage::of(grant.missing.as_slice()).unwrap();
                    assert!(Coverage::from(self.held).contains_all(&missing));
                    self.granted.insert(grant.generation, grant.missing.as_slice().to_vec());
                    self.posted = Coverage::new();
                }
                SenderOutput::Post { generation, sequence, rect } => {
                    assert_eq!(self.adopted, Some(generation));
                    assert!(!self.released && self.computed.contains(rect));
                    let granted = &self.granted[&generation];
                    assert!(granted.iter().any(|one| one.contains(rect)), "{rect} is in no rectangle of {granted:?}");
                    assert!(!self.posted.overlaps(rect), "{rect} is posted twice");
                    self.posted.insert(rect).unwrap();
                    self.in_flight.push((generation, sequence));
                    assert!(self.in_flight.len() <= POSTS as usize);
                }
                SenderOutput::CancelPosts { .. } => {}
                SenderOutput::Send(Message::Stopped(stopped)) => {
                    assert!(self.in_flight.iter().all(|&(generation, _)| generation > stopped.generation));
                }
                SenderOutput::Send(_) => {}
                SenderOutput::ReleaseLease => {
                    assert!(self.in_flight.is_empty() && !self.released);
                    self.released = true;
                }
                SenderOutput::Finished(verdict) => {
                    assert!(self.released);
                    assert!(verdict != Verdict::Done || self.told_done, "done without the receiver's word");
                    self.finished = true;
                }
            }
        }
    }

    fn rest(&mut self) {
        for _ in 0..200 {
            while let Some((generation, sequence)) = self.in_flight.pop() {
                self.machine.posted(at(self.now), generation, sequence, PostOutcome::Taken).unwrap();
                self.drain();
            }
            if self.machine.is_closed() {
                break;
            }
            let (next, _) = self.machine.poll_timeout().expect("something is due until all is over");
            self.now = u64::try_from(next.elapsed().as_millis()).unwrap();
            self.timeout();
            self.drain();
        }
        assert!(self.machine.is_closed() && self.finished, "it hangs in {}", self.machine.state());
    }
}

fn any_order() -> impl Strategy<Value = Order> {
    prop_oneof![Just(Order::DecodeFirst), Just(Order::PrefillFirst)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn a_receiver_keeps_its_promises_whatever_comes(
        order in any_order(),
        ask in any::<bool>(),
        ops in prop::collection::vec(any_op(), 0..60),
    ) {
        let mut run = ReceiverRun::new(order, ask);
        for op in ops {
            run.apply(op);
        }
        run.rest();
    }

    #[test]
    fn a_sender_keeps_its_promises_whatever_comes(
        order in any_order(),
        ops in prop::collection::vec(any_op(), 0..60),
    ) {
        let mut run = SenderRun::new(order);
        for op in ops {
            run.apply(op);
        }
        run.rest();
    }
}
