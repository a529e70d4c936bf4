//! Where a cache lies in device memory.

use kvferry_protocol::layout::KvLayout;
use kvferry_protocol::{BlockId, RegionId};

use super::element::Element;
use super::error::JobError;
use super::launch::DevicePtr;
use crate::memory::end_of_plane;

/// Where regions lie in a device's memory: [`RegionId`] 0, 1, 2, ... by their place.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct DeviceRegions(Vec<(DevicePtr, u64)>);

/// One layer of a paged cache in device memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DevicePages {
    pub(super) planes: Vec<PagePlane>,
    pub(super) element: Element,
    pub(super) heads: u32,
    pub(super) tokens_per_block: u32,
}

/// One plane of a layer: its first run and the strides to all others, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PagePlane {
    pub(super) base: DevicePtr,
    pub(super) block: u64,
    pub(super) head: u64,
    pub(super) token: u64,
    pub(super) dim: u32,
}

impl DeviceRegions {
    /// Takes the start and the length in bytes of each region.
    #[must_use]
    pub const fn new(regions: Vec<(DevicePtr, u64)>) -> Self {
        Self(regions)
    }

    /// Where a region begins.
    #[must_use]
    pub fn start(&self, index: usize) -> Option<DevicePtr> {
        self.0.get(index).map(|&(start, _)| start)
    }

    pub(super) fn region(&self, region: RegionId) -> Option<(DevicePtr, u64)> {
        self.0.get(region.get() as usize).copied()
    }
}

impl DevicePages {
    /// Finds a layer, counted within this worker, of a cache that lies as `layout` says.
    ///
    /// # Errors
    /// [`JobError::Layer`], [`JobError::RunBytes`], or [`JobError::RegionTooSmall`].
    pub fn new(layout: &KvLayout, element: Element, layer: u16, regions: &DeviceRegions) -> Result<Self, JobError> {
        let shape = layout.shape();
        if layer >= shape.layers {
            return Err(JobError::Layer { layer, layers: shape.layers });
        }
        let mut planes = Vec::with_capacity(2);
        for (index, plane) in layout.planes().iter().enumerate() {
            let run_bytes = plane.run_bytes;
            if !run_bytes.is_multiple_of(element.bytes()) {
                return Err(JobError::RunBytes { plane: index, run_bytes, element });
            }
            let first = layout.place(layer, BlockId::new(0), index, 0, 0);
            let (region, needed) = (first.region, end_of_plane(layout, plane, first.offset));
            let (start, bytes) = regions.region(region).unwrap_or((DevicePtr::new(0), 0));
            if needed > bytes {
                return Err(JobError::RegionTooSmall { region, needed, bytes });
            }
            planes.push(PagePlane {
                base: start.offset(first.offset),
                block: plane.block,
                head: plane.head,
                token: plane.token,
                dim: run_bytes / element.bytes(),
            });
        }
        let (heads, tokens_per_block) = (shape.heads.into(), shape.tokens_per_block);
        Ok(Self { planes, element, heads, tokens_per_block })
    }
}
