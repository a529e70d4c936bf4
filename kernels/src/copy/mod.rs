//! Gather, scatter and digest on the CPU: a [`CopyPlan`] followed over raw regions.
//!
//! All bounds are checked before the first byte moves. Gathering is a plan whose destination is packed, scattering one whose
//! source is; nothing here knows the difference.

mod hash;
mod pack;
mod raw;
mod window;

use std::ops::Range;

use kvferry_protocol::digest::{Digest, HeadKey};
use kvferry_protocol::layout::{CacheView, CopyPlan, PageCopy, PlanError, Selection, Side, Strip, plan_in_place};
use kvferry_protocol::{LayerId, RegionId};

pub use pack::pack_with_digest;
pub use raw::RegionTable;
pub use window::WindowDigests;

/// Why a copy was refused; nothing was moved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CopyError {
    /// The plan names a region that the table has not.
    #[error("copy: the {side} has no {region}th region; register it before copying")]
    Region {
        /// Which side.
        side: Side,
        /// The region.
        region: RegionId,
    },
    /// The plan touches bytes past a region's end.
    #[error("copy: region {region} of the {side} has {bytes} bytes, but the plan touches bytes up to {end}")]
    Bounds {
        /// Which side.
        side: Side,
        /// The region.
        region: RegionId,
        /// The region's length in bytes.
        bytes: usize,
        /// One past the last byte that the plan touches.
        end: u64,
    },
    /// A packed buffer of another length than the plan's bytes.
    #[error("copy: the plan packs {expected} bytes, but the buffer has {found}")]
    Length {
        /// Bytes of the plan.
        expected: u64,
        /// Bytes of the buffer.
        found: usize,
    },
    /// More pieces of work than a launch can number.
    #[error("copy: a plan of {bytes} bytes has more pieces than one launch takes; copy fewer layers at a time")]
    TooLarge {
        /// Bytes of the plan.
        bytes: u64,
    },
    /// A view does not hold what is to be digested.
    #[error("digest: the view does not hold the selection")]
    Plan {
        /// Why not.
        #[source]
        source: PlanError,
    },
}

/// Copies all bytes of a plan. The order of runs is not promised, so the two sides should share no bytes.
///
/// # Errors
/// [`CopyError::Region`] or [`CopyError::Bounds`], before anything is moved.
pub fn copy(plan: &CopyPlan, src: &RegionTable, dst: &RegionTable) -> Result<(), CopyError> {
    check(plan, Side::Source, src)?;
    check(plan, Side::Destination, dst)?;
    plan.for_each_run(|from, to, bytes| raw::copy_run(src, from, dst, to, bytes));
    Ok(())
}

/// Copies all bytes of a plan and digests them as they arrive: each page is hashed at the destination while it is still in the
/// processor's cache, so the digest is of what was stored, not of what a second read of the source would see.
///
/// # Errors
/// [`CopyError::Region`] or [`CopyError::Bounds`], before anything is moved.
pub fn gather_with_digest(plan: &CopyPlan, src: &RegionTable, dst: &RegionTable) -> Result<Digest, CopyError> {
    check(plan, Side::Source, src)?;
    check(plan, Side::Destination, dst)?;
    let (mut digest, mut keys) = (Digest::ZERO, Vec::new());
    plan.for_each_page(|page| {
        page.for_each_run(|from, to, bytes| raw::copy_run(src, from, dst, to, bytes));
        digest += page_digest(&page, Side::Destination, dst, &mut keys);
    });
    Ok(digest)
}

/// Digests a selection of a view's bytes where they lie.
///
/// # Errors
/// [`CopyError::Plan`] if the view does not hold the selection; [`CopyError::Region`] or [`CopyError::Bounds`], before anything
/// is read.
pub fn digest(view: &CacheView<'_>, selection: &Selection, regions: &RegionTable) -> Result<Digest, CopyError> {
    let plan = plan_in_place(view, selection).map_err(|source| CopyError::Plan { source })?;
    digest_side(&plan, Side::Source, regions)
}

/// Digests the bytes of one side of a plan where they lie: of what was read, or of what arrived.
///
/// # Errors
/// [`CopyError::Region`] or [`CopyError::Bounds`], before anything is read.
pub fn digest_side(plan: &CopyPlan, side: Side, regions: &RegionTable) -> Result<Digest, CopyError> {
    check(plan, side, regions)?;
    let (mut digest, mut keys) = (Digest::ZERO, Vec::new());
    plan.for_each_page(|page| digest += page_digest(&page, side, regions, &mut keys));
    Ok(digest)
}

/// Digests one plane of a page where it lies: the runs of some heads and tokens, of which `strip` names the first and the strides.
///
/// `layer` and `heads` are the model's, and `tokens` their places in the sequence.
///
/// # Errors
/// [`CopyError::Region`] or [`CopyError::Bounds`], before anything is read.
pub fn digest_strip(
    strip: &Strip,
    (layer, plane): (LayerId, u8),
    heads: Range<u16>,
    tokens: Range<u32>,
    regions: &RegionTable,
) -> Result<Digest, CopyError> {
    let (side, region) = (Side::Source, strip.place.region);
    let bytes = regions.region_bytes(region).ok_or(CopyError::Region { side, region })?;
    let steps = |count: usize, stride: u64| (count.saturating_sub(1) as u64).saturating_mul(stride);
    let end = [steps(heads.len(), strip.head_stride), steps(tokens.len(), strip.token_stride), strip.run_bytes.into()]
        .into_iter()
        .fold(strip.place.offset, u64::saturating_add);
    if end > bytes as u64 {
        return Err(CopyError::Bounds { side, region, bytes, end });
    }
    let keys: Vec<_> = heads.map(|head| HeadKey::new(layer, plane, head)).collect();
    Ok(raw::strip_digest(regions, strip, &keys, tokens))
}

fn check(plan: &CopyPlan, side: Side, regions: &RegionTable) -> Result<(), CopyError> {
    for (region, end) in plan.ends(side) {
        let bytes = regions.region_bytes(region).ok_or(CopyError::Region { side, region })?;
        if end > bytes as u64 {
            return Err(CopyError::Bounds { side, region, bytes, end });
        }
    }
    Ok(())
}

fn page_digest(page: &PageCopy<'_>, side: Side, regions: &RegionTable, keys: &mut Vec<HeadKey>) -> Digest {
    let mut digest = Digest::ZERO;
    for plane in 0..page.planes() {
        strip_keys(page, plane, keys);
        digest += raw::strip_digest(regions, &page.strip(plane, side), keys, page.tokens());
    }
    digest
}

/// The keys of a page's heads in one plane.
fn strip_keys(page: &PageCopy<'_>, plane: usize, keys: &mut Vec<HeadKey>) {
    keys.clear();
    keys.extend(page.heads().map(|head| HeadKey::new(page.layer(), plane as u8, head)));
}

#[cfg(test)]
mod tests;
