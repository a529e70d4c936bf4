//! Routes, and how a completion is answered whole or as a stream.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::sse::{Event as SseEvent, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_core::Stream;
use kvferry::contract::TransferParams;
use kvferry::metrics::{CONTENT_TYPE, Metrics};
use serde_json::{Value, json};

use super::body::{CompletionBody, Prompt};
use super::error::ApiError;
use crate::engine::{EngineHandle, FinishReason, Sampling, Submission, Ticket, Update};
use crate::model::TextStream;
use crate::node::{LoadedModel, logits_digest};

/// Bytes of a body; the longest prompt of a model's context fits.
const BODY_LIMIT: usize = 4 << 20;

/// Completions of this process, for their ids.
static COMPLETIONS: AtomicU64 = AtomicU64::new(0);

/// Finds a prefill node for a prompt.
pub trait Router: Send + Sync {
    /// Asks a prefill node to compute the prompt; `None` if it is computed here.
    ///
    /// # Errors
    /// [`RouteError`] if the prompt should go to a prefill node and none can take it.
    fn route(&self, prompt: &[u32]) -> Result<Option<TransferParams>, RouteError>;
}

/// Why no prefill node takes a prompt.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// None ever will.
    #[error("the prompt cannot be sent to a prefill node: {problem}; shorten it")]
    Prompt {
        /// Why not.
        problem: String,
    },
    /// None does now.
    #[error("no prefill node takes the prompt: {problem}")]
    Unavailable {
        /// Why not, and what to do.
        problem: String,
    },
}

impl From<RouteError> for ApiError {
    fn from(error: RouteError) -> Self {
        match error {
            RouteError::Prompt { .. } => Self::invalid(Some("prompt"), error.to_string()),
            RouteError::Unavailable { .. } => Self::unavailable(error.to_string()),
        }
    }
}

/// Everything is computed here.
#[derive(Clone, Copy, Debug, Default)]
pub struct LocalRouter;

impl Router for LocalRouter {
    fn route(&self, _: &[u32]) -> Result<Option<TransferParams>, RouteError> {
        Ok(None)
    }
}

/// What the HTTP side needs of a node.
pub struct Frontend {
    /// The engine.
    pub engine: EngineHandle,
    /// Model and tokenizer.
    pub model: LoadedModel,
    /// Who prefills.
    pub router: Arc<dyn Router>,
    /// What `GET /metrics` tells, a rank each.
    pub metrics: Vec<Arc<Metrics>>,
}

/// The routes: `POST /v1/completions`, `GET /v1/models`, `GET /health`, `GET /metrics`.
pub fn router(frontend: Frontend) -> axum::Router {
    axum::Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(|| async { ApiError::no_route(StatusCode::NOT_FOUND, "no such path; try POST /v1/completions") })
        .method_not_allowed_fallback(|| async {
            ApiError::no_route(StatusCode::METHOD_NOT_ALLOWED, "this path has another method; completions are POST")
        })
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(Arc::new(frontend))
}

/// Only `GET /metrics`, for a node without completions.
pub fn metrics_router(engine: EngineHandle, metrics: Vec<Arc<Metrics>>) -> axum::Router {
    let page = move || {
        let (engine, metrics) = (engine.clone(), metrics.clone());
        async move { metrics_page(&engine, &metrics).await }
    };
    axum::Router::new().route("/metrics", get(page))
}

async fn models(State(frontend): State<Arc<Frontend>>) -> Json<Value> {
    let model = json!({ "id": frontend.name(), "object": "model", "owned_by": "kvferry-examples" });
    Json(json!({ "object": "list", "data": [model] }))
}

async fn health(State(frontend): State<Arc<Frontend>>) -> Result<Json<Value>, ApiError> {
    let state = frontend.engine.snapshot().await?;
    Ok(Json(json!({
        "status": "ok", "model": frontend.name(), "waiting": state.waiting, "loading": state.loading,
        "running": state.running, "held": state.held, "free_blocks": state.pool.free, "blocks": state.pool.total,
        "recomputed_tokens": state.recomputed_tokens,
    })))
}

async fn metrics(State(frontend): State<Arc<Frontend>>) -> Result<Response, ApiError> {
    metrics_page(&frontend.engine, &frontend.metrics).await
}

/// kvferry's metrics, with what only the engine knows.
async fn metrics_page(engine: &EngineHandle, metrics: &[Arc<Metrics>]) -> Result<Response, ApiError> {
    let state = engine.snapshot().await?;
    // Blocks are the same on every rank: rank 0 tells of them.
    if let Some(metrics) = metrics.first() {
        metrics.record_pool(&state.pool);
        metrics.recomputed_tokens_total.advance_to(state.recomputed_tokens);
        metrics.failed_requests_total.advance_to(state.failed_requests);
        metrics.prompt_compute_microseconds_total.advance_to(engine.prompts().microseconds());
        metrics.prompt_compute_tokens_total.advance_to(engine.prompts().tokens());
        metrics.computed_prompt_tokens_total.advance_to(state.computed_prompt_tokens);
        metrics.local_prompt_tokens_total.advance_to(state.local_prompt_tokens);
        metrics.preempted_requests_total.advance_to(state.preempted_requests);
    }
    let page = page_of_ranks(metrics) + &task_gauge();
    let mut response = page.into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    Ok(response)
}

/// What the node has of its async runtime, for whoever looks for leaks; the one that asks is among them.
fn task_gauge() -> String {
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    format!(
        "# HELP node_tokio_tasks Tasks of this node's runtime that have not ended.\n# TYPE node_tokio_tasks gauge\n\
         node_tokio_tasks {tasks}\n"
    )
}

/// One page of all ranks. A metric stands on it once, with the samples of each rank under its label.
fn page_of_ranks(metrics: &[Arc<Metrics>]) -> String {
    if let [only] = metrics {
        return only.prometheus(&[]);
    }
    let page = |(rank, metrics): (usize, &Arc<Metrics>)| metrics.prometheus(&[("tp_rank", &rank.to_string())]);
    let pages: Vec<String> = metrics.iter().enumerate().map(page).collect();
    // Pages of one build have the same metrics in the same order, each begun by two lines of comment.
    let mut ranks: Vec<_> = pages.iter().map(|page| page.lines().peekable()).collect();
    let mut all = String::with_capacity(pages.iter().map(String::len).sum());
    while ranks.first_mut().is_some_and(|rank| rank.peek().is_some()) {
        for (number, rank) in ranks.iter_mut().enumerate() {
            while let Some(comment) = rank.next_if(|line| line.starts_with('#')) {
                if number == 0 {
                    all.push_str(comment);
                    all.push('\n');
                }
            }
            while let Some(sample) = rank.next_if(|line| !line.starts_with('#')) {
                all.push_str(sample);
                all.push('\n');
            }
        }
    }
    all
}

async fn completions(
    State(frontend): State<Arc<Frontend>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let bytes = body.map_err(|rejection| ApiError {
        status: rejection.status(),
        ..ApiError::invalid(None, format!("the body was not read: {rejection}; the limit is {BODY_LIMIT} bytes"))
    })?;
    let body = CompletionBody::parse(&bytes)?;
    let answer = frontend.submit(body).await?;
    if answer.body.stream { Ok(Sse::new(answer.stream()).into_response()) } else { answer.whole().await }
}

impl Frontend {
    fn name(&self) -> &str {
        &self.model.model.config().name
    }

    async fn submit(&self, body: CompletionBody) -> Result<Answer, ApiError> {
        if let Some(asked) = body.model.as_deref()
            && asked != self.name()
        {
            let message = format!("model {asked:?} is not served here, only {:?}", self.name());
            return Err(ApiError { status: StatusCode::NOT_FOUND, ..ApiError::invalid(Some("model"), message) });
        }
        let prompt = match &body.prompt {
            Prompt::Tokens(tokens) => tokens.clone(),
            Prompt::Text(text) => {
                self.model.tokenizer.encode(text).map_err(|e| ApiError::invalid(Some("prompt"), e))?
            }
        };
        let sampling = match body.temperature {
            0.0 => Sampling::Greedy,
            temperature => Sampling::Temperature { temperature, seed: body.seed },
        };
        let transfer = self.router.route(&prompt)?;
        let prompt_tokens = prompt.len();
        let submission = Submission {
            sampling,
            keep_first_logits: body.report,
            transfer,
            ..self.model.greedy(prompt, body.max_tokens)
        };
        let ticket = self.engine.submit(submission).await?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let id = format!("cmpl-{created:x}-{}", COMPLETIONS.fetch_add(1, Ordering::Relaxed));
        let (model, name) = (self.model.clone(), self.name().to_owned());
        let (text, tokens, first) = (TextStream::default(), Vec::new(), None);
        Ok(Answer { body, ticket, model, name, id, created, prompt_tokens, text, tokens, first })
    }
}

/// One completion under way.
struct Answer {
    body: CompletionBody,
    ticket: Ticket,
    model: LoadedModel,
    name: String,
    id: String,
    created: u64,
    prompt_tokens: usize,
    text: TextStream,
    tokens: Vec<u32>,
    /// When the first token came, and the digest of its logits.
    first: Option<(Instant, Option<String>)>,
}

/// What an update means to the client.
enum Piece {
    Text(String),
    End { rest: String, reason: &'static str, at: Instant },
}

impl Answer {
    /// The next piece of text.
    async fn next(&mut self) -> Result<Piece, ApiError> {
        match self.ticket.next().await {
            Some(Update::Token { token, at, logits }) => {
                if self.first.is_none() {
                    self.first = Some((at, logits.as_deref().map(logits_digest)));
                }
                self.tokens.push(token);
                self.text.push(&self.model.tokenizer, token).map(Piece::Text).map_err(ApiError::internal)
            }
            Some(Update::Finished { reason, at }) => {
                let reason = match reason {
                    FinishReason::End => "stop",
                    FinishReason::Length => "length",
                    FinishReason::Cancelled => return Err(ApiError::unavailable("the request was cancelled")),
                    FinishReason::Failed(why) => {
                        return Err(ApiError::unavailable(format!("KV transfer failed: {why}")));
                    }
                };
                let rest = self.text.finish(&self.model.tokenizer).map_err(ApiError::internal)?;
                Ok(Piece::End { rest, reason, at })
            }
            None => Err(ApiError::unavailable("the engine has stopped")),
        }
    }

    async fn whole(mut self) -> Result<Response, ApiError> {
        let mut text = String::new();
        loop {
            match self.next().await? {
                Piece::Text(piece) => text += &piece,
                Piece::End { rest, reason, at } => {
                    text += &rest;
                    let mut answer = self.chunk(&text, Some(reason));
                    answer["usage"] = self.usage();
                    if self.body.return_token_ids {
                        answer["choices"][0]["token_ids"] = json!(self.tokens);
                    }
                    if self.body.report {
                        answer["kvferry"] = self.report(at);
                    }
                    return Ok(Json(answer).into_response());
                }
            }
        }
    }

    /// Server-sent events: a chunk for each piece of text, one with the reason of the end, `[DONE]`. An error is an event too.
    fn stream(self) -> impl Stream<Item = Result<SseEvent, Infallible>> {
        let data = |value: &Value| Ok(SseEvent::default().data(value.to_string()));
        async_stream::stream! {
            let mut answer = self;
            loop {
                match answer.next().await {
                    Ok(Piece::Text(piece)) if piece.is_empty() => {}
                    Ok(Piece::Text(piece)) => yield data(&answer.chunk(&piece, None)),
                    Ok(Piece::End { rest, reason, at }) => {
                        let mut last = answer.chunk(&rest, Some(reason));
                        if answer.body.return_token_ids {
                            last["choices"][0]["token_ids"] = json!(answer.tokens);
                        }
                        if answer.body.report {
                            last["kvferry"] = answer.report(at);
                        }
                        if answer.body.include_usage {
                            last["usage"] = answer.usage();
                        }
                        yield data(&last);
                        break;
                    }
                    Err(error) => {
                        yield data(&error.json());
                        break;
                    }
                }
            }
            yield Ok(SseEvent::default().data("[DONE]"));
        }
    }

    fn chunk(&self, text: &str, reason: Option<&str>) -> Value {
        json!({
            "id": self.id, "object": "text_completion", "created": self.created,
            "model": self.name,
            "choices": [{ "index": 0, "text": text, "logprobs": null, "finish_reason": reason }],
        })
    }

    fn usage(&self) -> Value {
        let (prompt, answer) = (self.prompt_tokens, self.tokens.len());
        json!({ "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer })
    }

    fn report(&self, end: Instant) -> Value {
        let ms = |at: Instant| at.duration_since(self.ticket.submitted).as_secs_f64() * 1e3;
        let first = self.first.as_ref();
        json!({
            "ttft_ms": first.map(|(at, _)| ms(*at)), "total_ms": ms(end),
            "first_logits": first.and_then(|(_, digest)| digest.clone()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_several_ranks_names_each_metric_once_and_has_all_samples() {
        let ranks: Vec<_> = (0..3).map(|_| Arc::new(Metrics::new())).collect();
        ranks.iter().zip(1..).for_each(|(metrics, tokens)| metrics.loaded_tokens_total.add(tokens));
        let (page, one) = (page_of_ranks(&ranks), ranks[0].prometheus(&[]));
        let comments =
            |page: &str| page.lines().filter(|line| line.starts_with('#')).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(comments(&page), comments(&one));
        let samples = |page: &str| page.lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(samples(&page), 3 * samples(&one));
        let tokens = page.lines().skip_while(|line| !line.starts_with("kvferry_loaded_tokens_total")).take(3);
        let want = [0, 1, 2].map(|rank| format!("kvferry_loaded_tokens_total{{tp_rank=\"{rank}\"}} {}", rank + 1));
        assert_eq!(tokens.collect::<Vec<_>>(), want);
    }
}
