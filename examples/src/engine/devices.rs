//! Where an engine keeps its KV and computes attention: on the host, or on a device behind kvferry's seam.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use kvferry_kernels::device::Device;

/// A place for KV and attention.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum DeviceKind {
    /// Host memory and the CPU kernels.
    #[default]
    Cpu,
    /// A simulated device: the CUDA kernels, executed on the CPU; all that is queued runs late, in a random order.
    CpuSim,
    /// A CUDA device, by its number.
    Cuda(u16),
}

/// Why a device cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceOpenError {
    /// The binary was built without what it takes.
    #[error("--device {device} needs a build with it: add --features {feature} to cargo's command")]
    NotBuilt {
        /// Which device was asked for.
        device: DeviceKind,
        /// The cargo feature.
        feature: &'static str,
    },
    /// The driver says no.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] kvferry_kernels::cuda::CudaError),
}

impl DeviceKind {
    /// Opens it; nothing for the host.
    ///
    /// # Errors
    /// [`DeviceOpenError`].
    pub fn open(self) -> Result<Option<Arc<dyn Device>>, DeviceOpenError> {
        match self {
            Self::Cpu => Ok(None),
            Self::CpuSim => self.simulated().map(Some),
            Self::Cuda(ordinal) => self.cuda(ordinal).map(Some),
        }
    }

    #[cfg(feature = "cpu-sim")]
    #[expect(
        clippy::unused_self,
        clippy::unnecessary_wraps,
        reason = "without the feature it is an error that names the device"
    )]
    fn simulated(self) -> Result<Arc<dyn Device>, DeviceOpenError> {
        // Which of the legal orders things run in must not matter, so each start has another one.
        let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::process::id());
        tracing::info!(seed, "KV is on a simulated device");
        Ok(Arc::new(kvferry_cuda_sim::LateDevice::new(seed)))
    }

    #[cfg(not(feature = "cpu-sim"))]
    const fn simulated(self) -> Result<Arc<dyn Device>, DeviceOpenError> {
        Err(DeviceOpenError::NotBuilt { device: self, feature: "cpu-sim" })
    }

    #[cfg(feature = "cuda")]
    #[expect(clippy::unused_self, reason = "without the feature it is an error that names the device")]
    fn cuda(self, ordinal: u16) -> Result<Arc<dyn Device>, DeviceOpenError> {
        let device = kvferry_kernels::cuda::CudaDevice::open(ordinal.into())?;
        Ok(Arc::new(kvferry_kernels::device::CudaGpu::new(device)))
    }

    #[cfg(not(feature = "cuda"))]
    const fn cuda(self, _ordinal: u16) -> Result<Arc<dyn Device>, DeviceOpenError> {
        Err(DeviceOpenError::NotBuilt { device: self, feature: "cuda" })
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::CpuSim => f.write_str("cpu-sim"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceKind {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let ordinal = |rest: &str| match rest.strip_prefix(':') {
            Some(number) => number.parse().ok(),
            None => rest.is_empty().then_some(0),
        };
        match name {
            "cpu" => Ok(Self::Cpu),
            "cpu-sim" => Ok(Self::CpuSim),
            _ => {
                let cuda = name.strip_prefix("cuda").and_then(ordinal).map(Self::Cuda);
                cuda.ok_or("write cpu, cpu-sim, cuda, or cuda:N for CUDA device N")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_shown_as_it_is_read() {
        for device in [DeviceKind::Cpu, DeviceKind::CpuSim, DeviceKind::Cuda(0), DeviceKind::Cuda(7)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("cuda".parse(), Ok(DeviceKind::Cuda(0)));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda0", "cpu-simulated"] {
            assert!(wrong.parse::<DeviceKind>().unwrap_err().contains("cuda:N"), "{wrong}");
        }
    }
}
