//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvferry::config::{Names, TlsFiles};
use kvferry_transport::PathKind;
use serde::{Deserialize, Serialize};

use crate::size::Size;

/// KV cache between prefill and decode: what measures it, and what explains it.
#[derive(Debug, Parser)]
#[command(name = "kvferry", version, about, long_about = None)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Measures a transport between two processes or two machines, beside the limit of its path in the same run.
    ///
    /// Blocks move in scattered order, through the transport's public interface, between this process and one that it starts; or between
    /// two machines, with --listen on one and --connect on the other.
    #[command(after_help = EXIT_CODES)]
    Bench(BenchArgs),
    /// Says what this machine offers, and with an address what the pair of them offers.
    #[command(after_help = EXIT_CODES)]
    Doctor(DoctorArgs),
    /// Says how large a model's KV blocks are, how many fit a device, and how many requests these hold.
    #[command(after_help = EXIT_CODES)]
    Plan(PlanArgs),
    /// Opens a library, in a process that it may take down with it.
    #[command(name = "try-library", hide = true)]
    TryLibrary {
        /// Its file name.
        name: String,
    },
    /// Starts UCX and prints what it offers as JSON, in a process that it may take down with it.
    #[command(name = "survey-ucx", hide = true)]
    SurveyUcx,
    /// Asks RDMA cards what they register, in a process that a driver may take down.
    #[command(name = "survey-rdma", hide = true)]
    SurveyRdma,
    /// Reads known bytes of another process.
    #[command(name = "try-memory", hide = true)]
    TryMemory {
        /// The process.
        pid: i32,
        /// Where in its memory.
        address: usize,
    },
}

const EXIT_CODES: &str = "Exit codes: 0 all is well; 1 something was found wrong (a byte, a digest, what doctor calls BROKEN); \
                          2 an argument that cannot be; 3 a transport that is not here; 4 the other side or the system failed.";

#[derive(Clone, Debug, Args)]
pub(crate) struct PlanArgs {
    /// The model's config.json (Hugging Face), or the folder that has it.
    pub(crate) config: PathBuf,
    /// Memory of one device, such as 80GiB.
    #[arg(long)]
    pub(crate) memory: Size,
    /// Tensor-parallel ranks, each with such a device.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) tp: u16,
    /// Tokens in a block.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) block_tokens: u16,
    /// How much of the memory the engine may use.
    #[arg(long, default_value_t = 0.9)]
    pub(crate) share: f64,
    /// Bytes of one rank's weights [default: the .safetensors files beside the configuration, over the ranks].
    #[arg(long)]
    pub(crate) weights: Option<Size>,
    /// The most that a step takes beside weights and KV; an engine measures it.
    #[arg(long, default_value = "2GiB")]
    pub(crate) activations: Size,
    /// Kept for captured graphs.
    #[arg(long, default_value = "1GiB")]
    pub(crate) graphs: Size,
    /// Bytes of an element of the cache: 1 for FP8 [default: as the model computes].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=4))]
    pub(crate) kv_bytes: Option<u32>,
    /// The most tokens of a request that are computed at a time: layers with a window keep so much more.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) step_tokens: u32,
    /// Lengths of requests, in tokens, of which is said how many fit; several with commas.
    #[arg(long, value_delimiter = ',', default_values_t = [2048, 8192, 32_768, 131_072])]
    pub(crate) tokens: Vec<u64>,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct BenchArgs {
    /// What carries the blocks.
    #[arg(long, value_enum, default_value_t = Kind::Tcp)]
    pub(crate) transport: Kind,
    /// Bytes of a block, such as 16KiB; several with commas.
    #[arg(long, value_delimiter = ',', default_values = ["16KiB", "64KiB", "512KiB", "2MiB"])]
    pub(crate) block: Vec<Size>,
    /// Blocks of a pass [default: what --memory holds].
    #[arg(long)]
    pub(crate) blocks: Option<u32>,
    /// Memory for blocks on each side that sends or receives.
    #[arg(long, default_value = "256MiB")]
    pub(crate) memory: Size,
    /// Blocks of a write: what one completion and one digest cover [default: what comes to 4 MiB].
    #[arg(long)]
    pub(crate) batch: Option<u32>,
    /// Writes under way at once.
    #[arg(long, default_value_t = 8)]
    pub(crate) posts: u32,
    /// Data lanes.
    #[arg(long, default_value_t = 2)]
    pub(crate) lanes: u16,
    /// Who sends: this side (push), the other (pull), or both at once.
    #[arg(long, value_enum, default_value_t = Direction::Push)]
    pub(crate) direction: Direction,
    /// Copy nothing: the receiver reads the blocks where they lie in the sender's memory. One block is then as long as it takes to hand it
    /// over, and to digest it there with --digest on.
    #[arg(long, conflicts_with_all = ["peers", "idle_peers"])]
    pub(crate) in_place: bool,
    /// Busy peers of one node; with more than one, rates by peer are measured instead.
    #[arg(long, default_value_t = 1)]
    pub(crate) peers: u32,
    /// Connected peers that say nothing, beside the busy ones; their memory and CPU are measured.
    #[arg(long, default_value_t = 0)]
    pub(crate) idle_peers: u32,
    /// How long busy and idle peers are watched, in seconds.
    #[arg(long, default_value_t = 5)]
    pub(crate) seconds: u64,
    /// Measured passes of each size; one more warms up.
    #[arg(long, default_value_t = 7)]
    pub(crate) rounds: u32,
    /// Measured requests of each kind and size; a fifth of them, but 50 at least, where a request is 16 MiB or more.
    #[arg(long, default_value_t = 1000)]
    pub(crate) requests: u32,
    /// Whether every byte is digested on both sides, and compared, as the connector does it.
    #[arg(long, value_enum, default_value_t = DigestBy::On)]
    pub(crate) digest: DigestBy,
    /// One round and few requests over little memory: whether it works, in a few seconds; no figures to believe.
    #[arg(long, conflicts_with_all = ["rounds", "requests", "memory"])]
    pub(crate) quick: bool,
    /// Compare all bytes with what was sent, after each pass and outside of its time.
    #[arg(long)]
    pub(crate) verify: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a plot of rate over block size to this file.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Be the other side of a --connect elsewhere, until interrupted.
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["connect", "peers", "idle_peers", "json", "svg"])]
    pub(crate) listen: Option<String>,
    /// Measure to the --listen of another machine.
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["peers", "idle_peers"])]
    pub(crate) connect: Option<String>,
    /// Encrypt the lanes, with a certificate that every build of this command has: it is the key that keeps strangers out.
    #[arg(long)]
    pub(crate) tls: bool,
    /// File with the key of both sides; or KVFERRY_PSK in the environment. Needed with --listen and --connect only.
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,
    /// Spoil one byte, to see that it is found: before it is sent (only --verify can see that), or after it landed (the digest).
    #[arg(long, value_enum, hide = true)]
    pub(crate) spoil: Option<Spoil>,
    /// End when standard input does: the other side was started by a bench.
    #[arg(long, hide = true)]
    pub(crate) until_input_ends: bool,
    /// Be so many busy and idle peers of the node at --connect.
    #[arg(long, hide = true, value_names = ["BUSY", "IDLE"], num_args = 2)]
    pub(crate) crowd: Option<Vec<u32>>,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct DoctorArgs {
    /// The `kvferry doctor --listen` of another machine (IP:PORT); without it only this machine is looked at.
    #[arg(conflicts_with = "listen")]
    pub(crate) address: Option<SocketAddr>,
    /// Answer doctors of other machines at this IP:PORT, until interrupted.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) listen: Option<SocketAddr>,
    /// File with the key of both sides; or KVFERRY_PSK in the environment.
    #[arg(long, value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) tls: Option<DoctorTls>,
    /// What this side calls itself.
    #[arg(long, default_value = "doctor")]
    pub(crate) engine_id: String,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The certificates of an engine, as its configuration names them.
#[derive(Clone, Debug, Args)]
pub(crate) struct DoctorTls {
    /// File with this side's certificate chain (PEM): the pair then speaks mutual TLS, with the key or without one.
    #[arg(long = "tls-certificate-file", value_name = "FILE", required = false, requires_all = ["tls_key_file", "tls_authority_file"])]
    pub(crate) tls_certificate_file: PathBuf,
    /// File with its private key (PEM).
    #[arg(long = "tls-key-file", value_name = "FILE", required = false, requires = "tls_certificate_file")]
    pub(crate) tls_key_file: PathBuf,
    /// File with the cluster's authorities (PEM).
    #[arg(long = "tls-authority-file", value_name = "FILE", required = false, requires = "tls_certificate_file")]
    pub(crate) tls_authority_file: PathBuf,
    /// What a peer's certificate must say: nothing, or the name that the peer calls itself.
    #[arg(long = "tls-names", value_name = "any|engine", default_value = "any", requires = "tls_certificate_file", value_parser = parse_names)]
    pub(crate) tls_names: Names,
}

impl DoctorTls {
    pub(crate) fn files(&self) -> TlsFiles {
        TlsFiles {
            certificate: self.tls_certificate_file.clone(),
            key: self.tls_key_file.clone(),
            authority: self.tls_authority_file.clone(),
            names: self.tls_names,
        }
    }
}

fn parse_names(word: &str) -> Result<Names, String> {
    Names::from_word(word).ok_or_else(|| "write any or engine".to_owned())
}

/// Which transport.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    Tcp,
    Uds,
    Shm,
    Cma,
    Ucx,
    Rdma,
}

impl Kind {
    /// The path of the endpoint that carries it.
    pub(crate) const fn path(self) -> PathKind {
        match self {
            Self::Tcp => PathKind::Tcp,
            Self::Uds => PathKind::UnixSocket,
            Self::Shm => PathKind::SharedMemory,
            Self::Cma => PathKind::ProcessMemory,
            Self::Ucx => PathKind::Ucx,
            Self::Rdma => PathKind::Rdma,
        }
    }

    /// What a path is called here; nothing for one that joins no processes, or that this command does not know.
    pub(crate) fn of(path: PathKind) -> Option<Self> {
        let all = [Self::Tcp, Self::Uds, Self::Shm, Self::Cma, Self::Ucx, Self::Rdma];
        all.into_iter().find(|kind| kind.path() == path)
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Uds => "uds",
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Ucx => "ucx",
            Self::Rdma => "rdma",
        }
    }
}

/// Who sends, as the measuring side sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Direction {
    Push,
    Pull,
    Both,
}

impl Direction {
    /// As the other side sees it.
    pub(crate) const fn turned(self) -> Self {
        match self {
            Self::Push => Self::Pull,
            Self::Pull => Self::Push,
            Self::Both => Self::Both,
        }
    }

    pub(crate) const fn sends(self) -> bool {
        matches!(self, Self::Push | Self::Both)
    }

    pub(crate) const fn receives(self) -> bool {
        matches!(self, Self::Pull | Self::Both)
    }

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Push => "push",
            Self::Pull => "pull",
            Self::Both => "both",
        }
    }
}

/// Who digests.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum DigestBy {
    /// The threads that carry the bytes, where there are such; else threads of their own.
    On,
    /// Threads of their own.
    Movers,
    /// Nobody.
    Off,
}

/// Which byte to spoil.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Spoil {
    /// One of the source, before its digest.
    Source,
    /// One of the target, after it landed and before its digest.
    Target,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_come_with_commas_and_defaults_are_the_four_of_the_tables() {
        let bench = |line: &str| match Cli::parse_from(line.split(' ')).command {
            Command::Bench(bench) => bench,
            other => panic!("{other:?}"),
        };
        assert_eq!(bench("kvferry bench").block.len(), 4);
        assert_eq!(bench("kvferry bench --block 4KiB,1MiB").block, [Size(4 << 10), Size(1 << 20)]);
    }
}
