//! What the compiled kernels and this crate say to each other; the other half is `shim/sim.h`.
#![expect(unsafe_code, reason = "C++ calls it and is called")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;

use kvferry_kernels::cuda::Argument;

use crate::block::{self, Operation, Together};

/// A kernel, called with pointers to its arguments. It takes them and never changes what they point to.
pub(crate) type Entry = unsafe extern "C" fn(*const *const c_void);

/// Where a thread is in its grid: `SimPlace` of sim.h.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Place {
    pub(crate) thread: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) threads: [u32; 3],
    pub(crate) blocks: [u32; 3],
}

/// A line of a kernel's source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site {
    file: *const c_char,
    line: c_int,
}

/// `Kernel` of sim.h.
#[repr(C)]
struct RawKernel {
    name: *const c_char,
    entry: Entry,
    sizes: *const usize,
    count: usize,
    next: *const RawKernel,
}

/// A kernel of a family.
pub(crate) struct FoundKernel {
    pub(crate) name: &'static str,
    pub(crate) entry: Entry,
    pub(crate) sizes: Vec<usize>,
}

// SAFETY: the shim defines them so. The first only notes an address, which nobody but a kernel reads, and to run one is unsafe; the
// others give addresses of static objects.
unsafe extern "C" {
    safe fn kvferry_sim_set_place(place: *const Place);
    safe fn kvferry_sim_copy() -> *const RawKernel;
    safe fn kvferry_sim_store() -> *const RawKernel;
    safe fn kvferry_sim_attention() -> *const RawKernel;
    safe fn kvferry_sim_selftest() -> *const RawKernel;
}

/// The kernels of a file; none if there is no such file.
pub(crate) fn kernels(family: &str) -> impl Iterator<Item = FoundKernel> {
    let mut next = match family {
        "copy" => kvferry_sim_copy(),
        "store" => kvferry_sim_store(),
        "attention" => kvferry_sim_attention(),
        "selftest" => kvferry_sim_selftest(),
        _ => std::ptr::null(),
    };
    std::iter::from_fn(move || {
        // SAFETY: the list's members are static objects of the shim, complete before `main` begins.
        let kernel = unsafe { next.as_ref() }?;
        next = kernel.next;
        // SAFETY: the name is a string literal.
        let name = unsafe { CStr::from_ptr(kernel.name) };
        // SAFETY: the sizes are a static array of `count` numbers at least.
        let sizes = unsafe { std::slice::from_raw_parts(kernel.sizes, kernel.count) };
        Some(FoundKernel { name: name.to_str().unwrap_or(""), entry: kernel.entry, sizes: sizes.to_vec() })
    })
}

/// An argument's bytes, aligned to 16.
pub(crate) fn copy_argument(argument: &Argument<'_>) -> Vec<u128> {
    let mut words = vec![0_u128; argument.bytes().div_ceil(size_of::<u128>())];
    // SAFETY: an argument's value is readable while its borrow lasts, and the words are as many bytes at least.
    unsafe { words.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(argument.value().cast(), argument.bytes()) };
    words
}

/// Runs a kernel as the thread that [`set_place`] named, on this stack.
///
/// # Safety
/// The arguments are the kernel's, as [`crate::kernel::Code::arguments`] checked; the block that is running is set.
pub(crate) unsafe fn enter(entry: Entry, arguments: *const *const c_void) {
    // SAFETY: the caller's promise.
    unsafe { entry(arguments) };
}

/// Tells kernels which thread they run as, until the next call; the place stays where it is meanwhile.
pub(crate) fn set_place(place: &Place) {
    kvferry_sim_set_place(place);
}

impl PartialEq for Site {
    fn eq(&self, other: &Self) -> bool {
        self.line == other.line && (self.file == other.file || self.file() == other.file())
    }
}

impl Site {
    fn file(&self) -> &'static str {
        // SAFETY: it is what `__builtin_FILE` gave: a string literal.
        let path = unsafe { CStr::from_ptr(self.file) };
        path.to_str().unwrap_or("?").rsplit('/').next().unwrap_or("?")
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file(), self.line)
    }
}

// Called by kernels only, so always inside of a block. None of them unwinds: a panic in `extern "C"` ends the process.

#[unsafe(no_mangle)]
extern "C" fn kvferry_sim_barrier(file: *const c_char, line: c_int) {
    block::current(|block| block.barrier(Site { file, line }));
}

#[unsafe(no_mangle)]
extern "C" fn kvferry_sim_warp(op: u32, mask: u32, value: u64, from: u32, file: *const c_char, line: c_int) -> u64 {
    let op = match op {
        0 => Operation::Sync,
        1 => Operation::Exchange,
        _ => Operation::Ballot,
    };
    block::current(|block| block.together(Together { op, mask, value, from, site: Site { file, line } }))
}

#[unsafe(no_mangle)]
extern "C" fn kvferry_sim_resolve(address: u64, bytes: u64, alignment: u64, write: bool) -> *mut c_void {
    block::current(|block| block.resolve(address, bytes, alignment, write)).cast()
}

#[unsafe(no_mangle)]
extern "C" fn kvferry_sim_shared(key: *const c_void, bytes: u64) -> *mut c_void {
    block::current(|block| block.shared(key as usize, bytes)).cast()
}

#[unsafe(no_mangle)]
extern "C" fn kvferry_sim_dynamic_shared() -> *mut c_void {
    block::current(|block| block.dynamic_shared()).cast()
}

#[unsafe(no_mangle)]
extern "C" fn kvferry_sim_async_copy(shared: *mut c_void, address: u64, bytes: u64) {
    block::current(|block| block.async_copy(shared.cast(), address, bytes));
}

#[unsafe(no_mangle)]
extern "C" fn kvferry_sim_async_commit() {
    block::current(|block| block.async_commit());
}

#[unsafe(no_mangle)]
extern "C" fn kvferry_sim_async_wait(left: u32) {
    block::current(|block| block.async_wait(left as usize));
}
