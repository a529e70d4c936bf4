//! The versions of a session, and the bytes of messages in them.
//!
//! The crate's own versions go through its codec. The later ones stand for releases to come: the newest model in other bytes, so that
//! who reads in another version than was agreed on is found out.

use std::borrow::Cow;

use crate::codec;
use crate::message::{Message, Wrote};
use crate::wire::{Challenge, HandshakeError, Hello, LaneKind, VERSIONS, VersionRange};

/// What the two hellos of a session lead to, byte for byte as on the wire.
pub(super) fn negotiate(dialler: VersionRange, listener: VersionRange) -> Result<u16, String> {
    let hello = Hello { versions: dialler, lane: LaneKind::Control, nonce: [7; 32] }.encode();
    let hello = Hello::decode(&hello).map_err(|error| error.to_string())?;
    let chosen = listener.newest_common(hello.versions);
    let challenge = Challenge { versions: listener, chosen, busy: false, nonce: [9; 32] }.encode();
    let challenge = Challenge::decode(&challenge).map_err(|error| error.to_string())?;
    match challenge.agreed(dialler) {
        Ok(version) => Ok(version),
        Err(error @ HandshakeError::Version { .. }) => Err(error.to_string()),
        Err(error) => Err(format!("invariant 7: the hellos are not understood: {error}")),
    }
}

pub(super) fn encode(version: u16, message: &Message) -> Result<Vec<u8>, String> {
    let bytes = codec::encode(version.min(VERSIONS.max), message).map_err(|error| error.to_string())?;
    Ok(turn_into(version, bytes))
}

/// Reads a message of a session, which must be in the session's version.
pub(super) fn decode(version: u16, bytes: &[u8]) -> Result<Message, String> {
    codec::decode(version.min(VERSIONS.max), &turn_back(version, bytes)?)
        .map_err(|error| format!("a message cannot be read: {error}"))
}

pub(super) fn encode_wrote(version: u16, wrote: &Wrote) -> Result<Vec<u8>, String> {
    let bytes = codec::encode_wrote(version.min(VERSIONS.max), wrote).map_err(|error| error.to_string())?;
    Ok(turn_into(version, bytes))
}

pub(super) fn decode_wrote(version: u16, bytes: &[u8]) -> Result<Wrote, String> {
    codec::decode_wrote(version.min(VERSIONS.max), &turn_back(version, bytes)?)
        .map_err(|error| format!("a notification cannot be read: {error}"))
}

/// Whether a session of a version can carry a message.
pub(super) fn has(version: u16, message: &Message) -> bool {
    codec::check(version.min(VERSIONS.max), message).is_ok()
}

fn turn_into(version: u16, mut bytes: Vec<u8>) -> Vec<u8> {
    if version > VERSIONS.max {
        bytes[..2].copy_from_slice(&version.to_le_bytes());
        bytes[2..].iter_mut().for_each(|byte| *byte ^= version as u8);
    }
    bytes
}

fn turn_back(version: u16, bytes: &[u8]) -> Result<Cow<'_, [u8]>, String> {
    let found = bytes.first_chunk::<2>().map(|found| u16::from_le_bytes(*found));
    if found != Some(version) {
        return Err(format!("version: {found:?} is spoken in a session of version {version}"));
    }
    if version <= VERSIONS.max {
        return Ok(bytes.into());
    }
    let mut bytes = bytes.to_vec();
    bytes[..2].copy_from_slice(&VERSIONS.max.to_le_bytes());
    bytes[2..].iter_mut().for_each(|byte| *byte ^= version as u8);
    Ok(bytes.into())
}
