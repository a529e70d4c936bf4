//! Many peers of one node: what each costs while it is idle, and how fairly busy ones share.
//!
//! The node is this process; all peers are endpoints of one other process, each with its own threads, as engines of other hosts would
//! have them. Idle peers come first, so that what they cost is measured alone: memory, descriptors, CPU, and what they add to a small
//! write to one more peer (`probe`). Busy ones write into a window each, over and over.

mod peers;
mod probe;
mod report;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_protocol::PeerId;
use kvferry_transport::{Event, GrantKey, Transport};

use super::arena::Arena;
use super::case::Case;
use super::endpoint::{self, Setup, address_text};
use super::words::Word;
use super::{content, credentials};
use crate::args::BenchArgs;
use crate::error::CliError;
use crate::figures::rounded;
use peers::Crowd;
pub(crate) use peers::be;
use probe::Probe;
pub(crate) use report::CrowdReport;
use report::{Busy, Idle};

/// How long the peers may take to come up.
const PATIENCE: Duration = Duration::from_secs(120);
/// Bytes of a write: small beside what a peer moves meanwhile, so that counting whole writes is fair.
const WRITE_BYTES: u64 = 1 << 20;
/// Writes under way of each busy peer.
const POSTS: u32 = 4;
/// Busy peers warm up for so long.
const WARM_UP: Duration = Duration::from_secs(1);

/// A case for each peer: the blocks of one write are its whole window.
fn case(options: &BenchArgs) -> Result<Case, CliError> {
    let block = options.block.first().map_or(64 << 10, |size| size.0);
    let batch = options.batch.unwrap_or_else(|| u32::try_from(WRITE_BYTES / block.max(1)).unwrap_or(1).max(1));
    Case::new(block, Some(batch), Some(batch), POSTS, options.memory.0)
}

/// Starts the peers and watches them.
pub(crate) fn run(options: &BenchArgs) -> Result<CrowdReport, CliError> {
    let case = case(options)?;
    let (busy, idle) = (options.peers, options.idle_peers);
    let busy = if busy > 1 { busy } else { 0 };
    if busy + idle > 4000 {
        return Err(CliError::argument("--peers and --idle-peers", busy + idle, "write at most 4000 together"));
    }
    raise_file_limit();
    let (key, text) = credentials::drawn()?;
    let credentials = credentials::of_key(key, options.tls)?;
    let setup = Setup { peers: busy + idle + 2, ..Setup::new(Some(options.transport), options.lanes, credentials) };
    let transport: Arc<dyn Transport> = endpoint::open(&setup, "bench-node")?.into();
    let mut crowd = Crowd::start(options, &address_text(&transport.local_address()), &text)?;
    let shareable = setup.is_shareable();
    let node = Node { transport, shareable, case, seconds: options.seconds.max(1) };
    let idle = (idle > 0).then(|| node.watch_idle(&mut crowd, idle)).transpose()?;
    let busy = (busy > 0).then(|| node.watch_busy(&mut crowd, busy)).transpose()?;
    let Case { block_bytes, batch, .. } = node.case;
    Ok(CrowdReport {
        transport: options.transport,
        block_bytes,
        batch,
        lanes: options.lanes,
        seconds: node.seconds,
        idle,
        busy,
    })
}

struct Node {
    transport: Arc<dyn Transport>,
    shareable: bool,
    case: Case,
    seconds: u64,
}

/// A busy peer, as the node sees it.
struct Writer {
    place: u32,
    grant: GrantKey,
    bytes: u64,
}

impl Node {
    fn watch_idle(&self, crowd: &mut Crowd, peers: u32) -> Result<Idle, CliError> {
        let mut probe = Probe::meet(self, crowd)?;
        let write_alone_us = probe.write_many(self)?;
        let (memory, threads) = (status("VmRSS:") << 10, status("Threads:"));
        let descriptors = descriptors();
        let start = Instant::now();
        crowd.say("idle")?;
        self.wait_up(peers, |_| Ok(()))?;
        let connect_all_ms = rounded(start.elapsed().as_secs_f64() * 1e3);
        // What coming up left is cleared before the idle time begins.
        self.watch(Duration::from_millis(500), |_| Ok(()))?;
        let (cpu, start) = (cpu_seconds(), Instant::now());
        self.watch(Duration::from_secs(self.seconds), |_| Ok(()))?;
        let (cpu, seconds) = (cpu_seconds() - cpu, start.elapsed().as_secs_f64());
        let grown = (status("VmRSS:") << 10).saturating_sub(memory);
        let opened = self::descriptors().saturating_sub(descriptors);
        let write_beside_us = probe.write_many(self)?;
        Ok(Idle {
            peers,
            memory_bytes_per_peer: rounded(grown as f64 / f64::from(peers)),
            cpu_us_per_peer_second: rounded(cpu / seconds / f64::from(peers) * 1e6),
            descriptors_per_peer: rounded(opened as f64 / f64::from(peers)),
            threads: [threads, status("Threads:")],
            connect_all_ms,
            write_bytes: probe::WRITE_BYTES,
            write_alone_us,
            write_beside_us,
        })
    }

    fn watch_busy(&self, crowd: &mut Crowd, peers: u32) -> Result<Busy, CliError> {
        let arena = Arc::new(Arena::new(&*self.transport, self.case.bytes() * u64::from(peers), self.shareable)?);
        content::poison(&mut arena.own());
        let outcome = self.watch_writers(crowd, peers, &arena);
        // Before the memory goes, however it ended; nothing is measured after this.
        self.transport.shutdown();
        outcome
    }

    fn watch_writers(&self, crowd: &mut Crowd, peers: u32, arena: &Arc<Arena>) -> Result<Busy, CliError> {
        let lent = arena.lend();
        let mut writers: BTreeMap<PeerId, Writer> = BTreeMap::new();
        crowd.say("busy")?;
        self.wait_up(peers, |peer| {
            let place = place_of(&peer)?;
            let grant = self.transport.grant(&peer, self.case.pages(lent.id(), &self.blocks_of(place)));
            let grant = grant.map_err(CliError::transport("no grant"))?;
            writers.insert(peer, Writer { place, grant, bytes: 0 });
            Ok(())
        })?;
        // All begin together: nobody has the node alone.
        for (peer, writer) in &writers {
            let go = Word::Opened { grant: writer.grant }.encode()?;
            self.transport.send(peer, go).map_err(CliError::transport("a word was not taken"))?;
        }
        self.watch(WARM_UP, |event| count(&mut writers, event))?;
        writers.values_mut().for_each(|writer| writer.bytes = 0);
        let (cpu, start) = (cpu_seconds(), Instant::now());
        self.watch(Duration::from_secs(self.seconds), |event| count(&mut writers, event))?;
        let (cpu, seconds) = (cpu_seconds() - cpu, start.elapsed().as_secs_f64());
        let threads = status("Threads:");
        for writer in writers.values() {
            self.transport.revoke(writer.grant);
        }
        drop(lent);
        let places: Vec<u32> = writers.values().flat_map(|writer| self.blocks_of(writer.place)).collect();
        let wrong = content::wrong_blocks(&arena.own(), self.case.block_bytes, &places, &places);
        let moved: Vec<u64> = writers.values().map(|writer| writer.bytes).collect();
        Ok(report::busy(&moved, seconds, cpu, threads, wrong == 0))
    }

    /// The blocks of a peer's window.
    fn blocks_of(&self, place: u32) -> Vec<u32> {
        (place * self.case.batch..(place + 1) * self.case.batch).collect()
    }

    /// Waits for so many sessions.
    fn wait_up(&self, peers: u32, mut up: impl FnMut(PeerId) -> Result<(), CliError>) -> Result<(), CliError> {
        let (start, mut count) = (Instant::now(), 0);
        while count < peers {
            if start.elapsed() > PATIENCE {
                return Err(CliError::Silent { what: "bring all peers up", seconds: PATIENCE.as_secs() });
            }
            self.watch(Duration::from_millis(20), |event| match event {
                Event::Up { peer, .. } => {
                    count += 1;
                    up(peer)
                }
                _ => Ok(()),
            })?;
        }
        Ok(())
    }

    /// Takes events for so long; a session that ends is an error.
    fn watch(&self, span: Duration, mut take: impl FnMut(Event) -> Result<(), CliError>) -> Result<(), CliError> {
        let start = Instant::now();
        let mut events = Vec::new();
        while let Some(left) = span.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            self.transport.poll(&mut events, left);
            for event in events.drain(..) {
                match event {
                    Event::Down { peer: Some(peer), reason, .. } => {
                        return Err(CliError::Gone { peer: peer.to_string(), source: reason });
                    }
                    event => take(event)?,
                }
            }
        }
        Ok(())
    }
}

/// Adds what landed to its peer.
fn count(writers: &mut BTreeMap<PeerId, Writer>, event: Event) -> Result<(), CliError> {
    if let Event::Landed { peer, bytes, .. } = event
        && let Some(writer) = writers.get_mut(&peer)
    {
        writer.bytes += bytes;
    }
    Ok(())
}

/// The number in a peer's name.
fn place_of(peer: &PeerId) -> Result<u32, CliError> {
    let number = peer.engine.as_str().strip_prefix("busy-").and_then(|number| number.parse().ok());
    number.ok_or_else(|| CliError::Word { found: format!("the name {peer}") })
}

/// A number of `/proc/self/status`; 0 where there is none.
fn status(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    line.and_then(|line| line.split_ascii_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Open files of this process; 0 where that cannot be seen.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// What this process used so far, in user and kernel.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// A peer takes several sockets: as many files as this user may open.
fn raise_file_limit() {
    let resource = rustix::process::Resource::Nofile;
    let limit = rustix::process::getrlimit(resource);
    let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
    // What does not fit then is refused with a word of its own.
    let _ = rustix::process::setrlimit(resource, raised);
}
