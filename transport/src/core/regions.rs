//! The registered regions of one endpoint.

use std::sync::{PoisonError, RwLock};

use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Pages, Piece};

use super::runs::RunList;
use super::window::Window;
use crate::api::{Memory, MemoryFile, MemoryKind};
use crate::error::TransportError;
use crate::raw::Region;

/// How many regions an endpoint can have; an engine has one a layer at most.
const MAX_REGIONS: usize = 4096;

/// Grows only: a region lives as long as the transport.
pub(crate) struct RegionTable(RwLock<Vec<Entry>>);

struct Entry {
    region: Region,
    file: Option<MemoryFile>,
}

impl RegionTable {
    pub(crate) fn new() -> Self {
        Self(RwLock::new(Vec::new()))
    }

    pub(crate) fn add(&self, memory: Memory) -> Result<RegionId, TransportError> {
        let bytes = memory.bytes;
        let refuse = |problem: &str| TransportError::Memory { bytes, problem: problem.to_owned() };
        if memory.kind != MemoryKind::Host {
            return Err(refuse(
                "this transport's processors read and write it: it takes host memory only, and this is a device's",
            ));
        }
        if bytes == 0 || bytes > isize::MAX as usize {
            return Err(refuse("a region has 1 to isize::MAX bytes"));
        }
        let mut regions = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if regions.len() >= MAX_REGIONS {
            return Err(refuse("the table of regions is full; register larger ones"));
        }
        regions.push(Entry { region: Region::new(&memory), file: memory.file });
        Ok(RegionId::new(regions.len() as u32 - 1))
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// A region, and the file behind it.
    pub(crate) fn entry(&self, id: RegionId) -> Option<(Region, Option<MemoryFile>)> {
        let regions = self.0.read().unwrap_or_else(PoisonError::into_inner);
        regions.get(id.get() as usize).map(|entry| (entry.region, entry.file.clone()))
    }

    /// Checks every page against its region and makes the pages addressable.
    pub(crate) fn window(&self, pages: &Pages, what: &str) -> Result<Window, TransportError> {
        let regions = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let highest_base = pages.bases.iter().copied().max().unwrap_or(0);
        let mut used = Vec::with_capacity(pages.pieces.len());
        for piece in &pages.pieces {
            let Entry { region, .. } =
                regions.get(piece.region.get() as usize).ok_or_else(|| TransportError::Range {
                    what: format!("{what}: there is no region {}", piece.region),
                    start: piece.region.get().into(),
                    end: u64::from(piece.region.get()) + 1,
                    limit: regions.len() as u64,
                })?;
            let end = piece_end(piece).and_then(|end| end.checked_add(highest_base));
            if end.is_none_or(|end| end > region.bytes()) {
                return Err(TransportError::Range {
                    what: format!("{what} in region {}", piece.region),
                    start: piece.offset.saturating_add(highest_base),
                    end: end.unwrap_or(u64::MAX),
                    limit: region.bytes(),
                });
            }
            used.push(*region);
        }
        let list = RunList::of_pages(pages).ok_or(TransportError::Limit {
            what: "bytes of pages, or an empty piece",
            found: u64::MAX,
            limit: u64::MAX,
        })?;
        Ok(Window::new(list, used))
    }
}

fn piece_end(piece: &Piece) -> Option<u64> {
    let start = piece.offset.checked_add(piece.run_bytes)?;
    piece.loops.iter().try_fold(start, |end, l| {
        let steps = u64::from(l.count).checked_sub(1)?;
        end.checked_add(l.stride.checked_mul(steps)?)
    })
}
