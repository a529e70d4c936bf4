//! Cache groups beside vLLM's own managers: random layers, and random histories of requests, the same answers to the block.
//!
//! `integration-tests/vllm/environment.sh` makes the Python:
//!
//! ```sh
//! KVFERRY_VLLM_PYTHON=$(integration-tests/vllm/environment.sh)/bin/python \
//!     cargo test --workspace --test engine_groups -- --ignored
//! ```
//!
//! `KVFERRY_GROUP_HISTORIES` says how many histories; each is made of its number alone.

mod python;

use kvferry::pool::groups::{
    Ask, Filled, GroupPlan, GroupPool, GroupRule, GroupTable, GroupsConfig, Hit, LayerKind, LayerSpec, PageContent,
    Retention, Slots, StateKeeping,
};
use kvferry::pool::{BlockHash, BlockHasher, HashScope};
use kvferry::sizing::Placement;
use python::Python;
use serde_json::{Value, json};

/// Histories and plans, if the environment does not say how many.
const HISTORIES: u64 = 40;
const STEPS: usize = 120;

/// SplitMix64: a history is its seed.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

const TOKENS: PageContent = PageContent::Tokens { heads: 2, head_size: 16, head_size_v: 16, element_bytes: 2 };

fn json_of(spec: &LayerSpec, draft: bool) -> Value {
    let mut layer = json!({ "size": spec.tokens_per_block, "padded": spec.padded_bytes, "draft": draft });
    let mut set = |pairs: Value| layer.as_object_mut().unwrap().extend(pairs.as_object().unwrap().clone());
    match spec.content {
        PageContent::State { bytes } => set(json!({ "bytes": bytes })),
        PageContent::Tokens { heads, head_size, head_size_v, element_bytes } => {
            set(
                json!({ "heads": heads, "head_size": head_size, "head_size_v": head_size_v, "element": element_bytes }),
            );
        }
    }
    set(match spec.kind {
        LayerKind::Full { window_tokens, chunk_tokens } => {
            json!({ "kind": "full", "window": window_tokens, "chunk": chunk_tokens })
        }
        LayerKind::Latent => json!({ "kind": "latent" }),
        LayerKind::Sink { sink_tokens } => json!({ "kind": "sink", "sinks": sink_tokens }),
        LayerKind::Window { window_tokens, retained_tokens } => {
            json!({ "kind": "window", "window": window_tokens, "retained": retained_tokens })
        }
        LayerKind::Chunked { chunk_tokens } => json!({ "kind": "chunked", "chunk": chunk_tokens }),
        LayerKind::State { keeping, speculative_blocks } => {
            json!({ "kind": "state", "keeping": name_of(keeping), "speculative": speculative_blocks })
        }
        LayerKind::Cross => json!({ "kind": "cross" }),
        LayerKind::EncoderOnly => unreachable!("vLLM has no spec for what keeps nothing"),
    });
    layer
}

fn name_of(keeping: StateKeeping) -> &'static str {
    match keeping {
        StateKeeping::Running => "none",
        StateKeeping::EachBlock => "all",
        StateKeeping::StepEnds => "align",
    }
}

/// A model of few kinds of layers, in a pattern or at random.
fn any_layers(chance: &mut Chance, keeping: StateKeeping) -> Vec<LayerSpec> {
    let latent = chance.one_in(4);
    let mut kinds = vec![];
    for _ in 0..1 + chance.below(4) {
        let tokens_per_block = chance.of(&[16, 16, 16, 32]);
        let heads = PageContent::Tokens {
            heads: chance.of(&[1, 2, 2, 4]),
            head_size: chance.of(&[16, 16, 24]),
            head_size_v: chance.of(&[16, 16, 8]),
            element_bytes: 2,
        };
        let latents = PageContent::Tokens { heads: 1, head_size: 36, head_size_v: 0, element_bytes: 2 };
        let (kind, content) = match chance.below(7) {
            0 | 1 if latent => (LayerKind::Latent, latents),
            0 | 1 => (LayerKind::Full { window_tokens: None, chunk_tokens: None }, heads),
            2 if !latent => (LayerKind::Full { window_tokens: Some(64), chunk_tokens: None }, heads),
            3 => (LayerKind::Chunked { chunk_tokens: chance.of(&[64, 128]) }, heads),
            4 => {
                let speculative_blocks = chance.of(&[0, 0, 2]);
                let bytes = chance.of(&[1000, 2048, 4096]);
                (LayerKind::State { keeping, speculative_blocks }, PageContent::State { bytes })
            }
            _ => (LayerKind::Window { window_tokens: chance.of(&[64, 100]), retained_tokens: 0 }, heads),
        };
        kinds.push((LayerSpec { kind, tokens_per_block, content, padded_bytes: None }, 1 + chance.below(5)));
    }
    let mut layers = vec![];
    for _ in 0..1 + chance.below(6) {
        let repeat = |(spec, count): &(LayerSpec, usize)| vec![*spec; *count];
        layers.extend(kinds.iter().flat_map(repeat));
    }
    if chance.one_in(3) {
        layers.truncate(1 + chance.below(layers.len()));
    }
    layers
}

#[test]
#[ignore = "needs a Python with vLLM: integration-tests/vllm/environment.sh"]
fn groups_answer_as_vllms_own_do() {
    // One Python for both: it takes longer to start than to answer.
    let mut python = Python::start("KVFERRY_VLLM_PYTHON", "vLLM", "engine_groups/reference.py");
    layers_are_grouped_as_vllm_groups_them(&mut python);
    requests_get_the_blocks_that_vllm_gives_them(&mut python);
    python.stop();
}

fn layers_are_grouped_as_vllm_groups_them(python: &mut Python) {
    let (mut plans, mut refused, mut lost) = (0, 0, 0);
    for seed in 0..histories() * 10 {
        let mut chance = Chance(seed);
        let keeping = chance.of(&[StateKeeping::Running, StateKeeping::StepEnds]);
        let layers = any_layers(&mut chance, keeping);
        let packed = chance.one_in(2);
        let (tokens, in_flight) = (1 + chance.below(5000), chance.of(&[64, 2048]));
        let asked: Vec<Value> = layers.iter().map(|spec| json_of(spec, false)).collect();
        let theirs = python.ask(&json!({
            "op": "plan", "layers": asked, "packed": packed, "keeping": name_of(keeping), "tokens": tokens, "in_flight": in_flight,
            "encoder_tokens": 0,
        }));
        let placement = if packed { Placement::Packed { align_bytes: 1 } } else { Placement::PerLayer };
        if theirs.get("lost").is_some() {
            // vLLM's split of an uneven bucket leaves layers out; ours has all.
            let plan = GroupPlan::new(&layers, placement).unwrap();
            let mut all: Vec<usize> = plan.groups.iter().flat_map(|group| group.layers.clone()).collect();
            all.sort_unstable();
            assert_eq!(all, (0..layers.len()).collect::<Vec<_>>(), "{seed}");
            lost += 1;
            continue;
        }
        let ours = match GroupPlan::new(&layers, placement) {
            Err(_) => {
                refused += 1;
                assert!(theirs.get("refused").is_some(), "{seed}: {layers:?}: {theirs}");
                continue;
            }
            Ok(plan) => {
                let group = |group: &kvferry::pool::groups::LayerGroup| {
                    let pages: Vec<u64> = group.specs.iter().map(LayerSpec::page_bytes).collect();
                    json!({ "layers": group.layers, "pages": pages, "size": group.spec.tokens_per_block })
                };
                let groups: Vec<Value> = plan.groups.iter().map(group).collect();
                let per_request = plan.blocks_per_request(tokens, in_flight, 0);
                json!({ "groups": groups, "block_bytes": plan.block_bytes, "per_request": per_request })
            }
        };
        plans += 1;
        assert_eq!(ours, theirs, "{seed}: packed {packed}: {layers:?}");
    }
    println!("{plans} plans, {refused} refused by both, {lost} in which vLLM loses layers");
    assert!(plans > refused + lost, "plans that show little");
}

/// One request, as an engine's scheduler knows it.
struct Request {
    id: usize,
    table: GroupTable,
    tokens: Vec<u32>,
    prompt: usize,
    computed: usize,
    in_flight: usize,
    junction: usize,
    loading: bool,
    running: bool,
    encoder: usize,
}

struct History<'a> {
    seed: u64,
    chance: Chance,
    python: &'a mut Python,
    pool: GroupPool,
    config: GroupsConfig,
    hasher: BlockHasher,
    requests: Vec<Request>,
    next: usize,
    /// Chunks must end where states are kept.
    aligned: usize,
    counts: Counts,
}

#[derive(Default, Debug)]
struct Counts {
    asked: usize,
    hits: usize,
    hit_tokens: usize,
    given: usize,
    short: usize,
    next_step: usize,
    evicted: u64,
}

fn any_groups(chance: &mut Chance) -> (Vec<GroupRule>, Option<Retention>) {
    let full = LayerKind::Full { window_tokens: None, chunk_tokens: None };
    let window = |tokens| LayerKind::Window { window_tokens: tokens, retained_tokens: 0 };
    let kept = LayerKind::Window { window_tokens: 9, retained_tokens: 3 };
    let chunked = LayerKind::Chunked { chunk_tokens: chance.of(&[8, 16]) };
    let state = |keeping, speculative_blocks| LayerKind::State { keeping, speculative_blocks };
    let (each, ends) = (StateKeeping::EachBlock, StateKeeping::StepEnds);
    let speculative = chance.of(&[0, 0, 1, 2]);
    let shapes: [&[(LayerKind, u32)]; 15] = [
        &[(full, 4)],
        &[(window(8), 4)],
        &[(chunked, 4)],
        &[(full, 4), (window(8), 4)],
        &[(full, 4), (window(10), 4), (window(10), 4)],
        &[(full, 8), (window(7), 4)],
        &[(full, 4), (window(13), 8), (window(6), 4)],
        &[(full, 4), (chunked, 4)],
        &[(chunked, 4), (full, 4), (chunked, 4)],
        &[(window(6), 4), (window(20), 4)],
        &[(full, 4), (kept, 4)],
        &[(state(each, speculative), 4), (full, 4)],
        &[(full, 4), (state(ends, speculative), 4), (state(ends, speculative), 4)],
        &[(full, 4), (state(ends, speculative), 8), (window(9), 4)],
        &[(full, 4), (LayerKind::Cross, 4)],
    ];
    let groups = chance.of(&shapes);
    let has_chunks = groups.iter().any(|(kind, _)| matches!(kind, LayerKind::Chunked { .. }));
    let has_encoder = groups.iter().any(|(kind, _)| *kind == LayerKind::Cross);
    let sparse = groups.iter().any(|(kind, _)| matches!(kind, LayerKind::Window { .. } | LayerKind::State { .. }));
    let draft = !has_chunks && chance.one_in(4);
    let rule = |(at, (kind, tokens_per_block)): (usize, &(LayerKind, u32))| {
        let content = match kind {
            LayerKind::State { .. } => PageContent::State { bytes: 512 },
            _ => TOKENS,
        };
        let spec = LayerSpec { kind: *kind, tokens_per_block: *tokens_per_block, content, padded_bytes: None };
        let is_state = matches!(kind, LayerKind::State { .. });
        GroupRule { spec, draft: draft && !is_state && (at == 0 || at == groups.len() - 1) }
    };
    let mut rules: Vec<GroupRule> = groups.iter().enumerate().map(rule).collect();
    // vLLM takes all groups for the drafter's if it knows none.
    if draft && rules.iter().all(|rule| !rule.draft) {
        rules.iter_mut().for_each(|rule| rule.draft = true);
    }
    let sharing = match chance.below(6) {
        _ if has_encoder => None,
        0 => None,
        1 | 2 => Some(Retention::Replay),
        3 if sparse => Some(Retention::Every { tokens: 16 }),
        _ => Some(Retention::Dense),
    };
    (rules, sharing)
}

impl<'a> History<'a> {
    fn start(seed: u64, python: &'a mut Python) -> Self {
        let mut chance = Chance(seed);
        let (groups, sharing) = any_groups(&mut chance);
        let config = GroupsConfig {
            blocks: 8 + groups.len() * (6 + chance.below(24)),
            groups,
            sharing,
            max_tokens: 64,
            in_flight_tokens: chance.of(&[8, 16]),
            watermark_blocks: chance.below(3),
            hash_tokens: None,
        };
        let pool = GroupPool::new(&config).unwrap();
        let groups: Vec<Value> = config.groups.iter().map(|rule| json_of(&rule.spec, rule.draft)).collect();
        let sharing = match sharing {
            None => json!("off"),
            Some(Retention::Dense) => json!("dense"),
            Some(Retention::Replay) => json!("replay"),
            Some(Retention::Every { tokens }) => json!(tokens),
        };
        let sizes = python.ask(&json!({
            "op": "new", "groups": groups, "blocks": config.blocks, "sharing": sharing, "max_tokens": config.max_tokens,
            "in_flight": config.in_flight_tokens, "watermark": config.watermark_blocks,
        }));
        assert_eq!(sizes["hit_tokens"], json!(pool.hit_tokens()), "{seed}");
        if config.sharing.is_some() {
            assert_eq!(sizes["hash_tokens"], json!(pool.hash_tokens()), "{seed}");
        }
        let scope = HashScope { model: "m", tokens_per_block: pool.hash_tokens(), adapter: None, salt: b"" };
        let ends = |rule: &GroupRule| {
            matches!(rule.spec.kind, LayerKind::State { keeping: StateKeeping::StepEnds, .. })
                .then_some(rule.spec.tokens_per_block as usize)
        };
        let aligned = config.groups.iter().filter_map(ends).max().unwrap_or(1);
        let hasher = BlockHasher::new(&scope).unwrap();
        let (requests, next, counts) = Default::default();
        Self { seed, chance, python, pool, config, hasher, requests, next, aligned, counts }
    }

    fn run(mut self) -> Counts {
        for _ in 0..STEPS {
            match self.chance.below(10) {
                0..=3 if self.requests.len() < 6 => self.admit(),
                0 => {
                    self.pool.begin_step();
                    self.python.ask(&json!({ "op": "step" }));
                }
                9 if !self.requests.is_empty() => self.end(),
                8 if !self.requests.is_empty() && self.chance.one_in(4) => self.spoil(),
                _ if !self.requests.is_empty() => self.step(),
                _ => {}
            }
        }
        while !self.requests.is_empty() {
            self.end();
        }
        let counts = self.pool.counts();
        assert_eq!(counts.free, counts.total, "{}: nothing leaks", self.seed);
        self.counts.evicted = counts.evicted_total;
        self.counts
    }

    /// Prompts begin alike, part somewhere, and part again.
    fn prompt(&mut self) -> Vec<u32> {
        let len = 1 + self.chance.below(50);
        let (first, second) = (self.chance.below(3), self.chance.below(3));
        let (parting, again) = (self.chance.of(&[8, 12, 20]), self.chance.of(&[24, 32]));
        let token = |at: usize| match at {
            _ if at < parting => (first * 100 + at) as u32,
            _ if at < again => (1000 + second * 100 + at) as u32,
            _ => (5000 + first * 100 + second * 10 + at * 7) as u32,
        };
        (0..len).map(token).collect()
    }

    fn asked(&self, request: &Request, hashes: &[BlockHash], op: &str, more: Value) -> Value {
        let hashes: Vec<String> =
            hashes.iter().map(|hash| hash.get().iter().map(|byte| format!("{byte:02x}")).collect()).collect();
        let mut ask = json!({
            "op": op, "id": request.id, "hashes": hashes, "tokens": request.tokens.len(), "prompt": request.prompt,
            "computed": request.computed, "in_flight": request.in_flight, "junction": request.junction, "waits": !request.running,
        });
        ask.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        ask
    }

    fn admit(&mut self) {
        let tokens = self.prompt();
        let encoder = if self.config.groups.iter().any(|rule| rule.spec.kind == LayerKind::Cross) {
            self.chance.below(12)
        } else {
            0
        };
        let (id, prompt) = (self.next, tokens.len());
        self.next += 1;
        let (table, computed, in_flight, junction) = (self.pool.open(), 0, 0, 0);
        let (loading, running) = (false, false);
        let mut request =
            Request { id, table, tokens, prompt, computed, in_flight, junction, loading, running, encoder };
        let hashes = self.hasher.chain(&request.tokens);
        let hit = self.pool.computed_blocks(&hashes, prompt);
        let ids: Vec<_> = (0..self.config.groups.len()).map(|group| json!(hit.ids(group))).collect();
        let theirs = self.python.ask(&self.asked(&request, &hashes, "lookup", json!({})));
        let ours = json!({ "tokens": hit.tokens(), "junction": hit.junction(), "ids": ids });
        assert_eq!(ours, theirs, "{}: lookup of {} tokens, {:?}", self.seed, prompt, self.config);
        self.counts.asked += 1;
        self.counts.hits += usize::from(hit.tokens() > 0);
        self.counts.hit_tokens += hit.tokens();
        request.junction = hit.junction();
        let rest = prompt - hit.tokens();
        let external = if self.chance.one_in(3) { 1 + self.chance.below(rest) } else { 0 };
        let chunk = if external > 0 { 0 } else { self.chunk(hit.tokens(), prompt) };
        if self.allocate(&mut request, Some(&hit), external, chunk) {
            request.computed = hit.tokens() + external + chunk;
            request.loading = external > 0;
            if !request.loading {
                self.fill(&mut request, hit.tokens() + chunk);
            }
            self.requests.push(request);
        }
    }

    /// The end of the next chunk of a prompt.
    fn chunk(&mut self, computed: usize, prompt: usize) -> usize {
        let end = (computed + 1 + self.chance.below(self.config.in_flight_tokens)).min(prompt);
        let whole = end / self.aligned * self.aligned;
        let next = (computed / self.aligned + 1) * self.aligned;
        let end = if end == prompt || self.aligned == 1 { end } else { whole.max(next).min(prompt) };
        end - computed
    }

    fn allocate(&mut self, request: &mut Request, hit: Option<&Hit>, external: usize, new: usize) -> bool {
        let whole = hit.is_some() && self.chance.one_in(2);
        let lookahead = if self.chance.one_in(3) { self.chance.below(4) } else { 0 };
        let reserved = if external > 0 { self.chance.below(4) } else { 0 };
        let encoder_tokens = if hit.is_some() { request.encoder } else { 0 };
        let ask = Ask {
            computed_tokens: request.computed,
            hit,
            external_tokens: external,
            new_tokens: new,
            lookahead_tokens: lookahead,
            in_flight_tokens: request.in_flight,
            encoder_tokens,
            whole_tokens: whole.then_some(request.tokens.len()),
            reserved_blocks: reserved,
            keep_watermark: !request.running,
        };
        let slots = self.pool.allocate_slots(&mut request.table, &ask).unwrap();
        let asked = json!({
            "begins": hit.is_some(), "new": new, "lookahead": lookahead, "external": external, "whole": whole, "reserved": reserved,
            "encoder_tokens": encoder_tokens,
        });
        let theirs = self.python.ask(&self.asked(request, &self.hasher.chain(&request.tokens), "allocate", asked));
        match slots {
            Slots::Given => self.counts.given += 1,
            Slots::Short { .. } => self.counts.short += 1,
            Slots::NextStep => self.counts.next_step += 1,
        }
        assert_eq!(theirs["given"], json!(slots == Slots::Given), "{}: {slots:?} {ask:?} {:?}", self.seed, self.config);
        self.compare(request, &theirs, "allocate");
        slots == Slots::Given
    }

    fn compare(&mut self, request: &Request, theirs: &Value, what: &str) {
        let ours: Vec<_> = (0..request.table.groups()).map(|group| json!(request.table.ids(group))).collect();
        assert_eq!(json!(ours), theirs["ids"], "{}: {what}, {:?}", self.seed, self.config);
        self.compare_counts(theirs, what);
    }

    fn compare_counts(&mut self, theirs: &Value, what: &str) {
        let counts = self.pool.counts();
        let ours = json!([counts.free, counts.registered]);
        assert_eq!(ours, json!([theirs["free"], theirs["cached"]]), "{}: {what}, {:?}", self.seed, self.config);
    }

    fn fill(&mut self, request: &mut Request, tokens: usize) {
        let tokens = tokens.min(request.tokens.len());
        let hashes = self.hasher.chain(&request.tokens);
        let filled = Filled { hashes: &hashes, tokens, prompt_tokens: request.prompt, junction: request.junction };
        self.pool.cache_full_blocks(&mut request.table, &filled).unwrap();
        let theirs = self.python.ask(&self.asked(request, &hashes, "cache", json!({ "filled": tokens })));
        self.compare(request, &theirs, "cache");
    }

    /// What was loaded is verified, or a running request goes on.
    fn step(&mut self) {
        let at = self.chance.below(self.requests.len());
        let mut request = self.requests.swap_remove(at);
        if request.loading {
            let good = if self.chance.one_in(4) { self.chance.below(request.computed + 1) } else { request.computed };
            let good = if good < request.computed { good / 8 * 8 } else { good };
            self.fill(&mut request, good);
            request.computed = good.min(request.tokens.len() - 1);
            (request.loading, request.running) = (false, true);
            self.requests.push(request);
            return;
        }
        request.running = true;
        if request.computed >= request.tokens.len() {
            let token = 9000 + self.chance.below(3) as u32;
            request.tokens.push(token);
        }
        if request.tokens.len() >= self.config.max_tokens - 4 {
            self.requests.push(request);
            return self.end_at(at.min(self.requests.len() - 1));
        }
        let new = match request.computed < request.prompt {
            true => self.chunk(request.computed, request.prompt),
            false => request.tokens.len() - request.computed,
        };
        request.in_flight = if self.chance.one_in(4) { self.chance.below(request.computed + 1).min(6) } else { 0 };
        if self.allocate(&mut request, None, 0, new) {
            request.computed += new;
            let computed = request.computed;
            self.fill(&mut request, computed);
        }
        self.requests.push(request);
    }

    fn end(&mut self) {
        let at = self.chance.below(self.requests.len());
        self.end_at(at);
    }

    fn end_at(&mut self, at: usize) {
        let request = self.requests.swap_remove(at);
        let theirs = self.python.ask(&self.asked(&request, &[], "free", json!({})));
        self.pool.free(request.table);
        self.compare_counts(&theirs, "free");
    }

    /// A load turns out wrong after all.
    fn spoil(&mut self) {
        let at = self.chance.below(self.requests.len());
        let mut request = self.requests.swap_remove(at);
        let from = self.chance.below(request.computed + 1) / 8 * 8;
        let theirs = self.python.ask(&self.asked(&request, &[], "evict", json!({ "filled": from })));
        self.pool.evict_from(&mut request.table, from).unwrap();
        self.compare(&request, &theirs, "evict");
        self.requests.push(request);
        let last = self.requests.len() - 1;
        self.end_at(last);
    }
}

fn histories() -> u64 {
    std::env::var("KVFERRY_GROUP_HISTORIES").map_or(HISTORIES, |count| count.parse().expect("a number of histories"))
}

fn requests_get_the_blocks_that_vllm_gives_them(python: &mut Python) {
    let mut all = Counts::default();
    for seed in 0..histories() {
        let counts = History::start(seed, python).run();
        all.asked += counts.asked;
        all.hits += counts.hits;
        all.hit_tokens += counts.hit_tokens;
        all.given += counts.given;
        all.short += counts.short;
        all.next_step += counts.next_step;
        all.evicted += counts.evicted;
    }
    println!("{all:?}");
    assert!(all.hits > 0 && all.short > 0 && all.evicted > 0, "histories that show nothing: {all:?}");
}
