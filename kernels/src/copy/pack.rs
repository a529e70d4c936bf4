//! Packing for the wire: a plan's source bytes, one after the other, in the order in which its extents name their places.

use kvferry_protocol::RegionId;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CopyPlan, Place, Side, Strip};
use kvferry_protocol::pages::Extent;

use super::raw::RegionTable;
use super::{CopyError, check, raw, strip_keys};

/// Packs a plan's source bytes into `out`, in the order of [`CopyPlan::window_extents`], and digests them: one pass over the
/// source, a strip (one plane of one layer of one block) at a time, digested in the slab while the processor's cache holds it.
///
/// `out` takes exactly [`CopyPlan::bytes`].
///
/// # Errors
/// [`CopyError::Region`] or [`CopyError::Bounds`], before anything is moved; [`CopyError::Length`] if `out` has another length;
/// [`CopyError::Plan`] if the destination is not a window.
pub fn pack_with_digest(plan: &CopyPlan, src: &RegionTable, out: &mut [u8]) -> Result<Digest, CopyError> {
    if plan.bytes() != out.len() as u64 {
        return Err(CopyError::Length { expected: plan.bytes(), found: out.len() });
    }
    check(plan, Side::Source, src)?;
    let extents = plan.window_extents().map_err(|source| CopyError::Plan { source })?;
    let mut order = PackedOrder::of(&extents);
    let slab = raw::table_of(out);
    let (mut digest, mut keys) = (Digest::ZERO, Vec::new());
    plan.for_each_page(|page| {
        let (heads, tokens) = (page.heads().len() as u64, page.tokens().len() as u64);
        for plane in 0..page.planes() {
            let from = page.strip(plane, Side::Source);
            let to = order.packed(&page.strip(plane, Side::Destination), heads, tokens);
            copy_strip(src, &from, &slab, &to, heads, tokens);
            strip_keys(&page, plane, &mut keys);
            digest += raw::strip_digest(&slab, &to, &keys, page.tokens());
        }
    });
    Ok(digest)
}

/// Copies a strip by the longest rows that both sides have in one piece.
fn copy_strip(src: &RegionTable, from: &Strip, dst: &RegionTable, to: &Strip, heads: u64, tokens: u64) {
    let run = u64::from(from.run_bytes);
    let strides = |of: &Strip| (of.head_stride, of.token_stride);
    let ((from_head, from_token), (to_head, to_token)) = (strides(from), strides(to));
    let copy = |h: u64, n: u64, bytes: u64| {
        let from = Place { offset: from.place.offset + h * from_head + n * from_token, ..from.place };
        let to = Place { offset: to.place.offset + h * to_head + n * to_token, ..to.place };
        raw::copy_run(src, from, dst, to, bytes);
    };
    let token_rows = tokens == 1 || (from_token == run && to_token == run);
    let head_rows = heads == 1 || (from_head == run && to_head == run);
    let whole = |inner: u64, count: u64, from: u64, to: u64| count == 1 || (from == inner && to == inner);
    if token_rows && whole(run * tokens, heads, from_head, to_head)
        || head_rows && whole(run * heads, tokens, from_token, to_token)
    {
        copy(0, 0, run * heads * tokens);
    } else if token_rows {
        (0..heads).for_each(|h| copy(h, 0, run * tokens));
    } else if head_rows {
        (0..tokens).for_each(|n| copy(0, n, run * heads));
    } else if to_head < to_token {
        (0..tokens).for_each(|n| (0..heads).for_each(|h| copy(h, n, run)));
    } else {
        (0..heads).for_each(|h| (0..tokens).for_each(|n| copy(h, n, run)));
    }
}

/// Where each byte of a window lies once its extents are packed one after the other.
struct PackedOrder {
    extents: Vec<PackedExtent>,
    /// The extent that the last question was about; the next one mostly is about the same.
    last: usize,
}

struct PackedExtent {
    offset: u64,
    run_bytes: u64,
    /// By falling stride in the window.
    loops: Vec<PackedLoop>,
    /// Where its first run is packed.
    packed: u64,
}

struct PackedLoop {
    count: u64,
    stride: u64,
    /// Packed bytes from one step to the next.
    packed: u64,
}

impl PackedOrder {
    fn of(extents: &[Extent]) -> Self {
        let mut packed = 0;
        let extents = extents.iter().map(|extent| {
            let mut inner = extent.run_bytes;
            let mut loops = Vec::with_capacity(extent.loops.len());
            for l in extent.loops.iter().rev() {
                loops.push(PackedLoop { count: l.count.into(), stride: l.stride, packed: inner });
                inner *= u64::from(l.count);
            }
            loops.sort_unstable_by_key(|l| std::cmp::Reverse(l.stride));
            let start = packed;
            packed += inner;
            PackedExtent { offset: extent.offset, run_bytes: extent.run_bytes, loops, packed: start }
        });
        Self { extents: extents.collect(), last: 0 }
    }

    /// Where a strip of the window is packed. A strip lies in one block, so its heads and tokens keep even distances.
    fn packed(&mut self, window: &Strip, heads: u64, tokens: u64) -> Strip {
        let first = self.place(window.place.offset);
        let step = |count: u64, stride: u64, order: &mut Self| match count {
            0 | 1 => 0,
            _ => order.place(window.place.offset + stride) - first,
        };
        Strip {
            place: Place { region: RegionId::new(0), offset: first },
            head_stride: step(heads, window.head_stride, self),
            token_stride: step(tokens, window.token_stride, self),
            run_bytes: window.run_bytes,
        }
    }

    fn place(&mut self, offset: u64) -> u64 {
        if let Some(place) = self.extents[self.last].place(offset) {
            return place;
        }
        let found = self.extents.iter().enumerate().find_map(|(at, extent)| Some((at, extent.place(offset)?)));
        let (at, place) = found.expect("the extents name every byte of the plan's destination");
        self.last = at;
        place
    }
}

impl PackedExtent {
    fn place(&self, offset: u64) -> Option<u64> {
        let mut rest = offset.checked_sub(self.offset)?;
        let mut place = self.packed;
        for l in self.loops.iter().filter(|l| l.count > 1) {
            let step = (rest / l.stride).min(l.count - 1);
            rest -= step * l.stride;
            place += step * l.packed;
        }
        (rest < self.run_bytes).then_some(place + rest)
    }
}
