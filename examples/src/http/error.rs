//! Errors in the shape that OpenAI's clients understand.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use crate::engine::{ServiceError, SubmitError};

/// An answer that is not a completion: what is wrong, in which field of the body, and how to mend it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// OpenAI's kind of error.
    pub kind: &'static str,
    /// For people.
    pub message: String,
    /// The field at fault.
    pub field: Option<String>,
}

impl ApiError {
    /// The body is wrong.
    #[must_use]
    pub fn invalid(field: Option<&str>, message: impl Into<String>) -> Self {
        let (status, kind) = (StatusCode::BAD_REQUEST, "invalid_request_error");
        Self { status, kind, message: message.into(), field: field.map(Into::into) }
    }

    /// The engine cannot take or finish the request.
    #[must_use]
    pub fn unavailable(message: impl Into<String>) -> Self {
        let (status, kind) = (StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error");
        Self { status, kind, message: message.into(), field: None }
    }

    /// Something here failed.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        let (status, kind) = (StatusCode::INTERNAL_SERVER_ERROR, "internal_error");
        Self { status, kind, message: message.into(), field: None }
    }

    /// There is no such path, or not with this method.
    #[must_use]
    pub fn no_route(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, kind: "invalid_request_error", message: message.into(), field: None }
    }

    /// The JSON that is sent.
    #[must_use]
    pub fn json(&self) -> serde_json::Value {
        json!({ "error": { "message": self.message, "type": self.kind, "param": self.field, "code": null } })
    }
}

impl From<ServiceError> for ApiError {
    fn from(error: ServiceError) -> Self {
        let message = error.to_string();
        match error {
            ServiceError::Submit(SubmitError::Busy { .. }) | ServiceError::Overloaded => {
                let (status, kind) = (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error");
                Self { status, kind, message, field: None }
            }
            ServiceError::Submit(SubmitError::Context { .. } | SubmitError::Cache { .. }) => {
                Self::invalid(Some("max_tokens"), message)
            }
            ServiceError::Submit(_) => Self::invalid(Some("prompt"), message),
            ServiceError::Stopped => Self::unavailable(message),
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.json())).into_response()
    }
}
