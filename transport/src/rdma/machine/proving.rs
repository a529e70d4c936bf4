//! The proof of queue pairs, and fences, over a scripted wire that does not do what it says.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::mock::{Fabric, Mine, Spoil};
use super::tests::config;
use super::{Machine, MachineEvent};
use crate::rdma::fences::Fences;
use crate::rdma::proof::{Output, Proof, Verdict};
use crate::rdma::work::{Key, Order, Run};

const BYTES: usize = 3 * 256;
const LIMIT: Duration = Duration::from_secs(1);

/// What the two say on the control lane.
enum Word {
    Ready,
    Echo(Vec<u8>),
    Right,
    Wrong(String),
}

struct Pair {
    fabric: Fabric,
    machines: [Machine; 2],
    proofs: [Proof; 2],
    /// To which side, and what.
    words: VecDeque<(usize, Word)>,
    verdicts: [Option<Verdict>; 2],
    lanes_used: [Vec<u64>; 2],
    now: Instant,
}

/// The order of a test pattern, from the first half of one side's memory into the second of the other's.
fn pattern_order() -> Order {
    let (local_key, remote_key) = (Key::PATTERN, Key::PATTERN);
    let run = Run { local: 0, local_key, remote: BYTES as u64, remote_key, bytes: BYTES as u64 };
    Order { id: 0, head: Bytes::new(), runs: vec![run], is_spread: true }
}

impl Pair {
    fn new(spoils: [Option<Spoil>; 2]) -> Self {
        let (now, config) = (Instant::now(), config());
        let mut fabric =
            Fabric::new(2 * BYTES, config.payload_lanes + 1, config.send_depth.into(), config.window as usize);
        fabric.spoils = spoils;
        let mut machines = [Machine::new(config, now), Machine::new(config, now)];
        for (side, machine) in machines.iter_mut().enumerate() {
            machine.open(&mut Mine(&mut fabric, side), config.window, config.head_bytes, now);
        }
        let proof = |side: usize| {
            let pattern = (0..BYTES).map(|at| (at * 7 + side * 31 + at / 256 * 5) as u8).collect();
            Proof::new(pattern, LIMIT, now)
        };
        let words = VecDeque::from([(0, Word::Ready), (1, Word::Ready)]);
        let proofs = [proof(0), proof(1)];
        Self { fabric, machines, proofs, words, verdicts: [None, None], lanes_used: Default::default(), now }
    }

    /// Lets the devices do all that they do; returns whether they did anything.
    fn run(&mut self) -> bool {
        let mut is_busy = false;
        for (side, lane) in (0..2).flat_map(|side| (0..=config().payload_lanes).map(move |lane| (side, lane))) {
            self.fabric.run(side, lane, true);
            while let Some(completion) = self.fabric.next_completion(side, lane) {
                is_busy = true;
                let (machine, mut lanes) = (&mut self.machines[side], Mine(&mut self.fabric, side));
                machine.complete(&mut lanes, completion, self.now);
                machine.advance(&mut lanes, self.now);
            }
            while let Some(event) = self.machines[side].poll_event() {
                is_busy = true;
                match event {
                    MachineEvent::Landed { .. } => {
                        self.proofs[side].landed(self.fabric.sides[side].memory[BYTES..].to_vec());
                    }
                    MachineEvent::Broken { fault } => self.proofs[side].failed(fault.to_string()),
                    _ => {}
                }
            }
        }
        is_busy
    }

    /// Does what the proofs ask for and says what was said; returns whether there was anything.
    fn talk(&mut self) -> bool {
        let mut is_busy = false;
        for side in 0..2 {
            while let Some(output) = self.proofs[side].poll_output() {
                is_busy = true;
                let word = match output {
                    Output::Write => {
                        let pattern = self.proofs[side].pattern().to_vec();
                        self.fabric.sides[side].memory[..BYTES].copy_from_slice(&pattern);
                        let mut lanes = Mine(&mut self.fabric, side);
                        self.machines[side].post(&mut lanes, pattern_order(), self.now).unwrap();
                        continue;
                    }
                    Output::Echo(came) => Word::Echo(came),
                    Output::Right => Word::Right,
                    Output::Wrong(reason) => Word::Wrong(reason),
                    Output::Over(verdict) => {
                        assert_eq!(self.verdicts[side].replace(verdict), None, "over twice");
                        self.lanes_used[side] = self.machines[side].parts_ended();
                        continue;
                    }
                };
                self.words.push_back((1 - side, word));
            }
        }
        if let Some((side, word)) = self.words.pop_front() {
            is_busy = true;
            let proof = &mut self.proofs[side];
            match word {
                Word::Ready => proof.ready(),
                Word::Echo(came) => proof.echo(&came),
                Word::Right => proof.right(),
                Word::Wrong(reason) => proof.wrong(&reason),
            }
        }
        is_busy
    }

    /// Until both have ended.
    fn play(mut self) -> Self {
        while self.verdicts.iter().any(Option::is_none) {
            if !(self.run() | self.talk()) {
                self.now += LIMIT;
                self.proofs.iter_mut().for_each(|proof| proof.time_out(self.now));
                assert!(self.now < self.proofs[0].poll_timeout().unwrap_or(self.now) + 4 * LIMIT, "no end");
            }
        }
        self
    }
}

#[test]
fn queue_pairs_that_carry_a_pattern_over_every_lane_are_proved_on_both_sides() {
    let pair = Pair::new([None, None]).play();
    assert_eq!(pair.verdicts, [Some(Verdict::Proved), Some(Verdict::Proved)]);
    assert_eq!(pair.lanes_used, [vec![1; config().payload_lanes], vec![1; config().payload_lanes]]);
}

#[test]
fn whatever_is_spoilt_or_lost_in_either_direction_neither_side_takes_the_path() {
    let all = [Spoil::Flipped, Spoil::Shifted, Spoil::Unplaced, Spoil::WordLost];
    let stuck = (0..=config().payload_lanes).map(Spoil::Stuck);
    for spoil in all.into_iter().chain(stuck) {
        for spoils in [[Some(spoil), None], [None, Some(spoil)], [Some(spoil), Some(spoil)]] {
            let pair = Pair::new(spoils).play();
            for verdict in &pair.verdicts {
                assert!(matches!(verdict, Some(Verdict::Unproved(_))), "{spoils:?}: {:?}", pair.verdicts);
            }
        }
    }
}

#[test]
fn a_proof_that_does_not_compare_would_take_what_is_spoilt() {
    for spoil in [Spoil::Flipped, Spoil::Shifted, Spoil::Unplaced] {
        let mut pair = Pair::new([Some(spoil), None]);
        pair.proofs[0].believes_anything = true;
        assert_eq!(pair.play().verdicts[0], Some(Verdict::Proved), "{spoil:?}");
    }
}

/// The sender's device says that a write is done before its bytes are in the receiver's memory.
#[test]
fn a_fence_is_over_only_when_what_was_written_before_it_is_in_memory() {
    let (now, config) = (Instant::now(), config());
    let mut pair = Pair::new([None, None]);
    pair.fabric.places_late = true;
    pair.fabric.sides[0].memory[..BYTES].fill(7);
    pair.machines[0].post(&mut Mine(&mut pair.fabric, 0), pattern_order(), now).unwrap();
    // Only the sender's completions are taken.
    let mut is_sent = false;
    while !is_sent {
        for lane in 0..=config.payload_lanes {
            pair.fabric.run(0, lane, true);
            while let Some(completion) = pair.fabric.next_completion(0, lane) {
                pair.machines[0].complete(&mut Mine(&mut pair.fabric, 0), completion, now);
                pair.machines[0].advance(&mut Mine(&mut pair.fabric, 0), now);
            }
        }
        is_sent |= pair.machines[0].poll_event() == Some(MachineEvent::Sent { id: 0 });
    }
    let waiter = Arc::new(());
    let (mut fences, waits) = (Fences::default(), Arc::downgrade(&waiter));
    fences.ask(now + LIMIT, waiter);
    fences.answered(0, pair.machines[0].parts_ended());
    let mut lanes_taken = 0;
    loop {
        fences.settle(&pair.machines[1].parts_taken());
        let is_in_memory = pair.fabric.sides[1].memory[BYTES..].iter().all(|byte| *byte == 7);
        assert!(is_in_memory || waits.strong_count() == 1, "over while bytes are on the way");
        assert_eq!(waits.strong_count() == 0, lanes_taken == config.payload_lanes, "after {lanes_taken} lanes");
        if waits.strong_count() == 0 {
            break;
        }
        lanes_taken += 1;
        while let Some(completion) = pair.fabric.next_completion(1, lanes_taken) {
            pair.machines[1].complete(&mut Mine(&mut pair.fabric, 1), completion, now);
        }
    }
}
