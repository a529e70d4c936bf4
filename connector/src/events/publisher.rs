//! Events over ZeroMQ, as routers of vLLM and SGLang subscribe to them.
//!
//! A PUB socket carries `topic, number (u64 big-endian), batch`. A ROUTER socket answers `"", first number` from a DEALER with the batches
//! from there on that are still kept, each as `"", topic, number, batch`, and ends with the number -1. Source: `ZmqEventPublisher` in vLLM
//! 0.32.0, `distributed/kv_events.py`.
//!
//! Lock order: the log is a leaf.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use zeromq::{PubSocket, RouterRecvHalf, RouterSendHalf, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::{Dialect, EventBatch, EventLog, Numbered};

/// Where events go; nothing is published unless an engine starts a publisher.
#[derive(Clone, PartialEq, Eq, Debug, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventsConfig {
    /// Where subscribers come. The default is `127.0.0.1:5557`, which only this host reaches: whoever subscribes reads prompts.
    pub listen: SocketAddr,
    /// Where those come that missed some; nowhere if left out.
    pub replay_listen: Option<SocketAddr>,
    /// The first part of each message, by which subscribers choose.
    pub topic: String,
    /// In whose words: `vllm`, `vllm-arrays`, `sglang` or `sglang-arrays`.
    pub dialect: Dialect,
    /// How many batches are kept for who missed them.
    pub kept_batches: usize,
    /// How many bytes of them.
    pub kept_bytes: usize,
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 5557)),
            replay_listen: None,
            topic: String::new(),
            dialect: Dialect::default(),
            kept_batches: 10_000,
            kept_bytes: 256 << 20,
        }
    }
}

/// Why events cannot be published.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventsError {
    /// A socket could not listen.
    #[error("KV events: cannot listen on {address} ({problem}): choose another {key}")]
    Listen {
        /// Which key says where.
        key: &'static str,
        /// Where.
        address: SocketAddr,
        /// The library's word.
        problem: String,
    },
    /// Nothing is kept, so nothing could be published.
    #[error("KV events: {key} is 0; write at least 1")]
    Zero {
        /// Which key.
        key: &'static str,
    },
    /// The thread could not start.
    #[error("KV events: their thread does not start")]
    Thread {
        /// The system's word.
        #[source]
        source: std::io::Error,
    },
}

/// Publishes batches from a thread of its own. Dropping it ends the thread; what is not on its way by then is not sent.
#[derive(Debug)]
pub struct EventPublisher {
    shared: Arc<Shared>,
    listens: SocketAddr,
    replays: Option<SocketAddr>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    log: Mutex<EventLog>,
    topic: Bytes,
    /// Something was appended, or the publisher is being dropped.
    called: Notify,
    is_over: std::sync::atomic::AtomicBool,
    overtaken: AtomicU64,
}

impl EventPublisher {
    /// Binds the sockets and starts the thread.
    ///
    /// # Errors
    /// [`EventsError`].
    pub fn start(config: EventsConfig) -> Result<Self, EventsError> {
        for (key, value) in [("kept_batches", config.kept_batches), ("kept_bytes", config.kept_bytes)] {
            if value == 0 {
                return Err(EventsError::Zero { key });
            }
        }
        if !config.listen.ip().is_loopback() {
            tracing::warn!(listen = %config.listen, "KV events are told to whoever can reach this address, and reveal prompts");
        }
        let shared = Arc::new(Shared {
            log: Mutex::new(EventLog::new(config.dialect, config.kept_batches, config.kept_bytes)),
            topic: config.topic.clone().into(),
            called: Notify::new(),
            is_over: false.into(),
            overtaken: AtomicU64::new(0),
        });
        let (started, starts) = sync_channel(1);
        let (of_thread, name) = (Arc::clone(&shared), "kvferry-events".to_owned());
        let thread = std::thread::Builder::new().name(name).spawn(move || run(&config, of_thread, &started));
        let thread = thread.map_err(|source| EventsError::Thread { source })?;
        let (listens, replays) = starts.recv().unwrap_or_else(|_| {
            Err(EventsError::Thread { source: std::io::Error::other("it ended before it listened") })
        })?;
        Ok(Self { shared, listens, replays, thread: Some(thread) })
    }

    /// Publishes a batch; never waits. A subscriber that is too slow sees a gap in the numbers, and asks for what it missed.
    pub fn publish(&self, batch: &EventBatch) {
        self.shared.log().append(batch);
        self.shared.called.notify_one();
    }

    /// Where subscribers come (port 0 is resolved).
    #[must_use]
    pub const fn local_address(&self) -> SocketAddr {
        self.listens
    }

    /// Where those come that missed some.
    #[must_use]
    pub const fn replay_address(&self) -> Option<SocketAddr> {
        self.replays
    }

    /// Batches that were forgotten before they could be sent, since far more were published than the thread had time for.
    #[must_use]
    pub fn overtaken(&self) -> u64 {
        self.shared.overtaken.load(Ordering::Relaxed)
    }
}

impl Drop for EventPublisher {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::SeqCst);
        self.shared.called.notify_one();
        if let Some(thread) = self.thread.take() {
            // One that panicked has said so.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn log(&self) -> MutexGuard<'_, EventLog> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The batches from a number on, at most `most`.
    fn since(&self, from: u64, most: usize) -> Vec<Numbered> {
        self.log().since(from).take(most).cloned().collect()
    }

    fn message(&self, before: &[Bytes], batch: &Numbered) -> ZmqMessage {
        let number = Bytes::copy_from_slice(&batch.sequence.to_be_bytes());
        let payload = Bytes::from_owner(Arc::clone(&batch.payload));
        message(before.iter().cloned().chain([self.topic.clone(), number, payload]))
    }
}

type Bound = (SocketAddr, Option<SocketAddr>);

fn run(config: &EventsConfig, shared: Arc<Shared>, started: &SyncSender<Result<Bound, EventsError>>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(source) => return drop(started.send(Err(EventsError::Thread { source }))),
    };
    runtime.block_on(async move {
        let (mut publisher, mut router) = (PubSocket::new(), RouterSocket::new());
        let bound = async {
            let listens = bind(&mut publisher, "listen", config.listen).await?;
            let replays = match config.replay_listen {
                Some(address) => Some(bind(&mut router, "replay_listen", address).await?),
                None => None,
            };
            Ok((listens, replays))
        };
        let bound = bound.await;
        let (is_bound, replays) = (bound.is_ok(), matches!(bound, Ok((_, Some(_)))));
        if started.send(bound).is_err() || !is_bound {
            return;
        }
        if replays {
            let (answers, questions) = router.split();
            tokio::spawn(replay(Arc::clone(&shared), questions, answers));
        }
        publish_all(&shared, &mut publisher).await;
    });
}

async fn bind(socket: &mut impl Socket, key: &'static str, address: SocketAddr) -> Result<SocketAddr, EventsError> {
    let failed = |problem: String| EventsError::Listen { key, address, problem };
    // By the system, so that the address that it chose is known.
    let listener = std::net::TcpListener::bind(address).map_err(|error| failed(error.to_string()))?;
    let bound = listener.local_addr().map_err(|error| failed(error.to_string()))?;
    socket.bind_listener(listener).await.map_err(|error| failed(error.to_string()))?;
    Ok(bound)
}

async fn publish_all(shared: &Shared, publisher: &mut PubSocket) {
    let mut next = 0;
    loop {
        let batches = shared.since(next, AT_ONCE);
        if let Some(first) = batches.first() {
            shared.overtaken.fetch_add(first.sequence - next, Ordering::Relaxed);
        }
        for batch in &batches {
            next = batch.sequence + 1;
            if let Err(error) = publisher.send(shared.message(&[], batch)).await {
                tracing::debug!(%error, sequence = batch.sequence, "a batch of KV events was not published");
            }
        }
        if shared.is_over.load(Ordering::SeqCst) {
            return;
        }
        if batches.is_empty() {
            shared.called.notified().await;
        } else {
            // Subscribers' connections are served by this thread, too.
            tokio::task::yield_now().await;
        }
    }
}

/// Answers who missed some, one after another.
async fn replay(shared: Arc<Shared>, mut questions: RouterRecvHalf, mut answers: RouterSendHalf) {
    loop {
        let frames = match questions.recv().await {
            Ok(question) => question.into_vec(),
            Err(error) => {
                tracing::debug!(%error, "a question for KV events could not be read");
                tokio::time::sleep(Duration::from_millis(10)).await;
                continue;
            }
        };
        let [peer, empty, number] = frames.as_slice() else {
            tracing::debug!(parts = frames.len(), "a question for KV events has not three parts");
            continue;
        };
        let Ok(from) = <[u8; 8]>::try_from(&number[..]) else {
            tracing::debug!(bytes = number.len(), "a question for KV events names no number of 8 bytes");
            continue;
        };
        let to = [peer.clone(), empty.clone()];
        let answer = answer(&shared, &to, u64::from_be_bytes(from), &mut answers);
        // Who does not read its answer does not keep others from theirs.
        if tokio::time::timeout(PATIENCE, answer).await.is_err() {
            tracing::debug!("who asked for KV events does not read the answer");
        }
    }
}

async fn answer(shared: &Shared, to: &[Bytes], mut from: u64, answers: &mut RouterSendHalf) {
    loop {
        let batches = shared.since(from, AT_ONCE);
        let Some(last) = batches.last() else { break };
        from = last.sequence + 1;
        for batch in &batches {
            if answers.send(shared.message(to, batch)).await.is_err() {
                return; // It is gone.
            }
        }
    }
    let end = Bytes::copy_from_slice(&(-1i64).to_be_bytes());
    let end = message(to.iter().cloned().chain([Bytes::new(), end, Bytes::new()]));
    // If that fails it is gone, too.
    let _ = answers.send(end).await;
}

fn message(mut frames: impl Iterator<Item = Bytes>) -> ZmqMessage {
    let mut message = ZmqMessage::from(frames.next().unwrap_or_default());
    frames.for_each(|frame| message.push_back(frame));
    message
}

/// Batches that are taken from the log together: the engine's thread waits for as long as they are copied, by reference.
const AT_ONCE: usize = 64;
/// For all of an answer to be taken.
const PATIENCE: Duration = Duration::from_secs(5);
