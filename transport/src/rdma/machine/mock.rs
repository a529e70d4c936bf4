//! Two devices joined by a wire, as a script has them: each request runs, each completion comes, when the script says.
//!
//! Order is kept inside a lane and nowhere else. A lane that was put into error goes on for a while: a request that is under way
//! there may still read and write until everything that was posted has been flushed, as a real device may.

use std::collections::VecDeque;

use bytes::Bytes;

use crate::rdma::work::{Chain, Completion, Direction, Done, Fault, Lanes, NotPosted, Request, Segment};

pub(super) struct Fabric {
    pub(super) sides: [Side; 2],
    /// What the devices of a side do wrong to what it writes.
    pub(super) spoils: [Option<Spoil>; 2],
    /// Whether what a device has said to be written is in memory only when the completion of its tag is taken.
    pub(super) places_late: bool,
    /// What no device would have allowed, or no honest peer made it do.
    pub(super) breaches: Vec<String>,
}

/// What goes wrong, though every completion says that all went well, or none says anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Spoil {
    /// A bit of each write is flipped.
    Flipped,
    /// Each write is placed a byte further.
    Shifted,
    /// Writes are acknowledged, and not placed.
    Unplaced,
    /// Words are acknowledged, and do not come.
    WordLost,
    /// A lane does nothing.
    Stuck(usize),
}

pub(super) struct Side {
    pub(super) memory: Vec<u8>,
    pub(super) lanes: Vec<Pair>,
    slots: Vec<Vec<u8>>,
    depth: u64,
    pub(super) is_closed: bool,
}

#[derive(Default)]
pub(super) struct Pair {
    sends: VecDeque<Sending>,
    receives: VecDeque<u64>,
    pub(super) completions: VecDeque<Completion>,
    pub(super) last_delivered: Option<Completion>,
    posted: u64,
    freed: u64,
    /// Bytes that are not in memory yet, and the receive whose completion says that they are.
    on_the_way: Vec<(usize, Vec<u8>, Option<u64>)>,
    is_failed: bool,
    /// Something failed or was flushed: nothing after it runs any more.
    is_flushing: bool,
}

struct Sending {
    number: u64,
    is_signalled: bool,
    action: Action,
}

enum Action {
    Write { remote: u64, segments: Vec<Segment>, tag: Option<u32> },
    Word(Bytes),
    Credit(u32),
}

/// One side's queue pairs.
pub(super) struct Mine<'a>(pub(super) &'a mut Fabric, pub(super) usize);

impl Fabric {
    pub(super) fn new(memory: usize, lanes: usize, depth: u64, slots: usize) -> Self {
        let side = || Side {
            memory: vec![0; memory],
            lanes: (0..lanes).map(|_| Pair::default()).collect(),
            slots: vec![Vec::new(); slots],
            depth,
            is_closed: false,
        };
        Self { sides: [side(), side()], spoils: [None; 2], places_late: false, breaches: Vec::new() }
    }

    /// Whether a lane of a side has anything to do.
    pub(super) fn is_busy(&self, side: usize, lane: usize) -> bool {
        let pair = &self.sides[side].lanes[lane];
        !pair.sends.is_empty() || (pair.is_failed && !pair.receives.is_empty())
    }

    /// Runs the next request of a lane, or flushes something if the lane is in error and `may_run` is not set.
    pub(super) fn run(&mut self, side: usize, lane: usize, may_run: bool) {
        if self.spoils[side] == Some(Spoil::Stuck(lane)) && !self.sides[side].lanes[lane].is_failed {
            return;
        }
        let pair = &mut self.sides[side].lanes[lane];
        let is_flushed = !may_run || pair.sends.is_empty() || pair.is_flushing;
        if pair.is_failed && is_flushed {
            pair.is_flushing = true;
            let (direction, number) = match (pair.sends.pop_front(), pair.receives.pop_front()) {
                (Some(sending), receive) => {
                    if let Some(receive) = receive {
                        pair.receives.push_front(receive);
                    }
                    (Direction::Send, sending.number)
                }
                (None, Some(number)) => (Direction::Receive, number),
                (None, None) => return,
            };
            pair.completions.push_back(Completion { lane, direction, number, outcome: Err(Fault::Flushed) });
            return;
        }
        let Some(sending) = pair.sends.pop_front() else { return };
        let outcome = self.carry_out(side, lane, &sending.action);
        let pair = &mut self.sides[side].lanes[lane];
        pair.is_failed |= outcome.is_err();
        pair.is_flushing |= outcome.is_err();
        if sending.is_signalled || outcome.is_err() {
            let outcome = outcome.map(|()| Done::Sent);
            let (direction, number) = (Direction::Send, sending.number);
            pair.completions.push_back(Completion { lane, direction, number, outcome });
        }
    }

    /// Makes the next request of a lane fail, as if the peer had refused the access, had no receive or did not answer.
    pub(super) fn refuse(&mut self, side: usize, lane: usize, fault: Fault) -> bool {
        let pair = &mut self.sides[side].lanes[lane];
        let Some(sending) = pair.sends.pop_front() else { return false };
        (pair.is_failed, pair.is_flushing) = (true, true);
        let (direction, number, outcome) = (Direction::Send, sending.number, Err(fault));
        pair.completions.push_back(Completion { lane, direction, number, outcome });
        true
    }

    fn carry_out(&mut self, side: usize, lane: usize, action: &Action) -> Result<(), Fault> {
        let (spoil, is_late) = (self.spoils[side], self.places_late);
        let [a, b] = &mut self.sides;
        let (from, to) = if side == 0 { (a, b) } else { (b, a) };
        let target = &mut to.lanes[lane];
        if to.is_closed || (target.is_failed && target.receives.is_empty()) {
            return Err(Fault::Unreachable);
        }
        let done = match action {
            Action::Write { remote, segments, tag } => {
                let mut at = *remote as usize;
                for segment in segments {
                    let (start, bytes) = (segment.address as usize, segment.bytes as usize);
                    let mut written = from.memory[start..start + bytes].to_vec();
                    match spoil {
                        Some(Spoil::Flipped) => written[bytes / 2] ^= 4,
                        Some(Spoil::Shifted) => written.rotate_right(1),
                        Some(Spoil::Unplaced) => written.clear(),
                        _ => {}
                    }
                    match is_late {
                        true => target.on_the_way.push((at, written, None)),
                        false => to.memory[at..at + written.len()].copy_from_slice(&written),
                    }
                    at += bytes;
                }
                let Some(tag) = tag else { return Ok(()) };
                Done::Tag(*tag)
            }
            Action::Word(_) if spoil == Some(Spoil::WordLost) => return Ok(()),
            Action::Word(word) => Done::Word(word.clone()),
            Action::Credit(count) => Done::Credit(*count),
        };
        let Some(number) = target.receives.pop_front() else {
            self.breaches.push(format!("lane {lane}: no receive is posted for {done:?}"));
            return Err(Fault::ReceiverNotReady);
        };
        target.on_the_way.iter_mut().for_each(|(_, _, told)| *told = told.or(Some(number)));
        target.completions.push_back(Completion { lane, direction: Direction::Receive, number, outcome: Ok(done) });
        Ok(())
    }

    /// The next completion of a lane; it frees the places of the requests that it ends.
    pub(super) fn next_completion(&mut self, side: usize, lane: usize) -> Option<Completion> {
        let pair = &mut self.sides[side].lanes[lane];
        let completion = pair.completions.pop_front()?;
        if completion.direction == Direction::Send {
            pair.freed = pair.freed.max(completion.number + 1);
        }
        pair.last_delivered = Some(completion.clone());
        if completion.direction == Direction::Receive {
            let is_told =
                |(_, _, told): &mut (usize, Vec<u8>, Option<u64>)| told.is_some_and(|n| n <= completion.number);
            let placed: Vec<_> = pair.on_the_way.extract_if(.., is_told).collect();
            for (at, bytes, _) in placed {
                self.sides[side].memory[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        Some(completion)
    }

    /// A process that is killed: its queue pairs are gone and it gets nothing any more.
    pub(super) fn kill(&mut self, side: usize) {
        Mine(self, side).close();
        for pair in &mut self.sides[side].lanes {
            pair.completions.clear();
        }
    }
}

impl Lanes for Mine<'_> {
    fn stage(&mut self, slot: usize, prefix: &[u8], head: &[u8]) {
        self.0.sides[self.1].slots[slot] = [prefix, head].concat();
    }

    fn post(&mut self, lane: usize, chain: &Chain) -> Result<(), NotPosted> {
        let side = &mut self.0.sides[self.1];
        for (posted, posting) in chain.postings.iter().enumerate() {
            let pair = &mut side.lanes[lane];
            if pair.posted - pair.freed >= side.depth {
                self.0.breaches.push(format!("lane {lane}: the send queue is full"));
                return Err(NotPosted { posted, fault: Fault::Call { call: "post", text: "full".to_owned() } });
            }
            pair.posted += 1;
            let action = match &posting.request {
                Request::Write { remote, segments, tag, .. } => {
                    Action::Write { remote: *remote, segments: chain.segments[segments.clone()].to_vec(), tag: *tag }
                }
                Request::Word { slot, bytes } => Action::Word(Bytes::copy_from_slice(&side.slots[*slot][..*bytes])),
                Request::Credit { count } => Action::Credit(*count),
            };
            pair.sends.push_back(Sending { number: posting.number, is_signalled: posting.is_signalled, action });
        }
        Ok(())
    }

    fn receive(&mut self, lane: usize, from: u64, count: usize) -> Result<(), NotPosted> {
        self.0.sides[self.1].lanes[lane].receives.extend(from..from + count as u64);
        Ok(())
    }

    fn fail(&mut self, lane: usize) {
        self.0.sides[self.1].lanes[lane].is_failed = true;
    }

    fn close(&mut self) {
        let side = &mut self.0.sides[self.1];
        side.is_closed = true;
        for pair in &mut side.lanes {
            pair.sends.clear();
            pair.receives.clear();
        }
    }
}
