//! Progress on standard error, for what takes longer than a second, and only on a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Nothing is drawn before this much time has passed.
const PATIENCE: Duration = Duration::from_secs(1);

/// A bar that appears when its work turns out to take longer than a second.
pub struct Bar {
    bar: ProgressBar,
    started: Instant,
    what: &'static str,
}

impl Bar {
    /// A bar for `what`, not yet drawn. Standard error decides by itself whether it is a terminal.
    #[must_use]
    pub fn new(what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        Self { bar, started: Instant::now(), what }
    }

    /// Tells that `done` of `all` parts are done.
    pub fn at(&mut self, done: usize, all: usize) {
        if self.bar.is_hidden() && self.started.elapsed() > PATIENCE {
            let style = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} {elapsed}");
            self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            self.bar.set_message(self.what);
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.set_length(all as u64);
        self.bar.set_position(done as u64);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
