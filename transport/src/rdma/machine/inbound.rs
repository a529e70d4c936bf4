//! Writes on their way in: each has landed when its word and the tags of all its parts came, in whatever order.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::{Plant, Planted};
use crate::rdma::work::Fault;

/// Before a head: the write's tag, how many parts it has, and three bytes that are zero.
pub(crate) const PREFIX_BYTES: usize = 8;

/// What precedes a head.
pub(crate) fn prefix(tag: u32, parts: u8) -> [u8; PREFIX_BYTES] {
    let mut prefix = [0; PREFIX_BYTES];
    prefix[..4].copy_from_slice(&tag.to_le_bytes());
    prefix[4] = parts;
    prefix
}

/// Writes of which something came and something is missing.
#[derive(Debug)]
pub(crate) struct Inbound {
    open: BTreeMap<u32, Incoming>,
    /// How many may be open: the window that the peer was given.
    window: usize,
    /// How many lanes carry payload.
    payload_lanes: usize,
    pub(super) planted: Planted,
}

#[derive(Debug, Default)]
struct Incoming {
    word: Option<(u8, Bytes)>,
    /// One bit a lane.
    came: u64,
}

impl Inbound {
    pub(crate) fn new(window: u32, payload_lanes: usize, planted: Planted) -> Self {
        Self { open: BTreeMap::new(), window: window as usize, payload_lanes, planted }
    }

    /// A word came. Gives the head if the write has landed with it.
    pub(crate) fn word(&mut self, word: &Bytes) -> Result<Option<Bytes>, Fault> {
        let Some((prefix, _)) = word.split_first_chunk::<PREFIX_BYTES>() else {
            return Err(Fault::Protocol("a word without a prefix"));
        };
        let [t0, t1, t2, t3, parts, 0, 0, 0] = *prefix else {
            return Err(Fault::Protocol("a word with an unknown prefix"));
        };
        if parts == 0 || usize::from(parts) > self.payload_lanes {
            return Err(Fault::Protocol("a write with no parts, or more than lanes"));
        }
        let tag = u32::from_le_bytes([t0, t1, t2, t3]);
        let incoming = self.entry(tag)?;
        if incoming.word.is_some() {
            return Err(Fault::Protocol("two words for one write"));
        }
        incoming.word = Some((parts, word.slice(PREFIX_BYTES..)));
        self.landed(tag)
    }

    /// A tag came in a lane. Gives the head if the write has landed with it.
    pub(crate) fn tag(&mut self, lane: usize, tag: u32) -> Result<Option<Bytes>, Fault> {
        let bit = 1 << (lane - 1);
        if self.planted.is(Plant::EarlyTagDropped) && !self.open.contains_key(&tag) {
            return Ok(None);
        }
        let incoming = self.entry(tag)?;
        if incoming.came & bit != 0 {
            return Err(Fault::Protocol("two tags for one part"));
        }
        incoming.came |= bit;
        self.landed(tag)
    }

    fn entry(&mut self, tag: u32) -> Result<&mut Incoming, Fault> {
        if self.open.len() >= self.window && !self.open.contains_key(&tag) {
            return Err(Fault::Protocol("more writes under way than its window has"));
        }
        Ok(self.open.entry(tag).or_default())
    }

    fn landed(&mut self, tag: u32) -> Result<Option<Bytes>, Fault> {
        let Some(incoming) = self.open.get(&tag) else { return Ok(None) };
        let Some((parts, _)) = incoming.word else { return Ok(None) };
        let came = incoming.came.count_ones();
        if came > parts.into() {
            return Err(Fault::Protocol("more parts than a write has"));
        }
        if came < parts.into() && !(self.planted.is(Plant::LandedEarly) && came > 0) {
            return Ok(None);
        }
        Ok(self.open.remove(&tag).and_then(|incoming| incoming.word).map(|(_, head)| head))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(tag: u32, parts: u8, head: &str) -> Bytes {
        [&prefix(tag, parts), head.as_bytes()].concat().into()
    }

    #[test]
    fn a_write_lands_with_the_last_of_its_word_and_its_tags_in_any_order() {
        let head = Some(Bytes::from_static(b"head"));
        let mut inbound = Inbound::new(2, 3, Planted::default());
        assert_eq!(inbound.word(&word(1, 2, "head")), Ok(None));
        assert_eq!(inbound.tag(3, 1), Ok(None));
        assert_eq!(inbound.tag(1, 1), Ok(head.clone()));
        assert_eq!(inbound.tag(2, 9), Ok(None));
        assert_eq!(inbound.word(&word(9, 1, "head")), Ok(head.clone()));
        assert_eq!(inbound.tag(1, u32::MAX), Ok(None));
        assert_eq!(inbound.tag(3, u32::MAX), Ok(None));
        assert_eq!(inbound.word(&word(u32::MAX, 2, "head")), Ok(head));
        assert!(inbound.open.is_empty());
    }

    #[test]
    fn what_no_honest_peer_says_is_refused() {
        let of = |words: &[(u32, u8)], tags: &[(usize, u32)]| {
            let mut inbound = Inbound::new(2, 3, Planted::default());
            let words = words.iter().map(|(tag, parts)| word(*tag, *parts, ""));
            let tried: Result<Vec<_>, _> = words.map(|word| inbound.word(&word)).collect();
            tried?;
            tags.iter().map(|(lane, tag)| inbound.tag(*lane, *tag)).collect::<Result<Vec<_>, _>>()
        };
        for (name, words, tags) in [
            ("no parts", &[(1, 0)][..], &[][..]),
            ("more parts than lanes", &[(1, 4)], &[]),
            ("a word twice", &[(1, 2), (1, 2)], &[]),
            ("a tag twice", &[(1, 3)], &[(1, 1), (1, 1)]),
            ("more words than the window", &[(1, 1), (2, 1), (3, 1)], &[]),
            ("more tags than the window", &[], &[(1, 1), (1, 2), (1, 3)]),
        ] {
            assert!(matches!(of(words, tags), Err(Fault::Protocol(_))), "{name}");
        }
        let mut inbound = Inbound::new(2, 3, Planted::default());
        for bytes in [&b""[..], b"1234567", b"1234\x01\x00\x00\x01"] {
            assert!(inbound.word(&Bytes::copy_from_slice(bytes)).is_err(), "{bytes:?}");
        }
        assert_eq!(inbound.tag(1, 5), Ok(None));
        assert_eq!(inbound.tag(2, 5), Ok(None));
        assert!(inbound.word(&word(5, 1, "")).is_err(), "more parts than a write has");
    }
}
