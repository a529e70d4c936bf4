//! Block hashes beside the Python that the engines run: random sequences with random extra keys, the same bytes.
//!
//! `integration-tests/hashes/environment.sh` makes the Python and says how to run this.

mod python;

use kvferry::pool::{
    BlockHash, BlockHasher, ExtraForm, Extras, Lora, Media, NoneHash, SglangScope, VllmAlgorithm, VllmScope,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use python::Python;
use serde_json::{Value, json};

const CASES: u32 = 1500;

fn texts(answer: Value) -> Vec<String> {
    serde_json::from_value(answer).expect("a list of texts")
}

#[derive(Clone, Debug)]
struct Case {
    algorithm: usize,
    form: usize,
    seed: String,
    tokens_per_block: usize,
    tokens: Vec<u32>,
    lora: Option<(String, String)>,
    /// Identifiers, each with the gap before it and its length.
    media: Vec<(String, u32, u32)>,
    salt: Option<String>,
    embeds: Vec<[u8; 32]>,
}

const ALGORITHMS: [&str; 5] = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "sglang"];
const FORMS: [(&str, ExtraForm); 3] =
    [("tagged", ExtraForm::Tagged), ("bare", ExtraForm::Bare), ("names", ExtraForm::BareWithoutOffsets)];

/// Around every size at which one of the encodings changes its form.
fn token() -> impl Strategy<Value = u32> {
    let edges = vec![0, 23, 24, 255, 256, 65_535, 65_536, 0x7fff_ffff, 0x8000_0000, u32::MAX];
    prop_oneof![0_u32..200_000, any::<u32>(), proptest::sample::select(edges)]
}

/// Not empty, so that it can be made unlike all others; up to beyond one byte of length, in one to four bytes a character.
fn text() -> impl Strategy<Value = String> {
    prop_oneof![4 => "[a-z/é€𝄞]{1,20}", 1 => "[a-zé]{230,300}"]
}

fn any_case() -> impl Strategy<Value = Case> {
    let media =
        prop_oneof![2 => vec((text(), 0_u32..40, 1_u32..60), 0..4), 1 => vec((text(), 0_u32..2, 1_u32..3), 100..101)];
    let keys =
        (proptest::option::of((text(), text())), media, proptest::option::of(text()), vec(any::<[u8; 32]>(), 0..4));
    let tokens = (prop_oneof![1_usize..5, Just(16), 20_usize..70, 250_usize..270], vec(token(), 0..600));
    (0..ALGORITHMS.len(), 0..FORMS.len(), "[0-9a-zé]{0,40}", tokens, keys).prop_map(
        |(algorithm, form, seed, (tokens_per_block, tokens), (lora, media, salt, embeds))| Case {
            algorithm,
            form,
            seed,
            tokens_per_block,
            tokens,
            lora,
            media,
            salt,
            embeds,
        },
    )
}

impl Case {
    /// Gives each text a number, since equal ones are refused.
    fn numbered(mut self) -> Self {
        let mut number = 0;
        let mut unlike = |text: &mut String| {
            number += 1;
            text.push_str(&number.to_string());
        };
        self.media.iter_mut().for_each(|media| unlike(&mut media.0));
        if let Some((name, path)) = &mut self.lora {
            unlike(name);
            unlike(path);
        }
        self.salt.iter_mut().for_each(unlike);
        self
    }

    fn placed(&self) -> Vec<Media<'_>> {
        let mut end = 0;
        let placed = self.media.iter().map(|(identifier, gap, tokens)| {
            let offset = end + gap;
            end = offset + tokens;
            Media { identifier, offset, tokens: *tokens }
        });
        placed.collect()
    }

    fn hasher(&self) -> BlockHasher {
        match VllmAlgorithm::from_name(ALGORITHMS[self.algorithm]) {
            Some(algorithm) => {
                let (none_hash, extra_form) = (NoneHash::Seed(&self.seed), FORMS[self.form].1);
                let tokens_per_block = self.tokens_per_block;
                BlockHasher::vllm(&VllmScope { algorithm, tokens_per_block, none_hash, extra_form }).unwrap()
            }
            None => {
                let (tokens_per_block, salt) = (self.tokens_per_block, self.salt.as_deref());
                BlockHasher::sglang(&SglangScope { tokens_per_block, salt, bigrams: self.form == 1 }).unwrap()
            }
        }
    }

    /// Root and blocks; in two pieces, since a sequence grows.
    fn ours(&self) -> Vec<String> {
        let hasher = self.hasher();
        let media = self.placed();
        let lora = self.lora.as_ref().map(|(name, path)| Lora { name, path });
        let extras = Extras { lora, media: &media, salt: self.salt.as_deref(), prompt_embeds: &self.embeds };
        let extras = if ALGORITHMS[self.algorithm] == "sglang" { Extras::default() } else { extras };
        let mut hashes: Vec<BlockHash> = hasher.chain_with(&self.tokens, &extras).unwrap();
        let known = hashes.len() / 2;
        if let Some(parent) = known.checked_sub(1).map(|last| hashes[last]) {
            hashes.truncate(known);
            let rest = &self.tokens[known * self.tokens_per_block..];
            hashes.extend(hasher.chain_after(parent, known, rest, &extras).unwrap());
        }
        let all = std::iter::once(hasher.root()).chain(hashes);
        all.map(|hash| hasher.digest(&hash).iter().map(|byte| format!("{byte:02x}")).collect()).collect()
    }

    fn json(&self) -> Value {
        let media: Vec<_> =
            self.placed().iter().map(|media| json!([media.identifier, media.offset, media.tokens])).collect();
        let embeds: Vec<String> =
            self.embeds.iter().map(|digest| digest.iter().map(|byte| format!("{byte:02x}")).collect()).collect();
        json!({
            "kind": "chain", "algorithm": ALGORITHMS[self.algorithm], "form": FORMS[self.form].0, "seed": self.seed,
            "tokens_per_block": self.tokens_per_block, "tokens": self.tokens, "lora": self.lora, "media": media,
            "salt": self.salt, "embeds": embeds, "bigrams": self.form == 1,
        })
    }
}

#[test]
#[ignore = "needs a Python with cbor2 and xxhash: integration-tests/hashes/environment.sh"]
fn block_hashes_are_those_of_cpython() {
    let mut python = Python::start("KVFERRY_PYTHON", "cbor2 and xxhash", "engine_hashes/reference.py");
    let (mut blocks, mut runner) =
        (0, TestRunner::new(Config { cases: CASES, failure_persistence: None, ..Config::default() }));
    let asked = std::cell::RefCell::new(&mut python);
    let agreed = runner.run(&any_case().prop_map(Case::numbered), |case| {
        let (ours, theirs) = (case.ours(), texts(asked.borrow_mut().ask(&case.json())));
        prop_assert_eq!(ours, theirs);
        Ok(())
    });
    agreed.unwrap();
    // What we refuse has indeed two answers there, unless strings are written without regard to who they are.
    for (algorithm, two) in [("sha256", true), ("xxhash", true), ("sha256_cbor", false), ("xxhash_cbor", false)] {
        let answers = texts(python.ask(&json!({ "kind": "twins", "algorithm": algorithm, "salt": "twins" })));
        assert_eq!(answers[0] != answers[1], two, "{algorithm}");
        blocks += answers.len();
    }
    assert_eq!(blocks, 8);
    python.stop();
}
