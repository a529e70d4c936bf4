//! What a KV cache is, apart from where its bytes lie: compared field by field before the first transfer.
//!
//! Layout, tokens per block and the sizes of parallel groups are not part of it: those may differ between two peers.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::message::Text;

/// The identity of a KV cache. Two caches may exchange bytes only if every field is equal, but for the name of one model.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// The model's name, for people; compared only where no fingerprint says more.
    pub model: Text,
    /// A hash of the model's weights and configuration, since names may lie; zero if there is none.
    pub model_fingerprint: Fingerprint,
    /// The element type of the cache.
    pub kv_dtype: KvDtype,
    /// Layers of the whole model, over all pipeline stages.
    pub layers: u16,
    /// KV heads of the whole model, over all tensor-parallel ranks; 1 for MLA.
    pub kv_heads: u16,
    /// Elements of K of one token of one head; for MLA the latent and its rotary part together.
    pub head_size_k: u32,
    /// Elements of V of one token of one head; 0 for MLA.
    pub head_size_v: u32,
    /// Whether K and V are stored, or one latent plane.
    pub planes: Planes,
    /// How positions were mixed into K.
    pub rope: Rope,
    /// How elements were scaled before they were stored.
    pub scales: Scales,
    /// How blocks of tokens are named; prefixes match only under the same scheme.
    pub hash_scheme: Text,
    /// How digests are made.
    pub digest_scheme: Text,
    /// Whatever else an engine wants to be equal, by name; at most [`Manifest::MAX_OPTIONS`].
    pub options: Options,
}

/// A hash of 256 bits, shown as hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fingerprint(pub [u8; 32]);

/// The element type of a KV cache. The order is the wire format: append only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum KvDtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// OCP FP8 E4M3.
    Fp8E4m3,
    /// OCP FP8 E5M2.
    Fp8E5m2,
    /// 8-bit integers with scales.
    Int8,
}

/// What is stored of one token of one head. The order is the wire format: append only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Planes {
    /// K and V.
    KeyValue,
    /// One latent vector (MLA).
    Latent,
}

/// How positions were mixed into K before it was stored. Source: `rope_parameters` of a model's `config.json`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Rope {
    /// Which elements are rotated together.
    pub style: RopeStyle,
    /// The bits of the base, an IEEE 754 binary64 (`f64::to_bits`).
    pub theta_bits: u64,
    /// How many elements of a head are rotated.
    pub rotary_elements: u32,
    /// The scaling and its parameters in one canonical text, e.g. `none` or `llama3 factor=32 low=1 high=4 from=8192`.
    pub scaling: Text,
}

/// Which elements of a head are rotated together. The order is the wire format: append only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RopeStyle {
    /// No rotation before the store.
    None,
    /// Element i with i + half.
    Half,
    /// Element 2i with 2i + 1.
    Interleaved,
}

/// How elements were scaled before they were stored.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Scales {
    /// What shares one scale.
    pub per: ScalePer,
    /// A hash of the scales that are part of the model; zero if there are none.
    pub fingerprint: Fingerprint,
}

/// What shares one scale. The order is the wire format: append only.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[non_exhaustive]
pub enum ScalePer {
    /// Nothing is scaled.
    None,
    /// All elements of K, or of V, of one layer.
    Layer,
    /// One head of one layer.
    Head,
    /// One token of one head of one layer; such scales are part of the stored bytes.
    TokenHead,
}

/// Named values beyond the fixed fields.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "BTreeMap<Text, Text>")]
pub struct Options(BTreeMap<Text, Text>);

/// Too many options.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("manifest: {found} options are over the limit of {limit}; hash what belongs together into one value")]
pub struct TooManyOptions {
    /// How many were given.
    pub found: usize,
    /// How many there may be.
    pub limit: usize,
}

/// One field in which two manifests differ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// The field, e.g. `rope.theta`; an option is `options.NAME`.
    pub field: String,
    /// This side's value.
    pub ours: String,
    /// The peer's value.
    pub theirs: String,
}

/// Checks that two caches may exchange bytes.
///
/// # Errors
/// Every field that differs, with both values.
pub fn compare(ours: &Manifest, theirs: &Manifest) -> Result<(), Vec<Mismatch>> {
    let mut found = Found(Vec::new());
    // Taken apart by name, so that a new field cannot be forgotten here.
    let Manifest {
        model,
        model_fingerprint,
        kv_dtype,
        layers,
        kv_heads,
        head_size_k,
        head_size_v,
        planes,
        rope,
        scales,
        hash_scheme,
        digest_scheme,
        options,
    } = ours;
    if !model_fingerprint.is_known() || model_fingerprint != &theirs.model_fingerprint {
        // Equal weights under two names are one model.
        found.text("model", model, &theirs.model);
    }
    found.value("model_fingerprint", model_fingerprint, &theirs.model_fingerprint);
    found.value("kv_dtype", kv_dtype, &theirs.kv_dtype);
    found.value("layers", layers, &theirs.layers);
    found.value("kv_heads", kv_heads, &theirs.kv_heads);
    found.value("head_size_k", head_size_k, &theirs.head_size_k);
    found.value("head_size_v", head_size_v, &theirs.head_size_v);
    found.value("planes", planes, &theirs.planes);
    let Rope { style, theta_bits, rotary_elements, scaling } = rope;
    found.value("rope.style", style, &theirs.rope.style);
    found.theta(*theta_bits, theirs.rope.theta_bits);
    found.value("rope.rotary_elements", rotary_elements, &theirs.rope.rotary_elements);
    found.text("rope.scaling", scaling, &theirs.rope.scaling);
    let Scales { per, fingerprint } = scales;
    found.value("scales.per", per, &theirs.scales.per);
    found.value("scales.fingerprint", fingerprint, &theirs.scales.fingerprint);
    found.text("hash_scheme", hash_scheme, &theirs.hash_scheme);
    found.text("digest_scheme", digest_scheme, &theirs.digest_scheme);
    found.options(options, &theirs.options);
    if found.0.is_empty() { Ok(()) } else { Err(found.0) }
}

impl Manifest {
    /// The most options.
    pub const MAX_OPTIONS: usize = 32;
}

impl Fingerprint {
    fn is_known(self) -> bool {
        self != Self::default()
    }
}

impl Options {
    /// Checks and wraps.
    ///
    /// # Errors
    /// [`TooManyOptions`] over [`Manifest::MAX_OPTIONS`].
    pub fn new(options: BTreeMap<Text, Text>) -> Result<Self, TooManyOptions> {
        let (found, limit) = (options.len(), Manifest::MAX_OPTIONS);
        if found > limit { Err(TooManyOptions { found, limit }) } else { Ok(Self(options)) }
    }

    /// The options by name.
    #[must_use]
    pub const fn as_map(&self) -> &BTreeMap<Text, Text> {
        &self.0
    }
}

impl TryFrom<BTreeMap<Text, Text>> for Options {
    type Error = TooManyOptions;

    fn try_from(options: BTreeMap<Text, Text>) -> Result<Self, TooManyOptions> {
        Self::new(options)
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ours is {}, theirs is {}", self.field, self.ours, self.theirs)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

struct Found(Vec<Mismatch>);

impl Found {
    fn value<T: PartialEq + fmt::Debug>(&mut self, field: &str, ours: &T, theirs: &T) {
        if ours != theirs {
            self.push(field, format!("{ours:?}"), format!("{theirs:?}"));
        }
    }

    fn text(&mut self, field: &str, ours: &Text, theirs: &Text) {
        self.value(field, &ours.as_str(), &theirs.as_str());
    }

    fn theta(&mut self, ours: u64, theirs: u64) {
        if ours != theirs {
            self.push("rope.theta", f64::from_bits(ours).to_string(), f64::from_bits(theirs).to_string());
        }
    }

    fn options(&mut self, ours: &Options, theirs: &Options) {
        let shown = |value: Option<&Text>| value.map_or_else(|| "absent".to_owned(), |v| format!("{:?}", v.as_str()));
        let names: std::collections::BTreeSet<&Text> = ours.0.keys().chain(theirs.0.keys()).collect();
        for name in names {
            let (our_value, their_value) = (ours.0.get(name), theirs.0.get(name));
            if our_value != their_value {
                self.push(&format!("options.{}", name.as_str()), shown(our_value), shown(their_value));
            }
        }
    }

    fn push(&mut self, field: &str, ours: String, theirs: String) {
        self.0.push(Mismatch { field: field.to_owned(), ours, theirs });
    }
}

#[cfg(test)]
mod tests;
