//! Pinned host memory in which peers' writes land on their way to a device: frames of a block each, of a fixed number.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvferry_kernels::HostRegion;
use kvferry_kernels::device::{Device, PinnedRegion};
use kvferry_protocol::BlockId;
use kvferry_protocol::layout::{KvLayout, KvShape, LayoutOrder, Shard};
use kvferry_transport::Transport;

use super::refused_by_device;
use crate::config::Limits;
use crate::error::ConnectorError;
use crate::pd::caches::{Caches, KvCache};
use crate::raw::{RawKvCache, register_region};

/// All frames of a worker.
#[derive(Debug)]
pub(in crate::pd::worker) struct Staging {
    device: Arc<dyn Device>,
    memory: PinnedRegion,
    /// Of the whole worker, one frame a block.
    shape: KvShape,
    shard: Shard,
    free: Mutex<Vec<BlockId>>,
}

/// Frames under one window, and the blocks of the device's cache to which their content goes. The frames are free again when the
/// last holder lets go.
#[derive(Debug)]
pub(in crate::pd::worker) struct Staged {
    /// The frames as a cache of the heads that the window has.
    pub(in crate::pd::worker) caches: Caches,
    pub(in crate::pd::worker) frames: Vec<BlockId>,
    pub(in crate::pd::worker) blocks: Vec<BlockId>,
    /// The place in the sequence of the first block's first token.
    pub(in crate::pd::worker) first_token: u32,
    staging: Arc<Staging>,
}

/// The order of axes in a frame: any tokens of a layer are one run, as are whole layers.
pub(super) fn frame_order() -> LayoutOrder {
    "BLNHPC".parse().expect("it is a listed order")
}

impl Staging {
    /// Sets the memory aside, pins it and registers it: first of all, so that the transport's number of it is the layouts'.
    pub(in crate::pd::worker) fn new(
        cache: &KvCache,
        shard: Shard,
        limits: &Limits,
        transport: &dyn Transport,
    ) -> Result<Option<Arc<Self>>, ConnectorError> {
        let Some(cache) = cache.device() else { return Ok(None) };
        let shape = cache.layout().shape();
        let frames = limits.staging_bytes / shape.block_bytes();
        let refuse = |problem: String| ConnectorError::Caches { problem };
        let frames = u32::try_from(frames).ok().filter(|&frames| frames > 0).ok_or_else(|| {
            let (bytes, block) = (limits.staging_bytes, shape.block_bytes());
            refuse(format!(
                "staging_bytes = {bytes} holds no block of {block} bytes, or too many; write another number"
            ))
        })?;
        let shape = KvShape { blocks: frames, ..shape.clone() };
        let bytes = usize::try_from(shape.block_bytes() * u64::from(frames)).unwrap_or(usize::MAX);
        let region = HostRegion::new(bytes).map_err(|error| refuse(format!("{error}: lower staging_bytes")))?;
        register_region(transport, &region)?;
        let device = Arc::clone(cache.device());
        let memory = device.pin(Arc::new(region)).map_err(|error| refused_by_device(&error))?;
        // The first is taken first.
        let free = Mutex::new((0..frames).rev().map(BlockId::new).collect());
        Ok(Some(Arc::new(Self { device, memory, shape, shard, free })))
    }

    /// Takes a frame for each of some blocks; `None` while there are not so many free.
    ///
    /// # Errors
    /// There never will be so many, in words.
    pub(in crate::pd::worker) fn take(
        self: &Arc<Self>,
        blocks: &[BlockId],
        first_token: u32,
        heads: Range<u16>,
    ) -> Result<Option<Arc<Staged>>, String> {
        if blocks.len() > self.shape.blocks as usize {
            let (needed, frame) = (blocks.len() as u64, self.shape.block_bytes());
            return Err(format!(
                "{needed} blocks take {} bytes of staging memory, and there are {}; raise staging_bytes",
                needed * frame,
                frame * u64::from(self.shape.blocks)
            ));
        }
        let frames = {
            let mut free = self.lock();
            let Some(rest) = free.len().checked_sub(blocks.len()) else { return Ok(None) };
            let mut frames = free.split_off(rest);
            frames.reverse();
            frames
        };
        let caches = self.caches(heads);
        let staged = Staged { caches, frames, blocks: blocks.to_vec(), first_token, staging: Arc::clone(self) };
        let frame_bytes = self.shape.block_bytes() as usize;
        for &frame in &staged.frames {
            // From here on a peer may write there.
            self.device.host_writes(self.at(frame, 0), frame_bytes);
        }
        Ok(Some(Arc::new(staged)))
    }

    /// The frames as a cache of some of the worker's heads; the rest of each frame is padding then.
    fn caches(&self, heads: Range<u16>) -> Caches {
        let shape = KvShape { heads: heads.len() as u16, ..self.shape.clone() };
        let packed = KvLayout::packed(shape.clone(), frame_order()).expect("a part of a cache that has a layout");
        let mut planes = packed.planes().to_vec();
        planes.iter_mut().for_each(|plane| plane.block = self.shape.block_bytes());
        let layout = KvLayout::new(shape, planes, packed.bases().to_vec()).expect("frames do not overlap");
        let cache = RawKvCache::over(layout, self.memory.region()).expect("the region holds all frames");
        Caches::new(cache.into(), Shard { first_head: heads.start, ..self.shard })
    }

    /// Bytes of the frames that are taken, and of all.
    pub(in crate::pd::worker) fn usage(&self) -> (u64, u64) {
        let (all, free) = (u64::from(self.shape.blocks), self.lock().len() as u64);
        ((all - free) * self.shape.block_bytes(), all * self.shape.block_bytes())
    }

    /// Where a byte of a frame lies.
    fn at(&self, frame: BlockId, offset: usize) -> NonNull<u8> {
        let offset = frame.get() as usize * self.shape.block_bytes() as usize + offset;
        let start = self.memory.region().as_ptr().as_ptr();
        NonNull::new(start.wrapping_add(offset)).expect("inside a mapped region")
    }

    fn lock(&self) -> MutexGuard<'_, Vec<BlockId>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Staged {
    /// Where a byte of the frame of one of the blocks lies.
    pub(super) fn at(&self, index: usize, offset: usize) -> NonNull<u8> {
        self.staging.at(self.frames[index], offset)
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.staging.lock().extend(self.frames.drain(..).rev());
    }
}
