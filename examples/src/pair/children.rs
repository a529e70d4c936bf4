//! The two nodes as processes of their own.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use anyhow::{Context, bail};
use kvferry::config::TransferOrder;
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use super::client::Client;
use super::{Role, blocks, report};
use crate::cli::PairOptions;
use crate::pd::random_bits;

/// A prefill and a decode node; both are killed when this is dropped, and end by themselves if this process dies.
pub(super) struct Pair {
    prefill: Child,
    decode: Child,
    metrics: Client,
    http: Client,
    /// The timelines of prefill and decode, and where they are joined.
    timelines: Option<([PathBuf; 2], PathBuf)>,
}

impl Pair {
    /// Starts both; they can serve sequences of `longest` tokens.
    pub(super) async fn start(program: &Path, options: &PairOptions, longest: usize) -> anyhow::Result<Self> {
        let key = format!("{:032x}{:032x}", random_bits()?, random_bits()?);
        let mut command = node(
            program,
            options,
            Role::Prefill,
            &key,
            options.prefill_layout.to_string(),
            options.prefill_block,
            longest,
        )?;
        command.args(["--listen", "127.0.0.1:0", "--metrics", "127.0.0.1:0"]);
        let timelines =
            options.trace.trace.clone().map(|joined| (["prefill", "decode"].map(|node| part(&joined, node)), joined));
        if let Some(([prefill, _], _)) = &timelines {
            command.arg("--trace").arg(prefill);
        }
        let (prefill, said) = spawn(command, "prefill").await?;
        let transfer = address(&said, "transfer")?;
        let metrics = Client { address: address(&said, "metrics")? };
        let mut command = node(
            program,
            options,
            Role::Decode,
            &key,
            options.decode_layout.to_string(),
            options.decode_block,
            longest,
        )?;
        command.args(["--http", "127.0.0.1:0", "--prefill", &transfer.to_string()]);
        if let Some(([_, decode], _)) = &timelines {
            command.arg("--trace").arg(decode);
        }
        let (decode, said) = spawn(command, "decode").await?;
        let http = Client { address: address(&said, "http")? };
        Ok(Self { prefill, decode, metrics, http, timelines })
    }

    pub(super) const fn decode_client(&self) -> Client {
        self.http
    }

    /// The counters of decode and prefill, once nothing of a transfer is held any more: the last verdict may still be on its way
    /// when the last answer is here. If something stays, the report says so.
    pub(super) async fn settled_metrics(&self) -> anyhow::Result<(String, String)> {
        let deadline = std::time::Instant::now() + GRACE;
        loop {
            let pages = (self.http.get("/metrics").await?, self.metrics.get("/metrics").await?);
            if report::still_held(&pages.0) + report::still_held(&pages.1) == 0 || std::time::Instant::now() > deadline
            {
                return Ok(pages);
            }
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }
    }

    /// Ends both, waits until they are gone, and joins their timelines.
    ///
    /// # Errors
    /// The timelines'.
    pub(super) async fn stop(mut self) -> anyhow::Result<()> {
        for (name, child) in [("decode", &mut self.decode), ("prefill", &mut self.prefill)] {
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
        if let Some((parts, joined)) = &self.timelines {
            kvferry::trace::merge(parts, joined)?;
            for part in parts {
                std::fs::remove_file(part).with_context(|| format!("{} cannot be removed", part.display()))?;
            }
        }
        Ok(())
    }
}

/// Where a node writes its timeline before it is joined with the other's.
fn part(joined: &Path, node: &str) -> PathBuf {
    let mut name = joined.as_os_str().to_owned();
    name.push(format!(".{node}"));
    name.into()
}

/// Half an hour: eight prompts of 1,500 tokens queue for minutes on two slow cores.
const TRANSFER_DEADLINE_MS: &str = "1800000";
/// How long a node may take to end by itself.
const GRACE: std::time::Duration = std::time::Duration::from_secs(10);

fn node(
    program: &Path,
    options: &PairOptions,
    role: Role,
    key: &str,
    layout: String,
    block: u32,
    longest: usize,
) -> anyhow::Result<Command> {
    let concurrency = options.concurrency.get();
    let mut command = Command::new(program);
    command
        .arg(role.word())
        .arg("--model")
        .arg(&options.model)
        .args(["--kv-dtype", &options.kv_dtype.to_string(), "--layout", &layout, "--block", &block.to_string()])
        .args(["--blocks", &blocks(longest, block, concurrency).to_string(), "--chunk", &options.chunk.to_string()])
        .args(["--max-running", &concurrency.saturating_mul(2).to_string(), "--exit-with-stdin"])
        .env("KVFERRY_PSK", key)
        // A comparison waits for a slow model: a load that gave up would only compare the decode node with itself.
        .env("KVFERRY_TRANSFER_DEADLINE_MS", TRANSFER_DEADLINE_MS)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true);
    if let Some(order) = options.link.order {
        command.args(["--order", &TransferOrder::from(order).to_string()]);
    }
    if let Some(rate) = options.link.link_gbps {
        command.args(["--link-gbps", &rate.to_string()]);
    }
    Ok(command)
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
