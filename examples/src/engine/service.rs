//! Runs an engine on a thread of its own; any number of clients talk to it through a handle.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use kvferry::contract::{self, RequestId, Worker};
use kvferry::events::EventBatch;
use tokio::sync::{mpsc, oneshot};

use super::runner::Runner;
use super::scheduler::{Event, FinishReason, Scheduler, Snapshot, Submission, SubmitError};
use super::step::StepPlan;

/// Commands that wait for the engine's thread; more are refused.
const COMMANDS: usize = 1024;
/// How long the engine sleeps at most while the connector has something under way but nothing can be computed.
const POLL: Duration = Duration::from_millis(1);

/// How long the connector's peers have to hear that this engine stops.
const GRACE: Duration = Duration::from_secs(1);

/// What a client hears of its request, in order; [`Update::Finished`] is the last.
#[derive(Debug)]
pub enum Update {
    /// A token was generated.
    Token {
        /// The token.
        token: u32,
        /// When.
        at: Instant,
        /// The logits that it was chosen from, if they were asked for and it is the first.
        logits: Option<Vec<f32>>,
    },
    /// The request is over.
    Finished {
        /// Why.
        reason: FinishReason,
        /// When.
        at: Instant,
    },
}

/// What takes an engine's KV events: a publisher, or a log of them.
pub type Publish = Box<dyn FnMut(&EventBatch) + Send>;

/// Why the engine takes no request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServiceError {
    /// The scheduler refused it.
    #[error(transparent)]
    Submit(#[from] SubmitError),
    /// The engine's thread has more to do than it can remember.
    #[error("{COMMANDS} commands are waiting for the engine; try again later")]
    Overloaded,
    /// The engine's thread is over.
    #[error("the engine has stopped; its log says why; start it again")]
    Stopped,
}

/// A request that the engine has accepted. Dropping it cancels the request.
#[derive(Debug)]
pub struct Ticket {
    /// When the request was submitted.
    pub submitted: Instant,
    updates: mpsc::Receiver<Update>,
}

impl Ticket {
    /// The next update; `None` after the last one, or if the engine has stopped.
    pub async fn next(&mut self) -> Option<Update> {
        self.updates.recv().await
    }

    /// The next update if there is one already. `None` says nothing about the request.
    pub fn try_next(&mut self) -> Option<Update> {
        self.updates.try_recv().ok()
    }

    /// The same as [`Ticket::next`] on a thread outside an async runtime.
    pub fn next_blocking(&mut self) -> Option<Update> {
        self.updates.blocking_recv()
    }
}

/// A way to talk to an engine's thread; clones talk to the same one.
#[derive(Clone)]
pub struct EngineHandle {
    commands: SyncSender<Command>,
    prompts: Arc<PromptCompute>,
}

/// What the engine has computed of prompts; both count upwards.
#[derive(Debug, Default)]
pub struct PromptCompute {
    microseconds: AtomicU64,
    tokens: AtomicU64,
}

impl PromptCompute {
    /// The time of all steps with more than one token of a request, in microseconds.
    #[must_use]
    pub fn microseconds(&self) -> u64 {
        self.microseconds.load(Ordering::Relaxed)
    }

    /// The tokens of such requests in such steps.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens.load(Ordering::Relaxed)
    }

    fn count(&self, plan: &StepPlan, took: Duration) {
        let tokens: usize = plan.sequences.iter().map(|s| s.tokens.len()).filter(|&tokens| tokens > 1).sum();
        if tokens > 0 {
            self.tokens.fetch_add(tokens as u64, Ordering::Relaxed);
            self.microseconds.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
        }
    }
}

/// An engine on its thread. Dropping it stops the thread and waits for it.
pub struct EngineService {
    handle: EngineHandle,
    thread: Option<JoinHandle<()>>,
}

enum Command {
    Submit { submission: Submission, updates: mpsc::Sender<Update>, accepted: oneshot::Sender<Result<(), SubmitError>> },
    Snapshot(oneshot::Sender<Snapshot>),
    Step,
    Stop,
}

impl EngineHandle {
    /// Submits a request and waits until the scheduler accepted or refused it.
    ///
    /// # Errors
    /// [`ServiceError`].
    pub async fn submit(&self, submission: Submission) -> Result<Ticket, ServiceError> {
        let (accepted, ticket) = self.post(submission)?;
        accepted.await.map_err(|_| ServiceError::Stopped)??;
        Ok(ticket)
    }

    /// The same on a thread outside an async runtime.
    ///
    /// # Errors
    /// [`ServiceError`].
    pub fn submit_blocking(&self, submission: Submission) -> Result<Ticket, ServiceError> {
        let (accepted, ticket) = self.post(submission)?;
        accepted.blocking_recv().map_err(|_| ServiceError::Stopped)??;
        Ok(ticket)
    }

    /// What was computed of prompts.
    #[must_use]
    pub fn prompts(&self) -> &PromptCompute {
        &self.prompts
    }

    /// The scheduler's state in numbers.
    ///
    /// # Errors
    /// [`ServiceError`].
    pub async fn snapshot(&self) -> Result<Snapshot, ServiceError> {
        let (reply, snapshot) = oneshot::channel();
        self.send(Command::Snapshot(reply))?;
        snapshot.await.map_err(|_| ServiceError::Stopped)
    }

    /// Has the engine take a step even if it has nothing to compute, because a peer waits for what a step gives.
    pub fn wake(&self) {
        // A full queue wakes the engine as well, and a stopped one has nothing to give.
        let _ = self.commands.try_send(Command::Step);
    }

    fn post(
        &self,
        submission: Submission,
    ) -> Result<(oneshot::Receiver<Result<(), SubmitError>>, Ticket), ServiceError> {
        // Room for every token and the end: the engine's thread never waits for a client. A request that asks for more than
        // the model's context is refused before it could fill a channel.
        let room = submission.max_tokens.min(MOST_UPDATES) + 1;
        let (updates, receiver) = mpsc::channel(room);
        let (reply, accepted) = oneshot::channel();
        let submitted = Instant::now();
        self.send(Command::Submit { submission, updates, accepted: reply })?;
        Ok((accepted, Ticket { submitted, updates: receiver }))
    }

    fn send(&self, command: Command) -> Result<(), ServiceError> {
        self.commands.try_send(command).map_err(|error| match error {
            TrySendError::Full(_) => ServiceError::Overloaded,
            TrySendError::Disconnected(_) => ServiceError::Stopped,
        })
    }
}

/// No model here has a longer context.
const MOST_UPDATES: usize = 1 << 24;

impl EngineService {
    /// Starts an engine on a thread named `engine`, with a connector for each of the runner's ranks.
    ///
    /// # Errors
    /// The operating system's, if it gives no thread.
    pub fn start<C, W>(scheduler: Scheduler<C>, runner: Runner, connectors: Vec<W>) -> std::io::Result<Self>
    where
        C: contract::Scheduler + 'static,
        W: Worker + 'static,
    {
        Self::start_publishing(scheduler, runner, connectors, None)
    }

    /// The same, and tells after each step what its cache came to have and to lose, if `publish` is there. It is called on the engine's
    /// thread, and must not wait.
    ///
    /// # Errors
    /// The operating system's, if it gives no thread.
    pub fn start_publishing<C, W>(
        scheduler: Scheduler<C>,
        runner: Runner,
        connectors: Vec<W>,
        publish: Option<Publish>,
    ) -> std::io::Result<Self>
    where
        C: contract::Scheduler + 'static,
        W: Worker + 'static,
    {
        let scheduler = if publish.is_some() { scheduler.with_kv_events() } else { scheduler };
        let (commands, receiver) = sync_channel(COMMANDS);
        let prompts = Arc::new(PromptCompute::default());
        let (clients, counts) = (HashMap::new(), Arc::clone(&prompts));
        let mut engine = EngineLoop { scheduler, runner, connectors, clients, prompts: counts, wanted: false, publish };
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            engine.run(&receiver);
            engine.connectors.iter_mut().for_each(|connector| connector.shutdown(GRACE));
        })?;
        Ok(Self { handle: EngineHandle { commands, prompts }, thread: Some(thread) })
    }

    /// A handle for clients.
    #[must_use]
    pub fn handle(&self) -> EngineHandle {
        self.handle.clone()
    }
}

impl Drop for EngineService {
    fn drop(&mut self) {
        // A full queue is drained by the thread; if it is gone there is nobody to tell.
        let _ = self.handle.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the engine's thread panicked");
        }
    }
}

struct EngineLoop<C, W> {
    scheduler: Scheduler<C>,
    runner: Runner,
    connectors: Vec<W>,
    clients: HashMap<RequestId, mpsc::Sender<Update>>,
    prompts: Arc<PromptCompute>,
    /// A step is wanted although nothing is to be computed.
    wanted: bool,
    publish: Option<Publish>,
}

impl<C: contract::Scheduler, W: Worker> EngineLoop<C, W> {
    fn run(&mut self, commands: &Receiver<Command>) {
        loop {
            if self.obey_waiting(commands).is_none() {
                return;
            }
            self.drop_clients_that_left();
            if !std::mem::take(&mut self.wanted) && self.scheduler.is_idle() {
                let Ok(command) = commands.recv() else { return };
                if self.obey(command).is_none() {
                    return;
                }
                continue;
            }
            let (plan, events) = self.scheduler.plan();
            self.tell(events);
            let began = Instant::now();
            let computed = self.runner.run(&plan, &mut self.connectors);
            self.prompts.count(&plan, began.elapsed());
            let events = match computed {
                Ok(output) => self.scheduler.apply(&plan, output),
                Err(error) => {
                    tracing::error!(step = plan.number, %error, "a step was not computed");
                    self.scheduler.fail(&plan, &with_causes(&error))
                }
            };
            self.tell(events);
            self.publish_kv_events();
            if plan.sequences.is_empty() {
                // Only the connector has something to do: do not spin while it does.
                let obeyed = match commands.recv_timeout(POLL) {
                    Ok(command) => self.obey(command),
                    Err(RecvTimeoutError::Timeout) => Some(()),
                    Err(RecvTimeoutError::Disconnected) => None,
                };
                if obeyed.is_none() {
                    return;
                }
            }
        }
    }

    fn publish_kv_events(&mut self) {
        let Some(publish) = &mut self.publish else { return };
        let events = self.scheduler.take_kv_events();
        if !events.is_empty() {
            let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            publish(&EventBatch { at, events, dp_rank: None });
        }
    }

    /// `None` when the engine shall stop.
    fn obey_waiting(&mut self, commands: &Receiver<Command>) -> Option<()> {
        loop {
            match commands.try_recv() {
                Ok(command) => self.obey(command)?,
                Err(TryRecvError::Empty) => return Some(()),
                Err(TryRecvError::Disconnected) => return None,
            }
        }
    }

    fn obey(&mut self, command: Command) -> Option<()> {
        match command {
            Command::Submit { submission, updates, accepted } => {
                let result = self.scheduler.submit(submission);
                if let Ok(id) = &result {
                    self.clients.insert(id.clone(), updates);
                }
                // A client that does not wait for the answer has dropped its ticket, which is noticed below.
                let _ = accepted.send(result.map(|_| ()));
            }
            Command::Snapshot(reply) => {
                let _ = reply.send(self.scheduler.snapshot());
            }
            Command::Step => self.wanted = true,
            Command::Stop => return None,
        }
        Some(())
    }

    fn drop_clients_that_left(&mut self) {
        let left: Vec<_> =
            self.clients.iter().filter(|(_, client)| client.is_closed()).map(|(id, _)| id.clone()).collect();
        for id in left {
            self.clients.remove(&id);
            self.scheduler.cancel(&id);
        }
    }

    fn tell(&mut self, events: Vec<Event>) {
        let at = Instant::now();
        for event in events {
            let (request, update) = match event {
                Event::Token { request, token, logits } => (request, Update::Token { token, at, logits }),
                Event::Finished { request, reason } => (request, Update::Finished { reason, at }),
            };
            let last = matches!(update, Update::Finished { .. });
            // A client that left is found by `drop_clients_that_left`; the channel has room for every update.
            if let Some(client) = self.clients.get(&request) {
                let _ = client.try_send(update);
            }
            if last {
                self.clients.remove(&request);
            }
        }
    }
}

/// An error and what it comes from, in one line.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |line, cause| format!("{line}: {cause}"))
}
