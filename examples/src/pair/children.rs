//! The nodes as processes of their own.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, bail};
use kvferry::config::{SameHost, TransferOrder};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::client::Client;
use super::{Role, blocks, report};
use crate::cli::{PairOptions, Switch};
use crate::pd::random_bits;

/// Some prefill and some decode nodes; all are killed when this is dropped, and end by themselves if this process dies.
pub(super) struct Pair {
    prefill: Vec<Node>,
    decode: Vec<Node>,
    /// Where the nodes' timelines are joined.
    timeline: Option<PathBuf>,
}

/// One node and where it answers: a prefill node its metrics, a decode node completions too.
struct Node {
    child: Child,
    client: Client,
    /// Where it writes its timeline.
    timeline: Option<PathBuf>,
}

impl Pair {
    /// Starts all; each can serve sequences of `longest` tokens, and decode keeps `conversations` of them between their turns.
    pub(super) async fn start(
        program: &Path,
        options: &PairOptions,
        longest: usize,
        conversations: u32,
    ) -> anyhow::Result<Self> {
        let key = format!("{:032x}{:032x}", random_bits()?, random_bits()?);
        let timeline = options.trace.trace.clone();
        let mut pair = Self { prefill: Vec::new(), decode: Vec::new(), timeline };
        let mut addresses = Vec::new();
        for number in 0..options.prefill_nodes {
            let mut command = node(program, options, Role::Prefill, &key, (longest, 0));
            command.args(["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]);
            let timeline = pair.trace(&mut command, &format!("prefill-{number}"));
            let (child, said) = spawn(command, "prefill").await?;
            let ranks = said["transfers"].as_array().with_context(|| format!("no transfers in {said}"))?;
            let ranks: Option<Vec<&str>> = ranks.iter().map(Value::as_str).collect();
            addresses.push(ranks.with_context(|| format!("transfers are no addresses in {said}"))?.join("+"));
            pair.prefill.push(Node { child, client: Client { address: address(&said, "metrics")? }, timeline });
        }
        for number in 0..options.decode_nodes {
            let mut command = node(program, options, Role::Decode, &key, (longest, conversations));
            command.args(["--http", "127.0.0.1:0", "--prefill", &addresses.join(",")]);
            let timeline = pair.trace(&mut command, &format!("decode-{number}"));
            let (child, said) = spawn(command, "decode").await?;
            pair.decode.push(Node { child, client: Client { address: address(&said, "http")? }, timeline });
        }
        Ok(pair)
    }

    /// The decode node whose turn a prompt is.
    pub(super) fn decode_client(&self, prompt: usize) -> Client {
        self.decode[prompt % self.decode.len()].client
    }

    /// The counters of all decode nodes and of all prefill nodes, once nothing of a transfer is held any more: the last verdict may
    /// still be on its way when the last answer is here. If something stays, the report says so.
    pub(super) async fn settled_metrics(&self) -> anyhow::Result<(String, String)> {
        let deadline = std::time::Instant::now() + GRACE;
        loop {
            let pages = (pages(&self.decode).await?, pages(&self.prefill).await?);
            if report::still_held(&pages.0) + report::still_held(&pages.1) == 0 || std::time::Instant::now() > deadline
            {
                return Ok(pages);
            }
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    }

    /// Lets a node write its timeline beside the joined one, if there shall be one.
    fn trace(&self, command: &mut Command, node: &str) -> Option<PathBuf> {
        let mut name = self.timeline.clone()?.into_os_string();
        name.push(format!(".{node}"));
        command.arg("--trace").arg(&name);
        Some(name.into())
    }

    /// Ends all, waits until they are gone, and joins their timelines.
    ///
    /// # Errors
    /// The timelines'.
    pub(super) async fn stop(self) -> anyhow::Result<()> {
        let timelines = self.prefill.iter().chain(&self.decode).filter_map(|node| node.timeline.clone());
        let timelines: Vec<PathBuf> = timelines.collect();
        let nodes = self.decode.into_iter().map(|node| ("decode", node));
        for (name, Node { mut child, .. }) in nodes.chain(self.prefill.into_iter().map(|node| ("prefill", node))) {
            // The end of their standard input is their signal to go.
            drop(child.stdin.take());
            match tokio::time::timeout(GRACE, child.wait()).await {
                Ok(Ok(status)) if status.success() => {}
                Ok(Ok(status)) => tracing::warn!(node = name, %status, "the node did not end well"),
                Ok(Err(error)) => tracing::warn!(node = name, %error, "the node cannot be waited for"),
                Err(_) => {
                    tracing::warn!(node = name, "the node did not end in time and is killed");
                    if let Err(error) = child.kill().await {
                        tracing::warn!(node = name, %error, "the node cannot be killed");
                    }
                }
            }
        }
        if let Some(joined) = &self.timeline {
            kvferry::trace::merge(&timelines, joined)?;
            for part in &timelines {
                std::fs::remove_file(part).with_context(|| format!("{} cannot be removed", part.display()))?;
            }
        }
        Ok(())
    }
}

/// The metrics of some nodes, one page after another.
async fn pages(nodes: &[Node]) -> anyhow::Result<String> {
    let mut all = String::new();
    for node in nodes {
        all += &node.client.get("/metrics").await?;
    }
    Ok(all)
}

/// Half an hour: eight prompts of 1,500 tokens queue for minutes on two slow cores.
const TRANSFER_DEADLINE_MS: &str = "1800000";
/// Host memory for blocks that prompts share, in bytes.
const TIER_BYTES: &str = "268435456";
/// Complete blocks of an answer that are sent back at once.
const WRITE_BACK_BLOCKS: &str = "4";
/// How long a node may take to end by itself.
const GRACE: std::time::Duration = std::time::Duration::from_secs(10);

fn node(program: &Path, options: &PairOptions, role: Role, key: &str, (longest, idle): (usize, u32)) -> Command {
    let (layout, block, tp, given) = match role {
        Role::Prefill => (options.prefill_layout, options.prefill_block, options.prefill_tp, options.prefill_blocks),
        Role::Decode => (options.decode_layout, options.decode_block, options.decode_tp, options.decode_blocks),
    };
    let concurrency = options.concurrency.get();
    let mut command = Command::new(program);
    command
        .arg(role.word())
        .arg("--model")
        .arg(&options.model)
        .args([
            "--kv-dtype",
            &options.kv_dtype.to_string(),
            "--layout",
            &layout.to_string(),
            "--block",
            &block.to_string(),
        ])
        .args([
            "--tp",
            &tp.to_string(),
            "--device",
            &options.device.to_string(),
            "--prefix-cache",
            &options.prefix_cache.to_string(),
        ])
        .args([
            "--blocks",
            &given.map_or_else(|| blocks(longest, block, concurrency, idle), NonZeroU32::get).to_string(),
            "--chunk",
            &options.chunk.to_string(),
        ])
        .args(["--max-running", &concurrency.saturating_mul(2).to_string(), "--exit-with-stdin"])
        .env("KVFERRY_PSK", key)
        // A comparison waits for a slow model: a load that gave up would only compare the decode node with itself.
        .env("KVFERRY_TRANSFER_DEADLINE_MS", TRANSFER_DEADLINE_MS)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    if options.write_back == Switch::On {
        match role {
            Role::Prefill => command.env("KVFERRY_TIER_BYTES", TIER_BYTES),
            Role::Decode => command.env("KVFERRY_WRITE_BACK_BLOCKS", WRITE_BACK_BLOCKS),
        };
    }
    if let Some(order) = options.link.order {
        command.args(["--order", &TransferOrder::from(order).to_string()]);
    }
    if let Some(same_host) = options.link.same_host {
        command.args(["--same-host", &SameHost::from(same_host).to_string()]);
    }
    if let Some(rate) = options.link.link_gbps {
        command.args(["--link-gbps", &rate.to_string()]);
    }
    command
}

/// Starts a node and waits for the line that says where it listens.
async fn spawn(mut command: Command, name: &str) -> anyhow::Result<(Child, Value)> {
    let mut child = command.spawn().with_context(|| format!("{name} cannot be started"))?;
    let stdout = child.stdout.take().with_context(|| format!("{name} has no standard output"))?;
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line).await.with_context(|| format!("{name} cannot be heard"))?;
    if line.is_empty() {
        let status = child.wait().await?;
        bail!("{name} ended before it served ({status}); its last words are above");
    }
    let said = serde_json::from_str(&line).with_context(|| format!("{name} said {line:?} instead of its address"))?;
    Ok((child, said))
}

fn address(said: &Value, field: &str) -> anyhow::Result<SocketAddr> {
    let text = said[field].as_str().with_context(|| format!("no {field} in {said}"))?;
    text.parse().with_context(|| format!("{field} is {text:?}, which is no address"))
}
