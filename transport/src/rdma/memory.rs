//! Registered memory, here and at a peer, and which bytes go where.
//!
//! A region is registered on every rail, in pieces that are not longer than any of the devices takes. A piece has one [`Key`] for all
//! rails; each rail has its own key of the device for it. Memory of another device, as a GPU's, is registered in the same pieces, by a dma-buf
//! or by its address ([`Stretch`]).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{PoisonError, RwLock};

use super::error::RdmaError;
use super::ffi::MemoryRegion;
use super::work::{Key, Run};
use crate::api::{Memory, MemoryKind};
use crate::device_memory::DeviceAccess;
use crate::place::{DeviceRegion, DeviceRun, Place};
use crate::raw::{RawRun, Region};

/// What a peer must know of a region to write into it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RegionKeys {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// Bytes of each piece but the last.
    pub(crate) piece_bytes: u64,
    /// Whether it is memory of a device, which no processor of its owner writes.
    pub(crate) is_device: bool,
    /// Of each piece, each rail's key.
    pub(crate) pieces: Vec<Vec<u32>>,
}

/// A stretch of memory, as a device registers it at once.
pub(crate) enum Stretch<'a> {
    Host(RawRun),
    /// Of a device's memory, by its dma-buf, where it lies from `offset` on.
    DmaBuf {
        run: DeviceRun,
        file: BorrowedFd<'a>,
        offset: u64,
    },
    /// Of a device's memory, by its address, which a module of its owner's has to know.
    PeerMemory(DeviceRun),
}

/// A registered stretch.
pub(crate) struct Registration {
    local_key: u32,
    remote_key: u32,
    _held: Option<MemoryRegion>,
}

impl From<MemoryRegion> for Registration {
    fn from(region: MemoryRegion) -> Self {
        Self { local_key: region.local_key, remote_key: region.remote_key, _held: Some(region) }
    }
}

/// What registers memory: a rail.
pub(crate) trait Registrar {
    fn register(&self, stretch: &Stretch<'_>) -> Result<Registration, RdmaError>;
}

/// A DMA address and its place in a dma-buf lie alike in a page.
const PAGE_BYTES: u64 = 4096;

/// The memory of one endpoint, on all its rails.
pub(crate) struct Registered {
    piece_bytes: u64,
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    /// Of each piece, by its key, each rail's registration.
    pieces: Vec<Vec<Registration>>,
    regions: Vec<Span>,
    /// The regions' indices by address.
    by_address: Vec<usize>,
}

#[derive(Clone, Copy)]
struct Span {
    address: u64,
    bytes: u64,
    is_device: bool,
    first: u32,
}

impl Registered {
    /// For devices of which none registers more than `piece_bytes` at once.
    pub(crate) fn new(piece_bytes: u64) -> Self {
        // Whole huge pages, so that no piece ends inside of one.
        const HUGE_PAGE: u64 = 2 << 20;
        let piece_bytes =
            if piece_bytes >= HUGE_PAGE { piece_bytes - piece_bytes % HUGE_PAGE } else { piece_bytes.max(1) };
        Self { piece_bytes, state: RwLock::default() }
    }

    /// Registers memory on every rail; gives its index. If one refuses, nothing stays registered.
    pub(crate) fn add(&self, rails: &[impl Registrar], memory: &Memory) -> Result<usize, RdmaError> {
        let (host, device) = (Region::of(memory), DeviceRegion::of(memory));
        let bytes = memory.bytes as u64;
        if let MemoryKind::Device(DeviceAccess { dma_buf: Some(dma_buf), .. }) = &memory.kind {
            let address = memory.address.as_ptr().addr() as u64;
            let is_alike = (address ^ dma_buf.offset).is_multiple_of(PAGE_BYTES);
            if !is_alike || dma_buf.offset.checked_add(bytes).is_none() {
                let problem = format!(
                    "it is at {address:#x} and from byte {:#x} of its dma-buf on: both lie alike in a page of {PAGE_BYTES} bytes",
                    dma_buf.offset
                );
                return Err(RdmaError::DeviceMemory { device: "no card".to_owned(), problem });
            }
        }
        let mut pieces = Vec::new();
        for (at, bytes) in piece_spans(bytes, self.piece_bytes) {
            let run = device.and_then(|region| region.run(at, bytes));
            let stretch = match (&memory.kind, run, host.and_then(|region| region.run(at, bytes))) {
                (MemoryKind::Device(access), Some(run), _) => match &access.dma_buf {
                    Some(dma_buf) => Stretch::DmaBuf { run, file: dma_buf.file.as_fd(), offset: dma_buf.offset + at },
                    None => Stretch::PeerMemory(run),
                },
                (_, _, Some(run)) => Stretch::Host(run),
                _ => continue,
            };
            pieces.push(rails.iter().map(|rail| rail.register(&stretch)).collect::<Result<Vec<_>, _>>()?);
        }
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let state = &mut *state;
        let (index, first) = (state.regions.len(), state.pieces.len() as u32);
        let address = memory.address.as_ptr().addr() as u64;
        let region = Span { address, bytes, is_device: device.is_some(), first };
        let place = state.by_address.partition_point(|other| state.regions[*other].address < region.address);
        state.by_address.insert(place, index);
        state.regions.push(region);
        state.pieces.append(&mut pieces);
        Ok(index)
    }

    /// What peers are told of a region.
    pub(crate) fn keys(&self, index: usize) -> Option<RegionKeys> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let Span { address, bytes, is_device, first } = *state.regions.get(index)?;
        let count = bytes.div_ceil(self.piece_bytes) as usize;
        let pieces = state.pieces.iter().skip(first as usize).take(count);
        let pieces = pieces.map(|rails| rails.iter().map(|region| region.remote_key).collect()).collect();
        Some(RegionKeys { address, bytes, piece_bytes: self.piece_bytes, is_device, pieces })
    }

    /// Calls `piece(key, address, bytes)` for the parts of a range of host memory, or of a device's, each in one piece. The two are looked for
    /// apart: a device may have addresses that the host has, too.
    pub(crate) fn locate(
        &self,
        is_device: bool,
        address: u64,
        bytes: u64,
        mut piece: impl FnMut(Key, u64, u64),
    ) -> Result<(), RdmaError> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let end = address.saturating_add(bytes);
        let place = state.by_address.partition_point(|region| state.regions[*region].address <= address);
        let mut fitting = state.by_address[..place].iter().rev().map(|region| state.regions[*region]);
        let region = fitting.find(|region| region.is_device == is_device && end <= region.address + region.bytes);
        let region = region.ok_or(RdmaError::NotRegistered { start: address, end })?;
        split(region.address, region.first, self.piece_bytes, address, bytes, &mut piece);
        Ok(())
    }

    /// All keys of one rail, to look up many without a lock each.
    pub(crate) fn copy_local_keys(&self, rail: usize, into: &mut Vec<u32>) {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        if into.len() < state.pieces.len() {
            into.extend(state.pieces[into.len()..].iter().map(|rails| rails[rail].local_key));
        }
    }
}

/// What a peer has told of its regions.
#[derive(Debug, Default)]
pub(crate) struct PeerMemory {
    regions: Vec<(RegionKeys, u32)>,
    keys: Vec<Vec<u32>>,
    pattern: Option<RegionKeys>,
}

/// The most pieces of a peer's regions that are remembered.
pub(crate) const MAX_PEER_PIECES: usize = 1 << 16;

impl PeerMemory {
    /// Takes what a peer says of its next region; `rails` is how many the peer has.
    pub(crate) fn add(&mut self, region: RegionKeys, rails: usize) -> Result<(), RdmaError> {
        let refuse = |problem: String| Err(RdmaError::Parameters { problem });
        let is_whole = region.piece_bytes > 0
            && region.bytes.div_ceil(region.piece_bytes) == region.pieces.len() as u64
            && region.address.checked_add(region.bytes).is_some()
            && region.pieces.iter().all(|keys| keys.len() == rails);
        if !is_whole || region.bytes == 0 {
            return refuse(format!("region {} has other pieces or keys than its length asks for", self.regions.len()));
        }
        if self.keys.len() + region.pieces.len() > MAX_PEER_PIECES {
            return refuse(format!(
                "its regions have more than {MAX_PEER_PIECES} pieces; register less, or larger pages"
            ));
        }
        let first = self.keys.len() as u32;
        self.keys.extend(region.pieces.iter().cloned());
        self.regions.push((region, first));
        Ok(())
    }

    /// Takes what a peer says of the memory for test patterns of `bytes` bytes.
    pub(crate) fn set_pattern(&mut self, memory: RegionKeys, bytes: usize, rails: usize) -> Result<(), RdmaError> {
        let is_one_piece = memory.pieces.len() == 1 && memory.pieces.iter().all(|keys| keys.len() == rails);
        if !is_one_piece
            || memory.is_device
            || memory.bytes != bytes as u64
            || memory.address.checked_add(memory.bytes).is_none()
        {
            let problem = format!("its memory for test patterns is not one piece of {bytes} bytes");
            return Err(RdmaError::Parameters { problem });
        }
        self.pattern = Some(memory);
        Ok(())
    }

    /// Where test patterns go.
    pub(crate) fn pattern_address(&self) -> Option<u64> {
        self.pattern.as_ref().map(|memory| memory.address)
    }

    /// Calls `piece(key, address, bytes)` for the parts of a range of a region, each in one piece.
    pub(crate) fn locate(
        &self,
        region: usize,
        offset: u64,
        bytes: u64,
        mut piece: impl FnMut(Key, u64, u64),
    ) -> Result<(), RdmaError> {
        let known =
            self.regions.get(region).filter(|(keys, _)| offset.checked_add(bytes).is_some_and(|end| end <= keys.bytes));
        let Some((keys, first)) = known else {
            let problem = format!("bytes {offset}..{} of region {region} are not there", offset.saturating_add(bytes));
            return Err(RdmaError::Parameters { problem });
        };
        split(keys.address, *first, keys.piece_bytes, keys.address + offset, bytes, &mut piece);
        Ok(())
    }

    /// How long a region is, and whether it is a device's memory.
    pub(crate) fn region(&self, region: usize) -> Option<(u64, bool)> {
        self.regions.get(region).map(|(keys, _)| (keys.bytes, keys.is_device))
    }

    /// A rail's key of the peer's device for writing a piece.
    pub(crate) fn remote_key(&self, key: Key, rail: usize) -> Option<u32> {
        if key == Key::PATTERN {
            return self.pattern.as_ref()?.pieces.first()?.get(rail).copied();
        }
        self.keys.get(key.0 as usize)?.get(rail).copied()
    }
}

fn piece_spans(bytes: u64, piece_bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..bytes.div_ceil(piece_bytes)).map(move |at| (at * piece_bytes, piece_bytes.min(bytes - at * piece_bytes)))
}

fn split(
    base: u64,
    first: u32,
    piece_bytes: u64,
    mut address: u64,
    mut bytes: u64,
    piece: &mut impl FnMut(Key, u64, u64),
) {
    while bytes > 0 {
        let (index, within) = ((address - base) / piece_bytes, (address - base) % piece_bytes);
        let take = bytes.min(piece_bytes - within);
        piece(Key(first + index as u32), address, take);
        address += take;
        bytes -= take;
    }
}

/// Two lists of pieces, of the same length together, cut at each other's borders.
pub(crate) fn intersect(local: &[(Key, u64, u64)], remote: &[(Key, u64, u64)]) -> Vec<Run> {
    let mut runs = Vec::with_capacity(local.len().max(remote.len()));
    let (mut l, mut r) = (0, 0);
    let (mut skip_l, mut skip_r) = (0, 0);
    while let (Some((local_key, from, local_bytes)), Some((remote_key, to, remote_bytes))) =
        (local.get(l), remote.get(r))
    {
        let bytes = (local_bytes - skip_l).min(remote_bytes - skip_r);
        if bytes > 0 {
            let (local, remote) = (from + skip_l, to + skip_r);
            runs.push(Run { local, local_key: *local_key, remote, remote_key: *remote_key, bytes });
        }
        (skip_l, skip_r) = (skip_l + bytes, skip_r + bytes);
        if skip_l == *local_bytes {
            (l, skip_l) = (l + 1, 0);
        }
        if skip_r == *remote_bytes {
            (r, skip_r) = (r + 1, 0);
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::device_memory::DmaBuf;

    fn region() -> RegionKeys {
        RegionKeys {
            address: 1000,
            bytes: 250,
            piece_bytes: 100,
            is_device: false,
            pieces: vec![vec![1, 2], vec![3, 4], vec![5, 6]],
        }
    }

    /// What a card was asked to register: by which way, at which address, how many bytes, and from where on in its dma-buf.
    type Asked = (&'static str, u64, u64, u64);

    /// A card that takes some ways, and gives keys in the order of the questions.
    struct Card {
        takes: &'static [&'static str],
        first_key: u32,
        asked: Mutex<Vec<Asked>>,
    }

    impl Card {
        fn new(takes: &'static [&'static str], first_key: u32) -> Self {
            Self { takes, first_key, asked: Mutex::default() }
        }

        fn asked(&self) -> Vec<Asked> {
            std::mem::take(&mut *self.asked.lock().unwrap())
        }
    }

    impl Registrar for Card {
        fn register(&self, stretch: &Stretch<'_>) -> Result<Registration, RdmaError> {
            let asked = match stretch {
                Stretch::Host(run) => ("host", run.start().addr() as u64, run.bytes() as u64, 0),
                Stretch::DmaBuf { run, offset, .. } => ("dma-buf", run.address, run.bytes, *offset),
                Stretch::PeerMemory(run) => ("address", run.address, run.bytes, 0),
            };
            let mut all = self.asked.lock().unwrap();
            all.push(asked);
            let key = self.first_key + 2 * all.len() as u32;
            match self.takes.contains(&asked.0) {
                true => Ok(Registration { local_key: key, remote_key: key + 1, _held: None }),
                false => Err(RdmaError::DeviceMemory { device: "card".to_owned(), problem: asked.0.to_owned() }),
            }
        }
    }

    const ALL: &[&str] = &["host", "dma-buf", "address"];
    const MIB: u64 = 1 << 20;

    fn memory(address: u64, bytes: u64, kind: MemoryKind) -> Memory {
        let address = NonNull::new(std::ptr::without_provenance_mut(address as usize)).unwrap();
        Memory { address, bytes: bytes as usize, kind, file: None }
    }

    fn of_device(dma_buf_offset: Option<u64>) -> MemoryKind {
        let dma_buf = dma_buf_offset.map(|offset| {
            let file = Arc::new(std::fs::File::open("/dev/null").unwrap().into());
            DmaBuf { file, offset }
        });
        MemoryKind::Device(DeviceAccess { dma_buf, flush: None })
    }

    #[test]
    fn memory_of_a_device_is_registered_in_pieces_by_its_dma_buf_or_its_address_on_every_rail() {
        let rails = [Card::new(ALL, 100), Card::new(ALL, 200)];
        let registered = Registered::new(2 * MIB + 5); // whole huge pages: 2 MiB
        let start = 0x40_0300;
        let mut known = 0;
        for (name, kind, way, from) in [
            ("dma-buf", of_device(Some(0x7300)), "dma-buf", 0x7300),
            ("address", of_device(None), "address", 0),
            ("host", MemoryKind::Host, "host", 0),
        ] {
            let is_device = way != "host";
            let index = registered.add(&rails, &memory(start, 4 * MIB + 96, kind)).unwrap();
            let by_dma_buf = if way == "dma-buf" { 1 } else { 0 };
            let want: Vec<Asked> = [(0, 2 * MIB), (2 * MIB, 2 * MIB), (4 * MIB, 96)]
                .map(|(at, bytes)| (way, start + at, bytes, by_dma_buf * (from + at)))
                .to_vec();
            for rail in &rails {
                assert_eq!(rail.asked(), want, "{name}");
            }
            let keys = registered.keys(index).unwrap();
            assert_eq!((keys.is_device, keys.pieces.len(), keys.address), (is_device, 3, start), "{name}");
            assert_eq!(keys.pieces[0], [103, 203], "{name}");
            // The other kind at the same addresses is another region.
            let mut found = Vec::new();
            let piece = |key, at, bytes| found.push((key, at, bytes));
            registered.locate(is_device, start + 2 * MIB - 8, 24, piece).unwrap();
            if way != "address" {
                let first = known as u32;
                let (near, far) = (start + 2 * MIB - 8, start + 2 * MIB);
                let newest = [(Key(first), near, 8), (Key(first + 1), far, 16)];
                assert!(found == newest, "{name}: {found:?}");
            }
            known += 3;
        }
        let refused = registered.locate(true, start - 1, 2, |_, _, _| ()).unwrap_err();
        assert!(matches!(refused, RdmaError::NotRegistered { .. }), "{refused}");
    }

    #[test]
    fn what_one_rail_refuses_is_registered_nowhere_and_keeps_its_reason() {
        let registered = Registered::new(MIB);
        for (name, takes, kind, problem) in [
            ("no dma-buf", &["host", "address"][..], of_device(Some(0)), "dma-buf"),
            ("no peer memory", &["host", "dma-buf"], of_device(None), "address"),
        ] {
            let rails = [Card::new(ALL, 0), Card::new(takes, 50)];
            let refused = registered.add(&rails, &memory(MIB, 2 * MIB, kind)).unwrap_err().to_string();
            assert!(
                refused.contains("card registers no such memory") && refused.ends_with(problem),
                "{name}: {refused}"
            );
            assert!(registered.keys(0).is_none(), "{name}");
            assert!(registered.locate(true, MIB, 1, |_, _, _| ()).is_err(), "{name}");
        }
        let rails = [Card::new(ALL, 0)];
        for (address, offset) in [(0x1000, 0x10), (0x1010, 0), (0x1000, u64::MAX - 0xfff)] {
            let refused = registered.add(&rails, &memory(address, 2 * MIB, of_device(Some(offset)))).unwrap_err();
            assert!(refused.to_string().contains("alike in a page"), "{refused}");
            assert_eq!(rails[0].asked(), [], "no card was asked");
        }
        assert!(registered.keys(0).is_none());
    }

    #[test]
    fn a_peers_region_is_addressed_by_its_pieces() {
        let mut memory = PeerMemory::default();
        memory
            .add(RegionKeys { address: 7, bytes: 1, piece_bytes: 9, is_device: false, pieces: vec![vec![0, 0]] }, 2)
            .unwrap();
        memory.add(region(), 2).unwrap();
        let mut found = Vec::new();
        memory.locate(1, 90, 150, |key, address, bytes| found.push((key, address, bytes))).unwrap();
        assert_eq!(found, [(Key(1), 1090, 10), (Key(2), 1100, 100), (Key(3), 1200, 40)]);
        assert_eq!((memory.remote_key(Key(2), 1), memory.remote_key(Key(2), 2)), (Some(4), None));
        for (region, offset, bytes) in [(1, 200, 51), (1, u64::MAX, 2), (2, 0, 1)] {
            assert!(memory.locate(region, offset, bytes, |_, _, _| ()).is_err());
        }
    }

    #[test]
    fn memory_for_patterns_is_one_piece_of_their_length_with_a_key_for_each_rail() {
        let mut memory = PeerMemory::default();
        let one = RegionKeys { address: 40, bytes: 64, piece_bytes: 64, is_device: false, pieces: vec![vec![8, 9]] };
        assert_eq!((memory.pattern_address(), memory.remote_key(Key::PATTERN, 0)), (None, None));
        for (name, wrong) in [
            ("shorter", RegionKeys { bytes: 63, ..one.clone() }),
            ("a key too few", RegionKeys { pieces: vec![vec![8]], ..one.clone() }),
            ("two pieces", RegionKeys { pieces: vec![vec![8, 9]; 2], ..one.clone() }),
            ("overflow", RegionKeys { address: u64::MAX - 3, ..one.clone() }),
            ("a device's", RegionKeys { is_device: true, ..one.clone() }),
        ] {
            assert!(memory.set_pattern(wrong, 64, 2).is_err(), "{name}");
        }
        memory.set_pattern(one, 64, 2).unwrap();
        assert_eq!((memory.pattern_address(), memory.remote_key(Key::PATTERN, 1)), (Some(40), Some(9)));
    }

    #[test]
    fn a_region_that_contradicts_itself_is_refused() {
        for (name, region) in [
            ("no piece length", RegionKeys { piece_bytes: 0, ..region() }),
            ("too few pieces", RegionKeys { bytes: 301, ..region() }),
            ("too many", RegionKeys { bytes: 200, ..region() }),
            ("overflow", RegionKeys { address: u64::MAX - 10, ..region() }),
            ("a rail without a key", RegionKeys { pieces: vec![vec![1, 2], vec![3], vec![5, 6]], ..region() }),
            ("nothing", RegionKeys { bytes: 0, pieces: vec![], ..region() }),
        ] {
            assert!(PeerMemory::default().add(region, 2).is_err(), "{name}");
        }
    }

    #[test]
    fn registrations_are_split_at_the_limit() {
        let spans = |bytes, piece| piece_spans(bytes, piece).collect::<Vec<_>>();
        assert_eq!(spans(250, 100), [(0, 100), (100, 100), (200, 50)]);
        assert_eq!(spans(200, 100), [(0, 100), (100, 100)]);
        assert_eq!(spans(1, u64::MAX), [(0, 1)]);
    }

    proptest::proptest! {
        #[test]
        fn intersected_runs_are_what_counting_byte_by_byte_finds(
            cuts in proptest::collection::btree_set(1u64..400, 0..20), other in proptest::collection::btree_set(1u64..400, 0..20),
        ) {
            let list = |cuts: &std::collections::BTreeSet<u64>, gap: u64| {
                let ends = cuts.iter().copied().chain([400]);
                let mut start = 0;
                let mut pieces = Vec::new();
                for (at, end) in ends.enumerate() {
                    pieces.push((Key(at as u32), start + at as u64 * gap, end - start));
                    start = end;
                }
                pieces
            };
            let bytes = |pieces: &[(Key, u64, u64)]| pieces.iter().flat_map(|(key, start, bytes)| (0..*bytes).map(|at| (*key, *start + at))).collect::<Vec<_>>();
            let (local, remote) = (list(&cuts, 1000), list(&other, 7));
            let got: Vec<_> = intersect(&local, &remote).iter().flat_map(|run| (0..run.bytes).map(|at| {
                ((run.local_key, run.local + at), (run.remote_key, run.remote + at))
            })).collect();
            let want: Vec<_> = bytes(&local).into_iter().zip(bytes(&remote)).collect();
            proptest::prop_assert_eq!(got, want);
        }
    }
}
