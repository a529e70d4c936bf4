//! A cache on a device for an engine whose rows are on the host.
#![expect(unsafe_code, reason = "queues copies and launches of what was checked")]

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{CopyEnd, DeviceError, DeviceKvCache, DeviceMemory, Event, PinnedRegion};
use crate::attention::{self, AttentionBatch, AttentionOptions, Values, seen_blocks};
use crate::cuda::{DecodeBatch, DecodeJob, DecodeOptions, DevicePtr, Element, Rows, StoreJob};
use crate::error::KernelError;
use crate::memory::{CacheShape, HostRegion};
use crate::store::{self, Slot};

/// Stores rows of host memory in a [`DeviceKvCache`], and computes their attention there: what [`store_kv`](crate::store_kv) and
/// [`paged_attention`](crate::paged_attention) are for a cache on the host, with the same arguments and the same checks.
///
/// Rows go through pinned memory, on the cache's own stream. It serves engines that compute on the host, and tests; one that
/// computes on the device launches [`StoreJob`] and [`DecodeJob`] on its own tensors.
#[derive(Debug)]
pub struct RowDesk {
    cache: DeviceKvCache,
    room: Option<Room>,
    /// Until this is passed the device uses the room.
    busy: Option<Arc<dyn Event>>,
}

/// Memory for a call's rows and tables, as long on the device as on the host, and what a launch needs beside it.
#[derive(Debug)]
struct Room {
    host: PinnedRegion,
    device: DeviceMemory,
}

/// Where each part of a call begins, on both sides.
const ALIGNMENT: usize = 256;

impl RowDesk {
    /// Serves a cache.
    ///
    /// # Errors
    /// [`DeviceError::Job`] if the device's attention cannot read it: its element type, head dimension, planes or alignment.
    pub fn new(cache: DeviceKvCache) -> Result<Self, DeviceError> {
        let nobody = DecodeBatch {
            queries: DevicePtr::new(0),
            out: DevicePtr::new(0),
            element: Element::F32,
            tables: DevicePtr::new(0),
            table_stride: 1,
            sequences: None,
            lengths: DevicePtr::new(0),
            longest: 0,
            rows: 0,
            q_heads: cache.layout().shape().heads.into(),
        };
        for layer in 0..cache.layout().shape().layers {
            let pages = cache.pages(layer).map_err(DeviceError::Job)?;
            DecodeJob::new(&pages, &nobody, &DecodeOptions::causal(1.0)).map_err(DeviceError::Job)?;
        }
        Ok(Self { cache, room: None, busy: None })
    }

    /// The cache.
    #[must_use]
    pub const fn cache(&self) -> &DeviceKvCache {
        &self.cache
    }

    /// Queues the storing of one layer's new keys and values, as [`store_kv`](crate::store_kv) does at once.
    ///
    /// # Errors
    /// [`DeviceError::Rows`] and [`DeviceError::Job`] if they do not fit the cache, and nothing was queued; or the device's.
    pub fn store(
        &mut self,
        layer: u16,
        slots: &[Slot],
        keys: &[f32],
        values: Option<&[f32]>,
    ) -> Result<(), DeviceError> {
        let shape = shape(&self.cache);
        store::check(shape, layer, slots, keys, values).map_err(DeviceError::Rows)?;
        let heads = shape.heads();
        let dims: Vec<usize> = (0..shape.planes()).map(|plane| shape.dim(plane)).collect();
        let planes: Vec<Vec<u8>> = [Some(keys), values].into_iter().flatten().map(bytes_of).collect();
        let mut parts: Vec<&[u8]> = planes.iter().map(Vec::as_slice).collect();
        let mapping: Vec<u8> = last_of_each(slots).into_iter().flat_map(i64::to_le_bytes).collect();
        parts.push(&mapping);
        let places = self.bring(&parts, 0)?;
        let rows = |(&start, &dim): (&DevicePtr, &usize)| Rows {
            start,
            token_bytes: (heads * dim * size_of::<f32>()) as u64,
            head_bytes: (dim * size_of::<f32>()) as u64,
        };
        let from: Vec<Rows> = places.iter().zip(&dims).map(rows).collect();
        let pages = self.cache.pages(layer).map_err(DeviceError::Job)?;
        let scales = vec![1.0; from.len()];
        let job = StoreJob::new(&pages, &from, Element::F32, &scales, places[from.len()], slots.len() as u32);
        let job = job.map_err(DeviceError::Job)?;
        // SAFETY: rows and slots were queued before, into memory that nobody else uses until the event below; slots are in the
        // cache, each once, as was checked; and pages are ordered by the stream, as the cache asks of its engine.
        unsafe { job.launch(&**self.cache.stream()) }?;
        self.busy = Some(self.cache.stream().record()?);
        Ok(())
    }

    /// Computes attention as [`paged_attention`](crate::paged_attention) does, and waits for the result. `soft_cap` is not
    /// supported, nor [`Values::KeyPrefix`].
    ///
    /// # Errors
    /// As for [`store`](Self::store).
    pub fn attend(
        &mut self,
        layer: u16,
        batch: &AttentionBatch<'_>,
        options: &AttentionOptions<'_>,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let shape = shape(&self.cache);
        attention::check(shape, layer, batch, options, out).map_err(DeviceError::Rows)?;
        supported(options).map_err(DeviceError::Rows)?;
        if batch.queries.is_empty() {
            return Ok(());
        }
        let row = batch.q_heads * shape.dim(0);
        let table = Table::of(batch, options, shape);
        let queries = bytes_of(batch.queries);
        let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
        let (tables, sequences, lengths) = (words(&table.blocks), words(&table.sequences), words(&table.lengths));
        let sinks = options.sinks.map(bytes_of).unwrap_or_default();
        let pages = self.cache.pages(layer).map_err(DeviceError::Job)?;
        // Addresses are known once there is room, which depends on the workspace: the job is made twice.
        let job = |at: &[DevicePtr]| {
            let decode = DecodeBatch {
                queries: at[0],
                out: at[5],
                element: Element::F32,
                tables: at[1],
                table_stride: table.stride,
                sequences: Some(at[2]),
                lengths: at[3],
                longest: table.lengths.iter().copied().max().unwrap_or(0),
                rows: table.lengths.len() as u32,
                q_heads: batch.q_heads as u32,
            };
            let mut wishes = DecodeOptions { window: options.window, ..DecodeOptions::causal(options.scale) };
            wishes.sinks = options.sinks.map(|_| at[4]);
            DecodeJob::new(&pages, &decode, &wishes).map_err(DeviceError::Job)
        };
        let workspace = job(&[DevicePtr::new(0); 6])?.workspace_bytes();
        let reserve = queries.len().next_multiple_of(ALIGNMENT) + workspace as usize;
        let places = self.bring(&[&queries, &tables, &sequences, &lengths, &sinks], reserve)?;
        let (out_at, workspace_at) = (places[5], places[5].offset(queries.len().next_multiple_of(ALIGNMENT) as u64));
        // SAFETY: the batch was checked and queued before, into memory that nobody else uses until the event below; the blocks that
        // rows see are in the cache, as was checked; and pages are ordered by the stream, as the cache asks of its engine.
        unsafe { job(&places)?.launch(&**self.cache.stream(), workspace_at) }?;
        let Some(room) = &self.room else { return Ok(()) };
        // What was brought is not needed any more once the result is copied over it.
        let to = room.host.region().as_ptr();
        // SAFETY: both are the room's and so long, and the host's end is left alone until the event is passed.
        unsafe { self.cache.stream().copy(CopyEnd::Device(out_at), CopyEnd::Host(to), queries.len()) }?;
        self.cache.stream().record()?.wait()?;
        self.cache.device().host_reads(to, queries.len());
        // SAFETY: the room's own memory, to which the copy has run.
        let got = unsafe { std::slice::from_raw_parts(to.as_ptr().cast_const(), queries.len()) };
        for rows in batch.sequences.iter().map(|sequence| sequence.queries.clone()) {
            let (from, to) = (rows.start * row, rows.end * row);
            let values = got[from * size_of::<f32>()..to * size_of::<f32>()].chunks_exact(size_of::<f32>());
            for (out, bytes) in out[from..to].iter_mut().zip(values) {
                *out = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        Ok(())
    }

    /// Queues copies of some parts, side by side, and keeps `reserve` bytes behind them. Gives the places of the parts, and of what
    /// is behind them.
    fn bring(&mut self, parts: &[&[u8]], reserve: usize) -> Result<Vec<DevicePtr>, DeviceError> {
        let mut starts = vec![0];
        for part in parts {
            starts.push((starts[starts.len() - 1] + part.len()).next_multiple_of(ALIGNMENT));
        }
        let (brought, needed) = (starts[parts.len()], starts[parts.len()] + reserve);
        if let Some(busy) = self.busy.take() {
            busy.wait()?;
        }
        let device = self.cache.device();
        if self.room.as_ref().is_none_or(|room| room.device.bytes() < needed) {
            let bytes = needed.next_power_of_two();
            let region = Arc::new(HostRegion::new(bytes).map_err(DeviceError::Host)?);
            self.room = Some(Room { host: device.pin(region)?, device: device.allocate(bytes)? });
        }
        let Some(room) = &self.room else { return Ok(Vec::new()) };
        let start = room.host.region().as_ptr();
        device.host_writes(start, brought);
        for (part, &offset) in parts.iter().zip(&starts) {
            // SAFETY: inside the room.
            let to = unsafe { start.add(offset) };
            // SAFETY: as above; the device is through with it, as was waited for, and the part is other memory.
            unsafe { to.copy_from_nonoverlapping(NonNull::from(*part).cast(), part.len()) };
        }
        if brought > 0 {
            let to = CopyEnd::Device(room.device.ptr());
            // SAFETY: both are the room's and so long; the host's is written again only after `busy`.
            unsafe { self.cache.stream().copy(CopyEnd::Host(start), to, brought) }?;
            self.busy = Some(self.cache.stream().record()?);
        }
        Ok(starts.into_iter().map(|offset| room.device.ptr().offset(offset as u64)).collect())
    }
}

impl Drop for RowDesk {
    fn drop(&mut self) {
        if let Some(busy) = self.busy.take() {
            // The room goes after what uses it. A device that fails has stopped using it.
            let _ = busy.wait();
        }
    }
}

/// A batch's block tables, and what each of its rows sees.
struct Table {
    /// `[sequences, stride]`; blocks that no row sees are 0.
    blocks: Vec<u32>,
    stride: u32,
    sequences: Vec<u32>,
    lengths: Vec<u32>,
}

impl Table {
    fn of(batch: &AttentionBatch<'_>, options: &AttentionOptions<'_>, shape: CacheShape<'_>) -> Self {
        let rows = batch.queries.len() / (batch.q_heads * shape.dim(0));
        let tokens_per_block = shape.tokens_per_block();
        let seen: Vec<_> =
            batch.sequences.iter().map(|sequence| seen_blocks(sequence, options, tokens_per_block)).collect();
        let stride = seen.iter().map(|seen| seen.end).max().unwrap_or(0).max(1);
        let mut blocks = vec![0; stride * batch.sequences.len()];
        // A row of no sequence sees nothing.
        let (mut sequences, mut lengths) = (vec![0; rows], vec![0; rows]);
        for (number, (sequence, seen)) in batch.sequences.iter().zip(seen).enumerate() {
            for index in seen {
                blocks[number * stride + index] = sequence.blocks[index].get();
            }
            for row in sequence.queries.clone() {
                sequences[row] = number as u32;
                lengths[row] = (sequence.context_len - (sequence.queries.end - 1 - row)) as u32;
            }
        }
        Self { blocks, stride: stride as u32, sequences, lengths }
    }
}

fn shape(cache: &DeviceKvCache) -> CacheShape<'_> {
    CacheShape { layout: cache.layout(), element_bytes: cache.element().bytes() as usize }
}

fn supported(options: &AttentionOptions<'_>) -> Result<(), KernelError> {
    let refuse = |option, value: String, mend| Err(KernelError::Option { option, value, mend });
    if let Some(cap) = options.soft_cap {
        return refuse("soft_cap", cap.to_string(), "the device's kernels have none; keep such a cache on the host");
    }
    if let Values::KeyPrefix { value_dim } = options.values {
        let mend = "the device's kernels read values from a plane of their own; keep such a cache on the host";
        return refuse("value_dim", value_dim.to_string(), mend);
    }
    Ok(())
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// As vLLM's `slot_mapping`; of two rows with one slot the earlier is skipped.
fn last_of_each(slots: &[Slot]) -> Vec<i64> {
    let last: HashMap<Slot, usize> = slots.iter().enumerate().map(|(row, &slot)| (slot, row)).collect();
    let stays = |row: usize, slot: Slot| slot != Slot::SKIP && last.get(&slot) == Some(&row);
    // A slot of the cache is far below 2^63.
    slots.iter().enumerate().map(|(row, &slot)| if stays(row, slot) { slot.get() as i64 } else { -1 }).collect()
}
