//! Time as the machines see it.

use std::ops::Add;
use std::time::Duration;

/// A moment: how long after an epoch of the driver's choice. It never crosses the wire.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(Duration);

impl Time {
    /// The epoch itself.
    pub const ZERO: Self = Self(Duration::ZERO);

    /// The moment this long after the epoch.
    #[must_use]
    pub const fn since_epoch(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    /// How long after the epoch.
    #[must_use]
    pub const fn elapsed(self) -> Duration {
        self.0
    }

    /// How long from `earlier` to this moment; zero if it is not earlier.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Time {
    type Output = Self;

    fn add(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(wait))
    }
}
