//! A KV cache that owns its memory and knows who uses which page.

use std::ops::Range;
use std::sync::Arc;

use kvferry_protocol::layout::{KvLayout, KvShape, LayerBase, LayoutError, LayoutOrder};
use kvferry_protocol::{BlockId, RegionId};

use super::guards::{GuardMode, LayerPages, PageGuards, PageStates};
use super::raw::HostRegion;
use super::view::KvCacheView;
use crate::dtype::KvDtype;
use crate::error::KernelError;

/// How a cache's layers are allocated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Placement {
    /// All layers in region 0.
    OneRegion,
    /// Layer `i` in region `i`, as engines do that allocate layer by layer.
    RegionPerLayer,
}

/// A paged KV cache in host memory: a packed layout, its regions, and the state of every page.
///
/// A handle: clones share the memory, which is freed with the last clone and the last [`PageGuards`]. Pages start as zeros.
/// May be used from any thread; two uses of a page that exclude each other get [`KernelError::PageBusy`].
#[derive(Clone, Debug)]
pub struct HostKvCache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) view: KvCacheView,
    pub(super) states: PageStates,
    regions: Vec<HostRegion>,
}

impl HostKvCache {
    /// Allocates a cache whose pages lie in the given order without padding.
    ///
    /// # Errors
    /// [`KernelError::Layout`] or [`KernelError::RunBytes`] if the shape is not valid, [`KernelError::Map`] if there is not
    /// enough memory.
    pub fn new(shape: KvShape, dtype: KvDtype, order: LayoutOrder, placement: Placement) -> Result<Self, KernelError> {
        Self::made(shape, dtype, order, placement, HostRegion::new)
    }

    /// The same in memory that other processes of this host may map ([`HostRegion::shareable`]).
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn shareable(
        shape: KvShape,
        dtype: KvDtype,
        order: LayoutOrder,
        placement: Placement,
    ) -> Result<Self, KernelError> {
        Self::made(shape, dtype, order, placement, HostRegion::shareable)
    }

    fn made(
        shape: KvShape,
        dtype: KvDtype,
        order: LayoutOrder,
        placement: Placement,
        region: fn(usize) -> Result<HostRegion, KernelError>,
    ) -> Result<Self, KernelError> {
        let (layers, blocks) = (shape.layers, shape.blocks);
        // Proves that the sizes multiply without overflow, whatever the placement.
        let packed = KvLayout::packed(shape.clone(), order).map_err(KernelError::Layout)?;
        let bytes = shape.block_bytes() * u64::from(blocks);
        let bytes = usize::try_from(bytes).map_err(|_| KernelError::Layout(LayoutError::TooLarge))?;
        let layout = match placement {
            Placement::OneRegion => packed,
            Placement::RegionPerLayer => per_layer(shape, order).map_err(KernelError::Layout)?,
        };
        let count = layout.bases().len();
        let regions: Vec<_> = (0..count).map(|_| region(bytes / count)).collect::<Result<_, _>>()?;
        let pointers: Vec<_> = regions.iter().map(|region| (region.as_ptr(), region.len())).collect();
        let view = KvCacheView::checked(layout, dtype, &pointers)?;
        let states = PageStates::new(layers, blocks);
        Ok(Self { inner: Arc::new(Inner { view, states, regions }) })
    }

    /// Where each byte lies.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        self.inner.view.layout()
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> KvDtype {
        self.inner.view.dtype()
    }

    /// The same memory without its guards, for the `_unguarded` kernels. It does not keep the memory mapped.
    #[must_use]
    pub fn view(&self) -> &KvCacheView {
        &self.inner.view
    }

    /// The memory to register with a transport; region `i` of the layout is number `i` here.
    #[must_use]
    pub fn regions(&self) -> &[HostRegion] {
        &self.inner.regions
    }

    /// One region of the layout.
    #[must_use]
    pub fn region(&self, region: RegionId) -> Option<&HostRegion> {
        self.inner.regions.get(region.get() as usize)
    }

    /// Takes the pages of some blocks in some layers (counted within this worker) for reading, beside other readers.
    ///
    /// # Errors
    /// [`KernelError::PageBusy`] if one is being written; then none is taken. Never waits.
    pub fn guard_read(&self, blocks: &[BlockId], layers: Range<u16>) -> Result<PageGuards, KernelError> {
        PageGuards::acquire(Arc::clone(&self.inner), GuardMode::Read, blocks, layers)
    }

    /// Takes the pages of some blocks in some layers (counted within this worker) for writing, alone.
    ///
    /// # Errors
    /// [`KernelError::PageBusy`] if one is being read or written; then none is taken. Never waits.
    pub fn guard_write(&self, blocks: &[BlockId], layers: Range<u16>) -> Result<PageGuards, KernelError> {
        PageGuards::acquire(Arc::clone(&self.inner), GuardMode::Write, blocks, layers)
    }

    /// Takes one layer's pages for one kernel call; a block that is written must stand only once.
    pub(crate) fn guard_layer(
        &self,
        mode: GuardMode,
        layer: u16,
        blocks: impl Iterator<Item = BlockId>,
    ) -> Result<LayerPages<'_>, KernelError> {
        LayerPages::acquire(&self.inner.states, mode, layer, blocks)
    }
}

/// Packs every layer by itself.
fn per_layer(shape: KvShape, order: LayoutOrder) -> Result<KvLayout, LayoutError> {
    let one = KvLayout::packed(KvShape { layers: 1, ..shape.clone() }, order)?;
    let mut planes = one.planes().to_vec();
    planes.iter_mut().for_each(|plane| plane.layer = 0);
    let bases = (0..shape.layers).map(|layer| LayerBase { region: RegionId::new(layer.into()), offset: 0 }).collect();
    KvLayout::new(shape, planes, bases)
}
