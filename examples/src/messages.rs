//! What a decode node tells a prefill node, as bytes that kvferry carries over its authenticated session.

use kvferry_protocol::TransferId;
use serde::{Deserialize, Serialize};

/// A decode node asks for a prompt's KV. Said again after a cut: the second one is taken for the first.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Ask {
    /// The hand-over, drawn by the decode node.
    pub transfer: TransferId,
    /// Tensor-parallel ranks of the decode node: each of them reads its heads.
    pub ranks: u16,
    /// The prompt; at least one token.
    pub tokens: Vec<u32>,
}

/// Why bytes are no message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Another version of this engine wrote it.
    #[error("an engine message of version {found:?}; this engine reads version {VERSION}; run one build on both sides")]
    Version {
        /// The first byte, if there is one.
        found: Option<u8>,
    },
    /// It is longer than any prompt.
    #[error("an engine message of {found} bytes; {LIMIT} is the limit")]
    TooLong {
        /// Its length.
        found: usize,
    },
    /// It does not parse.
    #[error("a malformed engine message: {problem}")]
    Malformed {
        /// What the decoder met.
        problem: String,
    },
}

/// The first byte of every message.
const VERSION: u8 = 2;
/// Bytes of a message; a prompt of 100,000 tokens fits.
const LIMIT: usize = 512 << 10;

impl Ask {
    /// Encodes the message.
    ///
    /// # Errors
    /// [`MessageError::TooLong`] if the prompt is too long to be sent.
    pub fn encode(&self) -> Result<Vec<u8>, MessageError> {
        let mut bytes = vec![VERSION];
        let body = bincode::serde::encode_to_vec(self, bincode::config::standard());
        bytes.extend(body.map_err(|error| MessageError::Malformed { problem: error.to_string() })?);
        match bytes.len() {
            found if found > LIMIT => Err(MessageError::TooLong { found }),
            _ => Ok(bytes),
        }
    }

    /// Decodes a message; the memory that it takes is bounded by its length.
    ///
    /// # Errors
    /// [`MessageError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        if bytes.len() > LIMIT {
            return Err(MessageError::TooLong { found: bytes.len() });
        }
        let malformed = |problem: String| MessageError::Malformed { problem };
        let body = match bytes.split_first() {
            Some((&VERSION, body)) => body,
            other => return Err(MessageError::Version { found: other.map(|(&version, _)| version) }),
        };
        // A claimed length is checked against the limit before memory is taken: at most 4 bytes for each byte that came.
        let config = bincode::config::standard().with_limit::<{ 4 * LIMIT }>();
        let (ask, read): (Self, usize) =
            bincode::serde::decode_from_slice(body, config).map_err(|error| malformed(error.to_string()))?;
        match read == body.len() {
            true => Ok(ask),
            false => Err(malformed(format!("{} bytes are left over", body.len() - read))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_read_as_it_was_written() {
        let ask = Ask { transfer: TransferId::new(u128::MAX - 7), ranks: 8, tokens: vec![0, 250, 251, 70_000] };
        let bytes = ask.encode().unwrap();
        assert_eq!(Ask::decode(&bytes), Ok(ask));
        // The format is what a node of this version reads: it does not change unseen.
        assert_eq!(
            Ask { transfer: TransferId::new(5), ranks: 4, tokens: vec![1, 300] }.encode().unwrap(),
            [2, 5, 4, 2, 1, 251, 44, 1]
        );
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let good = Ask { transfer: TransferId::new(5), ranks: 1, tokens: vec![1, 2, 3] }.encode().unwrap();
        for (name, bytes, want) in [
            ("empty", vec![], "version None"),
            ("another version", vec![1, 5, 0], "version Some(1)"),
            ("cut", good[..good.len() - 1].to_vec(), "malformed"),
            ("left over", [&good[..], &[0]].concat(), "1 bytes are left over"),
            ("a huge claim", vec![2, 5, 1, 253, 255, 255, 255, 255, 255, 255, 255, 127], "malformed"),
            ("too long", vec![2; LIMIT + 1], "the limit"),
        ] {
            let error = Ask::decode(&bytes).unwrap_err().to_string();
            assert!(error.contains(want), "{name}: {error}");
        }
        let long = Ask { transfer: TransferId::new(5), ranks: 1, tokens: vec![60_000; 200_000] };
        assert!(matches!(long.encode(), Err(MessageError::TooLong { .. })));
    }
}
