//! The two fixed-size messages that are read before anyone has proved anything.

use crate::wire::error::{HandshakeError, HandshakeStep, WireError};

/// What every handshake message and frame begins with.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"KVFY");

/// Bytes of a hello and of a challenge.
pub(crate) const HELLO_BYTES: usize = 48;
pub(crate) const NONCE_BYTES: usize = 32;

const KIND_HELLO: u8 = 1;
const KIND_CHALLENGE: u8 = 2;
const NONCE_AT: usize = 16;

/// The protocol versions that this release speaks; [`codec`](crate::codec) says what each has.
pub const VERSIONS: VersionRange = VersionRange { min: 1, max: 3 };

/// Protocol versions, both ends included.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VersionRange {
    /// The oldest; at least 1.
    pub min: u16,
    /// The newest.
    pub max: u16,
}

impl VersionRange {
    /// The same without what is newer than `newest`: an endpoint that speaks as an older release does. Never empty.
    #[must_use]
    pub fn up_to(self, newest: u16) -> Self {
        Self { min: self.min, max: self.max.min(newest).max(self.min) }
    }

    /// The newest version that both speak.
    #[must_use]
    pub fn newest_common(self, other: Self) -> Option<u16> {
        let newest = self.max.min(other.max);
        (newest >= self.min && newest >= other.min && newest > 0).then_some(newest)
    }
}

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaneKind {
    /// Messages, keep-alives and the life of the session.
    Control,
    /// Payload and its acknowledgements.
    Data,
}

/// The dialler's first message: 48 bytes, all of them checked.
///
/// `magic u32, kind u8 = 1, lane u8, min u16, max u16, zero [u8; 6], nonce [u8; 32]`, little-endian.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Hello {
    /// What the dialler speaks.
    pub versions: VersionRange,
    /// What the connection is for.
    pub lane: LaneKind,
    /// 32 random bytes, fresh for each handshake.
    pub nonce: [u8; NONCE_BYTES],
}

/// The listener's answer: 48 bytes, all of them checked.
///
/// `magic u32, kind u8 = 2, outcome u8, min u16, max u16, chosen u16, zero [u8; 4], nonce [u8; 32]`, little-endian.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Challenge {
    /// What the listener speaks.
    pub versions: VersionRange,
    /// The version of the session; `None` if the listener goes no further.
    pub chosen: Option<u16>,
    /// Whether it goes no further because it has too many handshakes going on.
    pub busy: bool,
    /// 32 random bytes, fresh for each handshake.
    pub nonce: [u8; NONCE_BYTES],
}

impl Hello {
    /// The message's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut out = prefix(KIND_HELLO, lane_code(self.lane), self.versions);
        out[NONCE_AT..].copy_from_slice(&self.nonce);
        out
    }

    /// Reads a message.
    ///
    /// # Errors
    /// [`WireError`] if any byte is not what the format says.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (lane, versions) = decode_prefix("a hello", KIND_HELLO, bytes)?;
        let lane = match lane {
            0 => LaneKind::Control,
            1 => LaneKind::Data,
            other => return Err(WireError::Value { what: "the lane kind of a hello", found: other.into() }),
        };
        zeroes("the reserved bytes of a hello", &bytes[10..NONCE_AT])?;
        Ok(Self { versions, lane, nonce: nonce(bytes) })
    }
}

impl Challenge {
    /// The message's bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        let outcome = match (self.chosen, self.busy) {
            (Some(_), _) => 0,
            (None, false) => 1,
            (None, true) => 2,
        };
        let mut out = prefix(KIND_CHALLENGE, outcome, self.versions);
        out[10..12].copy_from_slice(&self.chosen.unwrap_or(0).to_le_bytes());
        out[NONCE_AT..].copy_from_slice(&self.nonce);
        out
    }

    /// Reads a message.
    ///
    /// # Errors
    /// [`WireError`] if any byte is not what the format says.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let (outcome, versions) = decode_prefix("a challenge", KIND_CHALLENGE, bytes)?;
        let chosen = u16::from_le_bytes([bytes[10], bytes[11]]);
        zeroes("the reserved bytes of a challenge", &bytes[12..NONCE_AT])?;
        let (chosen, busy) = match (outcome, chosen) {
            (0, chosen) if (versions.min..=versions.max).contains(&chosen) => (Some(chosen), false),
            (1, 0) => (None, false),
            (2, 0) => (None, true),
            (_, chosen) => return Err(WireError::Value { what: "the outcome of a challenge", found: chosen.into() }),
        };
        Ok(Self { versions, chosen, busy, nonce: nonce(bytes) })
    }

    /// The version to go on with, as the dialler sees it.
    pub(crate) fn agreed(&self, ours: VersionRange) -> Result<u16, HandshakeError> {
        match self.chosen {
            Some(version) if (ours.min..=ours.max).contains(&version) => Ok(version),
            None if self.busy => Err(HandshakeError::Busy),
            None => Err(version_error(ours, self.versions)),
            Some(version) => Err(HandshakeError::Malformed {
                step: HandshakeStep::Challenge,
                source: WireError::Value { what: "the chosen version", found: version.into() },
            }),
        }
    }
}

pub(crate) fn version_error(ours: VersionRange, theirs: VersionRange) -> HandshakeError {
    HandshakeError::Version { our_min: ours.min, our_max: ours.max, their_min: theirs.min, their_max: theirs.max }
}

fn lane_code(lane: LaneKind) -> u8 {
    match lane {
        LaneKind::Control => 0,
        LaneKind::Data => 1,
    }
}

fn prefix(kind: u8, code: u8, versions: VersionRange) -> [u8; HELLO_BYTES] {
    let mut out = [0; HELLO_BYTES];
    out[..4].copy_from_slice(&MAGIC.to_le_bytes());
    out[4] = kind;
    out[5] = code;
    out[6..8].copy_from_slice(&versions.min.to_le_bytes());
    out[8..10].copy_from_slice(&versions.max.to_le_bytes());
    out
}

fn decode_prefix(what: &'static str, kind: u8, bytes: &[u8]) -> Result<(u8, VersionRange), WireError> {
    if bytes.len() != HELLO_BYTES {
        return Err(WireError::Length { what, found: bytes.len() as u64, want: HELLO_BYTES as u64 });
    }
    let magic = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    if magic != MAGIC {
        return Err(WireError::Magic { what, found: magic, want: MAGIC });
    }
    if bytes[4] != kind {
        return Err(WireError::Value { what: "the kind of a handshake message", found: bytes[4].into() });
    }
    let versions =
        VersionRange { min: u16::from_le_bytes([bytes[6], bytes[7]]), max: u16::from_le_bytes([bytes[8], bytes[9]]) };
    if versions.min == 0 || versions.min > versions.max {
        return Err(WireError::Value { what: "the oldest version", found: versions.min.into() });
    }
    Ok((bytes[5], versions))
}

fn zeroes(what: &'static str, bytes: &[u8]) -> Result<(), WireError> {
    match bytes.iter().find(|&&b| b != 0) {
        Some(&found) => Err(WireError::Value { what, found: found.into() }),
        None => Ok(()),
    }
}

fn nonce(bytes: &[u8]) -> [u8; NONCE_BYTES] {
    let mut nonce = [0; NONCE_BYTES];
    nonce.copy_from_slice(&bytes[NONCE_AT..]);
    nonce
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: VersionRange = VersionRange { min: 1, max: 3 };

    #[test]
    fn golden_bytes_of_version_1() {
        let hello = Hello { versions: RANGE, lane: LaneKind::Data, nonce: [0xaa; 32] }.encode();
        assert_eq!(hello[..16], *b"KVFY\x01\x01\x01\0\x03\0\0\0\0\0\0\0");
        assert_eq!(hello[16..], [0xaa; 32]);
        let challenge = Challenge { versions: RANGE, chosen: Some(2), busy: false, nonce: [0xbb; 32] }.encode();
        assert_eq!(challenge[..16], *b"KVFY\x02\0\x01\0\x03\0\x02\0\0\0\0\0");
        assert_eq!(challenge[16..], [0xbb; 32]);
    }

    #[test]
    fn what_was_written_is_read_and_every_changed_byte_before_the_nonce_matters() {
        let hello = Hello { versions: RANGE, lane: LaneKind::Control, nonce: [1; 32] };
        assert_eq!(Hello::decode(&hello.encode()), Ok(hello.clone()));
        let challenge = Challenge { versions: RANGE, chosen: None, busy: true, nonce: [2; 32] };
        assert_eq!(Challenge::decode(&challenge.encode()), Ok(challenge.clone()));
        for at in 0..16 {
            let mut bytes = hello.encode();
            bytes[at] ^= 0x40;
            assert_ne!(Hello::decode(&bytes), Ok(hello.clone()), "byte {at}");
            let mut bytes = challenge.encode();
            bytes[at] ^= 0x40;
            assert_ne!(Challenge::decode(&bytes), Ok(challenge.clone()), "byte {at}");
        }
    }

    #[test]
    fn the_newest_common_version_is_taken() {
        let range = |min, max| VersionRange { min, max };
        for (a, b, want) in [
            (range(1, 3), range(2, 5), Some(3)),
            (range(2, 5), range(1, 3), Some(3)),
            (range(1, 1), range(2, 2), None),
            (range(4, 4), range(4, 4), Some(4)),
        ] {
            assert_eq!(a.newest_common(b), want, "{a:?} {b:?}");
        }
    }
}
