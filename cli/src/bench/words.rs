//! What the two sides say to each other, over the transport's own control lane.

use bytes::Bytes;
use kvferry_transport::GrantKey;
use serde::{Deserialize, Serialize};

use super::case::{Case, Span};
use crate::error::CliError;

/// The form of these words; both sides must have the same.
pub(crate) const FORM: u32 = 3;

/// One word. The measuring side orders, the other answers; blocks are meant in the case's orders.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum Word {
    /// Make ready for a case: memory, content.
    Begin { form: u32, case: Case },
    /// Ready.
    Ready,
    /// Grant these blocks of the target, and compare them after the end if `check`.
    Open { span: Span, check: bool },
    /// Granted.
    Opened { grant: GrantKey },
    /// Send these blocks into a grant of the measuring side.
    Fill { span: Span, grant: GrantKey },
    /// All writes ended well; of all bytes that this side sent so far, these stayed in place for the other to copy.
    Filled { lent_bytes: u64 },
    /// All blocks landed, and so many digests were not those that came with them.
    Landed { wrong_digests: u32 },
    /// Revoke the grant, and compare.
    Close,
    /// Revoked; so many blocks are not what was sent.
    Closed { wrong_blocks: u64 },
    /// Listen for plain sockets, of TCP or `unix`; `near` if both sides are on one host.
    Listen { sockets: u32, near: bool, unix: bool },
    /// Here.
    Listening { address: String },
    /// Move a pass over the first so many plain sockets.
    Stream { sockets: u32 },
    /// All bytes are there.
    Streamed,
    /// Serve requests over the first plain socket: so many, each of so many blocks.
    Requests { count: u32, blocks: u32 },
    /// It cannot be done; whoever hears it ends the session.
    Refused { why: String },
}

impl Word {
    pub(crate) fn encode(&self) -> Result<Bytes, CliError> {
        let bytes = serde_json::to_vec(self).map_err(|source| CliError::Json { what: "a word", source })?;
        Ok(bytes.into())
    }

    pub(crate) fn decode(message: &[u8]) -> Result<Self, CliError> {
        let unknown = |_| CliError::Word { found: String::from_utf8_lossy(&message[..message.len().min(80)]).into() };
        serde_json::from_slice(message).map_err(unknown)
    }

    /// The word as an error: it came out of turn.
    pub(crate) fn unexpected(self) -> CliError {
        CliError::Word { found: format!("{self:?} out of turn") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_as_they_were_said() {
        let case = Case::new(16 << 10, Some(8), None, 8, 1 << 20).unwrap();
        for word in [
            Word::Begin { form: FORM, case },
            Word::Opened { grant: GrantKey(u128::MAX - 1) },
            Word::Fill { span: Span { first: 1, count: 2 }, grant: GrantKey(7) },
            Word::Closed { wrong_blocks: 0 },
        ] {
            assert_eq!(Word::decode(&word.encode().unwrap()).unwrap(), word);
        }
        assert!(Word::decode(b"{\"Sing\":1}").unwrap_err().to_string().contains("same release"));
    }
}
