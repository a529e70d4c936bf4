//! What a receiver remembers of the writes under one grant.
//!
//! A write is *open* from its first frame to its last byte, then *ended* for good: its number is never taken again.

use std::collections::BTreeMap;

use bytes::Bytes;
use kvferry_protocol::wire::Refusal;

use super::planted::{Bug, Planted};

/// How many writes of one grant may be open at once.
const MAX_OPEN: usize = 1024;
/// How many holes the numbers of ended writes may have.
const MAX_HOLES: usize = 4096;
/// How many holes the numbers of a write's frames may have: lanes run ahead of each other by a few frames.
const MAX_FRAME_HOLES: usize = 256;

/// What a frame says of its write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FrameWords {
    pub(crate) sequence: u32,
    pub(crate) frame: u32,
    pub(crate) payload_bytes: u64,
    pub(crate) write_bytes: u64,
}

pub(crate) struct Progress {
    open: BTreeMap<u32, Open>,
    ended: Numbers,
    cancelled: Numbers,
    /// Ended without their bytes, by this side.
    refused: Numbers,
    bug: Bug,
}

struct Open {
    write_bytes: u64,
    admitted_bytes: u64,
    landed_bytes: u64,
    frames: Numbers,
    notification: Option<Bytes>,
}

impl Default for Progress {
    fn default() -> Self {
        Self::new(Bug::default())
    }
}

impl Open {
    fn new(write_bytes: u64) -> Self {
        let frames = Numbers::new(MAX_FRAME_HOLES);
        Self { write_bytes, admitted_bytes: 0, landed_bytes: 0, frames, notification: None }
    }
}

impl Progress {
    pub(crate) fn new(bug: Bug) -> Self {
        let numbers = || Numbers::new(MAX_HOLES);
        Self { open: BTreeMap::new(), ended: numbers(), cancelled: numbers(), refused: numbers(), bug }
    }

    /// Takes a frame whose payload is about to be placed.
    pub(crate) fn admit(&mut self, words: FrameWords, notification: &[u8]) -> Result<(), Refusal> {
        if self.cancelled.contains(words.sequence) {
            return Err(Refusal::Cancelled);
        }
        if self.ended.contains(words.sequence) && !self.bug.is(Planted::SequenceTakenAgain) {
            return Err(Refusal::SequenceTaken);
        }
        if !self.open.contains_key(&words.sequence) && self.open.len() >= MAX_OPEN {
            return Err(Refusal::TooMany);
        }
        let open = self.open.entry(words.sequence).or_insert_with(|| Open::new(words.write_bytes));
        let admitted = open.admitted_bytes.saturating_add(words.payload_bytes);
        if open.frames.contains(words.frame) {
            return Err(Refusal::SequenceTaken);
        }
        if open.write_bytes != words.write_bytes || admitted > open.write_bytes {
            return Err(Refusal::Inconsistent);
        }
        open.frames.insert(words.frame)?;
        open.admitted_bytes = admitted;
        if words.frame == 0 {
            open.notification = Some(Bytes::copy_from_slice(notification));
        }
        Ok(())
    }

    /// A frame's payload is in place. Gives the notification if it was the write's last.
    pub(crate) fn land(&mut self, words: FrameWords) -> Result<Option<Bytes>, Refusal> {
        // Not open any more: refused or cancelled while another lane was placing it.
        let Some(open) = self.open.get_mut(&words.sequence) else { return Ok(None) };
        open.landed_bytes += words.payload_bytes;
        if open.landed_bytes < open.write_bytes && !self.bug.is(Planted::LandedEarly) {
            return Ok(None);
        }
        let notification = open.notification.take();
        self.end(words.sequence)?;
        notification.map(Some).ok_or(Refusal::Inconsistent)
    }

    /// Ends a write without its bytes, because a frame of it was refused.
    pub(crate) fn refuse(&mut self, sequence: u32) {
        if self.open.contains_key(&sequence) {
            // If the numbers have too many holes the grant takes no more writes at all.
            let _ = self.end(sequence);
            let _ = self.refused.insert(sequence);
        }
    }

    /// Ends a write at the sender's wish. Returns whether it was complete before.
    pub(crate) fn cancel(&mut self, sequence: u32) -> bool {
        let is_lost = self.cancelled.contains(sequence) || self.refused.contains(sequence);
        if self.ended.contains(sequence) && !is_lost {
            return true;
        }
        let _ = self.end(sequence);
        let _ = self.cancelled.insert(sequence);
        false
    }

    /// Whether bytes of the write may still be placed.
    pub(crate) fn is_open(&self, sequence: u32) -> bool {
        self.open.contains_key(&sequence)
    }

    fn end(&mut self, sequence: u32) -> Result<(), Refusal> {
        self.open.remove(&sequence);
        self.ended.insert(sequence)
    }
}

/// A set of numbers, kept as ranges: consecutive numbers cost nothing.
struct Numbers {
    /// First number of a range, and its last.
    ranges: BTreeMap<u32, u32>,
    max_ranges: usize,
    full: bool,
}

impl Numbers {
    fn new(max_ranges: usize) -> Self {
        Self { ranges: BTreeMap::new(), max_ranges, full: false }
    }

    fn contains(&self, number: u32) -> bool {
        self.full || self.ranges.range(..=number).next_back().is_some_and(|(_, &last)| number <= last)
    }

    fn insert(&mut self, number: u32) -> Result<(), Refusal> {
        if self.contains(number) {
            return Ok(());
        }
        if self.ranges.len() >= self.max_ranges {
            self.full = true;
            return Err(Refusal::TooMany);
        }
        let joins_below =
            self.ranges.range(..number).next_back().filter(|&(_, &last)| last.checked_add(1) == Some(number));
        let first = joins_below.map_or(number, |(&first, _)| first);
        let last = number.checked_add(1).and_then(|next| self.ranges.remove(&next)).unwrap_or(number);
        self.ranges.insert(first, last);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn words(sequence: u32, frame: u32, payload_bytes: u64) -> FrameWords {
        FrameWords { sequence, frame, payload_bytes, write_bytes: 10 }
    }

    #[test]
    fn a_write_that_was_refused_is_not_called_complete_when_it_is_cancelled() {
        let mut progress = Progress::default();
        progress.admit(words(0, 0, 5), b"").unwrap();
        progress.refuse(0);
        assert!(!progress.cancel(0));
        progress.admit(words(1, 0, 10), b"").unwrap();
        progress.land(words(1, 0, 10)).unwrap();
        assert!(progress.cancel(1));
    }

    #[test]
    fn a_write_lands_once_with_its_notification_in_whatever_order_its_frames_come() {
        let mut progress = Progress::default();
        progress.admit(words(5, 1, 4), b"").unwrap();
        progress.admit(words(5, 0, 6), b"note").unwrap();
        assert_eq!(progress.land(words(5, 1, 4)), Ok(None));
        assert_eq!(progress.land(words(5, 0, 6)), Ok(Some(Bytes::from_static(b"note"))));
        assert_eq!(progress.admit(words(5, 0, 6), b""), Err(Refusal::SequenceTaken));
    }

    #[test]
    fn frames_that_contradict_each_other_are_refused() {
        let mut progress = Progress::default();
        progress.admit(words(5, 0, 6), b"").unwrap();
        assert_eq!(progress.admit(words(5, 0, 4), b""), Err(Refusal::SequenceTaken));
        assert_eq!(progress.admit(words(5, 1, 5), b""), Err(Refusal::Inconsistent));
        let other_total = FrameWords { write_bytes: 11, ..words(5, 1, 4) };
        assert_eq!(progress.admit(other_total, b""), Err(Refusal::Inconsistent));
        let frames =
            (0..=MAX_FRAME_HOLES as u32).map(|frame| FrameWords { write_bytes: 1000, ..words(6, 2 * frame, 1) });
        let refused = frames.map(|words| progress.admit(words, b"")).find(Result::is_err);
        assert_eq!(refused, Some(Err(Refusal::TooMany)));
    }

    #[test]
    fn a_cancelled_number_is_taken_and_a_complete_write_cannot_be_cancelled() {
        let mut progress = Progress::default();
        progress.admit(words(1, 0, 10), b"").unwrap();
        assert!(!progress.cancel(1));
        assert!(!progress.is_open(1));
        assert_eq!(progress.admit(words(1, 0, 10), b""), Err(Refusal::Cancelled));
        progress.admit(words(2, 0, 10), b"").unwrap();
        progress.land(words(2, 0, 10)).unwrap();
        assert!(progress.cancel(2));
    }

    #[test]
    fn open_writes_and_holes_are_limited() {
        let mut progress = Progress::default();
        for sequence in 0..MAX_OPEN as u32 {
            progress.admit(words(sequence, 0, 10), b"").unwrap();
        }
        assert_eq!(progress.admit(words(u32::MAX, 0, 10), b""), Err(Refusal::TooMany));
        let mut numbers = Numbers::new(MAX_HOLES);
        for at in 0..MAX_HOLES as u32 {
            numbers.insert(2 * at).unwrap();
        }
        assert_eq!(numbers.insert(u32::MAX), Err(Refusal::TooMany));
        assert!(numbers.contains(1), "after that nothing is taken");
    }

    proptest::proptest! {
        #[test]
        fn numbers_agree_with_a_set(inserted in proptest::collection::vec(0u32..40, 0..60)) {
            let (mut numbers, mut set) = (Numbers::new(MAX_HOLES), BTreeSet::new());
            for number in inserted {
                numbers.insert(number).unwrap();
                set.insert(number);
                for probe in 0..41 {
                    assert_eq!(numbers.contains(probe), set.contains(&probe));
                }
            }
            let holes = set.iter().filter(|&&n| n == 0 || !set.contains(&(n - 1))).count();
            assert_eq!(numbers.ranges.len(), holes);
        }
    }
}
