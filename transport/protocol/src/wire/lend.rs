//! Frames whose payload stays in the sender's memory: the receiver copies it. On Unix lanes, since version 3.
//!
//! The sender first *shares* memory (a region of its own, or the *board*), the receiver answers whether it can read it, and then a
//! frame *lends* runs of it. The board has one word for each post: the post's token while its source may be read, 0 after that. A
//! receiver looks at it after it copied: bytes count only if the loan was still live then.

use crate::pages::Extent;
use crate::wire::error::WireError;
use crate::wire::identity::Reader;

/// The number of the board among the shared regions.
pub const BOARD: u32 = u32::MAX;

/// The number of the tether among the shared regions: a pipe's end for the receiver to keep open while it reads what it holds in place. It
/// has one byte as far as the share says, and nothing is ever written to it. Between endpoints that both offer to hold in place.
pub const TETHER: u32 = u32::MAX - 1;

/// The longest answer to a share, in bytes.
pub const MAX_MAPPED_BYTES: usize = 256;

/// The most runs that one frame lends.
pub const MAX_LENT_RUNS: usize = 1024;

/// How shared memory is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reach {
    /// By mapping the descriptor that comes with the frame, from this offset on.
    Descriptor {
        /// Where in the file the memory begins.
        offset: u64,
    },
    /// By a system call that names the sender's process and this address.
    Address {
        /// The first byte.
        address: u64,
    },
}

/// Memory that a sender shares: the table of a share frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Share {
    /// Which region of the sender's, or [`BOARD`].
    pub region: u32,
    /// Its length in bytes.
    pub bytes: u64,
    /// How to read it.
    pub reach: Reach,
    /// What stands in the board's first 16 bytes: proof that what was reached is the board. Elsewhere 0.
    pub proof: u128,
}

/// A run of shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LentRun {
    /// Which region of the sender's.
    pub region: u32,
    /// The first byte.
    pub offset: u64,
    /// How many.
    pub bytes: u32,
}

/// What a frame lends: stands before the extents in its table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loan {
    /// Which word of the board is the post's.
    pub slot: u32,
    /// What stands there while the loan is live; not 0.
    pub token: u64,
    /// The payload, in order.
    pub runs: Vec<LentRun>,
}

impl Share {
    /// Bytes of a share.
    pub const BYTES: usize = 4 + 8 + 1 + 8 + 16;

    /// The table of its frame: `region u32, bytes u64, reach u8, offset or address u64, proof u128`, little-endian.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (reach, at) = match self.reach {
            Reach::Descriptor { offset } => (1, offset),
            Reach::Address { address } => (2, address),
        };
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend_from_slice(&self.region.to_le_bytes());
        out.extend_from_slice(&self.bytes.to_le_bytes());
        out.push(reach);
        out.extend_from_slice(&at.to_le_bytes());
        out.extend_from_slice(&self.proof.to_le_bytes());
        out
    }

    /// Reads the table of a share frame.
    ///
    /// # Errors
    /// [`WireError`] if a byte is missing, too many, or without meaning.
    pub fn decode(table: &[u8]) -> Result<Self, WireError> {
        let mut r = Reader { what: "a share", bytes: table };
        let (region, bytes, reach, at) = (r.u32()?, r.u64()?, r.u8()?, r.u64()?);
        let reach = match reach {
            1 => Reach::Descriptor { offset: at },
            2 => Reach::Address { address: at },
            other => return Err(WireError::Value { what: "how shared memory is read", found: other.into() }),
        };
        let share = Self { region, bytes, reach, proof: u128::from_le_bytes(r.array()?) };
        r.end()?;
        if bytes == 0 || at.checked_add(bytes).is_none() {
            return Err(WireError::Value { what: "the bytes of a share", found: bytes });
        }
        Ok(share)
    }
}

impl Loan {
    /// Bytes that a loan of `runs` runs takes in a table.
    #[must_use]
    pub const fn table_bytes(runs: usize) -> usize {
        4 + 8 + 2 + runs * 16
    }

    /// Appends `slot u32, token u64, count u16`, then for each run `region u32, offset u64, bytes u32`, little-endian.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.slot.to_le_bytes());
        out.extend_from_slice(&self.token.to_le_bytes());
        out.extend_from_slice(&(self.runs.len() as u16).to_le_bytes());
        for run in &self.runs {
            out.extend_from_slice(&run.region.to_le_bytes());
            out.extend_from_slice(&run.offset.to_le_bytes());
            out.extend_from_slice(&run.bytes.to_le_bytes());
        }
    }

    /// Takes a loan off the front of a lend frame's table; the rest is the table of a data frame.
    ///
    /// # Errors
    /// [`WireError`] if the bytes are no loan, or its runs do not add up to `payload_bytes`; the connection cannot go on.
    pub fn take(table: &[u8], payload_bytes: u32) -> Result<(Self, &[u8]), WireError> {
        let mut r = Reader { what: "a loan", bytes: table };
        let (slot, token, count) = (r.u32()?, r.u64()?, usize::from(r.u16()?));
        if count == 0 || count > MAX_LENT_RUNS {
            return Err(WireError::Limit { what: "lent runs", found: count as u64, limit: MAX_LENT_RUNS as u64 });
        }
        if token == 0 {
            return Err(WireError::Value { what: "the token of a loan", found: 0 });
        }
        let (mut runs, mut total) = (Vec::with_capacity(count), 0u64);
        for _ in 0..count {
            let run = LentRun { region: r.u32()?, offset: r.u64()?, bytes: r.u32()? };
            total += u64::from(run.bytes);
            runs.push(run);
        }
        if total != u64::from(payload_bytes) || runs.iter().any(|run| run.bytes == 0) {
            return Err(WireError::Value { what: "the bytes of lent runs", found: total });
        }
        Ok((Self { slot, token, runs }, r.bytes))
    }
}

/// Appends the table of a lend frame: the loan, then extents and notification as in a data frame.
pub fn encode_loan(loan: &Loan, extents: &[Extent], notification: &[u8], out: &mut Vec<u8>) {
    loan.encode(out);
    super::table::encode_table(extents, notification, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loan() -> Loan {
        let runs = vec![LentRun { region: 1, offset: 2, bytes: 3 }, LentRun { region: 0, offset: 1 << 40, bytes: 5 }];
        Loan { slot: 7, token: 9, runs }
    }

    #[test]
    fn golden_bytes_of_version_3() {
        let mut bytes = Vec::new();
        loan().encode(&mut bytes);
        assert_eq!(bytes.len(), Loan::table_bytes(2));
        assert_eq!(bytes[..14], *b"\x07\0\0\0\x09\0\0\0\0\0\0\0\x02\0");
        assert_eq!(bytes[14..30], *b"\x01\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0");
        assert_eq!(bytes[30..], *b"\0\0\0\0\0\0\0\0\0\x01\0\0\x05\0\0\0");
        let share = Share { region: BOARD, bytes: 64, reach: Reach::Address { address: 4096 }, proof: 5 };
        let want = b"\xff\xff\xff\xff\x40\0\0\0\0\0\0\0\x02\0\x10\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
        assert_eq!(share.encode(), want);
        assert_eq!(want.len(), Share::BYTES);
    }

    #[test]
    fn what_was_written_is_read_and_what_makes_no_sense_is_refused() {
        let mut bytes = Vec::new();
        loan().encode(&mut bytes);
        bytes.extend_from_slice(b"rest");
        assert_eq!(Loan::take(&bytes, 8), Ok((loan(), &b"rest"[..])));
        assert!(Loan::take(&bytes, 9).is_err(), "another sum");
        for cut in 0..bytes.len() - 4 {
            assert!(Loan::take(&bytes[..cut], 8).is_err(), "{cut}");
        }
        for (name, wrong) in [
            ("no token", Loan { token: 0, ..loan() }),
            ("no runs", Loan { runs: Vec::new(), ..loan() }),
            ("too many runs", Loan { runs: vec![loan().runs[0]; MAX_LENT_RUNS + 1], ..loan() }),
            ("an empty run", Loan { runs: vec![LentRun { bytes: 0, ..loan().runs[0] }; 1], ..loan() }),
        ] {
            let bytes = wrong.runs.iter().map(|run| run.bytes).sum();
            let mut table = Vec::new();
            wrong.encode(&mut table);
            assert!(Loan::take(&table, bytes).is_err(), "{name}");
        }
        for reach in [Reach::Descriptor { offset: 8 }, Reach::Address { address: 8 }] {
            let share = Share { region: 3, bytes: 64, reach, proof: 0 };
            let bytes = share.encode();
            assert_eq!(Share::decode(&bytes), Ok(share));
            assert!((0..bytes.len()).all(|cut| Share::decode(&bytes[..cut]).is_err()));
            assert!(Share::decode(&[&bytes[..], &[0]].concat()).is_err());
            assert!(Share::decode(&Share { bytes: 0, ..share }.encode()).is_err());
            assert!(Share::decode(&Share { bytes: u64::MAX, ..share }.encode()).is_err());
        }
    }
}
