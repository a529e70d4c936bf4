//! The queue pairs of one peer on real devices.
//!
//! A request's number travels as the verbs' `wr_id`, with its lane and direction above it.

use std::io;
use std::sync::Arc;

use rdma_sys::{
    IBV_ACCESS_REMOTE_WRITE, IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT,
    IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_QPS_ERR, IBV_QPS_INIT,
    IBV_QPS_RTR, IBV_QPS_RTS, IBV_SEND_SIGNALED, IBV_WC_RECV, IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_WITH_IMM,
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, ibv_send_wr, ibv_sge, ibv_wc,
};

use super::device::{Rail, failed};
use super::error::RdmaError;
use super::ffi::{
    CompletionQueue, Completions, Context, QueuePair, QueuePairSize, Slots, immediate, send_request, set_gid,
    write_request,
};
use super::machine::{Machine, MachineConfig, PREFIX_BYTES};
use super::memory::{PeerMemory, RegionKeys};
use super::proof::LANE_PATTERN_BYTES;
use super::rails::{Adapter, RailsParameters};
use super::work::{Chain, Completion, Direction, Done, Fault, Key, Lanes, NotPosted, Posting, Request};
use crate::core::random;

/// Where one queue pair is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LaneAddress {
    /// Which of its side's rails it is on.
    pub(crate) rail: u8,
    pub(crate) number: u32,
    /// The first packet's number.
    pub(crate) first_packet: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) lid: u16,
    pub(crate) mtu: u32,
}

/// Receiver not ready: the device tries again after 0.64 ms, as often as follows; 7 would be for ever.
const MIN_RNR_TIMER: u8 = 12;
const RNR_RETRIES: u8 = 6;
/// Not 7: soft-RoCE takes that as for ever, too.
const RETRIES: u8 = 6;
const HOP_LIMIT: u8 = 64;
/// Completions of one call.
const POLL_BATCH: usize = 32;

const RECEIVE_BIT: u64 = 1 << 63;
const LANE_SHIFT: u32 = 56;
const NUMBER_MASK: u64 = (1 << LANE_SHIFT) - 1;

pub(crate) struct Hardware {
    /// Empty once it is closed; dropped before the buffers that it uses.
    pairs: Vec<Pair>,
    queues: Vec<Arc<CompletionQueue>>,
    send_slots: Slots,
    receive_slots: Slots,
    receive_count: u64,
    /// The test pattern of this side, and where the peer's comes.
    pattern: Slots,
    pattern_target: Slots,
    pub(super) peer: PeerMemory,
    peer_rails: usize,
    /// Copies of the rails' keys, so that a request needs no lock.
    local_keys: Vec<Vec<u32>>,
    room: Completions,
    contexts: Vec<Arc<Context>>,
    /// Last: it holds the registrations.
    adapter: Arc<Adapter>,
}

struct Pair {
    rail: usize,
    peer_rail: usize,
    first_packet: u32,
    pair: QueuePair,
}

impl Hardware {
    pub(super) fn new(adapter: &Arc<Adapter>, number: u64, config: &MachineConfig) -> Result<Self, RdmaError> {
        let rails = &adapter.rails;
        let rail_of = |lane: usize| if lane == 0 { 0 } else { (lane - 1) % rails.len() };
        let lanes = config.payload_lanes + 1;
        let mut queues = Vec::new();
        for (index, rail) in rails.iter().enumerate() {
            let on_rail = (0..lanes).filter(|lane| rail_of(*lane) == index);
            let entries =
                on_rail.map(|lane| (config.send_depth + Machine::receives(config, lane)) as usize).sum::<usize>();
            let most = rail.facts.max_completions as usize;
            if entries > most {
                let problem = format!("{} takes {most} completions a queue; lower it", rail.facts.device);
                return Err(RdmaError::Setting { key: "send_depth", found: config.send_depth.into(), problem });
            }
            let queue = CompletionQueue::new(&rail.channel, entries.max(1), number);
            let call = format!("create_cq of {entries}");
            queues.push(Arc::new(queue.map_err(|error| failed(&rail.facts.device, &call, error))?));
        }
        let mut pairs = Vec::new();
        for lane in 0..lanes {
            let rail = rail_of(lane);
            pairs.push(make_pair(&rails[rail], rail, &queues[rail], lane, config)?);
        }
        let slot_bytes = PREFIX_BYTES + config.head_bytes;
        let receive_count = Machine::receives(config, 0);
        let failed = |error| failed(&rails[0].facts.device, "reg_mr of word and pattern buffers", error);
        let slots = |count: u32| {
            let domains = rails.iter().take(1).map(|rail| &rail.domain);
            Slots::new(domains, count as usize, slot_bytes, false).map_err(failed)
        };
        let pattern = |is_target: bool| {
            let bytes = config.payload_lanes * LANE_PATTERN_BYTES;
            Slots::new(rails.iter().map(|rail| &rail.domain), 1, bytes, is_target).map_err(failed)
        };
        Ok(Self {
            send_slots: slots(Machine::send_slots(config))?,
            receive_slots: slots(receive_count)?,
            receive_count: receive_count.into(),
            pattern: pattern(false)?,
            pattern_target: pattern(true)?,
            pairs,
            queues,
            peer: PeerMemory::default(),
            peer_rails: 0,
            local_keys: rails.iter().map(|_| Vec::new()).collect(),
            room: Completions::new(POLL_BATCH),
            contexts: rails.iter().map(|rail| Arc::clone(&rail.context)).collect(),
            adapter: Arc::clone(adapter),
        })
    }

    pub(super) fn rails(&self) -> usize {
        self.adapter.rails.len()
    }

    pub(super) fn peer_rails(&self) -> usize {
        self.peer_rails
    }

    pub(super) fn addresses(&self) -> Vec<LaneAddress> {
        let address = |pair: &Pair| {
            let facts = &self.adapter.rails[pair.rail].facts;
            LaneAddress {
                rail: pair.rail as u8,
                number: pair.pair.number,
                first_packet: pair.first_packet,
                gid: facts.gid.entry.gid.octets(),
                lid: facts.lid,
                mtu: facts.mtu,
            }
        };
        self.pairs.iter().map(address).collect()
    }

    /// What the peer must know to write its test pattern.
    pub(super) fn pattern_keys(&self) -> RegionKeys {
        let bytes = (self.pairs.len().saturating_sub(1) * LANE_PATTERN_BYTES) as u64;
        let keys = self.pattern_target.regions().iter().map(|region| region.remote_key).collect();
        RegionKeys {
            address: self.pattern_target.address(),
            bytes,
            piece_bytes: bytes.max(1),
            is_device: false,
            pieces: vec![keys],
        }
    }

    /// Lays out the own test pattern; gives its address.
    pub(super) fn lay_pattern(&mut self, pattern: &[u8]) -> u64 {
        self.pattern.fill(0, &[pattern]);
        self.pattern.address()
    }

    /// What came as the peer's test pattern.
    pub(super) fn came_as_pattern(&self) -> Vec<u8> {
        self.pattern_target.copy(0, usize::MAX)
    }

    /// Ready to receive. Receives are posted between this and [`ready_to_send`](Self::ready_to_send).
    pub(super) fn connect(&mut self, peer: &RailsParameters) -> Result<(), RdmaError> {
        self.peer_rails = peer.rails.into();
        for (pair, to) in self.pairs.iter_mut().zip(&peer.lanes) {
            pair.peer_rail = to.rail.into();
            let facts = &self.adapter.rails[pair.rail].facts;
            let mask = IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER;
            let made = pair.pair.modify(mask, |attributes| {
                (attributes.qp_state, attributes.path_mtu) = (IBV_QPS_RTR, facts.mtu.min(to.mtu));
                (attributes.dest_qp_num, attributes.rq_psn) = (to.number, to.first_packet);
                (attributes.max_dest_rd_atomic, attributes.min_rnr_timer) = (1, MIN_RNR_TIMER);
                attributes.ah_attr.port_num = facts.port;
                if facts.is_infiniband {
                    attributes.ah_attr.dlid = to.lid;
                } else {
                    attributes.ah_attr.is_global = 1;
                    // A table has at most 256 entries.
                    attributes.ah_attr.grh.sgid_index = facts.gid.entry.index as u8;
                    attributes.ah_attr.grh.hop_limit = HOP_LIMIT;
                    set_gid(attributes, to.gid);
                }
            });
            let call = || {
                let gid = std::net::Ipv6Addr::from(to.gid);
                let GidWords { index, own } = words(facts);
                format!("modify_qp to RTR, from GID {index} {own} to {gid} queue pair {}", to.number)
            };
            made.map_err(|error| failed(&facts.device, &call(), error))?;
        }
        Ok(())
    }

    pub(super) fn ready_to_send(&mut self) -> Result<(), RdmaError> {
        let ack_timeout = self.adapter.config.ack_timeout;
        for pair in &self.pairs {
            let mask = IBV_QP_STATE
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_SQ_PSN
                | IBV_QP_MAX_QP_RD_ATOMIC;
            let made = pair.pair.modify(mask, |attributes| {
                (attributes.qp_state, attributes.timeout) = (IBV_QPS_RTS, ack_timeout);
                (attributes.retry_cnt, attributes.rnr_retry) = (RETRIES, RNR_RETRIES);
                (attributes.sq_psn, attributes.max_rd_atomic) = (pair.first_packet, 1);
            });
            let device = &self.adapter.rails[pair.rail].facts.device;
            made.map_err(|error| failed(device, "modify_qp to RTS", error))?;
        }
        Ok(())
    }

    pub(super) fn arm(&self) -> io::Result<()> {
        self.queues.iter().try_for_each(|queue| queue.arm())
    }

    /// Appends at most a batch of completions for each rail.
    pub(super) fn poll(&mut self, completions: &mut Vec<Completion>) -> io::Result<()> {
        for (rail, queue) in self.queues.iter().enumerate() {
            for found in queue.poll(&mut self.room)? {
                let lane = ((found.wr_id & !RECEIVE_BIT) >> LANE_SHIFT) as usize;
                let number = found.wr_id & NUMBER_MASK;
                let is_receive = found.wr_id & RECEIVE_BIT != 0;
                let direction = if is_receive { Direction::Receive } else { Direction::Send };
                let outcome = match fault(found, &self.contexts[rail]) {
                    Some(fault) => Err(fault),
                    None if is_receive => received(found, &self.receive_slots, (number % self.receive_count) as usize),
                    None => Ok(Done::Sent),
                };
                completions.push(Completion { lane, direction, number, outcome });
            }
        }
        Ok(())
    }

    fn request(&self, lane: usize, posting: &Posting) -> (ibv_send_wr, usize) {
        let pair = &self.pairs[lane];
        let id = posting.number | (lane as u64) << LANE_SHIFT;
        let flags = if posting.is_signalled { IBV_SEND_SIGNALED } else { 0 };
        match &posting.request {
            Request::Write { remote, remote_key, segments, tag } => {
                let opcode = if tag.is_some() { IBV_WR_RDMA_WRITE_WITH_IMM } else { IBV_WR_RDMA_WRITE };
                // Key 0 is none that a device gives for ranges like these: the peer's device would refuse it.
                let key = self.peer.remote_key(*remote_key, pair.peer_rail).unwrap_or(0);
                let request = send_request(id, opcode, flags, tag.unwrap_or(0));
                (write_request(request, *remote, key), segments.len())
            }
            Request::Word { .. } => (send_request(id, IBV_WR_SEND, flags, 0), 1),
            Request::Credit { count } => (send_request(id, IBV_WR_SEND_WITH_IMM, flags, *count), 0),
        }
    }
}

impl Lanes for Hardware {
    fn stage(&mut self, slot: usize, prefix: &[u8], head: &[u8]) {
        self.send_slots.fill(slot, &[prefix, head]);
    }

    fn post(&mut self, lane: usize, chain: &Chain) -> Result<(), NotPosted> {
        if self.pairs.is_empty() {
            return Ok(());
        }
        let rail = self.pairs[lane].rail;
        self.adapter.memory.copy_local_keys(rail, &mut self.local_keys[rail]);
        let requests: Vec<_> = chain.postings.iter().map(|posting| self.request(lane, posting)).collect();
        let keys = &self.local_keys[rail];
        let gathered = chain.segments.iter().map(|segment| ibv_sge {
            addr: segment.address,
            length: segment.bytes,
            lkey: match segment.key {
                Key::PATTERN => self.pattern.regions().get(rail).map_or(0, |region| region.local_key),
                key => keys.get(key.0 as usize).copied().unwrap_or(0),
            },
        });
        let words = chain.postings.iter().filter_map(|posting| match posting.request {
            Request::Word { slot, bytes } => Some(self.send_slots.buffer(slot, bytes)),
            _ => None,
        });
        // A chain has words or writes, never both.
        let segments: Vec<_> = gathered.chain(words).collect();
        let posted = self.pairs[lane].pair.send(requests.into_iter(), segments.into_iter());
        posted.map_err(|(posted, error)| NotPosted { posted, fault: call_fault("post_send", &error) })
    }

    fn receive(&mut self, lane: usize, from: u64, count: usize) -> Result<(), NotPosted> {
        let (slots, slot_count) = (&self.receive_slots, self.receive_count);
        let Some(pair) = self.pairs.get_mut(lane) else { return Ok(()) };
        let buffers = (from..from + count as u64).map(|number| {
            // Payload lanes bring tags only, which take no bytes.
            let buffer = (lane == 0).then(|| slots.buffer((number % slot_count) as usize, usize::MAX));
            (number | (lane as u64) << LANE_SHIFT | RECEIVE_BIT, buffer)
        });
        let posted = pair.pair.receive(buffers);
        posted.map_err(|(posted, error)| NotPosted { posted, fault: call_fault("post_recv", &error) })
    }

    fn fail(&mut self, lane: usize) {
        let Some(pair) = self.pairs.get(lane) else { return };
        if let Err(error) = pair.pair.modify(IBV_QP_STATE, |attributes| attributes.qp_state = IBV_QPS_ERR) {
            // Destroying it ends it as well.
            tracing::warn!(lane, %error, "a queue pair could not be put into error");
        }
    }

    fn close(&mut self) {
        self.pairs.clear();
        self.queues.clear();
    }
}

fn make_pair(
    rail: &Rail,
    index: usize,
    queue: &Arc<CompletionQueue>,
    lane: usize,
    config: &MachineConfig,
) -> Result<Pair, RdmaError> {
    let facts = &rail.facts;
    let size = QueuePairSize {
        sends: config.send_depth,
        receives: Machine::receives(config, lane),
        send_segments: if lane == 0 { 1 } else { config.segments as u32 },
        receive_segments: 1,
    };
    let pair = QueuePair::new(&rail.domain, queue, size);
    let call = || format!("create_qp with {size:?}");
    let pair = pair.map_err(|error| failed(&facts.device, &call(), error))?;
    let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    let made = pair.modify(mask, |attributes| {
        (attributes.qp_state, attributes.port_num) = (IBV_QPS_INIT, facts.port);
        // Peers write payload by its lanes only.
        attributes.qp_access_flags = if lane == 0 { 0 } else { IBV_ACCESS_REMOTE_WRITE };
    });
    made.map_err(|error| failed(&facts.device, "modify_qp to INIT", error))?;
    let first_packet = u32::from_le_bytes(random()) & 0x00FF_FFFF;
    Ok(Pair { rail: index, peer_rail: 0, first_packet, pair })
}

struct GidWords {
    index: u32,
    own: std::net::Ipv6Addr,
}

fn words(facts: &super::device::PortFacts) -> GidWords {
    GidWords { index: facts.gid.entry.index, own: facts.gid.entry.gid }
}

/// What came through a receive; `slot` is its buffer.
fn received(found: &ibv_wc, slots: &Slots, slot: usize) -> Result<Done, Fault> {
    let has_immediate = found.wc_flags & IBV_WC_WITH_IMM != 0;
    match found.opcode {
        IBV_WC_RECV_RDMA_WITH_IMM => Ok(Done::Tag(immediate(found))),
        IBV_WC_RECV if has_immediate => Ok(Done::Credit(immediate(found))),
        IBV_WC_RECV => Ok(Done::Word(slots.copy(slot, found.byte_len as usize).into())),
        _ => Err(Fault::Protocol("an operation that is not part of it")),
    }
}

fn call_fault(call: &'static str, error: &io::Error) -> Fault {
    Fault::Call { call, text: error.to_string() }
}

/// What a completion's status means; `None` is success.
fn fault(found: &ibv_wc, context: &Context) -> Option<Fault> {
    Some(match found.status {
        rdma_sys::IBV_WC_SUCCESS => return None,
        rdma_sys::IBV_WC_WR_FLUSH_ERR => Fault::Flushed,
        rdma_sys::IBV_WC_RNR_RETRY_EXC_ERR => Fault::ReceiverNotReady,
        rdma_sys::IBV_WC_RETRY_EXC_ERR => Fault::Unreachable,
        rdma_sys::IBV_WC_REM_ACCESS_ERR | rdma_sys::IBV_WC_REM_INV_REQ_ERR => Fault::RemoteAccess,
        rdma_sys::IBV_WC_LOC_PROT_ERR => Fault::LocalAccess,
        status => Fault::Device { status, text: context.status_text(status) },
    })
}
