//! The header of every frame.

use crate::wire::error::WireError;
use crate::wire::hello::MAGIC;
use crate::wire::identity::Reader;
use crate::wire::lend::{Loan, MAX_LENT_RUNS, MAX_MAPPED_BYTES, Share};
use crate::wire::table::MAX_NOTIFICATION_BYTES;

/// The longest control message, in bytes: as long as the codec makes them.
pub const MAX_MESSAGE_BYTES: usize = crate::codec::MAX_MESSAGE_BYTES;

/// The longest reason in a goodbye, in bytes.
pub const MAX_GOODBYE_BYTES: usize = 512;

/// The longest table of a data frame: extents and notification, in bytes.
pub const MAX_TABLE_BYTES: usize = (64 << 10) + MAX_NOTIFICATION_BYTES;

/// The longest payload of a frame, in bytes.
pub const MAX_PAYLOAD_BYTES: usize = 4 << 20;

/// The first version that has the frames of [`lend`](crate::wire::Loan).
const LENDING_SINCE: u16 = 3;

/// What a frame is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameKind {
    /// A part of a write: table of extents and notification, then payload. On data lanes.
    Data,
    /// A write is complete at the receiver.
    Ack,
    /// A write was refused; `code` says why.
    Refuse,
    /// The sender asks that no more of a write be placed. The answer is an ack or a refusal.
    Cancel,
    /// A message; the table is its bytes. On the control lane.
    Message,
    /// Are you there? `write_bytes` says how many bytes of the lane came before it, or 0 of a peer that does not count them. On the
    /// control lane, as the next one.
    Ping,
    /// Yes; `write_bytes` as in a ping.
    Pong,
    /// The session ends; the table is the reason, in UTF-8.
    Goodbye,
    /// The sender shares memory; the table is a [`Share`](crate::wire::Share). On Unix lanes, since version 3, as the next two.
    Share,
    /// An answer to a share of region `sequence`: it can be read, or the table says why not, in UTF-8.
    Mapped,
    /// A part of a write whose payload stays where it is: table of a [`Loan`](crate::wire::Loan), extents and notification.
    Lend,
    /// A word of the session's path; the table is what the transport says. On the control lane, since version 3.
    Path,
    /// How the peer is reached over UCX; the table is its card and slots. On the control lane, since version 3.
    Card,
    /// A write that was handed over in place is complete: the receiver reads it where it lies until its ack. Between endpoints that both
    /// offer [`OfferKind::IN_PLACE`](crate::wire::OfferKind::IN_PLACE), as the next one.
    Held,
    /// The sender wants the memory of a write back that the receiver holds in place. On the control lane.
    Recall,
}

/// The longest table of a [`FrameKind::Card`], in bytes.
pub const MAX_CARD_BYTES: usize = 128 << 10;

/// Why a receiver refuses a write.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Refusal {
    /// No live grant of this session has the key: never given, revoked, or another peer's.
    UnknownGrant,
    /// An extent leaves the window.
    OutOfWindow,
    /// An extent is empty, overflows, overlaps itself, or does not add up to the payload.
    BadExtent,
    /// The number was used by an earlier write of the grant.
    SequenceTaken,
    /// A frame contradicts the others of its write.
    Inconsistent,
    /// Too many writes of one grant are under way, or have holes between their numbers.
    TooMany,
    /// The sender cancelled the write.
    Cancelled,
    /// The receiver uses bytes of the extent already.
    Sealed,
    /// The grant takes what is lent of memory that the receiver has mapped, and this is not.
    NotInPlace,
    /// The grant is of memory of a device, and a processor carries the frame.
    DeviceMemory,
}

impl Refusal {
    const ALL: [Self; 10] = [
        Self::UnknownGrant,
        Self::OutOfWindow,
        Self::BadExtent,
        Self::SequenceTaken,
        Self::Inconsistent,
        Self::TooMany,
        Self::Cancelled,
        Self::Sealed,
        Self::NotInPlace,
        Self::DeviceMemory,
    ];

    /// The refusal in words.
    #[must_use]
    pub const fn reason(self) -> &'static str {
        match self {
            Self::UnknownGrant => "no live grant of this session has that key",
            Self::OutOfWindow => "an extent leaves the granted window",
            Self::BadExtent => "an extent is empty, overlaps itself or does not add up to the payload",
            Self::SequenceTaken => "the sequence number was used before",
            Self::Inconsistent => "the frames of the write contradict each other",
            Self::TooMany => "too many writes of one grant are under way",
            Self::Cancelled => "the sender cancelled it",
            Self::Sealed => "the receiver uses these bytes already",
            Self::NotInPlace => "the grant takes lent runs of mapped memory only, in long runs",
            Self::DeviceMemory => {
                "the grant is of a device's memory, which no processor of the receiver writes: only the sender's RDMA devices can"
            }
        }
    }

    fn code(self) -> u8 {
        Self::ALL.iter().position(|&refusal| refusal == self).map_or(0, |at| at as u8 + 1)
    }

    fn from_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).checked_sub(1)?).copied()
    }
}

/// What stands at the front of every frame: 64 bytes, little-endian, the last four a checksum of the others.
///
/// ```text
///  0 magic u32          4 version u16     6 kind u8          7 refusal u8
///  8 grant u128        24 sequence u32   28 frame u32       32 extents u16      34 notification_bytes u16
/// 36 table_bytes u32   40 payload_bytes u32                 44 write_bytes u64
/// 52 table checksum u32                  56 zero u32        60 header checksum u32
/// ```
/// The checksums are CRC-32 (IEEE 802.3). The payload has none here: whoever posts it verifies it end to end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FrameHeader {
    /// What the frame is for.
    pub kind: FrameKind,
    /// Why, in a refusal; else `None`.
    pub refusal: Option<Refusal>,
    /// The grant's key; 0 in frames that name none.
    pub grant: u128,
    /// Which write of the grant.
    pub sequence: u32,
    /// Which frame of the write, from 0.
    pub frame: u32,
    /// How many extents the table begins with.
    pub extents: u16,
    /// Bytes of the notification, which ends the table; only frame 0 carries one.
    pub notification_bytes: u16,
    /// Bytes between header and payload.
    pub table_bytes: u32,
    /// Bytes after the table, as many as the extents hold.
    pub payload_bytes: u32,
    /// Payload bytes of the whole write; in a ping or a pong, bytes of the lane before it.
    pub write_bytes: u64,
    /// CRC-32 of the table.
    pub table_checksum: u32,
}

impl FrameHeader {
    /// Bytes of a header.
    pub const BYTES: usize = 64;
    const CHECKED: usize = 60;

    /// A frame of this kind without table or payload.
    #[must_use]
    pub const fn empty(kind: FrameKind) -> Self {
        Self {
            kind,
            refusal: None,
            grant: 0,
            sequence: 0,
            frame: 0,
            extents: 0,
            notification_bytes: 0,
            table_bytes: 0,
            payload_bytes: 0,
            write_bytes: 0,
            table_checksum: 0,
        }
    }

    /// A frame whose table is `body`: a message or a goodbye.
    #[must_use]
    pub fn with_body(kind: FrameKind, body: &[u8]) -> Self {
        let table_checksum = crc32fast::hash(body);
        Self { table_bytes: body.len() as u32, table_checksum, ..Self::empty(kind) }
    }

    /// A word about a write: an ack, a refusal or a cancel.
    #[must_use]
    pub const fn about(kind: FrameKind, refusal: Option<Refusal>, grant: u128, sequence: u32) -> Self {
        Self { refusal, grant, sequence, ..Self::empty(kind) }
    }

    /// The header's bytes, for a session of this version.
    #[must_use]
    pub fn encode(&self, version: u16) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC.to_le_bytes());
        put(&version.to_le_bytes());
        put(&[kind_code(self.kind), self.refusal.map_or(0, Refusal::code)]);
        put(&self.grant.to_le_bytes());
        put(&self.sequence.to_le_bytes());
        put(&self.frame.to_le_bytes());
        put(&self.extents.to_le_bytes());
        put(&self.notification_bytes.to_le_bytes());
        put(&self.table_bytes.to_le_bytes());
        put(&self.payload_bytes.to_le_bytes());
        put(&self.write_bytes.to_le_bytes());
        put(&self.table_checksum.to_le_bytes());
        put(&[0; 4]);
        let checksum = crc32fast::hash(&out[..Self::CHECKED]);
        out[Self::CHECKED..].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Reads a header of a session of this version and checks every limit.
    ///
    /// # Errors
    /// [`WireError`]: the stream is torn or the peer is wrong; the connection cannot go on.
    pub fn decode(bytes: &[u8; Self::BYTES], version: u16) -> Result<Self, WireError> {
        let mut r = Reader { what: "a frame header", bytes };
        let magic = r.u32()?;
        if magic != MAGIC {
            return Err(WireError::Magic { what: "a frame", found: magic, want: MAGIC });
        }
        let want = crc32fast::hash(&bytes[..Self::CHECKED]);
        let found = u32::from_le_bytes([bytes[60], bytes[61], bytes[62], bytes[63]]);
        if found != want {
            return Err(WireError::Checksum { what: "a frame header", found, want });
        }
        let found = r.u16()?;
        if found != version {
            return Err(WireError::Value { what: "the version of a frame", found: found.into() });
        }
        let (kind, refusal) = (decode_kind(r.u8()?, version)?, r.u8()?);
        let header = Self {
            kind,
            refusal: decode_refusal(kind, refusal)?,
            grant: u128::from_le_bytes(r.array()?),
            sequence: r.u32()?,
            frame: r.u32()?,
            extents: r.u16()?,
            notification_bytes: r.u16()?,
            table_bytes: r.u32()?,
            payload_bytes: r.u32()?,
            write_bytes: r.u64()?,
            table_checksum: r.u32()?,
        };
        let reserved = r.u32()?;
        if reserved != 0 {
            return Err(WireError::Value { what: "the reserved bytes of a frame", found: reserved.into() });
        }
        header.check_limits()?;
        Ok(header)
    }

    /// Whether `table` is what the header announced.
    ///
    /// # Errors
    /// [`WireError::Checksum`] if it is not.
    pub fn check_table(&self, table: &[u8]) -> Result<(), WireError> {
        let want = crc32fast::hash(table);
        let found = self.table_checksum;
        if found == want { Ok(()) } else { Err(WireError::Checksum { what: "a frame's table", found, want }) }
    }

    fn check_limits(&self) -> Result<(), WireError> {
        let (table_limit, payload_limit) = match self.kind {
            FrameKind::Data => (MAX_TABLE_BYTES, MAX_PAYLOAD_BYTES),
            FrameKind::Message | FrameKind::Path => (MAX_MESSAGE_BYTES, 0),
            FrameKind::Goodbye => (MAX_GOODBYE_BYTES, 0),
            FrameKind::Share => (Share::BYTES, 0),
            FrameKind::Mapped => (MAX_MAPPED_BYTES, 0),
            FrameKind::Card => (MAX_CARD_BYTES, 0),
            FrameKind::Lend => (MAX_TABLE_BYTES + Loan::table_bytes(MAX_LENT_RUNS), MAX_PAYLOAD_BYTES),
            _ => (0, 0),
        };
        limit("a frame's table", self.table_bytes.into(), table_limit)?;
        limit("a frame's payload", self.payload_bytes.into(), payload_limit)?;
        limit("a notification", self.notification_bytes.into(), MAX_NOTIFICATION_BYTES.min(self.table_bytes as usize))?;
        // An extent takes at least 17 bytes of the table.
        limit("a frame's extents", self.extents.into(), self.table_bytes as usize / 17)?;
        let has_payload = matches!(self.kind, FrameKind::Data | FrameKind::Lend);
        if has_payload && self.extents == 0 {
            return Err(WireError::Value { what: "the extents of a data frame", found: 0 });
        }
        if has_payload && (self.payload_bytes == 0 || self.write_bytes < self.payload_bytes.into()) {
            return Err(WireError::Value { what: "the payload of a data frame", found: self.payload_bytes.into() });
        }
        if self.frame != 0 && self.notification_bytes != 0 {
            return Err(WireError::Value { what: "a notification in frame", found: self.frame.into() });
        }
        Ok(())
    }
}

fn limit(what: &'static str, found: u64, limit: usize) -> Result<(), WireError> {
    if found <= limit as u64 { Ok(()) } else { Err(WireError::Limit { what, found, limit: limit as u64 }) }
}

fn kind_code(kind: FrameKind) -> u8 {
    match kind {
        FrameKind::Data => 1,
        FrameKind::Ack => 2,
        FrameKind::Refuse => 3,
        FrameKind::Cancel => 4,
        FrameKind::Message => 5,
        FrameKind::Ping => 6,
        FrameKind::Pong => 7,
        FrameKind::Goodbye => 8,
        FrameKind::Share => 9,
        FrameKind::Mapped => 10,
        FrameKind::Lend => 11,
        FrameKind::Path => 13,
        FrameKind::Card => 12,
        FrameKind::Held => 14,
        FrameKind::Recall => 15,
    }
}

fn decode_kind(code: u8, version: u16) -> Result<FrameKind, WireError> {
    Ok(match code {
        1 => FrameKind::Data,
        2 => FrameKind::Ack,
        3 => FrameKind::Refuse,
        4 => FrameKind::Cancel,
        5 => FrameKind::Message,
        6 => FrameKind::Ping,
        7 => FrameKind::Pong,
        8 => FrameKind::Goodbye,
        9 if version >= LENDING_SINCE => FrameKind::Share,
        10 if version >= LENDING_SINCE => FrameKind::Mapped,
        11 if version >= LENDING_SINCE => FrameKind::Lend,
        12 if version >= LENDING_SINCE => FrameKind::Card,
        13 if version >= LENDING_SINCE => FrameKind::Path,
        14 if version >= LENDING_SINCE => FrameKind::Held,
        15 if version >= LENDING_SINCE => FrameKind::Recall,
        found => return Err(WireError::Value { what: "the kind of a frame", found: found.into() }),
    })
}

fn decode_refusal(kind: FrameKind, code: u8) -> Result<Option<Refusal>, WireError> {
    let refusal = Refusal::from_code(code);
    if refusal.is_some() == (kind == FrameKind::Refuse) && (refusal.is_some() || code == 0) {
        return Ok(refusal);
    }
    Err(WireError::Value { what: "the refusal of a frame", found: code.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data() -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Data,
            refusal: None,
            grant: 0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100,
            sequence: 0x11,
            frame: 0,
            extents: 1,
            notification_bytes: 3,
            table_bytes: 20,
            payload_bytes: 0x2000,
            write_bytes: 0x3000,
            table_checksum: 0xdead_beef,
        }
    }

    #[test]
    fn golden_bytes_of_version_1() {
        let bytes = data().encode(1);
        assert_eq!(bytes[..8], *b"KVFY\x01\0\x01\0");
        assert_eq!(bytes[8..24], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);
        assert_eq!(bytes[24..36], *b"\x11\0\0\0\0\0\0\0\x01\0\x03\0");
        assert_eq!(bytes[36..52], *b"\x14\0\0\0\0\x20\0\0\0\x30\0\0\0\0\0\0");
        assert_eq!(bytes[52..60], *b"\xef\xbe\xad\xde\0\0\0\0");
        assert_eq!(bytes[60..], crc32fast::hash(&bytes[..60]).to_le_bytes());
        assert_eq!(crc32fast::hash(b"123456789"), 0xcbf4_3926, "CRC-32 is the one of IEEE 802.3");
    }

    #[test]
    fn golden_bytes_of_words_in_place() {
        let refuse = FrameHeader::about(FrameKind::Refuse, Some(Refusal::NotInPlace), 5, 6);
        let held = FrameHeader::about(FrameKind::Held, None, 5, 6);
        let recall = FrameHeader::about(FrameKind::Recall, None, 5, 6);
        for (header, codes) in [(refuse, [3, 9]), (held, [14, 0]), (recall, [15, 0])] {
            let bytes = header.encode(3);
            assert_eq!(bytes[..8], [b'K', b'V', b'F', b'Y', 3, 0, codes[0], codes[1]]);
            assert_eq!(bytes[8..28], [5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0]);
            assert_eq!(FrameHeader::decode(&bytes, 3), Ok(header));
        }
        assert!(FrameHeader::decode(&held.encode(2), 2).is_err(), "version 2 has no such word");
        let long = FrameHeader { table_bytes: 1, ..held };
        assert!(FrameHeader::decode(&long.encode(3), 3).is_err());
    }

    #[test]
    fn what_was_written_is_read_and_any_flipped_bit_is_noticed() {
        let refuse = FrameHeader::about(FrameKind::Refuse, Some(Refusal::TooMany), 5, 6);
        for header in
            [data(), refuse, FrameHeader::with_body(FrameKind::Message, b"x"), FrameHeader::empty(FrameKind::Ping)]
        {
            let bytes = header.encode(1);
            assert_eq!(FrameHeader::decode(&bytes, 1), Ok(header));
            assert!(FrameHeader::decode(&bytes, 2).is_err());
            for bit in 0..FrameHeader::BYTES * 8 {
                let mut bytes = bytes;
                bytes[bit / 8] ^= 1 << (bit % 8);
                assert!(FrameHeader::decode(&bytes, 1).is_err(), "bit {bit}");
            }
        }
    }

    #[test]
    fn every_length_has_a_limit() {
        let wrong = [
            FrameHeader { table_bytes: MAX_TABLE_BYTES as u32 + 1, ..data() },
            FrameHeader { payload_bytes: MAX_PAYLOAD_BYTES as u32 + 1, write_bytes: u64::MAX, ..data() },
            FrameHeader { payload_bytes: 0, ..data() },
            FrameHeader { write_bytes: 0x1fff, ..data() },
            FrameHeader { notification_bytes: 21, ..data() },
            FrameHeader { extents: 2, ..data() },
            FrameHeader { extents: 0, ..data() },
            FrameHeader { frame: 1, ..data() },
            FrameHeader { table_bytes: 1, ..FrameHeader::empty(FrameKind::Ping) },
            FrameHeader { payload_bytes: 1, ..FrameHeader::empty(FrameKind::Message) },
            FrameHeader { table_bytes: MAX_MESSAGE_BYTES as u32 + 1, ..FrameHeader::empty(FrameKind::Message) },
            FrameHeader { refusal: Some(Refusal::TooMany), ..FrameHeader::empty(FrameKind::Ack) },
            FrameHeader::empty(FrameKind::Refuse),
        ];
        for header in wrong {
            assert!(FrameHeader::decode(&header.encode(1), 1).is_err(), "{header:?}");
        }
    }
}
