use super::*;
use crate::transfer::{Lease, LeaseInput, LeaseState};

const TTL: Duration = Duration::from_secs(10);
const MAX: Duration = Duration::from_secs(25);

#[derive(Clone)]
struct LeaseRun {
    lease: Lease,
    reads: u32,
}

impl LeaseRun {
    fn same(&self, other: &Self) -> bool {
        let told = |run: &Self| (run.lease.kind(), run.lease.expires(), run.lease.is_released());
        told(self) == told(other)
    }
}

impl Run for LeaseRun {
    type Step = LeaseInput;
    type Key = (LeaseState, u32);

    fn key(&self) -> Self::Key {
        (self.lease.kind(), self.reads.min(2))
    }

    fn steps() -> Vec<LeaseInput> {
        LeaseInput::ALL.to_vec()
    }

    fn give(&mut self, input: LeaseInput, seen: &mut Seen) -> bool {
        let (state, before) = (self.lease.kind(), self.clone());
        let takes = state.takes(input) && (input != LeaseInput::EndRead || self.reads > 0);
        match input {
            LeaseInput::Renew => assert_eq!(self.lease.renew(Time::ZERO + TTL, TTL).is_ok(), takes),
            LeaseInput::BeginRead => {
                assert_eq!(self.lease.begin_read().is_ok(), takes);
                self.reads += u32::from(takes);
            }
            LeaseInput::EndRead => {
                self.lease.end_read();
                self.reads = self.reads.saturating_sub(1);
            }
            LeaseInput::Release => self.lease.release(),
        }
        assert!(takes || self.same(&before), "{input} in {state} changes something");
        assert_eq!(self.lease.is_released(), self.reads == 0 && self.lease.expires().is_none());
        seen.pairs.insert((state.name(), false, input.name()));
        takes
    }

    fn note(&self, seen: &mut Seen) {
        seen.states.insert((self.lease.kind().name(), false));
    }
}

#[test]
fn a_lease_takes_what_the_table_says() {
    let mut seen = Seen::default();
    explore(vec![LeaseRun { lease: Lease::new(Time::ZERO, TTL, MAX), reads: 0 }], &mut seen);
    assert_eq!(seen.states.len(), LeaseState::ALL.len());
    assert_eq!(seen.pairs.len(), LeaseState::ALL.len() * LeaseInput::ALL.len());
}
