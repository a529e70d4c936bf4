//! Two processes and a reference: prompts go through a prefill and a decode node, and through one engine in this process; the
//! answers must be the same to the bit.

mod children;
mod client;
mod report;
mod turns;

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use kvferry_protocol::TpRank;
use kvferry_protocol::layout::heads_of;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

pub use report::{Output, Report, Summary, Times};
pub use turns::Turn;

use crate::cli::{Bar, PairOptions, read_prompts};
use crate::engine::Submission;
use crate::node::{LoadedModel, NodeConfig, generate, logits_digest};
use children::Pair;
use report::Answer;
use turns::{Counters, Talk};

/// Prompts for those who have none at hand: of one token and of many, around the size of a block.
const PROMPTS: [&str; 5] = [
    "A",
    "The first fifteen",
    "Once upon a time, in a house at the edge of the woods, there lived",
    "KV cache is what a model remembers of a text. A prefill node computes it, and a decode node needs it, so somebody must carry \
     it over. That is what kvferry does, and",
    "Count: one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, sixteen,",
];

/// Runs all prompts both ways and compares. `program` is the binary `pair`, which the two nodes are started as.
///
/// # Errors
/// What keeps the comparison from being made: a prompt file, a model, a node that does not start. A prompt that fails in the two
/// processes is not an error but a part of the report.
pub async fn run(options: &PairOptions, program: &Path) -> anyhow::Result<Report> {
    let prompts = match &options.prompts {
        Some(path) => read_prompts(path)?,
        None => PROMPTS.map(str::to_owned).to_vec(),
    };
    let model = LoadedModel::load(&options.model)?;
    for (option, tp_size) in [("--prefill-tp", options.prefill_tp), ("--decode-tp", options.decode_tp)] {
        heads_of(TpRank::new(0), tp_size, model.model.config().kv_heads as u16)
            .with_context(|| format!("{option} {tp_size} does not fit the model"))?;
    }
    let tokens: Vec<Vec<u32>> = prompts
        .iter()
        .map(|prompt| model.tokenizer.encode(&format!("{}{prompt}", options.system)))
        .collect::<Result<_, _>>()
        .map_err(anyhow::Error::msg)?;
    let turns = options.turns.get() as usize;
    let talk = Talk::new(&model.tokenizer, usize::from(options.branches)).map_err(anyhow::Error::msg)?;
    let said = talk.longest(turns) + turns * options.max_tokens.get() as usize;
    let context = model.model.config().context;
    for (number, prompt) in (1..).zip(&tokens) {
        ensure!(
            prompt.len().saturating_add(said) <= context,
            "prompt {number} has {} tokens, and --max-tokens and --turns add up to {said}: the model's context is {context}; \
             shorten the prompt or lower --max-tokens",
            prompt.len()
        );
    }
    let longest = tokens.iter().map(Vec::len).max().unwrap_or(1) + said;
    let conversations = talk.conversations(prompts.len(), turns) as u32;
    for (option, given, block) in [
        ("--prefill-blocks", options.prefill_blocks, options.prefill_block),
        ("--decode-blocks", options.decode_blocks, options.decode_block),
    ] {
        let needed = blocks_of_one(longest, block);
        ensure!(
            given.is_none_or(|given| given.get() >= needed),
            "{option}: the longest conversation has {longest} tokens, which are {needed} blocks; give at least as many"
        );
    }
    // More at once than there are prompts would only reserve memory.
    let at_once = options.concurrency.min(NonZeroU32::new(conversations).unwrap_or(NonZeroU32::MIN));
    let options = &PairOptions { concurrency: at_once, ..options.clone() };
    let (reference, alone) = reference(options, &model, tokens, &talk, longest).await?;
    // The reference's engine and weights are gone before the two processes need the memory and the cores.
    let tokenizer = Arc::clone(&model.tokenizer);
    drop(model);
    // What decode keeps of a conversation until its next turn.
    let idle = if turns > 1 { conversations } else { 0 };
    let pair = Pair::start(program, options, longest, idle).await?;
    let (mut answers, mut figures, mut before) = (Vec::new(), Vec::new(), Counters::default());
    let mut pages = (String::new(), String::new());
    for (turn, (prompts, _)) in reference.iter().enumerate() {
        answers.extend(through_the_pair(options, &pair, prompts).await);
        pages = pair.settled_metrics().await?;
        let after = Counters::of(&pages.0, &pages.1);
        figures.push(Turn::between(turn, prompts, before, after));
        before = after;
    }
    pair.stop().await?;
    Ok(Report::new(answers, reference, figures, &tokenizer, &pages.0, &pages.1, alone))
}

/// Blocks that a sequence of `longest` tokens needs.
fn blocks_of_one(longest: usize, tokens_per_block: u32) -> u32 {
    longest.div_ceil(tokens_per_block as usize) as u32
}

/// Blocks of a cache that computes `sequences` of the longest length at once, and keeps so many idle ones.
fn blocks(longest: usize, tokens_per_block: u32, sequences: u32, idle: u32) -> u32 {
    // One sequence more: a finished one is held until its transfer is over.
    blocks_of_one(longest, tokens_per_block)
        .saturating_mul(sequences.saturating_mul(2).saturating_add(1).saturating_add(idle))
}

/// Each turn's prompts and a single process's answers to them, which computes every prompt from its first token on; and the
/// microseconds that it computed for each token of the prompts, if that can be compared with a prefill node's.
async fn reference(
    options: &PairOptions,
    model: &LoadedModel,
    mut prompts: Vec<Vec<u32>>,
    talk: &Talk,
    longest: usize,
) -> anyhow::Result<(Vec<(Vec<Vec<u32>>, Vec<Answer>)>, Option<f64>)> {
    let concurrency = options.concurrency.get();
    let config = NodeConfig {
        order: options.decode_layout,
        dtype: options.kv_dtype,
        blocks: blocks(longest, options.decode_block, concurrency, 0),
        tokens_per_block: options.decode_block,
        tp_size: 1,
        device: options.device,
        chunk_tokens: options.chunk.get() as usize,
        max_running: concurrency as usize,
        on_load_failure: kvferry::config::LoadFailurePolicy::Recompute,
        prefix: kvferry::pool::PrefixKind::Off,
        in_place: false,
    };
    let engine = model.start_local(&config)?;
    let one = |_, prompt| {
        let (handle, model, max_tokens) = (engine.handle(), model.clone(), options.max_tokens.get() as usize);
        async move {
            let submission = Submission { keep_first_logits: true, ..model.greedy(prompt, max_tokens) };
            let generation = generate(&handle, submission).await?;
            let first_logits = generation.first_logits.as_deref().map(logits_digest);
            Ok(Answer { tokens: generation.tokens, first_logits, ttft_ms: generation.ttft_ms })
        }
    };
    let mut turns = Vec::new();
    loop {
        let answers = at_most(concurrency, "single process", &prompts, one).await;
        let answers: Vec<Answer> =
            answers.into_iter().collect::<Result<_, _>>().context("the single process did not answer")?;
        let turn = turns.len();
        let goes_on = turn + 1 < options.turns.get() as usize;
        let next = goes_on.then(|| talk.go_on(turn, &prompts, answers.iter().map(|answer| answer.tokens.as_slice())));
        turns.push((prompts, answers));
        match next {
            Some(next) => prompts = next,
            None => break,
        }
    }
    let handle = engine.handle();
    let (microseconds, tokens) = (handle.prompts().microseconds(), handle.prompts().tokens());
    // Several at a time share their steps with tokens that a prefill node does not compute; of a later turn it computes the end.
    let comparable = concurrency == 1 && turns.len() == 1 && tokens > 0;
    Ok((turns, comparable.then(|| microseconds as f64 / tokens as f64)))
}

async fn through_the_pair(options: &PairOptions, pair: &Pair, prompts: &[Vec<u32>]) -> Vec<anyhow::Result<Answer>> {
    let max_tokens = options.max_tokens.get();
    at_most(options.concurrency.get(), "prefill and decode", prompts, |index, prompt| {
        let client = pair.decode_client(index);
        async move {
            let body = json!({
                "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": true,
                "kvferry_report": true,
            });
            parse_answer(&client.post("/v1/completions", &body).await?)
        }
    })
    .await
}

fn parse_answer(answer: &Value) -> anyhow::Result<Answer> {
    let tokens =
        serde_json::from_value(answer["choices"][0]["token_ids"].clone()).context("no token ids in the answer")?;
    let first_logits = answer["kvferry"]["first_logits"].as_str().map(str::to_owned);
    let ttft_ms = answer["kvferry"]["ttft_ms"].as_f64().context("no ttft_ms in the answer")?;
    Ok(Answer { tokens, first_logits, ttft_ms })
}

/// Runs `one` for each prompt, so many at a time, in order; shows a bar when it takes longer than a second.
async fn at_most<F, A>(
    concurrency: u32,
    what: &'static str,
    prompts: &[Vec<u32>],
    one: impl Fn(usize, Vec<u32>) -> F,
) -> Vec<anyhow::Result<A>>
where
    F: Future<Output = anyhow::Result<A>> + Send + 'static,
    A: Send + 'static,
{
    let places = Arc::new(Semaphore::new(concurrency as usize));
    let mut running = JoinSet::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let (places, one) = (Arc::clone(&places), one(index, prompt.clone()));
        running.spawn(async move {
            let _place = places.acquire_owned().await?;
            Ok((index, one.await))
        });
    }
    let mut answers: Vec<_> = prompts.iter().map(|_| Err(anyhow::anyhow!("it was not run"))).collect();
    let mut bar = Bar::new(what);
    let mut done = 0;
    loop {
        let step = tokio::time::timeout(Duration::from_millis(500), running.join_next()).await;
        match step {
            Ok(Some(Ok(Ok::<_, anyhow::Error>((index, answer))))) => {
                answers[index] = answer;
                done += 1;
            }
            Ok(Some(Ok(Err(error)))) => tracing::error!(%error, "a prompt was not run"),
            Ok(Some(Err(error))) => tracing::error!(%error, "a prompt's task ended"),
            Ok(None) => return answers,
            // Nothing finished: only the bar moves.
            Err(_) => {}
        }
        bar.at(done, prompts.len());
    }
}

/// What a process that the pair starts becomes: its first argument says so.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// The prefill node.
    Prefill,
    /// The decode node.
    Decode,
}

impl Role {
    /// The role that this process was started for, if the pair started it.
    #[must_use]
    pub fn of_this_process() -> Option<Self> {
        let first = std::env::args_os().nth(1)?;
        [Self::Prefill, Self::Decode].into_iter().find(|role| first == role.word())
    }

    const fn word(self) -> &'static str {
        match self {
            Self::Prefill => "prefill-node",
            Self::Decode => "decode-node",
        }
    }
}
