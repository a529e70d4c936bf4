//! Goodput of scattered blocks over TCP, beside a raw socket pair that moves the same bytes in the same run.
//!
//! Both are in one process: the transport with its own threads, the raw pair with a sender and a receiver thread per connection
//! (blocking writev of a table and 1 MiB of blocks, blocking readv straight into place, 128 KiB socket buffers unless told
//! otherwise). They take turns; the ratio is the median of the rounds' ratios, so that what else the machine does weighs on both alike.
//!
//! `cargo bench -p kvferry-transport --bench tcp_goodput -- [--rounds N] [--mib N] [--lanes N] [--frame-kib N] [--threads N] [--only 1|2]
//! [--link-gbps N] [--buffer-kib N] [--raw-buffer-kib N] [--tls 1]`

use std::time::{Duration, Instant};

use bytes::Bytes;
use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Extent, Pages, Piece};
use kvferry_protocol::wire::ClusterKey;
use kvferry_transport::testing::{Node, RawPair, peer, scattered};
use kvferry_transport::{
    Credentials, Event, GrantKey, PathKind, Source, Tcp, TcpConfig, TcpConfigFile, Transport, Write,
};

const ARENA_BYTES: usize = 128 << 20;
const WRITE_BYTES: usize = 8 << 20;
/// Writes on their way at once.
const DEPTH: usize = 4;

struct Options {
    rounds: usize,
    total_bytes: usize,
    lanes: u16,
    frame_bytes: u32,
    threads: u16,
    /// 0: both, 1: the transport alone, 2: the raw pair alone; for profilers.
    only: usize,
    link_gbps: Option<f64>,
    buffer_bytes: Option<u32>,
    raw_buffer_bytes: usize,
    /// Whether the transport's lanes are encrypted.
    tls: bool,
}

fn main() {
    let options = options();
    println!(
        "{} rounds of {} MiB, {} lanes{}, {} data threads a side, frames of {} KiB; GB/s, median (best)",
        options.rounds,
        options.total_bytes >> 20,
        options.lanes,
        if options.tls { " in TLS" } else { "" },
        options.threads,
        options.frame_bytes >> 10
    );
    latency(&options);
    for block_bytes in [16 << 10, 64 << 10, 512 << 10, 2 << 20] {
        let mut ours = Ours::new(&options, block_bytes);
        let mut raw = RawPair::new(usize::from(options.lanes), ARENA_BYTES, block_bytes, options.raw_buffer_bytes);
        let (mut ours_gbps, mut raw_gbps) = (Vec::new(), Vec::new());
        ours.run(options.total_bytes / 4);
        raw.run(options.total_bytes / 4);
        let (mut ours_cpu, mut raw_cpu) = (0.0, 0.0);
        for _ in 0..options.rounds {
            let before = cpu_seconds();
            raw_gbps.push(rate(options.total_bytes, || {
                if options.only != 1 {
                    raw.run(options.total_bytes)
                }
            }));
            let between = cpu_seconds();
            ours_gbps.push(rate(options.total_bytes, || {
                if options.only != 2 {
                    ours.run(options.total_bytes)
                }
            }));
            raw_cpu += between - before;
            ours_cpu += cpu_seconds() - between;
        }
        let gigabytes = (options.rounds * options.total_bytes) as f64 / 1e9;
        let mut ratios: Vec<f64> = ours_gbps.iter().zip(&raw_gbps).map(|(ours, raw)| ours / raw).collect();
        let ratio = median(&mut ratios);
        let (ours, raw) = (median(&mut ours_gbps), median(&mut raw_gbps));
        println!(
            "blocks of {:>4} KiB: transport {ours:.2} ({:.2})  raw {raw:.2} ({:.2})  ratio {:.2}; CPU s/GB: transport {:.3}  raw {:.3}",
            block_bytes >> 10,
            ours_gbps[ours_gbps.len() - 1],
            raw_gbps[raw_gbps.len() - 1],
            ratio,
            ours_cpu / gigabytes,
            raw_cpu / gigabytes
        );
    }
}

/// One write of 4 KiB after the other, from post to completion: there and back, and the receiver's checks.
fn latency(options: &Options) {
    let mut ours = Ours::new(options, 4 << 10);
    let mut micros: Vec<f64> = (0..3000)
        .map(|_| {
            let start = Instant::now();
            ours.write_blocks(0, 4 << 10);
            let mut events = Vec::new();
            while events.is_empty() {
                ours.sender.transport.poll(&mut events, Duration::from_secs(10));
            }
            assert!(matches!(events[0], Event::Posted { outcome: Ok(()), .. }), "{events:?}");
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    micros.sort_unstable_by(f64::total_cmp);
    let at = |part: f64| micros[(micros.len() as f64 * part) as usize];
    println!("4 KiB, post to completion: p50 {:.0} us, p99 {:.0} us", at(0.5), at(0.99));
}

fn options() -> Options {
    let mut options = Options {
        rounds: 7,
        total_bytes: 512 << 20,
        lanes: 2,
        frame_bytes: 1 << 20,
        threads: 2,
        only: 0,
        link_gbps: None,
        buffer_bytes: None,
        raw_buffer_bytes: 128 << 10,
        tls: false,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        if name == "--bench" {
            continue; // cargo says so
        }
        let value: usize = arguments.next().and_then(|value| value.parse().ok()).expect("an option and its number");
        match name.as_str() {
            "--rounds" => options.rounds = value,
            "--mib" => options.total_bytes = value << 20,
            "--lanes" => options.lanes = value as u16,
            "--threads" => options.threads = value as u16,
            "--only" => options.only = value,
            "--buffer-kib" => options.buffer_bytes = Some((value << 10) as u32),
            "--raw-buffer-kib" => options.raw_buffer_bytes = value << 10,
            "--link-gbps" => options.link_gbps = Some(value as f64),
            "--tls" => options.tls = value != 0,
            "--frame-kib" => options.frame_bytes = (value << 10) as u32,
            other => panic!(
                "{other}: give --rounds, --mib, --lanes, --threads, --frame-kib, --link-gbps, --buffer-kib, --raw-buffer-kib, --tls or --only"
            ),
        }
    }
    options
}

fn rate(bytes: usize, run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    bytes as f64 / start.elapsed().as_secs_f64() / 1e9
}

/// What this process used so far, in user and kernel; on a busy machine it says more than the clock.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("procfs");
    let after_name = stat.rsplit_once(')').expect("a name").1;
    let ticks =
        |field: usize| -> f64 { after_name.split_ascii_whitespace().nth(field).unwrap().parse().expect("ticks") };
    (ticks(11) + ticks(12)) / 100.0
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

fn credentials(tls: bool) -> Credentials {
    #[cfg(feature = "tls")]
    if tls {
        use kvferry_transport::testing::certificates;
        return certificates::tls("a", &["authority"], kvferry_transport::tls::TlsNames::Any).into();
    }
    assert!(!tls, "this build has no TLS");
    ClusterKey::new(&[1; 32]).expect("a legal key").into()
}

struct Ours {
    sender: Node,
    receiver: Node,
    grant: GrantKey,
    source: Vec<u64>,
    block_bytes: usize,
    sequence: u32,
}

impl Ours {
    fn new(options: &Options, block_bytes: usize) -> Self {
        let make = |peer, greeting| -> Box<dyn Transport> {
            let file = TcpConfigFile {
                paths: vec![PathKind::Tcp],
                lanes_same_host: options.lanes,
                data_threads: options.threads,
                frame_bytes: options.frame_bytes,
                link_gbps: options.link_gbps,
                socket_buffer_bytes: options.buffer_bytes,
                ..TcpConfigFile::default()
            };
            let config = TcpConfig::try_from(file).expect("a legal configuration");
            Box::new(Tcp::bind(config, credentials(options.tls), peer, greeting).expect("an endpoint"))
        };
        let mut sender = Node::new(&make, peer("sender", 1), ARENA_BYTES);
        let mut receiver = Node::new(&make, peer("receiver", 1), ARENA_BYTES);
        sender.meet(&mut receiver);
        let blocks = ARENA_BYTES / block_bytes;
        let bases = |step| scattered(blocks, step).into_iter().map(|block| (block * block_bytes) as u64).collect();
        let window = Self::pages(bases(7919), block_bytes);
        let grant = receiver.transport.grant(&sender.peer, window).expect("a grant");
        Self { sender, receiver, grant, source: bases(104_729), block_bytes, sequence: 0 }
    }

    fn pages(bases: Vec<u64>, block_bytes: usize) -> Pages {
        let piece = Piece { region: RegionId::new(0), offset: 0, loops: vec![], run_bytes: block_bytes as u64 };
        Pages { bases, pieces: vec![piece] }
    }

    fn write_blocks(&mut self, at: usize, bytes: usize) {
        let blocks = at / self.block_bytes..(at + bytes) / self.block_bytes;
        let write = Write {
            grant: self.grant,
            sequence: self.sequence,
            extents: vec![Extent::contiguous(at as u64, bytes as u64)],
            source: Source::Pages(vec![Self::pages(self.source[blocks].to_vec(), self.block_bytes)]),
            notification: Bytes::new(),
        };
        self.sequence += 1;
        self.sender.transport.post(&self.receiver.peer, write).expect("a post");
    }

    fn run(&mut self, total_bytes: usize) {
        let writes = total_bytes / WRITE_BYTES;
        let (mut posted, mut ended, mut landed) = (0, 0, 0);
        let mut events = Vec::new();
        while ended < writes || landed < writes {
            while posted < writes && posted - ended < DEPTH {
                self.write_blocks(posted * WRITE_BYTES % ARENA_BYTES, WRITE_BYTES);
                posted += 1;
            }
            self.sender.transport.poll(&mut events, Duration::from_secs(10));
            if posted == writes {
                self.receiver.transport.poll(&mut events, Duration::ZERO);
            }
            for event in events.drain(..) {
                match event {
                    Event::Posted { outcome: Ok(()), .. } => ended += 1,
                    Event::Landed { .. } => landed += 1,
                    other => panic!("{other:?}"),
                }
            }
        }
    }
}
