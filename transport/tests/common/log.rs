//! What the endpoints of this test process warn of: a listener tells a stranger nothing more than it must, and the log the rest.

use std::fmt::{Debug, Write as _};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use kvferry_transport::testing::PATIENCE;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());
static MORE: Condvar = Condvar::new();

struct Warnings;

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, "{}={value:?} ", field.name()).unwrap();
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::new());
        event.record(&mut line);
        LINES.lock().unwrap_or_else(PoisonError::into_inner).push(line.0);
        MORE.notify_all();
    }
}

/// Begins to listen, once a process.
pub(crate) fn listen() {
    // It fails if another test of this process was quicker, and then that one listens.
    let _ = tracing::subscriber::set_global_default(Warnings);
}

/// Waits for a warning in which all of these words stand.
pub(crate) fn wait(words: &[&str]) {
    let deadline = Instant::now() + PATIENCE;
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    while !lines.iter().any(|line| words.iter().all(|word| line.contains(word))) {
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "nobody said {words:?}: {lines:#?}");
        lines = MORE.wait_timeout(lines, left).unwrap_or_else(PoisonError::into_inner).0;
    }
}
