//! The bytes of what peers tell each other of their queue pairs and regions. They travel as words of the control lane.
//!
//! All numbers are little-endian. The first byte is the format's version.

use super::error::RdmaError;
use super::hardware::LaneAddress;
use super::machine::MAX_PAYLOAD_LANES;
use super::memory::{MAX_PEER_PIECES, RegionKeys};
use super::rails::RailsParameters;

const VERSION: u8 = 1;
/// The most rails of one side.
pub(crate) const MAX_RAILS: usize = 16;

impl RailsParameters {
    /// As bytes: version, rails, lanes, zero, window, head_bytes, then of each lane its rail, mtu, lid, number, first packet, GID.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![VERSION, self.rails, self.lanes.len() as u8, 0];
        bytes.extend(self.window.to_le_bytes());
        bytes.extend(self.head_bytes.to_le_bytes());
        for lane in &self.lanes {
            bytes.extend([lane.rail, lane.mtu as u8]);
            bytes.extend(lane.lid.to_le_bytes());
            bytes.extend(lane.number.to_le_bytes());
            bytes.extend(lane.first_packet.to_le_bytes());
            bytes.extend(lane.gid);
        }
        bytes
    }

    /// Reads what [`encode`](Self::encode) wrote.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, RdmaError> {
        let mut reader = Reader(bytes);
        let [version, rails, lanes, zero] = reader.take()?;
        let is_known = version == VERSION && zero == 0 && (1..=MAX_RAILS).contains(&rails.into());
        if !is_known || lanes == 0 || usize::from(lanes) > MAX_PAYLOAD_LANES + 1 {
            return malformed(
                "parameters of another version, or with other numbers of rails or queue pairs than can be",
            );
        }
        let (window, head_bytes) = (reader.u32()?, reader.u32()?);
        let lane = |_| {
            let [rail, mtu] = reader.take()?;
            let (lid, number, first_packet) = (u16::from_le_bytes(reader.take()?), reader.u32()?, reader.u32()?);
            // Both are 24 bits on the wire, and 1 to 5 are all packet lengths that there are.
            if number >> 24 != 0 || first_packet >> 24 != 0 || !(1..=5).contains(&mtu) {
                return malformed("a queue pair with numbers that cannot be");
            }
            Ok(LaneAddress { rail, number, first_packet, gid: reader.take()?, lid, mtu: mtu.into() })
        };
        let lanes = (0..lanes).map(lane).collect::<Result<_, _>>()?;
        reader.end()?;
        Ok(Self { window, head_bytes, rails, lanes })
    }
}

impl RegionKeys {
    /// As bytes: version, rails, 1 if it is a device's memory and else 0, a zero, pieces, address, bytes, piece_bytes, then of each piece each rail's key.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let rails = self.pieces.first().map_or(0, Vec::len);
        let mut bytes = vec![VERSION, rails as u8, self.is_device.into(), 0];
        bytes.extend((self.pieces.len() as u32).to_le_bytes());
        for number in [self.address, self.bytes, self.piece_bytes] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.pieces.iter().flatten().flat_map(|key| key.to_le_bytes()));
        bytes
    }

    /// Reads what [`encode`](Self::encode) wrote. Whether the pieces fit the length is seen when it is added to a peer's memory.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, RdmaError> {
        let mut reader = Reader(bytes);
        let [version, rails, is_device @ (0 | 1), 0] = reader.take()? else {
            return malformed("a region of another version");
        };
        let pieces = reader.u32()? as usize;
        if version != VERSION || !(1..=MAX_RAILS).contains(&rails.into()) || pieces > MAX_PEER_PIECES {
            return malformed("a region of another version, or with more rails or pieces than can be");
        }
        let (address, region_bytes, piece_bytes) = (reader.u64()?, reader.u64()?, reader.u64()?);
        if reader.0.len() != pieces * usize::from(rails) * 4 {
            return malformed("a region with more or fewer keys than it says");
        }
        let mut piece = || (0..rails).map(|_| reader.u32()).collect::<Result<Vec<_>, _>>();
        let pieces = (0..pieces).map(|_| piece()).collect::<Result<_, _>>()?;
        Ok(Self { address, bytes: region_bytes, piece_bytes, is_device: is_device == 1, pieces })
    }
}

fn malformed<T>(problem: &str) -> Result<T, RdmaError> {
    Err(RdmaError::Parameters { problem: problem.to_owned() })
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], RdmaError> {
        let Some((taken, rest)) = self.0.split_first_chunk::<N>() else { return malformed("too few bytes") };
        self.0 = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<u32, RdmaError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, RdmaError> {
        self.take().map(u64::from_le_bytes)
    }

    fn end(self) -> Result<(), RdmaError> {
        if self.0.is_empty() { Ok(()) } else { malformed("too many bytes") }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parameters() -> RailsParameters {
        let lane =
            LaneAddress { rail: 1, number: 0x0012_3456, first_packet: 0x00AB_CDEF, gid: [7; 16], lid: 0x0102, mtu: 5 };
        RailsParameters { window: 32, head_bytes: 8192, rails: 2, lanes: vec![lane, LaneAddress { rail: 0, ..lane }] }
    }

    fn keys() -> RegionKeys {
        let pieces = vec![vec![1, 2], vec![3, u32::MAX]];
        RegionKeys { address: 1 << 40, bytes: 3000, piece_bytes: 2000, is_device: false, pieces }
    }

    #[test]
    fn what_is_told_is_read_and_its_bytes_are_fixed() {
        let bytes = parameters().encode();
        assert_eq!(RailsParameters::decode(&bytes).unwrap(), parameters());
        let golden =
            b"\x01\x02\x02\x00\x20\x00\x00\x00\x00\x20\x00\x00\x01\x05\x02\x01\x56\x34\x12\x00\xef\xcd\xab\x00\x07\x07";
        assert_eq!((&bytes[..golden.len()], bytes.len()), (&golden[..], 12 + 2 * 28));
        let bytes = keys().encode();
        assert_eq!(RegionKeys::decode(&bytes).unwrap(), keys());
        assert_eq!((&bytes[..13], bytes.len()), (&b"\x01\x02\0\0\x02\0\0\0\0\0\0\0\0"[..], 32 + 16));
        let of_device = RegionKeys { is_device: true, ..keys() };
        let bytes = of_device.encode();
        assert_eq!((&bytes[..4], RegionKeys::decode(&bytes).unwrap()), (&b"\x01\x02\x01\0"[..], of_device));
    }

    proptest! {
        #[test]
        fn any_other_bytes_are_refused_or_read_as_what_they_say(
            mut bytes in prop::collection::vec(any::<u8>(), 0..100), is_region in any::<bool>(), is_cut in any::<bool>(), at in 0usize..100,
        ) {
            if at % 2 == 0 {
                bytes = if is_region { keys().encode() } else { parameters().encode() };
                let at = at % bytes.len();
                if is_cut { bytes.truncate(at) } else { bytes[at] ^= 1 << (at % 8) }
            }
            if let Ok(read) = RailsParameters::decode(&bytes) {
                prop_assert_eq!(read.encode(), bytes);
            } else if let Ok(read) = RegionKeys::decode(&bytes) && !read.pieces.is_empty() {
                prop_assert_eq!(read.encode(), bytes);
            }
        }
    }
}
