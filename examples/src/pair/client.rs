//! A client for one server on this machine: one connection a request, JSON in and out.

use std::net::SocketAddr;

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// The longest answer.
const LIMIT: u64 = 64 << 20;

/// Talks HTTP/1.1 to one address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Client {
    pub(super) address: SocketAddr,
}

impl Client {
    /// Posts JSON and returns the JSON of a 200.
    pub(super) async fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        let body = body.to_string();
        let head =
            format!("POST {path} HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        let answer = self.exchange(path, &head, &body).await?;
        serde_json::from_str(&answer).with_context(|| format!("{path} answered with something that is not JSON"))
    }

    /// Gets the text of a 200.
    pub(super) async fn get(&self, path: &str) -> anyhow::Result<String> {
        self.exchange(path, &format!("GET {path} HTTP/1.1\r\n"), "").await
    }

    async fn exchange(&self, path: &str, head: &str, body: &str) -> anyhow::Result<String> {
        let Self { address } = self;
        let context = || format!("{address}{path} did not answer");
        let mut stream = TcpStream::connect(address).await.with_context(context)?;
        let request = format!("{head}Host: {address}\r\nConnection: close\r\n\r\n{body}");
        stream.write_all(request.as_bytes()).await.with_context(context)?;
        let mut answer = Vec::new();
        stream.take(LIMIT).read_to_end(&mut answer).await.with_context(context)?;
        let answer = String::from_utf8(answer).with_context(context)?;
        let (head, body) = answer.split_once("\r\n\r\n").with_context(context)?;
        let status = head.split(' ').nth(1).unwrap_or_default();
        if status != "200" {
            let message = serde_json::from_str::<Value>(body)
                .ok()
                .and_then(|body| body["error"]["message"].as_str().map(str::to_owned));
            bail!("{path} answered {status}: {}", message.unwrap_or_else(|| body.to_owned()));
        }
        Ok(body.to_owned())
    }
}
