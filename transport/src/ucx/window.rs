//! A grant's window as the sender knows it: the receiver's addresses and keys, in window order.
//!
//! Over UCX a write names addresses, so the receiver must tell them, and a sender that lies can write any byte of a region whose
//! key it was given. That is what one-sided transports are; whoever does not trust the peers of the cluster takes TCP.

use std::ops::ControlFlow;

use bytes::Bytes;
use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Loop, Pages, Piece};

use super::error::UcxError;
use super::ffi::RemotePlace;
use crate::core::RunList;

const VERSION: u8 = 1;
const MAX_REGIONS: usize = 4096;
const MAX_KEY_BYTES: usize = 4096;
const MAX_PIECES: usize = 1 << 14;
const MAX_LOOPS: usize = 8;
const MAX_BASES: usize = 1 << 20;

/// A registered region, as a peer needs it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct RegionKey {
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) packed: Bytes,
}

/// The receiver's bytes behind a grant, told by [`UcxNode::window`](super::UcxNode::window).
pub struct RemoteWindow {
    regions: Vec<RegionKey>,
    /// The region of each piece.
    used: Vec<usize>,
    list: RunList,
}

/// Contiguous bytes at the receiver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RemoteRun {
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// Which region of the window.
    pub(super) region: usize,
}

impl RemoteRun {
    pub(super) fn place(self, keys: &[usize]) -> Option<RemotePlace> {
        Some(RemotePlace { address: self.address, key: *keys.get(self.region)? })
    }

    pub(super) fn skip(self, bytes: u64) -> Self {
        Self { address: self.address + bytes, bytes: self.bytes - bytes, ..self }
    }
}

impl std::fmt::Debug for RemoteWindow {
    /// Keys are secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteWindow").field("bytes", &self.bytes()).field("regions", &self.regions.len()).finish()
    }
}

/// Writes a window for the peer that may fill it. Its pages were checked against the regions.
///
/// `version u8, regions u16, then each: address u64, bytes u64, key_bytes u16, key; pieces u16, then each: region u16, offset
/// u64, run_bytes u64, loops u8, then each loop: count u32, stride u64; bases u32, then each u64`, little-endian.
pub(super) fn encode(pages: &Pages, regions: &[RegionKey]) -> Result<Bytes, UcxError> {
    limit("the pieces of a window", pages.pieces.len(), MAX_PIECES)?;
    limit("the blocks of a window", pages.bases.len(), MAX_BASES)?;
    let mut used: Vec<u32> = pages.pieces.iter().map(|piece| piece.region.get()).collect();
    used.sort_unstable();
    used.dedup();
    limit("the regions of a window", used.len(), MAX_REGIONS)?;
    let mut out = vec![VERSION];
    out.extend((used.len() as u16).to_le_bytes());
    for &region in &used {
        let key = regions.get(region as usize).ok_or(wrong("it names a region that was not registered"))?;
        limit("the bytes of a packed key", key.packed.len(), MAX_KEY_BYTES)?;
        out.extend(key.address.to_le_bytes());
        out.extend(key.bytes.to_le_bytes());
        out.extend((key.packed.len() as u16).to_le_bytes());
        out.extend_from_slice(&key.packed);
    }
    out.extend((pages.pieces.len() as u16).to_le_bytes());
    for piece in &pages.pieces {
        limit("the loops of a piece", piece.loops.len(), MAX_LOOPS)?;
        let place = used.partition_point(|&region| region < piece.region.get());
        out.extend((place as u16).to_le_bytes());
        out.extend(piece.offset.to_le_bytes());
        out.extend(piece.run_bytes.to_le_bytes());
        out.push(piece.loops.len() as u8);
        for l in &piece.loops {
            out.extend(l.count.to_le_bytes());
            out.extend(l.stride.to_le_bytes());
        }
    }
    out.extend((pages.bases.len() as u32).to_le_bytes());
    out.extend(pages.bases.iter().flat_map(|base| base.to_le_bytes()));
    Ok(out.into())
}

impl RemoteWindow {
    /// Reads what the receiver told. Every byte of the window is then inside a region that the receiver named.
    ///
    /// # Errors
    /// [`UcxError::Parameters`] or [`UcxError::Limit`] if the bytes are no window.
    pub fn decode(bytes: &Bytes) -> Result<Self, UcxError> {
        let mut reader = Reader { all: bytes, rest: bytes };
        if reader.take::<1>()? != [VERSION] {
            return Err(wrong("it is of another version"));
        }
        let regions = usize::from(reader.u16()?);
        limit("the regions of a window", regions, MAX_REGIONS)?;
        let regions = (0..regions).map(|_| reader.region()).collect::<Result<Vec<_>, _>>()?;
        let pieces = usize::from(reader.u16()?);
        limit("the pieces of a window", pieces, MAX_PIECES)?;
        let pieces = (0..pieces).map(|_| reader.piece()).collect::<Result<Vec<_>, _>>()?;
        let bases = reader.u32()? as usize;
        limit("the blocks of a window", bases, MAX_BASES)?;
        if reader.rest.len() != bases * 8 {
            return Err(wrong("its length is not what it says"));
        }
        let bases = (0..bases).map(|_| reader.u64()).collect::<Result<Vec<_>, _>>()?;
        Self::new(regions, Pages { bases, pieces })
    }

    fn new(regions: Vec<RegionKey>, pages: Pages) -> Result<Self, UcxError> {
        let highest_base = pages.bases.iter().copied().max().unwrap_or(0);
        let mut used = Vec::with_capacity(pages.pieces.len());
        for piece in &pages.pieces {
            let at = piece.region.get() as usize;
            let region = regions.get(at).ok_or(wrong("a piece names a region that is not there"))?;
            let end = end_of(piece).and_then(|end| end.checked_add(highest_base));
            if end.is_none_or(|end| end > region.bytes) {
                return Err(wrong("a page leaves its region"));
            }
            used.push(at);
        }
        let list = RunList::of_pages(&pages).ok_or(wrong("a piece is empty or too long"))?;
        Ok(Self { regions, used, list })
    }

    /// How many bytes may be written.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.list.bytes()
    }

    pub(super) fn regions(&self) -> &[RegionKey] {
        &self.regions
    }

    /// Appends where bytes `from..to` of the window lie, neighbours joined, until `out` has `max_runs`. Returns how many bytes.
    fn append_runs(&self, from: u64, to: u64, max_runs: usize, out: &mut Vec<RemoteRun>) -> u64 {
        let mut appended = 0;
        self.list.walk(from, to, |piece, offset, bytes| {
            let region = self.used[piece];
            let address = self.regions[region].address + offset;
            let is_full = out.len() >= max_runs;
            match out.last_mut() {
                Some(last) if last.region == region && last.address + last.bytes == address => last.bytes += bytes,
                _ if is_full => return ControlFlow::Break(()),
                _ => out.push(RemoteRun { address, bytes, region }),
            }
            appended += bytes;
            ControlFlow::Continue(())
        });
        appended
    }

    /// Appends where the bytes of `extents` from `done` on go, until `out` has `max_runs`. Returns how many bytes.
    pub(super) fn append_extents(
        &self,
        extents: &RunList,
        done: u64,
        max_runs: usize,
        out: &mut Vec<RemoteRun>,
    ) -> u64 {
        let mut appended = 0;
        extents.walk(done, extents.bytes(), |_, offset, bytes| {
            let got = self.append_runs(offset, offset + bytes, max_runs, out);
            appended += got;
            if got == bytes && out.len() < max_runs { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        appended
    }
}

fn end_of(piece: &Piece) -> Option<u64> {
    let start = piece.offset.checked_add(piece.run_bytes)?;
    piece.loops.iter().try_fold(start, |end, l| {
        let steps = u64::from(l.count).checked_sub(1)?;
        end.checked_add(l.stride.checked_mul(steps)?)
    })
}

fn wrong(problem: &'static str) -> UcxError {
    UcxError::Parameters { what: "the window", problem }
}

fn limit(what: &'static str, found: usize, limit: usize) -> Result<(), UcxError> {
    let (found, limit) = (found as u64, limit as u64);
    if found <= limit { Ok(()) } else { Err(UcxError::Limit { what, found, limit }) }
}

struct Reader<'a> {
    all: &'a Bytes,
    rest: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], UcxError> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or(wrong("it is too short"))?;
        self.rest = rest;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<u16, UcxError> {
        Ok(u16::from_le_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32, UcxError> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, UcxError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn region(&mut self) -> Result<RegionKey, UcxError> {
        let (address, bytes, key_bytes) = (self.u64()?, self.u64()?, usize::from(self.u16()?));
        if address.checked_add(bytes).is_none() {
            return Err(wrong("a region has no end"));
        }
        limit("the bytes of a packed key", key_bytes, MAX_KEY_BYTES)?;
        let (packed, rest) = self.rest.split_at_checked(key_bytes).ok_or(wrong("it is too short"))?;
        let packed = self.all.slice_ref(packed);
        self.rest = rest;
        Ok(RegionKey { address, bytes, packed })
    }

    fn piece(&mut self) -> Result<Piece, UcxError> {
        let region = RegionId::new(self.u16()?.into());
        let (offset, run_bytes, [loops]) = (self.u64()?, self.u64()?, self.take::<1>()?);
        limit("the loops of a piece", loops.into(), MAX_LOOPS)?;
        let loops = (0..loops).map(|_| Ok(Loop { count: self.u32()?, stride: self.u64()? }));
        let loops = loops.collect::<Result<_, UcxError>>()?;
        Ok(Piece { region, offset, loops, run_bytes })
    }
}

#[cfg(test)]
mod tests {
    use kvferry_protocol::pages::Extent;
    use proptest::prelude::*;

    use super::*;

    fn keys(count: usize, bytes: u64) -> Vec<RegionKey> {
        let key = |at: usize| RegionKey {
            address: 0x10_0000 * (at as u64 + 1),
            bytes,
            packed: Bytes::from(format!("key {at}")),
        };
        (0..count).map(key).collect()
    }

    fn any_pages() -> impl Strategy<Value = Pages> {
        let piece = (0u32..3, 0u64..30, prop::collection::vec((1u32..4, 0u64..40), 0..3), 1u64..9).prop_map(
            |(region, offset, loops, run_bytes)| Piece {
                region: RegionId::new(region),
                offset,
                loops: loops.into_iter().map(|(count, stride)| Loop { count, stride }).collect(),
                run_bytes,
            },
        );
        (prop::collection::vec(0u64..200, 1..4), prop::collection::vec(piece, 1..4))
            .prop_map(|(bases, pieces)| Pages { bases, pieces })
    }

    proptest! {
        #[test]
        fn what_was_told_leads_to_the_same_bytes(pages in any_pages(), cut in 0u64..1000, max_runs in 1usize..40) {
            let regions = keys(3, 1024);
            let window = RemoteWindow::decode(&encode(&pages, &regions).unwrap()).unwrap();
            prop_assert_eq!(window.bytes(), pages.bytes());
            let mut naive = Vec::new();
            for &base in &pages.bases {
                for piece in &pages.pieces {
                    let start = regions[piece.region.get() as usize].address;
                    piece.for_each_run(base, |at| naive.extend((at..at + piece.run_bytes).map(|at| start + at)));
                }
            }
            let from = cut % window.bytes();
            let extents = RunList::of_extents(&[Extent::contiguous(from, window.bytes() - from)]).unwrap();
            let (mut got, mut done) = (Vec::new(), 0);
            while done < extents.bytes() {
                let mut runs = Vec::new();
                let appended = window.append_extents(&extents, done, max_runs, &mut runs);
                prop_assert!(appended > 0 && runs.len() <= max_runs);
                for run in &runs {
                    let name = format!("key {}", run.address / 0x10_0000 - 1);
                    prop_assert_eq!(&window.regions()[run.region].packed, &Bytes::from(name));
                    got.extend(run.address..run.address + run.bytes);
                }
                done += appended;
            }
            prop_assert_eq!(&got, &naive[from as usize..]);
        }

        #[test]
        fn a_decoder_takes_any_bytes_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = RemoteWindow::decode(&bytes.into());
        }

        #[test]
        fn a_changed_window_is_refused_or_stays_inside_what_it_names(
            pages in any_pages(), at in any::<prop::sample::Index>(), change in 1u8..
        ) {
            let mut bytes = encode(&pages, &keys(3, 1024)).unwrap().to_vec();
            let at = at.index(bytes.len());
            bytes[at] ^= change;
            if let Ok(window) = RemoteWindow::decode(&bytes.into()) {
                let mut runs = Vec::new();
                window.append_runs(0, window.bytes(), 1000, &mut runs);
                for run in runs {
                    let region = &window.regions()[run.region];
                    prop_assert!(run.address >= region.address);
                    prop_assert!(run.address + run.bytes <= region.address + region.bytes);
                }
            }
        }
    }

    #[test]
    fn golden_bytes_of_version_1() {
        let piece =
            Piece { region: RegionId::new(1), offset: 2, loops: vec![Loop { count: 3, stride: 4 }], run_bytes: 1 };
        let regions =
            [keys(1, 1), vec![RegionKey { address: 5, bytes: 99, packed: Bytes::from_static(b"k") }]].concat();
        let bytes = encode(&Pages { bases: vec![6, 7], pieces: vec![piece] }, &regions).unwrap();
        let head = b"\x01\x01\0\x05\0\0\0\0\0\0\0\x63\0\0\0\0\0\0\0\x01\0k";
        let piece = b"\x01\0\0\0\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0\x01\x03\0\0\0\x04\0\0\0\0\0\0\0";
        let bases = b"\x02\0\0\0\x06\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0";
        assert_eq!(bytes, [&head[..], piece, bases].concat());
    }

    #[test]
    fn a_window_that_leaves_its_region_is_refused() {
        let pages = |base, offset, run_bytes| Pages {
            bases: vec![0, base],
            pieces: vec![Piece { region: RegionId::new(0), offset, loops: vec![], run_bytes }],
        };
        for (pages, fits) in [
            (pages(50, 30, 20), true),
            (pages(51, 30, 20), false),
            (pages(u64::MAX, 1, 1), false),
            (pages(0, u64::MAX, 1), false),
            (pages(0, 0, 0), false),
        ] {
            let told = encode(&pages, &keys(1, 100)).unwrap();
            assert_eq!(RemoteWindow::decode(&told).is_ok(), fits, "{pages:?}");
        }
    }
}
