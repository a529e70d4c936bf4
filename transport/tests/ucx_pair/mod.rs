//! Two processes with a UCX link between them: the test, and a child that does what it is told over a plain socket.

use std::io::{Read, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvferry_protocol::RegionId;
use kvferry_protocol::pages::{Extent, Pages, Piece};
use kvferry_transport::testing::{Arena, PATIENCE, ScatteredWrite, scattered_write};
use kvferry_transport::ucx::{LinkId, RemoteWindow, UcxConfig, UcxConfigFile, UcxError, UcxEvent, UcxEvents, UcxNode};
use kvferry_transport::{GrantKey, Source, Write};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Bytes of each side's memory, at least 1 MiB; less than usual where everything is emulated.
pub(crate) fn arena_bytes() -> usize {
    std::env::var("KVFERRY_UCX_ARENA_MIB").map_or(4 << 20, |mib| mib.parse::<usize>().expect("a number of MiB") << 20)
}

const PORT_VARIABLE: &str = "KVFERRY_UCX_TEST_PORT";

/// One side: a node, its memory, and at most one link.
pub(crate) struct Side {
    pub(crate) node: UcxNode,
    pub(crate) memory: Arena,
    pub(crate) link: Option<LinkId>,
    /// Whether the last link's puts are the device's. Where they are not, UCX aborts a receiver whose sender dies or gives up.
    pub(crate) is_native: bool,
    events: UcxEvents,
    waiting: Vec<UcxEvent>,
    next_post: u64,
}

impl Side {
    pub(crate) fn new() -> Self {
        let events = UcxEvents::new(1 << 16);
        let node = UcxNode::start(config(), events.clone()).expect("UCX starts");
        let memory = Arena::new(arena_bytes(), 0);
        #[expect(unsafe_code, reason = "registering is the caller's promise")]
        // SAFETY: the node is dropped before the arena, which is behind atomics.
        let region = unsafe { node.register(memory.memory()) }.expect("UCX registers memory");
        assert_eq!(region, RegionId::new(0));
        Self { node, memory, link: None, is_native: false, events, waiting: Vec::new(), next_post: 0 }
    }

    pub(crate) fn open(&mut self) -> Bytes {
        let (link, card) = self.node.open().expect("a link");
        self.link = Some(link);
        card
    }

    pub(crate) fn link(&self) -> LinkId {
        self.link.expect("a link is open")
    }

    /// Connects to the other's card and waits for its word; gives what carries the link.
    pub(crate) fn connect(&mut self, card: &Bytes) -> Vec<String> {
        let link = self.link();
        self.node.connect(link, card).expect("a card");
        match self.wait("Ready", |event| matches!(event, UcxEvent::Ready { .. } | UcxEvent::Down { .. })) {
            UcxEvent::Ready { lanes, .. } => {
                self.is_native = lanes.iter().any(|lane| lane.starts_with("rc_") || lane.starts_with("dc_"));
                lanes
            }
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn post(&mut self, write: &Write, window: &Arc<RemoteWindow>, note: &[u8]) -> Result<u64, UcxError> {
        self.next_post += 1;
        let note = Bytes::copy_from_slice(note);
        self.node.post(self.link(), self.next_post, write, window, note).map(|()| self.next_post)
    }

    pub(crate) fn wait_posted(&mut self, id: u64) -> Result<(), UcxError> {
        match self.wait("Posted", |event| matches!(event, UcxEvent::Posted { post, .. } if *post == id)) {
            UcxEvent::Posted { outcome, .. } => outcome,
            _ => unreachable!("the filter takes only Posted"),
        }
    }

    pub(crate) fn wait_noted(&mut self) -> Bytes {
        match self.wait("Noted", |event| matches!(event, UcxEvent::Noted { .. })) {
            UcxEvent::Noted { note, .. } => note,
            _ => unreachable!("the filter takes only Noted"),
        }
    }

    pub(crate) fn wait_down(&mut self) -> UcxError {
        let of = self.link();
        match self.wait("Down", |event| matches!(event, UcxEvent::Down { link, .. } if *link == of)) {
            UcxEvent::Down { reason, .. } => {
                self.link = None;
                reason
            }
            _ => unreachable!("the filter takes only Down"),
        }
    }

    /// Waits for the first event that `wanted` likes; the others stay for later.
    pub(crate) fn wait(&mut self, what: &str, wanted: impl Fn(&UcxEvent) -> bool) -> UcxEvent {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(at) = self.waiting.iter().position(&wanted) {
                return self.waiting.remove(at);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{what} did not come; there are {:?}", self.waiting);
            self.events.poll(&mut self.waiting, left);
        }
    }

    /// Forgets the notes that are there now.
    pub(crate) fn drop_notes(&mut self) {
        self.events.poll(&mut self.waiting, Duration::ZERO);
        self.waiting.retain(|event| !matches!(event, UcxEvent::Noted { .. }));
    }

    /// Forgets all events that are there now.
    pub(crate) fn drop_all(&mut self) {
        self.events.poll(&mut self.waiting, Duration::ZERO);
        self.waiting.clear();
    }

    /// The numbers of the posts that were made last.
    pub(crate) fn last_posts(&self, count: usize) -> Vec<u64> {
        (self.next_post + 1 - count as u64..=self.next_post).collect()
    }

    pub(crate) fn wait_some(&mut self) -> Vec<UcxEvent> {
        if self.waiting.is_empty() {
            self.events.poll(&mut self.waiting, PATIENCE);
        }
        std::mem::take(&mut self.waiting)
    }

    /// Fills the arena with bytes that depend on the seed.
    pub(crate) fn fill(&self, seed: u64) {
        self.memory.write(0, &pattern(seed));
    }
}

/// UCX's tcp is all that most machines have, and its puts are emulated.
fn config() -> UcxConfig {
    UcxConfig::try_from(UcxConfigFile { emulated_puts: true, ..UcxConfigFile::default() })
        .expect("a legal configuration")
}

/// What `fill` stores.
pub(crate) fn pattern(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let word = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..arena_bytes() / 8).flat_map(word).collect()
}

/// The same random write for the same seed, in any process.
pub(crate) fn random_write(seed: u64) -> ScatteredWrite {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), random);
    scattered_write(arena_bytes() as u64).new_tree(&mut runner).expect("a write").current()
}

pub(crate) fn blocks(block_bytes: u64, numbers: impl IntoIterator<Item = u64>) -> Pages {
    let piece = Piece { region: RegionId::new(0), offset: 0, loops: vec![], run_bytes: block_bytes };
    Pages { bases: numbers.into_iter().map(|number| number * block_bytes).collect(), pieces: vec![piece] }
}

pub(crate) fn write(source: Vec<Pages>, extents: Vec<Extent>) -> Write {
    Write { grant: GrantKey(0), sequence: 0, extents, source: Source::Pages(source), notification: Bytes::new() }
}

/// Messages on a plain socket: a word and its bytes.
pub(crate) struct Wire(TcpStream);

impl Wire {
    fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self(stream)
    }

    pub(crate) fn say(&mut self, word: u8, bytes: &[u8]) -> std::io::Result<()> {
        let head = [&[word][..], &(bytes.len() as u32).to_le_bytes()].concat();
        self.0.write_all(&[&head, bytes].concat())
    }

    pub(crate) fn hear(&mut self) -> std::io::Result<(u8, Bytes)> {
        let mut head = [0; 5];
        self.0.read_exact(&mut head)?;
        let mut bytes = vec![0; u32::from_le_bytes(head[1..].try_into().unwrap()) as usize];
        self.0.read_exact(&mut bytes)?;
        Ok((head[0], bytes.into()))
    }

    /// Whether a word waits to be heard.
    pub(crate) fn is_spoken_to(&self) -> bool {
        self.0.set_nonblocking(true).unwrap();
        let found = self.0.peek(&mut [0]);
        self.0.set_nonblocking(false).unwrap();
        !matches!(found, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
    }
}

/// The other process.
pub(crate) struct Other {
    child: Child,
    wire: Wire,
}

impl Other {
    /// Starts this test's program again, to run the child's test alone.
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_other_process", "--ignored", "--nocapture", "--test-threads=1"])
            .env(PORT_VARIABLE, port.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self { child, wire: Wire::new(listener.accept().unwrap().0) }
    }

    pub(crate) fn ask(&mut self, word: u8, bytes: &[u8]) -> Bytes {
        self.tell(word, bytes);
        self.answer(word)
    }

    pub(crate) fn tell(&mut self, word: u8, bytes: &[u8]) {
        self.wire.say(word, bytes).unwrap();
    }

    pub(crate) fn answer(&mut self, word: u8) -> Bytes {
        let (heard, bytes) = self.wire.hear().unwrap();
        assert_eq!((heard as char, heard), (word as char, word), "{}", String::from_utf8_lossy(&bytes));
        bytes
    }

    /// Makes a link with it; gives what carries each end.
    pub(crate) fn join(&mut self, side: &mut Side) -> (Vec<String>, String) {
        let card = side.open();
        let theirs = self.ask(OPEN, &[]);
        self.tell(CONNECT, &card);
        let lanes = side.connect(&theirs);
        (lanes, String::from_utf8(self.answer(CONNECT).to_vec()).unwrap())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have been killed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes a link: answered with the child's card.
pub(crate) const OPEN: u8 = b'O';
/// Connects to this card; answered with the lanes when the link is ready.
pub(crate) const CONNECT: u8 = b'C';
/// Fills the arena with the seed's bytes.
pub(crate) const FILL: u8 = b'F';
/// Grants the window of the seed's write; answered with it.
pub(crate) const GRANT: u8 = b'G';
/// Grants blocks of so many bytes, all of the arena; answered with the window.
pub(crate) const GRANT_BLOCKS: u8 = b'B';
/// Waits for the note of the seed's write and compares the arena; answered with how many bytes differ.
pub(crate) const COMPARE: u8 = b'E';
/// Hears notes, each of which names a stretch of the arena, for as many as are told, and compares each with the seed's bytes
/// when it is heard; answered with how many stretches differed.
pub(crate) const HEAR: u8 = b'H';
/// Puts the seed's write into this window; answered when it ended.
pub(crate) const PUT: u8 = b'P';
/// Puts all of its arena into this window, over and over, until its link is down or it is told to stop.
pub(crate) const FLOOD: u8 = b'L';
/// Stops putting; answered with how many posts ended well.
pub(crate) const STOP: u8 = b'S';
/// Answered with what `used` says.
pub(crate) const COUNT: u8 = b'N';
/// Closes its link, if it has one, and waits for the end; answered then.
pub(crate) const CLOSE: u8 = b'X';

/// What the child does.
pub(crate) fn serve() {
    let Ok(port) = std::env::var(PORT_VARIABLE) else { return };
    let stream = TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
    let mut wire = Wire::new(stream);
    let mut side = Side::new();
    // The parent's end of the socket is the end of the child, however the parent ended.
    while let Ok((word, bytes)) = wire.hear() {
        let answer = obey(&mut side, &mut wire, word, &bytes);
        if answer.is_some_and(|answer| wire.say(word, &answer).is_err()) {
            return;
        }
    }
}

fn obey(side: &mut Side, wire: &mut Wire, word: u8, bytes: &Bytes) -> Option<Bytes> {
    let number = || u64::from_le_bytes(bytes[..8].try_into().unwrap());
    Some(match word {
        OPEN => side.open(),
        CONNECT => side.connect(bytes).join(",").into(),
        FILL => {
            side.fill(number());
            Bytes::new()
        }
        GRANT => side.node.window(&random_write(number()).window).unwrap(),
        GRANT_BLOCKS => {
            let block_bytes = number();
            side.node.window(&blocks(block_bytes, 0..arena_bytes() as u64 / block_bytes)).unwrap()
        }
        COMPARE => {
            side.wait_noted();
            let before = pattern(u64::from_le_bytes(bytes[8..].try_into().unwrap()));
            let want = random_write(number()).apply(&pattern(number()), &before);
            let got = side.memory.read(0, arena_bytes());
            let differing = want.iter().zip(got).filter(|&(want, got)| *want != got).count();
            differing.to_string().into()
        }
        HEAR => {
            let want = pattern(number());
            let notes = u64::from_le_bytes(bytes[8..].try_into().unwrap());
            let mut differing = 0;
            for _ in 0..notes {
                let note = side.wait_noted();
                let at = u64::from_le_bytes(note[..8].try_into().unwrap()) as usize;
                let count = u64::from_le_bytes(note[8..].try_into().unwrap()) as usize;
                differing += u64::from(side.memory.read(at, count) != want[at..at + count]);
            }
            differing.to_string().into()
        }
        PUT => {
            let window = Arc::new(RemoteWindow::decode(&bytes.slice(8..)).unwrap());
            let random = random_write(number());
            let post = side.post(&write(random.source, random.extents), &window, b"put").unwrap();
            side.wait_posted(post).unwrap();
            Bytes::new()
        }
        FLOOD => {
            let posted = flood(side, wire, bytes);
            let (word, _) = wire.hear().ok()?;
            assert_eq!(word, STOP);
            wire.say(STOP, posted.to_string().as_bytes()).ok()?;
            return None;
        }
        COUNT => used().into(),
        CLOSE => {
            if let Some(link) = side.link {
                side.node.close(link, "told to");
                side.wait_down();
            }
            side.drop_all();
            Bytes::new()
        }
        other => panic!("{other}"),
    })
}

/// Posts until the link is down or somebody speaks; gives how many posts ended well.
fn flood(side: &mut Side, wire: &Wire, window: &Bytes) -> u64 {
    const BLOCK_BYTES: u64 = 64 << 10;
    const POST_BYTES: u64 = 1 << 20;
    const DEPTH: usize = 8;
    let window = Arc::new(RemoteWindow::decode(window).unwrap());
    let (mut posted, mut live, mut at) = (0, 0, 0);
    while !wire.is_spoken_to() {
        while live < DEPTH {
            let first = at / BLOCK_BYTES;
            let source = blocks(BLOCK_BYTES, first..first + POST_BYTES / BLOCK_BYTES);
            let extents = vec![Extent::contiguous(at, POST_BYTES)];
            if side.post(&write(vec![source], extents), &window, b"").is_err() {
                return posted;
            }
            live += 1;
            at = (at + POST_BYTES) % arena_bytes() as u64;
        }
        for event in side.wait_some() {
            match event {
                UcxEvent::Posted { outcome, .. } => {
                    live -= 1;
                    posted += u64::from(outcome.is_ok());
                }
                UcxEvent::Down { .. } => {
                    side.link = None;
                    return posted;
                }
                _ => {}
            }
        }
    }
    posted
}

/// How many descriptors this process has open, and how many KiB it has resident.
pub(crate) fn used() -> String {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    format!("{descriptors} {}", resident.trim().trim_end_matches(" kB"))
}
