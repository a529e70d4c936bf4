//! What one side of a link tells the other over the authenticated control lane: its card.

use bytes::Bytes;

use super::error::UcxError;

const MAGIC: [u8; 4] = *b"KVUX";
const VERSION: u8 = 2;
/// The longest address that a worker may have: some hundred bytes for each network device.
const MAX_ADDRESS_BYTES: usize = 64 << 10;

/// Proves that an active message comes from the peer to whom the card was given.
pub(super) type Token = [u8; 16];

/// A worker's address, and the token that each active message to it must carry: whoever finds the worker's port can send it
/// active messages, but only the peer knows the token.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Card {
    pub(super) token: Token,
    pub(super) address: Bytes,
}

impl Card {
    /// `magic, version u8, token, address_bytes u32` (little-endian), then the address.
    pub(super) fn encode(&self) -> Bytes {
        let length = (self.address.len() as u32).to_le_bytes();
        [&MAGIC[..], &[VERSION], &self.token, &length, &self.address].concat().into()
    }

    pub(super) fn decode(bytes: &Bytes) -> Result<Self, UcxError> {
        let wrong = |problem| UcxError::Parameters { what: "the UCX card", problem };
        let (magic, rest) = bytes.split_first_chunk::<4>().ok_or_else(|| wrong("it is too short"))?;
        let (version, rest) = rest.split_first().ok_or_else(|| wrong("it is too short"))?;
        if *magic != MAGIC || *version != VERSION {
            return Err(wrong("it is of another kind or version"));
        }
        let (token, rest) = rest.split_first_chunk::<16>().ok_or_else(|| wrong("it is too short"))?;
        let (length, address) = rest.split_first_chunk::<4>().ok_or_else(|| wrong("it is too short"))?;
        if u32::from_le_bytes(*length) as usize != address.len() || address.is_empty() {
            return Err(wrong("its length is not what it says"));
        }
        if address.len() > MAX_ADDRESS_BYTES {
            return Err(wrong("the address is too long"));
        }
        Ok(Self { token: *token, address: bytes.slice_ref(address) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_bytes_of_version_2() {
        let card = Card { token: [7; 16], address: Bytes::from_static(b"where") };
        let bytes = card.encode();
        assert_eq!(bytes, [&b"KVUX\x02"[..], &[7; 16], b"\x05\0\0\0where"].concat());
        assert!(Card::decode(&bytes).unwrap() == card);
    }

    #[test]
    fn what_is_cut_or_changed_is_refused() {
        let bytes = Card { token: [7; 16], address: Bytes::from_static(b"where") }.encode();
        for end in 0..bytes.len() {
            assert!(Card::decode(&bytes.slice(..end)).is_err(), "{end}");
        }
        for at in (0..5).chain(21..25) {
            let mut changed = bytes.to_vec();
            changed[at] ^= 1;
            assert!(Card::decode(&changed.into()).is_err(), "{at}");
        }
        assert!(Card::decode(&[&bytes[..], b"x"].concat().into()).is_err());
    }
}
