//! Fences that this side waits for: the peer lets go of a grant, or of parts of it, and what its devices wrote has arrived.
//!
//! A peer's device may say that a write is done when its last packet came, which can be before the last byte is in memory. What is
//! certain is a completion here: all that was written before it in its lane is in place. So a peer answers with how many parts it
//! has ended in each lane, and the fence is over when as many completions were taken here.

use std::time::Instant;

/// Fences in the order in which they were asked for; each has a waiter `T`, whose drop is the answer.
pub(crate) struct Fences<T> {
    asked: Vec<Asked<T>>,
    next: u32,
}

struct Asked<T> {
    ticket: u32,
    until: Instant,
    /// Parts that the peer had ended in each lane when it let go.
    ended: Option<Vec<u64>>,
    _waiter: T,
}

impl<T> Default for Fences<T> {
    fn default() -> Self {
        Self { asked: Vec::new(), next: 0 }
    }
}

impl<T> Fences<T> {
    /// One more, to be over by `until`.
    pub(crate) fn ask(&mut self, until: Instant, waiter: T) {
        self.asked.push(Asked { ticket: self.next, until, ended: None, _waiter: waiter });
        self.next = self.next.wrapping_add(1);
    }

    /// The peer let go.
    pub(crate) fn answered(&mut self, ticket: u32, ended: Vec<u64>) {
        if let Some(asked) = self.asked.iter_mut().find(|asked| asked.ticket == ticket) {
            asked.ended.get_or_insert(ended);
        }
    }

    /// Lets go of those whose parts have all come: `taken` is how many came in each lane.
    pub(crate) fn settle(&mut self, taken: &[u64]) {
        let is_here = |ended: &Vec<u64>| {
            ended.len() == taken.len() && ended.iter().zip(taken).all(|(ended, taken)| ended <= taken)
        };
        self.asked.retain(|asked| !asked.ended.as_ref().is_some_and(is_here));
    }

    /// When the first of them is late.
    pub(crate) fn first_due(&self) -> Option<Instant> {
        self.asked.iter().map(|asked| asked.until).min()
    }

    /// Lets go of all: the queue pairs are gone.
    pub(crate) fn clear(&mut self) {
        self.asked.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_fence_is_over_when_what_the_peer_ended_has_come_here_in_every_lane() {
        let (now, mut fences) = (Instant::now(), Fences::default());
        let (first, second) = (Arc::new(()), Arc::new(()));
        let (a, b) = (Arc::downgrade(&first), Arc::downgrade(&second));
        fences.ask(now, first);
        fences.ask(now, second);
        fences.settle(&[9, 9]);
        assert_eq!((a.strong_count(), b.strong_count()), (1, 1), "not answered");
        fences.answered(1, vec![3, 0]);
        fences.answered(1, vec![0, 0]);
        fences.answered(7, vec![0, 0]);
        fences.settle(&[2, 0]);
        assert_eq!(b.strong_count(), 1, "one part is under way");
        fences.settle(&[3, 0]);
        assert_eq!((a.strong_count(), b.strong_count()), (1, 0));
        fences.answered(0, vec![0]);
        fences.settle(&[3, 0]);
        assert_eq!(a.strong_count(), 1, "the answer is of other lanes than there are");
        assert_eq!(fences.first_due(), Some(now));
        fences.clear();
        assert_eq!(a.strong_count(), 0);
    }
}
