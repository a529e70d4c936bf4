//! A grant of the peer's, as the RDMA path knows it.

use std::collections::BTreeSet;

use kvferry_protocol::pages::{Extent, Pages};
use kvferry_protocol::wire::Refusal;

use crate::core::{RunList, Seals};
use crate::error::TransportError;
use crate::rdma::memory::{PeerMemory, RegionKeys};
use crate::rdma::work::Key;

pub(super) struct PeerWindow {
    pub(super) list: RunList,
    /// Of each piece, its region.
    regions: Vec<usize>,
    /// Whether a page of it is a device's: nothing of it goes by lanes.
    pub(super) is_device: bool,
    pub(super) seals: Seals,
    /// Writes that have begun.
    pub(super) begun: BTreeSet<u32>,
}

/// Why no device carries a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unsent {
    /// The receiver would refuse it.
    Refused(Refusal),
    /// This side's devices cannot.
    Unable(&'static str),
}

impl Unsent {
    /// As a post's end, where no lane may carry it either. `what` of it is a device's memory.
    pub(super) fn reason(self, what: &'static str) -> TransportError {
        match self {
            Self::Refused(refusal) => TransportError::Refused { reason: refusal.reason().to_owned() },
            Self::Unable(problem) => TransportError::DeviceMemory { what, problem: problem.to_owned() },
        }
    }
}

impl PeerWindow {
    /// Checks a window against what the peer told of its regions.
    pub(super) fn new(pages: &Pages, memory: &PeerMemory, early: &[RegionKeys]) -> Option<Self> {
        let highest = pages.bases.iter().copied().max().unwrap_or(0);
        let mut regions = Vec::with_capacity(pages.pieces.len());
        let mut is_device = false;
        for piece in &pages.pieces {
            let nest = Extent { offset: piece.offset, loops: piece.loops.clone(), run_bytes: piece.run_bytes };
            let region = piece.region.get() as usize;
            let early = || early.get(region).map(|keys| (keys.bytes, keys.is_device));
            let (bytes, is_of_device) = memory.region(region).or_else(early)?;
            is_device |= is_of_device;
            let end = nest.end().and_then(|end| end.checked_add(highest))?;
            if end > bytes {
                return None;
            }
            regions.push(region);
        }
        let list = RunList::of_pages(pages)?;
        Some(Self { list, regions, is_device, seals: Seals::default(), begun: BTreeSet::new() })
    }

    /// Where the bytes of extents lie in the peer's memory.
    pub(super) fn locate(
        &self,
        extents: &[Extent],
        memory: &PeerMemory,
        remote: &mut Vec<(Key, u64, u64)>,
    ) -> Option<()> {
        use std::ops::ControlFlow::{Break, Continue};
        let extents = RunList::of_extents(extents)?;
        let mut is_found = true;
        extents.walk(0, extents.bytes(), |_, from, bytes| {
            self.list.walk(from, from + bytes, |piece, offset, bytes| {
                let found =
                    memory.locate(self.regions[piece], offset, bytes, |key, at, bytes| remote.push((key, at, bytes)));
                is_found &= found.is_ok();
                if is_found { Continue(()) } else { Break(()) }
            });
            if is_found { Continue(()) } else { Break(()) }
        });
        is_found.then_some(())
    }
}

#[cfg(test)]
mod tests {
    use kvferry_protocol::RegionId;
    use kvferry_protocol::pages::Piece;

    use super::*;

    #[test]
    fn a_window_is_a_devices_if_any_region_of_it_is_known_or_just_told() {
        let keys = |is_device| RegionKeys { address: 0, bytes: 64, piece_bytes: 64, is_device, pieces: vec![vec![1]] };
        let mut known = PeerMemory::default();
        known.add(keys(false), 1).unwrap();
        known.add(keys(true), 1).unwrap();
        let piece = |region: u32| Piece { region: RegionId::new(region), offset: 0, loops: vec![], run_bytes: 64 };
        let window = |memory: &PeerMemory, early: &[RegionKeys], regions: &[u32]| {
            let pages = Pages { bases: vec![0], pieces: regions.iter().map(|region| piece(*region)).collect() };
            PeerWindow::new(&pages, memory, early).map(|window| window.is_device)
        };
        let early = [keys(false), keys(true)];
        for (regions, want) in [(&[0][..], Some(false)), (&[1], Some(true)), (&[0, 1], Some(true)), (&[2], None)] {
            assert_eq!(window(&known, &[], regions), want, "{regions:?}");
            assert_eq!(window(&PeerMemory::default(), &early, regions), want, "{regions:?}, early");
        }
    }
}
