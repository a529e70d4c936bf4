//! Batches as bytes: MessagePack, in the forms that engines' own publishers write.

use rmp::encode::{
    ByteBuf, write_array_len, write_bin, write_f64, write_map_len, write_nil, write_sint, write_str, write_uint,
};

use super::{BlockName, EventBatch, ExtraKey, GroupOf, KvEvent, Locality, Medium, Removed, Stored};
use crate::pool::EventId;

/// In whose words a batch is written. All are an array of time in seconds, events and data-parallel rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Dialect {
    /// vLLM's from 0.24 on: an event is a map with its `type`, and fields that say nothing are left out. Source: 0.32.0,
    /// `distributed/kv_events.py`, whose own encoder made the bytes that tests compare with.
    #[default]
    Vllm,
    /// vLLM's before that: an event is an array that begins with its type.
    VllmArrays,
    /// SGLang's up to 0.5.18: arrays; a salted block has a map behind its fields.
    SglangArrays,
    /// SGLang's after that: maps.
    Sglang,
}

impl Dialect {
    /// The bytes of a batch.
    #[must_use]
    pub fn encode(self, batch: &EventBatch) -> Vec<u8> {
        let mut out = Out { bytes: ByteBuf::new(), dialect: self };
        out.array(3);
        out.float(batch.at.as_secs_f64());
        out.array(batch.events.len());
        for event in &batch.events {
            match event {
                KvEvent::Stored(stored) => out.stored(stored),
                KvEvent::Removed(removed) => out.removed(removed),
                KvEvent::Cleared => out.cleared(),
            }
        }
        out.optional(batch.dp_rank, |out, rank| out.unsigned(rank.into()));
        out.bytes.into_vec()
    }

    const fn has_maps(self) -> bool {
        matches!(self, Self::Vllm | Self::Sglang)
    }

    /// Sources: vLLM's `MEDIUM_GPU` and its like; SGLang's `StorageMedium`.
    const fn medium(self, medium: Medium) -> &'static str {
        match (self, medium) {
            (_, Medium::Device) => "GPU",
            (Self::Vllm | Self::VllmArrays, Medium::Host) => "CPU",
            (Self::Vllm | Self::VllmArrays, Medium::Disk | Medium::External) => "STORAGE",
            (_, Medium::Host) => "CPU_PINNED",
            (_, Medium::Disk) => "DISK",
            (_, Medium::External) => "EXTERNAL",
        }
    }
}

/// Writes into memory, which never fails.
struct Out {
    bytes: ByteBuf,
    dialect: Dialect,
}

/// A field of an event: its name where events are maps, and what writes its value.
type Field<'a> = (&'static str, Box<dyn Fn(&mut Out) + 'a>);

impl Out {
    fn stored(&mut self, stored: &Stored) {
        let lora_id = stored.lora.as_ref().and_then(|lora| lora.id);
        let lora_name = stored.lora.as_ref().and_then(|lora| lora.name.as_deref());
        let mut fields: Vec<Field<'_>> = vec![
            ("block_hashes", Box::new(|out| out.names(&stored.blocks))),
            ("parent_block_hash", Box::new(|out| out.optional(stored.parent.as_ref(), Self::name))),
            ("token_ids", Box::new(|out| out.tokens(&stored.tokens))),
            ("block_size", Box::new(|out| out.unsigned(stored.tokens_per_block.into()))),
            ("lora_id", Box::new(move |out| out.optional(lora_id, |out, id| out.unsigned(id.into())))),
            ("medium", Box::new(|out| out.medium(stored.medium))),
        ];
        match self.dialect {
            Dialect::Vllm | Dialect::VllmArrays => {
                fields.push(("lora_name", Box::new(move |out| out.optional(lora_name, Self::text))));
                self.later_fields_of_vllm(&mut fields, stored);
            }
            Dialect::SglangArrays => {
                // A map of its own, so that readers that know no salt find what they know.
                if let Some(salt) = &stored.salt {
                    fields.push(("", Box::new(move |out| out.map(&[("cache_salt", salt)]))));
                }
            }
            Dialect::Sglang => {
                if let Some(salt) = &stored.salt {
                    fields.push(("cache_salt", Box::new(move |out| out.text(salt))));
                }
            }
        }
        self.event("BlockStored", &fields);
    }

    /// Fields that came later, which maps leave out where they say nothing.
    fn later_fields_of_vllm<'a>(&self, fields: &mut Vec<Field<'a>>, stored: &'a Stored) {
        let is_map = self.dialect.has_maps();
        let group = stored.group.as_ref();
        let kind = group.and_then(|group| group.kind.as_deref());
        let window = group.and_then(|group| group.window);
        let mut add = |name, is_said: bool, write: Box<dyn Fn(&mut Out) + 'a>| {
            if is_said || !is_map {
                fields.push((name, write));
            }
        };
        add("extra_keys", !stored.extra_keys.is_empty(), Box::new(|out| out.extra_keys(&stored.extra_keys)));
        let index = group.map(|group: &GroupOf| group.index);
        add("group_idx", index.is_some(), Box::new(move |out| out.optional(index, |out, of| out.unsigned(of.into()))));
        add("kv_cache_spec_kind", kind.is_some(), Box::new(move |out| out.optional(kind, Self::text)));
        let write: Box<dyn Fn(&mut Out)> = Box::new(move |out| out.optional(window, |out, of| out.unsigned(of.into())));
        add("kv_cache_spec_sliding_window", window.is_some(), write);
        if let (true, Some(locality)) = (is_map, stored.locality) {
            add("locality", true, Box::new(move |out| out.text(word(locality))));
        }
    }

    fn removed(&mut self, removed: &Removed) {
        let mut fields: Vec<Field<'_>> = vec![
            ("block_hashes", Box::new(|out| out.names(&removed.blocks))),
            ("medium", Box::new(|out| out.medium(removed.medium))),
        ];
        let is_vllm = matches!(self.dialect, Dialect::Vllm | Dialect::VllmArrays);
        if is_vllm && (removed.group.is_some() || !self.dialect.has_maps()) {
            let group = removed.group;
            fields.push(("group_idx", Box::new(move |out| out.optional(group, |out, of| out.unsigned(of.into())))));
        }
        if let (Dialect::Vllm, Some(locality)) = (self.dialect, removed.locality) {
            fields.push(("locality", Box::new(move |out| out.text(word(locality)))));
        }
        self.event("BlockRemoved", &fields);
    }

    fn cleared(&mut self) {
        self.event("AllBlocksCleared", &[]);
    }

    fn event(&mut self, kind: &str, fields: &[Field<'_>]) {
        let is_map = self.dialect.has_maps();
        if is_map {
            self.done(|to, n| write_map_len(to, n).map(drop), 1 + fields.len() as u32);
            self.text("type");
        } else {
            self.array(1 + fields.len());
        }
        self.text(kind);
        for (name, write) in fields {
            if is_map {
                self.text(name);
            }
            write(self);
        }
    }

    fn names(&mut self, names: &[BlockName]) {
        self.array(names.len());
        names.iter().for_each(|name| self.name(name));
    }

    fn name(&mut self, name: &BlockName) {
        match name {
            BlockName::Id(EventId::Unsigned(id)) => self.unsigned(*id),
            BlockName::Id(EventId::Signed(id)) => self.signed(*id),
            BlockName::Digest(digest) => self.binary(digest),
        }
    }

    fn tokens(&mut self, tokens: &[u32]) {
        self.array(tokens.len());
        tokens.iter().for_each(|&token| self.unsigned(token.into()));
    }

    fn medium(&mut self, medium: Option<Medium>) {
        let dialect = self.dialect;
        self.optional(medium, |out, medium| out.text(dialect.medium(medium)));
    }

    fn extra_keys(&mut self, blocks: &[Vec<ExtraKey>]) {
        if blocks.is_empty() {
            return self.nil();
        }
        self.array(blocks.len());
        for keys in blocks {
            if keys.is_empty() {
                self.nil();
                continue;
            }
            self.array(keys.len());
            for key in keys {
                match key {
                    ExtraKey::Text(text) => self.text(text),
                    ExtraKey::Digest(digest) => self.binary(digest),
                    ExtraKey::Media(identifier, offset) => {
                        self.array(2);
                        self.text(identifier);
                        self.signed(*offset);
                    }
                }
            }
        }
    }

    fn map(&mut self, entries: &[(&str, &str)]) {
        self.done(|to, n| write_map_len(to, n).map(drop), entries.len() as u32);
        for (name, value) in entries {
            self.text(name);
            self.text(value);
        }
    }

    fn optional<T>(&mut self, value: Option<T>, write: impl Fn(&mut Self, T)) {
        match value {
            Some(value) => write(self, value),
            None => self.nil(),
        }
    }

    fn array(&mut self, items: usize) {
        self.done(|to, n| write_array_len(to, n).map(drop), items as u32);
    }

    fn text(&mut self, text: &str) {
        self.done(write_str, text);
    }

    fn binary(&mut self, bytes: &[u8]) {
        self.done(write_bin, bytes);
    }

    fn unsigned(&mut self, value: u64) {
        self.done(|to, value| write_uint(to, value).map(drop), value);
    }

    fn signed(&mut self, value: i64) {
        self.done(|to, value| write_sint(to, value).map(drop), value);
    }

    fn float(&mut self, value: f64) {
        self.done(write_f64, value);
    }

    fn nil(&mut self) {
        self.done(|to, ()| write_nil(to), ());
    }

    fn done<T, E>(&mut self, write: impl FnOnce(&mut ByteBuf, T) -> Result<(), E>, value: T) {
        // The writer is memory: it has no error to give.
        let written = write(&mut self.bytes, value);
        debug_assert!(written.is_ok(), "memory takes every byte");
    }
}

const fn word(locality: Locality) -> &'static str {
    match locality {
        Locality::Local => "LOCAL",
        Locality::Remote => "REMOTE",
    }
}
