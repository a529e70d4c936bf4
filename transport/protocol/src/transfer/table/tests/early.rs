use super::*;
use crate::ids::{EngineId, Incarnation, PeerId, PpRank, TpRank};
use crate::transfer::{Early, EarlyConfig, EarlyInput, EarlyState};

#[derive(Clone)]
struct EarlyRun {
    early: Early,
    now: Time,
}

/// An input about the transfer, or another transfer's offer, which takes the room of one.
#[derive(Clone, Copy)]
enum Step {
    Ours(EarlyInput),
    Others,
}

fn peer() -> PeerId {
    PeerId {
        engine: EngineId::new("engine").unwrap(),
        incarnation: Incarnation::new(1),
        pp_rank: PpRank::new(0),
        tp_rank: TpRank::new(0),
    }
}

impl EarlyRun {
    fn state(&self) -> EarlyState {
        self.early.state(&peer(), id())
    }

    /// Returns whether the peer was answered, or the engine was handed something.
    fn input(&mut self, input: EarlyInput) -> bool {
        use EarlyInput as I;
        let kind = match input {
            I::Take => return self.early.take(&peer(), id()).is_some(),
            I::Decline => return self.early.decline(self.now, &peer(), id(), "no").is_some(),
            I::PeerDown => {
                self.early.peer_down(&peer());
                return false;
            }
            I::Timeout => {
                let due = self.early.poll_timeout().map_or(self.now, |(at, _)| at);
                self.now = due;
                return self.early.timeout(due).iter().any(|(_, answer)| answer.transfer() == Some(id()));
            }
            I::Offer => MessageKind::Offer,
            I::Grant => MessageKind::Grant,
            I::Renew => MessageKind::Renew,
            I::Stop => MessageKind::Stop,
            I::Stopped => MessageKind::Stopped,
            I::Abort => MessageKind::Abort,
            I::Ended => MessageKind::Ended,
            I::Working => MessageKind::Working,
            I::Manifest => MessageKind::Manifest,
            I::Engine => MessageKind::Engine,
            I::Spare => MessageKind::Spare,
        };
        self.early.message(self.now, &peer(), message(kind, id(), Generation::new(0), 0)).is_some()
    }
}

impl Run for EarlyRun {
    type Step = Step;
    type Key = (EarlyState, usize);

    fn key(&self) -> Self::Key {
        (self.state(), self.early.len())
    }

    fn steps() -> Vec<Step> {
        EarlyInput::ALL.iter().map(|&input| Step::Ours(input)).chain([Step::Others]).collect()
    }

    fn give(&mut self, step: Step, seen: &mut Seen) -> bool {
        let input = match step {
            Step::Ours(input) => input,
            Step::Others => {
                let offer = message(MessageKind::Offer, TransferId::new(2), Generation::new(0), 0);
                self.early.message(self.now, &peer(), offer);
                return true;
            }
        };
        let (state, fit) = (self.state(), self.state().fit(input));
        let answers = self.input(input);
        let then = match self.state() {
            EarlyState::Full => EarlyState::Unknown,
            then => then,
        };
        assert_eq!((then, answers), (fit.then, fit.answers), "{input} in {state}");
        assert!(self.early.len() <= 1 && self.early.declined_len() <= 1);
        seen.pairs.insert((state.name(), false, input.name()));
        true
    }

    fn note(&self, seen: &mut Seen) {
        seen.states.insert((self.state().name(), false));
    }
}

#[test]
fn what_comes_early_is_kept_answered_or_dropped_as_the_table_says() {
    let mut seen = Seen::default();
    let config = EarlyConfig { max_messages: 1, max_messages_per_peer: 1, ttl: Duration::from_secs(5) };
    explore(vec![EarlyRun { early: Early::new(config), now: Time::ZERO }], &mut seen);
    assert_eq!(seen.states.len(), EarlyState::ALL.len(), "{:?}", seen.states);
    assert_eq!(seen.pairs.len(), EarlyState::ALL.len() * EarlyInput::ALL.len());
}
