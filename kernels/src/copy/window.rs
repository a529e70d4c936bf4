//! Digests of what goes through a window, taken where its bytes lie, a stretch at a time: in whatever pieces, and in whatever order,
//! they come or go.
//!
//! The window's order is that of [`WindowShape`]; the memory is that of a cache, which may be cut into other blocks. The bytes of a
//! *part* (a write) are counted as they pass; each run is hashed when its last byte has passed, while the processor's cache holds it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvferry_protocol::digest::{Digest, HeadKey};
use kvferry_protocol::layout::{Axis, CacheView, KvLayout, Shard, Strip, WindowShape};
use kvferry_protocol::pages::Extent;
use kvferry_protocol::{BlockId, LayerId};

use super::raw::{self, RegionTable};

/// How many stretches that do not abut are kept of one window. With more, nothing is known.
const MAX_STRETCHES: usize = 1 << 16;

/// The digests of a window's parts.
///
/// A byte belongs to one part. If two parts have it nobody can say which of them is in memory, and nothing is known of any part of
/// that window from then on.
#[derive(Debug)]
pub struct WindowDigests {
    window: Geometry,
    memory: Memory,
    state: Mutex<State>,
    /// Nothing is known any more. Set under the lock.
    is_spoilt: AtomicBool,
}

/// How the window's bytes follow each other: runs of even length, counted by axes.
#[derive(Debug)]
struct Geometry {
    /// Outermost first, and how many steps each has.
    axes: [(Axis, u64); 5],
    run_bytes: u64,
    bytes: u64,
    tokens_per_block: u32,
    first_token: u32,
    shard: Shard,
}

/// Where the runs lie.
#[derive(Debug)]
struct Memory {
    layout: KvLayout,
    shard: Shard,
    blocks: Vec<BlockId>,
    first_token: u32,
}

#[derive(Debug, Default)]
struct State {
    /// What passed, by its start: its end and its part. Neighbours of one part are one.
    stretches: BTreeMap<u64, (u64, u32)>,
    parts: BTreeMap<u32, Part>,
    /// Bytes that passed.
    bytes: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Part {
    bytes: u64,
    digest: Digest,
    /// Calls that are hashing.
    hashing: usize,
}

/// A range of each axis.
#[derive(Clone, Debug)]
struct Box5 {
    layers: Range<u64>,
    blocks: Range<u64>,
    planes: Range<u64>,
    heads: Range<u64>,
    tokens: Range<u64>,
}

impl WindowDigests {
    /// Stretches that are shorter than this on average cost more to keep than their digest: then nothing is known.
    pub const MIN_STRETCH_BYTES: u64 = 2 << 10;
    /// So many stretches cost little, however short they are.
    pub const FEW_STRETCHES: u64 = 256;

    /// For a window onto `memory`, or out of it: the view holds the window's layers and heads, and all tokens that pass. `None` if the
    /// runs of the planes differ in length, or the view does not hold those.
    #[must_use]
    pub fn new(window: &WindowShape, memory: &CacheView<'_>) -> Option<Self> {
        let (layout, selection) = (window.layout(), window.selection());
        let shape = layout.shape();
        let run_bytes = *shape.run_bytes.first()?;
        let held = memory.layout.shape();
        let holds = |from: u64, count: u64, want: &Range<u64>| from <= want.start && want.end <= from + count;
        let wide = |range: &Range<u16>| u64::from(range.start)..u64::from(range.end);
        let fits = holds(memory.shard.first_layer.get().into(), held.layers.into(), &wide(&selection.layers))
            && holds(memory.shard.first_head.into(), held.heads.into(), &wide(&selection.heads))
            && memory.blocks.iter().all(|block| block.get() < held.blocks)
            && held.run_bytes == shape.run_bytes
            && shape.run_bytes.iter().all(|&bytes| bytes == run_bytes);
        if !fits {
            return None;
        }
        let count = |axis| match axis {
            Axis::Layer => shape.layers.into(),
            Axis::Block => shape.blocks.into(),
            Axis::Plane => shape.run_bytes.len() as u64,
            Axis::Head => shape.heads.into(),
            Axis::Token => shape.tokens_per_block.into(),
        };
        let window = Geometry {
            axes: layout.order().axes().map(|axis| (axis, count(axis))),
            run_bytes: run_bytes.into(),
            bytes: window.bytes(),
            tokens_per_block: shape.tokens_per_block,
            first_token: selection.tokens.start,
            shard: window.shard(),
        };
        let memory = Memory {
            layout: memory.layout.clone(),
            shard: memory.shard,
            blocks: memory.blocks.to_vec(),
            first_token: memory.first_token,
        };
        let (state, is_spoilt) = Default::default();
        Some(Self { window, memory, state, is_spoilt })
    }

    /// Bytes of a part passed: they are in memory, or about to leave it. Hashes the runs that are whole with them, where `regions` says
    /// that they lie.
    pub fn passed(&self, part: u32, stretch: Range<u64>, regions: impl FnOnce() -> RegionTable) {
        if stretch.is_empty() || self.is_spoilt.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.lock();
        let Some(runs) = state.pass(part, &stretch, &self.window) else {
            self.is_spoilt.store(true, Ordering::Release);
            return;
        };
        drop(state);
        if runs.is_empty() {
            return;
        }
        let regions = regions();
        let mut digest = Some(Digest::ZERO);
        let mut keys = Vec::new();
        self.window.for_each_box(runs, |of| {
            let more = self.memory.digest(&self.window, of, &regions, &mut keys);
            digest = digest.zip(more).map(|(digest, more)| digest + more);
        });
        let mut state = self.lock();
        if digest.is_none() {
            self.is_spoilt.store(true, Ordering::Release);
        }
        if let Some(part) = state.parts.get_mut(&part) {
            part.digest += digest.unwrap_or_default();
            part.hashing -= 1;
        }
    }

    /// The digest of a part, if exactly the bytes of `extents` passed in it. It is forgotten with that; its bytes stay taken.
    pub fn take(&self, part: u32, extents: &[Extent]) -> Option<Digest> {
        let mut state = self.lock();
        let found = state.parts.remove(&part)?;
        let bytes = extents.iter().try_fold(0u64, |sum, extent| sum.checked_add(extent.bytes()?));
        let is_all = !self.is_spoilt.load(Ordering::Acquire)
            && found.hashing == 0
            && bytes == Some(found.bytes)
            && extents.iter().all(|extent| state.holds(part, extent));
        is_all.then_some(found.digest)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Enters a stretch, and returns the runs that it makes whole; `None` if nothing is known any more.
    fn pass(&mut self, part: u32, stretch: &Range<u64>, window: &Geometry) -> Option<Range<u64>> {
        let (mut start, mut end) = (stretch.start, stretch.end);
        let before = self.stretches.range(..end).next_back().map(|(&from, &(to, of))| (from, to, of));
        let is_taken = before.is_some_and(|(_, to, _)| to > start);
        let count = self.stretches.len();
        let are_many = count as u64 > WindowDigests::FEW_STRETCHES;
        let are_short = are_many && self.bytes < count as u64 * WindowDigests::MIN_STRETCH_BYTES;
        if is_taken || are_short || end > window.bytes || count >= MAX_STRETCHES {
            return None;
        }
        self.bytes += end - start;
        if let Some((from, to, of)) = before
            && (to, of) == (start, part)
        {
            start = from;
        }
        if let Some(&(to, of)) = self.stretches.get(&end)
            && of == part
        {
            self.stretches.remove(&end);
            end = to;
        }
        self.stretches.insert(start, (end, part));
        // A run that begins before the stretch is whole now if the joined stretch holds its beginning; the same at the other end.
        let size = window.run_bytes;
        let first = (stretch.start / size * size >= start).then_some(stretch.start / size);
        let first = first.unwrap_or(stretch.start.div_ceil(size));
        let last = (stretch.end.div_ceil(size) * size <= end).then_some(stretch.end.div_ceil(size));
        let last = last.unwrap_or(stretch.end / size);
        let entry = self.parts.entry(part).or_default();
        entry.bytes += stretch.end - stretch.start;
        entry.hashing += usize::from(first < last);
        Some(first..last)
    }

    fn holds(&self, part: u32, extent: &Extent) -> bool {
        let mut holds = true;
        extent.for_each_run(|start| {
            let found = self.stretches.range(..=start).next_back();
            holds &= found.is_some_and(|(_, &(end, of))| of == part && start + extent.run_bytes <= end);
        });
        holds
    }
}

impl Geometry {
    /// Cuts runs `runs` of the window into boxes.
    fn for_each_box(&self, runs: Range<u64>, mut each: impl FnMut(&Box5)) {
        let mut inner = [1; 5];
        for axis in (0..4).rev() {
            inner[axis] = inner[axis + 1] * self.axes[axis + 1].1;
        }
        let mut at = runs.start;
        while at < runs.end {
            // The outermost axis that can make a whole step from here, and how many of its steps fit.
            let fits = |axis: &usize| at.is_multiple_of(inner[*axis]) && at + inner[*axis] <= runs.end;
            let axis = (0..5).find(fits).unwrap_or(4);
            let step = at / inner[axis] % self.axes[axis].1;
            let steps = (self.axes[axis].1 - step).min((runs.end - at) / inner[axis]);
            let mut of = Box5::default();
            for (index, &(name, count)) in self.axes.iter().enumerate() {
                let step_here = at / inner[index] % count;
                *of.axis(name) = match index.cmp(&axis) {
                    std::cmp::Ordering::Less => step_here..step_here + 1,
                    std::cmp::Ordering::Equal => step..step + steps,
                    std::cmp::Ordering::Greater => 0..count,
                };
            }
            each(&of);
            at += steps * inner[axis];
        }
    }
}

impl Default for Box5 {
    fn default() -> Self {
        Self { layers: 0..0, blocks: 0..0, planes: 0..0, heads: 0..0, tokens: 0..0 }
    }
}

impl Box5 {
    fn axis(&mut self, axis: Axis) -> &mut Range<u64> {
        match axis {
            Axis::Layer => &mut self.layers,
            Axis::Block => &mut self.blocks,
            Axis::Plane => &mut self.planes,
            Axis::Head => &mut self.heads,
            Axis::Token => &mut self.tokens,
        }
    }
}

impl Memory {
    /// The digest of a box of the window's runs; `None` if some of them are not held.
    fn digest(&self, window: &Geometry, of: &Box5, regions: &RegionTable, keys: &mut Vec<HeadKey>) -> Option<Digest> {
        let mut digest = Digest::ZERO;
        let held = u64::from(self.layout.shape().tokens_per_block);
        let head = window.shard.first_head + of.heads.start as u16;
        for block in of.blocks.clone() {
            let first = u64::from(window.first_token) + block * u64::from(window.tokens_per_block);
            let mut at = (first + of.tokens.start).checked_sub(self.first_token.into())?;
            let end = first + of.tokens.end - u64::from(self.first_token);
            // The window's block may lie in several of the cache's.
            while at < end {
                let (block, token) = (*self.blocks.get((at / held) as usize)?, (at % held) as u32);
                let count = (held - at % held).min(end - at);
                let tokens = self.first_token + at as u32..self.first_token + (at + count) as u32;
                for layer in of.layers.clone() {
                    let model_layer = window.shard.first_layer.get() + layer as u16;
                    for plane in of.planes.clone() {
                        let strides = &self.layout.planes()[plane as usize];
                        let place = self.layout.place(
                            model_layer - self.shard.first_layer.get(),
                            block,
                            plane as usize,
                            head - self.shard.first_head,
                            token,
                        );
                        let strip = Strip {
                            place,
                            head_stride: strides.head,
                            token_stride: strides.token,
                            run_bytes: strides.run_bytes,
                        };
                        let heads = head..head + (of.heads.end - of.heads.start) as u16;
                        keys.clear();
                        keys.extend(heads.map(|head| HeadKey::new(LayerId::new(model_layer), plane as u8, head)));
                        digest += raw::strip_digest(regions, &strip, keys, tokens.clone());
                    }
                }
                at += count;
            }
        }
        Some(digest)
    }
}
