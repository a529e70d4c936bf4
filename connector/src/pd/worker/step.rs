//! Which part of the KV becomes ready when, as the model thread goes through a step.
//!
//! A step that does not end a prompt hands over whole blocks when it is complete. The step that ends it hands over groups of
//! layers as they are saved, so that what is left after the last layer's compute is one group.

use std::collections::BTreeMap;
use std::time::Duration;

use kvferry_protocol::transfer::Rect;
use kvferry_protocol::{LayerId, TransferId};

use crate::contract::{RequestId, Save, StepMeta};
use crate::pd::caches::Caches;

/// The model thread's own bookkeeping of one step, and how far each transfer got.
#[derive(Debug)]
pub(super) struct StepProgress {
    first_layer: u16,
    layers: u16,
    tokens_per_block: u32,
    group: u16,
    saves: Vec<Open>,
    reading: Vec<RequestId>,
    /// Tokens from which on nothing was handed over yet, by transfer.
    handed: BTreeMap<TransferId, (RequestId, u32)>,
    /// How long this step waited for layers, if it read while something landed.
    waited: Option<Duration>,
}

/// One save of this step.
#[derive(Debug)]
struct Open {
    transfer: TransferId,
    tokens: std::ops::Range<u32>,
    last: bool,
    /// Layers of this worker below this one were handed over in this step.
    layers_done: u16,
}

impl StepProgress {
    pub(super) fn new(caches: &Caches) -> Self {
        let layers = caches.layout().shape().layers;
        Self {
            first_layer: caches.shard().first_layer.get(),
            layers,
            tokens_per_block: caches.tokens_per_block(),
            group: layers.div_ceil(LAYER_GROUPS),
            saves: Vec::new(),
            reading: Vec::new(),
            handed: BTreeMap::new(),
            waited: None,
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
        for save in &meta.saves {
            self.open(save);
        }
    }

    fn open(&mut self, save: &Save) {
        if save.first {
            self.handed.entry(save.transfer).or_insert_with(|| (save.request.clone(), 0));
        }
        // Without an entry the transfer is over; the scheduler has not heard of it yet.
        let Some((request, handed)) = self.handed.get_mut(&save.transfer) else { return };
        if *request != save.request {
            return; // The driver refuses it: what it computes is not what the transfer carries.
        }
        let last = save.computed >= save.prompt_tokens;
        let end = if last { save.computed } else { save.computed / self.tokens_per_block * self.tokens_per_block };
        if *handed < end {
            self.saves.push(Open { transfer: save.transfer, tokens: *handed..end, last, layers_done: 0 });
            *handed = end;
        }
    }

    /// What the step found in the cache and no step handed over yet, in whole blocks: shared, or brought by a tier.
    pub(super) fn ready_before(&mut self, saves: &[Save]) -> Vec<(TransferId, Rect)> {
        let layers = self.first_layer..self.first_layer + self.layers;
        let mut ready = Vec::new();
        for save in saves {
            let end = save.ready / self.tokens_per_block * self.tokens_per_block;
            let open = self.saves.iter_mut().find(|open| open.transfer == save.transfer && open.tokens.start < end);
            let Some(open) = open.filter(|open| end < open.tokens.end) else { continue };
            ready.extend(Rect::new(open.tokens.start..end, layers.clone()).ok().map(|rect| (save.transfer, rect)));
            open.tokens.start = end;
        }
        ready
    }

    /// A layer of this step is in the cache: what may be handed over now. Layers come in order; one that comes out of order is
    /// left to [`StepProgress::all_saved`].
    pub(super) fn layer_saved(&mut self, layer: LayerId) -> Vec<(TransferId, Rect)> {
        let Some(done) = self.local_layer(layer).map(|local| local as u16 + 1) else { return Vec::new() };
        if !done.is_multiple_of(self.group) {
            return Vec::new();
        }
        let (first, group) = (self.first_layer, self.group);
        let ready = |open: &mut Open| {
            if !open.last || open.layers_done + group != done {
                return None;
            }
            Some(open.take(first, done))
        };
        self.saves.iter_mut().filter_map(ready).collect()
    }

    /// The step is complete: the rest of it.
    pub(super) fn all_saved(&mut self) -> Vec<(TransferId, Rect)> {
        let (first, layers) = (self.first_layer, self.layers);
        self.saves.drain(..).filter(|open| open.layers_done < layers).map(|mut open| open.take(first, layers)).collect()
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
            self.handed.retain(|_, (request, _)| !sent.contains(request));
        }
    }
}

impl Open {
    fn take(&mut self, first_layer: u16, until: u16) -> (TransferId, Rect) {
        let layers = first_layer + self.layers_done..first_layer + until;
        self.layers_done = until;
        (self.transfer, Rect::new(self.tokens.clone(), layers).expect("neither range is empty"))
    }
}

/// In how many groups of layers the last chunk of a prompt goes out: the exposed part of a transfer is one of them.
const LAYER_GROUPS: u16 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(layers: u16) -> StepProgress {
        StepProgress {
            first_layer: 0,
            layers,
            tokens_per_block: 16,
            group: layers.div_ceil(LAYER_GROUPS),
            saves: Vec::new(),
            reading: Vec::new(),
            handed: BTreeMap::new(),
            waited: None,
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
            first,
        };
        StepMeta { saves: vec![save], ..StepMeta::default() }
    }

    fn rects(ready: Vec<(TransferId, Rect)>) -> Vec<(std::ops::Range<u32>, std::ops::Range<u16>)> {
        ready.into_iter().map(|(_, rect)| (rect.tokens(), rect.layers())).collect()
    }

    #[test]
    fn whole_blocks_go_after_each_chunk_and_groups_of_layers_in_the_last() {
        let mut step = progress(20);
        step.begin(&save(40, true));
        assert!(rects(step.layer_saved(LayerId::new(19))).is_empty());
        assert_eq!(rects(step.all_saved()), [(0..32, 0..20)]);
        step.begin(&save(47, false));
        assert!(rects(step.all_saved()).is_empty(), "no block was completed");
        step.begin(&save(100, false));
        let mut seen = Vec::new();
        for layer in 0..20 {
            seen.extend(rects(step.layer_saved(LayerId::new(layer))));
        }
        assert_eq!(seen.len(), 6);
        assert!(seen.iter().all(|(tokens, layers)| *tokens == (32..100) && layers.len() == 3));
        assert_eq!(rects(step.all_saved()), [(32..100, 18..20)]);
        assert!(rects(step.all_saved()).is_empty());
    }

    #[test]
    fn what_was_there_before_the_step_goes_first_in_whole_blocks() {
        let mut step = progress(4);
        let mut meta = save(100, true);
        meta.saves[0].ready = 70;
        step.begin(&meta);
        assert_eq!(rects(step.ready_before(&meta.saves)), [(0..64, 0..4)]);
        assert_eq!(rects(step.layer_saved(LayerId::new(0))), [(64..100, 0..1)]);
        assert_eq!(rects(step.all_saved()), [(64..100, 1..4)]);
        let mut step = progress(4);
        step.begin(&save(40, true));
        step.all_saved();
        let mut meta = save(100, false);
        meta.saves[0].ready = 40;
        step.begin(&meta);
        assert!(step.ready_before(&meta.saves).is_empty(), "all whole blocks before it were handed over");
    }

    #[test]
    fn without_hooks_the_complete_step_hands_over_all_layers() {
        let mut step = progress(4);
        step.begin(&save(100, true));
        assert_eq!(rects(step.all_saved()), [(0..100, 0..4)]);
    }

    #[test]
    fn a_save_whose_transfer_is_over_hands_over_nothing() {
        let mut step = progress(4);
        step.begin(&save(40, true));
        assert_eq!(step.all_saved().len(), 1);
        step.ended(&[RequestId::new("p")]);
        step.begin(&save(100, false));
        assert!(step.all_saved().is_empty());
        assert!(step.handed.is_empty());
    }

    #[test]
    fn a_layer_out_of_order_waits_for_the_complete_step() {
        let mut step = progress(4);
        step.begin(&save(100, true));
        assert!(rects(step.layer_saved(LayerId::new(2))).is_empty());
        assert_eq!(rects(step.layer_saved(LayerId::new(0))), [(0..100, 0..1)]);
        assert_eq!(rects(step.all_saved()), [(0..100, 1..4)]);
    }
}
