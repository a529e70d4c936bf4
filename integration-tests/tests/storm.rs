//! Each fault at many random moments, spread over clusters of four shapes: tensor-parallel sizes, who speaks first, what becomes of
//! a request whose KV is lost, write-back. After each: right tokens or the policy's error, within what the deadlines allow; nothing
//! held, no descriptor or thread more than before, no ERROR in a log, and the same processes serve on.

use std::net::TcpStream;
use std::time::Duration;

use kvferry_integration_tests::{Round, Rounds, Setup, Tally};
use kvferry_transport::testing::{Flow, Proxy, Towards};

/// How long a peer may be silent before its session is given up.
const SILENCE: Duration = Duration::from_millis(800);

fn setup() -> Setup {
    Setup::new(env!("CARGO_BIN_EXE_node"))
        // Small pools: pages are used again at once. A slow link: a fault meets transfers in their middle.
        .args("--chunk 64 --blocks 256 --link-gbps 0.02")
        .env("KVFERRY_TRANSFER_DEADLINE_MS", "3000")
        .env("KVFERRY_PROGRESS_DEADLINE_MS", "600")
        .env("KVFERRY_ABSENT_DEADLINE_MS", "400")
        .env("KVFERRY_LEASE_TTL_MS", "800")
        .env("KVFERRY_VERDICT_TIMEOUT_MS", "400")
        .env("KVFERRY_SILENCE_DEADLINE_MS", &SILENCE.as_millis().to_string())
}

fn storm(name: &str, nodes: (usize, usize), round: impl Fn(&mut Round<'_>) + Sync) -> Tally {
    storm_of(name, &setup(), nodes, round)
}

fn storm_of(name: &str, setup: &Setup, nodes: (usize, usize), round: impl Fn(&mut Round<'_>) + Sync) -> Tally {
    let tally = Rounds::from_env().run(name, setup, nodes, round);
    assert!(tally.done > 0.0, "{name}: nothing travelled: {tally:?}");
    tally
}

/// Fails if a fault touched nothing.
fn bit(tally: Tally, how: impl Fn(Tally) -> f64) {
    assert!(how(tally) > 0.0, "the fault touched nothing: {tally:?}");
}

/// What did not come.
fn lost(tally: Tally) -> f64 {
    tally.recomputed_tokens + tally.failed_requests
}

fn direction(round: &mut Round<'_>) -> Towards {
    *round.chance.pick(&[Towards::Dialler, Towards::Target])
}

#[test]
fn prefill_killed_and_started_anew_at_its_address() {
    let tally = storm("prefill killed", (1, 1), |round| {
        let load = round.load_until_moment();
        round.cluster.restart_prefill(0);
        round.serve();
        round.check(load, &[]);
    });
    bit(tally, |tally| tally.sessions_lost);
}

#[test]
fn decode_killed_and_started_anew() {
    let tally = storm("decode killed", (1, 1), |round| {
        let load = round.load_until_moment();
        round.cluster.restart_decode(0);
        round.check(load, &[0]);
        round.serve();
    });
    bit(tally, |tally| tally.sessions_lost);
}

/// What it still had to say comes late, when its receiver's pages have other owners.
#[test]
fn prefill_stopped_and_continued() {
    let tally = storm("prefill stopped", (1, 1), |round| {
        let load = round.load_until_moment();
        round.cluster.prefill()[0].stop();
        if round.chance.one_in(3) {
            // Shorter than any deadline, or longer than some.
            round.last(SILENCE);
        } else {
            round.check(load, &[]);
            round.serve();
            round.cluster.prefill()[0].go_on();
            return round.serve();
        }
        round.cluster.prefill()[0].go_on();
        round.serve();
        round.check(load, &[]);
    });
    bit(tally, lost);
}

#[test]
fn decode_stopped_and_continued() {
    let tally = storm("decode stopped", (1, 1), |round| {
        let load = round.load_until_moment();
        round.cluster.decode()[0].stop();
        // What it reads in place it keeps for as long as it sleeps.
        if round.cluster.shape().in_place || round.chance.one_in(3) {
            round.last(SILENCE);
        } else {
            // Nobody else may pay for a node that sleeps.
            round.cluster.prefill()[0].wait_until_free("prefill");
        }
        round.cluster.decode()[0].go_on();
        round.serve();
        round.check(load, &[]);
    });
    bit(tally, |tally| tally.failed + tally.cancelled);
}

#[test]
fn a_link_cut_and_healed() {
    let tally = storm("link cut", (1, 1), |round| {
        let load = round.load_until_moment();
        for link in round.cluster.links() {
            link.set_refusing(true);
            link.cut_all();
        }
        round.last(2 * SILENCE);
        round.cluster.heal();
        round.serve();
        round.check(load, &[]);
    });
    bit(tally, |tally| tally.sessions_lost);
}

/// Bytes of one direction vanish; those behind the gap come when it heals.
#[test]
fn one_direction_lost() {
    let tally = storm("one direction lost", (1, 1), |round| {
        let towards = direction(round);
        let load = round.load_until_moment();
        round.cluster.links().for_each(|link| link.set_flow(towards, Flow::Vanish));
        round.last(2 * SILENCE);
        round.cluster.heal();
        round.serve();
        round.check(load, &[]);
    });
    bit(tally, |tally| tally.sessions_lost);
}

/// Bytes of one direction, or of both, do not move for a while, and then all of them do.
#[test]
fn bytes_held_and_let_go() {
    let tally = storm("bytes held", (1, 1), |round| {
        let towards = match round.chance.below(3) {
            0 => vec![Towards::Dialler],
            1 => vec![Towards::Target],
            _ => vec![Towards::Dialler, Towards::Target],
        };
        let load = round.load_until_moment();
        for link in round.cluster.links() {
            towards.iter().for_each(|&towards| link.set_flow(towards, Flow::Hold));
        }
        if round.chance.one_in(2) {
            round.check(load, &[]);
            round.serve();
            round.cluster.heal();
            return round.serve();
        }
        round.last(2 * SILENCE);
        round.cluster.heal();
        round.serve();
        round.check(load, &[]);
    });
    bit(tally, lost);
}

#[test]
fn a_link_that_crawls() {
    let tally = storm("crawl", (1, 1), |round| {
        let towards = direction(round);
        let bytes_per_second = *round.chance.pick(&[200, 2_000, 20_000]);
        let load = round.load_until_moment();
        round.cluster.links().for_each(|link| link.set_flow(towards, Flow::Crawl { bytes_per_second }));
        round.check(load, &[]);
        round.serve();
    });
    bit(tally, lost);
}

#[test]
fn a_link_of_long_delay() {
    let tally = storm("delay", (1, 1), |round| {
        let towards = direction(round);
        let delay = Duration::from_millis(round.chance.within(5..400));
        let load = round.load_until_moment();
        round.cluster.links().for_each(|link| link.set_flow(towards, Flow::Delay(delay)));
        round.check(load, &[]);
        round.serve();
    });
    bit(tally, |tally| tally.done);
}

#[test]
fn a_bit_flipped() {
    let tally = storm("bit flipped", (1, 1), |round| {
        let towards = direction(round);
        let load = round.load_until_moment();
        round.cluster.links().for_each(|link| link.flip_next(towards));
        round.serve();
        round.check(load, &[]);
    });
    bit(tally, |tally| tally.digest_mismatches + tally.sessions_lost);
}

#[test]
fn clients_that_hang_up() {
    let tally = storm("clients hang up", (1, 1), |round| {
        let load = round.load_until_moment();
        let gone: Vec<_> = (0..round.chance.within(1..6)).map(|_| round.begin_one(0)).collect();
        round.last(SILENCE / 4);
        drop(gone);
        round.serve();
        round.check(load, &[]);
    });
    bit(tally, |tally| tally.cancelled);
}

/// A node has no descriptor left when strangers crowd in and its own connections are cut.
#[test]
fn descriptors_that_run_out() {
    let tally = storm("no descriptors", (1, 1), |round| {
        let is_prefill = round.chance.one_in(2);
        let spare = round.chance.below(4);
        let load = round.load_until_moment();
        let node = if is_prefill { &round.cluster.prefill()[0] } else { &round.cluster.decode()[0] };
        let address = if is_prefill { node.address() } else { node.http_address() };
        node.limit_descriptors(node.descriptors() as u64 + spare);
        let crowd: Vec<_> = (0..20).map(|_| TcpStream::connect(address).expect("the system queues it")).collect();
        round.cluster.links().for_each(Proxy::cut_all);
        round.last(2 * SILENCE);
        drop(crowd);
        let node = if is_prefill { &round.cluster.prefill()[0] } else { &round.cluster.decode()[0] };
        node.allow_descriptors();
        round.check(load, &[]);
        round.serve();
    });
    bit(tally, |tally| tally.sessions_lost);
}

/// Any of it, to any node or link.
fn anything(round: &mut Round<'_>) {
    let (prefill, decode) = (round.cluster.prefill().len() as u64, round.cluster.decode().len() as u64);
    let (p, d) = (round.chance.below(prefill) as usize, round.chance.below(decode) as usize);
    let links = round.cluster.links().count() as u64;
    let link = round.chance.below(links) as usize;
    let towards = direction(round);
    let fault = round.chance.below(7);
    let load = round.load_until_moment();
    let mut killed = Vec::new();
    match fault {
        0 => round.cluster.restart_prefill(p),
        1 => {
            round.cluster.restart_decode(d);
            killed.push(d);
        }
        2 => round.cluster.prefill()[p].stop(),
        3 => round.cluster.decode()[d].stop(),
        4 => round.cluster.links().skip(link).take(1).for_each(|link| link.set_flow(towards, Flow::Hold)),
        5 => round.cluster.links().skip(link).take(1).for_each(|link| link.set_flow(towards, Flow::Vanish)),
        _ => round.cluster.links().skip(link).take(1).for_each(|link| link.cut_all()),
    }
    let meanwhile = round.load();
    round.last(2 * SILENCE);
    round.cluster.heal();
    round.cluster.prefill().iter().chain(round.cluster.decode()).for_each(|node| node.go_on());
    round.check(load, &killed);
    round.check(meanwhile, &[]);
}

/// The least memory for slabs that there may be, and layouts of which nothing goes without them.
#[test]
fn anything_while_slabs_run_out() {
    let setup = setup()
        .args("--layout LPBNHC")
        .env("KVFERRY_PACKED_RUN_BYTES", "4096")
        .env("KVFERRY_CHUNK_BYTES", "4096")
        .env("KVFERRY_SLAB_POOL_BYTES", "8192");
    let tally = storm_of("no slabs", &setup, (1, 2), anything);
    bit(tally, |tally| tally.slab_waits);
}

#[test]
fn one_prefill_node_and_two_decode_nodes() {
    let tally = storm("1P2D", (1, 2), anything);
    bit(tally, |tally| tally.sessions_lost + lost(tally));
}

#[test]
fn two_prefill_nodes_and_one_decode_node() {
    let tally = storm("2P1D", (2, 1), anything);
    bit(tally, |tally| tally.sessions_lost + lost(tally));
}

#[test]
fn two_prefill_nodes_and_two_decode_nodes() {
    let tally = storm("2P2D", (2, 2), anything);
    bit(tally, |tally| tally.sessions_lost + lost(tally));
}
