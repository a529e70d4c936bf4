//! What names a block besides its tokens, for vLLM: adapter, media, salt, prompt embeddings.
//!
//! Source: `generate_block_hash_extra_keys` in `vllm/v1/core/kv_cache_utils.py`.

use super::PoolError;
use super::encode::Encode;

/// How a vLLM writes extra keys into what it hashes; engines of two forms never share a block that has such keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ExtraForm {
    /// Each key with its kind: `("lora", name, path)`, `("mm", identifier, offset)`, `("cache_salt", salt)`,
    /// `("prompt_embeds", digest)`. Read in 0.32.0.
    #[default]
    Tagged,
    /// Bare names, salts and digests, and `(identifier, offset)` for media: earlier versions, and every version's KV events.
    Bare,
    /// As [`Bare`](Self::Bare), with media by their identifiers alone: versions before offsets counted.
    BareWithoutOffsets,
}

/// An adapter of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lora<'a> {
    /// Its name.
    pub name: &'a str,
    /// Where it was loaded from; counts in [`ExtraForm::Tagged`] only.
    pub path: &'a str,
}

/// An image, clip or the like, and the tokens that stand for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Media<'a> {
    /// The hash of its content, or the name that the client gave it.
    pub identifier: &'a str,
    /// Its first token, counted from the sequence's start.
    pub offset: u32,
    /// How many tokens stand for it.
    pub tokens: u32,
}

/// What names the blocks of a sequence besides its tokens. The default is nothing.
#[derive(Clone, Copy, Default)]
pub struct Extras<'a> {
    /// The adapter, in every block's name.
    pub lora: Option<Lora<'a>>,
    /// Media in the order of their offsets; each is in the name of the blocks that it touches.
    pub media: &'a [Media<'a>],
    /// What separates tenants, in the first block's name. vLLM takes an empty one for none.
    pub salt: Option<&'a str>,
    /// Of each block the SHA-256 of its prompt embeddings' bytes; none if the prompt is tokens. Blocks past its end have none.
    pub prompt_embeds: &'a [[u8; 32]],
}

/// The extra keys of one block.
#[derive(Clone, Copy)]
pub(super) struct BlockExtras<'a> {
    lora: Option<Lora<'a>>,
    media: &'a [Media<'a>],
    salt: Option<&'a str>,
    prompt_embeds: Option<&'a [u8; 32]>,
    start: i64,
}

impl<'a> Extras<'a> {
    /// The keys of the tokens `start..start + tokens`, which are block number `block`.
    pub(super) fn of_block(&self, block: usize, start: usize, tokens: usize) -> BlockExtras<'a> {
        let (start, end) = (start as u64, (start + tokens) as u64);
        // They come in order and do not overlap, so those of a block are neighbours.
        let first = self.media.partition_point(|media| u64::from(media.offset) + u64::from(media.tokens) <= start);
        let after = self.media.partition_point(|media| u64::from(media.offset) < end).max(first);
        BlockExtras {
            lora: self.lora,
            media: &self.media[first..after],
            salt: self.salt.filter(|salt| block == 0 && !salt.is_empty()),
            prompt_embeds: self.prompt_embeds.get(block),
            start: start as i64,
        }
    }

    pub(super) fn is_none(&self) -> bool {
        self.lora.is_none() && self.media.is_empty() && self.salt.is_none() && self.prompt_embeds.is_empty()
    }
}

impl BlockExtras<'_> {
    /// No string may occur twice: whether Python holds two objects or one is then unknown, and decides a pickle's bytes.
    pub(super) fn check_texts(&self, form: ExtraForm, block: usize) -> Result<(), PoolError> {
        let tagged = form == ExtraForm::Tagged;
        let mut texts: Vec<&str> = self.media.iter().map(|media| media.identifier).collect();
        texts.extend(self.lora.map(|lora| lora.name));
        texts.extend(self.lora.filter(|_| tagged).map(|lora| lora.path));
        texts.extend(self.salt);
        if tagged {
            texts.extend(
                [(self.lora.is_some(), LORA), (!self.media.is_empty(), MEDIA)].iter().filter(|t| t.0).map(|t| t.1),
            );
            texts.extend(self.salt.map(|_| SALT));
            texts.extend(self.prompt_embeds.map(|_| EMBEDS));
        }
        texts.sort_unstable();
        match texts.windows(2).any(|pair| pair[0] == pair[1]) {
            true => Err(PoolError::SameText { block }),
            false => Ok(()),
        }
    }

    pub(super) fn write(&self, form: ExtraForm, to: &mut impl Encode) {
        let keys = usize::from(self.lora.is_some())
            + self.media.len()
            + usize::from(self.salt.is_some())
            + usize::from(self.prompt_embeds.is_some());
        if keys == 0 {
            return to.none();
        }
        to.tuple(keys);
        if form == ExtraForm::Tagged {
            self.write_tagged(to)
        } else {
            self.write_bare(form, to)
        }
        to.end_tuple(keys);
    }

    fn write_tagged(&self, to: &mut impl Encode) {
        if let Some(lora) = self.lora {
            to.tuple(3);
            to.constant(LORA);
            to.text(lora.name);
            to.text(lora.path);
            to.end_tuple(3);
        }
        for media in self.media {
            to.tuple(3);
            to.constant(MEDIA);
            to.text(media.identifier);
            to.int(self.offset(media));
            to.end_tuple(3);
        }
        if let Some(salt) = self.salt {
            to.tuple(2);
            to.constant(SALT);
            to.text(salt);
            to.end_tuple(2);
        }
        if let Some(digest) = self.prompt_embeds {
            to.tuple(2);
            to.constant(EMBEDS);
            to.bytes(digest);
            to.end_tuple(2);
        }
    }

    fn write_bare(&self, form: ExtraForm, to: &mut impl Encode) {
        if let Some(lora) = self.lora {
            to.text(lora.name);
        }
        for media in self.media {
            if form == ExtraForm::Bare {
                to.tuple(2);
                to.text(media.identifier);
                to.int(self.offset(media));
                to.end_tuple(2);
            } else {
                to.text(media.identifier);
            }
        }
        if let Some(salt) = self.salt {
            to.text(salt);
        }
        if let Some(digest) = self.prompt_embeds {
            to.bytes(digest);
        }
    }

    /// Counted from the block's start: below zero for what began before.
    fn offset(&self, media: &Media<'_>) -> i64 {
        i64::from(media.offset) - self.start
    }
}

const LORA: &str = "lora";
const MEDIA: &str = "mm";
const SALT: &str = "cache_salt";
const EMBEDS: &str = "prompt_embeds";
