//! What is ordered before what, and who touched which bytes last.
//!
//! Vector clocks: the host and each stream count what they did, and an event carries how far its stream had come. An access is
//! ordered after an earlier one if its clock has counted that. Since each is looked at when it takes place, after all that it is
//! ordered behind, one look at the bytes' last writer and readers finds every pair that is not ordered at all.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// How far the host (0) and each stream (1, 2, ...) had come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock(Vec<u64>);

/// Who did something: which of a clock's counters, what it was at, and what it was called.
#[derive(Clone, Debug)]
pub(crate) struct Stamp {
    pub(crate) who: usize,
    pub(crate) at: u64,
    pub(crate) what: Arc<str>,
}

/// Two accesses that nothing orders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conflict {
    pub(crate) bytes: Range<u64>,
    pub(crate) first: Arc<str>,
    pub(crate) first_writes: bool,
}

/// Of all bytes that were ever used: who wrote them last, and who has read them since.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// By the first byte; they do not overlap.
    stretches: BTreeMap<u64, Stretch>,
}

#[derive(Clone, Debug)]
struct Stretch {
    end: u64,
    written: Option<Stamp>,
    /// The last of each reader.
    read: Vec<Stamp>,
}

impl Clock {
    pub(crate) fn get(&self, who: usize) -> u64 {
        self.0.get(who).copied().unwrap_or(0)
    }

    /// Counts one more of something, and gives its number.
    pub(crate) fn tick(&mut self, who: usize) -> u64 {
        if self.0.len() <= who {
            self.0.resize(who + 1, 0);
        }
        self.0[who] += 1;
        self.0[who]
    }

    /// Also after all that the other is after.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (ours, theirs) in self.0.iter_mut().zip(&other.0) {
            *ours = (*ours).max(*theirs);
        }
    }

    fn is_after(&self, stamp: &Stamp) -> bool {
        self.get(stamp.who) >= stamp.at
    }
}

impl History {
    /// Notes a read by `by`, whose clock is `clock`; an error if the last write is not ordered before it.
    pub(crate) fn read(&mut self, bytes: Range<u64>, by: &Stamp, clock: &Clock) -> Result<(), Conflict> {
        self.split(bytes.start);
        self.split(bytes.end);
        let mut next = bytes.start;
        let mut fresh = Vec::new();
        for (&start, stretch) in self.stretches.range_mut(bytes.clone()) {
            if let Some(first) = stretch.written.as_ref().filter(|first| !clock.is_after(first)) {
                let bytes = start..stretch.end;
                return Err(Conflict { bytes, first: Arc::clone(&first.what), first_writes: true });
            }
            match stretch.read.iter_mut().find(|reader| reader.who == by.who) {
                Some(reader) => *reader = by.clone(),
                None => stretch.read.push(by.clone()),
            }
            if next < start {
                fresh.push(next..start);
            }
            next = stretch.end;
        }
        if next < bytes.end {
            fresh.push(next..bytes.end);
        }
        for gap in fresh {
            self.stretches.insert(gap.start, Stretch { end: gap.end, written: None, read: vec![by.clone()] });
        }
        Ok(())
    }

    /// Notes a write; an error if the last write, or a read after it, is not ordered before it.
    pub(crate) fn write(&mut self, bytes: Range<u64>, by: &Stamp, clock: &Clock) -> Result<(), Conflict> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.split(bytes.start);
        self.split(bytes.end);
        for (&start, stretch) in self.stretches.range(bytes.clone()) {
            let writer = stretch.written.iter().map(|first| (first, true));
            let mut before = stretch.read.iter().map(|first| (first, false)).chain(writer);
            if let Some((first, first_writes)) = before.find(|(first, _)| !clock.is_after(first)) {
                let bytes = start..stretch.end;
                return Err(Conflict { bytes, first: Arc::clone(&first.what), first_writes });
            }
        }
        self.forget(bytes.clone());
        let stretch = Stretch { end: bytes.end, written: Some(by.clone()), read: Vec::new() };
        self.stretches.insert(bytes.start, stretch);
        Ok(())
    }

    /// These bytes are new: nobody has used them.
    pub(crate) fn forget(&mut self, bytes: Range<u64>) {
        self.split(bytes.start);
        self.split(bytes.end);
        let gone: Vec<u64> = self.stretches.range(bytes).map(|(&start, _)| start).collect();
        for start in gone {
            self.stretches.remove(&start);
        }
    }

    /// Makes a stretch end before `at`, if one has bytes on both sides.
    fn split(&mut self, at: u64) {
        let Some((_, stretch)) = self.stretches.range_mut(..at).next_back().filter(|(_, stretch)| stretch.end > at)
        else {
            return;
        };
        let behind = stretch.clone();
        stretch.end = at;
        self.stretches.insert(at, behind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(clock: &mut Clock, who: usize) -> Stamp {
        Stamp { who, at: clock.tick(who), what: format!("{who}").into() }
    }

    /// Each byte by itself, looked at in full: what stretches must agree with.
    #[derive(Default)]
    struct Naive(BTreeMap<u64, Vec<(Stamp, bool)>>);

    impl Naive {
        fn conflicts(&mut self, bytes: Range<u64>, by: &Stamp, clock: &Clock, writes: bool) -> bool {
            let mut found = false;
            for byte in bytes {
                let seen = self.0.entry(byte).or_default();
                found |= seen.iter().any(|(first, wrote)| (*wrote || writes) && !clock.is_after(first));
                seen.push((by.clone(), writes));
            }
            found
        }
    }

    #[test]
    fn stretches_find_what_a_list_of_all_accesses_finds() {
        let mut random = crate::schedule::Random::new(7);
        let mut found = 0;
        for _ in 0..2000 {
            let (mut history, mut naive) = (History::default(), Naive::default());
            let mut clocks = vec![Clock::default(); 3];
            for _ in 0..12 {
                let who = random.below(3) as usize;
                if random.below(2) == 0 {
                    let other = clocks[random.below(3) as usize].clone();
                    clocks[who].join(&other);
                }
                let by = stamp(&mut clocks[who], who);
                let start = u64::from(random.below(16));
                let bytes = start..start + 1 + u64::from(random.below(6));
                let writes = random.below(2) == 0;
                let seen = match writes {
                    true => history.write(bytes.clone(), &by, &clocks[who]),
                    false => history.read(bytes.clone(), &by, &clocks[who]),
                };
                assert_eq!(seen.is_err(), naive.conflicts(bytes, &by, &clocks[who], writes));
                if seen.is_err() {
                    found += 1;
                    break;
                }
            }
        }
        assert!((500..2000).contains(&found), "{found}");
    }

    #[test]
    fn memory_that_is_new_has_no_past() {
        let (mut clock, mut history) = (Clock::default(), History::default());
        let by = stamp(&mut clock, 1);
        history.write(0..100, &by, &clock).unwrap();
        history.forget(40..60);
        let (mut other, elsewhere) = (Clock::default(), 45..55);
        let reader = stamp(&mut other, 2);
        history.read(elsewhere, &reader, &other).unwrap();
        let conflict = history.read(30..45, &reader, &other).unwrap_err();
        assert_eq!(conflict, Conflict { bytes: 30..40, first: "1".into(), first_writes: true });
    }
}
