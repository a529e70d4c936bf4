//! One block: its threads, what each waits for, and who goes on.
//!
//! All threads of a block are fibers of one host thread, so at any moment one of them runs, or the scheduler does. A thread that
//! waits notes it in its own [`State`] and suspends; whoever completes what it waits for makes it ready again.
#![expect(
    unsafe_code,
    reason = "fibers reach their block by a pointer, and are given up when a thread did what none may"
)]

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt::Write;
use std::ptr::NonNull;
use std::sync::Arc;

use corosensei::stack::DefaultStack;
use corosensei::{Coroutine, CoroutineResult, Yielder};
use kvferry_kernels::cuda::{DevicePtr, Geometry, Kernel};

use crate::error::{Fault, SimError};
use crate::ffi::{self, Entry, Place, Site};
use crate::kernel::Arguments;
use crate::late::Access;
use crate::memory::Allocation;
use crate::schedule::Ready;
use crate::shared::{MOST_BYTES, Shared};

/// What all blocks of a launch have in common.
pub(crate) struct Launch<'a> {
    pub(crate) kernel: Kernel,
    pub(crate) entry: Entry,
    pub(crate) geometry: Geometry,
    pub(crate) arguments: &'a Arguments,
    /// By rising address.
    pub(crate) allocations: &'a [Arc<Allocation>],
    /// Whether blocks tell which bytes they used.
    pub(crate) logs: bool,
}

/// A block while it runs.
pub(crate) struct Block<'a> {
    launch: &'a Launch<'a>,
    threads: Vec<Thread>,
    /// The thread that runs.
    current: Cell<usize>,
    ready: RefCell<Ready>,
    /// Of each warp, who waits for whom: the lanes of a call, and those of them that are there. Lanes may wait for a part of their
    /// warp while others wait for all of it.
    waiting: Vec<RefCell<Vec<(u32, u32)>>>,
    at_barrier: Cell<usize>,
    /// Where the thread that came last to a barrier did.
    barrier_site: Cell<Option<Site>>,
    fault: RefCell<Option<(usize, Fault)>>,
    shared: RefCell<Shared>,
    /// The allocation that the last access was in; the next one mostly is in the same.
    last: Cell<usize>,
    accesses: RefCell<Vec<Access>>,
}

struct Thread {
    place: Place,
    yielder: Cell<Option<NonNull<Yielder<(), ()>>>>,
    state: Cell<State>,
    /// What the last operation of the warp gave this thread.
    result: Cell<u64>,
    copies: RefCell<Copies>,
}

#[derive(Clone, Copy)]
enum State {
    Running,
    Barrier(Site),
    Warp(Together),
    Done,
}

/// What lanes of a warp do together, as one of them calls for it.
#[derive(Clone, Copy)]
pub(crate) struct Together {
    pub(crate) op: Operation,
    pub(crate) mask: u32,
    pub(crate) value: u64,
    /// The lane whose value is wanted.
    pub(crate) from: u32,
    pub(crate) site: Site,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Sync,
    Exchange,
    Ballot,
}

/// A thread's asynchronous copies that have not been waited for.
#[derive(Default)]
struct Copies {
    open: Vec<Copy>,
    groups: VecDeque<Vec<Copy>>,
}

struct Copy {
    to: *mut u8,
    from: *const u8,
    bytes: usize,
}

type Fiber = Coroutine<(), (), (), DefaultStack>;

/// What a host's thread keeps from block to block.
#[derive(Default)]
struct Kept {
    stacks: Vec<DefaultStack>,
    shared: Shared,
}

thread_local! {
    static KEPT: RefCell<Kept> = RefCell::default();
    static CURRENT: Cell<Option<NonNull<Block<'static>>>> = const { Cell::new(None) };
}

const WARP: usize = 32;

/// Kernels keep little on their stacks; a guard page is below.
const STACK_BYTES: usize = 64 << 10;

/// Runs one block of a launch; returns which bytes it used, if the launch asks for that.
pub(crate) fn run(launch: &Launch<'_>, index: u32, seed: u64) -> Result<Vec<Access>, SimError> {
    let Kept { mut stacks, mut shared } = KEPT.take();
    shared.begin(launch.geometry.shared_bytes.into());
    let block = Block::new(launch, index, seed, shared);
    let before = CURRENT.replace(Some(NonNull::from(&block).cast()));
    let mut fibers: Vec<Fiber> = (0..block.threads.len()).map(|thread| fiber(&block, thread, stacks.pop())).collect();
    block.schedule(&mut fibers);
    CURRENT.set(before);
    for mut fiber in fibers {
        if !fiber.done() {
            // SAFETY: the fiber's frames are a kernel's, which have no destructors, and the few of this crate below and above
            // them, which own nothing; nobody resumes it.
            unsafe { fiber.force_reset() };
        }
        stacks.push(fiber.into_stack());
    }
    let Block { threads, fault, shared, accesses, .. } = block;
    KEPT.set(Kept { stacks, shared: shared.into_inner() });
    match fault.into_inner() {
        None => Ok(accesses.into_inner()),
        Some((thread, fault)) => {
            let Place { thread, block, .. } = threads[thread].place;
            Err(SimError::Fault { kernel: launch.kernel, block, thread, fault })
        }
    }
}

fn fiber(block: &Block<'_>, thread: usize, stack: Option<DefaultStack>) -> Fiber {
    let stack = stack.unwrap_or_else(|| DefaultStack::new(STACK_BYTES).expect("the host has memory for stacks"));
    let block: NonNull<Block<'static>> = NonNull::from(block).cast();
    Coroutine::with_stack(stack, move |yielder, ()| {
        // SAFETY: `run` keeps the block until all fibers have ended or were given up.
        let block = unsafe { block.as_ref() };
        block.threads[thread].yielder.set(Some(NonNull::from(yielder)));
        // SAFETY: the arguments were checked against the kernel's parameters, and `run` has set the block.
        unsafe { ffi::enter(block.launch.entry, block.launch.arguments.pointers()) };
    })
}

/// The block that the calling kernel's thread is in.
pub(crate) fn current<R>(call: impl FnOnce(&Block<'_>) -> R) -> R {
    let block = CURRENT.get().expect("only kernels call this, and they run in a block");
    // SAFETY: `run` set it and keeps the block until it has set another.
    call(unsafe { block.as_ref() })
}

impl<'a> Block<'a> {
    fn new(launch: &'a Launch<'a>, index: u32, seed: u64, shared: Shared) -> Self {
        let Geometry { blocks, threads, .. } = launch.geometry;
        let at = |index: u32, [x, y, _]: [u32; 3]| [index % x, index / x % y, index / x / y];
        let count: u32 = threads.iter().product();
        let mut ready = Ready::new(seed);
        (0..count).for_each(|thread| ready.push(thread));
        let thread = |thread| Thread {
            place: Place { thread: at(thread, threads), block: at(index, blocks), threads, blocks },
            yielder: Cell::new(None),
            state: Cell::new(State::Running),
            result: Cell::new(0),
            copies: RefCell::default(),
        };
        Self {
            launch,
            threads: (0..count).map(thread).collect(),
            current: Cell::new(0),
            ready: RefCell::new(ready),
            waiting: (0..count as usize).step_by(WARP).map(|_| RefCell::default()).collect(),
            at_barrier: Cell::new(0),
            barrier_site: Cell::new(None),
            fault: RefCell::new(None),
            shared: RefCell::new(shared),
            last: Cell::new(0),
            accesses: RefCell::default(),
        }
    }

    /// Runs threads until all are done, none can go on, or one did what none may.
    fn schedule(&self, fibers: &mut [Fiber]) {
        let mut done = 0;
        loop {
            let Some(thread) = self.ready.borrow_mut().pick() else { break };
            let thread = thread as usize;
            self.current.set(thread);
            ffi::set_place(&self.threads[thread].place);
            if let CoroutineResult::Return(()) = fibers[thread].resume(()) {
                self.threads[thread].state.set(State::Done);
                done += 1;
            }
            if self.fault.borrow().is_some() {
                return;
            }
        }
        if done < fibers.len() {
            let waits = |thread: &Thread| !matches!(thread.state.get(), State::Done);
            let first = self.threads.iter().position(waits).unwrap_or(0);
            *self.fault.borrow_mut() = Some((first, Fault::Deadlock { threads: self.stand() }));
        }
    }

    /// Where all threads stand, those at one place together.
    fn stand(&self) -> String {
        let mut places: Vec<(String, Vec<usize>)> = Vec::new();
        for (index, thread) in self.threads.iter().enumerate() {
            let place = match thread.state.get() {
                State::Running => "running".to_owned(),
                State::Done => "done".to_owned(),
                State::Barrier(site) => format!("at the barrier of {site}"),
                State::Warp(Together { mask, site, .. }) => format!("at {site} with the lanes {mask:#010x}"),
            };
            match places.iter_mut().find(|(known, _)| *known == place) {
                Some((_, threads)) => threads.push(index),
                None => places.push((place, vec![index])),
            }
        }
        let mut out = String::new();
        for (place, threads) in places {
            let _ = writeln!(out, "threads {}: {place}", ranges(&threads));
        }
        out
    }

    fn thread(&self) -> &Thread {
        &self.threads[self.current.get()]
    }

    /// Switches to the scheduler; returns when it picks this thread again.
    fn suspend(&self) {
        let yielder = self.thread().yielder.get().expect("a fiber sets it first");
        // SAFETY: the yielder lies on the stack of the fiber that is running.
        unsafe { yielder.as_ref() }.suspend(());
    }

    /// Ends the launch, and with it this thread.
    fn fail(&self, fault: Fault) -> ! {
        *self.fault.borrow_mut() = Some((self.current.get(), fault));
        loop {
            self.suspend();
        }
    }

    /// Waits until all threads of the block are at the barrier.
    pub(crate) fn barrier(&self, site: Site) {
        if let Some(other) = self.barrier_site.replace(Some(site))
            && self.at_barrier.get() > 0
            && other != site
        {
            self.fail(Fault::Divergent { here: site.to_string(), there: other.to_string() });
        }
        self.at_barrier.set(self.at_barrier.get() + 1);
        if self.at_barrier.get() < self.threads.len() {
            self.thread().state.set(State::Barrier(site));
            self.suspend();
            return;
        }
        self.at_barrier.set(0);
        for (index, thread) in self.threads.iter().enumerate() {
            if index != self.current.get() {
                self.wake(index, thread);
            }
        }
    }

    fn wake(&self, index: usize, thread: &Thread) {
        thread.state.set(State::Running);
        self.ready.borrow_mut().push(index as u32);
    }

    /// Waits until all lanes of the mask are at the same operation, and gives this one's result.
    pub(crate) fn together(&self, mine: Together) -> u64 {
        let me = self.current.get();
        let (first, lane) = (me / WARP * WARP, me % WARP);
        let waiting = &self.waiting[me / WARP];
        let lanes = WARP.min(self.threads.len() - first);
        if mine.mask >> lane & 1 == 0 || u64::from(mine.mask) >> lanes != 0 {
            let missing = if mine.mask >> lane & 1 == 0 { lane as u32 } else { mine.mask.ilog2() };
            self.fail(Fault::Lane { lane: missing, mask: mine.mask });
        }
        self.thread().state.set(State::Warp(mine));
        let joined = {
            let mut waiting = waiting.borrow_mut();
            let at = waiting.iter().position(|(mask, _)| *mask == mine.mask).unwrap_or(waiting.len());
            let arrived = waiting.get(at).map_or(0, |(_, arrived)| *arrived);
            match (arrived, arrived | 1 << lane) {
                (0, one) if one != mine.mask => waiting.push((mine.mask, one)),
                (0, _) => {}
                (_, all) if all == mine.mask => drop(waiting.swap_remove(at)),
                (_, more) => waiting[at].1 = more,
            }
            arrived
        };
        if joined != 0 {
            let other = self.call_of(first + joined.trailing_zeros() as usize);
            if other.op != mine.op || other.site != mine.site {
                self.fail(Fault::Divergent { here: mine.site.to_string(), there: other.site.to_string() });
            }
        }
        if joined | 1 << lane == mine.mask {
            self.complete(first, mine);
        } else {
            self.suspend();
        }
        self.thread().result.get()
    }

    /// What a thread that waits for others of its warp called for.
    fn call_of(&self, thread: usize) -> Together {
        match self.threads[thread].state.get() {
            State::Warp(call) => call,
            _ => unreachable!("it is in `waiting`"),
        }
    }

    /// Works out what each lane gets, and lets all go on.
    fn complete(&self, first: usize, mine: Together) {
        let lanes = (0..WARP).filter(|lane| mine.mask >> lane & 1 == 1);
        let ballot = match mine.op {
            Operation::Ballot => {
                let votes = lanes.clone().filter(|lane| self.call_of(first + lane).value != 0);
                votes.fold(0, |votes, lane| votes | 1 << lane)
            }
            _ => 0,
        };
        for lane in lanes.clone() {
            let call = self.call_of(first + lane);
            let result = match call.op {
                Operation::Sync => 0,
                Operation::Ballot => ballot,
                Operation::Exchange if mine.mask >> (call.from % 32) & 1 == 0 => {
                    self.fail(Fault::Lane { lane: call.from, mask: mine.mask })
                }
                Operation::Exchange => self.call_of(first + call.from as usize % WARP).value,
            };
            self.threads[first + lane].result.set(result);
        }
        let mut ready = self.ready.borrow_mut();
        for thread in lanes.map(|lane| first + lane) {
            self.threads[thread].state.set(State::Running);
            if thread != self.current.get() {
                ready.push(thread as u32);
            }
        }
    }

    /// The host's address of device memory; ends the launch if it may not be used.
    pub(crate) fn resolve(&self, address: u64, bytes: u64, alignment: u64, write: bool) -> *mut u8 {
        let at = DevicePtr::new(address);
        if !address.is_multiple_of(alignment) {
            self.fail(Fault::Misaligned { at, alignment });
        }
        if self.launch.logs {
            self.accesses.borrow_mut().push(Access { bytes: address..address.saturating_add(bytes), write });
        }
        let allocations = self.launch.allocations;
        if let Some(found) = allocations.get(self.last.get()).and_then(|last| last.resolve(address, bytes)) {
            return found;
        }
        let found = allocations.iter().enumerate().find_map(|(index, one)| Some((index, one.resolve(address, bytes)?)));
        match found {
            Some((index, host)) => {
                self.last.set(index);
                host
            }
            None => self.fail(Fault::OutOfRange { at, bytes, write }),
        }
    }

    /// A variable in shared memory.
    pub(crate) fn shared(&self, key: usize, bytes: u64) -> *mut u8 {
        let found = self.shared.borrow_mut().variable(key, bytes);
        let bytes = self.shared.borrow().bytes();
        if bytes > MOST_BYTES {
            self.fail(Fault::SharedMemory { bytes });
        }
        found
    }

    pub(crate) fn dynamic_shared(&self) -> *mut u8 {
        self.shared.borrow_mut().dynamic()
    }

    /// Notes a copy to shared memory.
    pub(crate) fn async_copy(&self, to: *mut u8, address: u64, bytes: u64) {
        let from = self.resolve(address, bytes, bytes, false);
        if !self.shared.borrow().holds(to as usize, bytes) {
            self.fail(Fault::NotShared);
        }
        let copy = Copy { to, from, bytes: bytes as usize };
        self.thread().copies.borrow_mut().open.push(copy);
    }

    pub(crate) fn async_commit(&self) {
        let mut copies = self.thread().copies.borrow_mut();
        let group = std::mem::take(&mut copies.open);
        copies.groups.push_back(group);
    }

    /// Does this thread's oldest copies until at most `left` groups are left.
    pub(crate) fn async_wait(&self, left: usize) {
        let mut copies = self.thread().copies.borrow_mut();
        while copies.groups.len() > left
            && let Some(group) = copies.groups.pop_front()
        {
            for Copy { to, from, bytes } in group {
                // SAFETY: both were checked when the copy was noted, the launch keeps the allocations, and shared memory stays
                // where it is until the block ends. Shared and device memory do not overlap.
                unsafe { to.copy_from_nonoverlapping(from, bytes) };
            }
        }
    }
}

/// Rising numbers as ranges.
fn ranges(numbers: &[usize]) -> String {
    let mut out = String::new();
    let mut rest = numbers;
    while let [first, ..] = rest {
        let count = rest.iter().enumerate().take_while(|(at, number)| **number == first + at).count();
        let separator = if out.is_empty() { "" } else { ", " };
        let _ = match count {
            1 => write!(out, "{separator}{first}"),
            _ => write!(out, "{separator}{first}-{}", first + count - 1),
        };
        rest = &rest[count..];
    }
    out
}
