//! A cache in a device's memory: how its bytes get to the wire and from there.
//!
//! Out: the engine's event, gather into a lane's slab on the device (with the digest), one copy to a pinned slab, post. In: a grant's
//! window lies over *staging*, pinned host memory in frames of a block each; what landed there is digested as on any page, and once
//! its digest matched a mover *uploads* it: copies to a lane's slab, scatter to the pages, an event. The peer sees a window like any
//! other, and does not know that there is a device.
//!
//! | who | does | waits for |
//! |---|---|---|
//! | the engine's thread | marks its stream with events, makes it wait for those of uploads | nothing |
//! | driver | hands out frames and slabs | nothing |
//! | a mover, with a lane of its own | queues a write's or an upload's work | that work |
//!
//! A frame is held by the grant whose window lies over it, until that is revoked, and by each digest and upload of it, so it has a
//! new owner only when no byte can land there and no copy reads it. A load ends when its last upload has run, so the engine gets
//! its pages back when nothing writes them.

mod land;
mod ship;
mod staging;

use std::sync::Arc;

use kvferry_kernels::device::{DeviceKvCache, Event, Lane};
use kvferry_protocol::layout::KvShape;

pub(super) use land::Upload;
pub(super) use ship::Shipment;
pub(super) use staging::{Staged, Staging};

use crate::config::Limits;
use crate::error::ConnectorError;

/// What must be passed before pages may be used; nothing, where they may be at once.
pub(super) type After = Option<Arc<dyn Event>>;

/// A lane for each mover.
pub(super) fn lanes(cache: &DeviceKvCache, limits: &Limits) -> Result<Vec<Lane>, ConnectorError> {
    let shape = cache.layout().shape();
    let bytes = usize::try_from(limits.chunk_bytes.max(shape.block_bytes())).unwrap_or(usize::MAX);
    let tables = table_bytes(shape, bytes);
    let lane = |_| Lane::new(cache.device(), bytes, tables).map_err(|error| refused_by_device(&error));
    (0..limits.movers.get()).map(lane).collect()
}

/// What a job's tables take at most: where each plane of each layer begins on both sides, and a span for each token, as between
/// blocks of one token.
fn table_bytes(shape: &KvShape, slab_bytes: usize) -> usize {
    let cell: usize = shape.run_bytes.iter().map(|&bytes| bytes as usize).sum();
    let bases = 2 * usize::from(shape.layers) * shape.run_bytes.len();
    bases * size_of::<u64>() + slab_bytes / cell.max(1) * SPAN_BYTES
}

/// A span of a copy job's tables: six numbers of 32 bits.
const SPAN_BYTES: usize = 24;

/// A device has not what a worker needs of it.
pub(super) fn refused_by_device(error: &dyn std::error::Error) -> ConnectorError {
    let mend = "lower slab_pool_bytes, staging_bytes, chunk_bytes or movers if memory is short";
    ConnectorError::Caches { problem: format!("{}: {mend}", in_full(error)) }
}

/// An error with its causes.
pub(super) fn in_full(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
