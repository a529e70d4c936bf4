//! Whole clusters of the machines under faults; each run is drawn from a seed.

use kvferry_protocol::sim::{Options, Report, run};

const SEEDS: u64 = 2000;

/// Runs many seeds on two threads and adds up what they were; panics with the line that replays a failing one.
fn run_all(seeds: std::ops::Range<u64>) -> Report {
    let half = seeds.start + (seeds.end - seeds.start) / 2;
    let sweep = |seeds: std::ops::Range<u64>| {
        let mut sum = Report::default();
        for seed in seeds {
            let report = run(seed, &Options::default()).unwrap_or_else(|violation| panic!("{violation}"));
            sum.steps += report.steps;
            sum.ignored += report.ignored;
            sum.refused += report.refused;
            for (pair, count) in report.visited {
                *sum.visited.entry(pair).or_default() += count;
            }
            for (pair, count) in report.verdicts {
                *sum.verdicts.entry(pair).or_default() += count;
            }
        }
        sum
    };
    let (mut first, second) = std::thread::scope(|scope| {
        let other = scope.spawn(|| sweep(half..seeds.end));
        let first = sweep(seeds.start..half);
        (first, other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    first.steps += second.steps;
    first.ignored += second.ignored;
    first.refused += second.refused;
    for (pair, count) in second.visited {
        *first.visited.entry(pair).or_default() += count;
    }
    for (pair, count) in second.verdicts {
        *first.verdicts.entry(pair).or_default() += count;
    }
    first
}

#[test]
fn the_invariants_hold_in_every_run() {
    let sum = run_all(0..SEEDS);
    println!(
        "{} runs, {} steps, {} inputs ignored, {} messages of old incarnations refused",
        SEEDS, sum.steps, sum.ignored, sum.refused
    );
    println!("verdicts (receiver, sender): {:?}", sum.verdicts);
    println!("{} of (side, state, input) seen:", sum.visited.len());
    for ((side, state, input), count) in &sum.visited {
        println!("  {side:8} {state:20} {input:16} {count}");
    }
}

#[test]
fn replay() {
    let Ok(seed) = std::env::var("KVFERRY_SIM_SEED") else { return };
    let seed = seed.parse().expect("KVFERRY_SIM_SEED is a number");
    match run(seed, &Options { trace: true, ..Options::default() }) {
        Ok(report) => println!("{}\nseed {seed}: all invariants hold", report.trace.join("\n")),
        Err(violation) => panic!("{}\n{violation}", violation.trace.join("\n")),
    }
}
