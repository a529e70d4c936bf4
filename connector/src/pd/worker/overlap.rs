//! How a sent transfer's time on the link lay beside the compute of its prompt.

use std::time::Duration;

/// Sums of one transfer.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Overlap {
    /// The engine computed its K/V, up to the last layer of the last chunk.
    pub(super) compute: Duration,
    /// Its writes occupied the link.
    pub(super) link: Duration,
    bytes: u64,
    /// Bytes of one layer of what was computed last.
    last_layer_bytes: u64,
}

impl Overlap {
    /// A part was computed.
    pub(super) fn computed(&mut self, compute: Duration, layer_bytes: u64) {
        self.compute += compute;
        self.last_layer_bytes = layer_bytes;
    }

    /// A write of it ended.
    pub(super) fn shipped(&mut self, link: Duration, bytes: u64) {
        self.link += link;
        self.bytes += bytes;
    }

    /// What no order of whole layers can hide: what the link takes longer than compute, and the last layer.
    pub(super) fn unhideable(&self) -> Duration {
        let last = self.link.as_secs_f64() * self.last_layer_bytes as f64 / self.bytes.max(1) as f64;
        self.link.saturating_sub(self.compute) + Duration::from_secs_f64(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_exceeds_compute_and_one_layer_cannot_be_hidden() {
        let ms = Duration::from_millis;
        for (name, compute, link, want) in [
            ("it fits", ms(100), ms(50), ms(5)),
            ("it does not", ms(100), ms(200), ms(120)),
            ("nothing was sent", ms(100), ms(0), ms(0)),
        ] {
            let mut overlap = Overlap::default();
            for _ in 0..10 {
                overlap.computed(compute / 10, 1000);
                overlap.shipped(link / 10, 1000);
            }
            assert_eq!(overlap.unhideable(), want, "{name}");
        }
    }
}
