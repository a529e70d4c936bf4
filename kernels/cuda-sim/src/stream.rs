//! A queue of launches.
#![expect(unsafe_code, reason = "its launches are as unsafe as any launcher's")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use kvferry_kernels::cuda::{Argument, Geometry, Kernel, Launcher};
use rayon::prelude::*;

use crate::block::{self, Launch};
use crate::error::SimError;
use crate::kernel::{Arguments, Code};
use crate::late::Access;
use crate::memory::{Allocation, SimDevice, SimMemory};
use crate::schedule::Random;
use crate::shared;

/// A queue of a [`SimDevice`]. Nothing runs before [`SimStream::synchronize`] or [`SimStream::download`] asks for it: the latest
/// that a device may be.
#[derive(Debug)]
pub struct SimStream {
    device: SimDevice,
    queue: Mutex<Queue>,
}

#[derive(Debug)]
struct Queue {
    entries: VecDeque<Entry>,
    random: Random,
    failed: Option<SimError>,
}

#[derive(Debug)]
enum Entry {
    Upload { to: Arc<Allocation>, bytes: Vec<u8> },
    Launch { kernel: Kernel, code: Code, geometry: Geometry, arguments: Arguments },
}

impl SimStream {
    pub(crate) fn new(device: SimDevice, seed: u64) -> Self {
        let queue = Queue { entries: VecDeque::new(), random: Random::new(seed), failed: None };
        Self { device, queue: Mutex::new(queue) }
    }

    /// Allocates memory and queues the copy of `bytes` to it.
    #[must_use]
    pub fn upload(&self, bytes: &[u8]) -> SimMemory {
        let memory = self.device.allocate(bytes.len());
        self.write(&memory, bytes);
        memory
    }

    /// Queues the copy of `bytes`, all that it holds, to some memory.
    ///
    /// # Panics
    /// When it runs, if the memory has another length.
    pub fn write(&self, to: &SimMemory, bytes: &[u8]) {
        let entry = Entry::Upload { to: Arc::clone(to.allocation()), bytes: bytes.to_vec() };
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).entries.push_back(entry);
    }

    /// Reads some memory once all that is queued has run.
    ///
    /// # Errors
    /// The first failure of any launch of this queue.
    pub fn download(&self, from: &SimMemory) -> Result<Vec<u8>, SimError> {
        self.synchronize()?;
        Ok(from.allocation().bytes())
    }

    /// Runs all that is queued.
    ///
    /// # Errors
    /// The first failure of any launch of this queue; what was queued behind it does not run, then or later.
    pub fn synchronize(&self) -> Result<(), SimError> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        while queue.failed.is_none()
            && let Some(entry) = queue.entries.pop_front()
        {
            match entry {
                Entry::Upload { to, bytes } => to.fill(&bytes),
                Entry::Launch { kernel, code, geometry, arguments } => {
                    let seed = queue.random.next();
                    let allocations = self.device.allocations();
                    let launch = launch_of(&allocations, kernel, &code, geometry, &arguments, false);
                    let blocks = order_of(geometry, seed).into_par_iter();
                    let ran = blocks.try_for_each(|(index, seed)| block::run(&launch, index, seed).map(drop));
                    queue.failed = ran.err();
                }
            }
        }
        queue.failed.clone().map_or(Ok(()), Err)
    }
}

/// What is launched, on which device.
fn launch_of<'a>(
    allocations: &'a [Arc<Allocation>],
    kernel: Kernel,
    code: &Code,
    geometry: Geometry,
    arguments: &'a Arguments,
    logs: bool,
) -> Launch<'a> {
    Launch { kernel, entry: code.entry, geometry, arguments, allocations, logs }
}

/// A launch's blocks in random order, each with a seed of its own.
fn order_of(geometry: Geometry, seed: u64) -> Vec<(u32, u64)> {
    let count = geometry.blocks.iter().product::<u32>();
    let mut order: Vec<u32> = (0..count).collect();
    let mut random = Random::new(seed);
    for at in (1..count).rev() {
        order.swap(at as usize, random.below(at + 1) as usize);
    }
    order.into_iter().map(|index| (index, Random::new(seed ^ u64::from(index)).next())).collect()
}

/// Runs a launch and tells which bytes of the device's memory it used.
pub(crate) fn run_logged(
    device: &SimDevice,
    kernel: Kernel,
    code: &Code,
    geometry: Geometry,
    arguments: &Arguments,
    seed: u64,
) -> Result<Vec<Access>, SimError> {
    let allocations = device.allocations();
    let launch = launch_of(&allocations, kernel, code, geometry, arguments, true);
    let order = order_of(geometry, seed);
    let run = |(index, seed)| block::run(&launch, index, seed);
    // To wake other threads takes longer than a few small blocks do.
    let logs: Vec<Vec<Access>> = match order.len() {
        0..=FEW_BLOCKS => order.into_iter().map(run).collect::<Result<_, _>>()?,
        _ => order.into_par_iter().map(run).collect::<Result<_, _>>()?,
    };
    Ok(logs.concat())
}

/// So many blocks run on the thread that asks.
const FEW_BLOCKS: usize = 4;

impl Launcher for SimStream {
    type Error = SimError;

    fn multiprocessors(&self) -> u32 {
        // Few, so that blocks of a small test take several items each.
        2
    }

    unsafe fn launch(&self, kernel: Kernel, geometry: Geometry, arguments: &[Argument<'_>]) -> Result<(), Self::Error> {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(failed) = &queue.failed {
            return Err(failed.clone());
        }
        let code = Code::find(kernel)?;
        let arguments = code.arguments(kernel, arguments)?;
        check(kernel, geometry)?;
        queue.entries.push_back(Entry::Launch { kernel, code, geometry, arguments });
        Ok(())
    }
}

/// The limits are those of every device. Source: CUDA C++ Programming Guide, table of compute capabilities.
pub(crate) fn check(kernel: Kernel, geometry: Geometry) -> Result<(), SimError> {
    let refuse = |problem: String| Err(SimError::Geometry { kernel, problem });
    let product =
        |sizes: [u32; 3]| sizes.iter().try_fold(1_u32, |all, &size| all.checked_mul(size)).unwrap_or(u32::MAX);
    let (blocks, threads) = (product(geometry.blocks), product(geometry.threads));
    if threads == 0 || threads > 1024 || geometry.threads[2] > 64 {
        return refuse(format!("{:?} threads are not 1 to 1024, at most 64 of them along z", geometry.threads));
    }
    let [x, y, z] = geometry.blocks;
    if blocks == 0 || x > i32::MAX.cast_unsigned() || y > 65_535 || z > 65_535 {
        return refuse(format!(
            "{:?} blocks are not 1 to 2^31 - 1 along x and 1 to 65535 along y and z",
            geometry.blocks
        ));
    }
    if u64::from(geometry.shared_bytes) > shared::MOST_BYTES {
        return refuse(format!(
            "{} bytes of shared memory are more than {}",
            geometry.shared_bytes,
            shared::MOST_BYTES
        ));
    }
    Ok(())
}
