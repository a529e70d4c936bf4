//! The process that is all the peers of a node.

use std::io::{BufRead, Write as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvferry_transport::{Event, Source, Transport, Write};

use super::{case, probe, raise_file_limit};
use crate::args::BenchArgs;
use crate::bench::arena::Arena;
use crate::bench::case::{Case, Span};
use crate::bench::endpoint::{self, Setup};
use crate::bench::words::Word;
use crate::bench::{content, credentials};
use crate::error::{CliError, with_causes};

/// The process of the peers; ends with the value.
pub(super) struct Crowd(Child);

impl Crowd {
    pub(super) fn start(options: &BenchArgs, address: &str, key: &str) -> Result<Self, CliError> {
        let program = std::env::current_exe().map_err(CliError::io("the path of this program"))?;
        let case = case(options)?;
        let mut command = Command::new(program);
        command.args(["bench", "--connect", address, "--transport", options.transport.name()]);
        command.args(["--lanes", &options.lanes.to_string(), "--memory", &options.memory.0.to_string()]);
        command.args(["--block", &case.block_bytes.to_string(), "--batch", &case.batch.to_string()]);
        command.args(options.tls.then_some("--tls"));
        command.args(["--crowd", &options.peers.to_string(), &options.idle_peers.to_string()]);
        command.env(credentials::VARIABLE, key).stdin(Stdio::piped());
        command.spawn().map(Self).map_err(CliError::io("the peers' process cannot be started"))
    }

    pub(super) fn say(&mut self, word: &str) -> Result<(), CliError> {
        let input = self.0.stdin.as_mut().expect("it was piped");
        writeln!(input, "{word}").and_then(|()| input.flush()).map_err(CliError::io("the peers' process ended"))
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Is the peers: does what its input says, a word a line, and ends with it.
pub(crate) fn be(options: &BenchArgs, counts: &[u32]) -> Result<(), CliError> {
    raise_file_limit();
    let credentials = credentials::of_key(credentials::given(options.key.as_deref())?, options.tls)?;
    let setup = Setup { data_threads: 1, ..Setup::new(Some(options.transport), options.lanes, credentials) };
    let address = options.connect.as_deref().unwrap_or_default();
    let address = endpoint::parse_address("--connect", address)?;
    let (case, mut idle) = (case(options)?, Vec::new());
    for line in std::io::stdin().lock().lines() {
        match line.map_err(CliError::io("standard input"))?.as_str() {
            "probe" => {
                let transport = endpoint::open(&setup, "probe")?;
                transport.connect(&address).map_err(CliError::transport("cannot dial the node"))?;
                let shareable = setup.is_shareable();
                let receive = move || {
                    if let Err(error) = probe::receive(&*transport, shareable) {
                        eprintln!("kvferry: the probe: {}", with_causes(&error));
                    }
                };
                let thread = std::thread::Builder::new().name("probe".to_owned());
                thread.spawn(receive).map_err(CliError::io("a thread"))?;
            }
            "idle" => {
                for place in 0..counts[1] {
                    let transport = endpoint::open(&setup, &format!("idle-{place}"))?;
                    transport.connect(&address).map_err(CliError::transport("cannot dial the node"))?;
                    idle.push(transport);
                }
            }
            "busy" => {
                for place in 0..counts[0] {
                    let transport = endpoint::open(&setup, &format!("busy-{place}"))?;
                    transport.connect(&address).map_err(CliError::transport("cannot dial the node"))?;
                    let (case, shareable) = (case.clone(), setup.is_shareable());
                    let write = move || {
                        if let Err(error) = write_on(&*transport, &case, place, shareable) {
                            eprintln!("kvferry: busy peer {place}: {}", with_causes(&error));
                        }
                    };
                    let thread = std::thread::Builder::new().name(format!("busy-{place}"));
                    thread.spawn(write).map_err(CliError::io("a thread"))?;
                }
            }
            other => return Err(CliError::Word { found: other.to_owned() }),
        }
    }
    // Threads are cut off where they are: the node is done with them.
    std::process::exit(0)
}

/// Writes its blocks into its window until the session ends.
fn write_on(transport: &dyn Transport, case: &Case, place: u32, shareable: bool) -> Result<(), CliError> {
    let arena = Arc::new(Arena::new(transport, case.bytes(), shareable)?);
    content::fill_from(&mut arena.own(), case.block_bytes, place * case.batch);
    let outcome = write_from(transport, case, &arena);
    // Before the memory goes, however it ended.
    transport.shutdown();
    outcome
}

fn write_from(transport: &dyn Transport, case: &Case, arena: &Arc<Arena>) -> Result<(), CliError> {
    let lent = arena.lend();
    let blocks: Vec<u32> = (0..case.batch).collect();
    let (mut events, mut node, mut sequence, mut under_way) = (Vec::new(), None, 0, 0);
    loop {
        transport.poll(&mut events, Duration::from_secs(1));
        for event in events.drain(..) {
            match event {
                Event::Message { peer, message } => match Word::decode(&message)? {
                    Word::Opened { grant } => node = Some((peer, grant)),
                    other => return Err(other.unexpected()),
                },
                Event::Posted { .. } => under_way -= 1,
                Event::Down { peer: Some(_), .. } => return Ok(()),
                _ => {}
            }
        }
        while let Some((peer, grant)) = node.as_ref().filter(|_| under_way < case.posts) {
            let write = Write {
                grant: *grant,
                sequence,
                extents: vec![Span { first: 0, count: case.batch }.extent(case.block_bytes)],
                source: Source::Pages(vec![case.pages(lent.id(), &blocks)]),
                notification: Bytes::new(),
            };
            if transport.post(peer, write).is_err() {
                // The session is over; its event is on its way.
                return Ok(());
            }
            (sequence, under_way) = (sequence + 1, under_way + 1);
        }
    }
}
