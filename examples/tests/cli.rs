//! The binaries as a user meets them: what they say when they cannot start, and the terminal mode.

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn run(binary: &str, args: &[&str], stdin: &str) -> Output {
    let mut child = Command::new(binary)
        .args(args)
        .env_remove("KVFERRY_PSK")
        .env("RUST_BACKTRACE", "1")
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
        (DECODE, &["--blocks", "0"], &["--blocks", "at least 1"]),
        (DECODE, &["--config", "/nonexistent.toml"], &["--prefill"]),
        (DECODE, &["--order", "prefill-first"], &["--order", "--prefill"]),
        (DECODE, &["--max-tokens", "0"], &["at least 1"]),
        (PREFILL, &["--listen", "localhost:7500"], &["--listen", "IP:PORT"]),
        (PAIR, &["--max-tokens", "99999999"], &["prompt 1", "4096", "--max-tokens"]),
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
        assert!(!said.contains("panicked") && !said.contains("backtrace"), "{said}");
        assert!(!said.contains('\u{1b}'), "colours where no terminal is: {said:?}");
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
    assert_eq!(output.status.code(), Some(1), "one prompt failed");
    assert!(String::from_utf8(output.stderr).unwrap().contains("the cache has 2; shorten it"));
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 1);
}

#[test]
fn answers_that_nobody_reads_end_a_terminal_quietly() {
    let mut child = Command::new(DECODE)
        .args(["--max-tokens", "4"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    // It may end before it has read all lines.
    let _ = child.stdin.take().unwrap().write_all(b"one\ntwo\nthree\n");
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
}

#[test]
fn a_taken_port_is_named_with_its_option() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for (binary, option) in [(PREFILL, "--listen"), (DECODE, "--http")] {
        let mut command = Command::new(binary);
        let output = command.args([option, &address]).env("KVFERRY_PSK", "0123456789abcdef").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("{option} {address}")) && said.contains("0 for a free one"), "{said}");
    }
}
