//! Which way prefixes are found, as a configuration says it.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// How a request finds what earlier ones computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefixKind {
    /// By the hashes of complete blocks, as in vLLM. Blocks are evicted one by one.
    #[default]
    Hash,
    /// By tokens, as in SGLang: nothing need be hashed. Runs of blocks are evicted together, the ends of texts first.
    Radix,
    /// Not at all.
    Off,
}

/// What is no way to find prefixes.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("prefixes are not found by {found:?}: write hash, radix or off")]
pub struct UnknownPrefixKind {
    /// What was written.
    pub found: String,
}

impl PrefixKind {
    const NAMES: [(Self, &'static str); 3] = [(Self::Hash, "hash"), (Self::Radix, "radix"), (Self::Off, "off")];
}

impl FromStr for PrefixKind {
    type Err = UnknownPrefixKind;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let kind = Self::NAMES.iter().find(|(_, name)| *name == text).map(|(kind, _)| *kind);
        kind.ok_or_else(|| UnknownPrefixKind { found: text.to_owned() })
    }
}

impl fmt::Display for PrefixKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hash => "hash",
            Self::Radix => "radix",
            Self::Off => "off",
        })
    }
}
