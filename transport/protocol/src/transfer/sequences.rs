//! Which writes of a grant were taken: each number once.

use std::collections::BTreeSet;

/// A set of numbers that mostly come in order.
#[derive(Debug, Clone, Default)]
pub(super) struct Sequences {
    /// All numbers below it were taken.
    next: u32,
    /// Taken ahead of it.
    ahead: BTreeSet<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum SequenceError {
    /// It was taken before.
    Before,
    /// It is too far ahead of the lowest that is missing.
    TooFar,
}

impl Sequences {
    /// How far a number may be ahead of the lowest that is missing; more posts than this in flight are not taken.
    pub(super) const MAX_AHEAD: u32 = 4096;

    pub(super) const fn new() -> Self {
        Self { next: 0, ahead: BTreeSet::new() }
    }

    pub(super) fn take(&mut self, sequence: u32) -> Result<(), SequenceError> {
        if sequence < self.next {
            return Err(SequenceError::Before);
        }
        if sequence - self.next >= Self::MAX_AHEAD {
            return Err(SequenceError::TooFar);
        }
        if !self.ahead.insert(sequence) {
            return Err(SequenceError::Before);
        }
        while self.ahead.remove(&self.next) {
            self.next = self.next.saturating_add(1);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_is_taken_once_in_any_order() {
        let mut sequences = Sequences::new();
        for (sequence, want) in [
            (1, Ok(())),
            (0, Ok(())),
            (1, Err(SequenceError::Before)),
            (4, Ok(())),
            (4, Err(SequenceError::Before)),
            (2 + Sequences::MAX_AHEAD, Err(SequenceError::TooFar)),
            (1 + Sequences::MAX_AHEAD, Ok(())),
            (u32::MAX, Err(SequenceError::TooFar)),
        ] {
            assert_eq!(sequences.take(sequence), want, "{sequence}");
        }
    }
}
