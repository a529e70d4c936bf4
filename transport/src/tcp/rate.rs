//! A token bucket: what a link carries a second.

use std::time::{Duration, Instant};

/// How far a burst may run ahead.
const BURST: Duration = Duration::from_millis(2);

pub(crate) struct TokenBucket {
    bytes_per_second: f64,
    tokens: f64,
    filled_at: Instant,
}

impl TokenBucket {
    pub(crate) fn new(bytes_per_second: f64, now: Instant) -> Self {
        Self { bytes_per_second, tokens: 0.0, filled_at: now }
    }

    /// How many bytes may go now, or when some may.
    pub(crate) fn take(&mut self, want: u64, now: Instant) -> Result<u64, Instant> {
        let burst = (self.bytes_per_second * BURST.as_secs_f64()).max(4096.0);
        let filled = now.saturating_duration_since(self.filled_at).as_secs_f64() * self.bytes_per_second;
        self.tokens = (self.tokens + filled).min(burst);
        self.filled_at = now;
        // Small pieces cost more calls than they are worth.
        let least = (want as f64).min(burst / 2.0);
        if self.tokens < least {
            return Err(now + Duration::from_secs_f64((least - self.tokens) / self.bytes_per_second));
        }
        let taken = (want as f64).min(self.tokens).floor();
        self.tokens -= taken;
        Ok(taken as u64)
    }

    /// Gives back what did not go.
    pub(crate) fn refund(&mut self, bytes: u64) {
        self.tokens += bytes as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn over_any_second_no_more_than_the_rate_and_a_burst_goes() {
        let start = Instant::now();
        let mut bucket = TokenBucket::new(1e6, start);
        let (mut now, mut went, mut calls) = (start, 0, 0);
        while now < start + Duration::from_secs(1) {
            match bucket.take(10_000, now) {
                Ok(bytes) => went += bytes,
                Err(at) => {
                    assert!(at > now, "there is always something to wait for");
                    now = at;
                }
            }
            calls += 1;
        }
        assert!((990_000..=1_005_000).contains(&went), "{went}");
        assert!(calls < 2000, "{calls}");
    }
}
