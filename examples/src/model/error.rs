//! Why a model cannot be used.

use std::path::PathBuf;

/// What is wrong with a model file, on which part of it, and how to mend it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The file cannot be opened or read.
    #[error("model {path}: cannot be read; give --model the path of a GGUF file, or `embedded`")]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The header or metadata cannot be parsed.
    #[error("model {path}: not a readable GGUF file: {problem}; fetch it anew (SmolLM2: examples/fetch-smollm2.sh)")]
    Header {
        /// The file.
        path: PathBuf,
        /// What the parser met.
        problem: String,
    },
    /// The architecture is not one that this engine computes.
    #[error(
        "model {path}: architecture {found:?} is not supported; use a GGUF file with general.architecture = \"llama\""
    )]
    Architecture {
        /// The file.
        path: PathBuf,
        /// What it names.
        found: String,
    },
    /// A metadata key is missing or has a value that cannot be used.
    #[error("model {path}: metadata key {key}: {problem}; convert the model anew with a current converter")]
    Key {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// What is wrong with it.
        problem: String,
    },
    /// A tensor that the architecture needs is not there.
    #[error(
        "model {path}: tensor {tensor} is missing; expected shape {expected:?}; the file is incomplete, fetch it anew"
    )]
    MissingTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape, outermost first.
        expected: Vec<usize>,
    },
    /// A tensor does not have the shape that the metadata asks for.
    #[error(
        "model {path}: tensor {tensor} has shape {found:?}, but the metadata asks for {expected:?}; the file's tensors and \
         metadata are of different models"
    )]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What the metadata asks for, outermost first.
        expected: Vec<usize>,
        /// What the file has.
        found: Vec<usize>,
    },
    /// A tensor's bytes cannot be read or decoded.
    #[error("model {path}: tensor {tensor}: {problem}; the file is cut or damaged, fetch it anew")]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The tokenizer in the file cannot be built.
    #[error("model {path}: tokenizer: {problem}; use a GGUF file with a gpt2 (byte-level BPE) tokenizer")]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
}
