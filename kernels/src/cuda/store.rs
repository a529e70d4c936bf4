//! Writes the keys and values of new tokens into their slots, on a device: `kernels/cuda/store.cu`.

use super::element::Element;
use super::error::JobError;
use super::launch::{Argument, DevicePtr, Geometry, Kernel, Launcher};
use super::pages::{DevicePages, PagePlane};

/// New rows of one plane in device memory: `[tokens, heads, dim]`, the elements of a head side by side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// The first element.
    pub start: DevicePtr,
    /// Bytes from one token to the next.
    pub token_bytes: u64,
    /// Bytes from one head to the next.
    pub head_bytes: u64,
}

/// Stores one layer's new keys and values.
#[derive(Clone, Debug)]
pub struct StoreJob {
    params: StoreParams,
    kernel: &'static str,
    threads: u32,
}

/// `StorePlane` of store.cu.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct StorePlane {
    rows: u64,
    row_token: u64,
    row_head: u64,
    base: u64,
    block: u64,
    head: u64,
    token: u64,
    dim: u32,
    scale: f32,
}

/// `StoreParams` of store.cu.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct StoreParams {
    planes: [StorePlane; 2],
    slots: u64,
    tokens: u32,
    plane_count: u32,
    heads: u32,
    tokens_per_block: u32,
}

impl StoreJob {
    /// Stores `tokens` rows of `from` (one entry a plane) in the slots that the `i64 [tokens]` at `slots` name, as in vLLM's
    /// `slot_mapping`; a negative slot is skipped. What is stored is the row divided by the plane's entry of `scales`, rounded to
    /// the nearest, ties to even; FP8 saturates.
    ///
    /// # Errors
    /// [`JobError`] if rows are no f32, f16 or bf16, or there is not one entry for each plane, or a scale is not positive.
    pub fn new(
        pages: &DevicePages,
        from: &[Rows],
        element: Element,
        scales: &[f32],
        slots: DevicePtr,
        tokens: u32,
    ) -> Result<Self, JobError> {
        let planes = pages.planes.len();
        if from.len() != planes || scales.len() != planes {
            return Err(JobError::Planes { planes, mend: "give rows and a scale for each" });
        }
        let Some(from_name) = NAMES.iter().position(|&known| known == element) else {
            return Err(JobError::Element { what: "rows", element, mend: "f32, f16 or bf16" });
        };
        if let Some(scale) = scales.iter().find(|scale| !(scale.is_finite() && **scale > 0.0)) {
            let mend = "use a positive number, 1 for none";
            return Err(JobError::Number { what: "scale", value: scale.to_string(), mend });
        }
        let wide = from.iter().zip(&pages.planes).all(|(rows, plane)| wide(rows, plane, pages.element));
        let mut params = StoreParams {
            slots: slots.get(),
            tokens,
            plane_count: planes as u32,
            heads: pages.heads,
            tokens_per_block: pages.tokens_per_block,
            ..StoreParams::default()
        };
        for (index, (rows, plane)) in from.iter().zip(&pages.planes).enumerate() {
            params.planes[index] = StorePlane {
                rows: rows.start.get(),
                row_token: rows.token_bytes,
                row_head: rows.head_bytes,
                base: plane.base.get(),
                block: plane.block,
                head: plane.head,
                token: plane.token,
                dim: plane.dim,
                scale: scales[index],
            };
        }
        let dim = pages.planes.iter().map(|plane| plane.dim).max().unwrap_or(1);
        let work = pages.heads * if wide { dim / VECTOR } else { dim };
        let threads = work.next_multiple_of(32).clamp(32, 256);
        let kernel = KERNELS[from_name][pages.element as usize][usize::from(!wide)];
        Ok(Self { params, kernel, threads })
    }

    /// Launches the job.
    ///
    /// # Errors
    /// The launcher's.
    ///
    /// # Safety
    /// Rows, slots and pages are what the caller said: allocated, and of the stated sizes. Every slot that is not negative is in
    /// the cache, and no two are the same. Until the queue is past the launch nobody writes the rows and slots, and nobody else
    /// uses the slots' memory.
    #[expect(unsafe_code, reason = "the kernel follows addresses that the caller vouches for")]
    pub unsafe fn launch<L: Launcher + ?Sized>(&self, on: &L) -> Result<(), L::Error> {
        if self.params.tokens == 0 {
            return Ok(());
        }
        let blocks = self.params.tokens.min(on.multiprocessors().saturating_mul(BLOCKS_EACH));
        let kernel = Kernel { family: "store", name: self.kernel };
        // SAFETY: the kernels of store.cu take one `StoreParams`; the caller vouches for what it names.
        unsafe { on.launch(kernel, Geometry::row(blocks, self.threads), &[Argument::of(&self.params)]) }
    }
}

/// Whether vectors of eight elements are aligned to what loads and stores them, up to 16 bytes.
fn wide(rows: &Rows, plane: &PagePlane, element: Element) -> bool {
    let load = [rows.start.get(), rows.token_bytes, rows.head_bytes].into_iter().all(|at| at.is_multiple_of(16));
    let stored = u64::from(VECTOR * element.bytes()).min(16);
    let store =
        [plane.base.get(), plane.block, plane.head, plane.token].into_iter().all(|at| at.is_multiple_of(stored));
    load && store && plane.dim.is_multiple_of(VECTOR)
}

/// Elements that a thread converts at a time, as in store.cu.
const VECTOR: u32 = 8;

/// Blocks for each multiprocessor: as many as of 256 threads fit one.
const BLOCKS_EACH: u32 = 8;

/// The types of rows, in the order of [`KERNELS`].
const NAMES: [Element; 3] = [Element::F32, Element::F16, Element::Bf16];

macro_rules! kernels_from {
    ($from:literal) => {
        [
            kernels_from!($from, "f32"),
            kernels_from!($from, "f16"),
            kernels_from!($from, "bf16"),
            kernels_from!($from, "e4m3"),
            kernels_from!($from, "e5m2"),
        ]
    };
    ($from:literal, $to:literal) => {
        [concat!("kvferry_store_", $from, "_", $to), concat!("kvferry_store_", $from, "_", $to, "_narrow")]
    };
}

/// By the rows' type, the cache's type, and whether accesses are narrow.
const KERNELS: [[[&str; 2]; 5]; 3] = [kernels_from!("f32"), kernels_from!("f16"), kernels_from!("bf16")];
