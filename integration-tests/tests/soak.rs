//! The soak command does what it says; for how it is meant, run it for an hour.

use std::process::Command;

#[test]
fn a_short_soak_finds_nothing() {
    let output = Command::new(env!("CARGO_BIN_EXE_soak"))
        .args(["--minutes", "0.15", "--prefill-tp", "2"])
        .output()
        .expect("it runs");
    let (text, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{text}\n{log}");
    for part in [
        "right",
        "faults: ",
        "decode 0 ",
        "last 0.1 minutes: ",
        "tokio tasks",
        "pool_blocks_free",
        "sessions_lost",
        "clean",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}
