//! What an endpoint offers for payload beside TCP lanes. Said in identities since version 3.

use std::net::{IpAddr, SocketAddr};

use crate::wire::error::WireError;
use crate::wire::identity::Reader;

/// The most ways that an endpoint offers.
pub const MAX_OFFERS: usize = 16;

/// The longest parameters of one, in bytes.
pub const MAX_OFFER_BYTES: usize = 2 << 10;

/// A way for payload to go. The codes stand on the wire; one that a peer does not know is no use to it, and harmless.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OfferKind(pub u8);

impl OfferKind {
    /// Data lanes over TCP, to the address of the control lane and to those that the parameters list, by [`put_rails`].
    pub const TCP: Self = Self(0);
    /// Data lanes over Unix sockets: 16 bytes that name the running kernel, then the listener's abstract name.
    pub const UNIX: Self = Self(1);
    /// On Unix lanes, memory that the receiver maps and copies from.
    pub const SHARED_MEMORY: Self = Self(2);
    /// On Unix lanes, memory of the sender's process that the receiver copies from by a system call.
    pub const PROCESS_MEMORY: Self = Self(3);
    /// A link over UCX, whose cards go over the control lane once the session is up.
    pub const UCX: Self = Self(4);
    /// Reliable queue pairs of RDMA devices, joined by words on the control lane.
    pub const RDMA: Self = Self(5);
    /// On Unix lanes with shared memory: writes that the receiver reads where they lie, under grants whose key is odd.
    pub const IN_PLACE: Self = Self(6);
    /// Beside RDMA: regions may be told as memory of a device, whose grants no lane carries.
    pub const DEVICE_MEMORY: Self = Self(7);
}

/// One of them, with what the peer needs to use it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Offer {
    /// Which.
    pub kind: OfferKind,
    /// At most [`MAX_OFFER_BYTES`]; the kind says what they mean.
    pub parameters: Vec<u8>,
}

/// The most rails that an endpoint names.
pub const MAX_RAILS: usize = 8;

/// The parameters of an [`OfferKind::TCP`]: for each rail `4 or 6 u8, address, port u16`, little-endian but for the address.
#[must_use]
pub fn put_rails(rails: &[SocketAddr]) -> Vec<u8> {
    let mut out = Vec::new();
    for rail in rails.iter().take(MAX_RAILS) {
        match rail.ip() {
            IpAddr::V4(ip) => {
                out.push(4);
                out.extend_from_slice(&ip.octets());
            }
            IpAddr::V6(ip) => {
                out.push(6);
                out.extend_from_slice(&ip.octets());
            }
        }
        out.extend_from_slice(&rail.port().to_le_bytes());
    }
    out
}

/// What [`put_rails`] wrote.
///
/// # Errors
/// [`WireError`] if it is torn, of an unknown family, or over [`MAX_RAILS`].
pub fn take_rails(bytes: &[u8]) -> Result<Vec<SocketAddr>, WireError> {
    let mut r = Reader { what: "rails of an offer", bytes };
    let mut rails = Vec::new();
    while !r.bytes.is_empty() {
        if rails.len() == MAX_RAILS {
            let (found, limit) = (MAX_RAILS as u64 + 1, MAX_RAILS as u64);
            return Err(WireError::Limit { what: "rails of an offer", found, limit });
        }
        let ip = match r.u8()? {
            4 => IpAddr::from(r.array::<4>()?),
            6 => IpAddr::from(r.array::<16>()?),
            family => return Err(WireError::Value { what: "the family of a rail", found: family.into() }),
        };
        rails.push(SocketAddr::new(ip, r.u16()?));
    }
    Ok(rails)
}

/// `count u8`, then for each `kind u8, length u16, parameters`. What is over a limit is left out: it is ours to keep to them.
pub(crate) fn put_offers(out: &mut Vec<u8>, offers: &[Offer]) {
    let fits = |offer: &&Offer| offer.parameters.len() <= MAX_OFFER_BYTES;
    let offers: Vec<&Offer> = offers.iter().filter(fits).take(MAX_OFFERS).collect();
    out.push(offers.len() as u8);
    for offer in offers {
        out.push(offer.kind.0);
        out.extend_from_slice(&(offer.parameters.len() as u16).to_le_bytes());
        out.extend_from_slice(&offer.parameters);
    }
}

pub(crate) fn take_offers(r: &mut Reader<'_>) -> Result<Vec<Offer>, WireError> {
    let count = usize::from(r.u8()?);
    if count > MAX_OFFERS {
        return Err(WireError::Limit { what: "ways that are offered", found: count as u64, limit: MAX_OFFERS as u64 });
    }
    let mut offers = Vec::with_capacity(count);
    for _ in 0..count {
        let (kind, bytes) = (OfferKind(r.u8()?), usize::from(r.u16()?));
        if bytes > MAX_OFFER_BYTES {
            let limit = MAX_OFFER_BYTES as u64;
            return Err(WireError::Limit { what: "parameters of an offer", found: bytes as u64, limit });
        }
        offers.push(Offer { kind, parameters: r.take(bytes)?.to_vec() });
    }
    Ok(offers)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(bytes: &[u8]) -> Result<Vec<Offer>, WireError> {
        let mut r = Reader { what: "offers", bytes };
        let offers = take_offers(&mut r)?;
        r.end().map(|()| offers)
    }

    #[test]
    fn golden_bytes_of_version_3() {
        let offers = [
            Offer { kind: OfferKind::UNIX, parameters: b"host".to_vec() },
            Offer { kind: OfferKind(200), parameters: Vec::new() },
        ];
        let mut bytes = Vec::new();
        put_offers(&mut bytes, &offers);
        assert_eq!(bytes, b"\x02\x01\x04\0host\xc8\0\0");
        assert_eq!(read(&bytes), Ok(offers.to_vec()), "a kind that nobody knows is carried");
    }

    #[test]
    fn golden_bytes_of_rails() {
        let rails = ["10.1.0.5:7401".parse().unwrap(), "[fd00::1]:1".parse().unwrap()];
        let bytes = put_rails(&rails);
        assert_eq!(bytes, b"\x04\x0a\x01\0\x05\xe9\x1c\x06\xfd\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x01\x01\0");
        assert_eq!(take_rails(&bytes), Ok(rails.to_vec()));
        assert_eq!(take_rails(&[]), Ok(Vec::new()));
        assert!(matches!(take_rails(&bytes[..bytes.len() - 1]), Err(WireError::Length { .. })));
        assert!(matches!(take_rails(&[5]), Err(WireError::Value { found: 5, .. })));
        assert_eq!(take_rails(&put_rails(&[rails[0]; 9])).map(|rails| rails.len()), Ok(MAX_RAILS));
        assert!(matches!(take_rails(&put_rails(&[rails[0]; 3]).repeat(3)), Err(WireError::Limit { .. })));
    }

    #[test]
    fn limits_hold_on_both_sides() {
        let long = Offer { kind: OfferKind::UNIX, parameters: vec![0; MAX_OFFER_BYTES + 1] };
        let mut bytes = Vec::new();
        put_offers(&mut bytes, &vec![long; 3]);
        assert_eq!(bytes, [0], "what is too long is not said");
        assert!(matches!(read(&[17]), Err(WireError::Limit { found: 17, .. })));
        assert!(matches!(read(&[1, 1, 1, 8]), Err(WireError::Limit { found: 2049, .. })));
        assert!(matches!(read(&[1, 1, 4, 0, 0]), Err(WireError::Length { .. })));
    }
}
