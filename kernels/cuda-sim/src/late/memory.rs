//! What a device's memory and pinned host memory hold on to.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use kvferry_kernels::HostRegion;

use super::Shared;
use crate::memory::SimMemory;

/// Device memory. It goes once nothing that is queued can use it, as the driver's does.
pub(super) struct Allocated {
    shared: Arc<Shared>,
    memory: ManuallyDrop<SimMemory>,
}

impl Allocated {
    pub(super) fn new(shared: Arc<Shared>, memory: SimMemory) -> Self {
        Self { shared, memory: ManuallyDrop::new(memory) }
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        self.shared.lock().run_all(&self.shared.device);
        // SAFETY: dropped once, here, and not used after.
        #[expect(unsafe_code, reason = "the memory goes after what uses it")]
        unsafe {
            ManuallyDrop::drop(&mut self.memory);
        }
    }
}

/// Host memory that is locked in place.
pub(super) struct Pinned {
    shared: Arc<Shared>,
    region: Arc<HostRegion>,
}

impl Pinned {
    pub(super) fn new(shared: Arc<Shared>, region: Arc<HostRegion>) -> Self {
        let pinned = Self { shared, region };
        let range = pinned.range();
        let mut state = pinned.shared.lock();
        state.history.forget(range.clone());
        state.pinned.push(range);
        drop(state);
        pinned
    }

    fn range(&self) -> std::ops::Range<u64> {
        let start = self.region.as_ptr().as_ptr() as u64;
        start..start + self.region.len() as u64
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let range = self.range();
        let mut state = self.shared.lock();
        state.run_all(&self.shared.device);
        if let Some(at) = state.pinned.iter().position(|other| *other == range) {
            state.pinned.swap_remove(at);
        }
    }
}
