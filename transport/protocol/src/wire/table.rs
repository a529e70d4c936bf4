//! The table of a data frame: extents, then the notification.

use crate::pages::{Extent, Loop};
use crate::wire::error::WireError;
use crate::wire::frame::{FrameHeader, Refusal};
use crate::wire::identity::Reader;

/// The longest notification of a write, in bytes.
pub const MAX_NOTIFICATION_BYTES: usize = 4 << 10;

/// Bytes that an extent takes in a table.
#[must_use]
pub fn extent_table_bytes(extent: &Extent) -> usize {
    17 + 12 * extent.loops.len()
}

/// Appends extents and notification to `out`.
///
/// An extent is `offset u64, run_bytes u64, loops u8`, then for each loop `count u32, stride u64`, little-endian.
pub fn encode_table(extents: &[Extent], notification: &[u8], out: &mut Vec<u8>) {
    for extent in extents {
        out.extend_from_slice(&extent.offset.to_le_bytes());
        out.extend_from_slice(&extent.run_bytes.to_le_bytes());
        out.push(extent.loops.len() as u8);
        for l in &extent.loops {
            out.extend_from_slice(&l.count.to_le_bytes());
            out.extend_from_slice(&l.stride.to_le_bytes());
        }
    }
    out.extend_from_slice(notification);
}

/// Reads the table of a frame: its extents and its notification. Says nothing yet of what the extents touch: see
/// [`check_extents`].
///
/// # Errors
/// [`WireError`] if the bytes are not a table of this header; the connection cannot go on.
pub fn decode_table<'a>(header: &FrameHeader, table: &'a [u8]) -> Result<(Vec<Extent>, &'a [u8]), WireError> {
    let mut r = Reader { what: "a frame's table", bytes: table };
    // The header's limits tie the count to the bytes that are there.
    let mut extents = Vec::with_capacity(usize::from(header.extents).min(table.len() / 17));
    for _ in 0..header.extents {
        let (offset, run_bytes, loops) = (r.u64()?, r.u64()?, r.u8()?);
        if usize::from(loops) > Extent::MAX_LOOPS {
            let limit = Extent::MAX_LOOPS as u64;
            return Err(WireError::Limit { what: "the loops of an extent", found: loops.into(), limit });
        }
        let loops = (0..loops).map(|_| Ok(Loop { count: r.u32()?, stride: r.u64()? }));
        extents.push(Extent { offset, loops: loops.collect::<Result<_, WireError>>()?, run_bytes });
    }
    let notification = r.take(header.notification_bytes.into())?;
    r.end()?;
    Ok((extents, notification))
}

/// Checks that extents stay inside `0..window_bytes`, that no run of one overlaps another run of it, and that together they
/// hold `payload_bytes`.
///
/// A nest counts as free of overlap if, with its loops sorted by stride, each stride spans all that the smaller ones touch;
/// every part of an array with padding is of that form.
///
/// # Errors
/// The [`Refusal`] to answer with.
pub fn check_extents(extents: &[Extent], window_bytes: u64, payload_bytes: u64) -> Result<(), Refusal> {
    let mut total = 0u64;
    for extent in extents {
        if extent.run_bytes == 0 || extent.loops.iter().any(|l| l.count == 0) || overlaps(extent) {
            return Err(Refusal::BadExtent);
        }
        let end = extent.end().ok_or(Refusal::BadExtent)?;
        if end > window_bytes {
            return Err(Refusal::OutOfWindow);
        }
        total = extent.bytes().and_then(|bytes| total.checked_add(bytes)).ok_or(Refusal::BadExtent)?;
    }
    if total == payload_bytes { Ok(()) } else { Err(Refusal::BadExtent) }
}

fn overlaps(extent: &Extent) -> bool {
    let mut loops = [Loop { count: 1, stride: 0 }; Extent::MAX_LOOPS];
    let Some(used) = loops.get_mut(..extent.loops.len()) else { return true };
    used.copy_from_slice(&extent.loops);
    used.sort_unstable_by_key(|l| l.stride);
    let mut span = extent.run_bytes;
    for l in used.iter().filter(|l| l.count > 1) {
        let widened = l.stride.checked_mul(u64::from(l.count) - 1).and_then(|more| span.checked_add(more));
        match widened {
            Some(widened) if l.stride >= span => span = widened,
            _ => return true,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::frame::FrameKind;
    use proptest::prelude::*;

    fn header(extents: &[Extent], notification: &[u8], table: &[u8]) -> FrameHeader {
        FrameHeader {
            extents: extents.len() as u16,
            notification_bytes: notification.len() as u16,
            ..FrameHeader::with_body(FrameKind::Data, table)
        }
    }

    #[test]
    fn golden_bytes_of_version_1() {
        let extents = [Extent { offset: 1, loops: vec![Loop { count: 2, stride: 3 }], run_bytes: 4 }];
        let mut table = Vec::new();
        encode_table(&extents, b"note", &mut table);
        assert_eq!(table, b"\x01\0\0\0\0\0\0\0\x04\0\0\0\0\0\0\0\x01\x02\0\0\0\x03\0\0\0\0\0\0\0note");
        assert_eq!(table.len(), extent_table_bytes(&extents[0]) + 4);
        let (read, note) = decode_table(&header(&extents, b"note", &table), &table).unwrap();
        assert_eq!((read.as_slice(), note), (&extents[..], &b"note"[..]));
    }

    #[test]
    fn what_leaves_the_window_overlaps_or_overflows_is_refused() {
        let nest = |run_bytes, loops: &[(u32, u64)]| Extent {
            offset: 8,
            loops: loops.iter().map(|&(count, stride)| Loop { count, stride }).collect(),
            run_bytes,
        };
        for (name, extent, window, payload, want) in [
            ("fits to the byte", nest(4, &[(2, 4)]), 16, 8, Ok(())),
            ("one byte over", nest(4, &[(2, 4)]), 15, 8, Err(Refusal::OutOfWindow)),
            ("payload differs", nest(4, &[(2, 4)]), 16, 9, Err(Refusal::BadExtent)),
            ("runs overlap", nest(4, &[(2, 3)]), 99, 8, Err(Refusal::BadExtent)),
            ("same place twice", nest(4, &[(2, 0)]), 99, 8, Err(Refusal::BadExtent)),
            ("a loop of one step may have any stride", nest(4, &[(1, 0)]), 99, 4, Ok(())),
            ("loops in any order", nest(1, &[(2, 1), (2, 2)]), 99, 4, Ok(())),
            ("loops overlap each other", nest(2, &[(2, 4), (3, 2)]), 99, 12, Err(Refusal::BadExtent)),
            ("no steps", nest(4, &[(0, 4)]), 99, 0, Err(Refusal::BadExtent)),
            ("no bytes", nest(0, &[]), 99, 0, Err(Refusal::BadExtent)),
            ("overflow", nest(4, &[(u32::MAX, u64::MAX)]), u64::MAX, 8, Err(Refusal::BadExtent)),
        ] {
            assert_eq!(check_extents(&[extent], window, payload), want, "{name}");
        }
    }

    fn any_extent() -> impl Strategy<Value = Extent> {
        let any_loop = (0u32..5, 0u64..40).prop_map(|(count, stride)| Loop { count, stride });
        (0u64..40, 0u64..8, prop::collection::vec(any_loop, 0..4)).prop_map(|(offset, run_bytes, loops)| Extent {
            offset,
            loops,
            run_bytes,
        })
    }

    proptest! {
        #[test]
        fn an_accepted_extent_touches_each_byte_once_and_stays_inside(extent in any_extent()) {
            let bytes = extent.bytes().unwrap();
            if check_extents(std::slice::from_ref(&extent), 200, bytes).is_ok() {
                let mut touched = [false; 200];
                extent.for_each_run(|start| for at in start..start + extent.run_bytes {
                    assert!(!std::mem::replace(&mut touched[at as usize], true), "byte {at} twice");
                });
            }
        }

        #[test]
        fn a_decoder_takes_any_bytes_without_panic(table in prop::collection::vec(any::<u8>(), 0..200), extents in 0u16..9) {
            let header = FrameHeader { extents, ..FrameHeader::with_body(FrameKind::Data, &table) };
            if let Ok((read, _)) = decode_table(&header, &table) {
                let _ = check_extents(&read, 1 << 20, 1 << 10);
            }
        }
    }
}
