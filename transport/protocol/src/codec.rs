//! The bytes of messages: a version, then bincode 2 (little-endian, variable-length integers) of the serde model.
//!
//! The only place that knows bincode. Golden bytes of every version are kept in `tests/golden.rs`.
//!
//! | version | what it has |
//! |---|---|
//! | 1 | all messages but those below |
//! | 2 | [`Message::Spare`] |
//! | 3 | no other messages; identities with offers, and frames that lend memory ([`wire`]) |
//!
//! A session speaks one version, the newest that both sides know. What one side says is written in it and read in it: another one is
//! a typed error on either side, and so is a message that the version does not have.

use bincode::config;
use bincode::error::{DecodeError, EncodeError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::message::{Message, Wrote};
use crate::wire;

/// The versions of the message format that this release reads and writes: those of the protocol.
pub const VERSIONS: std::ops::RangeInclusive<u16> = wire::VERSIONS.min..=wire::VERSIONS.max;

/// The longest encoded message, in bytes.
pub const MAX_MESSAGE_BYTES: usize = 1 << 20;

/// The longest value that crosses between processes of one engine, in bytes.
pub const MAX_LOCAL_BYTES: usize = 64 << 20;

/// The longest encoded notification of a write, in bytes.
pub const MAX_WROTE_BYTES: usize = 64;

/// Why bytes are not a message, or a message cannot become bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// Longer than the limit.
    #[error("{what}: {found} bytes are over the limit of {limit}")]
    TooLong {
        /// What was encoded or decoded.
        what: &'static str,
        /// How long it is, or that it is at least this long.
        found: usize,
        /// How long it may be.
        limit: usize,
    },
    /// Too short to hold a version.
    #[error("{what}: {found} bytes hold no version")]
    NoVersion {
        /// What was decoded.
        what: &'static str,
        /// How long it is.
        found: usize,
    },
    /// A version that this release does not read.
    #[error("{what}: version {found} is not among {min} to {max}; both sides must run neighbouring releases")]
    Version {
        /// What was decoded.
        what: &'static str,
        /// The version found.
        found: u16,
        /// The lowest version read.
        min: u16,
        /// The highest version read.
        max: u16,
    },
    /// Another version than the session's.
    #[error("{what}: version {found} is spoken in a session of version {session}")]
    OtherVersion {
        /// What was decoded.
        what: &'static str,
        /// The version found.
        found: u16,
        /// The session's.
        session: u16,
    },
    /// A message that the session's version does not have.
    #[error(
        "{message} is a message since version {since}, the session speaks version {session}; the peer must be upgraded first"
    )]
    NotInVersion {
        /// Which message.
        message: &'static str,
        /// The first version that has it.
        since: u16,
        /// The session's.
        session: u16,
    },
    /// The bytes do not follow the format.
    #[error("{what}: {problem}")]
    Malformed {
        /// What was decoded.
        what: &'static str,
        /// What is wrong.
        problem: String,
    },
    /// Bytes are left over.
    #[error("{what}: {found} bytes follow the end")]
    Trailing {
        /// What was decoded.
        what: &'static str,
        /// How many.
        found: usize,
    },
}

/// Whether a session of a version can carry a message.
///
/// # Errors
/// [`CodecError::NotInVersion`] if it does not have the message yet.
pub const fn check(session: u16, message: &Message) -> Result<(), CodecError> {
    let since = message.since();
    if since <= session {
        return Ok(());
    }
    Err(CodecError::NotInVersion { message: message.name(), since, session })
}

/// Encodes a message for a session of a version.
///
/// # Errors
/// [`CodecError::Version`] for a version that is not in [`VERSIONS`]; [`CodecError::NotInVersion`]; [`CodecError::TooLong`].
pub fn encode(session: u16, message: &Message) -> Result<Vec<u8>, CodecError> {
    check(session, message)?;
    encode_as::<_, MAX_MESSAGE_BYTES>("message", session, message)
}

/// Decodes a message of a session of a version.
///
/// # Errors
/// [`CodecError`]: too long, of another version, not a message of this one, malformed, over the limit of a field, or with bytes left
/// over.
pub fn decode(session: u16, bytes: &[u8]) -> Result<Message, CodecError> {
    let message = decode_as::<_, MAX_MESSAGE_BYTES>("message", Some(session), bytes)?;
    check(session, &message)?;
    Ok(message)
}

/// Encodes the notification of a write for a session of a version.
///
/// # Errors
/// [`CodecError::Version`] for a version that is not in [`VERSIONS`].
pub fn encode_wrote(session: u16, wrote: &Wrote) -> Result<Vec<u8>, CodecError> {
    encode_as::<_, MAX_WROTE_BYTES>("notification", session, wrote)
}

/// Decodes the notification of a write of a session of a version.
///
/// # Errors
/// As [`decode`].
pub fn decode_wrote(session: u16, bytes: &[u8]) -> Result<Wrote, CodecError> {
    decode_as::<_, MAX_WROTE_BYTES>("notification", Some(session), bytes)
}

/// Encodes any other value that crosses a process boundary, in a version: the session's, or, before there is one, the oldest of
/// [`VERSIONS`], which every neighbouring release reads.
///
/// # Errors
/// [`CodecError::Version`] for a version that is not in [`VERSIONS`]; [`CodecError::TooLong`] over [`MAX_MESSAGE_BYTES`].
pub fn encode_value<T: Serialize>(what: &'static str, version: u16, value: &T) -> Result<Vec<u8>, CodecError> {
    encode_as::<_, MAX_MESSAGE_BYTES>(what, version, value)
}

/// Decodes a value of [`encode_value`], of any version in [`VERSIONS`].
///
/// # Errors
/// As [`decode`].
pub fn decode_value<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T, CodecError> {
    decode_as::<_, MAX_MESSAGE_BYTES>(what, None, bytes)
}

/// Encodes a value that crosses between processes of one engine and no further: it may be longer than a message.
///
/// # Errors
/// [`CodecError::TooLong`] over [`MAX_LOCAL_BYTES`].
pub fn encode_local<T: Serialize>(what: &'static str, value: &T) -> Result<Vec<u8>, CodecError> {
    encode_as::<_, MAX_LOCAL_BYTES>(what, *VERSIONS.end(), value)
}

/// Decodes a value of [`encode_local`].
///
/// # Errors
/// As [`decode`].
pub fn decode_local<T: DeserializeOwned>(what: &'static str, bytes: &[u8]) -> Result<T, CodecError> {
    decode_as::<_, MAX_LOCAL_BYTES>(what, None, bytes)
}

const VERSION_BYTES: usize = 2;

fn check_version(what: &'static str, found: u16) -> Result<(), CodecError> {
    if VERSIONS.contains(&found) {
        return Ok(());
    }
    Err(CodecError::Version { what, found, min: *VERSIONS.start(), max: *VERSIONS.end() })
}

fn encode_as<T: Serialize, const LIMIT: usize>(
    what: &'static str,
    version: u16,
    value: &T,
) -> Result<Vec<u8>, CodecError> {
    check_version(what, version)?;
    // Most messages fit, and need not grow step by step.
    let mut bytes = Vec::with_capacity(64);
    bytes.extend_from_slice(&version.to_le_bytes());
    bincode::serde::encode_into_std_write(value, &mut bytes, config::standard())
        .map_err(|error: EncodeError| CodecError::Malformed { what, problem: error.to_string() })?;
    check_length(what, bytes.len(), LIMIT)?;
    Ok(bytes)
}

fn decode_as<T: DeserializeOwned, const LIMIT: usize>(
    what: &'static str,
    session: Option<u16>,
    bytes: &[u8],
) -> Result<T, CodecError> {
    check_length(what, bytes.len(), LIMIT)?;
    let Some((version, body)) = bytes.split_first_chunk::<VERSION_BYTES>() else {
        return Err(CodecError::NoVersion { what, found: bytes.len() });
    };
    let found = u16::from_le_bytes(*version);
    check_version(what, found)?;
    if let Some(session) = session.filter(|&session| session != found) {
        return Err(CodecError::OtherVersion { what, found, session });
    }
    let config = config::standard().with_limit::<LIMIT>();
    let (value, used) = bincode::serde::decode_from_slice(body, config)
        .map_err(|error: DecodeError| CodecError::Malformed { what, problem: error.to_string() })?;
    match body.len() - used {
        0 => Ok(value),
        found => Err(CodecError::Trailing { what, found }),
    }
}

const fn check_length(what: &'static str, found: usize, limit: usize) -> Result<(), CodecError> {
    if found > limit { Err(CodecError::TooLong { what, found, limit }) } else { Ok(()) }
}
