//! How the data plane names bytes: nested strides instead of one descriptor a page.
//!
//! A receiver grants a *window*: an ordered space of bytes that its [`Pages`] map onto its memory. A sender writes
//! [`Extent`]s of that window and never learns an address; so no byte can land outside what was granted, whatever a peer sends.

use serde::{Deserialize, Serialize};

use crate::ids::RegionId;

/// One loop of a nest: `count` steps of `stride` bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Loop {
    /// How many steps.
    pub count: u32,
    /// Bytes from one step to the next.
    pub stride: u64,
}

/// Runs of equal length at nested strides: outermost loop first, `run_bytes` contiguous bytes innermost.
///
/// Names a part of a grant's window on the wire. With no loops it is one contiguous run.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Extent {
    /// Where the first run begins, in bytes from the window's start.
    pub offset: u64,
    /// The nest, outermost first; at most [`Extent::MAX_LOOPS`].
    pub loops: Vec<Loop>,
    /// Bytes of each run.
    pub run_bytes: u64,
}

/// Runs at nested strides inside one block, in one region.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Piece {
    /// The registered region.
    pub region: RegionId,
    /// Where the first run begins for a block whose base is 0, in bytes from the region's start.
    pub offset: u64,
    /// The nest, outermost first.
    pub loops: Vec<Loop>,
    /// Bytes of each run.
    pub run_bytes: u64,
}

/// An ordered list of local bytes: for each base (a block), for each piece, for each run of it.
///
/// As a grant it is the window that a peer may fill; as a source it is what a write sends, in this order.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Pages {
    /// What each block adds to every piece's offset.
    pub bases: Vec<u64>,
    /// The block's pieces, in window order.
    pub pieces: Vec<Piece>,
}

impl Extent {
    /// The deepest nest that a frame may carry.
    pub const MAX_LOOPS: usize = 6;

    /// One contiguous run.
    #[must_use]
    pub const fn contiguous(offset: u64, run_bytes: u64) -> Self {
        Self { offset, loops: Vec::new(), run_bytes }
    }

    /// Bytes in all runs together; `None` on overflow.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        self.loops.iter().try_fold(self.run_bytes, |bytes, l| bytes.checked_mul(l.count.into()))
    }

    /// One past the highest byte that any run touches; `None` on overflow.
    #[must_use]
    pub fn end(&self) -> Option<u64> {
        let start = self.offset.checked_add(self.run_bytes)?;
        self.loops.iter().try_fold(start, |end, l| {
            let steps = u64::from(l.count).checked_sub(1)?;
            end.checked_add(l.stride.checked_mul(steps)?)
        })
    }

    /// Calls `run(offset)` for the start of each run, in order.
    pub fn for_each_run(&self, mut run: impl FnMut(u64)) {
        nest(self.offset, &self.loops, &mut run);
    }
}

impl Piece {
    /// Bytes in all runs together.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.loops.iter().fold(self.run_bytes, |bytes, l| bytes * u64::from(l.count))
    }

    /// Calls `run(offset)` for the start of each run of the block at `base`, in order.
    pub fn for_each_run(&self, base: u64, mut run: impl FnMut(u64)) {
        nest(self.offset + base, &self.loops, &mut run);
    }
}

impl Pages {
    /// Bytes of one block.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.pieces.iter().map(Piece::bytes).sum()
    }

    /// Bytes of all blocks: the window's length.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block_bytes() * self.bases.len() as u64
    }
}

fn nest(offset: u64, loops: &[Loop], run: &mut impl FnMut(u64)) {
    match loops {
        [] => run(offset),
        [outer, inner @ ..] => {
            for step in 0..u64::from(outer.count) {
                nest(offset + step * outer.stride, inner, run);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_extent_knows_its_bytes_and_its_end() {
        let extent = Extent {
            offset: 100,
            loops: vec![Loop { count: 2, stride: 1000 }, Loop { count: 3, stride: 100 }],
            run_bytes: 10,
        };
        let mut starts = Vec::new();
        extent.for_each_run(|offset| starts.push(offset));
        assert_eq!(starts, [100, 200, 300, 1100, 1200, 1300]);
        assert_eq!((extent.bytes(), extent.end()), (Some(60), Some(1310)));
    }

    #[test]
    fn an_extent_that_overflows_has_no_size() {
        let extent = Extent { offset: u64::MAX, loops: vec![Loop { count: u32::MAX, stride: u64::MAX }], run_bytes: 2 };
        assert_eq!(extent.end(), None);
        let extent = Extent { offset: 0, loops: vec![Loop { count: u32::MAX, stride: 0 }; 3], run_bytes: 1 << 20 };
        assert_eq!(extent.bytes(), None);
    }
}
