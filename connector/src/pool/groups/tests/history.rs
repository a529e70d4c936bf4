//! Random histories of requests. What the pool answers is compared with definitions: a hit is the longest prefix of which every group has
//! what it reads; a block that two requests have is the same tokens of the same group; and what no table has is free.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const HITS: usize = 8;

#[derive(Clone, Debug)]
enum Op {
    Admit { prompt: Vec<u32>, external: usize, chunk: usize, lookahead: usize },
    Step { which: usize, chunk: usize, in_flight: usize },
    Free { which: usize },
    Drop { which: usize },
    Evict { which: usize, from: usize },
    Begin,
}

fn any_op() -> impl Strategy<Value = Op> {
    // Few tokens at few places, so that prompts begin alike.
    let prompt = (0..2_u32, 0..2_u32, 1..40_usize).prop_map(|(first, second, len)| {
        let token = |at: usize| if at < 12 { first } else { first * 10 + second };
        (0..len).map(token).collect::<Vec<u32>>()
    });
    let external = prop_oneof![2 => Just(0), 1 => 1..30_usize];
    prop_oneof![
        4 => (prompt, external, 1..20_usize, 0..4_usize)
            .prop_map(|(prompt, external, chunk, lookahead)| Op::Admit { prompt, external, chunk, lookahead }),
        5 => (0..5_usize, 1..12_usize, 0..6_usize)
            .prop_map(|(which, chunk, in_flight)| Op::Step { which, chunk, in_flight }),
        1 => (0..5_usize).prop_map(|which| Op::Free { which }),
        1 => (0..5_usize).prop_map(|which| Op::Drop { which }),
        1 => (0..5_usize, 0..40_usize).prop_map(|(which, from)| Op::Evict { which, from }),
        3 => Just(Op::Begin),
    ]
}

fn any_groups() -> impl Strategy<Value = Vec<(LayerKind, u32)>> {
    let chunked = LayerKind::Chunked { chunk_tokens: 16 };
    proptest::sample::select(vec![
        vec![(FULL, 4)],
        vec![(window(9), 4)],
        vec![(FULL, 4), (window(7), 4)],
        vec![(FULL, 8), (window(7), 4), (window(20), 4)],
        vec![(FULL, 4), (chunked, 4), (chunked, 4)],
        vec![(FULL, 4), (state(StateKeeping::EachBlock), 4)],
        vec![(FULL, 4), (state(StateKeeping::StepEnds), 4), (window(6), 4)],
        vec![(window(6), 4), (window(14), 8)],
    ])
}

struct Request {
    table: GroupTable,
    tokens: Vec<u32>,
    computed: usize,
    loading: bool,
}

/// What is cached: of each group and prefix, in which block. A prefix's first block is the one that is found.
#[derive(Default)]
struct Cached(BTreeMap<(usize, Vec<u32>), u32>);

impl Cached {
    fn has(&self, group: usize, prefix: &[u32]) -> bool {
        self.0.contains_key(&(group, prefix.to_vec()))
    }

    /// Whether a group can go on behind a prefix.
    fn accepts(&self, group: usize, spec: &LayerSpec, prefix: &[u32]) -> bool {
        let (size, len) = (spec.tokens_per_block as usize, prefix.len());
        if !len.is_multiple_of(size) {
            return false;
        }
        let needed = match spec.kind {
            LayerKind::Window { window_tokens, .. } => {
                (len + 1).saturating_sub(window_tokens as usize) / size..len / size
            }
            LayerKind::Chunked { chunk_tokens } => {
                len / chunk_tokens as usize * chunk_tokens as usize / size..len / size
            }
            LayerKind::State { .. } => (len / size).saturating_sub(1)..len / size,
            _ => 0..len / size,
        };
        needed.into_iter().all(|at| self.has(group, &prefix[..(at + 1) * size]))
    }

    fn longest(&self, rules: &[GroupRule], tokens: &[u32], hit_tokens: usize) -> usize {
        let most = (tokens.len() - 1) / hit_tokens;
        let fits = |end: &usize| {
            rules.iter().enumerate().all(|(group, rule)| self.accepts(group, &rule.spec, &tokens[..end * hit_tokens]))
        };
        (0..=most).rev().find(fits).unwrap_or(0) * hit_tokens
    }
}

struct World {
    pool: GroupPool,
    requests: Vec<Request>,
    cached: Cached,
    blocks: usize,
}

impl World {
    fn apply(&mut self, op: Op) {
        match op {
            Op::Begin => self.pool.begin_step(),
            Op::Admit { prompt, external, chunk, lookahead } => self.admit(prompt, external, chunk, lookahead),
            Op::Step { which, chunk, in_flight } if which < self.requests.len() => self.step(which, chunk, in_flight),
            Op::Free { which } if which < self.requests.len() => {
                let request = self.requests.swap_remove(which);
                self.pool.free(request.table);
            }
            Op::Drop { which } if which < self.requests.len() => drop(self.requests.swap_remove(which)),
            Op::Evict { which, from } if which < self.requests.len() => {
                let request = &mut self.requests[which];
                self.pool.evict_from(&mut request.table, from).unwrap();
                for (group, rule) in self.pool.config.groups.iter().enumerate() {
                    let first = from / rule.spec.tokens_per_block as usize;
                    let gone = raw(&request.table, group).split_off(first.min(request.table.ids(group).len()));
                    self.cached.0.retain(|_, id| !gone.contains(id));
                }
                // What would be registered again has no place in the model.
                drop(self.requests.swap_remove(which));
            }
            _ => {}
        }
    }

    fn admit(&mut self, tokens: Vec<u32>, external: usize, chunk: usize, lookahead: usize) {
        let names = hashes(&self.pool, &tokens);
        let hit = self.pool.computed_blocks(&names, tokens.len());
        let want = self.cached.longest(&self.pool.config.groups, &tokens, self.pool.hit_tokens());
        assert_eq!(hit.tokens(), want, "{tokens:?} in {:?}", self.pool.config.groups);
        for (group, rule) in self.pool.config.groups.iter().enumerate() {
            let size = rule.spec.tokens_per_block as usize;
            for (at, id) in hit.ids(group).iter().enumerate().filter(|(_, id)| id.get() != 0) {
                let name = (group, tokens[..(at + 1) * size].to_vec());
                assert_eq!(self.cached.0.get(&name), Some(&id.get()), "group {group}, block {at}");
            }
        }
        // The last token is computed, also of a prompt that is loaded.
        let external = external.min(tokens.len() - 1 - hit.tokens());
        let chunk = if external > 0 { 0 } else { self.chunk(hit.tokens(), tokens.len(), chunk) };
        let mut request = Request { table: self.pool.open(), tokens, computed: 0, loading: external > 0 };
        let ask = Ask {
            hit: Some(&hit),
            external_tokens: external,
            new_tokens: chunk,
            lookahead_tokens: lookahead,
            ..Ask::default()
        };
        if self.allocate(&mut request, &ask) {
            request.computed = hit.tokens() + external + chunk;
            if !request.loading {
                self.fill(&mut request);
            }
            self.requests.push(request);
        }
    }

    /// Chunks end where states are kept.
    fn chunk(&self, computed: usize, len: usize, chunk: usize) -> usize {
        let end = computed + chunk;
        if end >= len { len - computed } else { end.next_multiple_of(HITS).min(len) - computed }
    }

    fn step(&mut self, which: usize, chunk: usize, in_flight: usize) {
        let mut request = self.requests.swap_remove(which);
        if std::mem::take(&mut request.loading) {
            self.fill(&mut request);
        } else {
            if request.computed == request.tokens.len() {
                request.tokens.push(request.tokens[0]);
            }
            let chunk = self.chunk(request.computed, request.tokens.len(), chunk);
            let ask = Ask {
                computed_tokens: request.computed,
                new_tokens: chunk,
                in_flight_tokens: in_flight.min(request.computed),
                ..Ask::default()
            };
            if self.allocate(&mut request, &ask) {
                request.computed += chunk;
                self.fill(&mut request);
            }
        }
        self.requests.push(request);
    }

    fn allocate(&mut self, request: &mut Request, ask: &Ask<'_>) -> bool {
        let free = self.pool.counts().free;
        let before: Vec<Vec<u32>> = (0..request.table.groups()).map(|group| raw(&request.table, group)).collect();
        let slots = self.pool.allocate_slots(&mut request.table, ask).unwrap();
        let given = slots == Slots::Given;
        let found = |group: usize| ask.hit.map_or(vec![], |hit| hit.ids(group).iter().map(|id| id.get()).collect());
        for (group, before) in before.iter().enumerate() {
            let now = raw(&request.table, group);
            if !given {
                assert!(before.len() == now.len(), "all or nothing");
                continue;
            }
            // Whoever gets a block from the free list has it alone, and what it held is not found any more.
            let (found, spec): (Vec<u32>, _) = (found(group), self.pool.config.groups[group].spec);
            let was = |at: usize, id: u32| before.get(at) == Some(&id) || found.get(at) == Some(&id);
            let new = (0..).zip(&now).filter(|(at, id)| **id != 0 && !was(*at, **id));
            let new: Vec<u32> = new.map(|(_, id)| *id).collect();
            self.cached.0.retain(|_, id| !new.contains(id));
            for other in &self.requests {
                let theirs = (0..now_groups(other)).flat_map(|group| raw(&other.table, group));
                assert!(!theirs.into_iter().any(|id| new.contains(&id)), "a block in two places");
            }
            let total = ask.computed_tokens + ask.hit.map_or(0, Hit::tokens) + ask.external_tokens;
            let needed = spec.passed_tokens(total) / spec.tokens_per_block as usize;
            let last = (total + ask.new_tokens).div_ceil(spec.tokens_per_block as usize);
            let kept = match spec.kind {
                LayerKind::State { keeping: StateKeeping::StepEnds, .. } => last - 1..last,
                _ => needed..last,
            };
            assert!(now[kept].iter().all(|id| *id != 0), "{spec:?}: {now:?} of {ask:?}");
        }
        match slots {
            Slots::Short { wanted, free: said } => assert!(wanted > said && said >= free),
            Slots::NextStep => assert!(ask.hit.is_some()),
            Slots::Given => {}
        }
        given
    }

    fn fill(&mut self, request: &mut Request) {
        let tokens = &request.tokens[..request.computed.min(request.tokens.len())];
        let names = hashes(&self.pool, &request.tokens);
        let filled = Filled { hashes: &names, tokens: tokens.len(), prompt_tokens: request.tokens.len(), junction: 0 };
        let cached: Vec<usize> = request.table.groups.iter().map(|group| group.cached).collect();
        self.pool.cache_full_blocks(&mut request.table, &filled).unwrap();
        for (group, rule) in self.pool.config.groups.iter().enumerate() {
            let size = rule.spec.tokens_per_block as usize;
            let whole = tokens.len() / self.pool.hit_tokens() * self.pool.hit_tokens();
            for at in (cached[group]..whole / size).filter(|at| request.table.ids(group)[*at].get() != 0) {
                let name = (group, tokens[..(at + 1) * size].to_vec());
                self.cached.0.entry(name).or_insert(request.table.ids(group)[at].get());
            }
        }
    }

    fn check(&mut self) {
        let mut holders: BTreeMap<u32, Vec<(usize, Vec<u32>)>> = BTreeMap::new();
        for request in &self.requests {
            for (group, rule) in self.pool.config.groups.iter().enumerate() {
                let size = rule.spec.tokens_per_block as usize;
                for (at, id) in raw(&request.table, group).into_iter().enumerate().filter(|(_, id)| *id != 0) {
                    let end = ((at + 1) * size).min(request.tokens.len());
                    holders.entry(id).or_default().push((group, request.tokens[..end].to_vec()));
                }
            }
        }
        assert_eq!(self.pool.counts().free, self.blocks - holders.len(), "what no table has is free");
        for (id, holders) in holders {
            assert!(holders.iter().all(|holder| *holder == holders[0]), "block {id} is {holders:?}");
        }
    }
}

fn now_groups(request: &Request) -> usize {
    request.table.groups()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 192, ..ProptestConfig::default() })]

    #[test]
    fn groups_agree_with_their_definitions(groups in any_groups(), blocks in 12..40_usize, ops in vec(any_op(), 0..120)) {
        let pool = pool(&groups, blocks);
        let mut world = World { pool, requests: vec![], cached: Cached::default(), blocks };
        for op in ops {
            world.apply(op);
            world.check();
        }
        world.requests.clear();
        world.check();
    }
}
