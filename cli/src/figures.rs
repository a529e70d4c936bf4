//! Medians and percentiles.

use serde::Serialize;

/// Percentiles of durations, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub(crate) struct Micros {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) p999: f64,
}

impl Micros {
    /// Of durations in microseconds; zeros if there are none.
    pub(crate) fn of(samples: &mut [f64]) -> Self {
        Self { p50: percentile(samples, 0.5), p99: percentile(samples, 0.99), p999: percentile(samples, 0.999) }
    }
}

/// The middle one; the higher of two. 0 if there are none.
pub(crate) fn median(samples: &mut [f64]) -> f64 {
    percentile(samples, 0.5)
}

/// The largest; 0 if there are none.
pub(crate) fn best(samples: &[f64]) -> f64 {
    samples.iter().copied().fold(0.0, f64::max)
}

/// The smallest sample that at least `part` of all are not above: nearest rank.
pub(crate) fn percentile(samples: &mut [f64], part: f64) -> f64 {
    samples.sort_unstable_by(f64::total_cmp);
    let at = (samples.len() as f64 * part) as usize;
    samples.get(at.min(samples.len().saturating_sub(1))).copied().unwrap_or_default()
}

/// Rounded to three places: most figures have no more to say.
pub(crate) fn rounded(value: f64) -> f64 {
    rounded_to(value, 3)
}

/// Rounded to so many places.
pub(crate) fn rounded_to(value: f64, places: i32) -> f64 {
    let unit = 10_f64.powi(places);
    (value * unit).round() / unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_samples_and_none_of_nothing() {
        let mut samples: Vec<f64> = (0..1000).rev().map(f64::from).collect();
        let micros = Micros::of(&mut samples);
        assert_eq!((micros.p50, micros.p99, micros.p999), (500.0, 990.0, 999.0));
        assert_eq!((median(&mut []), best(&[]), percentile(&mut [7.0], 0.999)), (0.0, 0.0, 7.0));
        assert_eq!(best(&[1.0, 3.0, 2.0]), 3.0);
    }
}
