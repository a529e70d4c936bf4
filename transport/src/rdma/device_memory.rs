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
    fn a_module_that_is_loaded_is_found() {
        let folder = std::env::temp_dir().join(format!("kvferry-modules-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        assert!(peer_memory(&folder).unwrap_err().contains("nvidia_peermem"));
        std::fs::create_dir(folder.join("nvidia_peermem")).unwrap();
        assert_eq!(peer_memory(&folder), Ok(()));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
