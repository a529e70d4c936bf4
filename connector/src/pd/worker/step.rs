//! Which part of the KV becomes ready when, as the model thread goes through a step.
//!
//! A step that ends a prompt hands over groups of layers as they are saved, sized by what compute and the link were measured to
//! take ([`layer_groups`]). One that does not hands over whole blocks when it is complete, if what is left to compute will hide
//! them, and groups of layers otherwise.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use kvferry_protocol::transfer::Rect;
use kvferry_protocol::{LayerId, TransferId};

use super::groups::{ComputeRate, LayerTimes, LinkRate, WRITE_SECONDS, fits_behind, layer_groups};
use crate::contract::{RequestId, Save, StepMeta};
use crate::pd::caches::Caches;
use crate::trace::{Kind, Span, Tracer};

/// The model thread's own bookkeeping of one step, and how far each transfer got.
#[derive(Debug)]
pub(super) struct StepProgress {
    first_layer: u16,
    layers: u16,
    tokens_per_block: u32,
    bytes_per_cell: u64,
    /// Layers of a group, where they are not measured.
    fixed_group: Option<u16>,
    compute: ComputeRate,
    saves: Vec<Open>,
    reading: Vec<RequestId>,
    /// How far each transfer got.
    handed: BTreeMap<TransferId, HandedSoFar>,
    /// How long this step waited for layers, if it read while something landed.
    waited: Option<Duration>,
    clock: StepClock,
    /// Layers of this step that were saved, as long as they came in order.
    saved: u16,
    /// Where this step's groups of layers end, once that is planned.
    ends: Vec<u16>,
}

/// Part of a request's KV that is in the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Handed {
    pub(super) transfer: TransferId,
    pub(super) rect: Rect,
    /// What the engine computed for it since the last part of this transfer.
    pub(super) compute: Duration,
}

/// When what happened in a step.
#[derive(Debug)]
struct StepClock {
    began: Instant,
    /// Whether the engine computed anything.
    computes: bool,
    /// Tokens that it computed for transfers.
    tokens: u64,
    /// Until when the step's compute is in the timeline, and up to which layer.
    drawn: (Instant, u16),
}

#[derive(Debug)]
struct HandedSoFar {
    request: RequestId,
    /// Tokens from which on nothing was handed over.
    until: u32,
    /// Tokens that were computed.
    computed: u32,
    /// Compute that no part was told of.
    untold: Duration,
}

/// One save of this step.
#[derive(Debug)]
struct Open {
    transfer: TransferId,
    tokens: Range<u32>,
    /// Tokens of the prompt that later steps compute.
    rest: u32,
    /// Whether it goes in groups of layers; known when they are planned.
    by_layer: bool,
    /// Layers of this worker below this one were handed over in this step.
    layers_done: u16,
    /// Compute before this step that no part was told of, and since when there is more.
    untold: Duration,
    since: Instant,
}

impl StepProgress {
    /// With `fixed_group`, groups have so many layers.
    pub(super) fn new(caches: &Caches, fixed_group: Option<u16>) -> Self {
        Self {
            first_layer: caches.shard().first_layer.get(),
            layers: caches.layout().shape().layers,
            tokens_per_block: caches.tokens_per_block(),
            bytes_per_cell: caches.bytes_per_cell(&caches.heads()),
            fixed_group,
            compute: ComputeRate::default(),
            saves: Vec::new(),
            reading: Vec::new(),
            handed: BTreeMap::new(),
            waited: None,
            clock: StepClock::begin(false),
            saved: 0,
            ends: Vec::new(),
        }
    }

    pub(super) const fn layers(&self) -> usize {
        self.layers as usize
    }

    /// The worker's own number of one of the model's layers.
    pub(super) fn local_layer(&self, layer: LayerId) -> Option<usize> {
        let local = layer.get().checked_sub(self.first_layer)?;
        (local < self.layers).then_some(local.into())
    }

    pub(super) fn reading(&self) -> &[RequestId] {
        &self.reading
    }

    pub(super) fn begin(&mut self, meta: &StepMeta) {
        self.reading.clone_from(&meta.reading);
        self.saves.clear();
        self.ends.clear();
        self.saved = 0;
        self.clock = StepClock::begin(!meta.saves.is_empty());
        for save in &meta.saves {
            self.open(save);
        }
    }

    fn open(&mut self, save: &Save) {
        if save.first {
            let request = save.request.clone();
            let begin = || HandedSoFar { request, until: 0, computed: 0, untold: Duration::ZERO };
            self.handed.entry(save.transfer).or_insert_with(begin);
        }
        // Without an entry the transfer is over; the scheduler has not heard of it yet.
        let Some(so_far) = self.handed.get_mut(&save.transfer) else { return };
        if so_far.request != save.request {
            return; // The driver refuses it: what it computes is not what the transfer carries.
        }
        self.clock.tokens += u64::from(save.computed.saturating_sub(so_far.computed.max(save.cached)));
        so_far.computed = save.computed;
        let rest = save.prompt_tokens.saturating_sub(save.computed);
        let end = if rest == 0 { save.computed } else { save.computed / self.tokens_per_block * self.tokens_per_block };
        self.saves.push(Open {
            transfer: save.transfer,
            tokens: so_far.until..end.max(so_far.until),
            rest,
            by_layer: false,
            layers_done: 0,
            untold: so_far.untold,
            since: self.clock.began,
        });
        so_far.until = end.max(so_far.until);
    }

    /// What the step found in the cache and no step handed over yet, in whole blocks: shared, or brought by a tier.
    pub(super) fn ready_before(&mut self, saves: &[Save]) -> Vec<Handed> {
        let layers = self.first_layer..self.first_layer + self.layers;
        let mut ready = Vec::new();
        for save in saves {
            let end = save.ready / self.tokens_per_block * self.tokens_per_block;
            let open = self.saves.iter_mut().find(|open| open.transfer == save.transfer && open.tokens.start < end);
            let Some(open) = open.filter(|open| end < open.tokens.end) else { continue };
            let rect = Rect::new(open.tokens.start..end, layers.clone()).ok();
            ready.extend(rect.map(|rect| Handed { transfer: save.transfer, rect, compute: Duration::ZERO }));
            open.tokens.start = end;
        }
        ready
    }

    /// A layer of this step is in the cache: what may be handed over now. Layers come in order; one that comes out of order is
    /// left to [`StepProgress::all_saved`].
    pub(super) fn layer_saved(&mut self, layer: LayerId, link: impl FnOnce() -> LinkRate) -> Vec<Handed> {
        let Some(local) = self.local_layer(layer) else { return Vec::new() };
        self.clock.computes = true;
        if local != usize::from(self.saved) {
            return Vec::new();
        }
        self.saved += 1;
        if self.saved == 1 && self.saves.iter().any(|open| !open.tokens.is_empty()) {
            self.plan(&link());
        }
        if !self.ends.contains(&self.saved) {
            return Vec::new();
        }
        let (first, saved) = (self.first_layer, self.saved);
        let ready = self.saves.iter_mut().filter(|open| open.by_layer);
        ready.filter_map(|open| open.take(first, saved)).collect()
    }

    /// Decides which saves go in groups of layers, and where the groups end. The first layer is computed.
    fn plan(&mut self, link: &LinkRate) {
        let layers = u64::from(self.layers);
        let byte_seconds = link.byte_seconds();
        let first_layer = self.clock.began.elapsed().as_secs_f64();
        let layer_seconds = |rate: &ComputeRate, tokens: u64| rate.seconds(tokens).unwrap_or(first_layer);
        let compute = layer_seconds(&self.compute, self.clock.tokens);
        let transfer = |tokens: u64| (tokens * self.bytes_per_cell) as f64 * byte_seconds * SLACK;
        let (mut tokens, mut writes) = (0, 0);
        for open in self.saves.iter_mut().filter(|open| !open.tokens.is_empty()) {
            let (own, rest) = (open.tokens.len() as u64, u64::from(open.rest));
            let rest_compute = layers as f64 * self.compute.seconds(rest).unwrap_or(0.0);
            open.by_layer = rest == 0 || !fits_behind(transfer(own * layers), transfer(rest * layers), rest_compute);
            if open.by_layer {
                tokens += own;
                writes += 1;
            }
        }
        let times = LayerTimes { compute, transfer: transfer(tokens), write: WRITE_SECONDS * f64::from(writes) };
        self.ends = match self.fixed_group {
            Some(group) => (1..=self.layers).filter(|end| end.is_multiple_of(group)).collect(),
            None => layer_groups(self.layers, times),
        };
    }

    /// The step is complete: the rest of it.
    pub(super) fn all_saved(&mut self) -> Vec<Handed> {
        let (first, layers) = (self.first_layer, self.layers);
        let cells = self.clock.tokens * u64::from(layers);
        if self.clock.computes {
            let waited = self.waited.unwrap_or_default();
            self.compute.observe(cells, self.clock.began.elapsed().saturating_sub(waited));
        }
        let mut handed = Vec::new();
        for mut open in self.saves.drain(..) {
            handed.extend(open.take(first, layers));
            if let Some(so_far) = self.handed.get_mut(&open.transfer) {
                so_far.untold = open.untold + open.since.elapsed();
            }
        }
        handed
    }

    /// Draws the compute up to a layer that was handed over.
    pub(super) fn draw_layers(&mut self, tracer: &Tracer, ready: &[Handed]) {
        let Some(rect) = ready.last().map(|handed| handed.rect).filter(|_| tracer.is_on()) else { return };
        let (start, first) = self.clock.drawn;
        // Whole blocks of another request may follow the last group of layers: their compute is drawn already.
        let Ok(rect) = Rect::new(rect.tokens(), self.first_layer + first..rect.layers().end) else { return };
        tracer.record(|| Span::since(start, Kind::Compute).rect(rect));
        self.clock.drawn = (Instant::now(), rect.layers().end - self.first_layer);
    }

    /// Draws the whole step, if anything was computed in it.
    pub(super) fn draw_step(&self, tracer: &Tracer) {
        if self.clock.computes {
            tracer.record(|| Span::since(self.clock.began, Kind::Step));
        }
    }

    /// The step waited for a layer.
    pub(super) fn waited(&mut self, wait: Duration) {
        if !self.reading.is_empty() {
            *self.waited.get_or_insert_default() += wait;
        }
    }

    /// How long the step waited in all, once.
    pub(super) const fn take_waited(&mut self) -> Option<Duration> {
        self.waited.take()
    }

    /// These requests' sends are over.
    pub(super) fn ended(&mut self, sent: &[RequestId]) {
        if !sent.is_empty() {
            self.handed.retain(|_, so_far| !sent.contains(&so_far.request));
        }
    }

    /// Requests whose sends nobody will end any more, each once.
    pub(super) fn abandoned(&mut self) -> Vec<RequestId> {
        std::mem::take(&mut self.handed).into_values().map(|so_far| so_far.request).collect()
    }
}

impl StepClock {
    fn begin(computes: bool) -> Self {
        let began = Instant::now();
        Self { began, computes, tokens: 0, drawn: (began, 0) }
    }
}

impl Open {
    /// The layers below `until` that were not handed over, if there are any.
    fn take(&mut self, first_layer: u16, until: u16) -> Option<Handed> {
        let layers = first_layer + self.layers_done..first_layer + until;
        let rect = Rect::new(self.tokens.clone(), layers).ok()?;
        let now = Instant::now();
        let compute = std::mem::take(&mut self.untold) + now.duration_since(self.since);
        (self.layers_done, self.since) = (until, now);
        Some(Handed { transfer: self.transfer, rect, compute })
    }
}

/// The link is planned for as if it were slower by this: a group that is not sent when the next one is ready exposes all that
/// follow.
const SLACK: f64 = 1.2;

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(layers: u16, fixed_group: Option<u16>) -> StepProgress {
        StepProgress {
            first_layer: 0,
            layers,
            tokens_per_block: 16,
            bytes_per_cell: 1024,
            fixed_group,
            compute: ComputeRate::default(),
            saves: Vec::new(),
            reading: Vec::new(),
            handed: BTreeMap::new(),
            waited: None,
            clock: StepClock::begin(false),
            saved: 0,
            ends: Vec::new(),
        }
    }

    fn save(computed: u32, first: bool) -> StepMeta {
        let save = Save {
            request: RequestId::new("p"),
            transfer: TransferId::new(1),
            to: None,
            readers: 1,
            blocks: vec![],
            computed,
            prompt_tokens: 100,
            ready: 0,
            cached: 0,
            first,
        };
        StepMeta { saves: vec![save], ..StepMeta::default() }
    }

    /// A link that costs nothing beside compute.
    fn fast() -> LinkRate {
        LinkRate::new(Some(100_000.0))
    }

    fn rects(ready: Vec<Handed>) -> Vec<(Range<u32>, Range<u16>)> {
        ready.into_iter().map(|handed| (handed.rect.tokens(), handed.rect.layers())).collect()
    }

    fn layers(step: &mut StepProgress, layers: Range<u16>) -> Vec<(Range<u32>, Range<u16>)> {
        layers.flat_map(|layer| rects(step.layer_saved(LayerId::new(layer), fast))).collect()
    }

    #[test]
    fn whole_blocks_go_after_each_chunk_and_groups_of_layers_in_the_last() {
        let mut step = progress(20, Some(3));
        // A second for each token and layer: whatever a step takes, the rest hides it.
        step.compute.observe(1, Duration::from_secs(1));
        step.begin(&save(40, true));
        assert!(layers(&mut step, 0..20).is_empty());
        assert_eq!(rects(step.all_saved()), [(0..32, 0..20)]);
        step.compute.observe(1, Duration::from_secs(1));
        step.begin(&save(47, false));
        assert!(layers(&mut step, 0..20).is_empty());
        assert!(rects(step.all_saved()).is_empty(), "no block was completed");
        step.begin(&save(100, false));
        let seen = layers(&mut step, 0..20);
        assert_eq!(seen.len(), 6);
        assert!(seen.iter().all(|(tokens, layers)| *tokens == (32..100) && layers.len() == 3));
        assert_eq!(rects(step.all_saved()), [(32..100, 18..20)]);
        assert!(rects(step.all_saved()).is_empty());
    }

    #[test]
    fn what_was_there_before_the_step_goes_first_in_whole_blocks() {
        let mut step = progress(4, Some(1));
        let mut meta = save(100, true);
        meta.saves[0].ready = 70;
        step.begin(&meta);
        assert_eq!(rects(step.ready_before(&meta.saves)), [(0..64, 0..4)]);
        assert_eq!(layers(&mut step, 0..1), [(64..100, 0..1)]);
        assert_eq!(rects(step.all_saved()), [(64..100, 1..4)]);
        let mut step = progress(4, None);
        step.begin(&save(40, true));
        step.all_saved();
        let mut meta = save(100, false);
        meta.saves[0].ready = 40;
        step.begin(&meta);
        assert!(step.ready_before(&meta.saves).is_empty(), "all whole blocks before it were handed over");
    }

    #[test]
    fn a_chunk_that_the_rest_cannot_hide_goes_in_groups_of_whole_blocks() {
        let mut step = progress(4, Some(2));
        // No compute is known: nothing is known to hide the chunk.
        step.begin(&save(40, true));
        assert_eq!(layers(&mut step, 0..4), [(0..32, 0..2), (0..32, 2..4)]);
        assert!(rects(step.all_saved()).is_empty());
        step.begin(&save(100, false));
        assert_eq!(layers(&mut step, 0..4), [(32..100, 0..2), (32..100, 2..4)]);
    }

    #[test]
    fn measured_groups_cover_all_layers_once_and_end_with_the_last() {
        let mut step = progress(12, None);
        for tokens in [40, 70, 100] {
            step.begin(&save(tokens, tokens == 40));
            let mut next = 0;
            let slow = || LinkRate::new(Some(0.001));
            for layer in 0..12 {
                for (_, layers) in rects(step.layer_saved(LayerId::new(layer), slow)) {
                    assert_eq!((layers.start, layers.end), (next, layer + 1));
                    next = layers.end;
                }
            }
            assert_eq!(next, 12, "the last layer's end is the last group's");
            assert!(rects(step.all_saved()).is_empty());
        }
    }

    #[test]
    fn without_hooks_the_complete_step_hands_over_all_layers() {
        let mut step = progress(4, None);
        step.begin(&save(100, true));
        assert_eq!(rects(step.all_saved()), [(0..100, 0..4)]);
    }

    #[test]
    fn a_save_whose_transfer_is_over_hands_over_nothing() {
        let mut step = progress(4, None);
        step.begin(&save(40, true));
        assert_eq!(step.all_saved().len(), 1);
        step.ended(&[RequestId::new("p")]);
        step.begin(&save(100, false));
        assert!(step.all_saved().is_empty());
        assert!(step.handed.is_empty());
    }

    #[test]
    fn a_layer_out_of_order_waits_for_the_complete_step() {
        let mut step = progress(4, Some(1));
        step.begin(&save(100, true));
        assert!(layers(&mut step, 2..3).is_empty());
        assert_eq!(layers(&mut step, 0..1), [(0..100, 0..1)]);
        assert_eq!(rects(step.all_saved()), [(0..100, 1..4)]);
    }

    #[test]
    fn a_part_is_told_of_all_compute_since_the_part_before_it() {
        let mut step = progress(2, None);
        let start = Instant::now();
        step.begin(&save(10, true));
        assert!(step.all_saved().is_empty(), "no block was completed");
        step.begin(&save(100, false));
        let handed = step.all_saved();
        assert!(handed[0].compute <= start.elapsed());
        let told = step.handed[&TransferId::new(1)].untold;
        assert!(told <= start.elapsed() - handed[0].compute, "what was told is not told again");
    }
}
