//! The pre-shared key.

use std::fmt;

use super::ConfigError;

/// The secret by which the cluster's engines know each other. Nothing shows it but [`expose`](Self::expose).
#[derive(Clone, PartialEq, Eq)]
pub struct PreSharedKey(Box<[u8]>);

impl PreSharedKey {
    /// The shortest key, in bytes.
    pub const MIN_BYTES: usize = 16;
    /// The longest key, in bytes.
    pub const MAX_BYTES: usize = 64;

    /// Takes a key; line ends after it, as editors and `echo` leave them, are not part of it. `origin` says in an error where
    /// it came from.
    ///
    /// # Errors
    /// [`ConfigError::Psk`] if it is too short or too long.
    pub fn new(bytes: &[u8], origin: &str) -> Result<Self, ConfigError> {
        let end = bytes.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
        let bytes = &bytes[..end];
        if !(Self::MIN_BYTES..=Self::MAX_BYTES).contains(&bytes.len()) {
            return Err(ConfigError::Psk { origin: origin.to_owned(), bytes: bytes.len() });
        }
        Ok(Self(bytes.into()))
    }

    /// The secret bytes.
    #[must_use]
    pub fn expose(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for PreSharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PreSharedKey(not shown)")
    }
}
