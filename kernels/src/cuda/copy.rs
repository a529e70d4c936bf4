//! Gather, scatter and digest on a device: a [`CopyPlan`] as `kernels/cuda/copy.cu` wants it.

use kvferry_protocol::layout::{CopyPlan, PlaneStrides, Side};

use super::launch::{Argument, DevicePtr, Geometry, Kernel, Launcher};
use super::pages::DeviceRegions;
use crate::copy::CopyError;

/// A copy, or a pass over one side's bytes, ready to be launched.
///
/// Every address is checked when it is made. Launching needs [`CopyJob::tables`] in the device's memory.
#[derive(Clone, Debug)]
pub struct CopyJob {
    tables: Vec<u8>,
    params: CopyParams,
    work: Work,
    lanes: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Work {
    Copy,
    Digest,
}

/// `Strides` of copy.cu.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Strides {
    block: u64,
    head: u64,
    token: u64,
}

/// `PlaneCopy` of copy.cu.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct PlaneCopy {
    src: Strides,
    dst: Strides,
    run_bytes: u32,
    heads_inside: u32,
}

/// `CopyParams` of copy.cu.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct CopyParams {
    src_bases: u64,
    dst_bases: u64,
    spans: u64,
    digest: u64,
    planes: [PlaneCopy; 2],
    layers: u32,
    plane_count: u32,
    heads: u32,
    first_layer: u32,
    first_head: u32,
    chunks: u32,
    chunk_runs: u32,
    items: u32,
    width: u32,
}

impl CopyJob {
    /// Copies all bytes of a plan. The order is not promised, so the two sides must share no bytes.
    ///
    /// # Errors
    /// [`CopyError::Region`] or [`CopyError::Bounds`] if the plan touches memory that a side does not have;
    /// [`CopyError::TooLarge`].
    pub fn copy(plan: &CopyPlan, src: &DeviceRegions, dst: &DeviceRegions) -> Result<Self, CopyError> {
        check(plan, Side::Source, src)?;
        check(plan, Side::Destination, dst)?;
        Self::new(plan, Work::Copy, [(Side::Source, src), (Side::Destination, dst)])
    }

    /// Digests the bytes of one side of a plan where they lie.
    ///
    /// # Errors
    /// As [`CopyJob::copy`].
    pub fn digest(plan: &CopyPlan, side: Side, regions: &DeviceRegions) -> Result<Self, CopyError> {
        check(plan, side, regions)?;
        Self::new(plan, Work::Digest, [(side, regions); 2])
    }

    fn new(plan: &CopyPlan, work: Work, sides: [(Side, &DeviceRegions); 2]) -> Result<Self, CopyError> {
        let selection = plan.selection();
        let [src, dst] = sides.map(|(side, _)| plan.strides(side));
        let mut job = Self { tables: Vec::new(), params: CopyParams::default(), work, lanes: None };
        if plan.groups().is_empty() {
            return Ok(job);
        }
        let mut width = 16;
        let [src_bases, dst_bases] = sides.map(|(side, regions)| bases(plan, side, regions));
        for base in src_bases.iter().chain(&dst_bases) {
            width = common_width(width, *base);
        }
        let params = &mut job.params;
        for (index, (from, to)) in src.iter().zip(dst).enumerate() {
            for strides in [from, to] {
                for stride in [strides.block, strides.head, strides.token, strides.run_bytes.into()] {
                    width = common_width(width, stride);
                }
            }
            params.planes[index] = PlaneCopy {
                src: strides(from),
                dst: strides(to),
                run_bytes: from.run_bytes,
                heads_inside: u32::from(to.head < to.token),
            };
        }
        (params.layers, params.plane_count) = (selection.layers.len() as u32, src.len() as u32);
        (params.first_layer, params.first_head) = (selection.layers.start.into(), selection.heads.start.into());
        (params.heads, params.width) = (selection.heads.len() as u32, width);
        job.lanes = (width == 16).then(|| lanes_for(src.iter().map(|plane| plane.run_bytes)));
        job.tables = tables(plan, sides.map(|(side, _)| side), &src_bases, &dst_bases);
        job.cut(plan)?;
        Ok(job)
    }

    /// Cuts the strips into items of about [`ITEM_BYTES`].
    fn cut(&mut self, plan: &CopyPlan) -> Result<(), CopyError> {
        let params = &mut self.params;
        let tile_runs = WARP / self.lanes.unwrap_or(NARROW_LANES) * RUNS;
        let run_bytes = params.planes.map(|plane| plane.run_bytes).into_iter().max().unwrap_or(1);
        let tiles = (ITEM_BYTES / (u64::from(tile_runs) * u64::from(run_bytes))).max(1) as u32;
        let longest = plan.groups().iter().map(|group| group.tokens).max().unwrap_or(0);
        let too_large = || CopyError::TooLarge { bytes: plan.bytes() };
        let runs = longest.checked_mul(params.heads).ok_or_else(too_large)?;
        params.chunk_runs = (tile_runs * tiles).min(runs.next_multiple_of(tile_runs));
        params.chunks = runs.div_ceil(params.chunk_runs);
        let spans: usize = plan.groups().iter().map(|group| group.pairs.len()).sum();
        let strips = spans as u64 * u64::from(params.layers) * u64::from(params.plane_count);
        let items = strips.checked_mul(params.chunks.into()).and_then(|items| u32::try_from(items).ok());
        params.items = items.ok_or_else(too_large)?;
        Ok(())
    }

    /// What must be in the device's memory for the launch, at an address that is a multiple of 8; empty if nothing is to be done.
    #[must_use]
    pub fn tables(&self) -> &[u8] {
        &self.tables
    }

    /// Launches the job. `digest` is the address of a `u64` to which the digest of the bytes that were read is added, modulo
    /// 2^64; so several jobs may share one.
    ///
    /// # Errors
    /// The launcher's.
    ///
    /// # Panics
    /// If a job that only digests is given no place for the digest.
    ///
    /// # Safety
    /// [`CopyJob::tables`] are at `tables`, and the regions and the digest's place are what the caller said. Until the queue is
    /// past the launch all of that stays allocated, nobody writes what is read, and nobody else uses what is written.
    #[expect(unsafe_code, reason = "the kernel follows addresses that the caller vouches for")]
    pub unsafe fn launch<L: Launcher + ?Sized>(
        &self,
        on: &L,
        tables: DevicePtr,
        digest: Option<DevicePtr>,
    ) -> Result<(), L::Error> {
        assert!(self.work == Work::Copy || digest.is_some(), "a digest needs a place to be added to");
        if self.params.items == 0 {
            return Ok(());
        }
        let mut params = self.params;
        let base_bytes = u64::from(params.layers) * u64::from(params.plane_count) * 8;
        params.src_bases = tables.get();
        params.dst_bases = tables.offset(base_bytes).get();
        params.spans = tables.offset(2 * base_bytes).get();
        params.digest = digest.map_or(0, DevicePtr::get);
        let blocks = params.items.div_ceil(THREADS / WARP).min(on.multiprocessors().saturating_mul(BLOCKS_EACH));
        let kernel = Kernel { family: "copy", name: self.kernel(digest.is_some()) };
        // SAFETY: the kernels of copy.cu take one `CopyParams`; what it names was checked against the regions when the job was
        // made, and the caller vouches for those and for the tables.
        unsafe { on.launch(kernel, Geometry::row(blocks, THREADS), &[Argument::of(&params)]) }
    }

    fn kernel(&self, with_digest: bool) -> &'static str {
        let names = match (self.work, with_digest) {
            (Work::Copy, false) => {
                ["kvferry_copy_narrow", "kvferry_copy_4", "kvferry_copy_8", "kvferry_copy_16", "kvferry_copy_32"]
            }
            (Work::Copy, true) => [
                "kvferry_copy_digest_narrow",
                "kvferry_copy_digest_4",
                "kvferry_copy_digest_8",
                "kvferry_copy_digest_16",
                "kvferry_copy_digest_32",
            ],
            (Work::Digest, _) => [
                "kvferry_digest_narrow",
                "kvferry_digest_4",
                "kvferry_digest_8",
                "kvferry_digest_16",
                "kvferry_digest_32",
            ],
        };
        names[self.lanes.map_or(0, |lanes| lanes.ilog2() as usize - 1)]
    }
}

fn check(plan: &CopyPlan, side: Side, regions: &DeviceRegions) -> Result<(), CopyError> {
    for (region, end) in plan.ends(side) {
        let (_, bytes) = regions.region(region).ok_or(CopyError::Region { side, region })?;
        if end > bytes {
            return Err(CopyError::Bounds { side, region, bytes: bytes as usize, end });
        }
    }
    Ok(())
}

/// Where each selected layer's planes begin; the regions were checked.
fn bases(plan: &CopyPlan, side: Side, regions: &DeviceRegions) -> Vec<u64> {
    let planes = plan.strides(side).len();
    let of = |layer| (0..planes).map(move |plane| plan.layer_place(side, layer, plane));
    let places = (0..plan.selection().layers.len()).flat_map(of);
    places.map(|place| regions.region(place.region).map_or(0, |(start, _)| start.offset(place.offset).get())).collect()
}

fn strides(of: &PlaneStrides) -> Strides {
    Strides { block: of.block, head: of.head, token: of.token }
}

/// The largest power of two up to `width` that `number` is a multiple of.
const fn common_width(width: u32, number: u64) -> u32 {
    let zeros = number.trailing_zeros();
    if zeros < width.trailing_zeros() { 1 << zeros } else { width }
}

/// The source's bases, the destination's, and the spans, as copy.cu reads them.
fn tables(plan: &CopyPlan, [src, dst]: [Side; 2], src_bases: &[u64], dst_bases: &[u64]) -> Vec<u8> {
    let mut out = Vec::new();
    for base in src_bases.iter().chain(dst_bases) {
        out.extend(base.to_le_bytes());
    }
    for group in plan.groups() {
        for pair in &group.pairs {
            let at = |side| match side {
                Side::Source => [pair.src_block.get(), pair.src_token],
                Side::Destination => [pair.dst_block.get(), pair.dst_token],
            };
            let ([from, from_token], [to, to_token]) = (at(src), at(dst));
            for number in [from, from_token, to, to_token, pair.token, group.tokens] {
                out.extend(number.to_le_bytes());
            }
        }
    }
    out
}

/// Threads that share a run: as many as leave the fewest idle in its last step, and of those the most.
fn lanes_for(runs: impl Iterator<Item = u32> + Clone) -> u32 {
    let idle = |lanes: u32| {
        let idle = |bytes: u32| (bytes.div_ceil(16).next_multiple_of(lanes) * 16 - bytes) as f64 / f64::from(bytes);
        runs.clone().map(idle).fold(0.0, f64::max)
    };
    let fewest = |best: u32, lanes: u32| if idle(lanes) <= idle(best) { lanes } else { best };
    [8, 16, 32].into_iter().fold(4, fewest)
}

/// Threads of a block, as in copy.cu.
const THREADS: u32 = 256;

/// Runs that a thread works on at once, as in copy.cu.
const RUNS: u32 = 4;

/// Threads that share a run in the narrow kernels.
const NARROW_LANES: u32 = 8;

/// Threads of a warp.
const WARP: u32 = 32;

/// What a warp copies before it takes its next item: enough that finding the strip costs little beside it.
const ITEM_BYTES: u64 = 8 << 10;

/// Blocks for each multiprocessor: a few more than run side by side, so that none idles while others end.
const BLOCKS_EACH: u32 = 6;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_are_as_wide_as_every_address_allows() {
        for (number, width) in [(0, 16), (16, 16), (48, 16), (24, 8), (4, 4), (258, 2), (3, 1)] {
            assert_eq!(common_width(16, number), width, "{number}");
        }
        assert_eq!(common_width(4, 16), 4);
    }

    #[test]
    fn runs_are_shared_by_as_many_threads_as_have_work() {
        let cases =
            [([64, 64], 4), ([128, 128], 8), ([256, 256], 16), ([512, 512], 32), ([160, 160], 4), ([192, 192], 4)];
        for (runs, lanes) in cases.into_iter().chain([([1152, 1152], 8), ([1024, 1024], 32), ([256, 128], 8)]) {
            assert_eq!(lanes_for(runs.into_iter()), lanes, "{runs:?}");
        }
    }
}
