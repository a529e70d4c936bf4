//! A simulated device that does everything late: the other half of [`Device`]'s seam.
//!
//! Launches and copies are queued. What is at the head of a stream and does not wait for another one may run next; which of them
//! does is drawn from a seed, and nothing runs before the host waits, asks, or happens to queue something. So no two things happen
//! in order unless a stream, an event or the host orders them, and a copy lands as late as it may.
//!
//! Each access is looked at, byte by byte ([`order`](self)): a read or a write that is not ordered after the write (or read) it
//! conflicts with fails the device with [`LateError::Unordered`], which names both. As with a real device a failure is told by every
//! later call. The host counts as one thread: that one of its threads knows what another one waited for is taken for granted.

mod memory;
mod order;
mod queue;

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_kernels::HostRegion;
use kvferry_kernels::cuda::{Argument, DevicePtr, Geometry, Kernel, Launcher};
use kvferry_kernels::device::{CopyEnd, Device, DeviceError, DeviceMemory, Event, PinnedRegion, Stream};

use crate::error::SimError;
use crate::memory::SimDevice;
use crate::schedule::Random;
use order::{Clock, History, Stamp};
pub(crate) use queue::Access;
use queue::{Mark, Operation, Queue, Work};

/// A device on the CPU that runs late and in random order. Clones are one device.
#[derive(Clone)]
pub struct LateDevice {
    shared: Arc<Shared>,
}

/// What goes wrong on a [`LateDevice`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LateError {
    /// A launch was refused, or did what none may.
    #[error(transparent)]
    Launch(SimError),
    /// Nothing orders two accesses of the same bytes.
    #[error(
        "{bytes} bytes at {start:#x}: {second} {second_does} what {first} {first_does}, and nothing orders the two"
    )]
    Unordered {
        /// The first byte's address; the host's own, or a device's.
        start: u64,
        /// How many.
        bytes: u64,
        /// What ran first.
        first: String,
        /// `wrote` or `read`.
        first_does: &'static str,
        /// What ran second.
        second: String,
        /// `writes` or `reads`.
        second_does: &'static str,
    },
    /// A copy from or to memory that is not there, or not pinned.
    #[error("{what} leaves the memory that is allocated on the device, or pinned on the host")]
    Outside {
        /// Which copy.
        what: String,
    },
}

struct Shared {
    device: SimDevice,
    state: Mutex<State>,
}

struct State {
    random: Random,
    streams: Vec<Queue>,
    /// A stream that only runs when no other can.
    starved: usize,
    host: Clock,
    history: History,
    /// Where host memory is locked in place.
    pinned: Vec<Range<u64>>,
    failed: Option<LateError>,
}

impl LateDevice {
    /// A device without memory; the seed decides all that is left open.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let starved = random.below(8) as usize;
        let state = State {
            random,
            streams: Vec::new(),
            starved,
            host: Clock::default(),
            history: History::default(),
            pinned: Vec::new(),
            failed: None,
        };
        Self { shared: Arc::new(Shared { device: SimDevice::new(), state: Mutex::new(state) }) }
    }

    /// Copies bytes into device memory that nothing uses, at once.
    ///
    /// # Panics
    /// If there are not so many bytes.
    pub fn fill(&self, at: DevicePtr, bytes: &[u8]) {
        let mut state = self.shared.lock();
        state.run_all(&self.shared.device);
        state.host_access(at.get()..at.get() + bytes.len() as u64, true, "the host");
        assert!(self.shared.device.put(at, bytes), "{} bytes at {at} are not allocated", bytes.len());
    }

    /// Reads device memory, once all that is queued has run.
    ///
    /// # Errors
    /// [`LateError`]: what failed before.
    ///
    /// # Panics
    /// If there are not so many bytes.
    pub fn read(&self, at: DevicePtr, bytes: usize) -> Result<Vec<u8>, LateError> {
        let mut state = self.shared.lock();
        state.run_all(&self.shared.device);
        state.host_access(at.get()..at.get() + bytes as u64, false, "the host");
        state.check()?;
        Ok(self.shared.device.get(at, bytes).unwrap_or_else(|| panic!("{bytes} bytes at {at} are not allocated")))
    }

    /// Runs all that is queued.
    ///
    /// # Errors
    /// [`LateError`]: what failed, now or before.
    pub fn settle(&self) -> Result<(), LateError> {
        let mut state = self.shared.lock();
        state.run_all(&self.shared.device);
        state.check()
    }

    /// How many launches and copies have run.
    #[must_use]
    pub fn ran(&self) -> u64 {
        self.shared.lock().streams.iter().map(|stream| stream.passed).sum()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, what: &str) -> impl FnOnce(LateError) -> DeviceError + use<> {
        let what = what.to_owned();
        move |source| DeviceError::Device { device: NAME.to_owned(), what, source: Box::new(source) }
    }
}

impl State {
    fn check(&self) -> Result<(), LateError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Queues work behind all that the stream has, and behind what the host knows.
    fn queue(&mut self, stream: usize, work: Work) -> Result<(), LateError> {
        self.check()?;
        let host = self.host.clone();
        self.streams[stream].push(work, stream + 1, &host);
        Ok(())
    }

    /// Runs a few things, or none: a device does not wait for anybody to ask.
    fn run_some(&mut self, device: &SimDevice) {
        for _ in 0..self.random.below(3) {
            if !self.run_one(device) {
                return;
            }
        }
    }

    fn run_all(&mut self, device: &SimDevice) {
        while self.run_one(device) {}
        for stream in &self.streams {
            self.host.join(&stream.clock);
        }
    }

    /// Runs something that may run; `false` if there is nothing, or the device has failed.
    fn run_one(&mut self, device: &SimDevice) -> bool {
        if self.failed.is_some() {
            return false;
        }
        let may = |stream: &Queue| stream.head().is_some_and(|head| head.may_run(&self.streams));
        let mut ready: Vec<usize> =
            self.streams.iter().enumerate().filter(|(_, stream)| may(stream)).map(|(index, _)| index).collect();
        if ready.len() > 1 {
            ready.retain(|&index| index != self.starved);
        }
        if ready.is_empty() {
            return false;
        }
        let stream = ready[self.random.below(ready.len() as u32) as usize];
        let Some(operation) = self.streams[stream].pop() else { return false };
        let seed = self.random.next();
        let ran = operation.run(device, &self.pinned, seed);
        let ordered = ran.and_then(|accesses| {
            accesses.iter().try_for_each(|access| self.note(access.bytes.clone(), access.write, &operation))
        });
        match ordered {
            Ok(()) => true,
            Err(error) => {
                self.failed = Some(error);
                false
            }
        }
    }

    fn note(&mut self, bytes: Range<u64>, write: bool, operation: &Operation) -> Result<(), LateError> {
        self.look(bytes, write, &operation.stamp, &operation.clock.clone())
    }

    fn look(&mut self, bytes: Range<u64>, write: bool, by: &Stamp, clock: &Clock) -> Result<(), LateError> {
        let seen = match write {
            true => self.history.write(bytes, by, clock),
            false => self.history.read(bytes, by, clock),
        };
        seen.map_err(|conflict| LateError::Unordered {
            start: conflict.bytes.start,
            bytes: conflict.bytes.end - conflict.bytes.start,
            first: conflict.first.to_string(),
            first_does: if conflict.first_writes { "wrote" } else { "read" },
            second: by.what.to_string(),
            second_does: if write { "writes" } else { "reads" },
        })
    }

    fn host_access(&mut self, bytes: Range<u64>, write: bool, what: &str) {
        let by = Stamp { who: HOST, at: self.host.tick(HOST), what: what.into() };
        let clock = self.host.clone();
        if let Err(error) = self.look(bytes, write, &by, &clock) {
            self.failed.get_or_insert(error);
        }
    }
}

/// The host's place in a clock.
const HOST: usize = 0;

const NAME: &str = "simulated device";

impl Device for LateDevice {
    fn name(&self) -> String {
        NAME.to_owned()
    }

    fn allocate(&self, bytes: usize) -> Result<DeviceMemory, DeviceError> {
        let memory = self.shared.device.allocate(bytes);
        let start = memory.ptr();
        self.shared.lock().history.forget(start.get()..start.get() + bytes as u64);
        let keeper = memory::Allocated::new(Arc::clone(&self.shared), memory);
        // SAFETY: the keeper owns the allocation, and is known to nobody else.
        #[expect(unsafe_code, reason = "vouches for what it has just allocated")]
        Ok(unsafe { DeviceMemory::new(start, bytes, Box::new(keeper)) })
    }

    fn pin(&self, region: Arc<HostRegion>) -> Result<PinnedRegion, DeviceError> {
        let keeper = memory::Pinned::new(Arc::clone(&self.shared), Arc::clone(&region));
        Ok(PinnedRegion::new(region, Box::new(keeper)))
    }

    fn stream(&self, name: &str) -> Result<Arc<dyn Stream>, DeviceError> {
        let mut state = self.shared.lock();
        let index = state.streams.len();
        state.streams.push(Queue::new(format!("{name} {index}")));
        Ok(Arc::new(LateStream { shared: Arc::clone(&self.shared), index }))
    }

    fn host_reads(&self, start: NonNull<u8>, bytes: usize) {
        let start = start.as_ptr() as u64;
        self.shared.lock().host_access(start..start + bytes as u64, false, "the host");
    }

    fn host_writes(&self, start: NonNull<u8>, bytes: usize) {
        let start = start.as_ptr() as u64;
        self.shared.lock().host_access(start..start + bytes as u64, true, "the host");
    }
}

/// A stream of a [`LateDevice`].
struct LateStream {
    shared: Arc<Shared>,
    index: usize,
}

impl LateStream {
    fn queue(&self, what: &str, work: Work) -> Result<(), DeviceError> {
        let mut state = self.shared.lock();
        state.queue(self.index, work).map_err(self.shared.fail(what))?;
        state.run_some(&self.shared.device);
        Ok(())
    }
}

impl Launcher for LateStream {
    type Error = DeviceError;

    fn multiprocessors(&self) -> u32 {
        2
    }

    #[expect(unsafe_code, reason = "a launch is as unsafe as any launcher's")]
    unsafe fn launch(&self, kernel: Kernel, geometry: Geometry, arguments: &[Argument<'_>]) -> Result<(), DeviceError> {
        let refuse = |error| self.shared.fail("launching a kernel")(LateError::Launch(error));
        let work = Work::launch(kernel, geometry, arguments).map_err(refuse)?;
        self.queue("launching a kernel", work)
    }
}

impl Stream for LateStream {
    #[expect(unsafe_code, reason = "checked when it runs, but as unsafe as any stream's")]
    unsafe fn copy(&self, from: CopyEnd, to: CopyEnd, bytes: usize) -> Result<(), DeviceError> {
        if let (CopyEnd::Host(_), CopyEnd::Host(_)) = (from, to) {
            return Err(DeviceError::Foreign { device: NAME.to_owned(), what: "a copy from host to host" });
        }
        self.queue("copying", Work::Copy { from, to, bytes })
    }

    fn record(&self) -> Result<Arc<dyn Event>, DeviceError> {
        let mut state = self.shared.lock();
        state.check().map_err(self.shared.fail("recording an event"))?;
        let host = state.host.clone();
        let mark = state.streams[self.index].mark(self.index, &host);
        Ok(Arc::new(LateEvent { shared: Arc::clone(&self.shared), mark }))
    }

    fn wait(&self, event: &dyn Event) -> Result<(), DeviceError> {
        let foreign = || DeviceError::Foreign { device: NAME.to_owned(), what: "an event" };
        let event = event.as_any().downcast_ref::<LateEvent>().ok_or_else(foreign)?;
        if !Arc::ptr_eq(&event.shared, &self.shared) {
            return Err(foreign());
        }
        self.queue("waiting for an event", Work::Wait(event.mark.clone()))
    }
}

impl fmt::Debug for LateStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LateStream({})", self.index)
    }
}

/// A place in a stream of a [`LateDevice`].
struct LateEvent {
    shared: Arc<Shared>,
    mark: Mark,
}

impl LateEvent {
    /// The host has seen that the event is passed.
    fn seen(&self, state: &mut State) {
        state.host.join(&self.mark.clock);
    }
}

impl Event for LateEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        let mut state = self.shared.lock();
        // Who asks again and again must not be told forever that it is not done.
        state.run_one(&self.shared.device);
        state.check().map_err(self.shared.fail("asking for an event"))?;
        let done = self.mark.is_passed(&state.streams);
        if done {
            self.seen(&mut state);
        }
        Ok(done)
    }

    fn wait(&self) -> Result<(), DeviceError> {
        let mut state = self.shared.lock();
        // A mark is behind what was queued before it, so something can run until it is passed, unless the device fails.
        while !self.mark.is_passed(&state.streams) && state.run_one(&self.shared.device) {}
        state.check().map_err(self.shared.fail("waiting for an event"))?;
        self.seen(&mut state);
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for LateEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LateEvent({:?})", self.mark)
    }
}

impl fmt::Debug for LateDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LateDevice({} streams)", self.shared.lock().streams.len())
    }
}
