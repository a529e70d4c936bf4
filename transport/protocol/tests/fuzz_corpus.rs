//! Replays the fuzz corpora; `cargo fuzz run TARGET` in `fuzz/` makes them grow.

use std::path::Path;

#[path = "../fuzz/targets.rs"]
mod targets;

fn replay(target: &str, check: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files = 0;
    for entry in std::fs::read_dir(&folder).expect("the corpus is there") {
        let path = entry.expect("the corpus can be listed").path();
        check(&std::fs::read(&path).expect("the corpus can be read"));
        files += 1;
    }
    assert!(files > 0, "{} is empty", folder.display());
}

#[test]
fn the_corpus_of_messages_holds() {
    replay("message", targets::message);
}

#[test]
fn the_corpus_of_notifications_holds() {
    replay("wrote", targets::wrote);
}

#[test]
fn the_corpus_of_conversations_holds() {
    replay("machines", targets::machines);
}
