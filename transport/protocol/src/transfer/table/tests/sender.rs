use std::num::{NonZeroU32, NonZeroU64};

use super::*;
use crate::transfer::{InputError, Order, PostOutcome, Sender, SenderConfig, SenderInput, SenderOutput, SenderState};

#[derive(Clone)]
struct SenderRun {
    start: usize,
    machine: Sender,
    now: Time,
    session: u64,
    generation: u32,
    in_flight: Vec<(Generation, u32)>,
    computed: u32,
    released: bool,
    finished: bool,
}

/// The input, which of its forms, and whether its parameters do not fit.
type Step = (SenderInput, usize, bool);

impl SenderRun {
    fn new(start: usize, order: Order) -> Self {
        let config = SenderConfig {
            transfer: id(),
            held: all(),
            order,
            lease_ttl: Duration::from_secs(30),
            lease_max: Duration::from_secs(100),
            absent: Duration::from_secs(15),
            word: Duration::from_secs(20),
            max_posts_in_flight: NonZeroU32::new(2).unwrap(),
            max_cells_per_post: NonZeroU64::new(2).unwrap(),
            align_tokens: NonZeroU32::MIN,
        };
        Self {
            start,
            machine: Sender::new(Time::ZERO, config),
            now: Time::ZERO,
            session: 1,
            generation: 0,
            in_flight: Vec::new(),
            computed: 0,
            released: false,
            finished: false,
        }
    }

    /// `None` if there is nothing that would fit, or no form that would not.
    fn input(&mut self, (input, variant, stale): Step) -> Option<Result<(), InputError>> {
        use SenderInput as I;
        let now = self.now;
        let machine = &mut self.machine;
        Some(match input {
            I::PeerUp if stale && self.session == 1 => return None,
            I::PeerUp => {
                self.session += u64::from(!stale);
                machine.peer_up(now, self.session)
            }
            I::Computed if stale => machine.computed(now, Rect::new(TOKENS..TOKENS + 1, 0..LAYERS).unwrap()),
            I::Computed => {
                let token = self.computed.min(TOKENS - 1);
                self.computed = token + 1;
                machine.computed(now, Rect::new(token..token + 1, 0..LAYERS).unwrap())
            }
            I::PostedTaken | I::PostedLost => {
                let outcome = if input == I::PostedTaken { PostOutcome::Taken } else { PostOutcome::Lost };
                let (generation, sequence) = match (stale, self.in_flight.is_empty()) {
                    (false, false) => self.in_flight.remove(0),
                    (false, true) => return None,
                    (true, _) => (Generation::new(88), 5),
                };
                machine.posted(now, generation, sequence, outcome)
            }
            I::PeerDown | I::PeerRestarted | I::Fail | I::Cancel | I::Timeout if stale => return None,
            I::PeerDown => machine.peer_down(now),
            I::PeerRestarted => machine.peer_restarted(now),
            I::Fail => machine.fail(now, "no memory"),
            I::Cancel => machine.cancel(now),
            I::Timeout => {
                let due = machine.poll_timeout().map_or_else(|| later(now), |(at, _)| at.max(now));
                machine.timeout(due);
                assert!(machine.poll_timeout().is_none_or(|(at, _)| at > due), "it is due for ever");
                if machine.poll_timeout().is_some() {
                    self.now = due;
                }
                Ok(())
            }
            I::Grant if stale && variant == 1 && self.generation == 0 => return None,
            I::Grant if stale && variant == 1 => self.say(MessageKind::Grant, 0, id(), self.generation),
            I::Grant if !stale => {
                self.generation += 1;
                self.say(MessageKind::Grant, variant, id(), self.generation)
            }
            I::Grant => self.say_other(MessageKind::Grant, variant),
            I::Renew => self.say_either(MessageKind::Renew, variant, stale),
            I::Stop => self.say_either(MessageKind::Stop, variant, stale),
            I::Ended => self.say_either(MessageKind::Ended, variant, stale),
            I::Manifest => self.say_either(MessageKind::Manifest, variant, stale),
            I::Offer => self.say_either(MessageKind::Offer, variant, stale),
            I::Working => self.say_either(MessageKind::Working, variant, stale),
            I::Stopped => self.say_either(MessageKind::Stopped, variant, stale),
            I::Abort => self.say_either(MessageKind::Abort, variant, stale),
            I::Engine => self.say_either(MessageKind::Engine, variant, stale),
            I::Spare => self.say_either(MessageKind::Spare, variant, stale),
        })
    }

    fn say_either(&mut self, kind: MessageKind, variant: usize, stale: bool) -> Result<(), InputError> {
        if stale { self.say_other(kind, variant) } else { self.say(kind, variant, id(), self.generation) }
    }

    fn say_other(&mut self, kind: MessageKind, variant: usize) -> Result<(), InputError> {
        self.say(kind, variant, TransferId::new(2), self.generation)
    }

    fn say(
        &mut self,
        kind: MessageKind,
        variant: usize,
        transfer: TransferId,
        generation: u32,
    ) -> Result<(), InputError> {
        self.machine.message(self.now, message(kind, transfer, Generation::new(generation), variant))
    }

    fn drain(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                SenderOutput::Post { generation, sequence, .. } => self.in_flight.push((generation, sequence)),
                SenderOutput::ReleaseLease => {
                    assert!(!self.released && self.in_flight.is_empty());
                    self.released = true;
                }
                SenderOutput::Finished(_) => {
                    assert!(self.released && !self.finished);
                    self.finished = true;
                }
                SenderOutput::Adopt(_) | SenderOutput::CancelPosts { .. } | SenderOutput::Send(_) => {}
            }
        }
    }
}

impl Run for SenderRun {
    type Step = Step;
    type Key = (usize, SenderState, bool, (usize, u32, bool, u32), Option<&'static str>, bool);

    fn key(&self) -> Self::Key {
        let machine = &self.machine;
        let told = (self.in_flight.len(), self.generation.min(2), self.session > 1, self.computed);
        (self.start, machine.kind(), machine.is_up(), told, machine.poll_timeout().map(|(_, why)| why), self.released)
    }

    fn steps() -> Vec<Step> {
        let inputs = SenderInput::ALL.iter();
        inputs.flat_map(|&input| [(input, 0, false), (input, 1, false), (input, 0, true), (input, 1, true)]).collect()
    }

    fn give(&mut self, step: Step, seen: &mut Seen) -> bool {
        let (input, _, stale) = step;
        let (state, up, before) = (self.machine.kind(), self.machine.is_up(), self.machine.snapshot());
        let Some(taken) = self.input(step) else { return false };
        let after = self.machine.snapshot();
        let takes = state.takes(up, input) && !stale;
        let what = format!("{input} ({step:?}) in {state}, session {up}");
        match (input, takes) {
            (SenderInput::Timeout, true) => {}
            (SenderInput::Timeout, false) => assert_eq!(before, after, "{what} changes something"),
            (_, true) => assert_eq!(taken, Ok(()), "{what} is refused"),
            (_, false) => {
                assert!(taken.is_err(), "{what} is taken");
                assert_eq!(before, after, "{what} is refused and changes something");
            }
        }
        if !stale {
            seen.pairs.insert((state.name(), up, input.name()));
        }
        self.drain();
        takes
    }

    fn note(&self, seen: &mut Seen) {
        seen.states.insert((self.machine.kind().name(), self.machine.is_up()));
    }
}

#[test]
fn a_sender_takes_what_the_table_says_and_refuses_the_rest_unchanged() {
    let mut seen = Seen::default();
    explore(vec![SenderRun::new(0, Order::DecodeFirst), SenderRun::new(1, Order::PrefillFirst)], &mut seen);
    for &state in SenderState::ALL {
        for up in [false, true] {
            let exists = SenderInput::ALL.iter().any(|&input| state.is_reached(up, input));
            if exists {
                assert!(seen.states.contains(&(state.name(), up)), "no input leads to {state}, session {up}");
            }
            for &input in SenderInput::ALL {
                let given = seen.pairs.contains(&(state.name(), up, input.name()));
                let fits = state.takes(up, input) && state.is_reached(up, input);
                assert!(given || !fits, "{input} was never given in {state}, session {up}");
            }
        }
        assert!(seen.states.iter().any(|(name, _)| *name == state.name()), "no input leads to {state}");
    }
    println!("sender: {} states with or without a session, {} pairs", seen.states.len(), seen.pairs.len());
}
