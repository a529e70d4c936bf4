//! A node as a child process.

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::http::{self, Answer, HttpError};

/// How long a test waits for what must come; far longer than anything takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How a node is started.
#[derive(Clone, Debug)]
pub struct Setup {
    program: &'static str,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
}

impl Setup {
    /// A node of the embedded model with short deadlines, as `program` (the test crate's binary `node`).
    #[must_use]
    pub fn new(program: &'static str) -> Self {
        Self { program, arguments: Vec::new(), environment: Vec::new() }
            .env("KVFERRY_PSK", "a key for the whole cluster")
            .env("KVFERRY_TRANSFER_DEADLINE_MS", "20000")
            .env("KVFERRY_ABSENT_DEADLINE_MS", "1500")
            .env("KVFERRY_PROGRESS_DEADLINE_MS", "3000")
            .env("KVFERRY_LEASE_TTL_MS", "3000")
            .env("KVFERRY_VERDICT_TIMEOUT_MS", "1500")
    }

    /// Adds command-line arguments, separated by blanks.
    #[must_use]
    pub fn args(mut self, arguments: &str) -> Self {
        self.arguments.extend(arguments.split_whitespace().map(str::to_owned));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts a prefill node on a free port.
    #[must_use]
    pub fn prefill(&self) -> Node {
        self.prefill_at(SocketAddr::from(([127, 0, 0, 1], 0)))
    }

    /// Starts a prefill node at an address.
    #[must_use]
    pub fn prefill_at(&self, address: SocketAddr) -> Node {
        Node::start(self, "prefill", &format!("--listen {address} --metrics 127.0.0.1:0"), "metrics")
    }

    /// Starts a decode node that asks the prefill node at `address`.
    #[must_use]
    pub fn decode(&self, address: SocketAddr) -> Node {
        Node::start(self, "decode", &format!("--http 127.0.0.1:0 --prefill {address}"), "http")
    }
}

/// A running node; dropping it kills it.
#[derive(Debug)]
pub struct Node {
    child: Child,
    http: SocketAddr,
    transfer: Option<SocketAddr>,
}

impl Node {
    fn start(setup: &Setup, role: &str, arguments: &str, http: &str) -> Self {
        let mut child = Command::new(setup.program)
            .arg(role)
            .args(arguments.split_whitespace())
            .args(&setup.arguments)
            .arg("--exit-with-stdin")
            .envs(setup.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the node's binary was built with this test");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("the node speaks");
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{role} said {line:?}"));
        let address = |field: &str| said[field].as_str().map(|text| text.parse().expect("an address"));
        Self { http: address(http).expect("it serves HTTP"), transfer: address("transfer"), child }
    }

    /// Where peers' connectors reach it.
    ///
    /// # Panics
    /// If it is not a prefill node.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.transfer.expect("a prefill node")
    }

    /// Generates on a prompt's tokens.
    ///
    /// # Errors
    /// [`HttpError`].
    pub fn complete(&self, prompt: &[u32], max_tokens: u32) -> Result<Answer, HttpError> {
        http::complete(self.http, prompt, max_tokens)
    }

    /// Begins a streamed completion; dropping the stream is a client that hangs up.
    #[must_use]
    pub fn begin(&self, prompt: &[u32], max_tokens: u32) -> TcpStream {
        http::send_and_hang_up(self.http, prompt, max_tokens)
    }

    /// Where it serves HTTP, for a thread that completes on its own.
    pub fn client(&self) -> impl Fn(&[u32], u32) -> Result<Answer, HttpError> + Send + Clone + 'static {
        let http = self.http;
        move |prompt, max_tokens| http::complete(http, prompt, max_tokens)
    }

    /// The sum of a metric's samples whose labels contain `label`.
    ///
    /// # Panics
    /// If the node does not answer.
    #[must_use]
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let page = http::get(self.http, "/metrics").expect("a page of metrics");
        page.lines()
            .filter_map(|line| {
                let (sample, value) = line.rsplit_once(' ')?;
                let of = sample.split('{').next() == Some(name) && sample.contains(label);
                of.then(|| value.parse::<f64>().ok()).flatten()
            })
            .sum()
    }

    /// What is held for transfers and requests: transfers, grants, leases, early messages, slabs, blocks.
    #[must_use]
    pub fn held(&self) -> f64 {
        let gauges = ["transfers_live", "grants_live", "leases_live", "early_grants_live", "slab_pool_used_bytes"];
        let blocks = self.metric("kvferry_pool_blocks", "") - self.metric("kvferry_pool_blocks_free", "");
        gauges.iter().map(|gauge| self.metric(&format!("kvferry_{gauge}"), "")).sum::<f64>() + blocks
    }

    /// Waits until nothing is held.
    ///
    /// # Panics
    /// If something stays.
    pub fn wait_until_free(&self, who: &str) {
        wait_until(&format!("{who} holds nothing"), || self.held() == 0.0);
    }

    /// Kills it with SIGKILL: it says no word to anybody.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn kill(mut self) {
        self.child.kill().expect("a child can be killed");
        self.child.wait().expect("a child can be waited for");
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have been killed already; there is nobody left to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Asks again and again until `done`.
///
/// # Panics
/// If that takes longer than [`PATIENCE`].
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        std::thread::park_timeout(Duration::from_millis(2));
    }
}
