//! Numbers batches and keeps the last ones, for subscribers that missed some.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Dialect, EventBatch};

/// A batch as it is published.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Numbered {
    /// Its number: batches of one log follow one another without a gap, from 0.
    pub sequence: u64,
    /// Its bytes.
    pub payload: Arc<[u8]>,
}

/// The batches that were published last, by number.
///
/// A subscriber that sees a gap asks for the batches from the first that it missed. What is not kept any more cannot be told: it must
/// then forget what it knew of this publisher. A publisher that starts anew begins with 0 again, which says the same.
#[derive(Debug)]
pub struct EventLog {
    dialect: Dialect,
    kept: VecDeque<Numbered>,
    limits: Limits,
    kept_bytes: usize,
    next: u64,
}

/// How much is kept.
#[derive(Clone, Copy, Debug)]
struct Limits {
    batches: usize,
    bytes: usize,
}

impl EventLog {
    /// Keeps at most so many batches, of at most so many bytes together; vLLM keeps 10,000 batches.
    #[must_use]
    pub const fn new(dialect: Dialect, batches: usize, bytes: usize) -> Self {
        Self { dialect, kept: VecDeque::new(), limits: Limits { batches, bytes }, kept_bytes: 0, next: 0 }
    }

    /// Numbers a batch and keeps it; returns what to publish.
    pub fn append(&mut self, batch: &EventBatch) -> Numbered {
        let numbered = Numbered { sequence: self.next, payload: self.dialect.encode(batch).into() };
        self.next += 1;
        self.kept_bytes += numbered.payload.len();
        self.kept.push_back(numbered.clone());
        while self.kept.len() > self.limits.batches || self.kept_bytes > self.limits.bytes {
            let Some(oldest) = self.kept.pop_front() else { break };
            self.kept_bytes -= oldest.payload.len();
        }
        numbered
    }

    /// The batches from number `from` on that are still kept, oldest first.
    pub fn since(&self, from: u64) -> impl Iterator<Item = &Numbered> {
        let first = self.kept.front().map_or(0, |first| first.sequence);
        // Numbers have no gaps, so that the place follows from them.
        let skip = usize::try_from(from.saturating_sub(first)).unwrap_or(usize::MAX);
        self.kept.iter().skip(skip)
    }

    /// The number of the next batch.
    #[must_use]
    pub const fn next(&self) -> u64 {
        self.next
    }
}
