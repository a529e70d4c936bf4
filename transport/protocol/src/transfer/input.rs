//! What can be wrong with an input, and how often it was.

use super::rect::Rect;
use crate::ids::{Generation, TransferId};

/// An input that a machine did not take. It was counted and changed nothing; a driver logs it and goes on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InputError {
    /// The input does not fit the state.
    #[error("transfer {transfer}: {input} does not fit a {side} that is {state}")]
    State {
        /// Which transfer.
        transfer: TransferId,
        /// `receiver` or `sender`.
        side: &'static str,
        /// The state's name.
        state: &'static str,
        /// The input's name.
        input: &'static str,
    },
    /// The input belongs to another grant.
    #[error("transfer {transfer}: {input} belongs to generation {found}, the grant is {}", shown(*expected))]
    Generation {
        /// Which transfer.
        transfer: TransferId,
        /// The input's name.
        input: &'static str,
        /// The input's generation.
        found: Generation,
        /// The machine's.
        expected: Option<Generation>,
    },
    /// The input came before, or answers what was not asked.
    #[error("transfer {transfer}: {input} {sequence} came before, or was never asked for")]
    Sequence {
        /// Which transfer.
        transfer: TransferId,
        /// The input's name.
        input: &'static str,
        /// Which write.
        sequence: u32,
    },
    /// The input belongs to another transfer.
    #[error("transfer {transfer}: {input} belongs to {}", shown(*found))]
    Transfer {
        /// The machine's.
        transfer: TransferId,
        /// The input's name.
        input: &'static str,
        /// The input's.
        found: Option<TransferId>,
    },
    /// A session that is not newer than the last one.
    #[error("transfer {transfer}: session {found} is not newer than {last}")]
    Session {
        /// Which transfer.
        transfer: TransferId,
        /// The input's.
        found: u64,
        /// The last one.
        last: u64,
    },
    /// The engine named cells outside the transfer, or shredded them.
    #[error("transfer {transfer}: computed {rect}: {problem}")]
    Computed {
        /// Which transfer.
        transfer: TransferId,
        /// What was named.
        rect: Rect,
        /// What is wrong.
        problem: String,
    },
}

/// How many inputs were not taken, by kind; monotonic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct InputCounts {
    /// [`InputError::State`].
    pub state: u64,
    /// [`InputError::Generation`].
    pub generation: u64,
    /// [`InputError::Sequence`].
    pub sequence: u64,
    /// [`InputError::Transfer`].
    pub transfer: u64,
    /// [`InputError::Session`].
    pub session: u64,
    /// [`InputError::Computed`].
    pub computed: u64,
}

impl InputCounts {
    /// Counts an error and hands it back.
    pub(super) const fn count(&mut self, error: InputError) -> InputError {
        let counter = match &error {
            InputError::State { .. } => &mut self.state,
            InputError::Generation { .. } => &mut self.generation,
            InputError::Sequence { .. } => &mut self.sequence,
            InputError::Transfer { .. } => &mut self.transfer,
            InputError::Session { .. } => &mut self.session,
            InputError::Computed { .. } => &mut self.computed,
        };
        *counter = counter.saturating_add(1);
        error
    }
}

fn shown(value: Option<impl std::fmt::Display>) -> String {
    value.map_or_else(|| "none".to_owned(), |value| value.to_string())
}
