//! What can be set, and its limits.

use std::time::Duration;

use serde::Deserialize;

use super::error::RdmaError;
use super::gid::GidWish;
use super::machine::{MAX_PAYLOAD_LANES, MachineConfig};

/// RDMA settings that were checked.
#[derive(Clone, Debug, Deserialize)]
#[serde(try_from = "RdmaConfigFile")]
pub struct RdmaConfig {
    /// Devices by name; empty takes each that has an active port.
    pub(crate) devices: Vec<String>,
    pub(crate) gid: GidWish,
    pub(crate) lanes_per_device: usize,
    pub(crate) ack_timeout: u8,
    pub(crate) ask: Duration,
    pub(crate) prove: Duration,
    pub(crate) machine: MachineConfig,
}

/// RDMA settings as a file has them.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RdmaConfigFile {
    /// Devices by name (`ibv_devices` lists them); empty takes each that has an active port.
    pub devices: Vec<String>,
    /// Only GIDs of this network interface.
    pub interface: Option<String>,
    /// Exactly this entry of the GID table.
    pub gid_index: Option<u32>,
    /// Queue pairs for payload on each device, towards each peer.
    pub queue_pairs_per_device: usize,
    /// Writes under way towards one peer.
    pub window: u32,
    /// The longest frame header with its table, in bytes: so much is pinned for each place of the window.
    pub head_bytes: usize,
    /// Requests in flight in one queue pair.
    pub send_depth: u32,
    /// Payload in flight in one queue pair, in bytes.
    pub lane_bytes: u64,
    /// The longest request, in bytes.
    pub request_bytes: u32,
    /// A write is spread over queue pairs in parts of at least this, in bytes.
    pub part_bytes: u64,
    /// The device repeats an unanswered request after 4.096 us times two to the power of this.
    pub ack_timeout: u8,
    /// Nothing moved for this long: the peer or the path is dead.
    pub stall_ms: u64,
    /// How long the test of new queue pairs may take, before a session goes another way.
    pub prove_ms: u64,
    /// How long a peer may take to let go of a grant that is revoked, before its queue pairs are ended.
    pub ask_ms: u64,
    /// How long a queue pair in error is waited for before it is destroyed.
    pub drain_ms: u64,
}

impl Default for RdmaConfigFile {
    fn default() -> Self {
        Self {
            devices: Vec::new(),
            interface: None,
            gid_index: None,
            // One queue pair tops out below a 400G port, two to four fill it (MORI-IO's and UCCL's published figures).
            queue_pairs_per_device: 2,
            window: 32,
            head_bytes: 8 << 10,
            send_depth: 128,
            lane_bytes: 8 << 20,
            request_bytes: 1 << 20,
            part_bytes: 256 << 10,
            // 67 ms; with six retries a dead peer is known after about half a second (some devices take four times as long).
            ack_timeout: 14,
            stall_ms: 5_000,
            // Some devices take two seconds to give a silent peer up.
            prove_ms: 3_000,
            ask_ms: 1_000,
            drain_ms: 1_000,
        }
    }
}

/// How many requests a doorbell rings for. "No gain above chains of 4" in another engine's measurements; larger ones cost nothing.
const CHAIN: usize = 16;
/// Pieces that one request gathers, if the device takes as many.
const SEGMENTS: usize = 16;
/// Orders that are taken before they can begin.
const MAX_ORDERS: usize = 256;

impl TryFrom<RdmaConfigFile> for RdmaConfig {
    type Error = RdmaError;

    fn try_from(file: RdmaConfigFile) -> Result<Self, RdmaError> {
        let within = |key, found: u64, least: u64, most: u64| {
            if (least..=most).contains(&found) {
                return Ok(());
            }
            Err(RdmaError::Setting { key, found, problem: format!("it must be {least} to {most}") })
        };
        within("queue_pairs_per_device", file.queue_pairs_per_device as u64, 1, 16)?;
        within("window", file.window.into(), 2, 1024)?;
        within("head_bytes", file.head_bytes as u64, 256, 128 << 10)?;
        within("send_depth", file.send_depth.into(), 16, 8192)?;
        within("lane_bytes", file.lane_bytes, 4 << 10, 1 << 40)?;
        within("request_bytes", file.request_bytes.into(), 4 << 10, 1 << 30)?;
        within("part_bytes", file.part_bytes, 4 << 10, 1 << 40)?;
        within("ack_timeout", file.ack_timeout.into(), 8, 20)?;
        within("stall_ms", file.stall_ms, 100, 600_000)?;
        within("prove_ms", file.prove_ms, 10, 600_000)?;
        within("ask_ms", file.ask_ms, 1, 600_000)?;
        within("drain_ms", file.drain_ms, 10, 60_000)?;
        let gid = GidWish { index: file.gid_index, interface: file.interface };
        let machine = MachineConfig {
            // Both are lowered or set when devices and their limits are known.
            payload_lanes: file.queue_pairs_per_device.min(MAX_PAYLOAD_LANES),
            segments: SEGMENTS,
            window: file.window,
            head_bytes: file.head_bytes,
            send_depth: file.send_depth,
            lane_bytes: file.lane_bytes,
            request_bytes: file.request_bytes,
            chain: CHAIN,
            part_bytes: file.part_bytes,
            max_orders: MAX_ORDERS,
            stall: Duration::from_millis(file.stall_ms),
            drain: Duration::from_millis(file.drain_ms),
        };
        let (devices, ack_timeout, lanes_per_device) = (file.devices, file.ack_timeout, file.queue_pairs_per_device);
        let (ask, prove) = (Duration::from_millis(file.ask_ms), Duration::from_millis(file.prove_ms));
        Ok(Self { devices, gid, lanes_per_device, ack_timeout, ask, prove, machine })
    }
}

impl Default for RdmaConfig {
    fn default() -> Self {
        RdmaConfigFile::default().try_into().expect("the defaults are within their limits")
    }
}

#[cfg(test)]
mod tests {
    use serde::de::value::MapDeserializer;

    use super::*;

    #[test]
    fn a_setting_out_of_its_limits_is_named_with_them() {
        for (file, key) in [
            (RdmaConfigFile { window: 1, ..Default::default() }, "window"),
            (RdmaConfigFile { head_bytes: 1 << 20, ..Default::default() }, "head_bytes"),
            (RdmaConfigFile { queue_pairs_per_device: 0, ..Default::default() }, "queue_pairs_per_device"),
            (RdmaConfigFile { ack_timeout: 31, ..Default::default() }, "ack_timeout"),
        ] {
            let error = RdmaConfig::try_from(file).unwrap_err().to_string();
            assert!(error.starts_with(key) && error.contains("it must be"), "{error}");
        }
    }

    #[test]
    fn an_unknown_key_is_refused() {
        let read = |key: &'static str| {
            let map = MapDeserializer::<_, serde::de::value::Error>::new([(key, 8u32)].into_iter());
            RdmaConfig::deserialize(map)
        };
        assert_eq!(read("window").unwrap().machine.window, 8);
        assert!(read("windows").unwrap_err().to_string().contains("windows"));
    }
}
