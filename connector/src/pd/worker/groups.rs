//! In which groups of layers a step's K/V is handed over, from what compute and the link were measured to take.
//!
//! A prompt's transfer hides behind its compute if the link never falls behind for want of bytes that were there, and if little
//! is left to send once the last layer is computed. Small groups do both, but each write costs something. So groups shrink towards
//! the last layer, each as large as it can be without the last one having to wait; where the link is slower than compute all of
//! them are small, and those that wait for the link are joined to one write when their turn comes. A link that is taken for slower
//! than it is costs a few writes; nothing is held back that it could have carried.

use std::time::Duration;

/// What one step's layers take. Times in seconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct LayerTimes {
    /// Computing one layer.
    pub(super) compute: f64,
    /// One layer's bytes on the link.
    pub(super) transfer: f64,
    /// One write, whatever its bytes.
    pub(super) write: f64,
}

/// The end of each group of `layers` layers, upwards; the last is `layers`. Deterministic.
///
/// The last group takes as long for its bytes as for being a write, at least a layer. With `behind` layers after a group, the
/// group before it may begin so early that it and all after it are on the other side when the last one alone would be:
/// `(layers - behind) * compute + size_of_the_rest * transfer <= layers * compute + last * transfer`, writes included.
pub(super) fn layer_groups(layers: u16, times: LayerTimes) -> Vec<u16> {
    let LayerTimes { compute, transfer, write } = times;
    // A division by zero is a link that costs nothing: all layers go together.
    let last = whole_layers((write / transfer).ceil(), layers).max(1);
    let (mut ends, mut behind) = (Vec::new(), 0);
    while behind < layers {
        ends.push(layers - behind);
        let writes = ends.len() as f64 - 1.0;
        let fits = (f64::from(behind) * compute + f64::from(last) * transfer - writes * write) / transfer;
        behind = whole_layers(fits + ROUNDING, layers).max(behind.saturating_add(last).min(layers));
    }
    ends.reverse();
    ends
}

/// A number of layers, rounded down, between none and all.
fn whole_layers(number: f64, layers: u16) -> u16 {
    // The conversion saturates, and makes 0 of what is no number.
    (number as u16).min(layers)
}

/// Whether a chunk that is not its prompt's last may be handed over in whole blocks, once it is computed: what is left to
/// compute after it hides both it and what will be left to send. Seconds.
pub(super) fn fits_behind(chunk_transfer: f64, rest_transfer: f64, rest_compute: f64) -> bool {
    chunk_transfer + rest_transfer <= rest_compute * MARGIN
}

/// Compute of one token in one layer, as the last steps had it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ComputeRate {
    seconds_per_cell: Option<f64>,
}

impl ComputeRate {
    /// A step took so long for so many tokens times layers.
    pub(super) fn observe(&mut self, cells: u64, took: Duration) {
        if cells > 0 {
            let found = took.as_secs_f64() / cells as f64;
            // The newest step counts as much as all before it: attention grows with the prompt.
            self.seconds_per_cell = Some(self.seconds_per_cell.map_or(found, |known| (known + found) / 2.0));
        }
    }

    /// Seconds for so many tokens times layers; `None` before the first step.
    pub(super) fn seconds(&self, cells: u64) -> Option<f64> {
        self.seconds_per_cell.map(|each| each * cells as f64)
    }
}

/// What writes take on the link: what completions showed, older ones fading.
#[derive(Clone, Copy, Debug)]
pub(super) struct LinkRate {
    bytes: f64,
    seconds: f64,
}

impl LinkRate {
    /// Knows nothing but the link's limit, in 10^9 bits a second, if it has one.
    pub(super) fn new(limit_gbps: Option<f64>) -> Self {
        let bytes_per_second = limit_gbps.map_or(PRIOR_BYTES_PER_SECOND, |gbps| gbps * 1e9 / 8.0);
        Self { bytes: bytes_per_second * PRIOR_SECONDS, seconds: PRIOR_SECONDS }
    }

    /// A write occupied the link for so long.
    pub(super) fn observe(&mut self, bytes: u64, took: Duration) {
        let took = took.as_secs_f64();
        // What a write costs beside its bytes is counted apart, but it is never all of it.
        let for_bytes = (took - WRITE_SECONDS).max(took * LEAST_BYTE_SHARE);
        self.bytes = self.bytes * FADE + bytes as f64;
        self.seconds = self.seconds * FADE + for_bytes;
    }

    /// Seconds for each byte.
    pub(super) fn byte_seconds(&self) -> f64 {
        self.seconds / self.bytes.max(1.0)
    }
}

/// What a write costs beside its bytes: about its way through the threads of both sides.
pub(super) const WRITE_SECONDS: f64 = 150e-6;
/// A quotient that is whole but for its last bits is whole.
const ROUNDING: f64 = 1e-9;
/// A chunk counts as hidden with a tenth to spare: rates vary.
const MARGIN: f64 = 0.9;
/// Weight of what was known, with each completion: some 15 completions are remembered.
const FADE: f64 = 0.93;
/// Before anything was measured: 8 Gbit/s.
const PRIOR_BYTES_PER_SECOND: f64 = 1e9;
/// How much the first guess weighs: the first completions of any size outweigh it.
const PRIOR_SECONDS: f64 = 1e-4;
/// Of a completion, the share that is believed to be due to its bytes at least.
const LEAST_BYTE_SHARE: f64 = 0.2;

#[cfg(test)]
mod tests {
    use super::*;

    fn times(compute: f64, transfer: f64, write: f64) -> LayerTimes {
        LayerTimes { compute, transfer, write }
    }

    /// When the last byte is on the other side, by following the groups one by one.
    fn end_of(groups: &[u16], times: LayerTimes) -> f64 {
        let (mut free, mut from) = (0.0_f64, 0);
        for &until in groups {
            let group = f64::from(until - from) * times.transfer + times.write;
            free = free.max(f64::from(until) * times.compute) + group;
            from = until;
        }
        free
    }

    /// All ways to cut `layers` layers.
    fn cuts(layers: u16) -> impl Iterator<Item = Vec<u16>> {
        let cut = move |mask: u32| (1..layers).filter(|layer| mask >> (layer - 1) & 1 == 1).chain([layers]).collect();
        (0..1 << (layers - 1)).map(cut)
    }

    #[test]
    fn where_compute_is_slower_only_the_last_group_is_exposed_and_no_fewer_writes_do_that() {
        for layers in 1..=12 {
            for ratio in [0.05, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9] {
                for write in [0.0, 0.01, 0.02] {
                    let times = times(1.0, ratio, write);
                    let groups = layer_groups(layers, times);
                    let exposed = end_of(&groups, times) - f64::from(layers);
                    let last = ratio * f64::from(layers - groups.iter().rev().nth(1).copied().unwrap_or(0)) + write;
                    assert!(exposed <= last + 1e-6, "{layers} {times:?} {groups:?}: {exposed} exposed, not {last}");
                    let as_good = cuts(layers).filter(|cut| end_of(cut, times) <= end_of(&groups, times) + 1e-9);
                    let fewest = as_good.map(|cut| cut.len()).min().unwrap();
                    assert_eq!(groups.len(), fewest, "{layers} {times:?}: {groups:?}");
                }
            }
        }
    }

    #[test]
    fn where_the_link_is_slower_it_is_never_without_bytes_that_are_there() {
        for layers in 1..=12 {
            for ratio in [1.0, 1.5, 4.0] {
                let times = times(1.0, ratio, 0.0);
                let best = cuts(layers).map(|cut| end_of(&cut, times)).fold(f64::INFINITY, f64::min);
                assert_eq!(end_of(&layer_groups(layers, times), times), best, "{layers} {times:?}");
            }
        }
    }

    #[test]
    fn groups_shrink_towards_the_last_layer() {
        let ones: Vec<u16> = (1..=32).collect();
        for (name, times, want) in [
            ("a link of four times the speed", times(4e-3, 1e-3, 1e-4), vec![16, 28, 31, 32]),
            ("a link of twice the speed", times(4e-3, 2e-3, 1e-4), vec![16, 24, 28, 30, 31, 32]),
            ("a link of half the speed", times(4e-3, 8e-3, 1e-4), ones.clone()),
            ("an equal link", times(4e-3, 4e-3, 1e-4), ones),
            ("a free link", times(4e-3, 0.0, 1e-4), vec![32]),
            ("layers that are small beside what a write costs", times(1e-3, 1e-5, 1e-4), vec![22, 32]),
            ("a write that costs more than all layers", times(1e-4, 1e-6, 1e-4), vec![32]),
        ] {
            assert_eq!(layer_groups(32, times), want, "{name}");
        }
        assert_eq!(layer_groups(1, times(1e-3, 1e-3, 1e-3)), [1]);
        assert_eq!(layer_groups(u16::MAX, times(1e-3, 1e-3, 0.0)).len(), usize::from(u16::MAX));
    }

    #[test]
    fn a_chunk_in_the_middle_goes_as_whole_blocks_only_if_the_rest_hides_it() {
        for (name, chunk, rest_transfer, rest_compute, want) in [
            ("first of four at half the time", 0.5, 1.5, 3.0, true),
            ("third of four at half the time", 0.5, 0.5, 1.0, false),
            ("first of four at equal time", 1.0, 3.0, 3.0, false),
            ("a short tail hides nothing", 0.1, 0.01, 0.05, false),
        ] {
            assert_eq!(fits_behind(chunk, rest_transfer, rest_compute), want, "{name}");
        }
    }

    #[test]
    fn a_link_is_learned_from_its_completions() {
        let near = |link: &LinkRate, want: f64| (link.byte_seconds() * want - 1.0).abs() < 0.02;
        let took = |bytes: u64, rate: f64| Duration::from_secs_f64(bytes as f64 / rate + WRITE_SECONDS);
        let mut link = LinkRate::new(Some(8.0));
        assert!(near(&link, 1e9));
        // It becomes ten times slower, then a hundred times faster, in small writes.
        for (bytes, rate) in [(1_u64 << 20, 1e8), (64 << 10, 1e10)] {
            (0..200).for_each(|_| link.observe(bytes, took(bytes, rate)));
            let rate =
                if rate > 1e9 { bytes as f64 / (took(bytes, rate).as_secs_f64() * LEAST_BYTE_SHARE) } else { rate };
            assert!(near(&link, rate), "{} instead of {rate}", 1.0 / link.byte_seconds());
        }
        link.observe(0, Duration::ZERO);
        assert!(link.byte_seconds().is_finite());
    }

    #[test]
    fn compute_follows_the_newest_step() {
        let mut rate = ComputeRate::default();
        assert_eq!(rate.seconds(10), None);
        rate.observe(0, Duration::from_secs(1));
        rate.observe(100, Duration::from_secs(1));
        rate.observe(100, Duration::from_secs(3));
        assert_eq!(rate.seconds(100), Some(2.0));
    }
}
