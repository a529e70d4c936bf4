//! Why a kernel refused its arguments. Everything is checked before the first byte moves.

use kvferry_protocol::layout::LayoutError;
use kvferry_protocol::{BlockId, RegionId};

use crate::dtype::KvDtype;

/// Who holds a page that somebody else asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Held {
    /// At least one reader.
    Reader,
    /// The one writer.
    Writer,
}

/// What a kernel refused, on which page, and how to mend it. Nothing was read, written or held when one is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The operating system gave no memory.
    #[error("mapping {bytes} bytes of host memory failed; lower the number of blocks or free memory")]
    Map {
        /// The size that was asked for.
        bytes: usize,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A cache cannot have this shape.
    #[error("KV cache: no layout for this shape")]
    Layout(#[source] LayoutError),
    /// A run is not a whole number of elements.
    #[error("KV cache: runs of plane {plane} have {run_bytes} bytes, which is no whole number of {dtype} elements")]
    RunBytes {
        /// The plane's index.
        plane: usize,
        /// Bytes of one run.
        run_bytes: u32,
        /// The element type.
        dtype: KvDtype,
    },
    /// A layout names memory that a region does not have.
    #[error("KV cache: the layout reaches byte {needed} of region {region}, which has {len} bytes")]
    RegionTooSmall {
        /// The region.
        region: RegionId,
        /// One past the last byte that the layout names.
        needed: u64,
        /// The region's length in bytes; 0 where it was not given at all.
        len: u64,
    },
    /// A page is held in a way that excludes this use.
    #[error("page (layer {layer}, block {block}) is held by a {held:?}; release that guard first")]
    PageBusy {
        /// The layer, counted within this worker.
        layer: u16,
        /// The block.
        block: BlockId,
        /// Who holds it.
        held: Held,
    },
    /// A page is read from another place than this cache's memory, where nobody may write and only attention reads.
    #[error("page (layer {layer}, block {block}) is read where another process has it; settle the block first")]
    PageAliased {
        /// The layer, counted within this worker.
        layer: u16,
        /// The block.
        block: BlockId,
    },
    /// An alias for a page that is not held for writing, or with another number of planes.
    #[error("page (layer {layer}, block {block}) cannot be read from elsewhere: {problem}")]
    Alias {
        /// The layer, counted within this worker.
        layer: u16,
        /// The block.
        block: BlockId,
        /// Why.
        problem: &'static str,
    },
    /// No such block.
    #[error("block {block} is out of range: the cache has {blocks} blocks")]
    BlockOutOfRange {
        /// The block asked for.
        block: BlockId,
        /// Blocks in the cache.
        blocks: u32,
    },
    /// No such layer.
    #[error("layer {layer} is out of range: the cache has {layers} layers")]
    LayerOutOfRange {
        /// The layer asked for.
        layer: u16,
        /// Layers in the cache.
        layers: u16,
    },
    /// No such slot.
    #[error("slot {slot} of token {token} is out of range: the cache has {slots} slots")]
    SlotOutOfRange {
        /// The token's row in the input.
        token: usize,
        /// The slot asked for.
        slot: u64,
        /// Slots in the cache.
        slots: u64,
    },
    /// A slice has another length than its shape says.
    #[error("{what}: {found} elements, expected {expected}")]
    Length {
        /// Which slice, with its shape.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length that fits the cache and the other arguments.
        expected: usize,
    },
    /// The cache has another number of planes than the call needs.
    #[error("the cache has {planes} plane(s): {mend}")]
    Planes {
        /// Planes of the cache.
        planes: usize,
        /// What to do instead.
        mend: &'static str,
    },
    /// Query heads do not share KV heads evenly.
    #[error("{q_heads} query heads cannot share {kv_heads} KV heads evenly; use a multiple of them, at most 65536")]
    Heads {
        /// Query heads asked for.
        q_heads: usize,
        /// KV heads of the cache.
        kv_heads: usize,
    },
    /// A head is larger than the kernels' scratch space.
    #[error("head dimension {dim} is not in 1..={max}")]
    HeadDim {
        /// The head dimension.
        dim: usize,
        /// The largest supported.
        max: usize,
    },
    /// A sequence contradicts itself or its batch.
    #[error("sequence {sequence}: {problem}")]
    Sequence {
        /// Its index in the batch.
        sequence: usize,
        /// What is wrong, and what would be right.
        problem: String,
    },
    /// An option has no meaning.
    #[error("attention option {option} = {value}: {mend}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: String,
        /// What to write instead.
        mend: &'static str,
    },
    /// The worker threads could not be started.
    #[error("starting {threads} attention threads failed: {reason}")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// The system's answer.
        reason: String,
    },
}
