//! Groups whose pages differ, for blocks that hold all their layers' pages together.
//!
//! Source: `_get_packed_kv_cache_groups` in vLLM's `v1/core/kv_cache_utils.py`, 0.32.0.

use super::spec::alike;
use super::{LayerGroup, LayerKind, LayerSpec};

/// Layers that need the same slots.
struct Bucket {
    layers: Vec<usize>,
    /// Those of each page size, in the order in which the sizes were met.
    by_page: Vec<(u64, Vec<usize>)>,
    /// Whether each size has as many layers: a pattern that repeats.
    balanced: bool,
    kind: LayerKind,
}

impl Bucket {
    fn new(layers: Vec<usize>, specs: &[LayerSpec]) -> Self {
        let mut by_page: Vec<(u64, Vec<usize>)> = vec![];
        for layer in layers.iter().copied() {
            let bytes = specs[layer].page_bytes();
            match by_page.iter_mut().find(|(page, _)| *page == bytes) {
                Some((_, of_page)) => of_page.push(layer),
                None => by_page.push((bytes, vec![layer])),
            }
        }
        let balanced = by_page.iter().all(|(_, of_page)| of_page.len() == by_page[0].1.len());
        Self { kind: specs[layers[0]].kind, layers, by_page, balanced }
    }

    fn repeats(&self) -> usize {
        self.by_page.iter().map(|(_, layers)| layers.len()).max().unwrap_or(0)
    }

    fn groups(&self, repeats_per_group: Option<usize>) -> usize {
        match repeats_per_group {
            Some(repeats) if self.balanced => self.repeats().div_ceil(repeats),
            _ => 1,
        }
    }

    /// Whether it may be split down to one layer a group.
    fn is_divisible(&self, repeats_per_group: Option<usize>) -> bool {
        match self.kind {
            LayerKind::State { .. } => true,
            LayerKind::Window { .. } => repeats_per_group.is_none(),
            _ => false,
        }
    }

    /// Bytes of the largest of so many groups.
    fn widest_bytes(&self, groups: usize) -> u64 {
        self.by_page.iter().map(|(page, layers)| layers.len().div_ceil(groups) as u64 * page).sum()
    }
}

/// Groups layers whose pages differ.
pub(super) fn groups(kept: &[usize], specs: &[LayerSpec]) -> Vec<LayerGroup> {
    let mut gathered: Vec<Vec<usize>> = vec![];
    for layer in kept.iter().copied() {
        let fits = |bucket: &&mut Vec<usize>| {
            let of_bucket: Vec<LayerSpec> = bucket.iter().chain([&layer]).map(|layer| specs[*layer]).collect();
            alike(&of_bucket)
        };
        match gathered.iter_mut().find(fits) {
            Some(bucket) => bucket.push(layer),
            None => gathered.push(vec![layer]),
        }
    }
    let buckets: Vec<Bucket> = gathered.into_iter().map(|layers| Bucket::new(layers, specs)).collect();
    let repeats_per_group = repeats_per_group(&buckets);
    // What a block must hold however divisible buckets are split.
    let least_bytes = |bucket: &Bucket| {
        let divisible = bucket.is_divisible(repeats_per_group);
        bucket.widest_bytes(if divisible { bucket.layers.len() } else { bucket.groups(repeats_per_group) })
    };
    let anchor_bytes = buckets.iter().map(least_bytes).max().unwrap_or(0);

    let mut groups = vec![];
    for bucket in buckets {
        let mut count = bucket.groups(repeats_per_group);
        if bucket.is_divisible(repeats_per_group) {
            let in_block = (anchor_bytes / specs[bucket.layers[0]].page_bytes()).max(1) as usize;
            count = count.max(bucket.layers.len().div_ceil(in_block));
        }
        if count == 1 {
            groups.push(LayerGroup::mixed(bucket.layers, specs));
            continue;
        }
        // A pattern is split at its repeats. An uneven bucket has none, and is split layer by layer; vLLM leaves layers out there.
        let by_repeats = bucket.balanced && count <= bucket.repeats();
        for first in 0..count {
            let layers: Vec<usize> = match by_repeats {
                true => {
                    let repeats = (first..bucket.repeats()).step_by(count);
                    repeats.flat_map(|repeat| bucket.by_page.iter().map(move |(_, of_page)| of_page[repeat])).collect()
                }
                false => bucket.layers.iter().copied().skip(first).step_by(count).collect(),
            };
            groups.push(LayerGroup::mixed(layers, specs));
        }
    }
    groups
}

/// How many repeats of the pattern a group covers, so that the least is padded; none where no bucket mixes pages evenly.
fn repeats_per_group(buckets: &[Bucket]) -> Option<usize> {
    let balanced = || buckets.iter().filter(|bucket| bucket.balanced);
    let least = balanced().filter(|bucket| bucket.by_page.len() > 1).map(Bucket::repeats).max()?;
    let most = balanced().map(Bucket::repeats).max()?;
    let padding = |size: usize| -> usize {
        balanced().map(|bucket| bucket.repeats().next_multiple_of(size) - bucket.repeats()).sum()
    };
    // Of equally good ones the largest.
    (least..=most).min_by_key(|size| (padding(*size), usize::MAX - size))
}
