//! What a launch is, whoever executes it.
#![expect(unsafe_code, reason = "who launches a kernel vouches for what it does to memory")]

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;

/// An address in a device's memory; means nothing to the host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(transparent)]
pub struct DevicePtr(u64);

/// A kernel: the file that it is in, and its name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Kernel {
    /// The file's name without `.cu`: a family of kernels that is loaded as a whole.
    pub family: &'static str,
    /// The function.
    pub name: &'static str,
}

/// How many threads a launch has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Blocks, along x, y and z.
    pub blocks: [u32; 3],
    /// Threads of each block, along x, y and z.
    pub threads: [u32; 3],
    /// Shared memory of each block beside what the kernel declares, in bytes.
    pub shared_bytes: u32,
}

/// One argument of a launch: where its value lies on the host, and its size.
///
/// The value is read while [`Launcher::launch`] runs, and not after.
#[derive(Clone, Copy, Debug)]
pub struct Argument<'a> {
    value: *const c_void,
    bytes: usize,
    borrowed: PhantomData<&'a ()>,
}

/// One queue of one device: launches run in their order, one after the other, and a launch returns before it has run.
///
/// A queue is a CUDA stream, or what executes kernels in its place.
pub trait Launcher {
    /// Why a launch, or one before it, failed.
    type Error: std::error::Error + Send + Sync + 'static;

    /// How many blocks run side by side at least: the device's multiprocessors.
    fn multiprocessors(&self) -> u32;

    /// Puts a kernel on the queue.
    ///
    /// # Errors
    /// The device does not have the kernel, does not take the geometry, or an earlier launch has failed.
    ///
    /// # Safety
    /// The arguments are the kernel's parameters in their order. What they say of device memory is true, and stays so until the
    /// queue is past the launch: it is allocated, and nobody else uses it in a way that excludes the kernel's.
    unsafe fn launch(&self, kernel: Kernel, geometry: Geometry, arguments: &[Argument<'_>]) -> Result<(), Self::Error>;
}

impl DevicePtr {
    /// Wraps an address, as the driver or an engine's allocator gives it.
    #[must_use]
    pub const fn new(address: u64) -> Self {
        Self(address)
    }

    /// The address.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The address so many bytes further on.
    ///
    /// # Panics
    /// If it does not fit 64 bits.
    #[must_use]
    pub const fn offset(self, bytes: u64) -> Self {
        Self(self.0.checked_add(bytes).expect("device addresses fit 64 bits"))
    }
}

impl Geometry {
    /// A row of blocks of a row of threads, without more shared memory than the kernel declares.
    #[must_use]
    pub const fn row(blocks: u32, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared_bytes: 0 }
    }
}

impl<'a> Argument<'a> {
    /// Takes a value that the kernel gets byte by byte: a number, a device address, or a structure that is laid out as in C.
    #[must_use]
    pub const fn of<T: Copy>(value: &'a T) -> Self {
        Self { value: std::ptr::from_ref(value).cast(), bytes: size_of::<T>(), borrowed: PhantomData }
    }

    /// Where the value lies; readable while the borrow lasts.
    #[must_use]
    pub const fn value(&self) -> *const c_void {
        self.value
    }

    /// The value's size.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl fmt::Display for DevicePtr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {:#x}", self.0)
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}.cu", self.name, self.family)
    }
}
