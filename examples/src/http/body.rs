//! The body of a completion request, checked field by field.

use serde_json::{Map, Value};

use super::error::ApiError;

/// A prompt, as text or as this model's tokens.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Prompt {
    /// Text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

/// What a client asks for.
#[derive(Clone, PartialEq, Debug)]
pub struct CompletionBody {
    /// The model's name, if the client gave one.
    pub model: Option<String>,
    /// The prompt.
    pub prompt: Prompt,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// 0 is greedy.
    pub temperature: f32,
    /// Of the draws, where the temperature is not 0.
    pub seed: u64,
    /// Send each token as it comes.
    pub stream: bool,
    /// Let a last event of a stream tell the usage.
    pub include_usage: bool,
    /// Add `token_ids` to the answer.
    pub return_token_ids: bool,
    /// Add `kvferry` to the answer: times, and a digest of the first token's logits.
    pub report: bool,
}

/// Fields of OpenAI's API whose only supported value is the one that changes nothing.
const NEUTRAL: [(&str, &[&str]); 9] = [
    ("n", &["1"]),
    ("best_of", &["1"]),
    ("echo", &["false"]),
    ("logprobs", &[]),
    ("top_p", &["1", "1.0"]),
    ("presence_penalty", &["0", "0.0"]),
    ("frequency_penalty", &["0", "0.0"]),
    ("stop", &["[]"]),
    ("suffix", &["\"\""]),
];

impl CompletionBody {
    /// Tokens that are generated if the client does not say.
    pub const DEFAULT_MAX_TOKENS: usize = 16;

    /// Parses and checks a body. The temperature is 0 if the client does not say: this engine is for comparing outputs.
    ///
    /// # Errors
    /// [`ApiError`] with the field at fault, or without one if the body is no JSON object.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(bytes)
            .map_err(|error| ApiError::invalid(None, format!("the body is not JSON: {error}")))?;
        let Value::Object(mut fields) = value else {
            return Err(ApiError::invalid(None, "the body is not a JSON object; send {\"prompt\": \"...\"}"));
        };
        // JSON's null is how some clients say: not given.
        fields.retain(|_, value| !value.is_null());
        let prompt = fields.remove("prompt").ok_or_else(|| ApiError::invalid(Some("prompt"), "prompt is missing"))?;
        let body = Self {
            model: text(&mut fields, "model")?,
            prompt: parse_prompt(prompt)?,
            max_tokens: number(&mut fields, "max_tokens", 1, 1 << 24)?.map_or(Self::DEFAULT_MAX_TOKENS, |n| n as usize),
            temperature: temperature(&mut fields)?,
            seed: number(&mut fields, "seed", 0, u64::MAX)?.unwrap_or(0),
            stream: flag(&mut fields, "stream")?,
            include_usage: include_usage(&mut fields)?,
            return_token_ids: flag(&mut fields, "return_token_ids")?,
            report: flag(&mut fields, "kvferry_report")?,
        };
        // OpenAI's field for the end user's name; it changes nothing here.
        fields.remove("user");
        check_neutral(&mut fields)?;
        match fields.keys().next() {
            Some(name) => Err(ApiError::invalid(Some(name), format!("{} is not a field of this API", cut(name)))),
            None => Ok(body),
        }
    }
}

fn parse_prompt(prompt: Value) -> Result<Prompt, ApiError> {
    let refuse = |message: String| Err(ApiError::invalid(Some("prompt"), message));
    match prompt {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(items) => match &items[..] {
            [] => refuse("prompt is an empty list; send a string or token ids".into()),
            [Value::String(text)] => Ok(Prompt::Text(text.clone())),
            [Value::String(_), ..] => refuse("prompt has several texts; send one request for each".into()),
            _ => {
                let mut tokens = Vec::with_capacity(items.len());
                for (index, item) in items.iter().enumerate() {
                    match item.as_u64().and_then(|id| u32::try_from(id).ok()) {
                        Some(token) => tokens.push(token),
                        None => {
                            return refuse(format!("prompt[{index}] is {}, not a token id", cut(&item.to_string())));
                        }
                    }
                }
                Ok(Prompt::Tokens(tokens))
            }
        },
        other => refuse(format!("prompt is {}; send a string or a list of token ids", cut(&other.to_string()))),
    }
}

fn text(fields: &mut Map<String, Value>, name: &'static str) -> Result<Option<String>, ApiError> {
    match fields.remove(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(other) => Err(wrong(name, &other, "a string")),
    }
}

fn flag(fields: &mut Map<String, Value>, name: &'static str) -> Result<bool, ApiError> {
    match fields.remove(name) {
        None => Ok(false),
        Some(Value::Bool(flag)) => Ok(flag),
        Some(other) => Err(wrong(name, &other, "true or false")),
    }
}

fn number(fields: &mut Map<String, Value>, name: &'static str, least: u64, most: u64) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.remove(name) else { return Ok(None) };
    match value.as_u64() {
        Some(number) if (least..=most).contains(&number) => Ok(Some(number)),
        _ => Err(wrong(name, &value, &format!("a whole number from {least} to {most}"))),
    }
}

fn temperature(fields: &mut Map<String, Value>) -> Result<f32, ApiError> {
    let Some(value) = fields.remove("temperature") else { return Ok(0.0) };
    match value.as_f64() {
        Some(temperature) if (0.0..=2.0).contains(&temperature) => Ok(temperature as f32),
        _ => Err(wrong("temperature", &value, "a number from 0 to 2")),
    }
}

fn include_usage(fields: &mut Map<String, Value>) -> Result<bool, ApiError> {
    match fields.remove("stream_options") {
        None => Ok(false),
        Some(Value::Object(mut options)) => flag(&mut options, "include_usage"),
        Some(other) => Err(wrong("stream_options", &other, "an object such as {\"include_usage\": true}")),
    }
}

fn check_neutral(fields: &mut Map<String, Value>) -> Result<(), ApiError> {
    for (name, neutral) in NEUTRAL {
        let Some(value) = fields.remove(name) else { continue };
        let shown = value.to_string();
        if !neutral.contains(&shown.as_str()) {
            let only = neutral.first().copied().unwrap_or("null");
            return Err(ApiError::invalid(Some(name), format!("{name} is {}; only {only} is supported", cut(&shown))));
        }
    }
    Ok(())
}

fn wrong(name: &'static str, value: &Value, want: &str) -> ApiError {
    ApiError::invalid(Some(name), format!("{name} is {}; send {want}", cut(&value.to_string())))
}

/// A client's words come back in a message, but not all of them.
fn cut(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_read_with_its_defaults() {
        let body = CompletionBody::parse(br#"{"prompt": "hi", "user": "u", "n": 1, "logprobs": null}"#).unwrap();
        assert_eq!(body.prompt, Prompt::Text("hi".into()));
        assert_eq!((body.max_tokens, body.temperature, body.stream), (16, 0.0, false));
        let body = CompletionBody::parse(
            br#"{"prompt": [1, 2], "max_tokens": 3, "temperature": 0.5, "seed": 7, "stream": true,
                 "stream_options": {"include_usage": true}, "return_token_ids": true, "model": "m", "top_p": 1.0}"#,
        )
        .unwrap();
        assert_eq!(body.prompt, Prompt::Tokens(vec![1, 2]));
        assert_eq!((body.max_tokens, body.temperature, body.seed), (3, 0.5, 7));
        assert!(body.stream && body.include_usage && body.return_token_ids && !body.report);
    }

    #[test]
    fn a_wrong_body_is_refused_with_the_field_and_what_would_be_right() {
        for (body, field, want) in [
            ("", None, "not JSON"),
            ("{\"prompt\": \"a\"", None, "not JSON"),
            ("[1]", None, "not a JSON object"),
            ("{}", Some("prompt"), "missing"),
            (r#"{"prompt": null}"#, Some("prompt"), "missing"),
            (r#"{"prompt": 7}"#, Some("prompt"), "prompt is 7; send a string"),
            (r#"{"prompt": []}"#, Some("prompt"), "empty list"),
            (r#"{"prompt": ["a", "b"]}"#, Some("prompt"), "one request for each"),
            (r#"{"prompt": [1, -1]}"#, Some("prompt"), "prompt[1] is -1"),
            (r#"{"prompt": [1, 4294967296]}"#, Some("prompt"), "prompt[1] is 4294967296"),
            (r#"{"prompt": [1, "a"]}"#, Some("prompt"), "prompt[1] is \"a\""),
            (r#"{"prompt": "a", "max_tokens": 0}"#, Some("max_tokens"), "max_tokens is 0; send a whole number from 1"),
            (r#"{"prompt": "a", "max_tokens": 1.5}"#, Some("max_tokens"), "1.5"),
            (r#"{"prompt": "a", "max_tokens": "9"}"#, Some("max_tokens"), "\"9\""),
            (r#"{"prompt": "a", "temperature": 3}"#, Some("temperature"), "from 0 to 2"),
            (r#"{"prompt": "a", "seed": -1}"#, Some("seed"), "-1"),
            (r#"{"prompt": "a", "stream": "yes"}"#, Some("stream"), "true or false"),
            (r#"{"prompt": "a", "stream_options": 1}"#, Some("stream_options"), "include_usage"),
            (r#"{"prompt": "a", "model": 1}"#, Some("model"), "a string"),
            (r#"{"prompt": "a", "n": 2}"#, Some("n"), "only 1 is supported"),
            (r#"{"prompt": "a", "stop": "x"}"#, Some("stop"), "only [] is supported"),
            (r#"{"prompt": "a", "promt": "b"}"#, Some("promt"), "not a field"),
        ] {
            let error = CompletionBody::parse(body.as_bytes()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.field.as_deref()), (400, field), "{body}");
            assert!(error.message.contains(want), "{body}: {}", error.message);
        }
    }

    #[test]
    fn a_long_value_is_cut_in_the_message() {
        let body = format!(r#"{{"prompt": "a", "stream": "{}"}}"#, "é".repeat(1000));
        assert!(CompletionBody::parse(body.as_bytes()).unwrap_err().message.len() < 200);
    }
}
