//! Random access into nested runs: which byte of memory or of a window is byte `n` of the stream.

use std::ops::ControlFlow;

use kvferry_protocol::pages::{Extent, Loop, Pages};

/// Runs at nested strides, repeated for each base, addressable by their place in the stream of bytes that they form.
#[derive(Debug)]
pub(crate) struct RunList {
    bases: Vec<u64>,
    nests: Vec<Nest>,
    block_bytes: u64,
    bytes: u64,
}

#[derive(Debug)]
struct Nest {
    /// Where the nest begins in the stream of one block.
    start: u64,
    offset: u64,
    loops: Vec<Loop>,
    run_bytes: u64,
}

impl RunList {
    /// The stream that a list of extents describes; `None` if it has more than `u64::MAX` bytes or an empty run.
    pub(crate) fn of_extents(extents: &[Extent]) -> Option<Self> {
        let nests = extents.iter().map(|e| (e.offset, e.loops.clone(), e.run_bytes));
        Self::new(vec![0], nests)
    }

    /// The stream that pages describe; `None` if it has more than `u64::MAX` bytes or an empty run.
    pub(crate) fn of_pages(pages: &Pages) -> Option<Self> {
        let nests = pages.pieces.iter().map(|p| (p.offset, p.loops.clone(), p.run_bytes));
        Self::new(pages.bases.clone(), nests)
    }

    fn new(bases: Vec<u64>, nests: impl Iterator<Item = (u64, Vec<Loop>, u64)>) -> Option<Self> {
        let mut start = 0u64;
        let mut list = Vec::new();
        for (offset, loops, run_bytes) in nests {
            let bytes = loops.iter().try_fold(run_bytes, |bytes, l| bytes.checked_mul(l.count.into()))?;
            if bytes == 0 {
                return None;
            }
            list.push(Nest { start, offset, loops, run_bytes });
            start = start.checked_add(bytes)?;
        }
        let bytes = start.checked_mul(bases.len() as u64)?;
        Some(Self { bases, nests: list, block_bytes: start, bytes })
    }

    /// Bytes of the stream.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Calls `run(nest, offset, bytes)` for the runs that hold bytes `from..to` of the stream, in order, the first and the last
    /// one cut to size, until `run` breaks.
    pub(crate) fn walk(&self, from: u64, to: u64, mut run: impl FnMut(usize, u64, u64) -> ControlFlow<()>) {
        let to = to.min(self.bytes);
        let mut at = from;
        while at < to {
            let (base, in_block) = (at / self.block_bytes, at % self.block_bytes);
            let first = self.nests.partition_point(|nest| nest.start <= in_block) - 1;
            for (index, nest) in self.nests.iter().enumerate().skip(first) {
                let nest_start = base * self.block_bytes + nest.start;
                let runs = nest.loops.iter().fold(1, |runs, l| runs * u64::from(l.count));
                let mut step = (at - nest_start) / nest.run_bytes;
                while step < runs && at < to {
                    let run_start = nest_start + step * nest.run_bytes;
                    let skip = at - run_start;
                    let bytes = (nest.run_bytes - skip).min(to - at);
                    let offset = self.bases[base as usize] + nest.offset + nest.step_offset(step) + skip;
                    if run(index, offset, bytes).is_break() {
                        return;
                    }
                    at += bytes;
                    step += 1;
                }
                if at >= to {
                    return;
                }
            }
        }
    }
}

impl Nest {
    fn step_offset(&self, mut step: u64) -> u64 {
        self.loops.iter().rev().fold(0, |offset, l| {
            let count = u64::from(l.count);
            let within = step % count;
            step /= count;
            offset + within * l.stride
        })
    }
}
