//! The other side: does what the measuring side orders, session after session.

use std::convert::Infallible;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use super::case::{Case, Span};
use super::content;
use super::endpoint::{self, Setup, address_text};
use super::limit::{self, Family, Listener, Memory, Sockets};
use super::station::Station;
use super::words::{FORM, Word};
use crate::args::Direction;
use crate::error::{CliError, with_causes};

/// Serves until the process is ended. Prints where it listens, as JSON.
///
/// `memory`: the most bytes of blocks in one direction; `until_input_ends`: whether the process ends with its standard input.
pub(crate) fn run(setup: &Setup, memory: u64, until_input_ends: bool) -> Result<(), CliError> {
    if until_input_ends {
        end_with_input()?;
    }
    let mut station = Station::new(setup, "bench-served")?;
    let address = address_text(&station.local_address());
    println!("{}", serde_json::json!({ "address": address }));
    std::io::stdout().flush().map_err(CliError::io("standard output"))?;
    loop {
        let mut served = Served { memory, is_checked: false, sockets: None };
        let Err(error) = served.session(&mut station);
        if !matches!(error, CliError::Gone { .. }) {
            let why = with_causes(&error);
            eprintln!("kvferry: {why}");
            // It ends the session then, which is an error again and says nothing new.
            let _ = station.say(&Word::Refused { why }).and_then(|()| station.until("end the session", |_| false));
            station.part("a bench went wrong");
        }
        station.forget();
    }
}

struct Served {
    memory: u64,
    is_checked: bool,
    sockets: Option<Sockets>,
}

impl Served {
    fn session(&mut self, station: &mut Station) -> Result<Infallible, CliError> {
        // Ends with the session, which is an error like any other.
        let mut has_landed = false;
        loop {
            station.turn(Duration::from_millis(500))?;
            if station.is_sending() && station.is_sent() {
                station.end_sending()?;
                station.say(&Word::Filled { lent_bytes: station.lent_bytes() })?;
            }
            if !station.is_receiving() {
                has_landed = false;
            } else if !has_landed && station.is_received() {
                has_landed = true;
                station.say(&Word::Landed { wrong_digests: station.wrong_digests() })?;
            }
            if let Some(word) = station.heard() {
                self.obey(station, word)?;
            }
        }
    }

    fn obey(&mut self, station: &mut Station, word: Word) -> Result<(), CliError> {
        match word {
            Word::Begin { form, case } => {
                if form != FORM {
                    return Err(CliError::Word { found: format!("words of form {form}, and this side's are {FORM}") });
                }
                case.check(self.memory)?;
                station.may_rest()?;
                self.sockets = None;
                let direction = case.direction.turned();
                station.begin(case, direction, self.memory)?;
                station.say(&Word::Ready)
            }
            Word::Open { span, check } => {
                station.may_receive()?;
                self.is_checked = check;
                let ground = Arc::clone(station.ground_if_begun()?);
                in_case(span, &ground.case)?;
                if check && !ground.case.in_place {
                    poison(station, span);
                }
                let grant = station.open(span)?;
                station.say(&Word::Opened { grant })
            }
            Word::Fill { span, grant } => {
                station.may_send()?;
                in_case(span, &station.ground_if_begun()?.case)?;
                station.fill(span, grant)
            }
            Word::Close => {
                let wrong_blocks = station.close(self.is_checked)?;
                station.say(&Word::Closed { wrong_blocks })
            }
            Word::Listen { sockets, near, unix } => self.listen(station, sockets, near, unix),
            Word::Stream { sockets } => {
                station.may_rest()?;
                let case = &station.ground_if_begun()?.case;
                let (direction, bytes) = (case.direction.turned(), case.bytes() as usize);
                limit::stream_both(self.connected()?, sockets, station, direction, bytes)?;
                station.say(&Word::Streamed)
            }
            Word::Requests { count, blocks } => self.requests(station, count, blocks),
            other => Err(other.unexpected()),
        }
    }

    fn listen(&mut self, station: &Station, sockets: u32, near: bool, unix: bool) -> Result<(), CliError> {
        if !(1..=64).contains(&sockets) {
            return Err(CliError::Word { found: format!("{sockets} plain sockets, which is not 1 to 64") });
        }
        let family = match endpoint::ip_of(&station.local_address()) {
            Some(ip) if !unix => Family::Tcp { ip, near },
            _ => Family::Unix,
        };
        let listener = Listener::bind(family)?;
        station.say(&Word::Listening { address: listener.address().to_owned() })?;
        self.sockets = Some(listener.accept(sockets)?);
        Ok(())
    }

    fn requests(&self, station: &Station, count: u32, blocks: u32) -> Result<(), CliError> {
        let ground = station.ground_if_begun()?;
        let case = &ground.case;
        if blocks == 0 {
            return Err(CliError::Word { found: "requests of no block".to_owned() });
        }
        station.may_rest()?;
        station.say(&Word::Ready)?;
        let spans = (0..count).map(|index| case.request(blocks, index));
        // The measuring side pulls unless it only pushes.
        if case.direction == Direction::Push {
            let mut target = station.target().own();
            self.connected()?.serve(case, spans, Memory::Target(&mut target), &ground.target_order)
        } else {
            let source = station.source().own();
            self.connected()?.serve(case, spans, Memory::Source(&source), &ground.source_order)
        }
    }

    fn connected(&self) -> Result<&Sockets, CliError> {
        self.sockets
            .as_ref()
            .ok_or_else(|| CliError::Word { found: "plain sockets before it asked for any".to_owned() })
    }
}

/// Overwrites the blocks of a span in this side's target.
pub(crate) fn poison(station: &Station, span: Span) {
    let ground = station.ground();
    let bytes = ground.case.block_bytes as usize;
    let mut target = station.target().own();
    for block in span.of(&ground.target_order) {
        content::poison(&mut target[*block as usize * bytes..][..bytes]);
    }
}

fn in_case(span: Span, case: &Case) -> Result<(), CliError> {
    let refuse = || CliError::Word { found: format!("{span:?} of {} blocks", case.blocks) };
    span.is_in(case).then_some(()).ok_or_else(refuse)
}

/// Ends the process when its standard input ends: whoever started it is gone, or wants it to go.
fn end_with_input() -> Result<(), CliError> {
    let watch = || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    };
    std::thread::Builder::new().name("bench-input".to_owned()).spawn(watch).map(drop).map_err(CliError::io("a thread"))
}
