//! UCX between two processes, over its tcp: `integration-tests/ucx/run.sh` finds libucp and runs these.

mod ucx_pair;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_protocol::pages::Extent;
use kvferry_transport::testing::PATIENCE;
use kvferry_transport::ucx::{RemoteWindow, UcxEvent};
use kvferry_transport::{DeviceAccess, Memory, MemoryKind};
use rustix::process::{Pid, Signal, kill_process};
use ucx_pair::{
    CLOSE, COMPARE, COUNT, FILL, FLOOD, GRANT, GRANT_BLOCKS, HEAR, Other, PUT, STOP, Side, arena_bytes, blocks,
    pattern, random_write, serve, used, write,
};

fn rounds(variable: &str, usual: u64) -> u64 {
    std::env::var(variable).map_or(usual, |rounds| rounds.parse().expect("a number of rounds"))
}

fn number(at: &[u8]) -> u64 {
    std::str::from_utf8(at).unwrap().parse().unwrap()
}

/// A moment from 0 to 20 ms, another one for each seed.
fn moment(seed: u64) -> Duration {
    Duration::from_micros((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) % 20_000)
}

/// Takes notes until a moment is over.
fn pass(side: &mut Side, time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        side.drop_notes();
        std::thread::yield_now();
    }
}

#[test]
#[ignore = "needs libucp"]
fn the_other_process() {
    serve();
}

#[test]
#[ignore = "needs libucp"]
fn scattered_bytes_arrive_exactly_in_both_directions() {
    let (mut side, mut other) = (Side::new(), Other::start());
    other.join(&mut side);
    for seed in 1..=rounds("KVFERRY_UCX_WRITES", 40) {
        let random = random_write(seed);
        side.fill(seed);
        other.ask(FILL, &(seed + 1000).to_le_bytes());
        let window = Arc::new(RemoteWindow::decode(&other.ask(GRANT, &seed.to_le_bytes())).unwrap());
        let post = side.post(&write(random.source.clone(), random.extents.clone()), &window, b"here").unwrap();
        side.wait_posted(post).unwrap();
        let differing = other.ask(COMPARE, &[seed.to_le_bytes(), (seed + 1000).to_le_bytes()].concat());
        assert_eq!(number(&differing), 0, "seed {seed}, to the other");

        other.ask(FILL, &(seed + 2000).to_le_bytes());
        let window = side.node.window(&random.window).unwrap();
        other.ask(PUT, &[&seed.to_le_bytes()[..], &window].concat());
        assert_eq!(&side.wait_noted()[..], b"put");
        let want = random.apply(&pattern(seed + 2000), &pattern(seed));
        assert!(side.memory.read(0, arena_bytes()) == want, "seed {seed}, from the other");
    }
}

#[test]
#[ignore = "needs libucp"]
fn a_note_comes_after_all_bytes_of_its_post() {
    const POST_BYTES: u64 = 256 << 10;
    let (mut side, mut other) = (Side::new(), Other::start());
    other.join(&mut side);
    for (seed, block_bytes) in [(1u64, 512u64), (2, 16 << 10), (3, 256 << 10)] {
        side.fill(seed);
        let window = other.ask(GRANT_BLOCKS, &block_bytes.to_le_bytes());
        let window = Arc::new(RemoteWindow::decode(&window).unwrap());
        let posts = arena_bytes() as u64 / POST_BYTES;
        other.tell(HEAR, &[seed.to_le_bytes(), posts.to_le_bytes()].concat());
        let mut live = Vec::new();
        for post in 0..posts {
            let at = post * POST_BYTES;
            let source = blocks(block_bytes, at / block_bytes..(at + POST_BYTES) / block_bytes);
            let note = [at.to_le_bytes(), POST_BYTES.to_le_bytes()].concat();
            live.push(
                side.post(&write(vec![source], vec![Extent::contiguous(at, POST_BYTES)]), &window, &note).unwrap(),
            );
        }
        for post in live {
            side.wait_posted(post).unwrap();
        }
        assert_eq!(number(&other.answer(HEAR)), 0, "stretches that differed, blocks of {block_bytes}");
    }
}

#[test]
#[ignore = "needs libucp"]
fn a_node_shuts_down_under_a_live_link() {
    let (mut side, mut other) = (Side::new(), Other::start());
    other.join(&mut side);
    // The peer lives, and nothing is under way: nothing but the shutdown moves the node's thread.
    side.node.shutdown();
    side.wait_down();
    other.ask(CLOSE, &[]);
}

#[test]
#[ignore = "needs libucp"]
fn memory_of_a_device_is_refused_with_what_ucx_says_of_it() {
    let side = Side::new();
    let memory = Memory { kind: MemoryKind::Device(DeviceAccess::default()), ..side.memory.memory() };
    #[expect(unsafe_code, reason = "registering is the caller's promise")]
    // SAFETY: the node is dropped before the arena, and refuses it.
    let refused = unsafe { side.node.register(memory) }.unwrap_err().to_string();
    assert!(refused.contains("host memory only") && refused.contains("can put host"), "{refused}");
}

#[test]
#[ignore = "needs libucp"]
fn only_transports_that_the_receiver_can_shut_carry_a_link_on_one_host() {
    let (mut side, mut other) = (Side::new(), Other::start());
    let facts = side.node.facts().clone();
    // Shared memory is there, so that leaving it out is a deed.
    assert!(
        facts.found.iter().any(|found| found.starts_with("posix/") || found.starts_with("cma/")),
        "{:?}",
        facts.found
    );
    let (ours, theirs) = other.join(&mut side);
    let theirs: Vec<String> = theirs.split(',').map(str::to_owned).collect();
    for lane in ours.iter().chain(&theirs) {
        let transport = lane.split('/').next().unwrap();
        assert!(["tcp", "rc_", "ud_", "dc_"].iter().any(|fenced| transport.starts_with(fenced)), "{lane}");
    }
}

/// Lets the other process put into this one's memory, and at some moment revokes and poisons the pages. Returns how many of the
/// rounds have a byte that landed after that.
fn late_bytes(rounds: u64, fence: impl Fn(&Side)) -> u64 {
    const POISON: u8 = 0xa5;
    let (mut side, mut other) = (Side::new(), Other::start());
    other.ask(FILL, &7u64.to_le_bytes());
    let pid = Pid::from_raw(other.pid() as i32).unwrap();
    let mut late = 0;
    for round in 0..rounds {
        other.join(&mut side);
        let window = side.node.window(&blocks(64 << 10, 0..arena_bytes() as u64 >> 16)).unwrap();
        other.tell(FLOOD, &window);
        side.wait_noted();
        pass(&mut side, moment(round));
        // Every other time the sender stands still in the middle of whatever it was doing, and goes on after the revoke.
        let is_stopped = round % 2 == 1;
        if is_stopped {
            kill_process(pid, Signal::STOP).unwrap();
        }
        fence(&side);
        side.memory.fill(0, arena_bytes(), POISON);
        if is_stopped {
            kill_process(pid, Signal::CONT).unwrap();
        }
        pass(&mut side, moment(round + 1));
        other.tell(STOP, &[]);
        other.answer(STOP);
        late += u64::from(!side.memory.is_all(0, arena_bytes(), POISON));
        let link = side.link();
        side.node.fence(link);
        side.wait_down();
        other.ask(CLOSE, &[]);
        side.drop_notes();
    }
    late
}

#[test]
#[ignore = "needs libucp"]
fn nothing_lands_after_a_fence() {
    let late = late_bytes(rounds("KVFERRY_UCX_REVOKES", 60), |side| side.node.fence(side.link()));
    assert_eq!(late, 0, "rounds with late bytes");
}

#[test]
#[ignore = "needs libucp"]
fn late_bytes_would_be_seen() {
    assert!(late_bytes(4, |_| ()) > 0, "without a fence the other process goes on writing");
}

/// Posts all of the arena into the window, a MiB each, as long as the link takes it; gives how many.
fn post_all(side: &mut Side, window: &Arc<RemoteWindow>) -> usize {
    const POST_BYTES: u64 = 1 << 20;
    let each = |post: u64| {
        let source = blocks(16 << 10, post * 64..(post + 1) * 64);
        let write = write(vec![source], vec![Extent::contiguous(post * POST_BYTES, POST_BYTES)]);
        side.post(&write, window, b"").is_ok()
    };
    (0..arena_bytes() as u64 / POST_BYTES).map(each).filter(|&is_taken| is_taken).count()
}

/// Waits until the link is down and as many posts ended; gives how long that took.
fn wait_all_ended(side: &mut Side, mut live: usize, within: Duration) -> Duration {
    let start = Instant::now();
    let mut is_down = false;
    while live > 0 || !is_down {
        assert!(start.elapsed() < within, "{live} posts live, down: {is_down}");
        for event in side.wait_some() {
            match event {
                UcxEvent::Posted { .. } => live -= 1,
                UcxEvent::Down { .. } => is_down = true,
                _ => {}
            }
        }
    }
    side.link = None;
    start.elapsed()
}

#[test]
#[ignore = "needs libucp"]
fn a_killed_peer_ends_every_wait() {
    let within = rounds("KVFERRY_UCX_WITHIN_MS", PATIENCE.as_millis() as u64);
    let (mut side, mut longest) = (Side::new(), Duration::ZERO);
    for round in 0..rounds("KVFERRY_UCX_KILLS", 12) {
        let mut other = Other::start();
        other.join(&mut side);
        // It puts (but where UCX would abort this process), this side puts, or nobody does.
        let mut live = 0;
        if round % 3 == 0 && side.is_native {
            let window = side.node.window(&blocks(64 << 10, 0..arena_bytes() as u64 >> 16)).unwrap();
            other.tell(FLOOD, &window);
            side.wait_noted();
        }
        if round % 3 == 1 {
            let window = other.ask(GRANT_BLOCKS, &(16u64 << 10).to_le_bytes());
            live = post_all(&mut side, &Arc::new(RemoteWindow::decode(&window).unwrap()));
        }
        pass(&mut side, moment(round));
        other.kill();
        if side.is_native {
            // A device that has nothing to send, any more, does not learn of it, and UCX asks only now and then: the session's control
            // lane, which breaks at once, ends the link.
            side.node.close(side.link(), "its session is over");
        }
        longest = longest.max(wait_all_ended(&mut side, live, Duration::from_millis(within)));
    }
    println!("the longest wait for the end of everything: {longest:?}");
    // And this side is as good as new.
    let mut other = Other::start();
    other.join(&mut side);
    let window = other.ask(GRANT_BLOCKS, &(16u64 << 10).to_le_bytes());
    let live = post_all(&mut side, &Arc::new(RemoteWindow::decode(&window).unwrap()));
    assert_eq!(live, arena_bytes() >> 20);
    for post in side.last_posts(live) {
        side.wait_posted(post).unwrap();
    }
}

#[test]
#[ignore = "needs libucp"]
fn a_cancelled_post_ends_once_and_its_source_is_let_go() {
    let (mut side, mut other) = (Side::new(), Other::start());
    other.join(&mut side);
    let window = other.ask(GRANT_BLOCKS, &(16u64 << 10).to_le_bytes());
    let window = Arc::new(RemoteWindow::decode(&window).unwrap());
    for round in 0..20 {
        let live = post_all(&mut side, &window);
        assert_eq!(live, arena_bytes() >> 20);
        let posts = side.last_posts(live);
        pass(&mut side, moment(round) / 4);
        for &post in posts.iter().rev() {
            side.node.cancel(side.link(), post);
        }
        // Nothing reads it any more.
        side.fill(round);
        for post in posts {
            let outcome = side.wait_posted(post);
            assert!(matches!(outcome, Ok(()) | Err(kvferry_transport::ucx::UcxError::Cancelled)), "{outcome:?}");
        }
    }
}

#[test]
#[ignore = "needs libucp"]
fn a_hundred_sessions_leave_nothing_behind() {
    const WARM_UP: u64 = 30;
    let (mut side, mut other) = (Side::new(), Other::start());
    let mut before = None;
    for session in 0..rounds("KVFERRY_UCX_SESSIONS", 100) + WARM_UP {
        other.join(&mut side);
        let window = other.ask(GRANT_BLOCKS, &(16u64 << 10).to_le_bytes());
        let live = post_all(&mut side, &Arc::new(RemoteWindow::decode(&window).unwrap()));
        if session % 2 == 0 || !side.is_native {
            for post in side.last_posts(live) {
                side.wait_posted(post).unwrap();
            }
        }
        let link = side.link();
        side.node.fence(link);
        side.wait_down();
        other.ask(CLOSE, &[]);
        side.drop_all();
        if session == WARM_UP {
            before = Some((used(), other.ask(COUNT, &[])));
        }
    }
    let (before, theirs_before) = before.unwrap();
    let theirs_before = String::from_utf8(theirs_before.to_vec()).unwrap();
    let theirs = String::from_utf8(other.ask(COUNT, &[]).to_vec()).unwrap();
    println!("descriptors and resident KiB: ours {before} to {}, the other's {theirs_before} to {theirs}", used());
    for (before, after) in [(before, used()), (theirs_before, theirs)] {
        let numbers = |text: &str| -> Vec<u64> { text.split(' ').map(|number| number.parse().unwrap()).collect() };
        let (before, after) = (numbers(&before), numbers(&after));
        assert_eq!(before[0], after[0], "descriptors");
        // A link's worker alone takes more than 300 KiB: a hundred that leak would be 30 MiB.
        assert!(after[1] < before[1] + (8 << 10), "resident KiB: {} to {}", before[1], after[1]);
    }
}
