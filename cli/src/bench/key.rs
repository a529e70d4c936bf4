//! The key of both sides.

use std::path::Path;

use kvferry::config::PreSharedKey;

use crate::error::CliError;

/// The variable in which the key may stand, as for engines.
pub(crate) const VARIABLE: &str = "KVFERRY_PSK";

/// The key from a file, or from the environment.
pub(crate) fn given(file: Option<&Path>) -> Result<PreSharedKey, CliError> {
    let read = |source| CliError::Key { source };
    if let Some(path) = file {
        let bytes = std::fs::read(path).map_err(CliError::io(format!("--key {} cannot be read", path.display())))?;
        return PreSharedKey::new(&bytes, &format!("--key {}", path.display())).map_err(read);
    }
    let Some(text) = std::env::var_os(VARIABLE) else {
        let fix = format!("name a file with 16 random bytes or more (openssl rand -hex 32), or set {VARIABLE}");
        return Err(CliError::argument("--key", "is missing", fix));
    };
    PreSharedKey::new(text.as_encoded_bytes(), VARIABLE).map_err(read)
}

/// A new one, in hexadecimal, for a pair that this command starts itself.
pub(crate) fn drawn() -> Result<(PreSharedKey, String), CliError> {
    let mut random = [0_u8; 32];
    getrandom::fill(&mut random).map_err(|error| CliError::Io {
        what: "the system gives no random bytes".to_owned(),
        source: std::io::Error::other(error),
    })?;
    let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    let key = PreSharedKey::new(text.as_bytes(), "a random key").map_err(|source| CliError::Key { source })?;
    Ok((key, text))
}
