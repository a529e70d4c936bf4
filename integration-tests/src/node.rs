//! A node as a child process.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kvferry::config::{ConnectorConfig, RawConfig};
use kvferry_protocol::Incarnation;
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, waitid};
use serde_json::Value;

use crate::bound::{Idle, Limits, Watch};
use crate::http::{self, Answer, HttpError};

/// How long a test waits for what must come, whatever the machine does meanwhile; far longer than anything takes.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How a node is started.
#[derive(Clone, Debug)]
pub struct Setup {
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    is_quiet: bool,
}

impl Setup {
    /// A node of the embedded model with short deadlines, as `program` (the test crate's binary `node`).
    #[must_use]
    pub fn new(program: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), arguments: Vec::new(), environment: Vec::new(), is_quiet: false }
            .env("KVFERRY_PSK", "a key for the whole cluster")
            // Links between nodes are TCP proxies: what breaks them is to touch the payload.
            .env("KVFERRY_PATHS", "tcp")
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

    /// Does not repeat what nodes log.
    #[must_use]
    pub fn quiet(mut self, is_quiet: bool) -> Self {
        self.is_quiet = is_quiet;
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// What a prefill node says that does not start.
    ///
    /// # Panics
    /// If it starts.
    #[must_use]
    pub fn refusal(&self) -> String {
        let mut command = Command::new(&self.program);
        command.arg("prefill").args(&self.arguments).arg("--exit-with-stdin");
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let output = command.stdin(Stdio::null()).output().expect("the node's binary was built with this test");
        assert!(!output.status.success(), "it started");
        String::from_utf8_lossy(&output.stderr).into_owned()
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
        self.decode_of(&[address])
    }

    /// Starts a decode node that asks the prefill nodes at `addresses` in turn.
    #[must_use]
    pub fn decode_of(&self, addresses: &[SocketAddr]) -> Node {
        let list: Vec<_> = addresses.iter().map(SocketAddr::to_string).collect();
        self.decode_reading(&list)
    }

    /// Starts a decode node that asks prefill nodes in turn, each written as its ranks' addresses joined by `+`.
    #[must_use]
    pub fn decode_reading(&self, nodes: &[String]) -> Node {
        Node::start(self, "decode", &format!("--http 127.0.0.1:0 --prefill {}", nodes.join(",")), "http")
    }

    /// What the deadlines of these nodes allow.
    ///
    /// # Panics
    /// If the environment is no configuration.
    #[must_use]
    pub fn limits(&self) -> Limits {
        let mut raw = RawConfig { engine_id: Some("a".into()), role: Some("prefill".into()), ..RawConfig::default() };
        let environment = self.environment.iter().map(|(name, value)| (name.into(), value.into()));
        raw.overlay_env(environment).expect("the nodes read it, too");
        let config = ConnectorConfig::try_from((raw, Incarnation::new(1))).expect("the nodes read it, too");
        Limits::from(config.deadlines())
    }
}

/// A running node; dropping it kills it.
#[derive(Debug)]
pub struct Node {
    child: Child,
    http: SocketAddr,
    /// Where its ranks are reached, if it prefills.
    transfers: Vec<SocketAddr>,
    log: Arc<Log>,
    watch: Watch,
    limits: Limits,
}

/// The lines that a node wrote to standard error.
#[derive(Debug, Default)]
struct Log(Mutex<LogState>);

#[derive(Debug, Default)]
struct LogState {
    /// The last ones.
    lines: VecDeque<String>,
    /// Lines at ERROR, and what a panic says.
    errors: Vec<String>,
}

impl Node {
    fn start(setup: &Setup, role: &str, arguments: &str, http: &str) -> Self {
        let mut child = Command::new(&setup.program)
            .arg(role)
            .args(arguments.split_whitespace())
            .args(&setup.arguments)
            .arg("--exit-with-stdin")
            .env("NO_COLOR", "1")
            .envs(setup.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the node's binary was built with this test");
        let log = Log::of(&mut child, role, setup.is_quiet);
        let mut line = String::new();
        let stdout = child.stdout.take().expect("piped");
        BufReader::new(stdout).read_line(&mut line).expect("the node speaks");
        let said: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{role} said {line:?}"));
        let address = |value: &Value| value.as_str().map(|text| text.parse().expect("an address"));
        let transfers = said["transfers"].as_array().into_iter().flatten().filter_map(address).collect();
        let (watch, limits) = (Watch::new(child.id()), setup.limits());
        Self { http: address(&said[http]).expect("it serves HTTP"), transfers, child, log, watch, limits }
    }

    /// Where peers' connectors reach it, or its first rank.
    ///
    /// # Panics
    /// If it is not a prefill node.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        *self.transfers.first().expect("a prefill node")
    }

    /// Where peers' connectors reach its ranks; none for a decode node.
    #[must_use]
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.transfers
    }

    /// Its process, to measure what it waits for.
    #[must_use]
    pub fn watch(&self) -> Watch {
        self.watch.clone()
    }

    /// What its deadlines allow.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
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
        self.holds().map(|(_, value)| value).sum()
    }

    fn holds(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let gauges =
            ["transfers_live", "grants_live", "leases_live", "early_grants_live", "slab_pool_used_bytes", "held_bytes"];
        let blocks = self.metric("kvferry_pool_blocks", "") - self.metric("kvferry_pool_blocks_free", "");
        let gauges = gauges.map(|gauge| (gauge, self.metric(&format!("kvferry_{gauge}"), "")));
        gauges.into_iter().chain([("blocks", blocks)]).filter(|&(_, value)| value != 0.0)
    }

    /// Waits until nothing is held.
    ///
    /// # Panics
    /// If something stays longer than the node's deadlines allow, or if the node has logged at ERROR.
    pub fn wait_until_free(&self, who: &str) {
        self.wait_within(
            self.limits.free,
            &|| format!("{who} holds nothing of {:?}", self.holds().collect::<Vec<_>>()),
            || self.held() == 0.0,
        );
        self.assert_calm(who);
    }

    /// Asks again and again until `done`, while the node has not been idle for too long.
    ///
    /// # Panics
    /// If it has.
    pub(crate) fn wait_within(&self, limit: Duration, what: &dyn Fn() -> String, done: impl FnMut() -> bool) {
        let idle = Idle::begin([self.watch()]);
        let mut asked = 0_u32;
        wait(what, Duration::from_millis(2), done, || {
            asked += 1;
            // Looking costs about as much as asking.
            if asked.is_multiple_of(50) {
                let so_far = idle.so_far();
                assert!(
                    so_far < limit,
                    "after {so_far:?} of idle waiting, more than its deadlines allow, not yet: {}",
                    what()
                );
            }
        });
    }

    /// # Panics
    /// If the node has logged at ERROR, or panicked.
    pub fn assert_calm(&self, who: &str) {
        let errors = self.log.lock().errors.clone();
        assert!(errors.is_empty(), "{who} logged {errors:#?}");
    }

    /// How many of the lines that it logged contain a text; of the last ten thousand.
    #[must_use]
    pub fn logged(&self, text: &str) -> usize {
        self.log.lock().lines.iter().filter(|line| line.contains(text)).count()
    }

    /// File descriptors that the process has open.
    ///
    /// # Panics
    /// If there is no process any more.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("it runs").count()
    }

    /// Threads of the process.
    ///
    /// # Panics
    /// If there is no process any more.
    #[must_use]
    pub fn threads(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("it runs").count()
    }

    /// Its memory, in KiB.
    ///
    /// # Panics
    /// If there is no process any more.
    #[must_use]
    pub fn resident_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("the kernel tells it");
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// CPU time that it used, in clock ticks of a hundredth of a second.
    ///
    /// # Panics
    /// If there is no process any more.
    #[must_use]
    pub fn cpu_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("it runs");
        // The second field is a name in parentheses; utime and stime are the 14th and 15th of all.
        let (_, rest) = stat.rsplit_once(") ").expect("a name");
        rest.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
    }

    /// Stops it as a frozen process stops; it keeps all it has.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        waitid(WaitId::Pid(self.pid()), WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT)
            .expect("a child can be waited for");
        self.watch.stopped();
    }

    /// Lets it go on after [`Node::stop`].
    ///
    /// # Panics
    /// If the system refuses.
    pub fn go_on(&self) {
        self.signal(Signal::CONT);
        self.watch.goes_on();
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("a child can be signalled");
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Limits how many file descriptors it may have open, from now on.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn limit_descriptors(&self, most: u64) {
        let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
        let limit = Rlimit { current: Some(most), maximum };
        rustix::process::prlimit(Some(self.pid()), Resource::Nofile, limit).expect("a child can be limited");
    }

    /// Lets it have as many file descriptors as the system allows again.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn allow_descriptors(&self) {
        let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
        let limit = Rlimit { current: maximum, maximum };
        rustix::process::prlimit(Some(self.pid()), Resource::Nofile, limit).expect("a child can be limited");
    }

    /// Where it serves HTTP.
    #[must_use]
    pub fn http_address(&self) -> SocketAddr {
        self.http
    }

    /// Kills it with SIGKILL: it says no word to anybody.
    ///
    /// # Panics
    /// If the system refuses.
    pub fn kill(mut self) {
        self.kill_now();
    }

    pub(crate) fn kill_now(&mut self) {
        self.child.kill().expect("a child can be killed");
        self.child.wait().expect("a child can be waited for");
    }
}

impl Log {
    /// Reads what a child says, repeats it for the test's own output, and keeps what a person would have to look at.
    fn of(child: &mut Child, role: &str, is_quiet: bool) -> Arc<Self> {
        let log = Arc::new(Self::default());
        let stderr = child.stderr.take().expect("piped");
        let (of_thread, name) = (Arc::clone(&log), format!("{role} {}", child.id()));
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let is_error = line.contains(" ERROR ") || line.contains("panicked at");
                if is_error || !is_quiet {
                    eprintln!("[{name}] {line}");
                }
                let mut state = of_thread.lock();
                if is_error {
                    state.errors.push(line.clone());
                }
                if state.lines.len() == LOG_LINES {
                    state.lines.pop_front();
                }
                state.lines.push_back(line);
            }
        });
        log
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, LogState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // It may have been killed already; there is nobody left to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Lines of a node's log that are kept.
const LOG_LINES: usize = 10_000;

/// Asks again and again until `done`.
///
/// # Panics
/// If that takes longer than [`PATIENCE`].
pub fn wait_until(what: &str, done: impl FnMut() -> bool) {
    wait(&|| what.to_owned(), Duration::from_millis(2), done, || {});
}

/// The same without much time between, for what passes quickly.
pub(crate) fn wait_closely(what: &str, done: impl FnMut() -> bool) {
    wait(&|| what.to_owned(), Duration::from_micros(100), done, || {});
}

fn wait(what: &dyn Fn() -> String, pause: Duration, mut done: impl FnMut() -> bool, mut between: impl FnMut()) {
    let deadline = Instant::now() + PATIENCE;
    while !done() {
        between();
        assert!(Instant::now() < deadline, "waited in vain until {}", what());
        std::thread::park_timeout(pause);
    }
}
