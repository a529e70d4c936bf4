//! Memory of other devices, as a GPU's: which of it a card's driver can register.
//!
//! There are two ways. A *dma-buf* is a descriptor of the memory that its owner exports, and the driver pins nothing. With *peer memory* the
//! owner's own module (nvidia_peermem) makes a plain registration of a device's address work.

use std::io;
use std::path::Path;

use super::ffi::ProtectionDomain;

/// Where the modules are listed that teach registration the addresses of GPUs.
const MODULES: &str = "/sys/module";
const PEER_MODULES: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];

/// What a card can register of other devices' memory, or why not.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceMemory {
    /// By a dma-buf.
    pub dma_buf: Result<(), String>,
    /// By its address, with the help of a module.
    pub peer_memory: Result<(), String>,
}

impl DeviceMemory {
    pub(super) fn of(domain: &ProtectionDomain) -> Self {
        Self { dma_buf: dma_buf(domain.dma_buf_answer()), peer_memory: peer_memory(Path::new(MODULES)) }
    }
}

impl DeviceMemory {
    /// Why a dma-buf of so many bytes was not registered.
    pub(super) fn why_no_dma_buf(&self, bytes: u64, error: &io::Error) -> String {
        match &self.dma_buf {
            Ok(()) => format!(
                "its driver takes dma-bufs, but not {bytes} bytes of this one ({error}): see that it holds them, and that the two devices reach each other \
                 (one PCIe root, no IOMMU between)"
            ),
            Err(why) => format!("{why}, and {bytes} bytes were to be registered by one; {}", self.other_way()),
        }
    }

    fn other_way(&self) -> &'static str {
        match self.peer_memory {
            Ok(()) => "register it without a dma-buf: a module for that is loaded",
            Err(_) => "or load nvidia_peermem and register it without a dma-buf",
        }
    }

    /// Why so many bytes were not registered by their address.
    pub(super) fn why_no_peer_memory(&self, bytes: u64, error: &io::Error) -> String {
        let way = match (&self.peer_memory, &self.dma_buf) {
            (Err(why), Ok(())) => format!("{why}, but its driver takes dma-bufs: export one"),
            (Err(why), Err(neither)) => format!("{why}, and {neither}; stage it in host memory"),
            (Ok(()), _) => {
                "a module for it is loaded, but does not know the address, or the two devices do not reach each other"
                    .to_owned()
            }
        };
        format!("{bytes} bytes by their address ({error}): {way}")
    }

    /// By which ways it registers memory of a device, in words; else why by none.
    pub fn ways(&self) -> Result<String, String> {
        match (&self.dma_buf, &self.peer_memory) {
            (Ok(()), Ok(())) => Ok("by a dma-buf or by its address (peer memory)".to_owned()),
            (Ok(()), Err(_)) => Ok("by a dma-buf".to_owned()),
            (Err(why), Ok(())) => Ok(format!("by its address (peer memory); by a dma-buf not: {why}")),
            (Err(dma_buf), Err(peer)) => Err(format!("dma-buf: {dma_buf}; peer memory: {peer}")),
        }
    }
}

/// Reads the answer to a registration of a dma-buf that does not exist.
fn dma_buf(answer: Option<io::Error>) -> Result<(), String> {
    let Some(error) = answer else {
        return Err("libibverbs has no ibv_reg_dmabuf_mr: install rdma-core 34 or newer".to_owned());
    };
    match error.raw_os_error() {
        // It looked for the descriptor.
        Some(libc::EBADF) => Ok(()),
        Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS | libc::ENOTTY | libc::EINVAL) => {
            Err(format!("its driver registers no dma-buf ({error})"))
        }
        _ => Err(format!("its driver was asked for a dma-buf and says: {error}")),
    }
}

fn peer_memory(modules: &Path) -> Result<(), String> {
    if PEER_MODULES.iter().any(|module| modules.join(module).exists()) {
        return Ok(());
    }
    Err(format!("no module for it is loaded (modprobe {})", PEER_MODULES[0]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_looks_for_the_descriptor_takes_dma_bufs() {
        let answer = |code| dma_buf(Some(io::Error::from_raw_os_error(code)));
        assert_eq!(answer(libc::EBADF), Ok(()));
        for code in [libc::EOPNOTSUPP, libc::EINVAL] {
            assert!(answer(code).unwrap_err().contains("registers no dma-buf"));
        }
        assert!(answer(libc::EPERM).unwrap_err().contains("says"));
        assert!(dma_buf(None).unwrap_err().contains("rdma-core 34"));
    }

    #[test]
    fn who_is_refused_hears_what_the_card_said_and_which_way_is_left() {
        let (no_dma, no_peer) = (Err("no dma".to_owned()), Err("no module".to_owned()));
        let facts = |dma_buf: &Result<(), String>, peer_memory: &Result<(), String>| DeviceMemory {
            dma_buf: dma_buf.clone(),
            peer_memory: peer_memory.clone(),
        };
        let error = io::Error::from_raw_os_error(libc::EFAULT);
        for (name, dma_buf, peer_memory, by_dma_buf, by_address) in [
            ("both", &Ok(()), &Ok(()), "reach each other", "does not know the address"),
            ("dma-buf only", &Ok(()), &no_peer, "reach each other", "export one"),
            ("address only", &no_dma, &Ok(()), "register it without a dma-buf", "does not know the address"),
            ("neither", &no_dma, &no_peer, "load nvidia_peermem", "stage it in host memory"),
        ] {
            let facts = facts(dma_buf, peer_memory);
            let (dma_buf, address) = (facts.why_no_dma_buf(77, &error), facts.why_no_peer_memory(77, &error));
            assert!(dma_buf.contains(by_dma_buf) && dma_buf.contains("77 bytes"), "{name}: {dma_buf}");
            assert!(address.contains(by_address) && address.contains("77 bytes"), "{name}: {address}");
            assert_eq!(facts.ways().is_err(), name == "neither", "{name}: {:?}", facts.ways());
        }
    }

    #[test]
    fn a_module_that_is_loaded_is_found() {
        let folder = std::env::temp_dir().join(format!("kvferry-modules-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        assert!(peer_memory(&folder).unwrap_err().contains("nvidia_peermem"));
        std::fs::create_dir(folder.join("nvidia_peermem")).unwrap();
        assert_eq!(peer_memory(&folder), Ok(()));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
