//! Nests of loops over two sides at once, and what makes them small.

use crate::ids::RegionId;
use crate::pages::Loop;

/// One loop of a nest that walks both sides.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PlanLoop {
    /// How many steps.
    pub count: u32,
    /// Bytes from one step to the next at the source.
    pub src_stride: u64,
    /// Bytes from one step to the next at the destination.
    pub dst_stride: u64,
}

/// Where a piece begins on one side: for a block B and a token N in it, at
/// `offset + B * block_stride + N * token_stride` of `region`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PieceEnd {
    /// The registered region.
    pub region: RegionId,
    /// Bytes from the region's start, for block 0.
    pub offset: u64,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// Bytes from one token to the next; 0 where `offset` counts the span's first token already.
    pub token_stride: u64,
}

/// A nest around one contiguous run, the same for every span of a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlanPiece {
    /// Where it is read.
    pub src: PieceEnd,
    /// Where it is written.
    pub dst: PieceEnd,
    /// The nest, largest destination stride outermost.
    pub loops: Vec<PlanLoop>,
    /// Bytes of each run.
    pub run_bytes: u64,
}

impl PlanPiece {
    /// Bytes in all runs of one span.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.loops.iter().fold(self.run_bytes, |bytes, l| bytes * u64::from(l.count))
    }

    /// Runs of one span.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.loops.iter().map(|l| u64::from(l.count)).product()
    }

    /// Adds a loop and makes the nest small again.
    pub(super) fn add(&mut self, count: u32, src_stride: u64, dst_stride: u64) {
        if count > 1 {
            self.loops.push(PlanLoop { count, src_stride, dst_stride });
        }
        settle(&mut self.loops, &mut self.run_bytes);
    }

    /// Makes one piece of two that walk the same nest; hands `other` back where they do not.
    pub(super) fn join(&mut self, other: Self) -> Result<(), Self> {
        let same = |a: &PieceEnd, b: &PieceEnd| {
            (a.region, a.block_stride, a.token_stride) == (b.region, b.block_stride, b.token_stride)
        };
        if !same(&self.src, &other.src) || !same(&self.dst, &other.dst) || self.loops != other.loops {
            return Err(other);
        }
        let (low, high) = if self.dst.offset < other.dst.offset { (&*self, &other) } else { (&other, &*self) };
        let Some(src_stride) = high.src.offset.checked_sub(low.src.offset).filter(|&stride| stride > 0) else {
            return Err(other);
        };
        let dst_stride = high.dst.offset - low.dst.offset;
        if src_stride == low.run_bytes && dst_stride == low.run_bytes {
            let run_bytes = low.run_bytes + high.run_bytes;
            (self.src, self.dst) = (low.src, low.dst);
            self.run_bytes = run_bytes;
            self.add(1, 0, 0);
        } else if low.run_bytes == high.run_bytes {
            (self.src, self.dst) = (low.src, low.dst);
            self.add(2, src_stride, dst_stride);
        } else {
            return Err(other);
        }
        Ok(())
    }
}

/// Moves loops into the run where their steps abut on both sides, orders the rest by destination stride, and makes one loop
/// of two that are evenly spaced. Neither changes which bytes are named.
pub(super) fn settle(loops: &mut Vec<PlanLoop>, run_bytes: &mut u64) {
    while let Some(at) = loops.iter().position(|l| l.src_stride == *run_bytes && l.dst_stride == *run_bytes) {
        *run_bytes *= u64::from(loops.swap_remove(at).count);
    }
    loops.sort_by_key(|l| std::cmp::Reverse((l.dst_stride, l.src_stride)));
    let mut at = 1;
    while at < loops.len() {
        let (outer, inner) = (loops[at - 1], loops[at]);
        let steps = u64::from(inner.count);
        let even = outer.src_stride == inner.src_stride * steps && outer.dst_stride == inner.dst_stride * steps;
        match outer.count.checked_mul(inner.count).filter(|_| even) {
            Some(count) => {
                loops[at] = PlanLoop { count, ..inner };
                loops.remove(at - 1);
                at = at.saturating_sub(1).max(1);
            }
            None => at += 1,
        }
    }
}

/// The same for one side whose order of bytes must stay: only innermost loops join the run, and only neighbours each other.
pub(super) fn settle_in_order(loops: &mut Vec<Loop>, run_bytes: &mut u64) {
    while let Some(inner) = loops.last().filter(|l| l.count == 1 || l.stride == *run_bytes) {
        *run_bytes *= u64::from(inner.count);
        loops.pop();
    }
    loops.retain(|l| l.count != 1);
    let mut at = 1;
    while at < loops.len() {
        let (outer, inner) = (loops[at - 1], loops[at]);
        let even = outer.stride == inner.stride * u64::from(inner.count);
        match outer.count.checked_mul(inner.count).filter(|_| even) {
            Some(count) => {
                loops[at] = Loop { count, ..inner };
                loops.remove(at - 1);
                at = at.saturating_sub(1).max(1);
            }
            None => at += 1,
        }
    }
}

/// Calls `run(src, dst)` for each run of a nest.
#[inline]
pub(super) fn walk(src: u64, dst: u64, loops: &[PlanLoop], run: &mut impl FnMut(u64, u64)) {
    match loops {
        [] => run(src, dst),
        [last] => {
            for step in 0..u64::from(last.count) {
                run(src + step * last.src_stride, dst + step * last.dst_stride);
            }
        }
        [outer, inner @ ..] => {
            for step in 0..u64::from(outer.count) {
                walk(src + step * outer.src_stride, dst + step * outer.dst_stride, inner, run);
            }
        }
    }
}

/// A list of offsets as few nests of at most two loops, in the same order.
pub(super) fn compress(offsets: &[u64]) -> Vec<(u64, Vec<Loop>)> {
    let inner = streaks(offsets);
    let mut out: Vec<(u64, Vec<Loop>)> = Vec::new();
    let mut rest = inner.as_slice();
    while let [first, ..] = rest {
        let alike = rest.iter().take_while(|streak| streak.1 == first.1).count();
        let starts: Vec<u64> = rest[..alike].iter().map(|streak| streak.0).collect();
        for (start, outer) in streaks(&starts) {
            out.push((start, [outer, first.1].into_iter().filter(|l| l.count > 1).collect()));
        }
        rest = &rest[alike..];
    }
    out
}

/// Cuts a list into stretches that rise by equal steps.
fn streaks(offsets: &[u64]) -> Vec<(u64, Loop)> {
    let mut out = Vec::new();
    let mut rest = offsets;
    while let [first, tail @ ..] = rest {
        let stride = tail.first().and_then(|second| second.checked_sub(*first)).filter(|&stride| stride > 0);
        let count = stride.map_or(1, |stride| {
            rest.windows(2).take_while(|pair| pair[1].checked_sub(pair[0]) == Some(stride)).count() + 1
        });
        out.push((*first, Loop { count: u32::try_from(count).unwrap_or(u32::MAX), stride: stride.unwrap_or(0) }));
        rest = &rest[count.min(u32::MAX as usize)..];
    }
    out
}
