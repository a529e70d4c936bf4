//! What can go wrong in the command, and the exit code of each.

use std::error::Error;
use std::io;
use std::process::ExitCode;

use kvferry::config::ConfigError;
use kvferry::sizing::SizingError;
use kvferry_kernels::KernelError;
use kvferry_transport::TransportError;

/// Why the command ended without doing what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum CliError {
    /// Arguments that do not fit each other, or the machine.
    #[error("{argument} {found}: {fix}")]
    Argument {
        /// The argument, as it is written.
        argument: &'static str,
        /// Its value.
        found: String,
        /// What to write.
        fix: String,
    },
    /// The cluster's key or certificates cannot be used.
    #[error("what this side proves itself with")]
    Credentials {
        /// Why.
        #[source]
        source: ConfigError,
    },
    /// A transport that is not here.
    #[error("transport {transport} is not available: {why}; {fix}")]
    Unavailable {
        /// Its name.
        transport: &'static str,
        /// Why not.
        why: String,
        /// How to mend it, or what to use.
        fix: String,
    },
    /// The transport failed.
    #[error("{what}")]
    Transport {
        /// What was tried.
        what: String,
        /// Its word.
        #[source]
        source: TransportError,
    },
    /// The other side ended, or cannot be reached.
    #[error("the other side ({peer}) is gone")]
    Gone {
        /// Its name or address.
        peer: String,
        /// Why.
        #[source]
        source: TransportError,
    },
    /// The other side says nothing.
    #[error("waited {seconds} s for the other side to {what}: see whether it runs, and what it printed")]
    Silent {
        /// What it should have done.
        what: &'static str,
        /// How long.
        seconds: u64,
    },
    /// The other side does not do what it was told.
    #[error("the other side refused: {why}")]
    Refused {
        /// Its word.
        why: String,
    },
    /// A tool that measures a limit failed.
    #[error("{name} failed, so there is no limit to compare with: {why}")]
    Tool {
        /// Its name.
        name: &'static str,
        /// What it said.
        why: String,
    },
    /// The other side said what does not fit.
    #[error("the other side said {found}; is it the same release of kvferry?")]
    Word {
        /// What it said.
        found: String,
    },
    /// Memory cannot be had.
    #[error("memory for blocks: give less with --memory")]
    Memory {
        /// Why.
        #[source]
        source: KernelError,
    },
    /// The operating system refused something.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: String,
        /// The system's word.
        #[source]
        source: io::Error,
    },
    /// A cache that cannot be sized.
    #[error("{config}")]
    Sizing {
        /// The configuration's file.
        config: String,
        /// Why.
        #[source]
        source: SizingError,
    },
    /// A report that cannot be written down.
    #[error("{what} is no legal JSON")]
    Json {
        /// What.
        what: &'static str,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

impl CliError {
    pub(crate) fn argument(argument: &'static str, found: impl ToString, fix: impl Into<String>) -> Self {
        Self::Argument { argument, found: found.to_string(), fix: fix.into() }
    }

    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }

    pub(crate) fn transport(what: impl Into<String>) -> impl FnOnce(TransportError) -> Self {
        let what = what.into();
        move |source| Self::Transport { what, source }
    }

    /// What the process ends with.
    pub(crate) fn code(&self) -> ExitCode {
        ExitCode::from(match self {
            Self::Argument { .. } | Self::Credentials { .. } | Self::Sizing { .. } => 2,
            Self::Unavailable { .. } => 3,
            _ => 4,
        })
    }
}

/// An error and what caused it, in one line.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
