//! Packing for the wire: a plan's source bytes, one after the other, in the order in which its extents name their places.

use kvferry_protocol::RegionId;
use kvferry_protocol::digest::Digest;
use kvferry_protocol::layout::{CopyPlan, Place, Side};

use super::raw::RegionTable;
use super::{CopyError, check, digest_side, raw};

/// Packs a plan's source bytes into `out`, in the order of [`CopyPlan::source_pages`], and digests them.
///
/// `out` takes exactly [`CopyPlan::bytes`].
///
/// # Errors
/// [`CopyError::Region`] or [`CopyError::Bounds`], before anything is moved; [`CopyError::Length`] if `out` has another length.
pub fn pack_with_digest(plan: &CopyPlan, src: &RegionTable, out: &mut [u8]) -> Result<Digest, CopyError> {
    if plan.bytes() != out.len() as u64 {
        return Err(CopyError::Length { expected: plan.bytes(), found: out.len() });
    }
    check(plan, Side::Source, src)?;
    let digest = digest_side(plan, Side::Source, src)?;
    let slab = raw::table_of(out);
    let mut at = Place { region: RegionId::new(0), offset: 0 };
    for pages in plan.source_pages() {
        for &base in &pages.bases {
            for piece in &pages.pieces {
                piece.for_each_run(base, |offset| {
                    raw::copy_run(src, Place { region: piece.region, offset }, &slab, at, piece.run_bytes);
                    at.offset += piece.run_bytes;
                });
            }
        }
    }
    Ok(digest)
}
