//! Values from a peer whose length has a limit, checked where they are built and where they are read.

use std::fmt;

use serde::de::{self, Deserializer, SeqAccess, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::transfer::Rect;

/// A value is longer than its limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {found} is over the limit of {limit}")]
pub struct TooLong {
    /// What is limited.
    pub what: &'static str,
    /// How long it is.
    pub found: usize,
    /// How long it may be.
    pub limit: usize,
}

const fn check(what: &'static str, found: usize, limit: usize) -> Result<(), TooLong> {
    if found > limit { Err(TooLong { what, found, limit }) } else { Ok(()) }
}

macro_rules! bounded_bytes {
    ($(#[$doc:meta])* $name:ident, $what:literal, $max:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Default)]
        pub struct $name(Vec<u8>);

        impl $name {
            /// The most bytes.
            pub const MAX_BYTES: usize = $max;

            /// Checks and wraps.
            ///
            /// # Errors
            /// [`TooLong`] over [`Self::MAX_BYTES`].
            pub fn new(bytes: Vec<u8>) -> Result<Self, TooLong> {
                check($what, bytes.len(), Self::MAX_BYTES)?;
                Ok(Self(bytes))
            }

            /// The bytes.
            #[must_use]
            pub fn as_slice(&self) -> &[u8] {
                &self.0
            }

            /// The bytes, taken out.
            #[must_use]
            pub fn into_vec(self) -> Vec<u8> {
                self.0
            }
        }

        impl fmt::Debug for $name {
            /// Shows the length only: what an engine or a window says does not belong in a log.
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({} bytes)"), self.0.len())
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_bytes(&self.0)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let bytes = deserializer.deserialize_bytes(BytesVisitor { what: $what, limit: Self::MAX_BYTES })?;
                Ok(Self(bytes))
            }
        }
    };
}

bounded_bytes! {
    /// How a grant's window is laid out; the layout algebra writes and reads it.
    WindowBytes, "window", 64 << 10
}

bounded_bytes! {
    /// A message between two engines.
    EngineBytes, "engine message", (1 << 20) - 64
}

bounded_bytes! {
    /// Identities of blocks, one after another.
    HashBytes, "block hashes", 64 * 32
}

impl HashBytes {
    /// Bytes of one.
    pub const EACH: usize = 32;
}

struct BytesVisitor {
    what: &'static str,
    limit: usize,
}

impl<'de> Visitor<'de> for BytesVisitor {
    type Value = Vec<u8>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of at most {} bytes", self.what, self.limit)
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
        check(self.what, bytes.len(), self.limit).map_err(E::custom)?;
        Ok(bytes.to_vec())
    }
}

/// A short text for a person. Longer ones are cut at the limit, at a character's edge.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize)]
#[serde(transparent)]
pub struct Text(String);

impl Text {
    /// The most bytes.
    pub const MAX_BYTES: usize = 256;

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for Text {
    fn from(mut text: String) -> Self {
        text.truncate(text.floor_char_boundary(Self::MAX_BYTES));
        Self(text)
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self(text[..text.floor_char_boundary(Self::MAX_BYTES)].to_owned())
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_str(TextVisitor)
    }
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = Text;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a text of at most {} bytes", Text::MAX_BYTES)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Text, E> {
        check("text", text.len(), Text::MAX_BYTES).map_err(E::custom)?;
        Ok(Text(text.to_owned()))
    }
}

/// The rectangles that a grant asks for.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(transparent)]
pub struct Missing(Vec<Rect>);

impl Missing {
    /// The most rectangles.
    pub const MAX_RECTS: usize = 1024;

    /// Checks and wraps.
    ///
    /// # Errors
    /// [`TooLong`] over [`Self::MAX_RECTS`].
    pub fn new(rects: Vec<Rect>) -> Result<Self, TooLong> {
        check("missing rectangles", rects.len(), Self::MAX_RECTS)?;
        Ok(Self(rects))
    }

    /// The rectangles.
    #[must_use]
    pub fn as_slice(&self) -> &[Rect] {
        &self.0
    }
}

impl<'de> Deserialize<'de> for Missing {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(MissingVisitor)
    }
}

struct MissingVisitor;

impl<'de> Visitor<'de> for MissingVisitor {
    type Value = Missing;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {} rectangles", Missing::MAX_RECTS)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Missing, A::Error> {
        // The count in front of the rectangles is the peer's claim: nothing is reserved for it.
        let mut rects = Vec::new();
        while let Some(rect) = seq.next_element()? {
            check("missing rectangles", rects.len() + 1, Missing::MAX_RECTS).map_err(de::Error::custom)?;
            rects.push(rect);
        }
        Ok(Missing(rects))
    }
}

/// The transport's key of a granted window: a secret between two peers, opaque to the machines.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OpaqueKey(u128);

impl OpaqueKey {
    /// Wraps the bits.
    #[must_use]
    pub const fn new(bits: u128) -> Self {
        Self(bits)
    }

    /// The bits.
    #[must_use]
    pub const fn get(self) -> u128 {
        self.0
    }
}

impl fmt::Debug for OpaqueKey {
    /// Shows only enough to tell grants apart in a log: the key is a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OpaqueKey({:04x}..)", self.0 >> 112)
    }
}
