//! Tells weights apart without reading all of them.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

use pyo3::prelude::*;
use sha2::{Digest, Sha256};

use crate::error::BindingError;

/// 64 hexadecimal digits that name a model: a hash of its configuration's text and, for each file of weights in the order of their names,
/// of the name, the length, and samples of 64 KiB at its start, in its middle and at its end. Fine-tuned weights differ nearly
/// everywhere, so samples tell them apart; a file that somebody patched elsewhere on purpose is not found.
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
    for start in [0, (bytes / 2).saturating_sub(SAMPLE_BYTES / 2), bytes.saturating_sub(SAMPLE_BYTES)] {
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

const SAMPLE_BYTES: u64 = 64 << 10;
