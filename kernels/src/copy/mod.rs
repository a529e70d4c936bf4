//! Gather, scatter and digest on the CPU: a [`CopyPlan`] followed over raw regions.
//!
//! All bounds are checked before the first byte moves. Gathering is a plan whose destination is packed, scattering one whose
//! source is; nothing here knows the difference.
#![deny(unsafe_code)]

mod raw;

use kvferry_protocol::RegionId;
use kvferry_protocol::digest::{Digest, HeadKey};
use kvferry_protocol::layout::{CacheView, CopyPlan, PageCopy, Place, PlanError, Selection, Side, plan};

pub use raw::RegionTable;

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
    plan.for_each_run(|from, to, bytes| copy_run(src, from, dst, to, bytes));
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
    let mut digest = Digest::ZERO;
    plan.for_each_page(|page| {
        page.for_each_run(|from, to, bytes| copy_run(src, from, dst, to, bytes));
        digest += page_digest(&page, Side::Destination, dst);
    });
    Ok(digest)
}

/// Digests a selection of a view's bytes where they lie.
///
/// # Errors
/// [`CopyError::Plan`] if the view does not hold the selection; [`CopyError::Region`] or [`CopyError::Bounds`], before anything
/// is read.
pub fn digest(view: &CacheView<'_>, selection: &Selection, regions: &RegionTable) -> Result<Digest, CopyError> {
    let plan = plan(view, view, selection).map_err(|source| CopyError::Plan { source })?;
    digest_side(&plan, Side::Source, regions)
}

/// Digests the bytes of one side of a plan where they lie: of what was read, or of what arrived.
///
/// # Errors
/// [`CopyError::Region`] or [`CopyError::Bounds`], before anything is read.
pub fn digest_side(plan: &CopyPlan, side: Side, regions: &RegionTable) -> Result<Digest, CopyError> {
    check(plan, side, regions)?;
    let mut digest = Digest::ZERO;
    plan.for_each_page(|page| digest += page_digest(&page, side, regions));
    Ok(digest)
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

#[inline(always)]
#[allow(unsafe_code, reason = "the bounds of all runs were checked")]
fn copy_run(src: &RegionTable, from: Place, dst: &RegionTable, to: Place, bytes: u64) {
    // SAFETY: `check` compared the plan's highest byte of each region with the region's length, on both sides.
    unsafe { raw::copy_run((src, from), (dst, to), bytes) };
}

/// The digest of one layer of one span.
#[allow(unsafe_code, reason = "the bounds of all runs were checked")]
fn page_digest(page: &PageCopy<'_>, side: Side, regions: &RegionTable) -> Digest {
    let mut digest = Digest::ZERO;
    for plane in 0..page.planes() {
        let strip = page.strip(plane, side);
        for (h, head) in page.heads().enumerate() {
            let key = HeadKey::new(page.layer(), plane as u8, head);
            let mut offset = strip.place.offset + h as u64 * strip.head_stride;
            for token in page.tokens() {
                let at = Place { region: strip.place.region, offset };
                // SAFETY: `check` compared the plan's highest byte of each region with the region's length on this side, and a
                // page's strips are the bytes of the plan's runs.
                digest.add_run(unsafe { raw::hash_run(regions, at, strip.run_bytes, key.run(token)) });
                offset += strip.token_stride;
            }
        }
    }
    digest
}
