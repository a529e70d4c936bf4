//! The element types that device kernels know.

use std::fmt;

use crate::dtype::KvDtype;

/// The element type of a tensor or a cache in device memory; numbered as in `kernels/cuda/elements.cuh`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u32)]
pub enum Element {
    /// IEEE 754 binary32.
    F32 = 0,
    /// IEEE 754 binary16.
    F16 = 1,
    /// The upper half of binary32.
    Bf16 = 2,
    /// FP8 with four bits of exponent: at most 448, no infinity. Source: arXiv 2209.05433.
    E4m3 = 3,
    /// FP8 with five bits of exponent: at most 57344. Source: as above.
    E5m2 = 4,
}

impl Element {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::E4m3 | Self::E5m2 => 1,
        }
    }

    /// Its name in the names of kernels.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::E4m3 => "e4m3",
            Self::E5m2 => "e5m2",
        }
    }
}

impl From<KvDtype> for Element {
    fn from(dtype: KvDtype) -> Self {
        match dtype {
            KvDtype::F32 => Self::F32,
            KvDtype::F16 => Self::F16,
            KvDtype::Bf16 => Self::Bf16,
        }
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
