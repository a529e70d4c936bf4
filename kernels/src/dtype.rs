//! The element types that a KV cache may hold.

use std::fmt;
use std::str::FromStr;

/// The element type of a KV cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KvDtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
}

impl KvDtype {
    /// Every type.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A string that names no element type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("KV dtype {name:?} is unknown; write f32, f16 or bf16")]
pub struct KvDtypeError {
    /// The refused name.
    pub name: String,
}

impl FromStr for KvDtype {
    type Err = KvDtypeError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|dtype| dtype.name() == name);
        known.ok_or_else(|| KvDtypeError { name: name.chars().take(32).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dtype_is_shown_as_it_is_read() {
        for dtype in KvDtype::ALL {
            assert_eq!(dtype.to_string().parse(), Ok(dtype));
        }
        assert!("fp8".parse::<KvDtype>().unwrap_err().to_string().contains("f32, f16 or bf16"));
    }
}
