//! Runs kvferry's CUDA kernels on the CPU: the very source that nvcc compiles, in every test run.
//!
//! Each CUDA thread is a fiber. A schedule drawn from a seed says which of a block's threads goes on whenever one waits, and in
//! which order blocks run; blocks run side by side on the host's threads. What a device leaves undefined is made to show:
//!
//! * Device addresses are no host addresses, so a kernel reaches memory by the checked helpers of `kernels/cuda/device.cuh` or
//!   crashes. An access outside of an allocation, or not aligned to its size, ends the launch with a [`Fault`] that names the
//!   thread and the address.
//! * Shared memory and new device memory hold NaN in every floating-point type, and the largest unsigned numbers.
//! * An asynchronous copy writes when its thread waits for it, and never before.
//! * A barrier that not all threads reach, or a shuffle that not all its lanes take part in, is a [`Fault`] that tells where
//!   each thread stands.
//!
//! [`LateDevice`] is a whole device behind `kvferry_kernels::device`: streams, events and copies too, which run late and in random
//! order, and a check that every access is ordered after what it conflicts with.
//!
//! What it does not show: the order in which a device's memory makes writes visible to other blocks, and speed.
#![deny(unsafe_code)]

mod block;
mod error;
mod ffi;
mod kernel;
mod late;
mod memory;
mod schedule;
mod shared;
mod stream;

pub use error::{Fault, SimError};
pub use late::{LateDevice, LateError};
pub use memory::{SimDevice, SimMemory};
pub use stream::SimStream;
