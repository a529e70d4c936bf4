//! What is left to put of a post: local and remote bytes, side by side.

use std::collections::VecDeque;
use std::sync::Arc;

use kvferry_protocol::pages::Extent;

use super::window::{RemoteRun, RemoteWindow};
use crate::api::Slab;
use crate::core::{Post, RunList};
use crate::raw::{self, RawRun};

/// How many runs of either side are looked up at once.
const BATCH_RUNS: usize = 64;

/// A post's bytes, cut into puts in the order of its stream.
///
/// It owns the post, and so a slab; registered memory is the caller's promise.
pub(crate) struct Work {
    post: Arc<Post>,
    /// What else keeps the source's memory.
    _slabs: Vec<Arc<dyn Slab>>,
    bytes: u64,
    window: Arc<RemoteWindow>,
    extents: RunList,
    /// How many bytes were looked up on each side.
    local_at: u64,
    remote_at: u64,
    local: VecDeque<RawRun>,
    remote: VecDeque<RemoteRun>,
}

/// A part of a post that was cut already and goes with its note, in one message.
pub(crate) struct Load {
    /// Owns what the runs are; a slab may outlive its post.
    _post: Arc<Post>,
    _slabs: Vec<Arc<dyn Slab>>,
    /// What was brought together of many runs.
    _gathered: Vec<u8>,
    /// The note, and after it the bytes. The note is owned by whoever holds the load.
    runs: Vec<RawRun>,
}

/// With the note, UCX's header and tcp's, as many as UCX sends in one message without a copy (`UCP_MAX_IOV`).
const MAX_LOAD_RUNS: usize = 14;

impl Load {
    /// `None` if the post ended.
    pub(crate) fn new(post: Arc<Post>, mut runs: Vec<RawRun>) -> Option<Self> {
        let slabs = post.slabs()?;
        let mut gathered = Vec::new();
        if runs.len() > MAX_LOAD_RUNS {
            let _reading = post.read_source()?;
            gathered = raw::gather(&runs);
            runs = vec![RawRun::of(&gathered)];
        }
        Some(Self { _post: post, _slabs: slabs, _gathered: gathered, runs })
    }

    /// What UCX is to send; `note` lives as long as the load.
    pub(super) fn after(&mut self, note: &[u8]) -> &[RawRun] {
        self.runs.insert(0, RawRun::of(note));
        &self.runs
    }
}

/// What a post sends.
pub(crate) enum Cargo {
    /// Nothing but its note.
    Note,
    /// Bytes that are put into the peer's window; the note follows.
    Puts(Box<Work>),
    /// Bytes behind the note.
    Load(Box<Load>),
}

/// What comes next of a post.
pub(super) enum Next {
    Put(RawRun, RemoteRun),
    /// All was put.
    End,
    /// The source or the window ended too early; neither can, once checked.
    Broken,
}

impl Work {
    /// `post` was checked; `None` if an extent of it leaves the window.
    pub(super) fn new(post: Arc<Post>, window: Arc<RemoteWindow>) -> Option<Self> {
        let fits = post.extents.iter().all(|extent| extent.end().is_some_and(|end| end <= window.bytes()));
        let extents = RunList::of_extents(&post.extents).filter(|extents| fits && extents.bytes() == post.bytes)?;
        let (local, remote) = Default::default();
        let bytes = post.bytes;
        Some(Self { post, _slabs: Vec::new(), bytes, window, extents, local_at: 0, remote_at: 0, local, remote })
    }

    /// A part of a post that was cut already: `runs` go to the window's bytes from `offset` on. `None` if they leave it, or the post
    /// ended.
    pub(crate) fn of_runs(post: Arc<Post>, runs: Vec<RawRun>, window: Arc<RemoteWindow>, offset: u64) -> Option<Self> {
        let slabs = post.slabs()?;
        let bytes = runs.iter().map(|run| run.bytes() as u64).sum();
        let end = offset.checked_add(bytes)?;
        let extents = RunList::of_extents(&[Extent::contiguous(offset, bytes)]).filter(|_| end <= window.bytes())?;
        let local = runs.into();
        Some(Self {
            post,
            _slabs: slabs,
            bytes,
            window,
            extents,
            local_at: bytes,
            remote_at: 0,
            local,
            remote: VecDeque::new(),
        })
    }

    pub(super) fn window(&self) -> &RemoteWindow {
        &self.window
    }

    /// About how many bytes the next put has.
    pub(super) fn next_bytes(&self) -> u64 {
        let local = self.local.front().map_or(u64::MAX, |run| run.bytes() as u64);
        local.min(self.remote.front().map_or(u64::MAX, |run| run.bytes))
    }

    /// The next put, of at most `max_bytes`.
    pub(super) fn next(&mut self, max_bytes: u64) -> Next {
        if self.local.is_empty() && self.local_at < self.bytes {
            let mut runs = Vec::new();
            let Some(source) = self.post.read_source() else { return Next::Broken };
            self.local_at += source.append_runs(self.local_at, self.bytes, BATCH_RUNS, &mut runs);
            self.local.extend(runs);
        }
        if self.remote.is_empty() && self.remote_at < self.bytes {
            let mut runs = Vec::new();
            self.remote_at += self.window.append_extents(&self.extents, self.remote_at, BATCH_RUNS, &mut runs);
            self.remote.extend(runs);
        }
        let (local, remote) = match (self.local.pop_front(), self.remote.pop_front()) {
            (None, None) => return Next::End,
            (Some(local), Some(remote)) => (local, remote),
            _ => return Next::Broken,
        };
        let bytes = (local.bytes() as u64).min(remote.bytes).min(max_bytes);
        if bytes < local.bytes() as u64 {
            self.local.push_front(local.skip(bytes as usize));
        }
        if bytes < remote.bytes {
            self.remote.push_front(remote.skip(bytes));
        }
        Next::Put(local.keep(bytes as usize), RemoteRun { bytes, ..remote })
    }
}
