//! A rectangle of a transfer: a range of tokens times a range of layers.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Tokens times layers, never empty. Tokens count from the sequence's start, layers over all pipeline stages.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "RawRect", into = "RawRect")]
pub struct Rect {
    token_first: u32,
    token_end: u32,
    layer_first: u16,
    layer_end: u16,
}

/// A rectangle without cells.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tokens {tokens:?} x layers {layers:?} is empty; give at least one token and one layer")]
pub struct EmptyRect {
    /// The tokens.
    pub tokens: Range<u32>,
    /// The layers.
    pub layers: Range<u16>,
}

#[derive(Serialize, Deserialize)]
struct RawRect(u32, u32, u16, u16);

impl Rect {
    /// Tokens times layers.
    ///
    /// # Errors
    /// [`EmptyRect`] if either range is empty.
    pub fn new(tokens: Range<u32>, layers: Range<u16>) -> Result<Self, EmptyRect> {
        if tokens.is_empty() || layers.is_empty() {
            return Err(EmptyRect { tokens, layers });
        }
        Ok(Self { token_first: tokens.start, token_end: tokens.end, layer_first: layers.start, layer_end: layers.end })
    }

    /// The tokens.
    #[must_use]
    pub const fn tokens(self) -> Range<u32> {
        self.token_first..self.token_end
    }

    /// The layers.
    #[must_use]
    pub const fn layers(self) -> Range<u16> {
        self.layer_first..self.layer_end
    }

    /// How many (token, layer) pairs.
    #[must_use]
    pub fn cells(self) -> u64 {
        u64::from(self.token_end - self.token_first) * u64::from(self.layer_end - self.layer_first)
    }

    /// Whether `other` lies inside.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.token_first <= other.token_first
            && other.token_end <= self.token_end
            && self.layer_first <= other.layer_first
            && other.layer_end <= self.layer_end
    }

    /// The cells of both, if there are any.
    #[must_use]
    pub fn intersect(self, other: Self) -> Option<Self> {
        let tokens = self.token_first.max(other.token_first)..self.token_end.min(other.token_end);
        let layers = self.layer_first.max(other.layer_first)..self.layer_end.min(other.layer_end);
        Self::new(tokens, layers).ok()
    }

    /// Whether they share a cell.
    #[must_use]
    pub const fn overlaps(self, other: Self) -> bool {
        self.token_first < other.token_end
            && other.token_first < self.token_end
            && self.layer_first < other.layer_end
            && other.layer_first < self.layer_end
    }
}

impl fmt::Display for Rect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tokens {:?} x layers {:?}", self.tokens(), self.layers())
    }
}

impl TryFrom<RawRect> for Rect {
    type Error = EmptyRect;

    fn try_from(RawRect(token_first, token_end, layer_first, layer_end): RawRect) -> Result<Self, EmptyRect> {
        Self::new(token_first..token_end, layer_first..layer_end)
    }
}

impl From<Rect> for RawRect {
    fn from(rect: Rect) -> Self {
        Self(rect.token_first, rect.token_end, rect.layer_first, rect.layer_end)
    }
}
