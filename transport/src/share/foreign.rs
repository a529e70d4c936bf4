//! A region of the peer's that this side can read.

use std::io;
use std::sync::Arc;

use super::process::Process;
use super::raw::{MAX_PROCESS_RUNS, Mapping, Place, RemoteRun};
use crate::raw::RawRun;

#[derive(Debug)]
pub(super) enum Foreign {
    Mapped(Mapping),
    Remote { process: Arc<Process>, address: u64, bytes: u64 },
}

/// A part of it that is still to be copied.
#[derive(Debug)]
pub(super) struct ForeignRun {
    pub(super) memory: Arc<Foreign>,
    pub(super) offset: u64,
    pub(super) bytes: usize,
}

impl Foreign {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Mapped(mapping) => mapping.bytes() as u64,
            Self::Remote { bytes, .. } => *bytes,
        }
    }

    /// Where bytes of it are mapped here, if they are.
    pub(super) fn place(&self, offset: u64, bytes: usize) -> Option<Place> {
        match self {
            Self::Mapped(mapping) => mapping.place(offset, bytes),
            Self::Remote { .. } => None,
        }
    }

    /// The process that it is in, unless it is mapped.
    pub(super) fn process(&self) -> Option<&Process> {
        match self {
            Self::Mapped(_) => None,
            Self::Remote { process, .. } => Some(process),
        }
    }
}

/// Copies the front of `from` into the front of `to`, at most `most` bytes. Returns how many; at least one, if both have some.
pub(super) fn copy(from: &[ForeignRun], to: &[RawRun], most: usize) -> io::Result<usize> {
    match from.first().map(|run| &*run.memory) {
        None => Ok(0),
        Some(Foreign::Mapped(_)) => copy_mapped(from, to, most),
        Some(Foreign::Remote { process, .. }) => copy_remote(process, from, to, most),
    }
}

fn copy_mapped(from: &[ForeignRun], to: &[RawRun], most: usize) -> io::Result<usize> {
    let (mut copied, mut sources, mut targets) = (0, from.iter(), to.iter());
    let (mut source, mut skip) = (sources.next(), 0);
    let mut target = targets.next().copied();
    while let (Some(run), Some(to)) = (source, target) {
        let Foreign::Mapped(mapping) = &*run.memory else { break };
        let bytes = (run.bytes - skip).min(to.bytes()).min(most - copied);
        if bytes == 0 {
            break;
        }
        if !mapping.copy(run.offset + skip as u64, to.keep(bytes)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        copied += bytes;
        skip += bytes;
        if skip == run.bytes {
            (source, skip) = (sources.next(), 0);
        }
        target = if bytes == to.bytes() { targets.next().copied() } else { Some(to.skip(bytes)) };
    }
    Ok(copied)
}

fn copy_remote(process: &Arc<Process>, from: &[ForeignRun], to: &[RawRun], most: usize) -> io::Result<usize> {
    let room: usize = to.iter().take(MAX_PROCESS_RUNS).map(|run| run.bytes()).sum();
    let mut left = most.min(room);
    let mut remote = Vec::new();
    for run in from.iter().take(MAX_PROCESS_RUNS) {
        let Foreign::Remote { address, .. } = &*run.memory else { break };
        let bytes = run.bytes.min(left);
        if bytes == 0 {
            break;
        }
        remote.push(RemoteRun { address: address + run.offset, bytes });
        left -= bytes;
    }
    let mut wanted: usize = remote.iter().map(|run| run.bytes).sum();
    let mut local = Vec::new();
    for run in to.iter().take(MAX_PROCESS_RUNS) {
        if wanted == 0 {
            break;
        }
        local.push(run.keep(wanted));
        wanted -= run.bytes().min(wanted);
    }
    match process.read(&local, &remote)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        copied => Ok(copied),
    }
}
