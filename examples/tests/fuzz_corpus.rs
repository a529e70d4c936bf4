//! Replays the fuzz corpora, and the same with bytes changed and cut.

use std::fs;
use std::path::PathBuf;

use kvferry_examples::http::CompletionBody;
use kvferry_examples::messages::Ask;

fn ask(bytes: &[u8]) {
    if let Ok(ask) = Ask::decode(bytes) {
        assert_eq!(Ask::decode(&ask.encode().unwrap()), Ok(ask));
    }
}

fn body(bytes: &[u8]) {
    drop(CompletionBody::parse(bytes));
}

#[test]
fn no_decoder_panics_on_its_corpus_or_near_it() {
    for (name, decode) in [("ask", ask as fn(&[u8])), ("body", body)] {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() >= 3, "{name}: the corpus is missing");
        for path in files {
            println!("{}", path.display());
            let mut bytes = fs::read(path).unwrap();
            decode(&bytes);
            for at in 0..bytes.len() {
                for mask in [1, 0x80, 0xff] {
                    bytes[at] ^= mask;
                    decode(&bytes);
                    bytes[at] ^= mask;
                }
                decode(&bytes[..at]);
            }
        }
    }
}
