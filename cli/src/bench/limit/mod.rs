//! What a path can carry without a transport, measured in turn with it.

mod memcpy;
mod sockets;
mod tools;

use std::io;
use std::time::Instant;

pub(crate) use memcpy::Memcpy;
pub(crate) use sockets::{Family, Listener, Memory, Sockets};

use tools::{Tool, Which};

use super::case::Span;
use super::endpoint::ip_of;
use super::station::Station;
use super::words::Word;
use crate::args::{Direction, Kind};
use crate::error::CliError;

/// The limit of one case.
pub(crate) enum Limit {
    /// Plain sockets to the other side: so many at once.
    Sockets { sockets: Sockets, counts: &'static [u32], name: &'static str },
    /// One thread copies the same blocks inside one process.
    Memcpy(Memcpy),
    /// A tool of somebody else, between two processes of its own.
    Tool(Tool),
    /// None can be measured here, and why.
    None(String),
}

impl Limit {
    /// Makes what the limit of `kind` needs, together with the other side.
    pub(crate) fn open(
        kind: Kind,
        station: &mut Station,
        address: &kvferry_transport::PeerAddress,
    ) -> Result<Self, CliError> {
        let (family, counts, name): (_, &'static [u32], _) = match (kind, ip_of(address)) {
            (Kind::Tcp, Some(ip)) => (Family::Tcp { ip, near: ip.is_loopback() }, &[1, 2, 4], "raw TCP sockets"),
            (Kind::Uds, _) => (Family::Unix, &[1, 2], "raw Unix sockets"),
            (Kind::Shm | Kind::Cma, _) => {
                return Ok(Self::Memcpy(Memcpy::new(&station.ground().case, kind == Kind::Shm)?));
            }
            (Kind::Ucx, Some(ip)) if ip.is_loopback() => return Ok(Self::tool(Which::Ucx, station)),
            (Kind::Rdma, Some(ip)) if ip.is_loopback() => return Ok(Self::tool(Which::Verbs, station)),
            (kind, _) => {
                let why = "is measured only where both sides are on one machine: run its tool by hand, on both";
                return Ok(Self::None(format!("the limit of {} {why}", kind.name())));
            }
        };
        let count = counts.iter().copied().max().unwrap_or(1);
        let near = !matches!(family, Family::Tcp { near: false, .. });
        station.say(&Word::Listen { sockets: count, near, unix: family == Family::Unix })?;
        let address = match station.hear("listen for plain sockets")? {
            Word::Listening { address } => address,
            other => return Err(other.unexpected()),
        };
        let sockets = Sockets::connect(family, &address, count)?;
        Ok(Self::Sockets { sockets, counts, name })
    }

    fn tool(which: Which, station: &Station) -> Self {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let tool = Tool::find(which, &station.ground().case, &paths).and_then(Tool::like_ours);
        tool.map_or_else(Self::None, Self::Tool)
    }

    /// In how many ways it is measured; the best one counts.
    pub(crate) fn ways(&self) -> usize {
        match self {
            Self::Sockets { counts, .. } => counts.len(),
            Self::Memcpy(_) | Self::Tool(_) => 1,
            Self::None(_) => 0,
        }
    }

    /// What one way is called.
    pub(crate) fn name(&self, way: usize) -> String {
        match self {
            Self::Sockets { counts, name, .. } => {
                format!("{} {}", counts[way], if counts[way] == 1 { &name[..name.len() - 1] } else { name })
            }
            Self::Memcpy(_) => "memcpy, one thread, the same blocks, cold".to_owned(),
            Self::Tool(tool) => tool.name().to_owned(),
            Self::None(why) => why.clone(),
        }
    }

    /// Moves a pass in one way; GB/s.
    pub(crate) fn pass(&mut self, way: usize, station: &mut Station) -> Result<f64, CliError> {
        match self {
            Self::Sockets { sockets, counts, .. } => stream(sockets, counts[way], station),
            Self::Memcpy(memcpy) => Ok(memcpy.pass()),
            Self::Tool(tool) => tool.pass(),
            Self::None(_) => Ok(0.0),
        }
    }

    /// Times `count` requests of `blocks` blocks; microseconds. Nothing if the limit has no requests.
    pub(crate) fn requests(&mut self, station: &mut Station, blocks: u32, count: u32) -> Result<Vec<f64>, CliError> {
        match self {
            Self::Sockets { sockets, .. } => requests(sockets, station, blocks, count),
            Self::Memcpy(memcpy) => Ok(memcpy.requests(blocks, count)),
            Self::Tool(_) | Self::None(_) => Ok(Vec::new()),
        }
    }
}

fn stream(sockets: &Sockets, count: u32, station: &mut Station) -> Result<f64, CliError> {
    let (direction, bytes) = (station.ground().case.direction, station.ground().case.bytes() as usize);
    let start = Instant::now();
    station.say(&Word::Stream { sockets: count })?;
    let moved = stream_both(sockets, count, station, direction, bytes)?;
    match station.hear("move bytes over plain sockets")? {
        Word::Streamed => {}
        other => return Err(other.unexpected()),
    }
    let directions = if direction == Direction::Both { 2.0 } else { 1.0 };
    Ok(directions * moved as f64 / start.elapsed().as_secs_f64() / 1e9)
}

/// This side's part of a pass over plain sockets; `direction` as this side sees it.
pub(crate) fn stream_both(
    sockets: &Sockets,
    count: u32,
    station: &Station,
    direction: Direction,
    bytes: usize,
) -> Result<u64, CliError> {
    let source = direction.sends().then(|| station.source().own());
    let mut target = direction.receives().then(|| station.target().own());
    sockets.stream(count, source.as_ref().map(|s| &s[..bytes]), target.as_mut().map(|t| &mut t[..bytes]))
}

fn requests(sockets: &Sockets, station: &mut Station, blocks: u32, count: u32) -> Result<Vec<f64>, CliError> {
    let ground = std::sync::Arc::clone(station.ground());
    let case = &ground.case;
    station.say(&Word::Requests { count, blocks })?;
    match station.hear("serve requests over a plain socket")? {
        Word::Ready => {}
        other => return Err(other.unexpected()),
    }
    let mut micros = Vec::new();
    let broke = |source: io::Error| CliError::Io { what: "a plain socket broke".to_owned(), source };
    for index in 0..count {
        let span: Span = case.request(blocks, index);
        // Both at once is no request; it is measured as a pull.
        if case.direction.receives() {
            let mut target = station.target().own();
            let start = Instant::now();
            sockets.knock().map_err(broke)?;
            sockets.receive_blocks(&mut target, span.of(&ground.target_order), case.block_bytes).map_err(broke)?;
            micros.push(start.elapsed().as_secs_f64() * 1e6);
        } else {
            let source = station.source().own();
            let start = Instant::now();
            sockets.send_blocks(&source, span.of(&ground.source_order), case.block_bytes).map_err(broke)?;
            sockets.await_knock().map_err(broke)?;
            micros.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    Ok(micros)
}
