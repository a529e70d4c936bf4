//! Memory that stands for a device's: cards reach it, and a processor that touches it where it is registered dies.

use std::os::fd::AsFd;

use crate::api::{Memory, MemoryKind};
use crate::device_memory::DeviceAccess;
use crate::share::Mapping;

use super::arena::Arena;

/// An [`Arena`] that is mapped a second time, for a transport to register.
pub struct DeviceArena {
    /// Where the test looks at it.
    pub view: Arena,
    registered: Mapping,
}

impl DeviceArena {
    /// `bytes` bytes, all `value`.
    ///
    /// # Panics
    /// If the system has no memory, or `bytes` is 0.
    #[must_use]
    pub fn new(bytes: usize, value: u8) -> Self {
        let view = Arena::new(bytes, value);
        let registered = Mapping::new(view.file().as_fd(), 0, bytes as u64, true).expect("the system maps it twice");
        Self { view, registered }
    }

    /// What to register, by its address.
    #[must_use]
    pub fn memory(&self, access: DeviceAccess) -> Memory {
        let (address, bytes) = (self.registered.start(), self.view.len());
        Memory { address, bytes, kind: MemoryKind::Device(access), file: None }
    }

    /// Takes the processors' access away. What a card has pinned before it goes on to read and write.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn forbid(&self) {
        self.registered.forbid().expect("the system changes how it is mapped");
    }
}
