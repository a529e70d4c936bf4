//! Random scattered writes and what memory looks like after them.

use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Extent, Loop, Pages, Piece};
use proptest::prelude::*;

/// A write between random places.
#[derive(Clone, Debug)]
pub struct ScatteredWrite {
    /// The receiver's window; no byte twice.
    pub window: Pages,
    /// The sender's bytes; some may come more than once.
    pub source: Vec<Pages>,
    /// Where they go; no byte twice.
    pub extents: Vec<Extent>,
}

impl ScatteredWrite {
    /// What the receiver's `memory` is after the write of the sender's `bytes`, byte by byte.
    #[must_use]
    pub fn apply(&self, bytes: &[u8], memory: &[u8]) -> Vec<u8> {
        let window = places(&self.window);
        let from = self.source.iter().flat_map(places);
        let mut to = Vec::new();
        for extent in &self.extents {
            extent.for_each_run(|start| to.extend(start..start + extent.run_bytes));
        }
        let mut after = memory.to_vec();
        for (from, to) in from.zip(to) {
            after[window[to as usize] as usize] = bytes[from as usize];
        }
        after
    }
}

/// Where each byte of `pages` is, in order.
fn places(pages: &Pages) -> Vec<u64> {
    let mut places = Vec::new();
    for &base in &pages.bases {
        for piece in &pages.pieces {
            piece.for_each_run(base, |start| places.extend(start..start + piece.run_bytes));
        }
    }
    places
}

/// Writes between arenas of `arena_bytes`, which should be some 10^4 at least.
pub fn scattered_write(arena_bytes: u64) -> impl Strategy<Value = ScatteredWrite> {
    let shape = (1u64..200, 1u32..6, 1u32..5, 0u64..64, 1usize..6);
    (shape, any::<u64>(), prop::collection::vec(0u64..=1000, 1..6)).prop_map(move |(shape, seed, cuts)| {
        let (run_bytes, inner, outer, padding, blocks) = shape;
        let mut random = Random(seed);
        let window = blocks_of(run_bytes, inner, outer, padding, blocks, arena_bytes, &mut random);
        let total = places(&window).len() as u64;
        let extents = extents_of(total, u64::from(inner * outer) * run_bytes, &cuts, &mut random);
        let bytes = extents.iter().map(|extent| extent.bytes().unwrap_or(0)).sum();
        ScatteredWrite { source: source_of(bytes, arena_bytes, &mut random), window, extents }
    })
}

/// Blocks at random places: two nested loops around a run, everything padded, in random order.
fn blocks_of(
    run_bytes: u64,
    inner: u32,
    outer: u32,
    padding: u64,
    blocks: usize,
    arena_bytes: u64,
    random: &mut Random,
) -> Pages {
    let inner_stride = run_bytes + padding;
    let outer_stride = inner_stride * u64::from(inner) + padding;
    let span = outer_stride * u64::from(outer);
    let places = (arena_bytes / 2 / span).max(1);
    let mut bases: Vec<u64> = (0..places.min(40)).map(|at| at * span).collect();
    random.shuffle(&mut bases);
    bases.truncate(blocks);
    let piece = |offset, count| Piece {
        region: RegionId::new(0),
        offset,
        loops: vec![Loop { count: outer, stride: outer_stride }, Loop { count, stride: inner_stride }],
        run_bytes,
    };
    // Two pieces, the later one first, if there are enough runs.
    let half = inner / 2;
    let pieces = if half == 0 {
        vec![piece(0, inner)]
    } else {
        vec![piece(u64::from(half) * inner_stride, inner - half), piece(0, half)]
    };
    Pages { bases, pieces }
}

/// Parts of `0..total` in random order: ranges, or the same range of each block.
fn extents_of(total: u64, block_bytes: u64, cuts: &[u64], random: &mut Random) -> Vec<Extent> {
    let mut extents = Vec::new();
    if random.next().is_multiple_of(2) {
        let mut borders: Vec<u64> = cuts.iter().map(|cut| cut * total / 1000).collect();
        borders.extend([0, total]);
        borders.sort_unstable();
        extents.extend(borders.windows(2).map(|pair| Extent::contiguous(pair[0], pair[1] - pair[0])));
    } else {
        let blocks = (total / block_bytes) as u32;
        let mut borders: Vec<u64> = cuts.iter().map(|cut| cut * block_bytes / 1000).collect();
        borders.extend([0, block_bytes]);
        borders.sort_unstable();
        extents.extend(borders.windows(2).map(|pair| Extent {
            offset: pair[0],
            loops: vec![Loop { count: blocks, stride: block_bytes }],
            run_bytes: pair[1] - pair[0],
        }));
    }
    extents.retain(|extent| extent.run_bytes > 0);
    random.shuffle(&mut extents);
    if extents.len() > 2 {
        extents.pop(); // some of the window stays as it was
    }
    extents
}

fn source_of(bytes: u64, arena_bytes: u64, random: &mut Random) -> Vec<Pages> {
    let mut pages = Vec::new();
    let mut left = bytes;
    while left > 0 {
        let run_bytes = (random.next() % 300 + 1).min(left);
        let count = (random.next() % 4 + 1).min(left / run_bytes) as u32;
        let stride = random.next() % 500;
        let span = stride * u64::from(count) + run_bytes;
        let offset = random.next() % (arena_bytes - span);
        let piece = Piece { region: RegionId::new(0), offset, loops: vec![Loop { count, stride }], run_bytes };
        left -= piece.bytes();
        pages.push(Pages { bases: vec![0], pieces: vec![piece] });
    }
    pages
}

/// xorshift64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 |= 1;
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, (self.next() % (at as u64 + 1)) as usize);
        }
    }
}
