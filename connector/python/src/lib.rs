//! kvferry for engines in Python: both halves of the connector's contract, and the engine's tensors registered in place.
//!
//! What crosses is plain: ids, numbers, lists of block ids, and bytes (a step's metadata down, its results up). Nothing here waits or
//! copies while it holds the interpreter's lock. The engine's own objects are translated in Python, in the package beside this crate.
#![deny(unsafe_code)]

mod config;
mod error;
mod facts;
mod fingerprint;
mod memory;
mod params;
mod samples;
mod scheduler;
mod words;
mod worker;

use pyo3::prelude::*;

/// Shows kvferry's log on standard error, from `level` on: `error`, `warn`, `info`, `debug` or `trace`. Once in a process; later calls
/// change nothing.
#[pyfunction]
fn init_log(level: &str) -> PyResult<()> {
    let parsed = level.parse::<tracing::Level>();
    let level =
        parsed.map_err(|_| error::value(format!("log level {level:?}: write error, warn, info, debug or trace")))?;
    let subscriber = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).with_ansi(false);
    // Fails only where a subscriber was installed before.
    let _ = subscriber.try_init();
    Ok(())
}

#[pymodule]
mod _kvferry {
    #[pymodule_export]
    use super::config::Config;
    #[pymodule_export]
    use super::fingerprint::fingerprint;
    #[pymodule_export]
    use super::init_log;
    #[pymodule_export]
    use super::memory::layout_of;
    #[pymodule_export]
    use super::params::keys_without_leg;
    #[pymodule_export]
    use super::scheduler::Scheduler;
    #[pymodule_export]
    use super::worker::{PollResult, Worker};
}
