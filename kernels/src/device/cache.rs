//! A KV cache in a device's memory, and the stream on which its engine computes.
#![expect(unsafe_code, reason = "an engine vouches for device memory that it allocated")]

use std::fmt;
use std::sync::Arc;

use kvferry_protocol::layout::{KvLayout, KvShape, LayoutOrder};

use super::{Device, DeviceError, DeviceMemory, Stream};
use crate::cuda::{DevicePages, DeviceRegions, Element, JobError};

/// A paged KV cache in device memory; clones share it.
///
/// It knows the stream on which the engine's kernels use the pages: whoever else reads or writes them queues its work behind events
/// of that stream, and makes the stream wait for events of its own.
#[derive(Clone)]
pub struct DeviceKvCache {
    inner: Arc<Inner>,
}

struct Inner {
    device: Arc<dyn Device>,
    stream: Arc<dyn Stream>,
    layout: KvLayout,
    element: Element,
    regions: DeviceRegions,
    /// Empty where the engine owns the memory.
    _memory: Vec<DeviceMemory>,
}

impl DeviceKvCache {
    /// Allocates a cache whose pages lie in the given order, in one region, without padding. Its bytes are undefined.
    ///
    /// # Errors
    /// [`DeviceError::Layout`] or [`DeviceError::Cache`] if the shape is not valid; the device's if there is not enough memory.
    pub fn allocate(
        device: Arc<dyn Device>,
        stream: Arc<dyn Stream>,
        shape: KvShape,
        element: Element,
        order: LayoutOrder,
    ) -> Result<Self, DeviceError> {
        let bytes = shape.block_bytes() * u64::from(shape.blocks);
        let layout = KvLayout::packed(shape, order).map_err(DeviceError::Layout)?;
        let memory = device.allocate(usize::try_from(bytes).unwrap_or(usize::MAX))?;
        let regions = DeviceRegions::new(vec![(memory.ptr(), memory.bytes() as u64)]);
        Self::checked(device, stream, layout, element, regions, vec![memory])
    }

    /// Describes an engine's memory: `regions` are those of the layout, in their order.
    ///
    /// # Errors
    /// [`DeviceError::Cache`] if the layout reaches past a region, or a run is no whole number of elements.
    ///
    /// # Safety
    /// - The regions are allocated in `device`'s memory and stay so until every clone is dropped, the one among them that was given
    ///   to a worker.
    /// - The engine uses the pages by work that it queues on `stream`, and by nothing else. (A load's pages are written, and a
    ///   save's are read, by work that is ordered behind and before events of that stream.)
    pub unsafe fn new(
        device: Arc<dyn Device>,
        stream: Arc<dyn Stream>,
        layout: KvLayout,
        element: Element,
        regions: DeviceRegions,
    ) -> Result<Self, DeviceError> {
        Self::checked(device, stream, layout, element, regions, Vec::new())
    }

    fn checked(
        device: Arc<dyn Device>,
        stream: Arc<dyn Stream>,
        layout: KvLayout,
        element: Element,
        regions: DeviceRegions,
        memory: Vec<DeviceMemory>,
    ) -> Result<Self, DeviceError> {
        for layer in 0..layout.shape().layers {
            DevicePages::new(&layout, element, layer, &regions).map_err(DeviceError::Cache)?;
        }
        Ok(Self { inner: Arc::new(Inner { device, stream, layout, element, regions, _memory: memory }) })
    }

    /// Where each byte lies.
    #[must_use]
    pub fn layout(&self) -> &KvLayout {
        &self.inner.layout
    }

    /// The element type.
    #[must_use]
    pub fn element(&self) -> Element {
        self.inner.element
    }

    /// Where the layout's regions begin, and their lengths.
    #[must_use]
    pub fn regions(&self) -> &DeviceRegions {
        &self.inner.regions
    }

    /// The device whose memory it is.
    #[must_use]
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.inner.device
    }

    /// The stream on which the engine uses the pages.
    #[must_use]
    pub fn stream(&self) -> &Arc<dyn Stream> {
        &self.inner.stream
    }

    /// One layer for a store or attention.
    ///
    /// # Errors
    /// [`JobError::Layer`].
    pub fn pages(&self, layer: u16) -> Result<DevicePages, JobError> {
        DevicePages::new(&self.inner.layout, self.inner.element, layer, &self.inner.regions)
    }
}

impl fmt::Debug for DeviceKvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { device, layout, element, .. } = &*self.inner;
        f.debug_struct("DeviceKvCache")
            .field("device", &device.name())
            .field("shape", layout.shape())
            .field("order", &layout.order())
            .field("element", element)
            .finish_non_exhaustive()
    }
}
