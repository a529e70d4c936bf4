//! Transfers that this side sends no more: a decode rank that comes late hears so at once, and need not wait for its deadline.

use std::collections::{BTreeMap, VecDeque};

use kvferry_protocol::{TpRank, TransferId};

/// The last transfers that ended here, and why; the oldest is forgotten first.
#[derive(Debug)]
pub(super) struct Ended {
    /// This side's rank, by which parts are named.
    ours: TpRank,
    why: BTreeMap<Of, String>,
    order: VecDeque<Of>,
}

/// What ended. A request that names more ranks than this engine can serve ends as one, however many it names.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Of {
    /// One rank's part.
    Part(TransferId),
    /// Every part of a hand-over.
    Every(TransferId),
}

impl Ended {
    pub(super) const fn new(ours: TpRank) -> Self {
        Self { ours, why: BTreeMap::new(), order: VecDeque::new() }
    }

    /// A part is over.
    pub(super) fn insert(&mut self, part: TransferId, why: String) {
        self.remember(Of::Part(part), why);
    }

    /// Nothing comes of a hand-over, whichever rank asks.
    pub(super) fn insert_every(&mut self, transfer: TransferId, why: String) {
        self.remember(Of::Every(transfer), why);
    }

    /// Why nothing comes of the part that a decode rank asks for, if that is known.
    pub(super) fn why(&self, part: TransferId, reader: TpRank) -> Option<&str> {
        let every = || self.why.get(&Of::Every(part.whole(reader, self.ours)));
        self.why.get(&Of::Part(part)).or_else(every).map(String::as_str)
    }

    /// A part begins after all.
    pub(super) fn forget(&mut self, part: TransferId, reader: TpRank) {
        let gone = [Of::Part(part), Of::Every(part.whole(reader, self.ours))];
        let removed = gone.iter().filter(|of| self.why.remove(of).is_some()).count();
        if removed > 0 {
            self.order.retain(|of| !gone.contains(of));
        }
    }

    fn remember(&mut self, of: Of, why: String) {
        if self.why.insert(of, why).is_none() {
            self.order.push_back(of);
        }
        while self.order.len() > REMEMBERED {
            let oldest = self.order.pop_front();
            oldest.and_then(|oldest| self.why.remove(&oldest));
        }
    }
}

/// A late decode rank comes within its own transfer's deadline.
const REMEMBERED: usize = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_is_forgotten_and_one_that_begins_again() {
        let rank = TpRank::new;
        let mut ended = Ended::new(rank(0));
        let last = REMEMBERED as u128;
        (0..=last).chain([last]).for_each(|id| ended.insert(TransferId::new(id), format!("end {id}")));
        assert_eq!(ended.why(TransferId::new(0), rank(0)), None);
        assert_eq!(ended.why(TransferId::new(1), rank(0)), Some("end 1"));
        ended.forget(TransferId::new(last), rank(0));
        assert_eq!(ended.why(TransferId::new(last), rank(0)), None);
        assert_eq!(ended.why.len(), ended.order.len());
    }

    #[test]
    fn a_hand_over_that_will_not_be_is_one_entry_for_all_its_ranks() {
        let (rank, transfer) = (TpRank::new, TransferId::new(7));
        let mut ended = Ended::new(rank(1));
        ended.insert_every(transfer, "sizes".to_owned());
        assert_eq!(ended.order.len(), 1);
        for reader in [0, 1, 1023] {
            assert_eq!(ended.why(transfer.part(rank(reader), rank(1)), rank(reader)), Some("sizes"), "{reader}");
            assert_eq!(
                ended.why(transfer.part(rank(reader), rank(0)), rank(reader)),
                None,
                "of another sender, {reader}"
            );
        }
        ended.forget(transfer.part(rank(0), rank(1)), rank(0));
        assert_eq!(ended.order.len(), 0);
    }
}
