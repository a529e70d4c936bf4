//! What a layer keeps, and how many bytes a page of it takes.
//!
//! Source: the classes of vLLM's `v1/kv_cache_interface.py`, 0.32.0.

/// What a layer keeps of a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum LayerKind {
    /// Every token.
    Full {
        /// The layer attends to so many last tokens only, though all are kept: a window without a group of its own.
        window_tokens: Option<u32>,
        /// The layer attends inside such chunks only, though all are kept.
        chunk_tokens: Option<u32>,
    },
    /// Every token, as one latent vector for all heads (MLA).
    Latent,
    /// Every token, behind sinks that the model brings.
    Sink {
        /// The sinks: whole blocks of them.
        sink_tokens: u32,
    },
    /// The last tokens.
    Window {
        /// The token that is computed and those before it: it attends to `window_tokens`, itself among them.
        window_tokens: u32,
        /// So many more before the window are kept, for a drafter that goes back.
        retained_tokens: u32,
    },
    /// The tokens since the last multiple of `chunk_tokens`.
    Chunked {
        /// Tokens in a chunk.
        chunk_tokens: u32,
    },
    /// A state of fixed size, after some tokens (Mamba, linear attention). A page is one state.
    State {
        /// Which states are kept.
        keeping: StateKeeping,
        /// Further states for tokens that a drafter guessed.
        speculative_blocks: u32,
    },
    /// Every token of an encoder, which never grow (cross attention). Never shared between requests.
    Cross,
    /// Nothing: it attends inside one step.
    EncoderOnly,
}

/// Which states of a sequence are kept. Source: `mamba_cache_mode`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum StateKeeping {
    /// The running one. Its block is made as long as the longest sequence, and prefixes are not shared.
    Running,
    /// The one at the end of each block, and the running one.
    EachBlock,
    /// The running one, and that at the end of each step, where the step ends with a block.
    StepEnds,
}

/// The content of a page.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PageContent {
    /// Keys and values, or latent vectors (one head, `head_size_v` 0), of each token.
    Tokens {
        /// Heads on this rank.
        heads: u32,
        /// Elements of a head's key.
        head_size: u32,
        /// Elements of a head's value.
        head_size_v: u32,
        /// Bytes of an element.
        element_bytes: u32,
    },
    /// A state.
    State {
        /// All its tensors together.
        bytes: u64,
    },
}

/// One layer's cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LayerSpec {
    /// What it keeps.
    pub kind: LayerKind,
    /// Tokens in a block; of a state, how many tokens apart states are kept.
    pub tokens_per_block: u32,
    /// What a page holds.
    pub content: PageContent,
    /// What a page takes, if more than its content.
    pub padded_bytes: Option<u64>,
}

impl LayerSpec {
    /// Bytes of a page's content.
    #[must_use]
    pub fn content_bytes(&self) -> u64 {
        match self.content {
            PageContent::State { bytes } => bytes,
            PageContent::Tokens { heads, head_size, head_size_v, element_bytes } => {
                let token = (u64::from(head_size) + u64::from(head_size_v)) * u64::from(element_bytes);
                u64::from(heads) * u64::from(self.tokens_per_block) * token
            }
        }
    }

    /// Bytes that a page takes.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.padded_bytes.unwrap_or(0).max(self.content_bytes())
    }

    /// Blocks of this layer that a request of `tokens` tokens holds at most, while `in_flight_tokens` are computed at a time; 0 of an
    /// encoder's own layers. `encoder_tokens` are those of the encoder.
    ///
    /// Source: `max_memory_usage_bytes` and `max_admission_blocks_per_request` of the specs.
    #[must_use]
    pub fn blocks_per_request(&self, tokens: usize, in_flight_tokens: usize, encoder_tokens: usize) -> usize {
        let size = self.tokens_per_block as usize;
        match self.kind {
            LayerKind::Full { .. } | LayerKind::Latent | LayerKind::Sink { .. } => tokens.div_ceil(size),
            LayerKind::Window { .. } | LayerKind::Chunked { .. } => {
                self.most_blocks(tokens, in_flight_tokens).unwrap_or(0)
            }
            LayerKind::State { keeping, speculative_blocks } => {
                let running = if keeping == StateKeeping::StepEnds { 2 } else { 1 };
                running + speculative_blocks as usize
            }
            LayerKind::Cross => encoder_tokens.div_ceil(size),
            LayerKind::EncoderOnly => 0,
        }
    }

    /// Of what frees blocks while it goes on, the most that one request ever holds.
    pub(super) fn most_blocks(&self, tokens: usize, in_flight_tokens: usize) -> Option<usize> {
        let size = self.tokens_per_block as usize;
        match self.kind {
            // A window may begin inside a block.
            LayerKind::Window { window_tokens, retained_tokens } => {
                let kept = (window_tokens as usize).saturating_sub(1) + retained_tokens as usize;
                Some((kept + in_flight_tokens).min(tokens).div_ceil(size) + 1)
            }
            LayerKind::Chunked { chunk_tokens } => {
                Some((chunk_tokens as usize + in_flight_tokens).min(tokens).div_ceil(size))
            }
            _ => None,
        }
    }

    /// How many of the first tokens the next one does not need, when `computed` are there.
    pub(super) fn passed_tokens(&self, computed: usize) -> usize {
        match self.kind {
            LayerKind::Window { window_tokens, retained_tokens } => {
                (computed + 1).saturating_sub(window_tokens as usize + retained_tokens as usize)
            }
            LayerKind::Chunked { chunk_tokens } => computed / chunk_tokens as usize * chunk_tokens as usize,
            LayerKind::State { .. } => computed.saturating_sub(1),
            _ => 0,
        }
    }

    /// Whether prefixes of it can be shared.
    pub(super) fn is_cacheable(&self) -> bool {
        !matches!(self.kind, LayerKind::Cross | LayerKind::EncoderOnly)
    }

    pub(super) fn keeps_all(&self) -> bool {
        matches!(self.kind, LayerKind::Full { .. } | LayerKind::Latent | LayerKind::Sink { .. })
    }
}

/// One spec for all, if they can be one: equal, or full attention that differs only in what its layers do not look at.
///
/// Source: `merge` of the specs.
pub(super) fn merged(specs: &[LayerSpec]) -> Option<LayerSpec> {
    let first = *specs.first()?;
    if specs.iter().all(|spec| *spec == first) {
        return Some(first);
    }
    let (mut windows, mut chunks) = (None, None);
    for spec in specs {
        let LayerKind::Full { window_tokens, chunk_tokens } = spec.kind else { return None };
        let alike = LayerSpec { kind: first.kind, ..*spec } == first;
        if !alike || !agree(&mut windows, window_tokens) || !agree(&mut chunks, chunk_tokens) {
            return None;
        }
    }
    let kind = LayerKind::Full { window_tokens: windows, chunk_tokens: chunks };
    (windows.is_none() || chunks.is_none()).then_some(LayerSpec { kind, ..first })
}

/// Whether all need the same slots, so that one block table serves them though their pages differ.
///
/// Source: `UniformTypeKVCacheSpecs.is_uniform_type`.
pub(super) fn alike(specs: &[LayerSpec]) -> bool {
    let Some(first) = specs.first() else { return true };
    specs.iter().all(|spec| {
        spec.tokens_per_block == first.tokens_per_block
            && match (first.kind, spec.kind) {
                (LayerKind::Window { window_tokens, .. }, LayerKind::Window { window_tokens: other, .. }) => {
                    window_tokens == other
                }
                (LayerKind::Chunked { chunk_tokens }, LayerKind::Chunked { chunk_tokens: other }) => {
                    chunk_tokens == other
                }
                (LayerKind::State { speculative_blocks, .. }, LayerKind::State { speculative_blocks: other, .. }) => {
                    speculative_blocks == other && spec.page_bytes() == first.page_bytes()
                }
                (LayerKind::Cross, LayerKind::Cross) => true,
                _ => first.keeps_all() && spec.keeps_all(),
            }
    })
}

fn agree(seen: &mut Option<u32>, found: Option<u32>) -> bool {
    let same = seen.is_none() || found.is_none() || *seen == found;
    *seen = seen.or(found);
    same
}
