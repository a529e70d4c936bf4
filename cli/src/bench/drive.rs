//! The measuring side: one case after the other, each in a session of its own, in turn with its limit.

use std::time::{Duration, Instant};

use kvferry_transport::{PathReport, PeerAddress};

use super::case::{Case, Span};
use super::endpoint::{self, Setup, address_text};
use super::limit::Limit;
use super::report::{LimitFigures, Row, Wrong};
use super::serve::poison;
use super::station::Station;
use super::words::{FORM, Word};
use crate::args::Kind;
use crate::error::CliError;
use crate::figures::{Micros, best, median, rounded};

/// How much is measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Effort {
    pub(crate) rounds: u32,
    pub(crate) requests: u32,
    /// Memory for each direction, in bytes.
    pub(crate) memory: u64,
}

/// How long a session may stream before it lends.
const LENDING_PATIENCE: Duration = Duration::from_secs(5);
/// A request of this size or more is measured a fifth as often.
const LARGE_REQUEST_BYTES: u64 = 16 << 20;
/// Requests before those that count.
const WARM_UP: u32 = 10;
/// Requests of ours and of the limit take turns in so many slices.
const SLICES: u32 = 4;
/// Every so many requests are compared byte by byte; digests, if on, see all.
const CHECK_EVERY: u32 = 16;

/// Measures one case to the other side at `address`.
pub(crate) fn measure(setup: &Setup, address: &PeerAddress, case: Case, effort: Effort) -> Result<Row, CliError> {
    let mut station = Station::new(setup, "bench-measuring")?;
    let start = Instant::now();
    station.meet(address, &address_text(address)).map_err(|error| endpoint::explained(setup, error))?;
    let connect_us = micros_since(start);
    let path = station.path().cloned().ok_or_else(|| CliError::Word { found: "nothing of its path".to_owned() })?;
    let kind = endpoint::taken(setup, &path)?;
    let direction = case.direction;
    station.begin(case.clone(), direction, effort.memory)?;
    station.say(&Word::Begin { form: FORM, case: case.clone() })?;
    match station.hear("make ready")? {
        Word::Ready => {}
        other => return Err(other.unexpected()),
    }
    let mut run = Run { station, case, wrong: Wrong::default(), lent_there: 0 };
    let first_block_us = run.transfer(run.case.request(1, 0), true)? * 1e6;
    if matches!(kind, Kind::Shm | Kind::Cma) && !run.case.in_place {
        run.wait_lending(kind)?;
    }
    if kind == Kind::Ucx && run.station.ucx_bytes() == 0 {
        let why =
            "its session came up, but UCX did not connect: blocks went over TCP lanes; see the log (RUST_LOG=warn)";
        return Err(endpoint::unavailable(kind, why.to_owned()));
    }
    let mut limit = Limit::open(kind, &mut run.station, address)?;
    let passes = run.passes(&mut limit, effort.rounds)?;
    let one = run.latencies(&mut limit, 1, effort.requests)?;
    let request = run.latencies(&mut limit, run.case.request_blocks(), effort.requests)?;
    run.station.part("the bench is done");
    Ok(row(setup, (kind, path), &run, connect_us, first_block_us, passes, &limit, [one, request]))
}

struct Run {
    station: Station,
    case: Case,
    wrong: Wrong,
    /// What the other side lent so far, in bytes.
    lent_there: u64,
}

/// What the passes showed.
struct Passes {
    /// GB/s of each round.
    ours: Vec<f64>,
    /// The same of each way of the limit.
    limit: Vec<Vec<f64>>,
    /// Which share of the bytes stayed in place until the receiver copied them.
    lent_share: f64,
}

/// Microseconds of requests: ours, and the limit's.
struct Latencies {
    ours: Micros,
    limit: Option<Micros>,
}

impl Run {
    fn passes(&mut self, limit: &mut Limit, rounds: u32) -> Result<Passes, CliError> {
        let bytes =
            self.case.bytes() as f64 * if self.case.direction == crate::args::Direction::Both { 2.0 } else { 1.0 };
        let (mut ours, mut theirs) = (Vec::new(), vec![Vec::new(); limit.ways()]);
        let mut lent_before = 0;
        for round in 0..=rounds {
            if round == 1 {
                lent_before = self.lent_bytes();
            }
            // Who goes first alternates, so that neither always finds the other's caches.
            for turn in 0..2 {
                if (turn + round) % 2 == 0 {
                    let gbps = bytes / self.transfer(self.case.pass(), true)? / 1e9;
                    // The first round wakes everything.
                    if round > 0 {
                        ours.push(gbps);
                    }
                } else {
                    for (way, rates) in theirs.iter_mut().enumerate() {
                        let gbps = limit.pass(way, &mut self.station)?;
                        if round > 0 {
                            rates.push(gbps);
                        }
                    }
                }
            }
        }
        let lent_share = (self.lent_bytes() - lent_before) as f64 / (bytes * f64::from(rounds));
        Ok(Passes { ours, limit: theirs, lent_share })
    }

    /// Moves a block until each side that sends has lent one: a session streams until the other side has mapped the memory.
    fn wait_lending(&mut self, kind: Kind) -> Result<(), CliError> {
        let (start, direction) = (Instant::now(), self.case.direction);
        while direction.sends() && self.station.lent_bytes() == 0 || direction.receives() && self.lent_there == 0 {
            if start.elapsed() > LENDING_PATIENCE {
                let why = "its session came up, but bytes are streamed: the other side maps or reads no memory";
                return Err(endpoint::unavailable(kind, why.to_owned()));
            }
            self.transfer(self.case.request(1, 0), false)?;
        }
        Ok(())
    }

    /// What stayed in place so far, on both sides.
    fn lent_bytes(&self) -> u64 {
        self.station.lent_bytes() + self.lent_there
    }

    fn latencies(&mut self, limit: &mut Limit, blocks: u32, requests: u32) -> Result<Latencies, CliError> {
        let is_large = self.case.block_bytes * u64::from(blocks) >= LARGE_REQUEST_BYTES;
        let count = if is_large { (requests / 5).max(50.min(requests)) } else { requests };
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for index in 0..WARM_UP.min(count) {
            self.transfer(self.case.request(blocks, index), false)?;
        }
        limit.requests(&mut self.station, blocks, WARM_UP.min(count))?;
        for slice in 0..SLICES {
            for index in slice * count / SLICES..(slice + 1) * count / SLICES {
                let span = self.case.request(blocks, index);
                ours.push(self.transfer(span, index % CHECK_EVERY == 0)? * 1e6);
            }
            let share = (slice + 1) * count / SLICES - slice * count / SLICES;
            theirs.extend(limit.requests(&mut self.station, blocks, share)?);
        }
        let limit = (!theirs.is_empty()).then(|| Micros::of(&mut theirs));
        Ok(Latencies { ours: Micros::of(&mut ours), limit })
    }

    /// Moves blocks, and returns after how many seconds all of them were there, their digests compared if they have some.
    ///
    /// A push goes into a grant that was made before, as to a peer that waits for it; a pull begins with the grant.
    fn transfer(&mut self, span: Span, check: bool) -> Result<f64, CliError> {
        let station = &mut self.station;
        let (direction, check) = (self.case.direction, check && self.case.verify);
        let mut theirs = None;
        if direction.sends() {
            station.say(&Word::Open { span, check })?;
            theirs = match station.hear("grant")? {
                Word::Opened { grant } => Some(grant),
                other => return Err(other.unexpected()),
            };
        }
        if direction.receives() && check && !self.case.in_place {
            poison(station, span);
        }
        let start = Instant::now();
        if direction.receives() {
            let grant = station.open(span)?;
            station.say(&Word::Fill { span, grant })?;
        }
        if let Some(grant) = theirs {
            station.fill(span, grant)?;
        }
        station.until("move blocks", |station| station.is_sent() && station.is_received())?;
        let (mut must_land, mut must_fill) = (direction.sends(), direction.receives());
        let mut seconds = start.elapsed().as_secs_f64();
        while must_land || must_fill {
            match station.hear("say that blocks moved")? {
                Word::Landed { wrong_digests } if must_land => {
                    // Without digests the transport's own completion, which is the receiver's word, was the end.
                    if self.case.digest {
                        seconds = start.elapsed().as_secs_f64();
                    }
                    must_land = false;
                    self.wrong.digests += u64::from(wrong_digests);
                }
                Word::Filled { lent_bytes } if must_fill => {
                    self.lent_there = lent_bytes;
                    must_fill = false;
                }
                other => return Err(other.unexpected()),
            }
        }
        self.close(check)?;
        Ok(seconds)
    }

    /// Takes grants and memory back, and compares.
    fn close(&mut self, check: bool) -> Result<(), CliError> {
        let station = &mut self.station;
        if self.case.direction.receives() {
            self.wrong.digests += u64::from(station.wrong_digests());
            self.wrong.blocks += station.close(check)?;
        }
        if self.case.direction.sends() {
            station.end_sending()?;
            station.say(&Word::Close)?;
            match station.hear("compare")? {
                Word::Closed { wrong_blocks } => self.wrong.blocks += wrong_blocks,
                other => return Err(other.unexpected()),
            }
        }
        Ok(())
    }
}

#[expect(clippy::too_many_arguments, reason = "all that was found out about one case, put together in one place")]
fn row(
    setup: &Setup,
    (kind, path): (Kind, PathReport),
    run: &Run,
    connect_us: f64,
    first_block_us: f64,
    passes: Passes,
    limit: &Limit,
    [one, request]: [Latencies; 2],
) -> Row {
    let case = &run.case;
    let Passes { ours: mut gbps, limit: limit_gbps, lent_share } = passes;
    let fastest = (0..limit.ways())
        .max_by(|a, b| f64::total_cmp(&median(&mut limit_gbps[*a].clone()), &median(&mut limit_gbps[*b].clone())));
    let mut ratios: Vec<f64> = fastest
        .map_or_else(Vec::new, |way| gbps.iter().zip(&limit_gbps[way]).map(|(ours, limit)| ours / limit).collect());
    let figures = match fastest {
        Some(way) => LimitFigures {
            name: Some(limit.name(way)),
            gbps: Some(rounded(median(&mut limit_gbps[way].clone()))),
            ratio: Some(rounded(median(&mut ratios))),
            missing: None,
        },
        None => LimitFigures { missing: Some(limit.name(0)), ..LimitFigures::default() },
    };
    Row {
        transport: kind,
        path: Some(path),
        block_bytes: case.block_bytes,
        blocks: case.blocks,
        batch: case.batch,
        posts: case.posts,
        lanes: setup.lanes,
        tls: setup.credentials.is_tls(),
        direction: case.direction,
        lent_share: rounded(lent_share),
        digest: case.digest,
        in_place: case.in_place,
        gbps_best: rounded(best(&gbps)),
        gbps_rounds: gbps.iter().copied().map(rounded).collect(),
        gbps_median: rounded(median(&mut gbps)),
        one_block_us: one.ours.into(),
        request_us: request.ours.into(),
        request_blocks: case.request_blocks(),
        connect_us: rounded(connect_us),
        first_block_us: rounded(first_block_us),
        limit: figures,
        limit_one_block_us: one.limit.map(Into::into),
        limit_request_us: request.limit.map(Into::into),
        verified: case.verify && run.wrong == Wrong::default(),
        wrong: run.wrong,
    }
}

fn micros_since(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}
