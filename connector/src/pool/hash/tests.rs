//! Vectors of each scheme, and what they have in common.

use super::*;

fn scope() -> HashScope<'static> {
    HashScope { model: "llama", tokens_per_block: 4, adapter: None, salt: b"" }
}

fn hex(hash: BlockHash) -> String {
    hash.get().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn a_chain_has_the_bytes_that_an_independent_sha256_gives() {
    let hasher = BlockHasher::new(&scope()).unwrap();
    let tokens: Vec<u32> = (0..9).map(|i| i * 70_000).collect();
    let got: Vec<_> = std::iter::once(hasher.root()).chain(hasher.chain(&tokens)).map(hex).collect();
    assert_eq!(got, GOLDEN);
}

#[test]
fn a_chain_is_its_blocks_one_by_one() {
    let hasher = BlockHasher::new(&HashScope { tokens_per_block: 40, ..scope() }).unwrap();
    let tokens: Vec<u32> = (0..99).collect();
    let first = hasher.next(hasher.root(), &tokens[..40]).unwrap();
    let second = hasher.next(first, &tokens[40..80]).unwrap();
    assert_eq!(hasher.chain(&tokens), [first, second]);
}

#[test]
fn only_a_complete_block_has_a_hash() {
    let hasher = BlockHasher::new(&scope()).unwrap();
    for found in [0, 3, 5] {
        let want = PoolError::IncompleteBlock { found, tokens_per_block: 4 };
        assert_eq!(hasher.next(hasher.root(), &vec![1; found]), Err(want));
    }
    assert!(hasher.chain(&[1, 2, 3]).is_empty());
    let none = BlockHasher::new(&HashScope { tokens_per_block: 0, ..scope() });
    assert_eq!(none.unwrap_err(), PoolError::NoTokens);
}

#[test]
fn whatever_decides_the_bytes_decides_the_hash() {
    let tokens = [1, 2, 3, 4];
    let scopes = [
        scope(),
        HashScope { model: "llamb", ..scope() },
        HashScope { tokens_per_block: 2, ..scope() },
        HashScope { adapter: Some(""), ..scope() },
        HashScope { adapter: Some("a"), ..scope() },
        HashScope { adapter: Some("b"), ..scope() },
        HashScope { salt: b"a", ..scope() },
        HashScope { model: "llam", salt: b"a", ..scope() },
    ];
    let mut seen = std::collections::BTreeSet::new();
    for scope in scopes {
        let hasher = BlockHasher::new(&scope).unwrap();
        let first = hasher.chain(&tokens)[0];
        assert!(seen.insert(first), "{scope:?}");
        let again = hasher.next(first, &tokens[..scope.tokens_per_block]).unwrap();
        assert!(seen.insert(again), "the parent counts: {scope:?}");
    }
}

/// The root and two blocks: `python3 -c` with hashlib and struct, from the documentation above alone.
const GOLDEN: [&str; 3] = [
    "df7847e0a35b90390ae5d5ab8bee66e4e3c099ba5a4487e425904a3072286d84",
    "1585f2cbc0b7cebce223e6ee6d31ca44d7351ae38ad3b44e61d4b37c87ea4e1e",
    "febcc6b345e1c9c966dc2734404741a383354d64ed5befad7d0f03ca2303303f",
];

fn vllm(algorithm: VllmAlgorithm, none_hash: NoneHash<'_>) -> BlockHasher {
    let extra_form = ExtraForm::Bare;
    BlockHasher::vllm(&VllmScope { algorithm, tokens_per_block: 16, none_hash, extra_form }).unwrap()
}

fn digests(hasher: &BlockHasher, hashes: &[BlockHash]) -> Vec<String> {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    hashes.iter().map(|hash| hex(hasher.digest(hash))).collect()
}

/// Made with CPython and cbor2, tokens 1 to 16 and 17 to 32.
#[test]
fn vllm_chains_have_the_bytes_that_cpython_gives() {
    let seed = NoneHash::Seed("vllm-none-hash");
    let tokens: Vec<u32> = (1..=32).collect();
    for (algorithm, none_hash, want) in [
        (
            VllmAlgorithm::Sha256Cbor,
            NoneHash::Shared,
            &[
                "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0",
                "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682",
                "2533ea50426b36e9e4d68296cac6bce8cf602e46957d0fe40b368b33d87bf3bf",
            ][..],
        ),
        (
            VllmAlgorithm::Sha256Cbor,
            NoneHash::Seed("0"),
            &[
                "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e",
                "202da172482d928bbc42ab25b0151e2b895f13f41002e27b2ceabcfae6d332ea",
            ],
        ),
        (
            VllmAlgorithm::Sha256,
            NoneHash::Shared,
            &[
                "066b1e8987e027138e98701c46128929378935f9b6cd1549105ae6b4f0d71198",
                "7b255da405e1d722823892e4fef187b4d8ac78215d7f0dd2137bb037547f4caf",
            ],
        ),
        (VllmAlgorithm::XxhashCbor, seed, &["a4e364baa0791a6f63bbf917db9b700d", "94bdea02d195af01562671ef4f8c323f"]),
    ] {
        let hasher = vllm(algorithm, none_hash);
        let mut got = vec![hasher.root()];
        got.extend(hasher.chain(&tokens));
        assert_eq!(digests(&hasher, &got)[..want.len()], *want, "{algorithm:?} {none_hash:?}");
    }
}

#[test]
fn vllm_extra_keys_count_in_the_blocks_that_they_touch() {
    let hasher = vllm(VllmAlgorithm::Sha256Cbor, NoneHash::Shared);
    let tokens: Vec<u32> = (1..=32).collect();
    let lora = Some(Lora { name: "my-lora", path: "/loras/mine" });
    let salt = Some("tenant-a");
    let media = &[Media { identifier: "mmhash", offset: 3, tokens: 5 }];
    for (extras, want) in [
        (Extras { salt, ..Extras::default() }, "84ab0ef3dc094fc39519521dd81c13715e990c1d39795a4e040cfbeb178d35b6"),
        (
            Extras { lora, salt, ..Extras::default() },
            "96f6cb7800a2f242e10996db6332088f1b688713a6103fa76fcf30bbbb2bbb14",
        ),
        (Extras { media, ..Extras::default() }, "5e650420e8821f08590c555e439c2e7a87fd6ef57162b7d1fa1dd2b86c3e8eb8"),
    ] {
        let hashes = hasher.chain_with(&tokens, &extras).unwrap();
        assert_eq!(digests(&hasher, &hashes)[0], want);
        // Neither salt nor image reaches the second block, whose parent differs nonetheless.
        let second = hasher.chain_after(hashes[0], 1, &tokens[16..], &Extras { lora, ..Extras::default() }).unwrap();
        assert_eq!(second[0] == hashes[1], extras.lora.is_some());
        let whole = hasher.chain_after(hashes[0], 1, &tokens[16..], &extras).unwrap();
        assert_eq!(whole[0], hashes[1], "a chain goes on where it stopped");
    }
}

#[test]
fn event_integers_and_group_keys_are_those_of_the_engines() {
    let tokens: Vec<u32> = (1..=32).collect();
    let hasher = vllm(VllmAlgorithm::Sha256Cbor, NoneHash::Shared);
    let hashes = hasher.chain(&tokens);
    assert_eq!(hasher.event_id(&hashes[0]), EventId::Unsigned(8_866_452_693_264_111_234));
    assert_eq!(hasher.event_id(&hashes[1]), EventId::Unsigned(807_986_237_951_177_663));
    let key = hasher.with_group(&hashes[0], 0x0102);
    assert_eq!((&key[..32], &key[32..]), (&hashes[0].get()[..], &[0, 0, 1, 2][..]));
    let short = vllm(VllmAlgorithm::XxhashCbor, NoneHash::Seed("1"));
    assert_eq!(short.with_group(&short.chain(&tokens)[0], 0).len(), 20);

    let hasher = BlockHasher::sglang(&SglangScope { tokens_per_block: 16, salt: None, bigrams: false }).unwrap();
    let hashes = hasher.chain(&tokens);
    let want = [
        "77d735ce838418aa151bd96b5b1e78ee63860892e0a95c00fe34178442be9b07",
        "1170426cf2449cebf4d17f087ce5bb43b6a910ce91b3f40922868e913e8ee91d",
    ];
    assert_eq!(digests(&hasher, &hashes), want);
    assert_eq!(hasher.event_id(&hashes[0]), EventId::Signed(8_635_429_971_592_222_890));
    assert_eq!(hasher.event_id(&hashes[1]), EventId::Signed(1_256_577_331_724_852_459));
}

/// Made with hashlib: `sha256(sha256(b"sglang-cache-salt-v1\0tenant-a").digest() + struct.pack("<4I", 1, 2, 7, 8))`, and of pairs.
#[test]
fn sglang_salts_and_bigrams_have_the_bytes_that_hashlib_gives() {
    let scope = SglangScope { tokens_per_block: 4, salt: Some("tenant-a"), bigrams: false };
    let salted = BlockHasher::sglang(&scope).unwrap();
    assert_eq!(digests(&salted, &salted.chain(&[1, 2, 7, 8, 9])), [SALTED]);
    let bigrams = BlockHasher::sglang(&SglangScope { salt: None, bigrams: true, tokens_per_block: 2 }).unwrap();
    assert_eq!(digests(&bigrams, &bigrams.chain(&[1, 2, 7, 8, 9])), BIGRAMS);
    assert_eq!(bigrams.chain(&[1, 2, 7, 8]).len(), 1, "the token behind the second page is not known yet");
    let second = bigrams.next(bigrams.chain(&[1, 2, 7])[0], &[7, 8, 9]).unwrap();
    assert_eq!(second, bigrams.chain(&[1, 2, 7, 8, 9])[1]);
    let empty = BlockHasher::sglang(&SglangScope { salt: Some(""), ..scope }).unwrap();
    let none = BlockHasher::sglang(&SglangScope { salt: None, ..scope }).unwrap();
    assert_eq!(empty.chain(&[1, 2, 7, 8]), none.chain(&[1, 2, 7, 8]));
}

#[test]
fn what_cannot_be_foretold_is_refused() {
    let scope = VllmScope {
        algorithm: VllmAlgorithm::Xxhash,
        tokens_per_block: 4,
        none_hash: NoneHash::Shared,
        extra_form: ExtraForm::Tagged,
    };
    assert_eq!(BlockHasher::vllm(&scope).unwrap_err(), PoolError::SecretSeed);
    for bytes in [0, 33] {
        let none_hash = NoneHash::Bytes(&[7; 64][..bytes]);
        assert_eq!(BlockHasher::vllm(&VllmScope { none_hash, ..scope }).unwrap_err(), PoolError::Seed { bytes });
    }
    let none_hash = NoneHash::Seed("0");
    let long = BlockHasher::vllm(&VllmScope { tokens_per_block: 8193, none_hash, ..scope });
    assert_eq!(long.unwrap_err(), PoolError::LongBlock { tokens_per_block: 8193, limit: 8192 });

    let same = [
        ("a", "a", ""),
        ("mm", "x", ""),
        ("a", "b", "b"),
        ("lora", "b", "c"),
        ("a", "b", "lora"),
        ("cache_salt", "b", "c"),
    ];
    for (identifier, name, path) in same {
        let media = &[Media { identifier, offset: 0, tokens: 4 }];
        let extras = Extras { lora: Some(Lora { name, path }), media, salt: Some("cache"), ..Extras::default() };
        let extras = if identifier == "cache_salt" { extras } else { Extras { salt: None, ..extras } };
        let hasher = BlockHasher::vllm(&VllmScope { none_hash, ..scope }).unwrap();
        assert_eq!(hasher.chain_with(&[1, 2, 3, 4], &extras), Err(PoolError::SameText { block: 0 }), "{identifier}");
        let cbor = VllmScope { algorithm: VllmAlgorithm::Sha256Cbor, none_hash, ..scope };
        assert!(BlockHasher::vllm(&cbor).unwrap().chain_with(&[1, 2, 3, 4], &extras).is_ok());
    }
    let salt = "s".repeat(65_536);
    let extras = Extras { salt: Some(&salt), ..Extras::default() };
    let hasher = BlockHasher::vllm(&VllmScope { none_hash, ..scope }).unwrap();
    let refused = hasher.chain_with(&[1, 2, 3, 4], &extras);
    assert!(matches!(refused, Err(PoolError::LongExtras { block: 0, bytes: 65_537.. })), "{refused:?}");
    let own = BlockHasher::new(&self::scope()).unwrap();
    assert_eq!(own.chain_with(&[1, 2, 3, 4], &extras), Err(PoolError::NoExtras));
}

const SALTED: &str = "63f53bdbbf1865a31d3253c1fe77fa77abab70c3f591b437eba302e419a08a92";
const BIGRAMS: [&str; 2] = [
    "1ddaec01ffe040b9307ca01ecd1f4cf850805e2c0ba5240cfc3e515fb45d7dca",
    "5ea53fcc71bbedebba5d878e5b2e2daf7dce5aec785221c0a079033f2570f662",
];
