//! Tells weights apart without reading all of them.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

use pyo3::prelude::*;
use sha2::{Digest, Sha256};

use crate::error::BindingError;

/// 64 hexadecimal digits that name a model: a hash of its configuration's text and, for each file of weights in the order of their names,
/// of the name, the length, and 64 samples of 16 KiB, spread evenly from its start to its end. Fine-tuned weights differ nearly
/// everywhere, so samples tell them apart; a change between two samples is not found.
#[pyfunction]
pub(crate) fn fingerprint(py: Python<'_>, config: &str, files: Vec<PathBuf>) -> PyResult<String> {
    let digest = py.detach(|| hash(config, files));
    Ok(digest.map_err(|(path, error)| BindingError::Model {
        problem: format!("{} cannot be read: {error}", path.display()),
    })?)
}

fn hash(config: &str, mut files: Vec<PathBuf>) -> Result<String, (PathBuf, io::Error)> {
    files.sort_by(|a, b| a.file_name().cmp(&b.file_name()));
    let mut hasher = Sha256::new();
    add(&mut hasher, config.as_bytes());
    for path in files {
        if let Err(error) = sample(&mut hasher, &path) {
            return Err((path, error));
        }
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn sample(hasher: &mut Sha256, path: &PathBuf) -> io::Result<()> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    add(hasher, path.file_name().unwrap_or_default().as_encoded_bytes());
    hasher.update(bytes.to_le_bytes());
    let last = bytes.saturating_sub(SAMPLE_BYTES);
    for index in 0..SAMPLES {
        // The last one ends with the file; those of a small file overlap.
        let start = u64::try_from(u128::from(last) * u128::from(index) / u128::from(SAMPLES - 1)).unwrap_or(last);
        let mut read = Vec::new();
        file.seek(SeekFrom::Start(start))?;
        (&mut file).take(SAMPLE_BYTES).read_to_end(&mut read)?;
        add(hasher, &read);
    }
    Ok(())
}

/// Each part after its length, so that parts cannot flow into each other.
fn add(hasher: &mut Sha256, part: &[u8]) {
    hasher.update((part.len() as u64).to_le_bytes());
    hasher.update(part);
}

const SAMPLES: u64 = 64;
const SAMPLE_BYTES: u64 = 16 << 10;
