//! What goes wrong in a launch.

use std::fmt;

use kvferry_kernels::cuda::{DevicePtr, Kernel};

/// Why a launch was refused, or what it did wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// No such kernel.
    #[error("{kernel} does not exist")]
    NoKernel {
        /// The kernel asked for.
        kernel: Kernel,
    },
    /// Other arguments than the kernel has parameters.
    #[error("{kernel} takes parameters of {expected:?} bytes; it was given {found:?}")]
    Arguments {
        /// The kernel.
        kernel: Kernel,
        /// The parameters' sizes.
        expected: Vec<usize>,
        /// The arguments' sizes.
        found: Vec<usize>,
    },
    /// More threads, blocks or shared memory than a device takes.
    #[error("{kernel}: {problem}")]
    Geometry {
        /// The kernel.
        kernel: Kernel,
        /// What is wrong.
        problem: String,
    },
    /// A thread did what no thread may.
    #[error("{kernel}, block {block:?}, thread {thread:?}: {fault}")]
    Fault {
        /// The kernel.
        kernel: Kernel,
        /// The block's place in the grid.
        block: [u32; 3],
        /// The thread's place in its block.
        thread: [u32; 3],
        /// What it did.
        fault: Fault,
    },
}

/// What a thread did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// It accessed memory outside of every allocation.
    OutOfRange {
        /// Where.
        at: DevicePtr,
        /// How many bytes.
        bytes: u64,
        /// Whether it was to be written.
        write: bool,
    },
    /// It accessed memory at an address that is no multiple of the access's size.
    Misaligned {
        /// Where.
        at: DevicePtr,
        /// What the address must be a multiple of.
        alignment: u64,
    },
    /// It copied to an address that is not in the block's shared memory.
    NotShared,
    /// The block has more shared memory than a device gives it.
    SharedMemory {
        /// Bytes, dynamic and static.
        bytes: u64,
    },
    /// Threads wait for others that will not come; where each stands.
    Deadlock {
        /// One line for each place.
        threads: String,
    },
    /// Two barriers or operations of a warp met that are not the same.
    Divergent {
        /// Where this thread stands.
        here: String,
        /// Where another one stands.
        there: String,
    },
    /// It asked for a lane that takes no part in the operation.
    Lane {
        /// The lane.
        lane: u32,
        /// The lanes that take part.
        mask: u32,
    },
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfRange { at, bytes, write } => {
                let what = if *write { "writes" } else { "reads" };
                write!(f, "{what} {bytes} bytes at {at}, outside of every allocation")
            }
            Self::Misaligned { at, alignment } => write!(f, "accesses {at}, which is no multiple of {alignment}"),
            Self::NotShared => f.write_str("copies to an address that is not in shared memory"),
            Self::SharedMemory { bytes } => write!(f, "has {bytes} bytes of shared memory, more than a device gives"),
            Self::Deadlock { threads } => write!(f, "waits for threads that will not come:\n{threads}"),
            Self::Divergent { here, there } => write!(f, "is at {here} while another thread is at {there}"),
            Self::Lane { lane, mask } => write!(f, "asks for lane {lane}, which is not in {mask:#010x}"),
        }
    }
}
