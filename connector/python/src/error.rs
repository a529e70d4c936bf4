//! What the binding refuses, and how Python hears of it.

use std::error::Error;

use kvferry::ConnectorError;
use kvferry::config::ConfigError;
use kvferry_protocol::codec::CodecError;
use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum BindingError {
    /// The configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The connector's word.
    #[error(transparent)]
    Connector(#[from] ConnectorError),
    /// A step's bytes.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// A key of the configuration that is not the user's to set here, or not to this value.
    #[error("{key} = {found}: {fix}")]
    Option { key: String, found: String, fix: String },
    /// A key that must be set.
    #[error("{problem}")]
    Missing { problem: String },
    /// The engine's tensors.
    #[error("the KV cache cannot be used in place: {problem}")]
    Memory { problem: String },
    /// A model that cannot be described.
    #[error("the model cannot be told from others: {problem}")]
    Model { problem: String },
    /// What a router said of a request.
    #[error("kv_transfer_params of request {request}: {problem}")]
    Params { request: String, problem: String },
    /// The system gives no random numbers.
    #[error("the system gives no random numbers")]
    Random(#[source] getrandom::Error),
}

impl From<BindingError> for PyErr {
    fn from(error: BindingError) -> Self {
        let text = told(&error);
        match error {
            BindingError::Connector(_) | BindingError::Codec(_) | BindingError::Random(_) => {
                PyRuntimeError::new_err(text)
            }
            _ => PyValueError::new_err(text),
        }
    }
}

/// An argument that cannot be.
pub(crate) fn value(text: String) -> PyErr {
    PyValueError::new_err(text)
}

/// An error with its causes.
fn told(error: &dyn Error) -> String {
    let mut text = format!("kvferry: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        // A transparent error's cause says the same again.
        if !text.ends_with(&more) {
            text += ": ";
            text += &more;
        }
        cause = error.source();
    }
    text
}
