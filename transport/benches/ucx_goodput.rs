//! Goodput of scattered blocks over UCX, beside `ucx_perftest`'s put over the same UCX transport in the same run.
//!
//! Ours are two nodes in one process, each with its one thread, and puts of scattered blocks in an arena, a flush and a note for
//! each 8 MiB. `ucx_perftest` is a server and a client that put one buffer again and again: once with a buffer of one block, which
//! stays in the cache, and once with one as large as our arena, which does not. The three take turns; a ratio is the median of the
//! rounds' ratios. Both sides are given the same settings, also those that the environment may change.
//!
//! `export $(integration-tests/ucx/environment.sh); cargo bench -p kvferry-transport --bench ucx_goodput -- [--rounds N] [--mib N]
//! [--arena-mib N] [--block-kib N] [--tls LIST]`
//!
//! Without libucp, or without `ucx_perftest` (`KVFERRY_UCX_PERFTEST` names it), it says so and measures nothing, or ours alone.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Extent, Pages, Piece};
use kvferry_transport::testing::{Arena, scattered};
use kvferry_transport::ucx::{LinkId, RemoteWindow, UcxConfig, UcxConfigFile, UcxEvent, UcxEvents, UcxNode};
use kvferry_transport::{GrantKey, Source, Write};

const WRITE_BYTES: usize = 8 << 20;
/// Writes under way.
const DEPTH: usize = 4;
const SEGMENTS: [(&str, &str); 2] = [("UCX_TCP_TX_SEG_SIZE", "256k"), ("UCX_TCP_RX_SEG_SIZE", "1m")];

struct Options {
    rounds: usize,
    total_bytes: usize,
    arena_bytes: usize,
    block_bytes: Option<usize>,
    tls: String,
}

fn main() {
    let options = options();
    let block_sizes = match options.block_bytes {
        Some(bytes) => vec![bytes],
        None => vec![16 << 10, 64 << 10, 512 << 10, 2 << 20],
    };
    let facts = match kvferry_transport::ucx::survey(&config()) {
        Ok(facts) => facts,
        Err(error) => return println!("nothing is measured: {error}"),
    };
    println!("UCX {} over {}, of {}", facts.version, facts.transports.join(","), facts.found.join(" "));
    let perftest = std::env::var("KVFERRY_UCX_PERFTEST").unwrap_or_else(|_| "ucx_perftest".to_owned());
    let perftest = Perftest { program: perftest, tls: options.tls.clone() };
    let is_there = perftest.is_there();
    if !is_there {
        println!("{} is not there: no ratio", perftest.program);
    }
    println!(
        "{:>9} {:>9} {:>12} {:>12} {:>12} {:>12}",
        "block", "GB/s", "perf, cold", "perf, block", "ours/cold", "ours/block"
    );
    for block_bytes in block_sizes {
        let mut ours = Ours::new(options.arena_bytes, block_bytes);
        ours.run(options.arena_bytes);
        let mut rounds: [Vec<f64>; 5] = Default::default();
        for _ in 0..options.rounds {
            let gbps = timed(options.total_bytes, || ours.run(options.total_bytes));
            rounds[0].push(gbps);
            if is_there {
                let cold = perftest.put(options.arena_bytes, options.total_bytes);
                let block = perftest.put(block_bytes, options.total_bytes);
                for (column, value) in rounds[1..].iter_mut().zip([cold, block, gbps / cold, gbps / block]) {
                    column.push(value);
                }
            }
        }
        let [gbps, cold, block, of_cold, of_block] = rounds.map(|mut column| median(&mut column));
        println!("{block_bytes:>9} {gbps:>9.2} {cold:>12.2} {block:>12.2} {of_cold:>12.2} {of_block:>12.2}");
    }
}

/// UCX's tcp is all that most machines have, and its puts are emulated.
fn config() -> UcxConfig {
    UcxConfig::try_from(UcxConfigFile { emulated_puts: true, ..UcxConfigFile::default() })
        .expect("a legal configuration")
}

fn options() -> Options {
    let mut options = Options {
        rounds: 5,
        total_bytes: 1 << 30,
        arena_bytes: 64 << 20,
        block_bytes: None,
        tls: std::env::var("UCX_TLS").unwrap_or_else(|_| "tcp".to_owned()),
    };
    let mut words = std::env::args().skip(1);
    let mut is_bench = false;
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|n| n.parse::<usize>().ok()).expect("a number follows");
        match word.as_str() {
            "--rounds" => options.rounds = number(),
            "--mib" => options.total_bytes = number() << 20,
            "--arena-mib" => options.arena_bytes = number() << 20,
            "--block-kib" => options.block_bytes = Some(number() << 10),
            "--tls" => options.tls = words.next().expect("a list follows"),
            // Cargo's own.
            "--bench" => is_bench = true,
            _ => {}
        }
    }
    if !is_bench {
        // Run by `cargo test`: once, to show that it works.
        (options.rounds, options.total_bytes) = (1, options.arena_bytes);
    }
    options
}

fn timed(bytes: usize, run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    bytes as f64 / start.elapsed().as_secs_f64() / 1e9
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

struct Side {
    node: UcxNode,
    events: UcxEvents,
    link: LinkId,
    card: Bytes,
    /// Dropped after the node.
    _memory: Arena,
}

impl Side {
    fn new(arena_bytes: usize) -> Self {
        let events = UcxEvents::new(1 << 16);
        let node = UcxNode::start(config(), events.clone()).expect("UCX starts");
        let memory = Arena::new(arena_bytes, 1);
        #[expect(unsafe_code, reason = "registering is the caller's promise")]
        // SAFETY: the node is dropped before the arena.
        unsafe { node.register(memory.memory()) }.expect("memory is registered");
        let (link, card) = node.open().expect("a link");
        Self { node, events, link, card, _memory: memory }
    }

    fn wait_ready(&self) {
        let mut events = Vec::new();
        self.events.poll(&mut events, Duration::from_secs(10));
        assert!(matches!(events[..], [UcxEvent::Ready { .. }]), "{events:?}");
    }
}

struct Ours {
    sender: Side,
    receiver: Side,
    window: Arc<RemoteWindow>,
    source: Vec<u64>,
    block_bytes: usize,
    arena_bytes: usize,
}

impl Ours {
    fn new(arena_bytes: usize, block_bytes: usize) -> Self {
        let (sender, receiver) = (Side::new(arena_bytes), Side::new(arena_bytes));
        sender.node.connect(sender.link, &receiver.card).expect("a card");
        receiver.node.connect(receiver.link, &sender.card).expect("a card");
        sender.wait_ready();
        receiver.wait_ready();
        let blocks = arena_bytes / block_bytes;
        let bases = |step| scattered(blocks, step).into_iter().map(|block| (block * block_bytes) as u64).collect();
        let window = receiver.node.window(&Self::pages(bases(7919), block_bytes)).expect("a window");
        let window = Arc::new(RemoteWindow::decode(&window).expect("a window"));
        Self { sender, receiver, window, source: bases(104_729), block_bytes, arena_bytes }
    }

    fn pages(bases: Vec<u64>, block_bytes: usize) -> Pages {
        let piece = Piece { region: RegionId::new(0), offset: 0, loops: vec![], run_bytes: block_bytes as u64 };
        Pages { bases, pieces: vec![piece] }
    }

    fn post(&self, number: usize) {
        let at = number * WRITE_BYTES % self.arena_bytes;
        let blocks = at / self.block_bytes..(at + WRITE_BYTES) / self.block_bytes;
        let write = Write {
            grant: GrantKey(0),
            sequence: 0,
            extents: vec![Extent::contiguous(at as u64, WRITE_BYTES as u64)],
            source: Source::Pages(vec![Self::pages(self.source[blocks].to_vec(), self.block_bytes)]),
            notification: Bytes::new(),
        };
        let note = Bytes::from_static(b"landed");
        self.sender.node.post(self.sender.link, number as u64, &write, &self.window, note).expect("a post");
    }

    /// Moves the bytes, and returns when the receiver heard the last note.
    fn run(&mut self, total_bytes: usize) {
        let writes = total_bytes / WRITE_BYTES;
        let (mut posted, mut ended, mut landed) = (0, 0, 0);
        let mut events = Vec::new();
        while ended < writes || landed < writes {
            while posted < writes && posted - ended < DEPTH {
                self.post(posted);
                posted += 1;
            }
            let of = if ended < writes { &self.sender } else { &self.receiver };
            of.events.poll(&mut events, Duration::from_secs(10));
            self.receiver.events.poll(&mut events, Duration::ZERO);
            for event in events.drain(..) {
                match event {
                    UcxEvent::Posted { outcome: Ok(()), .. } => ended += 1,
                    UcxEvent::Noted { .. } => landed += 1,
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}

struct Perftest {
    program: String,
    tls: String,
}

/// Ends the server, whatever happens.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Perftest {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env("UCX_TLS", &self.tls).stdin(Stdio::null()).stderr(Stdio::null());
        for (key, value) in SEGMENTS.into_iter().filter(|(key, _)| std::env::var_os(key).is_none()) {
            command.env(key, value);
        }
        command
    }

    fn is_there(&self) -> bool {
        self.command().arg("-h").stdout(Stdio::null()).status().is_ok()
    }

    /// Puts about `total_bytes` in messages of `message_bytes`; gives 10^9 bytes a second.
    fn put(&self, message_bytes: usize, total_bytes: usize) -> f64 {
        // A port that was free a moment ago.
        let port =
            std::net::TcpListener::bind("127.0.0.1:0").and_then(|port| port.local_addr()).expect("a port").port();
        let port = port.to_string();
        let server = self.command().args(["-p", &port, "-t", "ucp_put_bw"]).stdout(Stdio::null()).spawn();
        let _server = Server(server.expect("a server"));
        let messages = (total_bytes / message_bytes).max(1).to_string();
        let warm_up = (WRITE_BYTES / message_bytes).max(1).to_string();
        let size = message_bytes.to_string();
        let deadline = Instant::now() + Duration::from_secs(10);
        // The server takes some time to listen; a client that comes earlier fails at once.
        while Instant::now() < deadline {
            let client =
                ["127.0.0.1", "-p", &port, "-t", "ucp_put_bw", "-s", &size, "-n", &messages, "-w", &warm_up, "-f"];
            let output = self.command().args(client).output().expect("a client");
            if let Some(gbps) = read_gbps(&String::from_utf8_lossy(&output.stdout)) {
                return gbps;
            }
        }
        panic!("{} gave no figure", self.program);
    }
}

/// The overall bandwidth of the last line, `iterations typical average overall average overall average overall`, which counts in
/// 2^20 bytes.
fn read_gbps(printed: &str) -> Option<f64> {
    let numbers: Vec<f64> =
        printed.lines().last()?.split_ascii_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [_iterations, _typical, _average, _overall, _bandwidth, overall, ..] = numbers[..] else { return None };
    Some(overall * f64::from(1 << 20) / 1e9)
}
