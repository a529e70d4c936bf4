use super::*;
use crate::message::Wrote;
use crate::transfer::{
    Coverage, GrantRefusal, InputError, Order, Receiver, ReceiverConfig, ReceiverInput, ReceiverOutput, ReceiverState,
};

#[derive(Clone)]
struct ReceiverRun {
    start: usize,
    machine: Receiver,
    now: Time,
    session: u64,
    generation: Generation,
    asked: bool,
    fencing: bool,
    hashing: Vec<(Generation, u32)>,
    /// Landed or verified under the last grant.
    landed: Coverage,
    next_sequence: u32,
    finished: bool,
    /// The sender said that it ended.
    ended: bool,
}

/// The input, which of its forms, and whether its parameters do not fit.
type Step = (ReceiverInput, usize, bool);

impl ReceiverRun {
    fn new(start: usize, order: Order, ask: bool) -> Self {
        let config = ReceiverConfig {
            transfer: id(),
            wanted: Rect::new(1..TOKENS, 0..LAYERS).unwrap().into(),
            order,
            deadline: Duration::from_secs(100),
            progress: Duration::from_secs(20),
            absent: Duration::from_secs(15),
            lease_ttl: Duration::from_secs(30),
            ask_before_revoke: ask.then_some(Duration::from_secs(5)),
            linger: Duration::from_secs(9),
            max_cuts: 2,
        };
        Self {
            start,
            machine: Receiver::new(Time::ZERO, config).unwrap(),
            now: Time::ZERO,
            session: 1,
            generation: Generation::new(0),
            asked: false,
            fencing: false,
            hashing: Vec::new(),
            landed: Coverage::new(),
            next_sequence: 0,
            finished: false,
            ended: false,
        }
    }

    /// `None` if there is nothing that would fit, or no form that would not.
    fn input(&mut self, (input, variant, stale): Step) -> Option<Result<(), InputError>> {
        use ReceiverInput as I;
        let now = self.now;
        let generation = if stale { Generation::new(self.generation.get() + 9) } else { self.generation };
        let machine = &mut self.machine;
        Some(match input {
            I::PeerUp if stale && self.session == 1 => return None,
            I::PeerUp => {
                self.session += u64::from(!stale);
                machine.peer_up(now, self.session)
            }
            I::Granted => machine.granted(now, generation, OpaqueKey::new(3), WindowBytes::default()),
            I::GrantRefused if variant == 0 => machine.grant_refused(now, generation, GrantRefusal::NotConnected),
            I::GrantRefused => machine.grant_refused(now, generation, GrantRefusal::Impossible("full".into())),
            I::Fenced => machine.fenced(now, generation),
            I::Landed => {
                let fresh = (1..TOKENS).filter_map(|token| Rect::new(token..token + 1, 0..LAYERS).ok());
                let rect = fresh.into_iter().find(|&rect| !self.landed.overlaps(rect));
                let wrote = |rect, sequence| Wrote { transfer: id(), generation, sequence, rect, digest: digest() };
                match (stale, variant, rect) {
                    (false, 0, Some(rect)) => machine.landed(now, wrote(rect, self.next_sequence)),
                    // It came before.
                    (true, 1, _) if self.next_sequence > 0 => {
                        let before = Wrote { generation: self.generation, ..wrote(all(), self.next_sequence - 1) };
                        machine.landed(now, before)
                    }
                    (true, 0, Some(rect)) => machine.landed(now, wrote(rect, self.next_sequence)),
                    _ => return None,
                }
            }
            I::Digested | I::DigestFailed => {
                let (generation, sequence) = match (stale, self.hashing.first()) {
                    (false, Some(_)) => self.hashing.remove(0),
                    (false, None) => return None,
                    (true, _) if variant == 0 => (generation, 0),
                    (true, _) => (self.generation, 77),
                };
                let found = if variant == 0 { digest() } else { Digest::new(8) };
                match input {
                    I::Digested => machine.digested(now, generation, sequence, found),
                    _ => machine.digest_failed(now, generation, sequence, "the device is gone"),
                }
            }
            I::PeerDown | I::PeerRestarted | I::Cancel | I::Timeout if stale => return None,
            I::PeerDown => machine.peer_down(now),
            I::PeerRestarted => machine.peer_restarted(now),
            I::Cancel => machine.cancel(now),
            I::Timeout => {
                let due = machine.poll_timeout().map_or_else(|| later(now), |(at, _)| at.max(now));
                machine.timeout(due);
                assert!(machine.poll_timeout().is_none_or(|(at, _)| at > due), "it is due for ever");
                if machine.poll_timeout().is_some() || !machine.is_closed() {
                    self.now = due;
                }
                Ok(())
            }
            I::Offer => self.say(MessageKind::Offer, variant, stale),
            I::Working => self.say(MessageKind::Working, variant, stale),
            I::Stopped => self.say(MessageKind::Stopped, variant, stale),
            I::Abort => self.say(MessageKind::Abort, variant, stale),
            I::Ended => self.say(MessageKind::Ended, variant, stale),
            I::Manifest => self.say(MessageKind::Manifest, variant, stale),
            I::Grant => self.say(MessageKind::Grant, variant, stale),
            I::Renew => self.say(MessageKind::Renew, variant, stale),
            I::Stop => self.say(MessageKind::Stop, variant, stale),
            I::Engine => self.say(MessageKind::Engine, variant, stale),
            I::Spare => self.say(MessageKind::Spare, variant, stale),
        })
    }

    fn say(&mut self, kind: MessageKind, variant: usize, stale: bool) -> Result<(), InputError> {
        let transfer = if stale { TransferId::new(2) } else { id() };
        let taken = self.machine.message(self.now, message(kind, transfer, self.generation, variant));
        self.ended |= kind == MessageKind::Ended && taken.is_ok();
        taken
    }

    fn drain(&mut self) {
        while let Some(output) = self.machine.poll_output() {
            match output {
                ReceiverOutput::MakeGrant { generation, .. } => {
                    self.generation = generation;
                    self.asked = true;
                    self.landed = self.machine.verified().clone();
                    self.next_sequence = 0;
                }
                ReceiverOutput::Verify { generation, sequence, rect } => {
                    self.hashing.push((generation, sequence));
                    self.landed.insert(rect).unwrap();
                    self.next_sequence = sequence + 1;
                }
                ReceiverOutput::Revoke { .. } => self.fencing = true,
                ReceiverOutput::Send(_) | ReceiverOutput::Verified(_) => {}
                ReceiverOutput::Finished(_) => {
                    assert!(!self.finished, "it finished twice");
                    self.finished = true;
                }
            }
        }
    }
}

impl Run for ReceiverRun {
    type Step = Step;
    type Key = (usize, ReceiverState, bool, (usize, u32, bool, bool), u64, Option<&'static str>);

    fn key(&self) -> Self::Key {
        let machine = &self.machine;
        let told = (self.hashing.len().min(2), self.generation.get().min(2), self.session > 1, self.ended);
        let due = machine.poll_timeout().map(|(_, why)| why);
        (self.start, machine.kind(), machine.is_up(), told, machine.verified().cells(), due)
    }

    fn steps() -> Vec<Step> {
        let inputs = ReceiverInput::ALL.iter();
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
            (ReceiverInput::Timeout, true) => {}
            (ReceiverInput::Timeout, false) => assert_eq!(before, after, "{what} changes something"),
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
fn a_receiver_takes_what_the_table_says_and_refuses_the_rest_unchanged() {
    let mut seen = Seen::default();
    let kinds = [Order::DecodeFirst, Order::PrefillFirst].into_iter().flat_map(|o| [(o, false), (o, true)]);
    let starts = kinds.enumerate().map(|(start, (order, ask))| ReceiverRun::new(start, order, ask));
    explore(starts.collect(), &mut seen);
    for &state in ReceiverState::ALL {
        for up in [false, true] {
            let exists = ReceiverInput::ALL.iter().any(|&input| state.is_reached(up, input));
            if exists {
                assert!(seen.states.contains(&(state.name(), up)), "no input leads to {state}, session {up}");
            }
            for &input in ReceiverInput::ALL {
                let given = seen.pairs.contains(&(state.name(), up, input.name()));
                let fits = state.takes(up, input) && state.is_reached(up, input);
                assert!(given || !fits, "{input} was never given in {state}, session {up}");
            }
        }
        assert!(seen.states.iter().any(|(name, _)| *name == state.name()), "no input leads to {state}");
    }
    println!("receiver: {} states with or without a session, {} pairs", seen.states.len(), seen.pairs.len());
}
