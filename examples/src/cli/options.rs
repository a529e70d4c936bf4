//! Command-line options, checked where they are parsed.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Parser, ValueEnum};
use kvferry::config::{self, ConfigError, LoadFailurePolicy, RawConfig, Role, TransferOrder};
use kvferry::pool::PrefixKind;
use kvferry::trace::{TraceError, Tracer};
use kvferry_kernels::KvDtype;
use kvferry_protocol::layout::LayoutOrder;

use crate::engine::{DeviceKind, Publish};
use crate::model::Model;
use crate::node::NodeConfig;

/// Which side of a transfer speaks first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Order {
    /// Decode grants and asks; prefill computes and fills the grant.
    DecodeFirst,
    /// Prefill computes and offers; decode grants when it hears of it.
    PrefillFirst,
}

/// How KV blocks of a node on the same host are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum SameHost {
    /// They are copied once.
    Copy,
    /// They are read where they lie.
    InPlace,
}

impl From<SameHost> for config::SameHost {
    fn from(same_host: SameHost) -> Self {
        match same_host {
            SameHost::Copy => Self::Copy,
            SameHost::InPlace => Self::InPlace,
        }
    }
}

/// How bytes travel between processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum TransportKind {
    /// Striped TCP connections.
    Tcp,
}

/// Whether something is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Switch {
    /// It is.
    On,
    /// It is not.
    Off,
}

/// What every engine needs: a model and a cache.
#[derive(Args, Clone, Debug)]
pub struct EngineOptions {
    /// A GGUF file of a Llama, or `embedded` for the small built-in model
    #[arg(long, value_name = "PATH|embedded", default_value = Model::EMBEDDED)]
    pub model: PathBuf,
    /// Element type of the KV cache: f32, f16 or bf16
    #[arg(long, value_name = "DTYPE", default_value = "f16")]
    pub kv_dtype: KvDtype,
    /// Order of the KV cache's axes, outermost first
    #[arg(long, value_name = "ORDER", default_value = "BLPNHC")]
    pub layout: LayoutOrder,
    /// Tokens in one KV block
    #[arg(long, value_name = "TOKENS", default_value = "16", value_parser = tokens_per_block)]
    pub block: u32,
    /// KV blocks in the cache
    #[arg(long, value_name = "COUNT", default_value = "1024", value_parser = count)]
    pub blocks: NonZeroU32,
    /// The most prompt tokens that are computed in one step
    #[arg(long, value_name = "TOKENS", default_value = "128", value_parser = count)]
    pub chunk: NonZeroU32,
    /// The most requests that are computed at the same time
    #[arg(long, value_name = "COUNT", default_value = "16", value_parser = count)]
    pub max_running: NonZeroU32,
    /// Tensor-parallel ranks: each holds the KV of some heads and has a connector of its own. Must divide the model's KV heads, or
    /// be a multiple of them
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub tp: u16,
    /// Where KV lies and attention is computed: on the CPU, by the CUDA kernels on a device that is simulated on the CPU (feature
    /// cpu-sim), or on a CUDA device (feature cuda)
    #[arg(long, value_name = "cpu|cpu-sim|cuda[:N]", default_value = "cpu")]
    pub device: DeviceKind,
    /// How prompts find what earlier ones computed: by the hash of blocks, by their tokens in a radix tree, or not at all
    #[arg(long, value_name = "hash|radix|off", default_value = "hash")]
    pub prefix_cache: PrefixKind,
}

impl EngineOptions {
    /// The shape of the engine.
    #[must_use]
    pub fn node(&self) -> NodeConfig {
        NodeConfig {
            order: self.layout,
            dtype: self.kv_dtype,
            blocks: self.blocks.get(),
            tokens_per_block: self.block,
            tp_size: self.tp,
            device: self.device,
            chunk_tokens: self.chunk.get() as usize,
            max_running: self.max_running.get() as usize,
            on_load_failure: LoadFailurePolicy::Recompute,
            prefix: self.prefix_cache,
            // As the connector's configuration says, if there is one.
            in_place: false,
        }
    }
}

/// How two nodes reach each other.
#[derive(Args, Clone, Debug)]
pub struct LinkOptions {
    /// How KV blocks travel
    #[arg(long, value_enum)]
    pub transport: Option<TransportKind>,
    /// Limits what each side sends to so many gigabits a second, over TCP as a network would (unless `paths` is configured)
    #[arg(long, value_name = "GBPS", value_parser = gbps)]
    pub link_gbps: Option<f64>,
    /// Which side of a transfer speaks first; the same on both sides
    #[arg(long, value_enum)]
    pub order: Option<Order>,
    /// How decode takes KV blocks on one host: by a copy, or by reading them where prefill has them; the same on both sides
    #[arg(long, value_enum)]
    pub same_host: Option<SameHost>,
}

impl From<Order> for TransferOrder {
    fn from(order: Order) -> Self {
        match order {
            Order::DecodeFirst => Self::DecodeFirst,
            Order::PrefillFirst => Self::PrefillFirst,
        }
    }
}

impl LinkOptions {
    /// The first of these options that was given.
    #[must_use]
    pub fn given(&self) -> Option<&'static str> {
        let given = [
            ("--transport", self.transport.is_some()),
            ("--link-gbps", self.link_gbps.is_some()),
            ("--order", self.order.is_some()),
            ("--same-host", self.same_host.is_some()),
        ];
        given.into_iter().find_map(|(option, given)| given.then_some(option))
    }

    /// kvferry's configuration for a node: an optional file, then the environment (`KVFERRY_PSK`, the cluster's key), then
    /// these options.
    ///
    /// # Errors
    /// [`ConfigError`] if the file or the environment is wrong, or gives a role that is not this node's.
    pub fn connector(
        &self,
        file: Option<&Path>,
        role: Role,
        listen: Option<SocketAddr>,
    ) -> Result<RawConfig, ConfigError> {
        let mut raw = file.map_or_else(|| Ok(RawConfig::default()), RawConfig::from_file)?;
        raw.overlay_env(std::env::vars_os())?;
        // A name of its own for each node: two of one name would take each other's place at their peers.
        let chance = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), std::process::id());
        raw.engine_id.get_or_insert_with(|| format!("{role}-{:08x}", chance as u32));
        let written = raw.role.replace(role.to_string());
        if let Some(found) = written.filter(|found| *found != role.to_string() && found != "both") {
            return Err(ConfigError::Value {
                key: "role".into(),
                found: format!("{found:?}"),
                fix: format!("this is the {role} node; write {role} or both, or leave it out"),
            });
        }
        if let Some(TransportKind::Tcp) = self.transport {
            raw.transport = Some(kvferry::config::TransportKind::Tcp.to_string());
        }
        if let Some(order) = self.order {
            raw.order = Some(TransferOrder::from(order).to_string());
        }
        if let Some(same_host) = self.same_host {
            raw.same_host = Some(config::SameHost::from(same_host).to_string());
        }
        if let Some(listen) = listen {
            raw.listen = Some(listen.to_string());
        }
        raw.link_gbps = self.link_gbps.or(raw.link_gbps);
        if raw.link_gbps.is_some() && raw.paths.is_none() {
            // A link that is limited stands for a network: nothing is to go past it through the host's memory.
            raw.paths = Some(vec!["tcp".to_owned()]);
        }
        Ok(raw)
    }
}

/// What is recorded.
#[derive(Args, Clone, Debug)]
pub struct TraceOptions {
    /// Write a timeline of every hand-over there at the end; Perfetto and chrome://tracing open it
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

impl TraceOptions {
    /// Records if a file was named.
    #[must_use]
    pub fn tracer(&self) -> Tracer {
        self.trace.as_ref().map_or_else(Tracer::off, |_| Tracer::keeping(Tracer::DEFAULT_SPANS))
    }

    /// Writes the file, if one was named.
    ///
    /// # Errors
    /// [`TraceError`].
    pub fn write(&self, tracer: &Tracer, process: &str) -> Result<(), TraceError> {
        self.trace.as_ref().map_or(Ok(()), |path| tracer.write(path, process))
    }
}

/// Who hears what a cache holds.
#[derive(Args, Clone, Debug)]
pub struct EventOptions {
    /// Publish KV events there over ZeroMQ, in vLLM's words, for routers. They tell all prompts, to whoever reaches the address
    #[cfg(feature = "zmq")]
    #[arg(long, value_name = "IP:PORT", value_parser = address)]
    pub kv_events: Option<SocketAddr>,
}

impl EventOptions {
    /// Starts a publisher, if it is wanted.
    ///
    /// # Errors
    /// [`EventsError`](kvferry::events::EventsError).
    #[cfg(feature = "zmq")]
    pub fn publish(&self) -> anyhow::Result<Option<Publish>> {
        use kvferry::events::{EventPublisher, EventsConfig};
        let Some(listen) = self.kv_events else { return Ok(None) };
        let publisher = EventPublisher::start(EventsConfig { listen, ..EventsConfig::default() })?;
        Ok(Some(Box::new(move |batch| publisher.publish(batch))))
    }

    /// Nobody: this build has no publisher (feature `zmq`).
    ///
    /// # Errors
    /// None.
    #[cfg(not(feature = "zmq"))]
    pub fn publish(&self) -> anyhow::Result<Option<Publish>> {
        Ok(None)
    }
}

/// Prefills in one process, decodes in another, and compares with a single process.
#[derive(Parser, Clone, Debug)]
#[command(name = "pair", version)]
pub struct PairOptions {
    /// A GGUF file of a Llama, or `embedded` for the small built-in model
    #[arg(long, value_name = "PATH|embedded", default_value = Model::EMBEDDED)]
    pub model: PathBuf,
    /// A file with one prompt a line; \n, \t and \\ are escapes. Without it a few prompts are built in
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Tokens to generate for each prompt
    #[arg(long, value_name = "COUNT", default_value = "32", value_parser = count)]
    pub max_tokens: NonZeroU32,
    /// Prompts that are under way at the same time
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = count)]
    pub concurrency: NonZeroU32,
    /// Element type of the KV cache: f32, f16 or bf16
    #[arg(long, value_name = "DTYPE", default_value = "f16")]
    pub kv_dtype: KvDtype,
    /// Where KV lies and attention is computed, in all three engines: on the CPU, by the CUDA kernels on a device that is simulated on
    /// the CPU (feature cpu-sim), or on a CUDA device (feature cuda)
    #[arg(long, value_name = "cpu|cpu-sim|cuda[:N]", default_value = "cpu")]
    pub device: DeviceKind,
    /// Order of the axes of prefill's KV cache, outermost first
    #[arg(long, value_name = "ORDER", default_value = "BLPNHC")]
    pub prefill_layout: LayoutOrder,
    /// Order of the axes of decode's KV cache, outermost first
    #[arg(long, value_name = "ORDER", default_value = "BLPNHC")]
    pub decode_layout: LayoutOrder,
    /// Tokens in one KV block of prefill
    #[arg(long, value_name = "TOKENS", default_value = "16", value_parser = tokens_per_block)]
    pub prefill_block: u32,
    /// Tokens in one KV block of decode
    #[arg(long, value_name = "TOKENS", default_value = "16", value_parser = tokens_per_block)]
    pub decode_block: u32,
    /// The most prompt tokens that are computed in one step
    #[arg(long, value_name = "TOKENS", default_value = "128", value_parser = count)]
    pub chunk: NonZeroU32,
    /// Whether prefill keeps blocks in host memory, and decode sends it those of its answers
    #[arg(long, value_enum, default_value = "off")]
    pub write_back: Switch,
    /// Turns of a conversation for each prompt: its answer and a short follow-up are the next prompt's end
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = count)]
    pub turns: NonZeroU32,
    /// What every prompt begins with
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub system: String,
    /// Conversations that each one becomes after its first answer, each with another follow-up
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=3))]
    pub branches: u16,
    /// How prompts find what earlier ones computed, on both nodes: by the hash of blocks, by their tokens in a radix tree, or not at all
    #[arg(long, value_name = "hash|radix|off", default_value = "hash")]
    pub prefix_cache: PrefixKind,
    /// KV blocks of each prefill node's cache; without it there is room for all
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub prefill_blocks: Option<NonZeroU32>,
    /// KV blocks of each decode node's cache; without it there is room for all
    #[arg(long, value_name = "COUNT", value_parser = count)]
    pub decode_blocks: Option<NonZeroU32>,
    /// Tensor-parallel ranks of each prefill node
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub prefill_tp: u16,
    /// Tensor-parallel ranks of each decode node
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub decode_tp: u16,
    /// Prefill nodes, which take prompts in turn
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=16))]
    pub prefill_nodes: u16,
    /// Decode nodes, to which prompts go in turn
    #[arg(long, value_name = "COUNT", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=16))]
    pub decode_nodes: u16,
    /// How the nodes reach each other.
    #[command(flatten)]
    pub link: LinkOptions,
    /// What is recorded.
    #[command(flatten)]
    pub trace: TraceOptions,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// An address to listen on.
///
/// # Errors
/// What to write instead.
pub fn address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write IP:PORT, such as 127.0.0.1:7400; names are not looked up".into())
}

/// Listens there for HTTP.
///
/// # Errors
/// The system's, with the option's name and what else to write.
pub async fn listen_on(option: &str, address: SocketAddr) -> anyhow::Result<tokio::net::TcpListener> {
    tokio::net::TcpListener::bind(address)
        .await
        .with_context(|| format!("{option} {address} cannot be listened on; write another port, or 0 for a free one"))
}

/// A number of things, of which there must be one.
///
/// # Errors
/// What to write instead.
pub fn count(text: &str) -> Result<NonZeroU32, String> {
    text.parse().map_err(|_| "write a whole number, at least 1".into())
}

fn tokens_per_block(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(tokens @ 1..=1024) => Ok(tokens),
        _ => Err("write a number of tokens from 1 to 1024".into()),
    }
}

fn gbps(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (0.001..=1000.0).contains(&rate) => Ok(rate),
        _ => Err("write gigabits a second, from 0.001 to 1000".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pair_takes_the_documented_options() {
        let options = PairOptions::try_parse_from(
            "pair --model embedded --prompts p.txt --max-tokens 8 --concurrency 8 --order prefill-first --kv-dtype bf16 \
             --prefill-layout LPBNHC --decode-layout BHLPNC --prefill-block 16 --decode-block 7 --transport tcp \
             --link-gbps 2.5 --write-back on --turns 3 --prefill-tp 4 --decode-tp 2 --prefill-nodes 2 --decode-nodes 3 --json \
             --system S --branches 3 --prefix-cache radix --prefill-blocks 40 --decode-blocks 50 --same-host in-place \
              --device cuda:1"
                .split_whitespace(),
        )
        .unwrap();
        assert_eq!(
            (options.link.order, options.kv_dtype, options.json),
            (Some(Order::PrefillFirst), KvDtype::Bf16, true)
        );
        assert_eq!((options.decode_layout.to_string(), options.decode_block), ("BHLPNC".into(), 7));
        assert_eq!(options.link.link_gbps, Some(2.5));
        assert_eq!((options.write_back, options.turns.get()), (Switch::On, 3));
        assert_eq!((options.prefill_tp, options.decode_tp), (4, 2));
        assert_eq!((&options.system[..], options.branches, options.prefix_cache), ("S", 3, PrefixKind::Radix));
        let blocks = [options.prefill_blocks, options.decode_blocks].map(|blocks| blocks.unwrap().get());
        assert_eq!((blocks, options.device), ([40, 50], DeviceKind::Cuda(1)));
        assert_eq!((options.prefill_nodes, options.decode_nodes), (2, 3));
    }

    #[test]
    fn a_wrong_option_is_refused_with_what_would_be_right() {
        for (args, want) in [
            ("--kv-dtype fp8", "f32, f16 or bf16"),
            ("--order both", "decode-first"),
            ("--prefill-layout BLPNHX", "as in BLPNHC"),
            ("--decode-block 0", "1 to 1024"),
            ("--decode-block many", "1 to 1024"),
            ("--max-tokens 0", "max-tokens"),
            ("--concurrency -1", "-1"),
            ("--write-back perhaps", "on"),
            ("--turns 0", "turns"),
            ("--branches 4", "1..=3"),
            ("--prefix-cache tree", "hash, radix or off"),
            ("--decode-blocks 0", "decode-blocks"),
            ("--device gpu", "cpu-sim, cuda"),
            ("--transport pigeon", "tcp"),
            ("--link-gbps -2", "-2"),
            ("--link-gbps NaN", "0.001 to 1000"),
            ("--prefill-tp 0", "1..=64"),
            ("--decode-nodes 17", "1..=16"),
            ("--fast", "--fast"),
        ] {
            let line = format!("pair {args}");
            let error = PairOptions::try_parse_from(line.split_whitespace()).unwrap_err().to_string();
            assert!(error.contains(want), "{args}: {error}");
        }
    }
}
