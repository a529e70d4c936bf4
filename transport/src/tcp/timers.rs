//! What is due when, of many things: a round looks at those that are due, and at no other.

use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;
use std::time::Instant;

/// At most one time for each key.
pub(crate) struct Timers<K> {
    in_order: BTreeSet<(Instant, K)>,
    times: HashMap<K, Instant>,
}

impl<K: Copy + Ord + Hash> Timers<K> {
    pub(crate) fn new() -> Self {
        Self { in_order: BTreeSet::new(), times: HashMap::new() }
    }

    /// Makes `key` due at `at`, and not when it was to be.
    pub(crate) fn set(&mut self, key: K, at: Instant) {
        match self.times.insert(key, at) {
            Some(before) if before == at => return,
            Some(before) => drop(self.in_order.remove(&(before, key))),
            None => {}
        }
        self.in_order.insert((at, key));
    }

    /// Makes `key` due at `at`, if it is not due before. A time that moves away with each message is looked at when it comes, which
    /// costs less than to move it.
    pub(crate) fn set_by(&mut self, key: K, at: Instant) {
        if self.times.get(&key).is_none_or(|before| at < *before) {
            self.set(key, at);
        }
    }

    pub(crate) fn clear(&mut self, key: K) {
        if let Some(before) = self.times.remove(&key) {
            self.in_order.remove(&(before, key));
        }
    }

    /// When the first one is due.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.in_order.first().map(|(at, _)| *at)
    }

    /// Takes the first one, if it is due.
    pub(crate) fn pop(&mut self, now: Instant) -> Option<K> {
        let (_, key) = *self.in_order.first().filter(|(at, _)| *at <= now)?;
        self.clear(key);
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn each_key_comes_once_at_its_last_time_and_in_order() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut timers = Timers::new();
        for (key, ms) in [('a', 30), ('b', 10), ('c', 20), ('b', 40), ('d', 5), ('e', 5)] {
            timers.set(key, at(ms));
        }
        timers.clear('d');
        timers.set_by('e', at(50));
        timers.set_by('a', at(25));
        assert_eq!(timers.next(), Some(at(5)));
        assert_eq!(timers.pop(at(4)), None);
        let order: String = std::iter::from_fn(|| timers.pop(at(60))).collect();
        assert_eq!((order.as_str(), timers.next()), ("ecab", None));
        timers.set('a', at(70));
        assert_eq!((timers.pop(at(69)), timers.pop(at(70)), timers.pop(at(71))), (None, Some('a'), None));
    }
}
