//! Attention of new tokens over a paged cache, on a device: `kernels/cuda/attention.cu`.

use std::num::NonZeroU32;

use super::element::Element;
use super::error::JobError;
use super::launch::{Argument, DevicePtr, Geometry, Kernel, Launcher};
use super::pages::{DevicePages, PagePlane};

/// New tokens of some sequences, a row each, in device memory.
///
/// In a decode step each sequence has one row. A chunk of a prompt is as many rows of one sequence, whose lengths rise by one; they
/// get the bits that decode steps would give. Each row reads its whole context, so this is no fast way to compute a long prompt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DecodeBatch {
    /// `[rows, q_heads, dim]`.
    pub queries: DevicePtr,
    /// The same, for the result; of a row of length 0 it is 0.
    pub out: DevicePtr,
    /// The type of both: f32, f16 or bf16.
    pub element: Element,
    /// `u32 [sequences, table_stride]`: token `i` of a sequence lies in block `i / tokens_per_block` of its row. Blocks that a
    /// window has left behind are not read.
    pub tables: DevicePtr,
    /// Entries of a row of `tables`.
    pub table_stride: u32,
    /// `u32 [rows]`: which row of `tables` is a row's; if `None`, the one of its own number.
    pub sequences: Option<DevicePtr>,
    /// `u32 [rows]`: tokens that a row may see, its own among them.
    pub lengths: DevicePtr,
    /// The largest of them, or more: it decides how many blocks are launched.
    pub longest: u32,
    /// How many rows.
    pub rows: u32,
    /// Query heads; head `h` reads KV head `h / (q_heads / kv_heads)`.
    pub q_heads: u32,
}

/// What the model asks of attention.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct DecodeOptions {
    /// What scores are multiplied by, usually `1 / sqrt(dim)`.
    pub scale: f32,
    /// How many positions a token sees, its own among them; all before it if `None`.
    pub window: Option<NonZeroU32>,
    /// `f32 [q_heads]`: a logit that joins each head's softmax and has no value.
    pub sinks: Option<DevicePtr>,
    /// What stored keys and values are multiplied by: the scales that they were stored with.
    pub kv_scales: [f32; 2],
}

/// Decode attention, ready to be launched: a kernel for segments of the context, and one that merges them.
///
/// A row's bits depend on its query, the keys and values that it sees and the options: not on the batch, the block size or the
/// layout.
#[derive(Clone, Debug)]
pub struct DecodeJob {
    params: DecodeParams,
    kernel: &'static str,
    geometry: Geometry,
    rows: u32,
}

/// `PageStrides` of attention.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PageStrides {
    block: u64,
    head: u64,
    token: u64,
}

/// `DecodeParams` of attention.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct DecodeParams {
    queries: u64,
    out: u64,
    keys: u64,
    values: u64,
    tables: u64,
    lengths: u64,
    sequences: u64,
    partials: u64,
    sinks: u64,
    key: PageStrides,
    value: PageStrides,
    table_stride: u32,
    tokens_per_block: u32,
    dim: u32,
    group: u32,
    q_heads: u32,
    segments: u32,
    window: u32,
    element: u32,
    scale: f32,
    value_scale: f32,
}

impl DecodeOptions {
    /// Without window, sinks or scales of the cache.
    #[must_use]
    pub const fn causal(scale: f32) -> Self {
        Self { scale, window: None, sinks: None, kv_scales: [1.0; 2] }
    }
}

impl DecodeJob {
    /// Prepares a batch over one layer.
    ///
    /// # Errors
    /// [`JobError`] if the cache's type, head dimension or alignment is not supported, query heads do not share KV heads evenly,
    /// or a number does not fit a launch.
    pub fn new(pages: &DevicePages, batch: &DecodeBatch, options: &DecodeOptions) -> Result<Self, JobError> {
        let &[key, value] = pages.planes.as_slice() else {
            return Err(JobError::Planes { planes: pages.planes.len(), mend: "decode reads K and V" });
        };
        let (q_heads, kv_heads) = (batch.q_heads, pages.heads);
        if q_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
            return Err(JobError::Heads { q_heads, kv_heads });
        }
        let Some(kind) = CACHES.iter().position(|&known| known == pages.element) else {
            return Err(JobError::Element { what: "the cache", element: pages.element, mend: "f16, bf16 or e4m3" });
        };
        if !matches!(batch.element, Element::F32 | Element::F16 | Element::Bf16) {
            return Err(JobError::Element { what: "queries", element: batch.element, mend: "f32, f16 or bf16" });
        }
        let (dim, bytes) = (key.dim, pages.element.bytes());
        if dim != value.dim || dim > MAX_DIM || !(dim * bytes).is_multiple_of(16) {
            return Err(JobError::HeadDim { dim, element: pages.element });
        }
        check_aligned(&key)?;
        check_aligned(&value)?;
        let group = q_heads / kv_heads;
        let heads = match group {
            1 => 0,
            2..=4 => 1,
            _ => 2,
        };
        let (chunks, segments) = (group.div_ceil(HEADS[heads]), batch.longest.div_ceil(SEGMENT).max(1));
        let most = 65_535;
        for (what, value) in [("KV heads x query heads", kv_heads.saturating_mul(chunks)), ("rows", batch.rows)] {
            if value > most {
                let mend = "a launch takes 65535; split the batch";
                return Err(JobError::Number { what, value: value.to_string(), mend });
            }
        }
        let strides = |of: &PagePlane| PageStrides { block: of.block, head: of.head, token: of.token };
        let params = DecodeParams {
            queries: batch.queries.get(),
            out: batch.out.get(),
            keys: key.base.get(),
            values: value.base.get(),
            tables: batch.tables.get(),
            lengths: batch.lengths.get(),
            sequences: batch.sequences.map_or(0, DevicePtr::get),
            partials: 0,
            sinks: options.sinks.map_or(0, DevicePtr::get),
            key: strides(&key),
            value: strides(&value),
            table_stride: batch.table_stride,
            tokens_per_block: pages.tokens_per_block,
            dim,
            group,
            q_heads,
            segments,
            window: options.window.map_or(u32::MAX, NonZeroU32::get),
            element: batch.element as u32,
            scale: options.scale * options.kv_scales[0],
            value_scale: options.kv_scales[1],
        };
        let geometry = Geometry {
            blocks: [segments, kv_heads * chunks, batch.rows],
            threads: [WARPS * 32, 1, 1],
            shared_bytes: shared_bytes(dim, bytes, HEADS[heads]),
        };
        let columns = (dim.div_ceil(64) - 1) as usize;
        Ok(Self { params, kernel: KERNELS[kind][heads][columns], geometry, rows: batch.rows })
    }

    /// Bytes of device memory that the job needs while it runs; what they hold at first does not matter.
    #[must_use]
    pub fn workspace_bytes(&self) -> u64 {
        let rows = u64::from(self.rows) * u64::from(self.params.q_heads) * u64::from(self.params.segments);
        rows * u64::from(self.params.dim + 2) * 4
    }

    /// Launches the job.
    ///
    /// # Errors
    /// The launcher's.
    ///
    /// # Safety
    /// The batch, the pages and the sinks are what the caller said, no row is longer than `longest`, the blocks that a
    /// row sees are in the cache, and [`DecodeJob::workspace_bytes`] are allocated at `workspace`, aligned to 16. Until the
    /// queue is past the launch nobody writes what is read, and nobody else uses the workspace and the output.
    #[expect(unsafe_code, reason = "the kernels follow addresses that the caller vouches for")]
    pub unsafe fn launch<L: Launcher + ?Sized>(&self, on: &L, workspace: DevicePtr) -> Result<(), L::Error> {
        if self.rows == 0 {
            return Ok(());
        }
        let params = DecodeParams { partials: workspace.get(), ..self.params };
        let kernel = |name| Kernel { family: "attention", name };
        // SAFETY: the kernels of attention.cu take one `DecodeParams`; the caller vouches for what it names.
        unsafe { on.launch(kernel(self.kernel), self.geometry, &[Argument::of(&params)]) }?;
        let blocks = [params.q_heads, self.rows, 1];
        let geometry = Geometry { blocks, ..Geometry::row(1, params.dim.next_multiple_of(32).min(128)) };
        // SAFETY: as above; the launch before has written the states that this one reads.
        unsafe { on.launch(kernel("kvferry_decode_merge"), geometry, &[Argument::of(&params)]) }
    }
}

fn check_aligned(plane: &PagePlane) -> Result<(), JobError> {
    let parts = [
        ("a plane's address", plane.base.get()),
        ("the stride of blocks", plane.block),
        ("the stride of heads", plane.head),
        ("the stride of tokens", plane.token),
    ];
    match parts.into_iter().find(|(_, value)| !value.is_multiple_of(16)) {
        Some((what, value)) => Err(JobError::Unaligned { what, value }),
        None => Ok(()),
    }
}

/// As attention.cu divides it: the queries of all heads, and for each warp a tile of keys, one of values, and their weights.
const fn shared_bytes(dim: u32, element_bytes: u32, heads: u32) -> u32 {
    let stride = ((dim * element_bytes / 16) | 1) * 16;
    heads * dim * 4 + WARPS * (2 * TILE * stride + TILE * heads * 4)
}

/// Warps of a block, as in attention.cu.
const WARPS: u32 = 4;

/// Positions that a warp works on at a time, as in attention.cu.
const TILE: u32 = 32;

/// Positions of a segment, as in attention.cu.
const SEGMENT: u32 = 512;

/// The largest head.
const MAX_DIM: u32 = 256;

/// Types of the cache, in the order of [`KERNELS`].
const CACHES: [Element; 3] = [Element::F16, Element::Bf16, Element::E4m3];

/// Query heads of a block, in the order of [`KERNELS`].
const HEADS: [u32; 3] = [1, 4, 8];

macro_rules! decode_kernels {
    ($kind:literal) => {
        [decode_kernels!($kind, "1"), decode_kernels!($kind, "4"), decode_kernels!($kind, "8")]
    };
    ($kind:literal, $heads:literal) => {
        [
            concat!("kvferry_decode_", $kind, "_", $heads, "_64"),
            concat!("kvferry_decode_", $kind, "_", $heads, "_128"),
            concat!("kvferry_decode_", $kind, "_", $heads, "_192"),
            concat!("kvferry_decode_", $kind, "_", $heads, "_256"),
        ]
    };
}

/// By the cache's type, query heads of a block, and the head's dimension in steps of 64.
const KERNELS: [[[&str; 4]; 3]; 3] = [decode_kernels!("f16"), decode_kernels!("bf16"), decode_kernels!("e4m3")];
