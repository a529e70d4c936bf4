//! Cutting a write into frames.

use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::Bytes;
use kvferry_protocol::pages::Extent;
use kvferry_protocol::wire::{
    FrameHeader, FrameKind, Loan, MAX_NOTIFICATION_BYTES, MAX_TABLE_BYTES, encode_table, extent_table_bytes,
    slice_extents,
};

use super::post::Post;
use super::runs::RunList;
use crate::ffi::MAX_RUNS;
use crate::place::{Run, Runs};
use crate::raw::RawRun;
use crate::share::Lender;
use crate::watch::Leaving;

/// Cuts fall on multiples of this, unless they fall on a border between runs: memory is copied faster from aligned addresses.
const CUT_BYTES: u64 = 64;

/// A part of a write that travels in one frame.
pub(crate) struct FrameCut {
    pub(crate) post: Arc<Post>,
    pub(crate) payload_bytes: u64,
    /// Header and table.
    pub(crate) head: Vec<u8>,
    /// The payload's memory; read only under the guard of the post's source. None if it is lent.
    runs: Runs,
    /// Whether the payload stays where it is.
    pub(crate) is_lent: bool,
    /// Which frame of the write it is, and where its payload goes in the window.
    pub(crate) frame: u32,
    pub(crate) extents: Vec<Extent>,
}

impl FrameCut {
    /// Cuts frame `frame` of a post, which begins at byte `from` and has at most about `frame_bytes`. Its payload is lent if `lender`
    /// can. `None` if the post ended. What a watch is shown of the post it is shown here; an error is its own.
    ///
    /// Frame 0 carries the notification. Of a watched post that is its last one, since the watch must have seen all of it.
    pub(crate) fn new(
        post: &Arc<Post>,
        from: u64,
        frame: u32,
        frame_bytes: u64,
        version: u16,
        lender: Option<&Lender>,
    ) -> Result<Option<Self>, String> {
        let Some(source) = post.read_source() else { return Ok(None) };
        let want = post.bytes.min(from + frame_bytes) - from;
        // One run is left for the head.
        let (mut runs, got) = source.runs(from, from + want, MAX_RUNS - 1);
        let last_run = match &runs {
            Runs::Host(runs) => runs.last().map_or(0, |run| run.length()),
            Runs::Device(runs) => runs.last().map_or(0, |run| run.length()),
        };
        let bytes = align(last_run, got, got == post.bytes - from, frame_bytes);
        let (extents, bytes) = cut_extents(post, from, bytes);
        match &mut runs {
            Runs::Host(runs) => shorten(runs, bytes),
            Runs::Device(runs) => shorten(runs, bytes),
        }
        let (frame, notification) = match source.watch() {
            Some(watch) => show(watch, &extents, frame, from + bytes == post.bytes)?,
            None if frame == 0 => (0, post.notification.clone()),
            None => (frame, Bytes::new()),
        };
        let loan = lender.and_then(|lender| {
            let Runs::Host(of_host) = &runs else { return None };
            let lent = lender.locate(of_host, post.is_in_place)?;
            let (slot, token) = source.lend(post, lender)?;
            Some(Loan { slot, token, runs: lent })
        });
        drop(source);
        let mut table = Vec::new();
        let kind = match loan {
            Some(loan) => {
                loan.encode(&mut table);
                runs = Runs::Host(Vec::new());
                FrameKind::Lend
            }
            None => FrameKind::Data,
        };
        encode_table(&extents, &notification, &mut table);
        let header = FrameHeader {
            grant: post.grant.0,
            sequence: post.sequence,
            frame,
            extents: extents.len() as u16,
            notification_bytes: notification.len() as u16,
            payload_bytes: bytes as u32,
            write_bytes: post.bytes,
            ..FrameHeader::with_body(kind, &table)
        };
        let mut head = header.encode(version).to_vec();
        head.append(&mut table);
        let (post, is_lent) = (Arc::clone(post), kind == FrameKind::Lend);
        Ok(Some(Self { post, payload_bytes: bytes, head, runs, is_lent, frame, extents }))
    }

    /// Whether the payload lies in a device's memory.
    pub(crate) fn is_of_device(&self) -> bool {
        matches!(self.runs, Runs::Device(_))
    }

    /// The payload's memory, of whichever kind.
    pub(crate) fn runs(&self) -> &Runs {
        &self.runs
    }

    /// The payload's memory, once, for a processor to read. `None` if it is a device's.
    pub(crate) fn take_host_runs(&mut self) -> Option<Vec<RawRun>> {
        match &mut self.runs {
            Runs::Host(runs) => Some(std::mem::take(runs)),
            Runs::Device(_) => None,
        }
    }
}

/// Shows a frame to the post's watch. Returns the frame's number and what it tells the receiver.
fn show(watch: &dyn Leaving, extents: &[Extent], frame: u32, is_last: bool) -> Result<(u32, Bytes), String> {
    if let Some(runs) = RunList::of_extents(extents) {
        runs.walk(0, runs.bytes(), |_, offset, bytes| {
            watch.leaves(offset..offset + bytes);
            ControlFlow::Continue(())
        });
    }
    if !is_last {
        return Ok((frame + 1, Bytes::new()));
    }
    let notification = watch.notification()?;
    match notification.len() {
        0..=MAX_NOTIFICATION_BYTES => Ok((0, notification)),
        found => Err(format!("a notification of {found} bytes is over the limit of {MAX_NOTIFICATION_BYTES}")),
    }
}

/// How many of the `got` bytes, whose last run has `last_run`, go into the frame: up to the last border between runs if that is in the
/// frame's second half, else a multiple of [`CUT_BYTES`].
fn align(last_run: u64, got: u64, is_last: bool, frame_bytes: u64) -> u64 {
    if is_last || last_run == 0 {
        return got;
    }
    let border = got - last_run;
    if border >= frame_bytes / 2 {
        return border;
    }
    match got - got % CUT_BYTES {
        0 => got,
        aligned => aligned,
    }
}

/// The extents of bytes `from..from + bytes`, as many as a table holds, and how many bytes they hold.
fn cut_extents(post: &Post, from: u64, bytes: u64) -> (Vec<Extent>, u64) {
    let mut extents = Vec::new();
    let (mut table_bytes, mut at) = (0, from);
    let first = post.extent_starts.partition_point(|&start| start <= from).saturating_sub(1);
    'fill: for (extent, start) in post.extents.iter().zip(&post.extent_starts).skip(first) {
        let mut slices = Vec::new();
        slice_extents(extent, at - start, from + bytes - start, &mut slices);
        for slice in slices {
            table_bytes += extent_table_bytes(&slice);
            if table_bytes > MAX_TABLE_BYTES - MAX_NOTIFICATION_BYTES {
                break 'fill;
            }
            at += slice.bytes().unwrap_or(0);
            extents.push(slice);
        }
        if at >= from + bytes {
            break;
        }
    }
    (extents, at - from)
}

fn shorten(runs: &mut Vec<impl Run>, bytes: u64) {
    let mut left = bytes;
    for (at, run) in runs.iter_mut().enumerate() {
        *run = run.keep(left);
        left -= run.length();
        if left == 0 {
            runs.truncate(at + 1);
            return;
        }
    }
}
