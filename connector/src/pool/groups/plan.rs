//! Which layers share a block table: groups of layers whose blocks take the same bytes, so that one pool serves all of them.
//!
//! A model that repeats (1 full, 5 window) ten times has 6 groups of 10 layers: each group has a table of its own per request, and a
//! block, whichever group has it, holds one page of each of 10 layers. What a window has passed is thus room for anybody.
//!
//! Source: `get_kv_cache_groups` in vLLM's `v1/core/kv_cache_utils.py`, 0.32.0. Drafters that it finds by name, layers of hidden states,
//! context parallelism and alignments that a backend asks for are not done.

use super::spec::{alike, merged};
use super::{GroupError, LayerKind, LayerSpec, PageContent, StateKeeping, packed};
use crate::sizing::Placement;

/// Layers with one block table.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LayerGroup {
    /// Places among the layers that were given, in the order in which their pages lie.
    pub layers: Vec<usize>,
    /// What each of them keeps now: blocks may have become longer, and pages padded.
    pub specs: Vec<LayerSpec>,
    /// What decides the group's table. Where pages differ it is the first layer's.
    pub spec: LayerSpec,
}

impl LayerGroup {
    /// Bytes of a block of it.
    #[must_use]
    pub fn block_bytes(&self) -> u64 {
        self.specs.iter().map(LayerSpec::page_bytes).sum()
    }

    /// A group whose layers have one spec, merged.
    fn of(layers: Vec<usize>, all: &[LayerSpec]) -> Self {
        let specs: Vec<LayerSpec> = layers.iter().map(|layer| all[*layer]).collect();
        match merged(&specs) {
            Some(spec) => Self { specs: vec![spec; layers.len()], layers, spec },
            None => Self::mixed(layers, all),
        }
    }

    /// A group whose layers' pages differ.
    pub(super) fn mixed(layers: Vec<usize>, all: &[LayerSpec]) -> Self {
        let specs: Vec<LayerSpec> = layers.iter().map(|layer| all[*layer]).collect();
        Self { spec: specs[0], layers, specs }
    }
}

/// How a model's layers are grouped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GroupPlan {
    /// The groups, in the order of their numbers.
    pub groups: Vec<LayerGroup>,
    /// Bytes of a block, whichever group has it: those of the largest.
    pub block_bytes: u64,
}

impl GroupPlan {
    /// Groups a model's layers; `placement` says whether all layers of a block lie together, where pages may differ.
    ///
    /// # Errors
    /// [`GroupError::Layer`], [`GroupError::Page`], or [`GroupError::Empty`] if nothing is kept.
    pub fn new(layers: &[LayerSpec], placement: Placement) -> Result<Self, GroupError> {
        if let Some(layer) = layers.iter().position(|spec| !is_sound(spec)) {
            return Err(GroupError::Layer { layer });
        }
        let kept: Vec<usize> = (0..layers.len()).filter(|at| layers[*at].kind != LayerKind::EncoderOnly).collect();
        if kept.is_empty() {
            return Err(GroupError::Empty);
        }
        let specs: Vec<LayerSpec> = kept.iter().map(|layer| layers[*layer]).collect();
        let groups = if merged(&specs).is_some() {
            vec![LayerGroup::of(kept, layers)]
        } else if alike(&specs) {
            vec![LayerGroup::mixed(kept, layers)]
        } else if let (Placement::Packed { .. }, true) = (placement, pages_differ(&specs)) {
            packed::groups(&kept, layers)
        } else {
            let mut unified = layers.to_vec();
            match unify_pages(&kept, &mut unified) {
                Ok(()) => equal_groups(&kept, &unified),
                Err(refused) => vec![promoted(&kept, layers).ok_or(refused)?],
            }
        };
        let block_bytes = groups.iter().map(LayerGroup::block_bytes).max().unwrap_or(0);
        Ok(Self { groups, block_bytes })
    }

    /// How many blocks fit into `bytes`, the null block among them.
    #[must_use]
    pub fn blocks_in(&self, bytes: u64) -> u64 {
        bytes / self.block_bytes.max(1)
    }

    /// Blocks that a request of `tokens` tokens holds at most, of all groups together, while `in_flight_tokens` are computed at a time.
    #[must_use]
    pub fn blocks_per_request(&self, tokens: usize, in_flight_tokens: usize, encoder_tokens: usize) -> usize {
        let most = |group: &LayerGroup| {
            let layers = group.specs.iter();
            layers.map(|spec| spec.blocks_per_request(tokens, in_flight_tokens, encoder_tokens)).max().unwrap_or(0)
        };
        self.groups.iter().map(most).sum()
    }
}

fn is_sound(spec: &LayerSpec) -> bool {
    let kept = match spec.kind {
        LayerKind::Full { window_tokens, chunk_tokens } => window_tokens != Some(0) && chunk_tokens != Some(0),
        LayerKind::Window { window_tokens, .. } => window_tokens > 0,
        LayerKind::Chunked { chunk_tokens } => chunk_tokens > 0,
        LayerKind::Sink { sink_tokens } => sink_tokens > 0 && sink_tokens.is_multiple_of(spec.tokens_per_block.max(1)),
        LayerKind::Latent | LayerKind::State { .. } | LayerKind::Cross => true,
        LayerKind::EncoderOnly => return true,
    };
    let is_state = matches!(spec.kind, LayerKind::State { .. });
    kept && spec.tokens_per_block > 0
        && spec.content_bytes() > 0
        && is_state == matches!(spec.content, PageContent::State { .. })
}

fn pages_differ(specs: &[LayerSpec]) -> bool {
    specs.iter().any(|spec| spec.page_bytes() != specs[0].page_bytes())
}

/// Makes all pages as large as the largest: by longer blocks where that comes out even, else by padding.
fn unify_pages(kept: &[usize], layers: &mut [LayerSpec]) -> Result<(), GroupError> {
    let wanted = kept.iter().map(|layer| layers[*layer].page_bytes()).max().unwrap_or(0);
    for layer in kept.iter().copied() {
        let spec = &mut layers[layer];
        let bytes = spec.page_bytes();
        let is_state = matches!(spec.kind, LayerKind::State { .. });
        if bytes == wanted {
        } else if is_state {
            spec.padded_bytes = Some(wanted);
        } else if wanted.is_multiple_of(bytes) && spec.padded_bytes.is_none() {
            spec.tokens_per_block *= (wanted / bytes) as u32;
        } else if spec.kind == LayerKind::Latent {
            return Err(GroupError::Page { layer, bytes, wanted });
        } else {
            spec.padded_bytes = Some(wanted);
        }
    }
    Ok(())
}

/// Groups of as many layers each, or fewer, all with pages of one size. The smallest kind gives the number, unless the largest has few
/// more: then groups are padded up to that.
fn equal_groups(kept: &[usize], layers: &[LayerSpec]) -> Vec<LayerGroup> {
    let mut kinds: Vec<(LayerSpec, Vec<usize>)> = vec![];
    for layer in kept.iter().copied() {
        match kinds.iter_mut().find(|(spec, _)| *spec == layers[layer]) {
            Some((_, of_kind)) => of_kind.push(layer),
            None => kinds.push((layers[layer], vec![layer])),
        }
    }
    let mut buckets: Vec<(Vec<LayerSpec>, Vec<usize>)> = vec![];
    for (spec, of_kind) in kinds {
        let fits = |specs: &[LayerSpec]| merged(&[specs, &[spec]].concat()).is_some();
        match buckets.iter_mut().find(|(specs, _)| fits(specs)) {
            Some((specs, layers)) => {
                specs.push(spec);
                layers.extend(of_kind);
            }
            None => buckets.push((vec![spec], of_kind)),
        }
    }
    let sizes = || buckets.iter().map(|(_, layers)| layers.len());
    let (fewest, most) = (sizes().min().unwrap_or(1), sizes().max().unwrap_or(1));
    // vLLM's factor: 12 window and 13 full layers are two groups of 13, not three of 12.
    let group_size = if most * 2 < fewest * 3 { most } else { fewest };
    let mut groups = vec![];
    for (_, of_kind) in &buckets {
        let count = of_kind.len().div_ceil(group_size);
        // Each count-th layer, so that each stage of a pipeline has its share of each group.
        let every = |first: usize| of_kind.iter().copied().skip(first).step_by(count).collect();
        groups.extend((0..count).map(|first| LayerGroup::of(every(first), layers)));
    }
    groups
}

/// One group in which windows are kept whole, for latent layers beside windows whose pages cannot be made equal.
fn promoted(kept: &[usize], layers: &[LayerSpec]) -> Option<LayerGroup> {
    let has = |wanted: fn(LayerKind) -> bool| kept.iter().any(|layer| wanted(layers[*layer].kind));
    if !has(|kind| kind == LayerKind::Latent) || !has(|kind| matches!(kind, LayerKind::Window { .. })) {
        return None;
    }
    let full = || kept.iter().map(|layer| layers[*layer]).filter(LayerSpec::keeps_all);
    let size = full().next().map(|spec| spec.tokens_per_block)?;
    let one_size = full().all(|spec| spec.tokens_per_block == size);
    let mut layers = layers.to_vec();
    for layer in kept {
        let spec = &mut layers[*layer];
        if let LayerKind::Window { window_tokens, .. } = spec.kind {
            spec.kind = LayerKind::Full { window_tokens: Some(window_tokens), chunk_tokens: None };
            spec.tokens_per_block = if one_size { size } else { spec.tokens_per_block };
        }
    }
    let specs: Vec<LayerSpec> = kept.iter().map(|layer| layers[*layer]).collect();
    alike(&specs).then(|| LayerGroup::mixed(kept.to_vec(), &layers))
}

/// Whether hashes must be as coarse as hits: states that are not kept where steps end cannot be found between.
pub(super) fn needs_coarse_hashes(spec: &LayerSpec) -> bool {
    matches!(spec.kind, LayerKind::State { keeping: StateKeeping::Running | StateKeeping::EachBlock, .. })
}
