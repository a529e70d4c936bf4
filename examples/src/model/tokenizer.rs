//! Text to tokens and back.

use std::path::Path;

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::tokenizer::TokenizerFromGguf;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;

use super::error::ModelError;

/// Turns text into token ids and back.
pub enum Tokenizer {
    /// One token a byte: the embedded model's.
    Bytes(ByteTokenizer),
    /// Byte-level BPE out of a GGUF file.
    Bpe(Box<BpeTokenizer>),
}

/// One token a byte, and marks for the beginning and end of a text.
#[derive(Clone, Copy, Debug, Default)]
pub struct ByteTokenizer;

/// Byte-level BPE.
pub struct BpeTokenizer {
    inner: tokenizers::Tokenizer,
    ends: Vec<u32>,
    beginning: Option<u32>,
}

impl ByteTokenizer {
    /// Stands before every text, so that no prompt is empty.
    pub const BOS: u32 = 256;
    /// The end of a text.
    pub const EOS: u32 = 257;
    /// 256 bytes and two marks, rounded up to a multiple of 32.
    pub const VOCAB: usize = 288;
}

impl Tokenizer {
    /// Builds the tokenizer that a GGUF file's metadata describes.
    ///
    /// # Errors
    /// [`ModelError::Tokenizer`] if there is none or it is not byte-level BPE.
    pub fn from_gguf(path: &Path, content: &Content) -> Result<Self, ModelError> {
        let refuse = |problem: String| ModelError::Tokenizer { path: path.into(), problem };
        let mut inner = tokenizers::Tokenizer::from_gguf(content).map_err(|error| refuse(error.to_string()))?;
        let text = |key: &str| content.metadata.get(key).and_then(|value| value.to_string().ok());
        if text("tokenizer.ggml.pre").is_some_and(|pre| pre == "smollm") {
            // SmolLM's own tokenizer.json splits digits and adds no space before the text; the general fallback does.
            let steps: Vec<PreTokenizerWrapper> =
                vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()];
            inner.with_pre_tokenizer(Some(Sequence::new(steps)));
        }
        let id = |key: &str| content.metadata.get(key).and_then(token_id);
        let mut ends: Vec<u32> =
            ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"].into_iter().filter_map(id).collect();
        ends.extend(
            ["<|im_end|>", "<|eot_id|>", "<|endoftext|>"].into_iter().filter_map(|mark| inner.token_to_id(mark)),
        );
        ends.sort_unstable();
        ends.dedup();
        let beginning = id("tokenizer.ggml.bos_token_id");
        Ok(Self::Bpe(Box::new(BpeTokenizer { inner, ends, beginning })))
    }

    /// The tokens of a prompt; never empty: an empty text is the mark of the beginning.
    ///
    /// # Errors
    /// What the tokenizer library says, if it cannot encode the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        match self {
            Self::Bytes(_) => Ok(std::iter::once(ByteTokenizer::BOS).chain(text.bytes().map(u32::from)).collect()),
            Self::Bpe(bpe) => {
                let mut tokens =
                    bpe.inner.encode_fast(text, true).map_err(|error| error.to_string())?.get_ids().to_vec();
                if tokens.is_empty() {
                    tokens.push(bpe.beginning.or(bpe.ends.first().copied()).unwrap_or(0));
                }
                Ok(tokens)
            }
        }
    }

    /// The text of some tokens; marks are left out, broken UTF-8 becomes U+FFFD.
    ///
    /// # Errors
    /// What the tokenizer library says, if it cannot decode the tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, String> {
        match self {
            Self::Bytes(_) => {
                let bytes: Vec<u8> = tokens.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Self::Bpe(bpe) => bpe.inner.decode(tokens, true).map_err(|error| error.to_string()),
        }
    }

    /// The tokens that end a text.
    #[must_use]
    pub fn ends(&self) -> Vec<u32> {
        match self {
            Self::Bytes(_) => vec![ByteTokenizer::EOS],
            Self::Bpe(bpe) => bpe.ends.clone(),
        }
    }

    /// Whether a generated token ends the text.
    #[must_use]
    pub fn is_end(&self, token: u32) -> bool {
        match self {
            Self::Bytes(_) => token == ByteTokenizer::EOS,
            Self::Bpe(bpe) => bpe.ends.binary_search(&token).is_ok(),
        }
    }
}

/// Text of a growing list of tokens, piece by piece: a piece is given out when its characters are whole.
#[derive(Default)]
pub struct TextStream {
    tokens: Vec<u32>,
    /// Tokens before this one were given out in full.
    start: usize,
    given: usize,
}

impl TextStream {
    /// Takes the next token and returns the text that it completes, which may be empty.
    ///
    /// # Errors
    /// What the tokenizer library says, if it cannot decode the tokens.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<String, String> {
        self.tokens.push(token);
        let text = tokenizer.decode(&self.tokens[self.start..])?;
        if text.ends_with('\u{fffd}') {
            return Ok(String::new());
        }
        Ok(self.give(text))
    }

    /// Returns what was held back at the end.
    ///
    /// # Errors
    /// What the tokenizer library says, if it cannot decode the tokens.
    pub fn finish(&mut self, tokenizer: &Tokenizer) -> Result<String, String> {
        let text = tokenizer.decode(&self.tokens[self.start..])?;
        Ok(self.give(text))
    }

    fn give(&mut self, text: String) -> String {
        let piece = text.get(self.given..).unwrap_or_default().to_owned();
        self.given = text.len().max(self.given);
        // Decoding from the start of a long text for every token would be quadratic; a decoder may look at a few
        // neighbours, so the window keeps them.
        if self.tokens.len() - self.start > 64 && self.given == text.len() {
            self.start = self.tokens.len();
            self.given = 0;
        }
        piece
    }
}

fn token_id(value: &Value) -> Option<u32> {
    value.to_u64().ok().and_then(|id| u32::try_from(id).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_tokens_and_text_again() {
        let tokenizer = Tokenizer::Bytes(ByteTokenizer);
        let tokens = tokenizer.encode("aé").unwrap();
        assert_eq!(tokens, [256, 0x61, 0xc3, 0xa9]);
        assert_eq!(tokenizer.decode(&tokens).unwrap(), "aé");
        assert_eq!(tokenizer.encode("").unwrap(), [256]);
        assert!(tokenizer.is_end(257) && !tokenizer.is_end(256));
    }

    #[test]
    fn a_stream_gives_whole_characters_and_all_of_the_text() {
        let tokenizer = Tokenizer::Bytes(ByteTokenizer);
        let text = "snow ☃ and é, ".repeat(20);
        let mut stream = TextStream::default();
        let pieces: Vec<String> = text.bytes().map(|byte| stream.push(&tokenizer, byte.into()).unwrap()).collect();
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
        assert_eq!(pieces.concat() + &stream.finish(&tokenizer).unwrap(), text);
    }

    #[test]
    fn a_stream_shows_what_never_became_a_character_at_the_end() {
        let tokenizer = Tokenizer::Bytes(ByteTokenizer);
        let mut stream = TextStream::default();
        assert_eq!(stream.push(&tokenizer, 0xc3).unwrap(), "");
        assert_eq!(stream.finish(&tokenizer).unwrap(), "\u{fffd}");
    }
}
