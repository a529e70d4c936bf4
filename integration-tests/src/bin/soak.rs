//! Two prefill and two decode nodes at full load, broken at random for as long as is asked: `soak --minutes 60`. Exits with 1 on any
//! wrong token, missing answer, leak, or line at ERROR.

use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use kvferry_integration_tests::{Setup, Shape, SoakOptions, soak};

#[derive(Parser)]
struct Options {
    /// How long
    #[arg(long, default_value = "10")]
    minutes: f64,
    /// What chance starts from; the clock's if it is left out
    #[arg(long)]
    seed: Option<u64>,
    /// Clients that wait for their answers; as many again come and hang up
    #[arg(long, default_value = "6")]
    clients: u64,
    /// What each side of a link sends at most
    #[arg(long, default_value = "0.05")]
    link_gbps: f64,
    /// Tensor-parallel ranks of each prefill node: 1 or 2
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u16).range(1..=2))]
    prefill_tp: u16,
    /// Tensor-parallel ranks of each decode node: 1 or 2
    #[arg(long, default_value = "1", value_parser = clap::value_parser!(u16).range(1..=2))]
    decode_tp: u16,
    /// Prefill speaks first
    #[arg(long)]
    prefill_first: bool,
    /// A request fails whose KV is lost, instead of being computed by the decode node
    #[arg(long)]
    fail: bool,
    /// Prefill keeps no blocks in host memory, and decode sends none back
    #[arg(long)]
    no_write_back: bool,
    /// Print what the nodes log
    #[arg(long)]
    verbose: bool,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let clock = || std::time::UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_nanos()));
    let seed = options.seed.unwrap_or_else(clock);
    let shape = Shape {
        prefill_tp: options.prefill_tp,
        decode_tp: options.decode_tp,
        prefill_first: options.prefill_first,
        fails: options.fail,
        write_back: !options.no_write_back,
        ..Shape::default()
    };
    println!("soak --minutes {} --seed {seed} --clients {}: {shape}", options.minutes, options.clients);
    let node = std::env::current_exe()?.with_file_name("node");
    anyhow::ensure!(node.exists(), "{} is missing; build all binaries of this package", node.display());
    let setup = Setup::new(node)
        .args(&format!("--chunk 64 --blocks 384 --link-gbps {}", options.link_gbps))
        .env("KVFERRY_TRANSFER_DEADLINE_MS", "5000")
        .env("KVFERRY_PROGRESS_DEADLINE_MS", "1000")
        .env("KVFERRY_ABSENT_DEADLINE_MS", "500")
        .env("KVFERRY_LEASE_TTL_MS", "1500")
        .env("KVFERRY_VERDICT_TIMEOUT_MS", "800")
        .env("KVFERRY_SILENCE_DEADLINE_MS", "1500")
        .quiet(!options.verbose);
    let duration = Duration::try_from_secs_f64(options.minutes * 60.0).context("--minutes is no time")?;
    let run = || soak(&setup, SoakOptions { duration, seed, clients: options.clients, shape });
    // A failure is told by a panic, in whichever thread it is found.
    match std::panic::catch_unwind(run) {
        Ok(report) => println!("{report}\nclean"),
        Err(_) => {
            println!("FAILED: standard error says what was found");
            std::process::exit(1)
        }
    }
    Ok(())
}
