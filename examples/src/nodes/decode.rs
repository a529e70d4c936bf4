//! Generates text: on a terminal, or over HTTP; from KV that a prefill node computed, or from its own.
use std::io::{BufRead, ErrorKind, Write};
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use crate::cli::{EngineOptions, EventOptions, LinkOptions, TraceOptions, address, count, listen_on, until_end};
use crate::engine::{EngineService, FinishReason, Sampling, Submission, Update};
use crate::http::{Frontend, LocalRouter, Router, router};
use crate::model::TextStream;
use crate::node::LoadedModel;
use crate::pd::PdNode;
use crate::prefills::PrefillAddress;
use anyhow::{Context, ensure};
use clap::Parser;
use kvferry::config::Role;
use kvferry::metrics::Metrics;
use kvferry::trace::Tracer;
use serde_json::json;

/// Generates text. Without --http it reads one prompt a line from standard input; without --prefill it computes prompts itself.
/// With --prefill, KVFERRY_PSK must hold the cluster's key
#[derive(Parser, Debug)]
#[command(name = "decode", version)]
pub struct DecodeOptions {
    #[command(flatten)]
    engine: EngineOptions,
    #[command(flatten)]
    link: LinkOptions,
    #[command(flatten)]
    trace: TraceOptions,
    #[command(flatten)]
    events: EventOptions,
    /// The prefill nodes that compute prompts, in turn; one that is down is passed over. A node with several ranks is written as
    /// all their addresses, by rank, joined by +
    #[arg(long, value_name = "IP:PORT[+IP:PORT...],...", value_delimiter = ',')]
    prefill: Vec<PrefillAddress>,
    /// Serve POST /v1/completions there; port 0 takes a free one. The address is printed as one line of JSON
    #[arg(long, value_name = "IP:PORT", value_parser = address)]
    http: Option<SocketAddr>,
    /// Tokens to generate for each prompt of standard input
    #[arg(long, value_name = "COUNT", default_value = "64", value_parser = count)]
    max_tokens: NonZeroU32,
    /// Temperature of the draws for prompts of standard input; 0 is greedy
    #[arg(long, value_name = "NUMBER", default_value = "0", value_parser = temperature)]
    temperature: f32,
    /// Seed of the draws for prompts of standard input
    #[arg(long, value_name = "NUMBER", default_value = "0")]
    seed: u64,
    /// kvferry's configuration file
    #[arg(long, value_name = "FILE", requires = "prefill")]
    config: Option<PathBuf>,
    /// End when standard input ends; with --http only
    #[arg(long, requires = "http")]
    exit_with_stdin: bool,
}

/// What generates: an engine, who prefills for it, and its metrics.
struct Node {
    engine: EngineService,
    router: Arc<dyn Router>,
    metrics: Vec<Arc<Metrics>>,
}

fn temperature(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(temperature) if (0.0..=2.0).contains(&temperature) => Ok(temperature),
        _ => Err("write a number from 0 to 2".into()),
    }
}

/// Serves or converses until it is told to end.
///
/// # Errors
/// Whatever keeps the node from starting or from going on. A prompt of standard input that was not answered is told where it
/// happens, and makes the code a failure.
pub fn run_decode(options: &DecodeOptions) -> anyhow::Result<ExitCode> {
    let model = LoadedModel::load(&options.engine.model)?;
    let tracer = options.trace.tracer();
    let node = start(options, &model, &tracer)?;
    let code = match options.http {
        Some(address) => tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?
            .block_on(serve(options, model, node, address))
            .map(|()| ExitCode::SUCCESS)?,
        None => converse(options, &model, &node)?,
    };
    options.trace.write(&tracer, "decode")?;
    Ok(code)
}

fn start(options: &DecodeOptions, model: &LoadedModel, tracer: &Tracer) -> anyhow::Result<Node> {
    let config = options.engine.node();
    if options.prefill.is_empty() {
        let unused = options.link.given();
        ensure!(unused.is_none(), "{} is of no use without --prefill: nothing is transferred", unused.unwrap_or(""));
        let (router, metrics) = (Arc::new(LocalRouter), vec![Arc::new(Metrics::new())]);
        return Ok(Node { engine: model.start_publishing(&config, options.events.publish()?)?, router, metrics });
    }
    let raw = options.link.connector(options.config.as_deref(), Role::Decode, None)?;
    let node = PdNode::start_traced(model, &config, raw, tracer, options.events.publish()?)?;
    let router = Arc::new(node.router(&options.prefill)?);
    Ok(Node { engine: node.engine, router, metrics: node.metrics })
}

async fn serve(options: &DecodeOptions, model: LoadedModel, node: Node, address: SocketAddr) -> anyhow::Result<()> {
    let listener = listen_on("--http", address).await?;
    println!("{}", json!({ "node": "decode", "http": listener.local_addr()?.to_string() }));
    let routes = router(Frontend { engine: node.engine.handle(), model, router: node.router, metrics: node.metrics });
    tokio::select! {
        served = axum::serve(listener, routes) => served?,
        ended = until_end(options.exit_with_stdin) => ended?,
    }
    Ok(())
}

/// One prompt a line in, its text out as it comes.
fn converse(options: &DecodeOptions, model: &LoadedModel, node: &Node) -> anyhow::Result<ExitCode> {
    let sampling = match options.temperature {
        0.0 => Sampling::Greedy,
        temperature => Sampling::Temperature { temperature, seed: options.seed },
    };
    let mut code = ExitCode::SUCCESS;
    for line in std::io::stdin().lock().lines() {
        let prompt = line.context("standard input is no UTF-8 text")?;
        if let Err(error) = answer(&prompt, sampling, options.max_tokens.get() as usize, model, node) {
            let io = error.downcast_ref::<std::io::Error>();
            if io.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe) {
                // Nobody reads the answers any more, as behind `| head`.
                break;
            }
            eprintln!("error: {error:#}");
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

fn answer(prompt: &str, sampling: Sampling, max: usize, model: &LoadedModel, node: &Node) -> anyhow::Result<()> {
    let tokens = model.tokenizer.encode(prompt).map_err(anyhow::Error::msg)?;
    let transfer = node.router.route(&tokens)?;
    let submission = Submission { sampling, transfer, ..model.greedy(tokens, max) };
    let mut ticket = node.engine.handle().submit_blocking(submission)?;
    let (mut text, mut out) = (TextStream::default(), std::io::stdout().lock());
    while let Some(update) = ticket.next_blocking() {
        match update {
            Update::Token { token, .. } => {
                let piece = text.push(&model.tokenizer, token).map_err(anyhow::Error::msg)?;
                write!(out, "{piece}")?;
                out.flush()?;
            }
            Update::Finished { reason: FinishReason::Failed(why), .. } => {
                anyhow::bail!("the KV transfer failed: {why}")
            }
            Update::Finished { .. } => {
                writeln!(out, "{}", text.finish(&model.tokenizer).map_err(anyhow::Error::msg)?)?;
                return Ok(());
            }
        }
    }
    anyhow::bail!("the engine has stopped")
}
