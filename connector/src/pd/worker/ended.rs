//! Transfers that this side sends no more: a decode rank that comes late hears so at once, and need not wait for its deadline.

use std::collections::{BTreeMap, VecDeque};

use kvferry_protocol::TransferId;

/// The last transfers that ended here, and why; the oldest is forgotten first.
#[derive(Debug, Default)]
pub(super) struct Ended {
    why: BTreeMap<TransferId, String>,
    order: VecDeque<TransferId>,
}

impl Ended {
    /// A transfer is over.
    pub(super) fn insert(&mut self, transfer: TransferId, why: String) {
        if self.why.insert(transfer, why).is_none() {
            self.order.push_back(transfer);
        }
        while self.order.len() > REMEMBERED {
            let oldest = self.order.pop_front();
            oldest.and_then(|oldest| self.why.remove(&oldest));
        }
    }

    /// Why nothing comes of a transfer any more, if that is known.
    pub(super) fn why(&self, transfer: TransferId) -> Option<&str> {
        self.why.get(&transfer).map(String::as_str)
    }

    /// It begins after all.
    pub(super) fn forget(&mut self, transfer: TransferId) {
        if self.why.remove(&transfer).is_some() {
            self.order.retain(|of| *of != transfer);
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
        let mut ended = Ended::default();
        let last = REMEMBERED as u128;
        (0..=last).chain([last]).for_each(|id| ended.insert(TransferId::new(id), format!("end {id}")));
        assert_eq!(ended.why(TransferId::new(0)), None);
        assert_eq!(ended.why(TransferId::new(1)), Some("end 1"));
        ended.forget(TransferId::new(last));
        assert_eq!(ended.why(TransferId::new(last)), None);
        assert_eq!(ended.why.len(), ended.order.len());
    }
}
