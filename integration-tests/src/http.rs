//! One request, one connection, one answer.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::{Value, json};

use crate::PATIENCE;

/// A completion.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    /// The generated tokens.
    pub tokens: Vec<u32>,
    /// A digest of the bits of the first token's logits.
    pub first_logits: String,
}

/// A request without a good answer.
#[derive(Debug)]
pub struct HttpError {
    /// The status, or 0 if there was none.
    pub status: u16,
    /// The body, or what went wrong.
    pub text: String,
}

impl HttpError {
    /// Whether it is the error of the policy `fail`: the KV did not come, and this says why.
    #[must_use]
    pub fn names_a_lost_transfer(&self) -> bool {
        let body: Value = serde_json::from_str(&self.text).unwrap_or_default();
        let message = body["error"]["message"].as_str().unwrap_or_default();
        let why = message.strip_prefix("KV transfer failed: ").unwrap_or_default();
        self.status == 503 && REASONS.iter().any(|reason| why.contains(reason))
    }
}

/// Why a transfer that faults meet may end: the protocol's words for it, and what a handshake says that was cut twice.
const REASONS: [&str; 9] = [
    "deadline",
    "stalled",
    "peer absent",
    "peer restarted",
    "digest",
    "cuts",
    "unknown transfer",
    "lease expired",
    "same key",
];

/// Posts a completion of a prompt's tokens.
///
/// # Errors
/// [`HttpError`] for any status but 200, or none.
pub(crate) fn complete(node: SocketAddr, prompt: &[u32], max_tokens: u32) -> Result<Answer, HttpError> {
    let body = json!({
        "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": true, "kvferry_report": true,
    });
    let text = exchange(node, "POST", "/v1/completions", &body.to_string())?;
    let value: Value = serde_json::from_str(&text).expect("an answer is JSON");
    Ok(Answer {
        tokens: serde_json::from_value(value["choices"][0]["token_ids"].clone()).expect("token ids"),
        first_logits: value["kvferry"]["first_logits"].as_str().expect("a digest").to_owned(),
    })
}

/// Gets a page.
///
/// # Errors
/// As [`complete`].
pub(crate) fn get(node: SocketAddr, path: &str) -> Result<String, HttpError> {
    exchange(node, "GET", path, "")
}

/// Sends a request and hangs up without waiting.
pub(crate) fn send_and_hang_up(node: SocketAddr, prompt: &[u32], max_tokens: u32) -> TcpStream {
    try_send_and_hang_up(node, prompt, max_tokens).expect("the node listens and reads")
}

/// The same to a node that may be gone.
///
/// # Errors
/// The system's.
pub(crate) fn try_send_and_hang_up(node: SocketAddr, prompt: &[u32], max_tokens: u32) -> std::io::Result<TcpStream> {
    let body = json!({ "prompt": prompt, "max_tokens": max_tokens, "stream": true }).to_string();
    let mut stream = TcpStream::connect(node)?;
    stream.write_all(head("POST", "/v1/completions", &body).as_bytes())?;
    stream.write_all(body.as_bytes())?;
    Ok(stream)
}

fn head(method: &str, path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n"
    )
}

fn exchange(node: SocketAddr, method: &str, path: &str, body: &str) -> Result<String, HttpError> {
    let broken = |error: std::io::Error| HttpError { status: 0, text: error.to_string() };
    let mut stream = TcpStream::connect(node).map_err(broken)?;
    stream.set_read_timeout(Some(PATIENCE)).map_err(broken)?;
    stream.write_all(head(method, path, body).as_bytes()).map_err(broken)?;
    stream.write_all(body.as_bytes()).map_err(broken)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(broken)?;
    let (head, text) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
    if status == 200 { Ok(text.to_owned()) } else { Err(HttpError { status, text: text.to_owned() }) }
}
