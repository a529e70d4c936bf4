//! What streams have to do, and doing it.
#![expect(unsafe_code, reason = "copies between the host's memory and what stands for a device's")]

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;

use kvferry_kernels::cuda::{Argument, DevicePtr, Geometry, Kernel};
use kvferry_kernels::device::CopyEnd;

use super::LateError;
use super::order::{Clock, Stamp};
use crate::error::SimError;
use crate::kernel::{Arguments, Code};
use crate::memory::SimDevice;
use crate::stream;

/// One stream: what it has to do, and how much of it is done.
pub(super) struct Queue {
    name: String,
    entries: VecDeque<Operation>,
    /// How many were queued, and how many have run.
    queued: u64,
    pub(super) passed: u64,
    /// After the last that was queued.
    pub(super) clock: Clock,
}

/// A place in a stream.
#[derive(Clone)]
pub(super) struct Mark {
    stream: usize,
    after: u64,
    pub(super) clock: Clock,
}

/// Something that a stream has to do.
pub(super) struct Operation {
    work: Work,
    /// Itself, and all that it is ordered after.
    pub(super) clock: Clock,
    pub(super) stamp: Stamp,
}

pub(super) enum Work {
    Copy { from: CopyEnd, to: CopyEnd, bytes: usize },
    Launch { kernel: Kernel, code: Code, geometry: Geometry, arguments: Arguments },
    Wait(Mark),
}

/// Bytes that were used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    pub(crate) bytes: Range<u64>,
    pub(crate) write: bool,
}

impl Queue {
    pub(super) fn new(name: String) -> Self {
        Self { name, entries: VecDeque::new(), queued: 0, passed: 0, clock: Clock::default() }
    }

    pub(super) fn push(&mut self, work: Work, who: usize, host: &Clock) {
        self.clock.join(host);
        if let Work::Wait(mark) = &work {
            self.clock.join(&mark.clock);
        }
        self.queued += 1;
        let at = self.clock.tick(who);
        let what = format!("{work} ({} of stream {})", self.queued, self.name).into();
        let stamp = Stamp { who, at, what };
        self.entries.push_back(Operation { work, clock: self.clock.clone(), stamp });
    }

    pub(super) fn head(&self) -> Option<&Operation> {
        self.entries.front()
    }

    /// Takes what is to be done next, which counts as done from now on.
    pub(super) fn pop(&mut self) -> Option<Operation> {
        let operation = self.entries.pop_front();
        self.passed += u64::from(operation.is_some());
        operation
    }

    /// The place that the queue ends at now.
    pub(super) fn mark(&mut self, stream: usize, host: &Clock) -> Mark {
        self.clock.join(host);
        Mark { stream, after: self.queued, clock: self.clock.clone() }
    }
}

impl Mark {
    pub(super) fn is_passed(&self, streams: &[Queue]) -> bool {
        streams[self.stream].passed >= self.after
    }
}

impl Operation {
    pub(super) fn may_run(&self, streams: &[Queue]) -> bool {
        match &self.work {
            Work::Wait(mark) => mark.is_passed(streams),
            Work::Copy { .. } | Work::Launch { .. } => true,
        }
    }

    /// Does it; returns which bytes it used.
    pub(super) fn run(&self, device: &SimDevice, pinned: &[Range<u64>], seed: u64) -> Result<Vec<Access>, LateError> {
        match &self.work {
            Work::Wait(_) => Ok(Vec::new()),
            Work::Copy { from, to, bytes } => {
                let outside = || LateError::Outside { what: self.stamp.what.to_string() };
                let (source, read) = place(*from, *bytes, device, pinned).ok_or_else(outside)?;
                let (target, written) = place(*to, *bytes, device, pinned).ok_or_else(outside)?;
                // SAFETY: both are so long: allocated on the device, or pinned on the host. Who else uses them meanwhile broke the
                // promise of `Stream::copy`.
                unsafe { target.copy_from(source, *bytes) };
                Ok(vec![Access { bytes: read, write: false }, Access { bytes: written, write: true }])
            }
            Work::Launch { kernel, code, geometry, arguments } => {
                let mut accesses =
                    stream::run_logged(device, *kernel, code, *geometry, arguments, seed).map_err(LateError::Launch)?;
                Ok(merge(&mut accesses))
            }
        }
    }
}

impl Work {
    pub(super) fn launch(kernel: Kernel, geometry: Geometry, arguments: &[Argument<'_>]) -> Result<Self, SimError> {
        let code = Code::find(kernel)?;
        let arguments = code.arguments(kernel, arguments)?;
        stream::check(kernel, geometry)?;
        Ok(Self::Launch { kernel, code, geometry, arguments })
    }
}

/// The host's address of an end of a copy, and the addresses that it is known by.
fn place(end: CopyEnd, bytes: usize, device: &SimDevice, pinned: &[Range<u64>]) -> Option<(*mut u8, Range<u64>)> {
    match end {
        CopyEnd::Device(at) => Some((device.host_address(at, bytes as u64)?, span(at, bytes))),
        CopyEnd::Host(at) => {
            let span = span(DevicePtr::new(at.as_ptr() as u64), bytes);
            let known = pinned.iter().any(|region| region.start <= span.start && span.end <= region.end);
            known.then_some((at.as_ptr(), span))
        }
    }
}

fn span(at: DevicePtr, bytes: usize) -> Range<u64> {
    at.get()..at.get() + bytes as u64
}

/// Accesses that abut or overlap become one; reads first.
fn merge(accesses: &mut [Access]) -> Vec<Access> {
    accesses.sort_unstable_by_key(|access| (access.write, access.bytes.start));
    let mut out: Vec<Access> = Vec::new();
    for access in accesses.iter() {
        match out.last_mut() {
            Some(last) if last.write == access.write && access.bytes.start <= last.bytes.end => {
                last.bytes.end = last.bytes.end.max(access.bytes.end);
            }
            _ => out.push(access.clone()),
        }
    }
    out
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Copy { from, to, bytes } => {
                let name = |end: &CopyEnd| if matches!(end, CopyEnd::Host(_)) { "host" } else { "device" };
                write!(f, "copy of {bytes} bytes from {} to {}", name(from), name(to))
            }
            Self::Launch { kernel, .. } => write!(f, "{kernel}"),
            Self::Wait(_) => f.write_str("wait"),
        }
    }
}

impl fmt::Debug for Mark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {} of stream {}", self.after, self.stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_that_abut_or_overlap_become_one() {
        let access = |bytes: Range<u64>, write| Access { bytes, write };
        let mut all =
            [access(8..16, true), access(0..8, true), access(16..24, false), access(4..12, true), access(40..44, true)];
        assert_eq!(merge(&mut all), [access(16..24, false), access(0..16, true), access(40..44, true)]);
    }
}
