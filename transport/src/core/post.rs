//! A write on its way, and the guard of its source.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard};

use bytes::Bytes;
use kvferry_protocol::pages::Extent;

use super::regions::RegionTable;
use super::window::{AnyWindow, Window};
use crate::api::{GrantKey, PostId, Slab, Source, Write};
use crate::error::TransportError;
use crate::place::{DeviceRegion, DeviceRun, Runs};
use crate::raw::RawRun;
use crate::share::{Lender, OpenLoan};
use crate::watch::Leaving;

/// A write that was taken.
///
/// A lane holds the source's guard for reading while it is inside one system call that reads the source; whoever ends the post
/// takes it for writing, so after the end nothing is read.
pub(crate) struct Post {
    pub(crate) id: PostId,
    pub(crate) grant: GrantKey,
    pub(crate) sequence: u32,
    pub(crate) bytes: u64,
    pub(crate) notification: Bytes,
    pub(crate) extents: Vec<Extent>,
    /// Where each extent begins in the stream.
    pub(crate) extent_starts: Vec<u64>,
    source: RwLock<Option<Parts>>,
    /// Whether its source lies in a device's memory: no processor carries it.
    pub(crate) is_of_device: bool,
    /// Whether its source has a watch.
    pub(crate) is_watched: bool,
    /// Whether its source is handed over in place: once the receiver may know of it, only the receiver's word or end ends it.
    pub(crate) is_in_place: bool,
    /// What lets the receiver read the source, once a frame lent it; none if that could not be had.
    loan: OnceLock<Option<OpenLoan>>,
    has_verdict: AtomicBool,
    /// How many requests of a device read the source.
    device_reads: Mutex<usize>,
    device_is_done: Condvar,
}

/// The parts of a source, and who watches them leave.
struct Parts(Stretches, Option<Arc<dyn Leaving>>);

/// Each part with its place in the stream; all of them in one kind of memory.
enum Stretches {
    Host(Vec<(u64, Part)>),
    Device(Vec<(u64, Window<DeviceRegion>)>),
}

enum Part {
    Window(Window),
    Slab(Arc<dyn Slab>),
}

/// A part of a source in one kind of memory.
trait Stretch {
    type Run;

    fn bytes(&self) -> u64;

    fn append_runs(&self, from: u64, to: u64, max_runs: usize, out: &mut Vec<Self::Run>) -> u64;
}

impl fmt::Debug for Post {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Post").field("id", &self.id).field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// Proof that the source may be read while this is held.
pub(crate) struct Reading<'a>(RwLockReadGuard<'a, Option<Parts>>);

impl Post {
    /// Checks a write; nothing is kept of one that is refused.
    pub(crate) fn new(
        id: PostId,
        write: &Write,
        regions: &RegionTable,
        max_extents: usize,
        max_notification_bytes: usize,
    ) -> Result<Self, TransportError> {
        let limit = |what, found: usize, limit: usize| {
            let (found, limit) = (found as u64, limit as u64);
            if found <= limit { Ok(()) } else { Err(TransportError::Limit { what, found, limit }) }
        };
        limit("extents of a write", write.extents.len(), max_extents)?;
        limit("bytes of a notification", write.notification.len(), max_notification_bytes)?;
        let mut bytes = 0u64;
        let mut extent_starts = Vec::with_capacity(write.extents.len());
        for extent in &write.extents {
            limit("loops of an extent", extent.loops.len(), Extent::MAX_LOOPS)?;
            extent_starts.push(bytes);
            let more = extent.end().and_then(|_| extent.bytes()).filter(|&more| more > 0);
            bytes = more.and_then(|more| bytes.checked_add(more)).ok_or_else(|| TransportError::Range {
                what: "an extent that is empty or overflows".to_owned(),
                start: extent.offset,
                end: extent.end().unwrap_or(u64::MAX),
                limit: u64::MAX,
            })?;
        }
        let parts = Parts::new(&write.source, regions)?;
        let source_bytes = parts.bytes();
        if source_bytes != bytes || bytes == 0 {
            let what = "the source, against the bytes that its extents hold".to_owned();
            return Err(TransportError::Range { what, start: 0, end: source_bytes, limit: bytes });
        }
        let is_of_device = matches!(parts.0, Stretches::Device(_));
        Ok(Self {
            id,
            grant: write.grant,
            sequence: write.sequence,
            bytes,
            notification: write.notification.clone(),
            extents: write.extents.clone(),
            extent_starts,
            source: RwLock::new(Some(parts)),
            is_of_device,
            is_watched: false,
            is_in_place: false,
            loan: OnceLock::new(),
            has_verdict: AtomicBool::new(false),
            device_reads: Mutex::new(0),
            device_is_done: Condvar::new(),
        })
    }

    /// The same with a watch over what leaves; before anybody else knows the post.
    pub(crate) fn watched(mut self, watch: Option<Arc<dyn Leaving>>) -> Self {
        self.is_watched = watch.is_some();
        if let Some(parts) = self.source.get_mut().unwrap_or_else(PoisonError::into_inner) {
            parts.1 = watch;
        }
        self
    }

    /// The slabs that the source reads, to keep them beyond the post's end; `None` if it ended.
    pub(crate) fn slabs(&self) -> Option<Vec<Arc<dyn Slab>>> {
        let source = self.source.read().unwrap_or_else(PoisonError::into_inner);
        let Stretches::Host(parts) = &source.as_ref()?.0 else { return Some(Vec::new()) };
        let slabs = parts.iter().filter_map(|(_, part)| match part {
            Part::Window(_) => None,
            Part::Slab(slab) => Some(Arc::clone(slab)),
        });
        Some(slabs.collect())
    }

    /// Permits to read the source while the result is held: for one system call. `None` after the post's end.
    pub(crate) fn read_source(&self) -> Option<Reading<'_>> {
        let source = self.source.read().unwrap_or_else(PoisonError::into_inner);
        source.is_some().then_some(Reading(source))
    }

    /// A device begins to read the source, until [`end_device_read`](Self::end_device_read); `false` if the post has ended.
    pub(crate) fn begin_device_read(&self) -> bool {
        // Under the guard: who ends the post sees this read, or this sees the end.
        let Some(_reading) = self.read_source() else { return false };
        *self.device_reads.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        true
    }

    /// One read of a device is over.
    pub(crate) fn end_device_read(&self) {
        let mut reads = self.device_reads.lock().unwrap_or_else(PoisonError::into_inner);
        *reads = reads.saturating_sub(1);
        self.device_is_done.notify_all();
    }

    /// The receiver's word about the post came, or will never come.
    pub(crate) fn note_verdict(&self) {
        self.has_verdict.store(true, Ordering::SeqCst);
    }

    /// Whether the receiver takes no more bytes of the write: before that, what is sent in their place could land.
    pub(crate) fn has_verdict(&self) -> bool {
        self.has_verdict.load(Ordering::SeqCst)
    }

    /// After this returns the source is not read, or what the receiver reads of it does not count, and a slab is let go.
    pub(crate) fn release_source(&self) {
        let mut source = self.source.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(Some(loan)) = self.loan.get() {
            loan.end();
        }
        let released = source.take();
        drop(source);
        let reads = self.device_reads.lock().unwrap_or_else(PoisonError::into_inner);
        // The thread that completes them waits for nobody, and its requests have deadlines.
        drop(self.device_is_done.wait_while(reads, |reads| *reads > 0).unwrap_or_else(PoisonError::into_inner));
        drop(released); // outside the lock: a slab may have a drop of its own
    }
}

impl Reading<'_> {
    /// Who watches what leaves.
    pub(crate) fn watch(&self) -> Option<&dyn Leaving> {
        self.0.as_ref().and_then(|parts| parts.1.as_deref())
    }

    /// Lets the peer read the source, until the post ends: slot and token on the board. `post` is the one whose source this is.
    pub(crate) fn lend(&self, post: &Post, lender: &Lender) -> Option<(u32, u64)> {
        let loan = post.loan.get_or_init(|| lender.open(post.id.0));
        loan.as_ref().map(|loan| (loan.slot, loan.token))
    }

    /// The memory of bytes `from..to`, as far as `max_runs` runs go, and how many bytes that is.
    pub(crate) fn runs(&self, from: u64, to: u64, max_runs: usize) -> (Runs, u64) {
        match self.0.as_ref().map(|parts| &parts.0) {
            None => (Runs::Host(Vec::new()), 0),
            Some(Stretches::Host(parts)) => {
                let mut runs = Vec::new();
                let bytes = append_runs(parts, from, to, max_runs, &mut runs);
                (Runs::Host(runs), bytes)
            }
            Some(Stretches::Device(parts)) => {
                let mut runs = Vec::new();
                let bytes = append_runs(parts, from, to, max_runs, &mut runs);
                (Runs::Device(runs), bytes)
            }
        }
    }

    /// Appends the memory of bytes `from..to`, until `out` has `max_runs`; nothing of a device's. Returns how many bytes were appended.
    pub(crate) fn append_runs(&self, from: u64, to: u64, max_runs: usize, out: &mut Vec<RawRun>) -> u64 {
        let Some(Parts(Stretches::Host(parts), _)) = self.0.as_ref() else { return 0 };
        append_runs(parts, from, to, max_runs, out)
    }
}

fn append_runs<S: Stretch>(parts: &[(u64, S)], from: u64, to: u64, max_runs: usize, out: &mut Vec<S::Run>) -> u64 {
    let mut at = from;
    let first = parts.partition_point(|(start, _)| *start <= from).saturating_sub(1);
    for (start, part) in &parts[first..] {
        if at >= to || out.len() >= max_runs {
            break;
        }
        let part_end = start + part.bytes();
        let (part_from, part_to) = (at - start, to.min(part_end) - start);
        let got = part.append_runs(part_from, part_to, max_runs, out);
        at += got;
        if got < part_to - part_from {
            break;
        }
    }
    at - from
}

impl Parts {
    fn new(source: &Source, regions: &RegionTable) -> Result<Self, TransportError> {
        let pages = match source {
            Source::Pages(pages) => pages,
            Source::Packed(slab) => return Ok(Self(Stretches::Host(vec![(0, Part::Slab(Arc::clone(slab)))]), None)),
        };
        let (mut of_host, mut of_device) = (Vec::new(), Vec::new());
        let mut start = 0u64;
        for pages in pages {
            let window = regions.window(pages, SOURCE)?;
            let bytes = match &window {
                AnyWindow::Host(window) => window.bytes(),
                AnyWindow::Device(window) => window.bytes(),
            };
            match window {
                _ if bytes == 0 => {}
                AnyWindow::Host(window) => of_host.push((start, Part::Window(window))),
                AnyWindow::Device(window) => of_device.push((start, window)),
            }
            start = start.checked_add(bytes).ok_or(TransportError::Limit {
                what: "bytes of a source",
                found: u64::MAX,
                limit: u64::MAX,
            })?;
        }
        match (of_host.is_empty(), of_device.is_empty()) {
            (_, true) => Ok(Self(Stretches::Host(of_host), None)),
            (true, false) => Ok(Self(Stretches::Device(of_device), None)),
            (false, false) => {
                let problem = "and other pages of it are the host's: use one write for each kind".to_owned();
                Err(TransportError::DeviceMemory { what: SOURCE, problem })
            }
        }
    }

    fn bytes(&self) -> u64 {
        fn end(parts: &[(u64, impl Stretch)]) -> u64 {
            parts.last().map_or(0, |(start, part)| start + part.bytes())
        }
        match &self.0 {
            Stretches::Host(parts) => end(parts),
            Stretches::Device(parts) => end(parts),
        }
    }
}

/// What a source's pages are called in errors.
const SOURCE: &str = "a source page";

impl Stretch for Part {
    type Run = RawRun;

    fn bytes(&self) -> u64 {
        match self {
            Self::Window(window) => window.bytes(),
            Self::Slab(slab) => slab.bytes().len() as u64,
        }
    }

    fn append_runs(&self, from: u64, to: u64, max_runs: usize, out: &mut Vec<RawRun>) -> u64 {
        match self {
            Self::Window(window) => window.append_runs(from, to, max_runs, out),
            Self::Slab(slab) => {
                // Both are at most the slab's length, which is a `usize`.
                let run = RawRun::of(slab.bytes()).skip(from as usize).keep((to - from) as usize);
                out.push(run);
                run.bytes() as u64
            }
        }
    }
}

impl Stretch for Window<DeviceRegion> {
    type Run = DeviceRun;

    fn bytes(&self) -> u64 {
        Window::bytes(self)
    }

    fn append_runs(&self, from: u64, to: u64, max_runs: usize, out: &mut Vec<DeviceRun>) -> u64 {
        Window::append_runs(self, from, to, max_runs, out)
    }
}
