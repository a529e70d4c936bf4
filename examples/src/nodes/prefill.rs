//! Prefills prompts for decode nodes: computes their KV and hands it over.
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::cli::{EngineOptions, EventOptions, LinkOptions, TraceOptions, address, listen_on, until_end};
use crate::http::metrics_router;
use crate::node::LoadedModel;
use crate::pd::PdNode;
use clap::Parser;
use kvferry::config::Role;
use serde_json::json;

/// Prefills prompts for decode nodes. KVFERRY_PSK must hold the cluster's key
#[derive(Parser, Debug)]
#[command(name = "prefill", version)]
pub struct PrefillOptions {
    #[command(flatten)]
    engine: EngineOptions,
    #[command(flatten)]
    link: LinkOptions,
    #[command(flatten)]
    trace: TraceOptions,
    #[command(flatten)]
    events: EventOptions,
    /// Where decode nodes connect; port 0 takes a free one. With several ranks, rank n listens n ports higher. The addresses are
    /// printed as one line of JSON
    #[arg(long, value_name = "IP:PORT", value_parser = address)]
    listen: Option<SocketAddr>,
    /// Serve GET /metrics there
    #[arg(long, value_name = "IP:PORT", value_parser = address)]
    metrics: Option<SocketAddr>,
    /// kvferry's configuration file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// End when standard input ends
    #[arg(long)]
    exit_with_stdin: bool,
}

/// Whether somebody else listens on a port already.
fn in_use(error: &(dyn std::error::Error + 'static)) -> bool {
    std::iter::successors(Some(error), |error| error.source())
        // The transport shares its errors.
        .filter_map(|error| {
            error.downcast_ref().or_else(|| error.downcast_ref::<Arc<std::io::Error>>().map(Arc::as_ref))
        })
        .any(|error: &std::io::Error| error.kind() == std::io::ErrorKind::AddrInUse)
}

/// Serves until it is told to end.
///
/// # Errors
/// Whatever keeps the node from starting.
pub async fn run_prefill(options: &PrefillOptions) -> anyhow::Result<()> {
    let raw = options.link.connector(options.config.as_deref(), Role::Prefill, options.listen)?;
    let model = LoadedModel::load(&options.engine.model)?;
    let tracer = options.trace.tracer();
    let listen = raw.listen.clone().unwrap_or_default();
    let node = PdNode::start_traced(&model, &options.engine.node(), raw, &tracer, options.events.publish()?);
    let node = Arc::new(node.map_err(|error| match in_use(&error) {
        true => anyhow::Error::from(error).context(format!(
            "--listen {listen} cannot be listened on; write another port, or 0 for a free one (ranks take ports in a row)"
        )),
        false => error.into(),
    })?);
    let mut metrics = None;
    if let Some(address) = options.metrics {
        let listener = listen_on("--metrics", address).await?;
        metrics = Some(listener.local_addr()?.to_string());
        let routes = metrics_router(node.engine.handle(), node.metrics.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
    }
    // `transfer` is rank 0's, `transfers` are all ranks': what a decode node's --prefill takes, joined by +.
    let transfers: Vec<_> = node.prefill_address()?.ranks().iter().map(SocketAddr::to_string).collect();
    println!("{}", json!({ "node": "prefill", "transfer": transfers[0], "transfers": transfers, "metrics": metrics }));
    let stop = Arc::new(AtomicBool::new(false));
    let desk = {
        let (node, stop) = (Arc::clone(&node), Arc::clone(&stop));
        tokio::task::spawn_blocking(move || node.serve_prefill(&stop))
    };
    until_end(options.exit_with_stdin).await?;
    stop.store(true, Ordering::Release);
    desk.await?;
    drop(node); // The timeline is complete when the engine has ended.
    options.trace.write(&tracer, "prefill")?;
    Ok(())
}
