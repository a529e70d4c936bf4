//! Which (state, input) pairs of each machine were seen, with honest peers and with such as lie, and whether the machine and the table
//! agree.

use std::fmt::Write;

use crate::transfer::{
    EarlyInput, EarlyState, InputError, LeaseInput, LeaseState, LeaseVisits, ReceiverInput, ReceiverState, SenderInput,
    SenderState,
};

/// How often each input was given in each state, with and without a session.
#[derive(Debug, Clone, Default)]
pub struct Visits {
    /// Where both ends keep to the protocol.
    honest: Machines,
    /// Where the other end lies.
    lied_to: Machines,
    lease: [[u64; LeaseInput::ALL.len()]; LeaseState::ALL.len()],
    early: [[u64; EarlyInput::ALL.len()]; EarlyState::ALL.len()],
}

#[derive(Debug, Clone, Default)]
struct Machines {
    receiver: [[[u64; ReceiverInput::ALL.len()]; 2]; ReceiverState::ALL.len()],
    sender: [[[u64; SenderInput::ALL.len()]; 2]; SenderState::ALL.len()],
}

/// One pair and how often it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// Which machine.
    pub machine: &'static str,
    /// In which state.
    pub state: &'static str,
    /// With a session or without, where that matters.
    pub up: Option<bool>,
    /// Which input.
    pub input: &'static str,
    /// Whether the machine takes it.
    pub takes: bool,
    /// Whether drivers and peers that follow the rules bring it about.
    pub reached: bool,
    /// Whether a peer that follows no rule does: it is a word about a transfer, in a state that there is.
    pub lies: bool,
    /// How often it was seen with peers that follow the rules.
    pub count: u64,
    /// How often it was seen with a peer that lies.
    pub lied: u64,
}

impl Visits {
    fn of(&mut self, lied_to: bool) -> &mut Machines {
        if lied_to { &mut self.lied_to } else { &mut self.honest }
    }

    pub(super) fn receiver(
        &mut self,
        lied_to: bool,
        (state, up): (ReceiverState, bool),
        input: ReceiverInput,
        taken: &Result<(), InputError>,
    ) -> Result<(), String> {
        agree(taken, state.takes(up, input), || format!("{input} on a receiver that is {state}, session {up}"))?;
        // An answer to an older question is not the input that the table speaks of.
        if matches!(taken, Ok(()) | Err(InputError::State { .. })) {
            self.of(lied_to).receiver[state as usize][usize::from(up)][input as usize] += 1;
        }
        Ok(())
    }

    pub(super) fn sender(
        &mut self,
        lied_to: bool,
        (state, up): (SenderState, bool),
        input: SenderInput,
        taken: &Result<(), InputError>,
    ) -> Result<(), String> {
        agree(taken, state.takes(up, input), || format!("{input} on a sender that is {state}, session {up}"))?;
        if matches!(taken, Ok(()) | Err(InputError::State { .. })) {
            self.of(lied_to).sender[state as usize][usize::from(up)][input as usize] += 1;
        }
        Ok(())
    }

    pub(super) fn lease(&mut self, visits: &LeaseVisits) {
        for (sums, counts) in self.lease.iter_mut().zip(visits) {
            for (sum, &count) in sums.iter_mut().zip(counts) {
                *sum += u64::from(count);
            }
        }
    }

    pub(super) const fn early(&mut self, state: EarlyState, input: EarlyInput) {
        self.early[state as usize][input as usize] += 1;
    }

    /// Adds what another run saw.
    pub fn add(&mut self, other: &Self) {
        let add = |sums: &mut [u64], counts: &[u64]| sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        for (sums, counts) in [(&mut self.honest, &other.honest), (&mut self.lied_to, &other.lied_to)] {
            let receivers = counts.receiver.as_flattened().as_flattened();
            add(sums.receiver.as_flattened_mut().as_flattened_mut(), receivers);
            add(sums.sender.as_flattened_mut().as_flattened_mut(), counts.sender.as_flattened().as_flattened());
        }
        add(self.lease.as_flattened_mut(), other.lease.as_flattened());
        add(self.early.as_flattened_mut(), other.early.as_flattened());
    }

    /// All pairs of all machines.
    #[must_use]
    pub fn pairs(&self) -> Vec<Pair> {
        let mut pairs = Vec::new();
        for &state in ReceiverState::ALL {
            for up in [false, true] {
                pairs.extend(ReceiverInput::ALL.iter().map(|&input| Pair {
                    machine: "receiver",
                    state: state.name(),
                    up: Some(up),
                    input: input.name(),
                    takes: state.takes(up, input),
                    reached: state.is_reached(up, input),
                    lies: up && RECEIVER_WORDS.contains(&input) && state.is_reached(up, ReceiverInput::Cancel),
                    count: self.honest.receiver[state as usize][usize::from(up)][input as usize],
                    lied: self.lied_to.receiver[state as usize][usize::from(up)][input as usize],
                }));
            }
        }
        for &state in SenderState::ALL {
            for up in [false, true] {
                pairs.extend(SenderInput::ALL.iter().map(|&input| Pair {
                    machine: "sender",
                    state: state.name(),
                    up: Some(up),
                    input: input.name(),
                    takes: state.takes(up, input),
                    reached: state.is_reached(up, input),
                    lies: up && SENDER_WORDS.contains(&input) && state.is_reached(up, SenderInput::Cancel),
                    count: self.honest.sender[state as usize][usize::from(up)][input as usize],
                    lied: self.lied_to.sender[state as usize][usize::from(up)][input as usize],
                }));
            }
        }
        for &state in LeaseState::ALL {
            pairs.extend(LeaseInput::ALL.iter().map(|&input| Pair {
                machine: "lease",
                state: state.name(),
                up: None,
                input: input.name(),
                takes: state.takes(input),
                reached: true,
                lies: false,
                lied: 0,
                count: self.lease[state as usize][input as usize],
            }));
        }
        for &state in EarlyState::ALL {
            pairs.extend(EarlyInput::ALL.iter().map(|&input| Pair {
                machine: "early",
                state: state.name(),
                up: None,
                input: input.name(),
                takes: true,
                reached: state.is_reached(input),
                lies: false,
                lied: 0,
                count: self.early[state as usize][input as usize],
            }));
        }
        pairs
    }

    /// Pairs that fit, and that rule-abiding drivers bring about, but that were not seen.
    #[must_use]
    pub fn unseen(&self) -> Vec<Pair> {
        self.pairs().into_iter().filter(|pair| pair.takes && pair.reached && pair.count == 0).collect()
    }

    /// Words that a peer that lies was not heard to say in a state.
    #[must_use]
    pub fn unheard(&self) -> Vec<Pair> {
        self.pairs().into_iter().filter(|pair| pair.lies && pair.lied == 0).collect()
    }

    /// Pairs that were seen with peers that follow the rules, although the table says that no driver brings them about. Early messages are left out: there the
    /// table speaks of peers that keep to their role, and some here do not.
    #[must_use]
    pub fn unexpected(&self) -> Vec<Pair> {
        let pairs = self.pairs().into_iter().filter(|pair| pair.machine != "early");
        pairs.filter(|pair| !pair.reached && pair.count > 0).collect()
    }

    /// One line a pair, for a person: how often it was seen with honest peers, and with one that lies.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::new();
        for pair in self.pairs().iter().filter(|pair| pair.count > 0 || pair.lied > 0 || (pair.takes && pair.reached)) {
            let session = match pair.up {
                Some(true) => "up",
                Some(false) => "down",
                None => "",
            };
            let fit = if pair.takes { "takes" } else { "refuses" };
            let Pair { machine, state, input, count, lied, .. } = pair;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "  {machine:8} {state:20} {session:4} {fit:7} {input:16} {count:>10} {lied:>8}");
        }
        text
    }
}

/// The words about a transfer.
const RECEIVER_WORDS: [ReceiverInput; 8] = [
    ReceiverInput::Offer,
    ReceiverInput::Grant,
    ReceiverInput::Renew,
    ReceiverInput::Stop,
    ReceiverInput::Stopped,
    ReceiverInput::Abort,
    ReceiverInput::Ended,
    ReceiverInput::Working,
];
const SENDER_WORDS: [SenderInput; 8] = [
    SenderInput::Offer,
    SenderInput::Grant,
    SenderInput::Renew,
    SenderInput::Stop,
    SenderInput::Stopped,
    SenderInput::Abort,
    SenderInput::Ended,
    SenderInput::Working,
];

fn agree(taken: &Result<(), InputError>, takes: bool, what: impl Fn() -> String) -> Result<(), String> {
    match (taken, takes) {
        (Ok(()), false) => Err(format!("table: {} is taken", what())),
        (Err(error @ InputError::State { .. }), true) => Err(format!("table: {} is refused: {error}", what())),
        (Ok(()) | Err(_), _) => Ok(()),
    }
}
