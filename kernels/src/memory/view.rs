//! Where each run of a cache lies in this process's memory.
#![expect(unsafe_code, reason = "its constructor takes the caller's word for memory that it did not map")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use kvferry_protocol::layout::{KvLayout, PlaneStrides};
use kvferry_protocol::{BlockId, RegionId};

use super::alias::Aliases;
use super::raw::PageBase;
use super::shape::CacheShape;
use crate::dtype::KvDtype;
use crate::error::KernelError;

/// A KV cache somewhere in this process's memory: a layout, its element type and its regions' addresses.
///
/// Cheap to clone. It checks coordinates but does not know who else uses the pages; [`HostKvCache`](crate::HostKvCache) does.
#[derive(Clone, Debug)]
pub struct KvCacheView {
    layout: Arc<KvLayout>,
    dtype: KvDtype,
    /// `[layer][plane]`.
    bases: Arc<[PageBase]>,
    aliases: Arc<Aliases>,
}

/// One plane of one layer: its first run and the strides to all others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanePages<'a> {
    base: PageBase,
    /// By block; empty if no page is read from elsewhere.
    aliases: &'a [AtomicPtr<u8>],
    block: usize,
    head: usize,
    token: usize,
    /// Elements of one run.
    pub(crate) dim: usize,
}

impl PlanePages<'_> {
    /// Where this cache's own run of (block, head, token) begins. Inside the region if the coordinates are in range.
    #[inline(always)]
    pub(crate) fn run(&self, block: BlockId, head: usize, token: usize) -> *mut u8 {
        self.base.0.wrapping_add(head * self.head + block.get() as usize * self.block + token * self.token)
    }

    /// This cache's first run: of block 0, head 0, token 0.
    #[inline(always)]
    pub(crate) fn first(&self) -> *const u8 {
        self.base.0.cast_const()
    }

    /// Where the first head's run of (block, token) is read: here, or where the page's alias says.
    #[inline(always)]
    pub(crate) fn start(&self, block: BlockId, token: usize) -> *const u8 {
        // Relaxed: who reads the page holds it, or its caller keeps everybody off it; so the alias does not change meanwhile.
        let alias = self.aliases.get(block.get() as usize).map(|page| page.load(Ordering::Relaxed).cast_const());
        match alias.filter(|alias| !alias.is_null()) {
            Some(alias) => alias.wrapping_add(token * self.token),
            None => self.run(block, 0, token).cast_const(),
        }
    }

    /// Bytes from one head to the next.
    #[inline(always)]
    pub(crate) fn head_stride(&self) -> usize {
        self.head
    }

    /// Bytes from one token of a block to the next.
    #[inline(always)]
    pub(crate) fn token_stride(&self) -> usize {
        self.token
    }
}

impl KvCacheView {
    /// Describes memory that an engine owns. `regions[i]` is where region `i` of the layout begins, and its length in bytes.
    ///
    /// # Errors
    /// [`KernelError::RegionTooSmall`] if the layout reaches past a region, [`KernelError::RunBytes`] if a run is no whole
    /// number of elements.
    ///
    /// # Safety
    /// Each region is mapped, readable and writable, for as long as the view or a clone of it is used. Every run that is read
    /// was written or zeroed before.
    pub unsafe fn new(layout: KvLayout, dtype: KvDtype, regions: &[(NonNull<u8>, usize)]) -> Result<Self, KernelError> {
        Self::checked(layout, dtype, regions)
    }

    pub(super) fn checked(
        layout: KvLayout,
        dtype: KvDtype,
        regions: &[(NonNull<u8>, usize)],
    ) -> Result<Self, KernelError> {
        let shape = layout.shape();
        let mut bases = Vec::with_capacity(usize::from(shape.layers) * layout.planes().len());
        for layer in 0..shape.layers {
            for (index, plane) in layout.planes().iter().enumerate() {
                if !(plane.run_bytes as usize).is_multiple_of(dtype.bytes()) {
                    return Err(KernelError::RunBytes { plane: index, run_bytes: plane.run_bytes, dtype });
                }
                let first = layout.place(layer, BlockId::new(0), index, 0, 0);
                let (start, len) = region_of(regions, first.region);
                let needed = end_of_plane(&layout, plane, first.offset);
                match start {
                    Some(start) if needed <= len => {
                        bases.push(PageBase(start.as_ptr().wrapping_add(first.offset as usize)));
                    }
                    _ => return Err(KernelError::RegionTooSmall { region: first.region, needed, len }),
                }
            }
        }
        let aliases = Arc::new(Aliases::new(layout.shape()));
        Ok(Self { layout: Arc::new(layout), dtype, bases: bases.into(), aliases })
    }

    /// Where each byte lies.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> KvDtype {
        self.dtype
    }

    /// Elements of one run of a plane.
    ///
    /// # Panics
    /// If the cache has no such plane.
    #[must_use]
    pub fn dim(&self, plane: usize) -> usize {
        self.shape().dim(plane)
    }

    /// KV heads that this worker holds.
    #[must_use]
    pub fn heads(&self) -> usize {
        self.shape().heads()
    }

    /// What arguments are checked against.
    pub(crate) fn shape(&self) -> CacheShape<'_> {
        CacheShape { layout: &self.layout, element_bytes: self.dtype.bytes() }
    }

    /// Which pages are read from elsewhere.
    pub(crate) fn aliases(&self) -> &Aliases {
        &self.aliases
    }

    /// One plane of one layer; the caller checked both.
    pub(crate) fn plane(&self, layer: u16, plane: usize) -> PlanePages<'_> {
        let strides = &self.layout.planes()[plane];
        PlanePages {
            aliases: self.aliases.plane(layer, plane),
            base: self.bases[usize::from(layer) * self.layout.planes().len() + plane],
            block: strides.block as usize,
            head: strides.head as usize,
            token: strides.token as usize,
            dim: self.dim(plane),
        }
    }
}

fn region_of(regions: &[(NonNull<u8>, usize)], region: RegionId) -> (Option<NonNull<u8>>, u64) {
    match regions.get(region.get() as usize) {
        Some(&(start, len)) => (Some(start), len as u64),
        None => (None, 0),
    }
}

/// One past the last byte of a plane of one layer whose first run is at `first`; `u64::MAX` if that does not fit 64 bits.
pub(crate) fn end_of_plane(layout: &KvLayout, plane: &PlaneStrides, first: u64) -> u64 {
    let shape = layout.shape();
    let steps = [
        (u64::from(shape.blocks), plane.block),
        (u64::from(shape.heads), plane.head),
        (u64::from(shape.tokens_per_block), plane.token),
    ];
    let start = first.saturating_add(plane.run_bytes.into());
    steps.into_iter().fold(start, |end, (count, stride)| end.saturating_add((count - 1).saturating_mul(stride)))
}
