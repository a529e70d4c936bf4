//! The HTTP side over a real socket, on the embedded model.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;

use kvferry::config::LoadFailurePolicy;
use kvferry::metrics::Metrics;
use kvferry_examples::engine::{DeviceKind, EngineService};
use kvferry_examples::http::{Frontend, LocalRouter, router};
use kvferry_examples::model::Model;
use kvferry_examples::node::{LoadedModel, NodeConfig};
use serde_json::{Value, json};

/// A served engine; it ends with the runtime of the test.
struct Server {
    address: SocketAddr,
    _engine: EngineService,
    _runtime: tokio::runtime::Runtime,
}

fn serve() -> Server {
    let model = LoadedModel::load(Model::EMBEDDED.as_ref()).unwrap();
    let config = NodeConfig {
        order: "BLPNHC".parse().unwrap(),
        dtype: "f16".parse().unwrap(),
        blocks: 32,
        tokens_per_block: 16,
        tp_size: 1,
        device: DeviceKind::Cpu,
        chunk_tokens: 64,
        max_running: 4,
        on_load_failure: LoadFailurePolicy::Recompute,
        prefix: kvferry::pool::PrefixKind::Hash,
        in_place: false,
    };
    let engine = model.start_local(&config).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let frontend = Frontend {
        engine: engine.handle(),
        model,
        router: Arc::new(LocalRouter),
        metrics: vec![Arc::new(Metrics::new())],
    };
    let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
    let address = listener.local_addr().unwrap();
    runtime.spawn(async move { axum::serve(listener, router(frontend)).await });
    Server { address, _engine: engine, _runtime: runtime }
}

impl Server {
    /// Status, headers and body of an answer.
    fn call(&self, method: &str, path: &str, body: &str) -> (u16, String, String) {
        let mut stream = TcpStream::connect(self.address).unwrap();
        let length = body.len();
        let head =
            format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
        // Who refuses a long body need not read it, and then the connection ends in a reset behind the answer.
        let _ = stream.write_all((head + body).as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8(answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), head.to_lowercase(), body.to_owned())
    }

    fn complete(&self, body: &Value) -> Value {
        let (status, _, answer) = self.call("POST", "/v1/completions", &body.to_string());
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str(&answer).unwrap()
    }
}

#[test]
fn a_completion_is_answered_whole() {
    let server = serve();
    let answer = server.complete(&json!({
        "prompt": "hello", "max_tokens": 8, "return_token_ids": true, "kvferry_report": true,
    }));
    let choice = &answer["choices"][0];
    assert_eq!(answer["object"], "text_completion");
    assert_eq!(answer["usage"], json!({ "prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14 }));
    assert_eq!((choice["finish_reason"].as_str(), choice["text"].as_str().unwrap().len()), (Some("length"), 8));
    assert_eq!(choice["token_ids"].as_array().unwrap().len(), 8);
    assert_eq!(answer["kvferry"]["first_logits"].as_str().unwrap().len(), 64);
    // The same prompt as tokens gives the same text, and the report stays away where it was not asked for.
    let tokens = json!({ "prompt": [256, 104, 101, 108, 108, 111], "max_tokens": 8 });
    let again = server.complete(&tokens);
    assert_eq!(again["choices"][0]["text"], choice["text"]);
    assert!(again["kvferry"].is_null() && again["choices"][0]["token_ids"].is_null());
}

#[test]
fn a_stream_has_the_same_text_and_ends_with_done() {
    let server = serve();
    let whole = server.complete(&json!({ "prompt": "stream", "max_tokens": 12 }));
    let body = json!({
        "prompt": "stream", "max_tokens": 12, "stream": true, "stream_options": { "include_usage": true },
    });
    let (status, head, events) = server.call("POST", "/v1/completions", &body.to_string());
    assert_eq!(status, 200);
    assert!(head.contains("content-type: text/event-stream"), "{head}");
    let data: Vec<&str> = events.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(data.last(), Some(&"[DONE]"));
    let chunks: Vec<Value> = data[..data.len() - 1].iter().map(|chunk| serde_json::from_str(chunk).unwrap()).collect();
    let text: String = chunks.iter().map(|chunk| chunk["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, whole["choices"][0]["text"].as_str().unwrap());
    assert!(chunks.len() >= 12, "a chunk for each token: {}", chunks.len());
    let last = chunks.last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], whole["choices"][0]["finish_reason"]);
    assert_eq!(last["usage"], whole["usage"]);
}

#[test]
fn draws_repeat_with_their_seed() {
    let server = serve();
    let text = |seed: u64| {
        let answer = server.complete(&json!({ "prompt": "x", "max_tokens": 16, "temperature": 1.5, "seed": seed }));
        answer["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    assert_eq!(text(1), text(1));
    assert_ne!(text(1), text(2));
}

#[test]
fn a_wrong_request_is_refused_in_json_and_the_server_goes_on() {
    let server = serve();
    let long = json!({ "prompt": "x".repeat(600), "max_tokens": 1 }).to_string();
    let huge = json!({ "prompt": "x".repeat(5 << 20) }).to_string();
    for (method, path, body, status, field, want) in [
        ("POST", "/v1/completions", "{", 400, None, "not JSON"),
        ("POST", "/v1/completions", r#"{"max_tokens": 3}"#, 400, Some("prompt"), "missing"),
        (
            "POST",
            "/v1/completions",
            r#"{"prompt": "a", "max_tokens": 100000}"#,
            400,
            Some("max_tokens"),
            "context of 4096",
        ),
        ("POST", "/v1/completions", long.as_str(), 400, Some("max_tokens"), "38 KV blocks, but the cache has 32"),
        ("POST", "/v1/completions", r#"{"prompt": [1, 999]}"#, 400, Some("prompt"), "token 999"),
        ("POST", "/v1/completions", r#"{"prompt": "a", "model": "gpt-4"}"#, 404, Some("model"), "kvferry-embedded-1"),
        ("POST", "/v1/completions", huge.as_str(), 413, None, "limit"),
        ("GET", "/v1/completions", "", 405, None, "POST"),
        ("GET", "/v2", "", 404, None, "no such path"),
    ] {
        let (found, _, answer) = server.call(method, path, body);
        let short: String = body.chars().take(40).collect();
        assert_eq!(found, status, "{method} {path} {short}: {answer}");
        let error = &serde_json::from_str::<Value>(&answer).expect("an error is JSON")["error"];
        assert_eq!(error["param"].as_str(), field, "{short}: {answer}");
        assert!(error["message"].as_str().unwrap().contains(want), "{short}: {answer}");
    }
    server.complete(&json!({ "prompt": "still there", "max_tokens": 2 }));
}

#[test]
fn health_and_metrics_tell_the_state_and_a_client_that_left_holds_nothing() {
    let server = serve();
    let mut stream = TcpStream::connect(server.address).unwrap();
    let body = json!({ "prompt": "a", "max_tokens": 400, "stream": true }).to_string();
    let head = format!("POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).unwrap();
    let mut some = [0; 300];
    stream.read_exact(&mut some).unwrap();
    drop(stream);
    // Bounded by the test's own time limit; the answer of 400 tokens would come to an end as well.
    let health = loop {
        let (status, _, body) = server.call("GET", "/health", "");
        assert_eq!(status, 200);
        let health: Value = serde_json::from_str(&body).unwrap();
        if health["running"] == 0 {
            break health;
        }
    };
    assert_eq!((&health["status"], &health["free_blocks"], &health["blocks"]), (&json!("ok"), &json!(32), &json!(32)));
    let (status, head, page) = server.call("GET", "/metrics", "");
    assert_eq!(status, 200);
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    assert!(page.contains("kvferry_pool_blocks_free 32"), "{page}");
    let (_, _, models) = server.call("GET", "/v1/models", "");
    assert!(models.contains("kvferry-embedded-1"), "{models}");
}
