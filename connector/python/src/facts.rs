//! What Python read off the engine's objects, by the names of the attributes of its data classes.

use pyo3::FromPyObject;

/// One attention layer's tensor.
#[derive(FromPyObject, Clone, Debug)]
pub(crate) struct LayerTensor {
    /// The layer's name, for errors.
    pub(crate) name: String,
    /// Address of its first element.
    pub(crate) data_ptr: usize,
    /// The allocation that it is a view of: address and length in bytes.
    pub(crate) storage_ptr: usize,
    pub(crate) storage_bytes: usize,
    /// Sizes, and strides in elements.
    pub(crate) shape: Vec<u64>,
    pub(crate) stride: Vec<u64>,
}

/// One worker's KV cache.
#[derive(FromPyObject, Clone, Debug)]
pub(crate) struct CacheFacts {
    /// Where the tensors are, `cpu`.
    pub(crate) device: String,
    /// `float32`, `float16` or `bfloat16`.
    pub(crate) dtype: String,
    /// What each dimension of a tensor is, outermost first: L is the list of layers; B, P, H and N as in a layout's name; C is the run, of
    /// K and V together if there is no P.
    pub(crate) axes: String,
    /// Whether the engine's kernels pack the tokens of one block and head in an order of their own, K's half before V's.
    pub(crate) whole_pages: bool,
    pub(crate) blocks: u32,
    pub(crate) heads: u16,
    pub(crate) tokens_per_block: u32,
    /// Elements of one token of one head.
    pub(crate) head_size_k: u32,
    pub(crate) head_size_v: u32,
    /// In the model's order.
    pub(crate) layers: Vec<LayerTensor>,
}

/// What the KV cache is of.
#[derive(FromPyObject, Clone, Debug)]
pub(crate) struct ModelFacts {
    /// For people.
    pub(crate) name: String,
    /// 64 hexadecimal digits that no other weights have, from [`fingerprint`](crate::fingerprint::fingerprint).
    pub(crate) fingerprint: String,
    /// KV heads over all ranks.
    pub(crate) kv_heads: u16,
    pub(crate) rope_theta: f64,
    pub(crate) rope_elements: u32,
    pub(crate) rope_scaling: String,
    /// What else must be equal, by name.
    pub(crate) options: Vec<(String, String)>,
}
