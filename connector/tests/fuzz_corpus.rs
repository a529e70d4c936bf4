//! Replays the fuzz corpora, and the same with bytes changed and cut.

use std::fs;
use std::path::PathBuf;

use kvferry::pd::decoders::{DECODERS, seeds};

fn folder(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name)
}

#[test]
fn no_decoder_panics_on_its_corpus_or_near_it() {
    for &(name, decode) in DECODERS {
        let files: Vec<_> = fs::read_dir(folder(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
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

#[test]
#[ignore = "writes the seeds into the source tree"]
fn write_the_seeds() {
    for (name, seeds) in seeds() {
        fs::create_dir_all(folder(name)).unwrap();
        for (number, seed) in seeds.into_iter().enumerate() {
            fs::write(folder(name).join(format!("seed-{number}")), seed).unwrap();
        }
    }
}
