//! The whole way from pages on one device to pages on another, on devices that run late and in random order: the bytes are the
//! right ones, and nothing is used that is not ordered after what it needs. What is not ordered, because one of the events is
//! forgotten, is found.
#![expect(unsafe_code, reason = "queues copies and launches")]

#[path = "pipeline/engine.rs"]
mod engine;
#[path = "pipeline/forgetful.rs"]
mod forgetful;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use engine::{BLOCKS, Engine, PATIENCE, Place, Setup, TOKENS, content, stretch};
use forgetful::{Forgetful, ForgetfulStream, Forgets};
use kvferry::contract::{
    EngineFinish, Hold, Match, Request, RequestId, ScheduledStep, Scheduler, TransferParams, Worker,
};
use kvferry_cuda_sim::{LateDevice, LateError};
use kvferry_kernels::device::Device;
use kvferry_protocol::layout::LayoutOrder;
use kvferry_protocol::{BlockId, LayerId, PeerId, TransferId};
use kvferry_transport::LoopbackNetwork;

/// splitmix64 (Steele, Lea, Flood 2014).
struct Chance(u64);

impl Chance {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ (bits >> 31)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.draw() % end
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len() as u64) as usize]
    }
}

/// Two engines, and the devices that their caches are on.
struct Pair {
    prefill: Engine,
    decode: Engine,
    devices: Vec<LateDevice>,
    chance: Chance,
    transfers: u64,
    shown: String,
}

/// A hand-over under way.
struct Transfer {
    number: u64,
    tokens: u32,
    /// Of decode's blocks, and prefill's.
    target: (Request, Vec<BlockId>),
    source: Option<(Request, Vec<BlockId>)>,
    computed: u32,
    /// Decode gives it up.
    aborted: bool,
}

impl Pair {
    /// Engines of random layouts, block sizes and limits; `places` says where each one's cache is.
    fn new(seed: u64, places: impl FnOnce(&mut Chance, &mut Vec<LateDevice>) -> [Place; 2]) -> Self {
        let mut chance = Chance(seed);
        let mut devices = Vec::new();
        let [source, target] = places(&mut chance, &mut devices);
        let order = *chance.pick(&["decode-first", "prefill-first"]);
        let mut setup = |name, role| {
            let tokens_per_block = *chance.pick(&[1, 2, 4, 5, 8]);
            let layout: &str = LayoutOrder::LISTED[chance.below(LayoutOrder::LISTED.len() as u64) as usize];
            // Room for two transfers at most, and mostly for less.
            let staging = engine_block_bytes(tokens_per_block) * u64::from(TOKENS.div_ceil(tokens_per_block));
            let staging = staging * (4 + chance.below(4)) / 4;
            let extra = format!(
                "order = \"{order}\"\nchunk_bytes = 4096\nslab_pool_bytes = {}\nmovers = {}\nstaging_bytes = {staging}\nlayer_group = {}\nposts_in_flight = {}\n",
                8192 * (1 + chance.below(2)),
                1 + chance.below(2),
                1 + chance.below(3),
                1 + chance.below(4),
            );
            Setup { name, role, layout, tokens_per_block, extra }
        };
        let (prefill, decode) = (setup("prefill", "prefill"), setup("decode", "decode"));
        let shown = format!("seed {seed}: {prefill:?} {decode:?}");
        let network = LoopbackNetwork::new();
        let (prefill, decode) = (Engine::new(&prefill, source, &network), Engine::new(&decode, target, &network));
        Self { prefill, decode, devices, chance, transfers: seed << 20, shown }
    }

    /// Some transfers at once; all ends are seen and all is given back.
    fn round(&mut self) -> Result<u64, String> {
        let count = 1 + self.chance.below(3);
        let mut open: Vec<Transfer> = Vec::new();
        for _ in 0..count {
            let transfer = self.begin();
            open.push(transfer);
        }
        let deadline = Instant::now() + PATIENCE;
        let mut asked = 0;
        while asked < count {
            let peer = match self.prefill.worker.messages().recv_deadline(deadline) {
                Ok((peer, _)) => peer,
                Err(error) => return Err(format!("nobody asked: {error}")),
            };
            self.admit(&mut open[asked as usize], &peer);
            asked += 1;
        }
        while let Some(index) = {
            let left: Vec<usize> = (0..open.len()).filter(|&index| open[index].computed < open[index].tokens).collect();
            (!left.is_empty()).then(|| *self.chance.pick(&left))
        } {
            let more = 1 + self.chance.below(9) as u32;
            self.compute(&mut open[index], more);
            if self.chance.below(8) == 0 {
                let victim = self.chance.below(open.len() as u64) as usize;
                open[victim].aborted = true;
            }
        }
        for transfer in open {
            self.end(transfer)?;
        }
        let deadline = Instant::now() + PATIENCE;
        while !(self.prefill.holds_nothing() && self.decode.holds_nothing()) {
            self.prefill.idle_step();
            self.decode.idle_step();
            if Instant::now() > deadline {
                return Err(format!(
                    "held: {:?} {:?}",
                    self.prefill.metrics.snapshot(),
                    self.decode.metrics.snapshot()
                ));
            }
            std::thread::yield_now();
        }
        self.unordered()?;
        Ok(count)
    }

    /// What a device found, if it found something.
    fn unordered(&self) -> Result<(), String> {
        self.devices.iter().try_for_each(|device| device.settle().map_err(|error| error.to_string()))
    }

    fn begin(&mut self) -> Transfer {
        self.transfers += 1;
        let (number, tokens) = (self.transfers, 1 + self.chance.below(TOKENS.into()) as u32);
        let blocks = self.decode.take_blocks(tokens);
        let params = TransferParams::Fetch {
            transfer: TransferId::new(number.into()),
            from: vec![self.prefill.worker.local_address()],
            engine: None,
            ask: b"please".to_vec(),
        };
        let request = request("d", number, tokens, params);
        let Match::Async(n) = self.decode.scheduler.matched_tokens(&request, 0) else { panic!("nothing to load") };
        self.decode.scheduler.allocated(&request, &blocks, 0, n.get()).unwrap();
        let meta = self.decode.scheduler.build_step(&ScheduledStep::default());
        self.decode.worker.begin_step(meta).unwrap();
        Transfer { number, tokens, target: (request, blocks), source: None, computed: 0, aborted: false }
    }

    fn admit(&mut self, transfer: &mut Transfer, peer: &PeerId) {
        let (number, tokens) = (transfer.number, transfer.tokens);
        let params =
            TransferParams::Keep { transfer: TransferId::new(number.into()), to: Some(peer.clone()), readers: 1 };
        let request = request("p", number, tokens, params);
        let blocks = self.prefill.take_blocks(tokens);
        self.prefill.scheduler.allocated(&request, &blocks, 0, 0).unwrap();
        transfer.source = Some((request, blocks));
    }

    fn compute(&mut self, transfer: &mut Transfer, more: u32) {
        let until = (transfer.computed + more).min(transfer.tokens);
        let (request, blocks) = transfer.source.as_ref().expect("it was admitted");
        self.prefill.prefill_step(request, blocks, transfer.computed..until, &content(transfer.number));
        transfer.computed = until;
    }

    fn end(&mut self, transfer: Transfer) -> Result<(), String> {
        let Transfer { number, tokens, target: (request, blocks), source, aborted, .. } = transfer;
        let (source, source_blocks) = source.expect("it was admitted");
        let kept = self.prefill.scheduler.finished(&source.id, &source_blocks, EngineFinish::Complete);
        if aborted {
            let hold = self.decode.scheduler.finished(&request.id, &blocks, EngineFinish::Aborted);
            if matches!(hold, Hold::Until { .. }) {
                self.decode.idle_until("the abort", |applied| applied.released.contains(&request.id));
            }
        } else {
            let mut failed = None;
            self.decode.idle_until("the load", |applied| {
                let of_it = applied.failed.iter().find(|failure| failure.request == request.id);
                failed = of_it.map(|failure| failure.reason.clone());
                failed.is_some() || applied.loaded.contains(&request.id)
            });
            if let Some(reason) = failed {
                return Err(format!("{reason}; the devices: {:?}", self.unordered()));
            }
            self.look(number, tokens, &request, &blocks)?;
            // A load that was read while it landed may not have been told of its end.
            let hold = self.decode.scheduler.finished(&request.id, &blocks, EngineFinish::Complete);
            if matches!(hold, Hold::Until { .. }) {
                self.decode.idle_until("the load's end", |applied| applied.released.contains(&request.id));
            }
        }
        // The next owner's first kernel runs behind the last of this one's, whenever that is.
        self.decode.read(&blocks, &(0..tokens), false, |_, _| ());
        self.decode.free.extend(blocks);
        if matches!(kept, Hold::Until { .. }) {
            self.prefill.idle_until("the release", |applied| applied.released.contains(&source.id));
        }
        self.prefill.store(&source_blocks, 0..tokens, &content(!number), |_, _, _| ());
        self.prefill.free.extend(source_blocks);
        Ok(())
    }

    /// The step that reads what was loaded, while its last layers may still be on their way.
    fn look(&mut self, number: u64, tokens: u32, request: &Request, blocks: &[BlockId]) -> Result<(), String> {
        let meta = self.decode.step(request, blocks, tokens - 1..tokens);
        self.decode.worker.begin_step(meta).unwrap();
        let mut failed = Vec::new();
        let found = self.decode.read(blocks, &(0..tokens), true, |worker, layer| {
            failed.extend(worker.wait_layer(LayerId::new(layer)));
        });
        self.decode.worker.wait_saved();
        if !failed.is_empty() {
            return Err(format!("{failed:?} failed while they were read; the devices: {:?}", self.unordered()));
        }
        let want = content(number);
        let same = (0..engine::LAYERS).all(|layer| {
            let stretch = stretch(layer, &(0..tokens));
            found[stretch.clone()] == want[stretch]
        });
        if same { Ok(()) } else { Err(format!("other bytes arrived; the devices: {:?}", self.unordered())) }
    }
}

fn request(side: &str, number: u64, tokens: u32, params: TransferParams) -> Request {
    let id = RequestId::new(&format!("{side}{number}"));
    Request { id, prompt_tokens: tokens, params: Some(params), hashes: Arc::default() }
}

fn engine_block_bytes(tokens_per_block: u32) -> u64 {
    u64::from(engine::LAYERS) * u64::from(engine::HEADS) * u64::from(tokens_per_block) * 32
}

/// A device that forgets nothing, and a stream of the engine's.
fn on_device(devices: &mut Vec<LateDevice>, seed: u64) -> Place {
    let device = LateDevice::new(seed);
    let stream = device.stream("engine").unwrap();
    devices.push(device.clone());
    Place::Device(Arc::new(device), stream)
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

#[test]
fn whatever_the_schedule_the_right_bytes_arrive_and_all_that_conflicts_is_ordered() {
    let schedules = number("KVFERRY_DEVICE_SCHEDULES", 150);
    let first = number("KVFERRY_DEVICE_SEED", std::time::UNIX_EPOCH.elapsed().unwrap().subsec_nanos().into());
    eprintln!("KVFERRY_DEVICE_SEED={first} KVFERRY_DEVICE_SCHEDULES={schedules} runs this again");
    let mut done = 0;
    for seed in first.. {
        let mut pair = Pair::new(seed, |chance, devices| {
            let kind = chance.below(4);
            let [a, b] = [chance.draw(), chance.draw()];
            match kind {
                0 => [on_device(devices, a), Place::Host],
                1 => [Place::Host, on_device(devices, b)],
                _ => [on_device(devices, a), on_device(devices, b)],
            }
        });
        for _ in 0..20 {
            done += pair.round().unwrap_or_else(|problem| panic!("{}: {problem}", pair.shown));
        }
        assert_eq!(pair.prefill.free.len() + pair.decode.free.len(), 2 * BLOCKS as usize);
        if done >= schedules {
            break;
        }
    }
}

/// Rounds until one goes wrong, in whichever way an engine hears of it; `false` if none does.
fn goes_wrong(pair: &mut Pair) -> bool {
    (0..40).any(|_| !matches!(catch_unwind(AssertUnwindSafe(|| pair.round())), Ok(Ok(_))))
}

#[test]
fn an_event_that_is_forgotten_is_found() {
    for (name, forgets, engines_own) in [
        ("kvferry's streams do not wait for the engine's", Forgets::StreamWaits, false),
        ("the engine's stream does not wait for what lands", Forgets::StreamWaits, true),
        ("kvferry's threads do not wait for its copies", Forgets::HostWaits, false),
    ] {
        let place = |seed: u64, devices: &mut Vec<LateDevice>| {
            let device = LateDevice::new(seed);
            devices.push(device.clone());
            let own = device.stream("engine").unwrap();
            match engines_own {
                true => Place::Device(Arc::new(device), Arc::new(ForgetfulStream { stream: own, forgets })),
                false => Place::Device(Arc::new(Forgetful { device, forgets }), own),
            }
        };
        // The engine's stream is mostly behind what lands by chance: a mover waits for that, too.
        let seen = (0..40).find_map(|seed| {
            let mut pair = Pair::new(seed, |_, devices| [0, 1].map(|side| place(seed * 2 + side, devices)));
            let failed = |pair: &Pair| pair.devices.iter().find_map(|device| device.settle().err());
            goes_wrong(&mut pair).then(|| failed(&pair))
        });
        let unordered = matches!(seen, Some(Some(LateError::Unordered { .. })));
        assert!(unordered, "{name}: {seen:?}");
    }
}
