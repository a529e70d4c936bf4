//! The kernels that were compiled for the CPU.

use std::ffi::c_void;

use kvferry_kernels::cuda::{Argument, Kernel};

use crate::error::SimError;
use crate::ffi;

/// A kernel's code.
#[derive(Clone, Debug)]
pub(crate) struct Code {
    pub(crate) entry: ffi::Entry,
    /// Bytes of each parameter.
    sizes: Vec<usize>,
}

/// A launch's arguments, copied.
#[derive(Debug)]
pub(crate) struct Arguments {
    /// What `pointers` point to; kernels have parameters that are aligned to 16 bytes at most.
    _values: Vec<Vec<u128>>,
    pointers: Vec<*const c_void>,
}

#[expect(unsafe_code, reason = "the pointers are to memory that the type owns")]
// SAFETY: the pointers lead to the values beside them, which nobody changes.
unsafe impl Send for Arguments {}
#[expect(unsafe_code, reason = "as above")]
// SAFETY: as above.
unsafe impl Sync for Arguments {}

impl Code {
    pub(crate) fn find(kernel: Kernel) -> Result<Self, SimError> {
        let found = ffi::kernels(kernel.family).find(|found| found.name == kernel.name);
        let found = found.ok_or(SimError::NoKernel { kernel })?;
        Ok(Self { entry: found.entry, sizes: found.sizes })
    }

    /// Copies a launch's arguments.
    pub(crate) fn arguments(&self, kernel: Kernel, arguments: &[Argument<'_>]) -> Result<Arguments, SimError> {
        let found: Vec<usize> = arguments.iter().map(Argument::bytes).collect();
        if found != self.sizes {
            return Err(SimError::Arguments { kernel, expected: self.sizes.clone(), found });
        }
        let values: Vec<Vec<u128>> = arguments.iter().map(ffi::copy_argument).collect();
        let pointers = values.iter().map(|value| value.as_ptr().cast()).collect();
        Ok(Arguments { _values: values, pointers })
    }
}

impl Arguments {
    /// As a kernel wants them: where each value lies.
    pub(crate) fn pointers(&self) -> *const *const c_void {
        self.pointers.as_ptr()
    }
}
