//! The engine's tensors as a registered KV cache: layouts read from shapes and strides, memory used in place.
//!
//! The only place of this crate that vouches for raw memory.
#![allow(unsafe_code, reason = "the engine's tensors are registered by address")]

use std::collections::BTreeMap;
use std::ptr::NonNull;

use kvferry::RawKvCache;
use kvferry_kernels::KvDtype;
use kvferry_protocol::RegionId;
use kvferry_protocol::layout::{KvLayout, KvShape, LayerBase, PlaneStrides};
use pyo3::prelude::*;

use crate::error::BindingError;
use crate::facts::{CacheFacts, LayerTensor};

/// A cache's layout and the allocations that it lies in, each as address and length.
#[derive(Debug)]
pub(crate) struct Described {
    pub(crate) layout: KvLayout,
    pub(crate) dtype: KvDtype,
    regions: Vec<(NonNull<u8>, usize)>,
}

/// The layout that a cache's tensors have: the order of the axes, and `regions`, how many allocations it lies in.
#[pyfunction]
pub(crate) fn layout_of(cache: CacheFacts) -> PyResult<(String, usize)> {
    let described = describe(&cache)?;
    Ok((described.layout.order().to_string(), described.regions.len()))
}

impl Described {
    /// The cache itself, for a worker that keeps the tensors alive and is shut down before it lets them go.
    pub(crate) fn registered(self) -> Result<RawKvCache, BindingError> {
        // SAFETY: the tensors are views of these allocations, which torch neither moves nor frees while the worker's reference to them
        // lives, and the worker's threads end before that. The engine keeps off the pages of a request that waits for its load, and does
        // not write those of a request that it left to the connector: its scheduler reuses them only when the workers gave them back.
        Ok(unsafe { RawKvCache::new(self.layout, self.dtype, &self.regions) }?)
    }
}

/// Reads a layout off shapes and strides, and checks it against what the engine says of its cache.
pub(crate) fn describe(cache: &CacheFacts) -> Result<Described, BindingError> {
    if cache.device != "cpu" {
        let problem =
            format!("it is on {:?}, and only host memory is supported: run the engine on the CPU", cache.device);
        return Err(BindingError::Memory { problem });
    }
    let dtype = dtype_of(&cache.dtype)?;
    let Some(first) = cache.layers.first() else {
        return Err(BindingError::Memory { problem: "no attention layer has one".to_owned() });
    };
    let element = dtype.bytes() as u64;
    let axes = Axes::read(cache, first)?;
    if let Some(other) =
        cache.layers.iter().find(|layer| (&layer.shape, &layer.stride) != (&first.shape, &first.stride))
    {
        let problem = format!(
            "layers {} and {} differ: {:?} with strides {:?}, and {:?} with strides {:?}",
            first.name, other.name, first.shape, first.stride, other.shape, other.stride
        );
        return Err(BindingError::Memory { problem });
    }
    let planes = axes.planes(cache, element)?;
    let shape = KvShape {
        layers: u16::try_from(cache.layers.len()).map_err(|_| too_many_layers(cache.layers.len()))?,
        blocks: cache.blocks,
        heads: cache.heads,
        tokens_per_block: cache.tokens_per_block,
        run_bytes: planes.iter().map(|plane| plane.run_bytes).collect(),
    };
    let (bases, regions) = places(&cache.layers)?;
    let layout = KvLayout::new(shape, planes, bases);
    let layout = layout.map_err(|error| BindingError::Memory { problem: error.to_string() })?;
    Ok(Described { layout, dtype, regions })
}

fn dtype_of(name: &str) -> Result<KvDtype, BindingError> {
    match name {
        "float32" => Ok(KvDtype::F32),
        "float16" => Ok(KvDtype::F16),
        "bfloat16" => Ok(KvDtype::Bf16),
        _ => {
            let problem = format!(
                "its elements are {name}; leave kv_cache_dtype at auto, with a dtype of float32, float16 or bfloat16"
            );
            Err(BindingError::Memory { problem })
        }
    }
}

/// An allocation: its first byte, and how many there are.
type Span = (NonNull<u8>, usize);

/// Where each layer begins, and the distinct allocations.
fn places(layers: &[LayerTensor]) -> Result<(Vec<LayerBase>, Vec<Span>), BindingError> {
    let mut numbers = BTreeMap::new();
    let (mut bases, mut regions) = (Vec::new(), Vec::new());
    for layer in layers {
        let refuse = |problem: &str| BindingError::Memory { problem: format!("layer {}: {problem}", layer.name) };
        let offset = layer.data_ptr.checked_sub(layer.storage_ptr);
        let offset = offset.ok_or_else(|| refuse("it begins before its own storage"))?;
        let start = NonNull::new(layer.storage_ptr as *mut u8).ok_or_else(|| refuse("it has no memory"))?;
        let region = *numbers.entry(layer.storage_ptr).or_insert_with(|| {
            regions.push((start, layer.storage_bytes));
            regions.len() as u32 - 1
        });
        bases.push(LayerBase { region: RegionId::new(region), offset: offset as u64 });
    }
    Ok((bases, regions))
}

/// The strides of a tensor's axes, in elements.
#[derive(Debug, Default)]
struct Axes {
    block: u64,
    /// From K to V, where that is a dimension.
    plane: Option<u64>,
    head: u64,
    token: u64,
}

impl Axes {
    fn read(cache: &CacheFacts, layer: &LayerTensor) -> Result<Self, BindingError> {
        let CacheFacts { blocks, heads, tokens_per_block, head_size_k, head_size_v, .. } = *cache;
        let refuse =
            |problem: String| Err(BindingError::Memory { problem: format!("layer {}: {problem}", layer.name) });
        if layer.shape.len() != cache.axes.len() || layer.stride.len() != cache.axes.len() {
            return refuse(format!(
                "its shape is {:?}, but this engine's caches have the axes {}",
                layer.shape, cache.axes
            ));
        }
        let has_planes = cache.axes.contains('P');
        let mut axes = Self::default();
        for ((axis, &size), &stride) in cache.axes.chars().zip(&layer.shape).zip(&layer.stride) {
            let (want, strides) = match axis {
                'B' => (u64::from(blocks), &mut axes.block),
                'H' => (heads.into(), &mut axes.head),
                'N' => (tokens_per_block.into(), &mut axes.token),
                'P' => (2, axes.plane.insert(0)),
                'C' if has_planes => (head_size_k.into(), &mut 1),
                'C' => (u64::from(head_size_k) + u64::from(head_size_v), &mut 1),
                _ => return refuse(format!("{axis:?} is no axis of a cache")),
            };
            if size != want {
                return refuse(format!(
                    "axis {axis} of its shape {:?} has {size}, but the cache's configuration says {want}; if the kernel's blocks are \
                     smaller than the cache's, set --block-size to the kernel's",
                    layer.shape
                ));
            }
            if axis == 'C' && stride != 1 {
                return refuse(format!("its rows are not contiguous: strides {:?}", layer.stride));
            }
            *strides = stride;
        }
        if has_planes && head_size_k != head_size_v {
            return refuse(format!("K has {head_size_k} elements and V {head_size_v}, but they share one shape"));
        }
        Ok(axes)
    }

    /// K's and V's byte strides.
    fn planes(&self, cache: &CacheFacts, element: u64) -> Result<Vec<PlaneStrides>, BindingError> {
        let sizes = [u64::from(cache.head_size_k), u64::from(cache.head_size_v)];
        let tokens = u64::from(cache.tokens_per_block);
        if cache.whole_pages && (self.plane.is_some() || self.token != sizes[0] + sizes[1]) {
            let problem =
                format!("blocks of one head are not contiguous: {} elements from a token to the next", self.token);
            return Err(BindingError::Memory { problem });
        }
        let mut before = 0;
        let planes = sizes.map(|size| {
            // A page of its own order is K's half and V's half, each told as rows of tokens: it moves as a whole.
            let (offset, token) = match self.plane {
                Some(stride) => (if before == 0 { 0 } else { stride }, self.token),
                None if cache.whole_pages => (before * tokens, size),
                None => (before, self.token),
            };
            before += size;
            PlaneStrides {
                offset: offset * element,
                layer: 0,
                block: self.block * element,
                head: self.head * element,
                token: token * element,
                // Far below 4 GiB: it is a row of one head.
                run_bytes: (size * element) as u32,
            }
        });
        Ok(planes.to_vec())
    }
}

fn too_many_layers(found: usize) -> BindingError {
    BindingError::Memory { problem: format!("{found} attention layers; at most {} are supported", u16::MAX) }
}
