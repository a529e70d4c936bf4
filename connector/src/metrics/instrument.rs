//! Counters, gauges and histograms over atomics, and families of them by label.
//!
//! Values are monotonic or last-writer-wins and order nothing else, so every access is relaxed.

use std::fmt;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::label::Labels;

/// What a metric is, in Prometheus' words.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Only grows, from 0 at the start of the process.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts observations by size.
    Histogram,
}

/// Something that is counted and can be read at once.
pub(super) trait Instrument: Default {
    type Snapshot;
    const KIND: Kind;
    fn snapshot(&self) -> Self::Snapshot;
    /// Hands each sample of a snapshot to `write`: label pairs, the suffix of the name, the value.
    fn samples(snapshot: &Self::Snapshot, write: &mut Sink<'_>);
}

/// Takes labels, the suffix of the metric's name, the `le` of a bucket, and the value.
pub(super) type Sink<'s> =
    dyn FnMut(&[(&'static str, &'static str)], &'static str, Option<f64>, &dyn fmt::Display) + 's;

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Follows a total that is kept elsewhere; never goes back.
    pub fn advance_to(&self, total: u64) {
        self.0.fetch_max(total, Relaxed);
    }

    /// The count.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Instrument for Counter {
    type Snapshot = u64;
    const KIND: Kind = Kind::Counter;

    fn snapshot(&self) -> u64 {
        self.get()
    }

    fn samples(snapshot: &u64, write: &mut Sink<'_>) {
        write(&[], "", None, snapshot);
    }
}

/// A number that goes up and down, never below 0.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Sets it.
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    /// Adds `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Relaxed);
    }

    /// Takes `n` away, down to 0.
    pub fn sub(&self, n: u64) {
        // The closure always gives a value, so the update never fails.
        let _ = self.0.fetch_update(Relaxed, Relaxed, |value| Some(value.saturating_sub(n)));
    }

    /// Its value.
    #[must_use]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

impl Instrument for Gauge {
    type Snapshot = u64;
    const KIND: Kind = Kind::Gauge;

    fn snapshot(&self) -> u64 {
        self.get()
    }

    fn samples(snapshot: &u64, write: &mut Sink<'_>) {
        write(&[], "", None, snapshot);
    }
}

/// Durations, counted by length.
#[derive(Debug, Default)]
pub struct Histogram {
    buckets: [AtomicU64; BOUNDS_SECONDS.len() + 1],
    sum_ns: AtomicU64,
}

impl Histogram {
    /// Counts one duration.
    pub fn observe(&self, duration: Duration) {
        let seconds = duration.as_secs_f64();
        let bucket = BOUNDS_SECONDS.partition_point(|bound| *bound < seconds);
        self.buckets[bucket].fetch_add(1, Relaxed);
        self.sum_ns.fetch_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX), Relaxed);
    }
}

/// What a [`Histogram`] counted.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct HistogramValues {
    /// Observations of at most each bound and above the one before; the last entry counts those above all bounds.
    pub counts: Vec<u64>,
    /// All observations added up, in seconds.
    pub sum_seconds: f64,
}

impl HistogramValues {
    /// The upper bounds of the buckets, in seconds: 1, 2.5 and 5 in each decade from 100 microseconds to 100 seconds.
    pub const BOUNDS_SECONDS: &[f64] = &BOUNDS_SECONDS;

    /// How many observations there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

impl Instrument for Histogram {
    type Snapshot = HistogramValues;
    const KIND: Kind = Kind::Histogram;

    #[expect(clippy::cast_precision_loss, reason = "a sum of years keeps microseconds in 53 bits")]
    fn snapshot(&self) -> HistogramValues {
        let counts = self.buckets.iter().map(|bucket| bucket.load(Relaxed)).collect();
        HistogramValues { counts, sum_seconds: self.sum_ns.load(Relaxed) as f64 / 1e9 }
    }

    fn samples(snapshot: &HistogramValues, write: &mut Sink<'_>) {
        let mut cumulative = 0;
        for (count, bound) in snapshot.counts.iter().zip(BOUNDS_SECONDS.into_iter().chain([f64::INFINITY])) {
            cumulative += count;
            write(&[], "_bucket", Some(bound), &cumulative);
        }
        write(&[], "_sum", None, &snapshot.sum_seconds);
        write(&[], "_count", None, &cumulative);
    }
}

/// One instrument for each label value.
pub struct Family<L, I> {
    members: Box<[I]>,
    labels: PhantomData<L>,
}

impl<L: Labels, I> Family<L, I> {
    /// The instrument of a label value.
    #[must_use]
    pub fn at(&self, label: L) -> &I {
        &self.members[label.index()]
    }
}

impl<L: Labels, I: Default> Default for Family<L, I> {
    fn default() -> Self {
        Self { members: L::ALL.iter().map(|_| I::default()).collect(), labels: PhantomData }
    }
}

impl<L, I: fmt::Debug> fmt::Debug for Family<L, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.members).finish()
    }
}

/// One value for each label value.
#[derive(Clone, PartialEq)]
pub struct ByLabel<L, V> {
    values: Box<[V]>,
    labels: PhantomData<L>,
}

impl<L: Labels, V> ByLabel<L, V> {
    /// The value of a label value.
    #[must_use]
    pub fn get(&self, label: L) -> &V {
        &self.values[label.index()]
    }

    /// All of them with their labels.
    pub fn iter(&self) -> impl Iterator<Item = (L, &V)> {
        L::ALL.iter().copied().zip(&self.values)
    }
}

impl<L: Labels> ByLabel<L, u64> {
    /// All of them added up.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.values.iter().sum()
    }
}

impl<L: Labels + fmt::Debug, V: fmt::Debug> fmt::Debug for ByLabel<L, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl<L: Labels, I: Instrument> Instrument for Family<L, I> {
    type Snapshot = ByLabel<L, I::Snapshot>;
    const KIND: Kind = I::KIND;

    fn snapshot(&self) -> Self::Snapshot {
        ByLabel { values: self.members.iter().map(Instrument::snapshot).collect(), labels: PhantomData }
    }

    fn samples(snapshot: &Self::Snapshot, write: &mut Sink<'_>) {
        for (label, value) in snapshot.iter() {
            let own = label.pairs();
            I::samples(value, &mut |inner, suffix, bound, value| {
                write(&[&own, inner].concat(), suffix, bound, value);
            });
        }
    }
}

const BOUNDS_SECONDS: [f64; 19] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0,
    100.0,
];
