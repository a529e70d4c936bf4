//! What clients ask, and what is a good answer.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::{Answer, Chance, HttpError, Reference, Shape};

/// A prompt and how many tokens shall follow it.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The prompt's tokens.
    pub prompt: Vec<u32>,
    /// Tokens to generate.
    pub max_tokens: u32,
}

impl Ask {
    /// Tokens of the longest prompt.
    const LONGEST: usize = 600;

    /// A prompt of some tokens or many, unlike any other.
    #[must_use]
    pub fn draw(chance: &mut Chance) -> Self {
        let tokens = if chance.one_in(4) { chance.within(1..40) } else { chance.within(40..Self::LONGEST as u64) };
        let prompt = (0..tokens).map(|_| chance.within(32..122) as u32).collect();
        Self { prompt, max_tokens: chance.within(1..9) as u32 }
    }
}

/// What is asked of the nodes of one shape.
#[derive(Debug)]
pub struct Asks {
    shape: Shape,
    /// The last prompts that were answered, each with its answer, for prompts that begin like them.
    told: Mutex<VecDeque<Vec<u32>>>,
    right: AtomicU64,
    refused: AtomicU64,
    longest_idle: Mutex<Duration>,
}

impl Asks {
    /// Nothing was asked yet.
    #[must_use]
    pub fn of(shape: Shape) -> Self {
        let (told, right, refused, longest_idle) = Default::default();
        Self { shape, told, right, refused, longest_idle }
    }

    /// A prompt; where blocks are kept, it may begin like one that was answered before.
    pub fn draw(&self, chance: &mut Chance) -> Ask {
        let ask = Ask::draw(chance);
        let told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.is_empty() || !self.shape.write_back || !chance.one_in(3) {
            return ask;
        }
        let mut prompt = told[chance.below(told.len() as u64) as usize].clone();
        prompt.extend(ask.prompt.iter().take(chance.within(1..40) as usize));
        prompt.truncate(Ask::LONGEST);
        Ask { prompt, ..ask }
    }

    /// Compares an answer with the reference; under the policy `fail` it may be that policy's error instead.
    ///
    /// # Panics
    /// If it is neither.
    pub fn check(&self, ask: &Ask, reference: &Reference, answer: Result<Answer, HttpError>) {
        let tokens = ask.prompt.len();
        match answer {
            Ok(answer) => {
                let want = reference.answer(&ask.prompt, ask.max_tokens);
                assert_eq!(answer, want, "wrong answer to a prompt of {tokens} tokens ({})", self.shape);
                self.right.fetch_add(1, Ordering::Relaxed);
                let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
                told.truncate(TOLD - 1);
                told.push_front([&ask.prompt[..], &answer.tokens].concat());
            }
            Err(error) if self.shape.fails && error.names_a_lost_transfer() => {
                self.refused.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => panic!("no answer to a prompt of {tokens} tokens ({}): {error:?}", self.shape),
        }
    }

    /// Compares how long a node waited idle for an answer with what its deadlines allow.
    ///
    /// # Panics
    /// If it was longer.
    pub fn check_idle(&self, idle: Duration, limit: Duration) {
        assert!(
            idle <= limit,
            "a decode node waited idle for {idle:?}; its deadlines allow {limit:?} ({})",
            self.shape
        );
        let mut longest = self.longest_idle.lock().unwrap_or_else(PoisonError::into_inner);
        *longest = idle.max(*longest);
    }

    /// The longest that a node waited idle for an answer.
    #[must_use]
    pub fn longest_idle(&self) -> Duration {
        *self.longest_idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers that were right, and requests that failed as the policy says.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.right.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }
}

/// Conversations that are remembered.
const TOLD: usize = 16;
