//! What two ends of a link say to each other by notes.
//!
//! Numbers are little-endian. A frame: `FRAME, slot u32, header, table`, its payload being in the slot; or `LOAD` and the same, with
//! the payload behind. A credit: `CREDIT, count u32, slots u32 each`, and the header of a word about a write, or nothing.

use kvferry_protocol::wire::{FrameHeader, FrameKind};

use super::SLOTS;

const FRAME: u8 = 1;
const CREDIT: u8 = 2;
const LOAD: u8 = 3;

/// One note, read.
#[derive(PartialEq, Debug)]
pub(super) enum Note<'a> {
    /// A part of a write, which takes a slot until a credit gives it back.
    Frame { slot: u32, header: FrameHeader, table: &'a [u8], payload: Payload<'a> },
    /// Slots that are free again, and perhaps the receiver's word about a write.
    Credit { slots: Vec<u32>, word: Option<FrameHeader> },
}

/// Where a frame's payload is.
#[derive(PartialEq, Debug)]
pub(super) enum Payload<'a> {
    InSlot,
    Here(&'a [u8]),
}

/// A frame's note: to be followed by the payload if that is a load.
pub(super) fn frame(slot: u32, head: &[u8], is_load: bool) -> Vec<u8> {
    [&[if is_load { LOAD } else { FRAME }][..], &slot.to_le_bytes(), head].concat()
}

pub(super) fn credit(slots: &[u32], word: Option<&FrameHeader>, version: u16) -> Vec<u8> {
    let mut note = vec![CREDIT];
    note.extend((slots.len() as u32).to_le_bytes());
    slots.iter().for_each(|slot| note.extend(slot.to_le_bytes()));
    note.extend(word.iter().flat_map(|word| word.encode(version)));
    note
}

impl<'a> Note<'a> {
    /// Reads what a peer said. That it makes sense here is for the caller to check.
    pub(super) fn decode(note: &'a [u8], version: u16) -> Result<Self, String> {
        let short = || "a note is too short".to_owned();
        let (&what, rest) = note.split_first().ok_or_else(short)?;
        let (number, rest) = rest.split_first_chunk().ok_or_else(short)?;
        let number = u32::from_le_bytes(*number);
        match what {
            FRAME | LOAD if number < SLOTS => Self::decode_frame(number, rest, what == LOAD, version),
            // A sender has no more slots to get back than this end gave it at most, which is checked by number.
            CREDIT => {
                let bytes = (number as usize).checked_mul(4).filter(|&bytes| bytes <= rest.len()).ok_or_else(short)?;
                let (slots, rest) = rest.split_at(bytes);
                let slots = slots.as_chunks().0.iter().map(|slot| u32::from_le_bytes(*slot)).collect();
                let word = if rest.is_empty() { None } else { Some(header(rest, version)?.0) };
                match word {
                    Some(word) if !matches!(word.kind, FrameKind::Ack | FrameKind::Refuse) => {
                        Err(format!("a credit has a word of kind {:?}", word.kind))
                    }
                    word => Ok(Self::Credit { slots, word }),
                }
            }
            _ => Err("a note makes no sense".to_owned()),
        }
    }

    fn decode_frame(slot: u32, rest: &'a [u8], is_load: bool, version: u16) -> Result<Self, String> {
        let (header, rest) = header(rest, version)?;
        if header.kind != FrameKind::Data {
            return Err(format!("a frame is of kind {:?}", header.kind));
        }
        let (table, payload) = match is_load {
            false => (rest, Payload::InSlot),
            true => {
                let table_bytes = rest.len().checked_sub(header.payload_bytes as usize);
                let (table, payload) = rest.split_at(table_bytes.ok_or("a load is shorter than its header says")?);
                (table, Payload::Here(payload))
            }
        };
        Ok(Self::Frame { slot, header, table, payload })
    }
}

fn header(rest: &[u8], version: u16) -> Result<(FrameHeader, &[u8]), String> {
    let (header, rest) = rest.split_first_chunk::<{ FrameHeader::BYTES }>().ok_or("a note has no whole header")?;
    Ok((FrameHeader::decode(header, version).map_err(|error| error.to_string())?, rest))
}

#[cfg(test)]
mod tests {
    use kvferry_protocol::pages::Extent;
    use kvferry_protocol::wire::{Refusal, encode_table};

    use super::*;

    const VERSION: u16 = 3;

    #[test]
    fn a_note_is_read_as_it_was_written() {
        let mut table = Vec::new();
        encode_table(&[Extent::contiguous(64, 5)], b"all", &mut table);
        let table = &table[..];
        let header = FrameHeader {
            extents: 1,
            notification_bytes: 3,
            payload_bytes: 5,
            write_bytes: 5,
            ..FrameHeader::with_body(FrameKind::Data, table)
        };
        let head = [&header.encode(VERSION)[..], table].concat();
        let note = frame(7, &head, false);
        let want = Note::Frame { slot: 7, header, table, payload: Payload::InSlot };
        assert_eq!(Note::decode(&note, VERSION).unwrap(), want);
        let load = [&frame(0, &head, true)[..], b"bytes"].concat();
        let want = Note::Frame { slot: 0, header, table, payload: Payload::Here(b"bytes") };
        assert_eq!(Note::decode(&load, VERSION).unwrap(), want);
        for word in [None, Some(FrameHeader::about(FrameKind::Refuse, Some(Refusal::BadExtent), 9, 4))] {
            let note = credit(&[3, 900], word.as_ref(), VERSION);
            assert_eq!(Note::decode(&note, VERSION).unwrap(), Note::Credit { slots: vec![3, 900], word });
        }
    }

    #[test]
    fn a_note_that_makes_no_sense_is_refused() {
        let mut table = Vec::new();
        encode_table(&[Extent::contiguous(0, 9)], b"", &mut table);
        let header = FrameHeader {
            extents: 1,
            payload_bytes: 9,
            write_bytes: 9,
            ..FrameHeader::with_body(FrameKind::Data, &table)
        };
        let head = [&header.encode(VERSION)[..], &table].concat();
        let ping = FrameHeader::empty(FrameKind::Ping).encode(VERSION);
        assert!(Note::decode(&[&frame(0, &head, true)[..], b"123456789"].concat(), VERSION).is_ok());
        for (name, note) in [
            ("nothing", Vec::new()),
            ("no number", vec![CREDIT, 0, 0]),
            ("an unknown word", vec![9; 100]),
            ("more slots than it has", [&[CREDIT][..], &u32::MAX.to_le_bytes()].concat()),
            ("a slot that is none", frame(SLOTS, &head, false)),
            ("half a header", frame(0, &head[..30], false)),
            ("a frame of another kind", frame(0, &ping, true)),
            ("less than its header says", [&frame(0, &head[..FrameHeader::BYTES], true)[..], b"1234"].concat()),
            ("a word of another kind", [&credit(&[], None, VERSION)[..], &ping].concat()),
        ] {
            assert!(Note::decode(&note, VERSION).is_err(), "{name}");
        }
    }
}
