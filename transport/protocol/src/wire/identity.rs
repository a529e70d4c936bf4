//! Who a proved dialler is, and what the listener says to it.

use std::fmt;

use crate::ids::{EngineId, Incarnation, PeerId, PpRank, TpRank};
use crate::wire::auth::PROOF_BYTES;
use crate::wire::error::WireError;
use crate::wire::offer::{MAX_OFFER_BYTES, MAX_OFFERS, Offer, put_offers, take_offers};

/// The longest greeting, in bytes.
pub const MAX_GREETING_BYTES: usize = 64 << 10;

/// The most data lanes of one session.
pub const MAX_LANES: u16 = 16;

/// The longest identity or verdict, in bytes, without prefix and seal.
pub(crate) const MAX_SEALED_BYTES: usize = MAX_GREETING_BYTES + 256 + MAX_OFFERS * (MAX_OFFER_BYTES + 3);

/// The first version whose identities end in offers.
const OFFERS_SINCE: u16 = 3;

const CONTROL: u8 = 1;
const DATA: u8 = 2;

/// What a proved dialler says of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Identity {
    /// A control lane: a new session.
    Peer(PeerIdentity),
    /// A data lane of a session whose control lane is up.
    Lane(LaneIdentity),
}

/// An endpoint, as it introduces itself on the control lane.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PeerIdentity {
    /// Who.
    pub peer: PeerId,
    /// How many data lanes the dialler will open: 1 to [`MAX_LANES`]. The listener repeats it.
    pub lanes: u16,
    /// The session's number, not 0; drawn by the listener, so the dialler sends 0.
    pub session: u64,
    /// An application's bytes, at most [`MAX_GREETING_BYTES`].
    pub greeting: Vec<u8>,
    /// How payload may go beside TCP, the best first; said since version 3.
    pub offers: Vec<Offer>,
}

/// A data lane, as its dialler introduces it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaneIdentity {
    /// Which session.
    pub session: u64,
    /// Which lane of it, from 0.
    pub lane: u16,
    /// Proof that the dialler holds the session's lane secret.
    pub(crate) binding: [u8; PROOF_BYTES],
}

/// What the listener says to an identity.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The session exists; the listener introduces itself.
    Peer(PeerIdentity),
    /// The data lane is bound.
    Lane,
    /// No.
    Declined(Declined),
}

/// Why a listener declines a peer or a lane that proved itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Declined {
    /// It has too many peers or lanes.
    Full,
    /// It dialled this peer itself and keeps that session.
    Duplicate,
    /// A later start of this engine is known.
    Superseded,
    /// There is no such session, or the lane has no place in it.
    UnknownSession,
    /// It is ending.
    Stopping,
    /// The dialler is the listener itself.
    Itself,
    /// The dialler's certificate does not name the engine that it says it is. Said inside TLS only.
    Unnamed,
}

impl fmt::Display for Declined {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "it has as many peers as it may have",
            Self::Duplicate => "it keeps the session that it dialled itself",
            Self::Superseded => "a later start of this engine is known to it",
            Self::UnknownSession => "the session of this lane ended",
            Self::Stopping => "it is ending",
            Self::Itself => "the address is this endpoint's own",
            Self::Unnamed => "our certificate does not name this engine, and it asks for that",
        })
    }
}

impl Identity {
    pub(crate) fn encode(&self, version: u16) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Peer(peer) => {
                out.push(CONTROL);
                put_peer(&mut out, peer, version);
            }
            Self::Lane(lane) => {
                out.push(DATA);
                out.extend_from_slice(&lane.session.to_le_bytes());
                out.extend_from_slice(&lane.lane.to_le_bytes());
                out.extend_from_slice(&lane.binding);
            }
        }
        out
    }

    /// Reads an identity whose seal was right, in a handshake of this version.
    ///
    /// # Errors
    /// [`WireError`] if a byte is missing, too many, or without meaning.
    pub fn decode(bytes: &[u8], version: u16) -> Result<Self, WireError> {
        let mut r = Reader { what: "an identity", bytes };
        let identity = match r.u8()? {
            CONTROL => Self::Peer(take_peer(&mut r, version)?),
            DATA => Self::Lane(LaneIdentity { session: r.u64()?, lane: r.u16()?, binding: r.array()? }),
            other => return Err(WireError::Value { what: "the kind of an identity", found: other.into() }),
        };
        r.end()?;
        Ok(identity)
    }
}

impl Verdict {
    pub(crate) fn encode(&self, version: u16) -> Vec<u8> {
        match self {
            Self::Peer(peer) => {
                let mut out = vec![CONTROL];
                put_peer(&mut out, peer, version);
                out
            }
            Self::Lane => vec![DATA],
            Self::Declined(why) => vec![match why {
                Declined::Full => 0x80,
                Declined::Duplicate => 0x81,
                Declined::Superseded => 0x82,
                Declined::UnknownSession => 0x83,
                Declined::Stopping => 0x84,
                Declined::Itself => 0x85,
                Declined::Unnamed => 0x86,
            }],
        }
    }

    /// Reads a verdict whose seal was right, in a handshake of this version.
    ///
    /// # Errors
    /// [`WireError`] if a byte is missing, too many, or without meaning.
    pub fn decode(bytes: &[u8], version: u16) -> Result<Self, WireError> {
        let mut r = Reader { what: "a verdict", bytes };
        let verdict = match r.u8()? {
            CONTROL => Self::Peer(take_peer(&mut r, version)?),
            DATA => Self::Lane,
            0x80 => Self::Declined(Declined::Full),
            0x81 => Self::Declined(Declined::Duplicate),
            0x82 => Self::Declined(Declined::Superseded),
            0x83 => Self::Declined(Declined::UnknownSession),
            0x84 => Self::Declined(Declined::Stopping),
            0x85 => Self::Declined(Declined::Itself),
            0x86 => Self::Declined(Declined::Unnamed),
            other => return Err(WireError::Value { what: "the kind of a verdict", found: other.into() }),
        };
        r.end()?;
        Ok(verdict)
    }
}

fn put_peer(out: &mut Vec<u8>, identity: &PeerIdentity, version: u16) {
    let name = identity.peer.engine.as_str().as_bytes();
    debug_assert!(name.len() <= EngineId::MAX_LEN, "an engine's name is checked where it is made");
    let greeting = &identity.greeting[..identity.greeting.len().min(MAX_GREETING_BYTES)];
    out.extend_from_slice(&identity.session.to_le_bytes());
    out.extend_from_slice(&identity.lanes.to_le_bytes());
    out.extend_from_slice(&identity.peer.incarnation.get().to_le_bytes());
    out.extend_from_slice(&identity.peer.pp_rank.get().to_le_bytes());
    out.extend_from_slice(&identity.peer.tp_rank.get().to_le_bytes());
    out.push(name.len() as u8);
    out.extend_from_slice(name);
    out.extend_from_slice(&(greeting.len() as u32).to_le_bytes());
    out.extend_from_slice(greeting);
    if version >= OFFERS_SINCE {
        put_offers(out, &identity.offers);
    }
}

fn take_peer(r: &mut Reader<'_>, version: u16) -> Result<PeerIdentity, WireError> {
    let session = r.u64()?;
    let lanes = r.u16()?;
    if lanes == 0 || lanes > MAX_LANES {
        return Err(WireError::Limit { what: "data lanes", found: lanes.into(), limit: MAX_LANES.into() });
    }
    let incarnation = Incarnation::new(r.u64()?);
    let (pp_rank, tp_rank) = (PpRank::new(r.u16()?), TpRank::new(r.u16()?));
    let name_bytes = r.u8()?;
    let name = std::str::from_utf8(r.take(name_bytes.into())?).ok().and_then(|name| EngineId::new(name).ok());
    let engine =
        name.ok_or(WireError::Value { what: "the engine's name, of this length,", found: name_bytes.into() })?;
    let greeting_bytes = r.u32()?;
    if greeting_bytes as usize > MAX_GREETING_BYTES {
        let limit = MAX_GREETING_BYTES as u64;
        return Err(WireError::Limit { what: "a greeting", found: greeting_bytes.into(), limit });
    }
    let greeting = r.take(greeting_bytes as usize)?.to_vec();
    let offers = if version >= OFFERS_SINCE { take_offers(r)? } else { Vec::new() };
    Ok(PeerIdentity { peer: PeerId { engine, incarnation, pp_rank, tp_rank }, lanes, session, greeting, offers })
}

/// Takes little-endian numbers off the front of bytes.
pub(crate) struct Reader<'a> {
    pub(crate) what: &'static str,
    pub(crate) bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, count: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self.bytes.split_at_checked(count).ok_or(WireError::Length {
            what: self.what,
            found: self.bytes.len() as u64,
            want: count as u64,
        })?;
        self.bytes = rest;
        Ok(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, WireError> {
        Ok(u8::from_le_bytes(self.array()?))
    }

    pub(crate) fn u16(&mut self) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn end(&self) -> Result<(), WireError> {
        match self.bytes.len() as u64 {
            0 => Ok(()),
            found => Err(WireError::Length { what: self.what, found, want: 0 }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::offer::OfferKind;

    fn peer() -> PeerIdentity {
        PeerIdentity {
            peer: PeerId {
                engine: EngineId::new("d-0").unwrap(),
                incarnation: Incarnation::new(0x0102_0304),
                pp_rank: PpRank::new(1),
                tp_rank: TpRank::new(2),
            },
            lanes: 2,
            session: 9,
            greeting: b"hi".to_vec(),
            offers: vec![Offer { kind: OfferKind::UNIX, parameters: b"x".to_vec() }],
        }
    }

    #[test]
    fn golden_bytes() {
        let want = b"\x01\x09\0\0\0\0\0\0\0\x02\0\x04\x03\x02\x01\0\0\0\0\x01\0\x02\0\x03d-0\x02\0\0\0hi";
        for version in [1, 2] {
            assert_eq!(Identity::Peer(peer()).encode(version), want);
            assert_eq!(Verdict::Peer(peer()).encode(version), want);
        }
        let with_offers = [&want[..], b"\x01\x01\x01\0x"].concat();
        assert_eq!(Identity::Peer(peer()).encode(3), with_offers);
        assert_eq!(Verdict::Peer(peer()).encode(3), with_offers);
        let lane = Identity::Lane(LaneIdentity { session: 9, lane: 1, binding: [5; 32] });
        assert_eq!(lane.encode(1)[..11], *b"\x02\x09\0\0\0\0\0\0\0\x01\0");
        assert_eq!(lane.encode(1).len(), 43);
    }

    #[test]
    fn what_was_written_is_read_and_a_cut_or_longer_one_is_refused() {
        let lane = Identity::Lane(LaneIdentity { session: 9, lane: 1, binding: [5; 32] });
        for (version, identity) in [(3, Identity::Peer(peer())), (3, lane.clone()), (1, lane)] {
            let bytes = identity.encode(version);
            assert_eq!(Identity::decode(&bytes, version), Ok(identity));
            for cut in 0..bytes.len() {
                assert!(Identity::decode(&bytes[..cut], version).is_err(), "{cut}");
            }
            assert!(Identity::decode(&[&bytes[..], &[0]].concat(), version).is_err());
        }
        for why in [Declined::Full, Declined::Superseded, Declined::Stopping, Declined::Itself, Declined::Unnamed] {
            assert_eq!(Verdict::decode(&Verdict::Declined(why).encode(3), 3), Ok(Verdict::Declined(why)));
        }
    }

    #[test]
    fn limits_hold() {
        for lanes in [0, MAX_LANES + 1] {
            let bytes = Identity::Peer(PeerIdentity { lanes, ..peer() }).encode(3);
            assert!(matches!(Identity::decode(&bytes, 3), Err(WireError::Limit { .. })), "{lanes}");
        }
    }
}
