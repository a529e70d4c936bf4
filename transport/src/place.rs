//! Where registered memory is: what processors touch, and what only devices do.
//!
//! A [`Region`] gives [`RawRun`]s, which processors copy, send and receive. A [`DeviceRegion`] gives [`DeviceRun`]s, which are two numbers for an
//! RDMA device: nothing in this crate makes a pointer or a [`RawRun`] of one, so no path by processors can be given a page of a device.

use crate::api::{Memory, MemoryKind};
use crate::raw::{RawRun, Region};

/// Registered memory of one kind, which is cut into runs.
pub(crate) trait Place: Copy {
    type Run: Run;

    fn bytes(self) -> u64;

    /// Bytes `offset..offset + bytes`, if they are inside.
    fn run(self, offset: u64, bytes: u64) -> Option<Self::Run>;
}

/// A contiguous piece of one kind of memory.
pub(crate) trait Run: Copy {
    fn length(self) -> u64;

    /// The first `bytes` bytes of the run.
    fn keep(self, bytes: u64) -> Self;

    /// Whether `next` begins where this run ends; then this run grows over it.
    fn join(&mut self, next: Self) -> bool;
}

impl Place for Region {
    type Run = RawRun;

    fn bytes(self) -> u64 {
        Self::bytes(self)
    }

    fn run(self, offset: u64, bytes: u64) -> Option<RawRun> {
        Self::run(self, offset, bytes)
    }
}

impl Run for RawRun {
    fn length(self) -> u64 {
        self.bytes() as u64
    }

    fn keep(self, bytes: u64) -> Self {
        Self::keep(self, usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    fn join(&mut self, next: Self) -> bool {
        Self::join(self, next)
    }
}

/// Registered memory of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeviceRegion {
    address: u64,
    bytes: u64,
}

/// A contiguous piece of a device's memory: what an RDMA device is told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct DeviceRun {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
}

impl DeviceRegion {
    /// `None` if it is the host's, or longer than its address allows.
    pub(crate) fn of(memory: &Memory) -> Option<Self> {
        let (address, bytes) = (memory.address.as_ptr().addr() as u64, memory.bytes as u64);
        let is_meant = matches!(memory.kind, MemoryKind::Device(_)) && address.checked_add(bytes).is_some();
        is_meant.then_some(Self { address, bytes })
    }
}

impl Place for DeviceRegion {
    type Run = DeviceRun;

    fn bytes(self) -> u64 {
        self.bytes
    }

    fn run(self, offset: u64, bytes: u64) -> Option<DeviceRun> {
        let is_inside = offset.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        is_inside.then(|| DeviceRun { address: self.address + offset, bytes })
    }
}

impl Run for DeviceRun {
    fn length(self) -> u64 {
        self.bytes
    }

    fn keep(self, bytes: u64) -> Self {
        Self { bytes: bytes.min(self.bytes), ..self }
    }

    fn join(&mut self, next: Self) -> bool {
        let is_adjacent = self.address + self.bytes == next.address;
        if is_adjacent {
            self.bytes += next.bytes;
        }
        is_adjacent
    }
}

/// Runs of one kind of memory: a frame's payload lies in one.
pub(crate) enum Runs {
    Host(Vec<RawRun>),
    Device(Vec<DeviceRun>),
}
