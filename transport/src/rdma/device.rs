//! Finding devices and ports, and opening those that can be used.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rdma_sys::{IBV_PORT_ACTIVE, Verbs, ibv_device_attr, ibv_port_attr};

use super::config::RdmaConfig;
use super::device_memory::DeviceMemory;
use super::error::RdmaError;
use super::ffi::{CompletionChannel, Context, DeviceList, MemoryRegion, ProtectionDomain};
use super::gid::{GidChoice, choose_gid, read_gids};
use super::memory::{Registrar, Registration, Stretch};

const LINK_LAYER_INFINIBAND: u8 = 1;

/// One usable port, opened: a rail.
pub(crate) struct Rail {
    pub(crate) context: Arc<Context>,
    pub(crate) domain: Arc<ProtectionDomain>,
    pub(crate) channel: Arc<CompletionChannel>,
    pub(crate) facts: PortFacts,
}

impl Registrar for Rail {
    fn register(&self, stretch: &Stretch<'_>) -> Result<Registration, RdmaError> {
        let PortFacts { device, device_memory, .. } = &self.facts;
        let refused = |problem| RdmaError::DeviceMemory { device: device.clone(), problem };
        let registered = match *stretch {
            Stretch::Host(run) => MemoryRegion::new(&self.domain, run, true).map_err(|error| {
                failed(device, &format!("reg_mr of {} bytes at {:#x}", run.bytes(), run.start().addr()), error)
            }),
            Stretch::DmaBuf { run, file, offset } => MemoryRegion::of_dma_buf(&self.domain, run, file, offset)
                .map_err(|error| refused(device_memory.why_no_dma_buf(run.bytes, &error))),
            Stretch::PeerMemory(run) => MemoryRegion::of_peer_memory(&self.domain, run)
                .map_err(|error| refused(device_memory.why_no_peer_memory(run.bytes, &error))),
        };
        registered.map(Registration::from)
    }
}

/// What is known of a port.
#[derive(Clone, Debug)]
pub struct PortFacts {
    /// The device's name.
    pub device: String,
    /// The port's number, from 1.
    pub port: u8,
    /// Whether it is InfiniBand; else RoCE.
    pub is_infiniband: bool,
    /// Its address in an InfiniBand subnet.
    pub lid: u16,
    /// The longest packet, as the number that the verbs library has for it: 1 is 256 bytes, 5 is 4096.
    pub mtu: u32,
    /// The address that peers are told, and why.
    pub gid: GidChoice,
    /// The NUMA node that the device is near; `None` if the kernel does not say.
    pub numa_node: Option<u32>,
    /// What it can register of other devices' memory.
    pub device_memory: DeviceMemory,
    /// The longest registration, in bytes.
    pub max_registration_bytes: u64,
    /// The most requests in a queue pair.
    pub max_queue_pair_requests: u32,
    /// The most pieces that a request gathers.
    pub max_segments: u32,
    /// The most completions in a queue.
    pub max_completions: u32,
    /// The longest request, in bytes.
    pub max_request_bytes: u32,
}

/// All ports of this host: what they offer, or why they cannot be used.
#[derive(Clone, Debug, Default)]
pub struct RdmaReport {
    /// Ports that can be used.
    pub usable: Vec<PortFacts>,
    /// The others, each with its reason.
    pub unusable: Vec<String>,
}

/// Says what RDMA this host offers, as the settings would choose.
///
/// # Errors
/// [`RdmaError`]: the library or devices are missing.
pub fn probe(config: &RdmaConfig) -> Result<RdmaReport, RdmaError> {
    let (rails, unusable) = scan(config)?;
    Ok(RdmaReport { usable: rails.into_iter().map(|rail| rail.facts).collect(), unusable })
}

/// Opens all ports that can be used.
pub(crate) fn open_rails(config: &RdmaConfig) -> Result<Vec<Rail>, RdmaError> {
    let (rails, tried) = scan(config)?;
    for rail in &rails {
        let PortFacts { device, port, gid, .. } = &rail.facts;
        let (address, reason) = (gid.entry.gid, gid.reason);
        tracing::info!(device, port, index = gid.entry.index, %address, reason, rejected = ?gid.rejected, "RDMA port opened");
    }
    if rails.is_empty() { Err(RdmaError::NoPort { tried }) } else { Ok(rails) }
}

fn scan(config: &RdmaConfig) -> Result<(Vec<Rail>, Vec<String>), RdmaError> {
    let verbs = Verbs::open().map_err(|source| RdmaError::Library { source: Arc::new(source) })?;
    let list = DeviceList::new(&Arc::new(verbs)).map_err(|error| RdmaError::NoDevice {
        problem: format!("the kernel's RDMA interface does not answer ({error})"),
    })?;
    let names = list.names();
    if let Some(missing) = config.devices.iter().find(|wanted| !names.contains(wanted)) {
        let problem = format!("the configuration asks for {missing}, and there are: [{}]", names.join(", "));
        return Err(RdmaError::NoDevice { problem });
    }
    if names.is_empty() {
        return Err(RdmaError::NoDevice { problem: "the kernel lists none".to_owned() });
    }
    let (mut rails, mut unusable) = (Vec::new(), Vec::new());
    for (at, name) in names.iter().enumerate() {
        if !config.devices.is_empty() && !config.devices.contains(name) {
            unusable.push(format!("{name}: the configuration does not name it"));
            continue;
        }
        match list.open(at) {
            Ok(context) => scan_ports(&Arc::new(context), config, &mut rails, &mut unusable)?,
            Err(error) => {
                unusable.push(format!("{name}: it cannot be opened ({error}); see the rights on /dev/infiniband"))
            }
        }
    }
    Ok((rails, unusable))
}

fn scan_ports(
    context: &Arc<Context>,
    config: &RdmaConfig,
    rails: &mut Vec<Rail>,
    unusable: &mut Vec<String>,
) -> Result<(), RdmaError> {
    let attributes = context.attributes().map_err(|error| failed(&context.name, "query_device", error))?;
    let domain = ProtectionDomain::new(context).map_err(|error| failed(&context.name, "alloc_pd", error))?;
    let device_memory = DeviceMemory::of(&domain);
    for port in 1..=attributes.phys_port_cnt {
        let found = context.port(port).map_err(|error| failed(&context.name, &format!("query_port {port}"), error))?;
        if found.state != IBV_PORT_ACTIVE {
            let state = state_word(found.state);
            unusable.push(format!("{} port {port}: it is {state}; bring its link and interface up", context.name));
            continue;
        }
        match facts(context, &attributes, &device_memory, port, &found, config) {
            Ok(facts) => rails.push(open(context, facts)?),
            Err(error) => unusable.push(error.to_string()),
        }
    }
    Ok(())
}

fn facts(
    context: &Context,
    device: &ibv_device_attr,
    device_memory: &DeviceMemory,
    port: u8,
    found: &ibv_port_attr,
    config: &RdmaConfig,
) -> Result<PortFacts, RdmaError> {
    let folder = PathBuf::from("/sys/class/infiniband").join(&context.name);
    let port_folder = folder.join("ports").join(port.to_string());
    let layer = std::fs::read_to_string(port_folder.join("link_layer")).unwrap_or_default();
    let is_infiniband = found.link_layer == LINK_LAYER_INFINIBAND || layer.trim() == "InfiniBand";
    let entries = read_gids(&port_folder);
    let gid = choose_gid(&entries, is_infiniband, &config.gid).map_err(|rejected| RdmaError::NoGid {
        device: context.name.clone(),
        port,
        rejected,
    })?;
    let numa = std::fs::read_to_string(folder.join("device/numa_node")).ok();
    let positive = |limit: i32| u32::try_from(limit).unwrap_or(0);
    Ok(PortFacts {
        device: context.name.clone(),
        port,
        is_infiniband,
        lid: found.lid,
        mtu: found.active_mtu,
        gid,
        numa_node: numa.and_then(|node| node.trim().parse().ok()),
        device_memory: device_memory.clone(),
        max_registration_bytes: device.max_mr_size,
        max_queue_pair_requests: positive(device.max_qp_wr),
        max_segments: positive(device.max_sge),
        max_completions: positive(device.max_cqe),
        max_request_bytes: if found.max_msg_sz == 0 { 1 << 30 } else { found.max_msg_sz },
    })
}

fn open(context: &Arc<Context>, facts: PortFacts) -> Result<Rail, RdmaError> {
    let domain = ProtectionDomain::new(context).map_err(|error| failed(&context.name, "alloc_pd", error))?;
    let channel =
        CompletionChannel::new(context).map_err(|error| failed(&context.name, "create_comp_channel", error))?;
    Ok(Rail { context: Arc::clone(context), domain: Arc::new(domain), channel: Arc::new(channel), facts })
}

/// A call's failure with what to look at.
pub(crate) fn failed(device: &str, call: &str, source: io::Error) -> RdmaError {
    let mend = match source.raw_os_error() {
        Some(libc::ENOMEM) => "raise the limit of locked memory (ulimit -l), or the device is out of such objects",
        Some(libc::EINVAL) => "the device does not take these numbers: see its limits in `kvferry doctor`",
        Some(libc::EPERM | libc::EACCES) => "the process lacks the right to: see /dev/infiniband and its capabilities",
        Some(libc::ENODEV | libc::EIO) => "the device is gone or has failed: see the kernel's log",
        _ => "see the kernel's log",
    };
    RdmaError::Call { device: device.to_owned(), call: call.to_owned(), mend, source: Arc::new(source) }
}

fn state_word(state: u32) -> &'static str {
    match state {
        1 => "down",
        2 => "initialising",
        3 => "armed",
        5 => "deferred",
        _ => "in an unknown state",
    }
}
