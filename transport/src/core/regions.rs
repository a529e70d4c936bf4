//! The registered regions of one endpoint.

use std::sync::{Arc, PoisonError, RwLock};

use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Pages, Piece};

use super::runs::RunList;
use super::window::{AnyWindow, Window};
use crate::api::{Memory, MemoryFile, MemoryKind};
use crate::device_memory::Flush;
use crate::error::TransportError;
use crate::place::{DeviceRegion, Place};
use crate::raw::Region;

/// How many regions an endpoint can have; an engine has one a layer at most.
const MAX_REGIONS: usize = 4096;

/// Grows only: a region lives as long as the transport.
pub(crate) struct RegionTable(RwLock<Vec<Entry>>);

/// A region, and what else is known of it.
#[derive(Clone)]
pub(crate) enum Entry {
    Host { region: Region, file: Option<MemoryFile> },
    Device { region: DeviceRegion, flush: Option<Arc<dyn Flush>> },
}

impl Entry {
    fn bytes(&self) -> u64 {
        match self {
            Self::Host { region, .. } => region.bytes(),
            Self::Device { region, .. } => region.bytes(),
        }
    }
}

impl RegionTable {
    pub(crate) fn new() -> Self {
        Self(RwLock::new(Vec::new()))
    }

    pub(crate) fn add(&self, memory: Memory) -> Result<RegionId, TransportError> {
        let Some(region) = Region::of(&memory) else {
            let problem =
                "this transport's processors read and write it: it takes host memory only, and this is a device's";
            return Err(TransportError::Memory { bytes: memory.bytes, problem: problem.to_owned() });
        };
        self.push(memory.bytes, Entry::Host { region, file: memory.file })
    }

    /// Adds memory of a device, which RDMA devices have registered and nobody else reaches.
    pub(crate) fn add_of_device(&self, memory: Memory) -> Result<RegionId, TransportError> {
        let (region, bytes) = (DeviceRegion::of(&memory), memory.bytes);
        let (Some(region), MemoryKind::Device(access)) = (region, memory.kind) else {
            let problem = "it is the host's, or longer than its address allows".to_owned();
            return Err(TransportError::Memory { bytes, problem });
        };
        self.push(bytes, Entry::Device { region, flush: access.flush })
    }

    fn push(&self, bytes: usize, entry: Entry) -> Result<RegionId, TransportError> {
        let refuse = |problem: &str| TransportError::Memory { bytes, problem: problem.to_owned() };
        if bytes == 0 || bytes > isize::MAX as usize {
            return Err(refuse("a region has 1 to isize::MAX bytes"));
        }
        let mut regions = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if regions.len() >= MAX_REGIONS {
            return Err(refuse("the table of regions is full; register larger ones"));
        }
        regions.push(entry);
        Ok(RegionId::new(regions.len() as u32 - 1))
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// A region, and the file behind it or what flushes it.
    pub(crate) fn entry(&self, id: RegionId) -> Option<Entry> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(id.get() as usize).cloned()
    }

    /// What makes writes into these pages visible, each once.
    pub(crate) fn flushes(&self, pages: &Pages) -> Vec<Arc<dyn Flush>> {
        let mut flushes: Vec<Arc<dyn Flush>> = Vec::new();
        for piece in &pages.pieces {
            if let Some(Entry::Device { flush: Some(flush), .. }) = self.entry(piece.region)
                && !flushes.iter().any(|known| Arc::ptr_eq(known, &flush))
            {
                flushes.push(flush);
            }
        }
        flushes
    }

    /// Checks every page against its region and makes the pages addressable.
    pub(crate) fn window(&self, pages: &Pages, what: &'static str) -> Result<AnyWindow, TransportError> {
        let regions = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let highest_base = pages.bases.iter().copied().max().unwrap_or(0);
        let mut of_host = Vec::with_capacity(pages.pieces.len());
        let mut of_device = Vec::new();
        for piece in &pages.pieces {
            let entry = regions.get(piece.region.get() as usize).ok_or_else(|| TransportError::Range {
                what: format!("{what}: there is no region {}", piece.region),
                start: piece.region.get().into(),
                end: u64::from(piece.region.get()) + 1,
                limit: regions.len() as u64,
            })?;
            let end = piece_end(piece).and_then(|end| end.checked_add(highest_base));
            if end.is_none_or(|end| end > entry.bytes()) {
                return Err(TransportError::Range {
                    what: format!("{what} in region {}", piece.region),
                    start: piece.offset.saturating_add(highest_base),
                    end: end.unwrap_or(u64::MAX),
                    limit: entry.bytes(),
                });
            }
            match entry {
                Entry::Host { region, .. } => of_host.push(*region),
                Entry::Device { region, .. } => of_device.push(*region),
            }
        }
        let list = RunList::of_pages(pages).ok_or(TransportError::Limit {
            what: "bytes of pages, or an empty piece",
            found: u64::MAX,
            limit: u64::MAX,
        })?;
        match (of_host.is_empty(), of_device.is_empty()) {
            (_, true) => Ok(AnyWindow::Host(Window::new(list, of_host))),
            (true, false) => Ok(AnyWindow::Device(Window::new(list, of_device))),
            (false, false) => {
                let problem = "and other pages of it are the host's: use one grant or write for each kind".to_owned();
                Err(TransportError::DeviceMemory { what, problem })
            }
        }
    }
}

fn piece_end(piece: &Piece) -> Option<u64> {
    let start = piece.offset.checked_add(piece.run_bytes)?;
    piece.loops.iter().try_fold(start, |end, l| {
        let steps = u64::from(l.count).checked_sub(1)?;
        end.checked_add(l.stride.checked_mul(steps)?)
    })
}
