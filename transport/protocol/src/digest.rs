//! A checksum of KV bytes.

use serde::{Deserialize, Serialize};

/// A 64-bit sum of hashes of runs; digests of parts add up to the digest of the whole.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(u64);

impl Digest {
    /// Wraps the bits.
    #[must_use]
    pub const fn new(raw: u64) -> Self {
        Self(raw)
    }

    /// The bits.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}
