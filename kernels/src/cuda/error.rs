//! Why a job for a device was refused. Everything is checked before anything is launched.

use kvferry_protocol::RegionId;

use super::element::Element;

/// What a job refused, and how to mend it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// No such layer.
    #[error("layer {layer} is out of range: the cache has {layers} layers")]
    Layer {
        /// The layer asked for.
        layer: u16,
        /// Layers in the cache.
        layers: u16,
    },
    /// A layout names memory that a region does not have.
    #[error("the layout reaches byte {needed} of region {region}, which has {bytes} bytes")]
    RegionTooSmall {
        /// The region.
        region: RegionId,
        /// One past the last byte that the layout names.
        needed: u64,
        /// The region's length in bytes; 0 where it was not given at all.
        bytes: u64,
    },
    /// A run is not a whole number of elements.
    #[error("runs of plane {plane} have {run_bytes} bytes, which is no whole number of {element} elements")]
    RunBytes {
        /// The plane's index.
        plane: usize,
        /// Bytes of one run.
        run_bytes: u32,
        /// The element type.
        element: Element,
    },
    /// The kernels do not read or write this type here.
    #[error("{what} cannot be {element}; use {mend}")]
    Element {
        /// What has the type.
        what: &'static str,
        /// The type.
        element: Element,
        /// The types that it may have.
        mend: &'static str,
    },
    /// The cache has another number of planes than the job needs.
    #[error("the cache has {planes} plane(s): {mend}")]
    Planes {
        /// Planes of the cache.
        planes: usize,
        /// What to do instead.
        mend: &'static str,
    },
    /// Query heads do not share KV heads evenly.
    #[error("{q_heads} query heads cannot share {kv_heads} KV heads evenly; use a multiple of them")]
    Heads {
        /// Query heads asked for.
        q_heads: u32,
        /// KV heads of the cache.
        kv_heads: u32,
    },
    /// A head of this size is not supported.
    #[error(
        "head dimension {dim} of {element} is not supported: it must be a multiple of 16 bytes, 16 to 256, and K's and V's alike"
    )]
    HeadDim {
        /// The head dimension.
        dim: u32,
        /// The element type.
        element: Element,
    },
    /// An address or a stride does not suit 16-byte loads.
    #[error("{what} {value:#x} is no multiple of 16; pad pages so that every run begins at one")]
    Unaligned {
        /// The address or stride.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// A number that is too large for one launch, or has no meaning.
    #[error("{what} = {value}: {mend}")]
    Number {
        /// What has the number.
        what: &'static str,
        /// The number.
        value: String,
        /// What to write instead.
        mend: &'static str,
    },
}
