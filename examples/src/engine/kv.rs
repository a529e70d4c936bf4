//! One rank's KV, and the attention over it, wherever it lies.

use std::sync::Arc;

use kvferry::pd::KvCache;
use kvferry_kernels::device::{Device, DeviceError, DeviceKvCache, RowDesk};
use kvferry_kernels::{
    AttentionBatch, AttentionOptions, HostKvCache, KernelError, Placement, Slot, Threads, paged_attention, store_kv,
};
use kvferry_protocol::layout::KvShape;

use super::runner::CacheConfig;

/// Why KV was not stored or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A kernel on the host refused it.
    #[error(transparent)]
    Host(#[from] KernelError),
    /// The device did.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// A kernel's name and its refusal.
pub(super) type Refused = (&'static str, KvError);

/// A paged cache with its kernels.
pub(super) enum Kv {
    Host(HostKvCache),
    Device(RowDesk),
}

impl Kv {
    /// Allocates a cache, in a device's memory if there is a device.
    pub(super) fn new(shape: KvShape, config: CacheConfig, device: Option<&Arc<dyn Device>>) -> Result<Self, KvError> {
        let CacheConfig { order, dtype, shareable, .. } = config;
        let Some(device) = device else {
            let made = if shareable { HostKvCache::shareable } else { HostKvCache::new };
            return Ok(Self::Host(made(shape, dtype, order, Placement::OneRegion)?));
        };
        let stream = device.stream("engine")?;
        let cache = DeviceKvCache::allocate(Arc::clone(device), stream, shape, dtype.into(), order)?;
        Ok(Self::Device(RowDesk::new(cache)?))
    }

    /// The cache as a connector takes it; it shares the memory.
    pub(super) fn cache(&self) -> KvCache {
        match self {
            Self::Host(cache) => cache.clone().into(),
            Self::Device(desk) => desk.cache().clone().into(),
        }
    }

    /// As [`store_kv`].
    pub(super) fn store(&mut self, layer: u16, slots: &[Slot], keys: &[f32], values: &[f32]) -> Result<(), Refused> {
        let stored = match self {
            Self::Host(cache) => store_kv(cache, layer, slots, keys, Some(values)).map_err(KvError::from),
            Self::Device(desk) => desk.store(layer, slots, keys, Some(values)).map_err(KvError::from),
        };
        stored.map_err(|error| ("store_kv", error))
    }

    /// As [`paged_attention`].
    pub(super) fn attend(
        &mut self,
        layer: u16,
        batch: &AttentionBatch<'_>,
        options: &AttentionOptions<'_>,
        threads: &Threads,
        out: &mut [f32],
    ) -> Result<(), Refused> {
        let attended = match self {
            Self::Host(cache) => paged_attention(cache, layer, batch, options, threads, out).map_err(KvError::from),
            Self::Device(desk) => desk.attend(layer, batch, options, out).map_err(KvError::from),
        };
        attended.map_err(|error| ("paged_attention", error))
    }
}
