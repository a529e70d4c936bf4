//! The binaries as a user meets them: what they say when they cannot start, and the terminal mode.

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn run(binary: &str, args: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(binary)
        .args(args)
        .env_remove("KVFERRY_PSK")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that refuses its arguments does not read; then there is nobody to write to.
    let _ = child.stdin.take().unwrap().write_all(stdin.as_bytes());
    child.wait_with_output().unwrap()
}

const PREFILL: &str = env!("CARGO_BIN_EXE_prefill");
const DECODE: &str = env!("CARGO_BIN_EXE_decode");
const PAIR: &str = env!("CARGO_BIN_EXE_pair");

#[test]
fn what_cannot_start_says_why_and_how_to_mend_it() {
    for (binary, args, wants) in [
        (PREFILL, &["--model", "/nonexistent.gguf"][..], &["/nonexistent.gguf", "embedded"][..]),
        (PREFILL, &[], &["psk_file", "KVFERRY_PSK"]),
        (PREFILL, &["--layout", "BLPNHX"], &["--layout", "as in BLPNHC"]),
        (PREFILL, &["--config", "/nonexistent.toml"], &["/nonexistent.toml"]),
        (DECODE, &["--prefill", "localhost"], &["--prefill", "localhost"]),
        (DECODE, &["--prefill", "127.0.0.1:9"], &["psk_file", "KVFERRY_PSK"]),
        (DECODE, &["--exit-with-stdin"], &["--http"]),
        (DECODE, &["--temperature", "9"], &["from 0 to 2"]),
        (DECODE, &["--blocks", "0"], &["--blocks"]),
        (DECODE, &["--http", "203.0.113.1:80"], &["--http 203.0.113.1:80 cannot be listened on"]),
        (PAIR, &["--prompts", "/nonexistent.txt"], &["/nonexistent.txt", "one prompt a line"]),
        (PAIR, &["--kv-dtype", "fp8"], &["f32, f16 or bf16"]),
    ] {
        let output = run(binary, args, "");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{binary} {args:?} started");
        for want in wants {
            assert!(said.contains(want), "{binary} {args:?}: {want:?} is not in {said:?}");
        }
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn a_terminal_gets_an_answer_for_each_line() {
    let output = run(DECODE, &["--max-tokens", "9"], "one\ntwo\none\n");
    assert!(output.status.success());
    let said = String::from_utf8(output.stdout).unwrap();
    let answers: Vec<&str> = said.lines().collect();
    assert_eq!(answers.len(), 3, "{said:?}");
    assert!(answers.iter().all(|answer| (1..=9).contains(&answer.len())), "{said:?}");
    assert_eq!(answers[0], answers[2]);
    assert_ne!(answers[0], answers[1]);
}

#[test]
fn a_prompt_that_cannot_be_answered_does_not_end_a_terminal() {
    let output = run(DECODE, &["--blocks", "2", "--max-tokens", "4"], &format!("{}\nshort\n", "long ".repeat(20)));
    assert!(output.status.success());
    assert!(String::from_utf8(output.stderr).unwrap().contains("the cache has 2; shorten it"));
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 1);
}
