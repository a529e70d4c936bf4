//! Whole clusters of the machines under faults; each run is drawn from a seed.
//!
//! Millions of runs on all cores, with their rate while it goes on and the coverage at the end:
//! `KVFERRY_SIM_SEEDS=1000000 cargo test --release -p kvferry-protocol --test simulation -- --nocapture the_invariants_hold`;
//! `KVFERRY_SIM_FIRST` is the first seed, `KVFERRY_SIM_THREADS` how many cores it takes.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry_protocol::sim::{DriverBug, Options, Planted, Report, Violation, run};

/// How many runs must hold when nothing else is asked for.
const SEEDS: u64 = 20_000;

/// In how many runs a planted bug must be seen.
const BUG_SEEDS: u64 = 10_000;

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().map(|value| value.parse().unwrap_or_else(|_| panic!("{name} is {value:?}, not a number")))
}

/// Runs seeds on some threads and adds up what they were; the first violation by seed, if there is one.
fn sweep(seeds: Range<u64>, options: &Options, progress: Option<Duration>) -> Result<Report, Box<Violation>> {
    let threads = setting("KVFERRY_SIM_THREADS").map_or_else(
        || std::thread::available_parallelism().map_or(1, usize::from),
        |threads| usize::try_from(threads).expect("a few threads"),
    );
    let (next, first) = (AtomicU64::new(seeds.start), Mutex::new(None::<Box<Violation>>));
    let began = now();
    let worker = |reports: bool| {
        let (mut sum, mut told) = (Report::default(), now());
        loop {
            let from = next.fetch_add(BATCH, Ordering::Relaxed);
            for seed in from..(from + BATCH).min(seeds.end) {
                match run(seed, options) {
                    Ok(report) => sum.add(&report),
                    Err(violation) => {
                        next.store(seeds.end, Ordering::Relaxed);
                        let mut first = first.lock().expect("nobody panics while holding it");
                        if first.as_ref().is_none_or(|first| violation.seed < first.seed) {
                            *first = Some(violation);
                        }
                        return sum;
                    }
                }
            }
            if from >= seeds.end {
                return sum;
            }
            if reports && progress.is_some_and(|every| told.elapsed() >= every) {
                told = now();
                let done = from - seeds.start;
                let rate = done as f64 / began.elapsed().as_secs_f64();
                eprintln!("{done} of {} seeds, {rate:.0} a second", seeds.end - seeds.start);
            }
        }
    };
    let sum = std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(|| worker(false))).collect();
        let mut sum = worker(true);
        for other in others {
            sum.add(&other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        sum
    });
    match first.into_inner().expect("nobody panics while holding it") {
        Some(violation) => Err(violation),
        None => Ok(sum),
    }
}

/// Seeds that a thread takes at a time.
const BATCH: u64 = 20;

#[expect(clippy::disallowed_methods, reason = "it measures how fast the runs are, and nothing depends on it")]
fn now() -> Instant {
    Instant::now()
}

#[test]
fn the_invariants_hold_in_every_run() {
    let first = setting("KVFERRY_SIM_FIRST").unwrap_or(0);
    let seeds = setting("KVFERRY_SIM_SEEDS").unwrap_or(SEEDS);
    let began = now();
    let every = Duration::from_secs(10);
    let swept = sweep(first..first + seeds, &Options::default(), Some(every));
    let sum = swept.unwrap_or_else(|found| panic!("{}\n{found}", last_steps(found.seed)));
    let rate = seeds as f64 / began.elapsed().as_secs_f64();
    println!("{:.1?}, {rate:.0} seeds a second\n{sum}", began.elapsed());
    // Runs that hold because nothing happens in them would prove nothing.
    for pair in [
        ("Done", "Done"),
        ("Done", "Failed"),
        ("Failed", "Failed"),
        ("Cancelled", "Cancelled"),
        ("Cancelled", "Failed"),
    ] {
        assert!(sum.verdicts.contains_key(&pair), "no transfer ended in {pair:?}");
    }
    for event in EVENTS {
        assert!(sum.events.contains_key(event), "there were no {event}");
    }
    let unexpected = sum.visits.unexpected();
    assert!(unexpected.is_empty(), "the table calls these pairs out of reach: {unexpected:#?}");
    if seeds >= SEEDS {
        assert!(sum.most_transfers >= 200, "the largest run had {} transfers", sum.most_transfers);
        let unseen = sum.visits.unseen();
        assert!(unseen.is_empty(), "these pairs fit and were never seen: {unseen:#?}");
        let unheard = sum.visits.unheard();
        assert!(unheard.is_empty(), "a liar never said these words in these states: {unheard:#?}");
    }
}

/// The end of a failing run, step by step; `replay` shows all of it.
fn last_steps(seed: u64) -> String {
    let trace = match run(seed, &Options { trace: true, ..Options::default() }) {
        Ok(report) => report.trace,
        Err(violation) => violation.trace,
    };
    trace[trace.len().saturating_sub(60)..].join("\n")
}

/// What must have happened among the seeds of a plain run.
const EVENTS: &[&str] = &[
    "ambushes",
    "changed pieces",
    "clock jumps",
    "crashes",
    "cuts",
    "floods",
    "messages of old incarnations refused",
    "offered blocks refused",
    "offered blocks taken",
    "one-way partitions",
    "partitions",
    "preempted requests",
    "requests refused for want of blocks",
    "requests that waited for blocks",
    "runs with a liar",
    "sessions ended for what cannot be",
    "sessions in a later version",
    "sessions in version 1",
    "sessions refused for their versions",
    "sessions superseded",
    "slow drivers",
    "stopped processes",
    "words of liars",
    "writes of liars",
    "writes said to be another transfer's",
];

#[test]
#[ignore = "replays one seed, step by step: set KVFERRY_SIM_SEED"]
fn replay() {
    let seed = setting("KVFERRY_SIM_SEED").expect("set KVFERRY_SIM_SEED to the seed to replay");
    match run(seed, &Options { trace: true, ..Options::default() }) {
        Ok(report) => println!("{}\nseed {seed}: all invariants hold", report.trace.join("\n")),
        Err(violation) => panic!("{}\n{violation}", violation.trace.join("\n")),
    }
}

/// What the violation says that a bug leads to.
const fn seen_as(bug: Planted) -> &'static [&'static str] {
    match bug {
        Planted::FinishBeforeFence | Planted::GrantNotRevoked => &["ended while its grant lives"],
        Planted::VisibleBeforeDigest => &["is visible before it is hashed"],
        Planted::DigestIgnored => &["invariant 3: visible", "invariant 8: good"],
        Planted::GenerationReused => &["again"],
        Planted::VerifiedAskedAgain => &["which is read"],
        Planted::AbortIsDone => &["is done, but only"],
        Planted::NoDeadline | Planted::NoWordDeadline => &["invariant 2"],
        Planted::FinishedTwice => &["ended twice"],
        Planted::ReleaseBeforeDrain | Planted::ExpiryIsRelease => &["is released while posts read it"],
        Planted::DoneWithoutWord => &["is done, its receiver is"],
        Planted::RepostUnderSameGrant => &["again under generation"],
        Planted::PostUncomputed => &["which is not computed"],
        Planted::OldGrantTaken => &["uses generation"],
        Planted::StoppedTooEarly => &["says stopped while it posts"],
        Planted::GoodOverReported => &["invariant 8"],
        Planted::AbsoluteTime => &["invariant 6"],
        Planted::PostsBeyondLimit => &["posts in flight"],
        Planted::RegrantForgotten => &["fair weather"],
        Planted::EarlyKeptForever => &["early messages are left over"],
        Planted::EarlyUnbounded => &["early messages"],
        Planted::OutsideGrantTaken => &["outside its grant"],
        Planted::OverlapTaken => &["a second time"],
        Planted::SequenceTwice => &["is visible before it is hashed"],
        Planted::AbortDoneTaken | Planted::EndedDoneTaken => &["is done, but only"],
        Planted::DeclinedUnshared => &["refusals"],
        Planted::BestPartCounts => &["invariant 8: good on this rank"],
        Planted::SiblingsForgotten => &["is over before all its parts", "late byte", "invariant 4"],
        Planted::LayerOfOnePart => &["invariant 3: a layer"],
    }
}

#[test]
fn every_planted_bug_is_seen_as_what_it_is() {
    for bug in Planted::ALL {
        let found = sweep(0..BUG_SEEDS, &Options { planted: Some(bug), ..Options::default() }, None);
        let Err(found) = found else { panic!("{bug:?} is not seen in {BUG_SEEDS} runs") };
        println!("{bug:?}: seed {}: {}", found.seed, found.what);
        let is_it = seen_as(bug).iter().any(|what| found.what.contains(what));
        assert!(is_it, "{bug:?}: seed {}: {}", found.seed, found.what);
    }
}

/// What the violation says that a driver's bug leads to; which of them comes first is the seed's affair.
const fn driver_seen_as(bug: DriverBug) -> &'static [&'static str] {
    match bug {
        DriverBug::FenceLies => &["late byte"],
        DriverBug::OldIncarnationTaken => &["invariant 5"],
        DriverBug::NoTimers => &["invariant 2"],
        DriverBug::ReusedBeforeDrain => &["invariant 4: page"],
        DriverBug::FirstRankSpeaks => &["is over before all its parts", "invariant 4: page"],
        DriverBug::NewestVersionSpoken => &["is spoken in a session of version"],
        DriverBug::NotSealed => &["lands on bytes that attention reads"],
        DriverBug::GrantForAnybody => &["invariant 3: visible", "invariant 5: a write"],
        DriverBug::NotificationTrusted => &[
            "landed under no grant",
            "outside its grant",
            "a second time",
            "invariant 3: visible",
            "showed more than it calls good",
        ],
        DriverBug::AnybodyHeard => {
            &["is done, its receiver is", "invariant 2: part", "invariant 5: part", "fair weather"]
        }
    }
}

#[test]
fn every_bug_of_a_driver_is_seen_as_what_it_is() {
    for bug in DriverBug::ALL {
        let found = sweep(0..BUG_SEEDS, &Options { driver_bug: Some(bug), ..Options::default() }, None);
        let Err(found) = found else { panic!("{bug:?} is not seen in {BUG_SEEDS} runs") };
        println!("{bug:?}: seed {}: {}", found.seed, found.what);
        let is_it = driver_seen_as(bug).iter().any(|what| found.what.contains(what));
        assert!(is_it, "{bug:?}: seed {}: {}", found.seed, found.what);
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let trace = || run(7, &Options { trace: true, ..Options::default() }).unwrap().trace;
    let first = trace();
    assert!(first.len() > 100);
    assert_eq!(first, trace());
}

/// Invariant 6 as a whole: nobody can tell from what is said when a clock began.
#[test]
fn what_is_said_does_not_depend_on_what_the_clocks_show() {
    let said = |seed, options: &Options| {
        let report = run(seed, options).unwrap_or_else(|found| panic!("{found}"));
        (report.said, report.steps)
    };
    for seed in 0..300 {
        let later = Options { epoch_us: 987_654_321_012, ..Options::default() };
        assert_eq!(said(seed, &Options::default()), said(seed, &later), "seed {seed}");
    }
}

/// Bugs that no honest peer brings out.
const ONLY_A_LIAR: [Planted; 5] = [
    Planted::OutsideGrantTaken,
    Planted::OverlapTaken,
    Planted::SequenceTwice,
    Planted::AbortDoneTaken,
    Planted::EndedDoneTaken,
];
const ONLY_A_LIAR_OF_A_DRIVER: [DriverBug; 4] =
    [DriverBug::NotSealed, DriverBug::GrantForAnybody, DriverBug::NotificationTrusted, DriverBug::AnybodyHeard];

/// They are seen with liars (above); here, that liars are what they are seen by.
#[test]
fn some_bugs_are_seen_with_liars_only() {
    let planted = ONLY_A_LIAR.map(|bug| Options { planted: Some(bug), ..Options::default() });
    let driver = ONLY_A_LIAR_OF_A_DRIVER.map(|bug| Options { driver_bug: Some(bug), ..Options::default() });
    for options in planted.into_iter().chain(driver) {
        let options = Options { no_liars: true, ..options };
        let swept = sweep(0..2000, &options, None);
        assert!(swept.is_ok(), "{options:?} is seen without a liar: {}", swept.unwrap_err());
    }
}
