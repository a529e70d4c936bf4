//! The driver: libcuda, opened at run time, and the kernels that were compiled for devices.
//!
//! Nothing here panics where there is no driver or no device: [`CudaDevice::open`] says so, and nothing else can be had before.
#![expect(unsafe_code, reason = "calls the driver")]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

use super::launch::{Argument, DevicePtr, Geometry, Kernel, Launcher};

/// Why a device cannot be had, or what it refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver, or it has no such device.
    #[error("no CUDA device {ordinal}: {reason}")]
    NoDevice {
        /// The device asked for.
        ordinal: usize,
        /// What is missing.
        reason: String,
    },
    /// The driver is older than what the kernels were compiled with.
    #[error(
        "the driver takes CUDA {driver}, and the kernels were compiled with CUDA {needed}; update the driver, or rebuild the kernels with its toolkit (kernels/cuda/build.sh)"
    )]
    OldDriver {
        /// The version that the driver takes.
        driver: String,
        /// The version of the compiler.
        needed: String,
    },
    /// No such kernel, or none for this device.
    #[error("{kernel} is not among the compiled kernels")]
    NoKernel {
        /// The kernel asked for.
        kernel: Kernel,
    },
    /// The driver refused.
    #[error("{what} failed")]
    Driver {
        /// What was tried.
        what: String,
        /// The driver's answer.
        #[source]
        source: DriverError,
    },
}

/// One device, with the kernels loaded.
pub struct CudaDevice {
    context: Arc<CudaContext>,
    multiprocessors: u32,
    modules: Vec<(&'static str, Module)>,
    functions: Mutex<HashMap<Kernel, Function>>,
}

/// A stream of a device, made here or an engine's.
pub struct CudaQueue {
    device: Arc<CudaDevice>,
    stream: Arc<CudaStream>,
}

/// Device memory that we own; freed on drop.
pub struct CudaMemory {
    device: Arc<CudaDevice>,
    start: sys::CUdeviceptr,
    bytes: usize,
}

#[derive(Clone, Copy)]
struct Module(sys::CUmodule);

#[derive(Clone, Copy)]
struct Function(sys::CUfunction);

// SAFETY: a module belongs to its context, which any thread may make current; the driver locks for itself.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as for a module.
unsafe impl Send for Function {}

/// What nvcc made of the sources: `kernels/cuda/build.sh`.
const FATBINS: [(&str, &[u8]); 3] = [
    ("copy", include_bytes!("../../cuda/built/copy.fatbin")),
    ("store", include_bytes!("../../cuda/built/store.fatbin")),
    ("attention", include_bytes!("../../cuda/built/attention.fatbin")),
];

/// The version of `kernels/cuda/toolkit.txt`, as the driver numbers them.
const TOOLKIT: i32 = 13_000;

/// More shared memory than this must be asked for.
const SHARED_BYTES_FREE: u32 = 48 << 10;

impl CudaDevice {
    /// Opens a device, counted from 0, and loads the kernels.
    ///
    /// # Errors
    /// [`CudaError::NoDevice`] without a driver or without that device; [`CudaError::OldDriver`]; [`CudaError::Driver`].
    pub fn open(ordinal: usize) -> Result<Arc<Self>, CudaError> {
        let none = |reason: String| CudaError::NoDevice { ordinal, reason };
        // SAFETY: it opens the library, as any use of it would.
        if !unsafe { sys::is_culib_present() } {
            return Err(none("there is no driver on this machine (libcuda cannot be opened)".into()));
        }
        let count = CudaContext::device_count().map_err(|error| none(format!("the driver says {error:?}")))?;
        if usize::try_from(count).unwrap_or(0) <= ordinal {
            return Err(none(format!("the driver knows {count} devices")));
        }
        let mut version = 0;
        // SAFETY: the number is ours to be written.
        unsafe { sys::cuDriverGetVersion(&raw mut version) }
            .result()
            .map_err(failed("asking for the driver's version"))?;
        if version < TOOLKIT {
            let name = |version: i32| format!("{}.{}", version / 1000, version % 1000 / 10);
            return Err(CudaError::OldDriver { driver: name(version), needed: name(TOOLKIT) });
        }
        let context = CudaContext::new(ordinal).map_err(failed("opening the device"))?;
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = context.attribute(attribute).map_err(failed("asking for its multiprocessors"))?;
        let mut device = Self {
            context,
            multiprocessors: multiprocessors.max(1).cast_unsigned(),
            modules: Vec::new(),
            functions: Mutex::default(),
        };
        for (family, fatbin) in FATBINS {
            // SAFETY: a fatbin begins with its own length.
            let module = unsafe { result::module::load_data(fatbin.as_ptr().cast()) };
            device.modules.push((family, Module(module.map_err(failed("loading kernels"))?)));
        }
        Ok(Arc::new(device))
    }

    /// Makes a stream.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn queue(self: &Arc<Self>) -> Result<CudaQueue, CudaError> {
        let stream = self.context.new_stream().map_err(failed("making a stream"))?;
        Ok(CudaQueue { device: Arc::clone(self), stream })
    }

    /// Takes an engine's stream (a `cudaStream_t` or `CUstream`).
    ///
    /// # Safety
    /// The stream is of this device's primary context, and lives for as long as the queue.
    #[must_use]
    pub unsafe fn queue_on(self: &Arc<Self>, stream: *mut c_void) -> CudaQueue {
        // SAFETY: the caller's promise.
        let stream = unsafe { self.context.wrap_borrowed_stream(stream.cast()) };
        CudaQueue { device: Arc::clone(self), stream }
    }

    /// Which device of the driver's it is, from 0.
    #[must_use]
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// Allocates device memory; its bytes are undefined.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn allocate(self: &Arc<Self>, bytes: usize) -> Result<CudaMemory, CudaError> {
        self.bind()?;
        // SAFETY: the device's context is current.
        let start = unsafe { result::malloc_sync(bytes.max(1)) }.map_err(failed("allocating device memory"))?;
        Ok(CudaMemory { device: Arc::clone(self), start, bytes })
    }

    /// Makes the device the calling thread's.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        self.context.bind_to_thread().map_err(failed("making the device current"))
    }

    pub(super) fn attribute(&self, attribute: sys::CUdevice_attribute, what: &str) -> Result<i32, CudaError> {
        self.context.attribute(attribute).map_err(failed(what))
    }

    fn function(&self, kernel: Kernel) -> Result<Function, CudaError> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&known) = functions.get(&kernel) {
            return Ok(known);
        }
        let none = || CudaError::NoKernel { kernel };
        let module = self.modules.iter().find(|(family, _)| *family == kernel.family).ok_or_else(none)?.1;
        let name = CString::new(kernel.name).map_err(|_| none())?;
        // SAFETY: the module is loaded for as long as the device is there.
        let function = unsafe { result::module::get_function(module.0, name) };
        let function = Function(function.map_err(failed("finding a kernel"))?);
        functions.insert(kernel, function);
        Ok(function)
    }
}

impl CudaQueue {
    /// Copies bytes to new device memory, behind what is queued.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn upload(&self, bytes: &[u8]) -> Result<CudaMemory, CudaError> {
        let memory = self.device.allocate(bytes.len())?;
        let start = memory.start;
        // SAFETY: that many bytes are allocated; pageable memory has been read when the call returns.
        unsafe { result::memcpy_htod_async(start, bytes, self.stream.cu_stream()) }
            .map_err(failed("copying to the device"))?;
        Ok(memory)
    }

    /// Reads device memory once all that is queued has run.
    ///
    /// # Errors
    /// [`CudaError::Driver`]: also of what was queued before.
    pub fn download(&self, memory: &CudaMemory) -> Result<Vec<u8>, CudaError> {
        self.bind()?;
        let mut out = vec![0; memory.bytes];
        // SAFETY: that many bytes are allocated at both, and `out` is not touched before the stream is through.
        unsafe { result::memcpy_dtoh_async(&mut out, memory.start, self.stream.cu_stream()) }
            .map_err(failed("copying from the device"))?;
        self.synchronize()?;
        Ok(out)
    }

    /// Waits until all that is queued has run.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.stream.synchronize().map_err(failed("waiting for a stream"))
    }

    /// The driver's stream.
    pub(crate) fn raw(&self) -> sys::CUstream {
        self.stream.cu_stream()
    }

    fn bind(&self) -> Result<(), CudaError> {
        self.device.bind()
    }
}

impl fmt::Debug for CudaQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaQueue").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Launcher for CudaQueue {
    type Error = CudaError;

    fn multiprocessors(&self) -> u32 {
        self.device.multiprocessors
    }

    unsafe fn launch(&self, kernel: Kernel, geometry: Geometry, arguments: &[Argument<'_>]) -> Result<(), Self::Error> {
        self.bind()?;
        let function = self.device.function(kernel)?;
        let Geometry { blocks: [bx, by, bz], threads: [tx, ty, tz], shared_bytes } = geometry;
        let launching = || failed(&format!("launching {kernel}"));
        if shared_bytes > SHARED_BYTES_FREE {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is of a loaded module.
            unsafe { result::function::set_function_attribute(function.0, attribute, shared_bytes.cast_signed()) }
                .map_err(launching())?;
        }
        let mut values: Vec<*mut c_void> = arguments.iter().map(|argument| argument.value().cast_mut()).collect();
        let stream = self.stream.cu_stream();
        // SAFETY: the caller vouches for the arguments, which the driver copies before it returns.
        unsafe { result::launch_kernel(function.0, (bx, by, bz), (tx, ty, tz), shared_bytes, stream, &mut values) }
            .map_err(launching())
    }
}

impl CudaMemory {
    /// Its address.
    #[must_use]
    pub const fn ptr(&self) -> DevicePtr {
        DevicePtr::new(self.start)
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if self.device.context.bind_to_thread().is_ok() {
            // SAFETY: it was allocated in this context and is freed once; the driver waits for what uses it. A failure is one
            // that the device's next call reports.
            let _ = unsafe { result::free_sync(self.start) };
        }
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            for (_, module) in &self.modules {
                // SAFETY: loaded in this context; queues hold the device, so none is left to launch from it.
                let _ = unsafe { result::module::unload(module.0) };
            }
        }
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("ordinal", &self.context.ordinal()).finish_non_exhaustive()
    }
}

pub(super) fn failed(what: &str) -> impl FnOnce(DriverError) -> CudaError + use<> {
    let what = what.to_owned();
    move |source| CudaError::Driver { what, source }
}
