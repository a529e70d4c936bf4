//! What two endpoints say of their RDMA path, as bodies of [`FrameKind::Path`](kvferry_protocol::wire::FrameKind) frames.

use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Extent, Loop, Pages, Piece};

use crate::api::GrantKey;
use crate::rdma::machine::MAX_PAYLOAD_LANES;
use crate::rdma::memory::RegionKeys;
use crate::rdma::rails::RailsParameters;

/// One word.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum VerbsWord {
    /// The queue pairs to connect to.
    Parameters(RailsParameters),
    /// The next region, in the order of registration.
    Region(RegionKeys),
    /// Connected: the peer may write its test pattern here.
    Ready { pattern: RegionKeys },
    /// What came as the peer's test pattern.
    Echo { came: Vec<u8> },
    /// The own test pattern came as it was written.
    Right,
    /// The path is not taken: payload goes the next way.
    Wrong { reason: String },
    /// A grant's window: the peer may write it with its devices.
    Window { grant: GrantKey, pages: Pages },
    /// Post no more under a grant, and say when nothing is under way.
    Fence { grant: GrantKey },
    /// Post no more into parts of a window, and say when nothing is under way there.
    Seal { grant: GrantKey, extents: Vec<Extent> },
    /// So it is; `ticket` is the number of the fence or seal, counted from 0 by its sender. `ended`: of each payload lane, how many
    /// parts of writes the one who says this had ended until then.
    Fenced { ticket: u32, ended: Vec<u64> },
}

/// The longest reason.
const MAX_REASON_BYTES: usize = 1024;
/// The most loops that a window's or a seal's nest may have.
const MAX_LOOPS: usize = Extent::MAX_LOOPS;

impl VerbsWord {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Parameters(parameters) => {
                out.push(1);
                out.extend(parameters.encode());
            }
            Self::Region(keys) => {
                out.push(2);
                out.extend(keys.encode());
            }
            Self::Ready { pattern } => {
                out.push(3);
                out.extend(pattern.encode());
            }
            Self::Echo { came } => {
                out.push(8);
                out.extend(came);
            }
            Self::Right => out.push(9),
            Self::Wrong { reason } => {
                out.push(10);
                out.extend(&reason.as_bytes()[..reason.floor_char_boundary(MAX_REASON_BYTES)]);
            }
            Self::Window { grant, pages } => {
                out.push(4);
                out.extend(grant.0.to_le_bytes());
                out.extend((pages.bases.len() as u32).to_le_bytes());
                out.extend((pages.pieces.len() as u32).to_le_bytes());
                out.extend(pages.bases.iter().flat_map(|base| base.to_le_bytes()));
                for piece in &pages.pieces {
                    out.extend(piece.region.get().to_le_bytes());
                    put_nest(&mut out, piece.offset, &piece.loops, piece.run_bytes);
                }
            }
            Self::Fence { grant } => {
                out.push(5);
                out.extend(grant.0.to_le_bytes());
            }
            Self::Seal { grant, extents } => {
                out.push(6);
                out.extend(grant.0.to_le_bytes());
                out.extend((extents.len() as u32).to_le_bytes());
                extents.iter().for_each(|extent| put_nest(&mut out, extent.offset, &extent.loops, extent.run_bytes));
            }
            Self::Fenced { ticket, ended } => {
                out.push(7);
                out.extend(ticket.to_le_bytes());
                out.extend(ended.iter().flat_map(|ended| ended.to_le_bytes()));
            }
        }
        out
    }

    /// Reads a word; says what is wrong with it.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let mut reader = Reader(bytes);
        let [kind] = reader.take()?;
        let word = match kind {
            1 => {
                let parameters = RailsParameters::decode(reader.rest());
                Self::Parameters(parameters.map_err(|_| "parameters of queue pairs that cannot be")?)
            }
            2 => Self::Region(RegionKeys::decode(reader.rest()).map_err(|_| "keys of a region that cannot be")?),
            3 => {
                let pattern = RegionKeys::decode(reader.rest());
                Self::Ready { pattern: pattern.map_err(|_| "keys of memory that cannot be")? }
            }
            4 => {
                let grant = GrantKey(u128::from_le_bytes(reader.take()?));
                let (bases, pieces) = (reader.count(8)?, reader.count(17)?);
                let bases = (0..bases).map(|_| reader.u64()).collect::<Result<_, _>>()?;
                let piece = |_| -> Result<Piece, &'static str> {
                    let region = RegionId::new(reader.u32()?);
                    let (offset, loops, run_bytes) = reader.nest()?;
                    Ok(Piece { region, offset, loops, run_bytes })
                };
                Self::Window {
                    grant,
                    pages: Pages { bases, pieces: (0..pieces).map(piece).collect::<Result<_, _>>()? },
                }
            }
            5 => Self::Fence { grant: GrantKey(u128::from_le_bytes(reader.take()?)) },
            6 => {
                let grant = GrantKey(u128::from_le_bytes(reader.take()?));
                let extents = reader.count(17)?;
                let extent = |_| -> Result<Extent, &'static str> {
                    let (offset, loops, run_bytes) = reader.nest()?;
                    Ok(Extent { offset, loops, run_bytes })
                };
                Self::Seal { grant, extents: (0..extents).map(extent).collect::<Result<_, _>>()? }
            }
            7 => {
                let ticket = reader.u32()?;
                let (ended, rest) = reader.rest().as_chunks();
                if !rest.is_empty() || ended.len() > MAX_PAYLOAD_LANES {
                    return Err("counts of other lanes than can be");
                }
                Self::Fenced { ticket, ended: ended.iter().map(|ended| u64::from_le_bytes(*ended)).collect() }
            }
            8 => Self::Echo { came: reader.rest().to_vec() },
            9 => Self::Right,
            10 => {
                let reason = reader.rest();
                if reason.len() > MAX_REASON_BYTES {
                    return Err("too long a reason");
                }
                // It goes to logs.
                let reason = String::from_utf8_lossy(reason).chars().filter(|c| !c.is_control()).collect();
                Self::Wrong { reason }
            }
            _ => return Err("a word that is not known"),
        };
        if reader.0.is_empty() { Ok(word) } else { Err("a word with more bytes than it has") }
    }
}

fn put_nest(out: &mut Vec<u8>, offset: u64, loops: &[Loop], run_bytes: u64) {
    out.extend(offset.to_le_bytes());
    out.extend(run_bytes.to_le_bytes());
    out.push(loops.len() as u8);
    for step in loops {
        out.extend(step.count.to_le_bytes());
        out.extend(step.stride.to_le_bytes());
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or("a word that is cut short")?;
        self.0 = rest;
        Ok(*taken)
    }

    fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    fn u32(&mut self) -> Result<u32, &'static str> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, &'static str> {
        self.take().map(u64::from_le_bytes)
    }

    /// A number of things of at least `least` bytes each, which must fit into what is left.
    fn count(&mut self, least: usize) -> Result<usize, &'static str> {
        let count = self.u32()? as usize;
        if count > self.0.len() / least { Err("a list that is longer than its word") } else { Ok(count) }
    }

    fn nest(&mut self) -> Result<(u64, Vec<Loop>, u64), &'static str> {
        let (offset, run_bytes) = (self.u64()?, self.u64()?);
        let [loops] = self.take()?;
        if usize::from(loops) > MAX_LOOPS {
            return Err("a nest with too many loops");
        }
        let step = |_| Ok(Loop { count: self.u32()?, stride: self.u64()? });
        Ok((offset, (0..loops).map(step).collect::<Result<_, &'static str>>()?, run_bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_a_cut_or_longer_one_is_refused() {
        let loops = vec![Loop { count: 3, stride: 1 << 33 }];
        let piece = Piece { region: RegionId::new(7), offset: 5, loops: loops.clone(), run_bytes: 9 };
        let extents = vec![Extent { offset: 1, loops, run_bytes: 2 }, Extent::contiguous(3, 4)];
        let grant = GrantKey(u128::MAX - 5);
        let pattern = RegionKeys { address: 1, bytes: 2, piece_bytes: 2, is_device: false, pieces: vec![vec![3, 4]] };
        for word in [
            VerbsWord::Ready { pattern },
            VerbsWord::Window { grant, pages: Pages { bases: vec![1, u64::MAX], pieces: vec![piece] } },
            VerbsWord::Fence { grant },
            VerbsWord::Seal { grant, extents },
            VerbsWord::Right,
        ] {
            let bytes = word.encode();
            assert_eq!(VerbsWord::decode(&bytes), Ok(word));
            for cut in 0..bytes.len() {
                assert!(VerbsWord::decode(&bytes[..cut]).is_err(), "{cut} of {bytes:?}");
            }
            assert!(VerbsWord::decode(&[&bytes[..], &[0]].concat()).is_err());
        }
        // What goes on to the word's end is as long as it is.
        for word in [
            VerbsWord::Fenced { ticket: 77, ended: vec![u64::MAX, 0, 3] },
            VerbsWord::Echo { came: vec![0, 255, 7] },
            VerbsWord::Wrong { reason: "spoilt".to_owned() },
        ] {
            assert_eq!(VerbsWord::decode(&word.encode()), Ok(word));
        }
        let ended = vec![0; MAX_PAYLOAD_LANES + 1];
        assert!(VerbsWord::decode(&VerbsWord::Fenced { ticket: 1, ended }.encode()).is_err(), "lanes that cannot be");
        let long = VerbsWord::Wrong { reason: "\u{fc}\n".repeat(MAX_REASON_BYTES) };
        let Ok(VerbsWord::Wrong { reason }) = VerbsWord::decode(&long.encode()) else { panic!("a long reason") };
        assert!(reason.len() <= MAX_REASON_BYTES && reason.chars().all(|c| c == '\u{fc}'), "{reason}");
        assert!(VerbsWord::decode(&[&[4][..], &[0; 16], &[255; 8]].concat()).is_err(), "a list without its bytes");
    }
}
