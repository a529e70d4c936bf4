//! A model file that cannot be used is refused with the file, the part at fault and how to mend it; it never panics.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::PathBuf;

use candle_core::quantized::gguf_file::{Value, write};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use kvferry_examples::model::Model;

/// The parts of a small Llama's file, to take some away or change them.
struct Parts {
    metadata: BTreeMap<String, Value>,
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
}

const WIDTH: usize = 32;

impl Parts {
    fn good() -> Self {
        let number = |n: u32| Value::U32(n);
        let texts = |texts: Vec<String>| Value::Array(texts.into_iter().map(Value::String).collect());
        // The 256 characters that GPT-2's tokenizer writes bytes as, enough of them for ASCII.
        let tokens: Vec<String> =
            (0x21..0x7f_u8).map(|byte| char::from(byte).to_string()).chain(["Ġ".into()]).collect();
        let vocab = tokens.len();
        let metadata = [
            ("general.architecture", Value::String("llama".into())),
            ("llama.block_count", number(1)),
            ("llama.embedding_length", number(WIDTH as u32)),
            ("llama.feed_forward_length", number(64)),
            ("llama.attention.head_count", number(2)),
            ("llama.attention.head_count_kv", number(1)),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
            ("llama.context_length", number(128)),
            ("tokenizer.ggml.model", Value::String("gpt2".into())),
            ("tokenizer.ggml.tokens", texts(tokens)),
            ("tokenizer.ggml.merges", texts(vec!["h e".into()])),
            ("tokenizer.ggml.eos_token_id", number(0)),
        ];
        let mut metadata: BTreeMap<String, Value> = metadata.map(|(key, value)| (key.to_owned(), value)).into();
        // A merge needs its result among the tokens.
        let Some(Value::Array(all)) = metadata.get_mut("tokenizer.ggml.tokens") else { unreachable!() };
        all.push(Value::String("he".into()));
        let vocab = vocab + 1;
        let shapes = [
            ("token_embd", vec![vocab, WIDTH]),
            ("output_norm", vec![WIDTH]),
            ("blk.0.attn_norm", vec![WIDTH]),
            ("blk.0.attn_q", vec![WIDTH, WIDTH]),
            ("blk.0.attn_k", vec![16, WIDTH]),
            ("blk.0.attn_v", vec![16, WIDTH]),
            ("blk.0.attn_output", vec![WIDTH, WIDTH]),
            ("blk.0.ffn_norm", vec![WIDTH]),
            ("blk.0.ffn_gate", vec![64, WIDTH]),
            ("blk.0.ffn_up", vec![64, WIDTH]),
            ("blk.0.ffn_down", vec![WIDTH, 64]),
        ];
        let tensors = shapes.map(|(name, shape)| {
            let count: usize = shape.iter().product();
            (format!("{name}.weight"), (shape, (0..count).map(|i| (i % 17) as f32 / 17.0).collect()))
        });
        Self { metadata, tensors: tensors.into() }
    }

    fn bytes(&self) -> Vec<u8> {
        let tensors: Vec<(&str, QTensor)> = self
            .tensors
            .iter()
            .map(|(name, (shape, numbers))| {
                let tensor = Tensor::from_slice(numbers, shape.as_slice(), &Device::Cpu).unwrap();
                let dtype = if shape.len() > 1 { GgmlDType::Q4_1 } else { GgmlDType::F32 };
                (name.as_str(), QTensor::quantize(&tensor, dtype).unwrap())
            })
            .collect();
        let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let metadata: Vec<_> = self.metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let mut file = Cursor::new(Vec::new());
        write(&mut file, &metadata, &tensors).unwrap();
        file.into_inner()
    }
}

/// A file that is gone after the test.
struct TempFile(PathBuf);

impl TempFile {
    fn new(name: &str, bytes: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("kvferry-{}-{name}.gguf", std::process::id()));
        std::fs::write(&path, bytes).unwrap();
        Self(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        // Left behind in the temporary folder at worst.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn load(name: &str, bytes: &[u8]) -> Result<(), String> {
    let file = TempFile::new(name, bytes);
    Model::load(&file.0, &mut |_, _| {}).map(|_| ()).map_err(|error| error.to_string())
}

#[test]
fn a_good_file_is_read() {
    let file = TempFile::new("good", &Parts::good().bytes());
    let (model, tokenizer) = Model::load(&file.0, &mut |_, _| {}).unwrap();
    assert_eq!((model.config().head_dim, model.config().vocab), (16, 96));
    assert_eq!(tokenizer.encode("he").unwrap().last(), Some(&95));
    assert!(tokenizer.is_end(0) && !tokenizer.is_end(1));
}

type Change = fn(&mut Parts);

/// Changes a good file in one way each, and looks for the words that the refusal must have.
fn assert_refused(cases: &[(&str, Change, &[&str])]) {
    for (name, change, wants) in cases {
        let mut parts = Parts::good();
        change(&mut parts);
        let error = load(&name.replace(' ', "-"), &parts.bytes()).expect_err(name);
        for want in wants.iter().chain(&[".gguf"]) {
            assert!(error.contains(want), "{name}: {want:?} is not in {error:?}");
        }
    }
}

#[test]
fn wrong_metadata_is_refused_by_its_key() {
    assert_refused(&[
        ("no architecture", |p| _ = p.metadata.remove("general.architecture"), &["general.architecture", "missing"]),
        (
            "another architecture",
            |p| _ = p.metadata.insert("general.architecture".into(), Value::String("mamba".into())),
            &["\"mamba\" is not supported", "llama"],
        ),
        ("no layers key", |p| _ = p.metadata.remove("llama.block_count"), &["llama.block_count", "missing"]),
        (
            "layers as text",
            |p| _ = p.metadata.insert("llama.block_count".into(), Value::String("1".into())),
            &["llama.block_count", "not a u64"],
        ),
        (
            "no layers",
            |p| _ = p.metadata.insert("llama.block_count".into(), Value::U32(0)),
            &["llama.block_count", "0 is out of range"],
        ),
        (
            "a layer too many",
            |p| _ = p.metadata.insert("llama.block_count".into(), Value::U32(2)),
            &["blk.1.attn_norm.weight is missing", "[32]"],
        ),
        (
            "heads that do not divide",
            |p| _ = p.metadata.insert("llama.attention.head_count_kv".into(), Value::U32(3)),
            &["llama.attention.head_count_kv", "does not divide the 2"],
        ),
        (
            "no heads",
            |p| _ = p.metadata.insert("llama.attention.head_count".into(), Value::U32(0)),
            &["llama.attention.head_count", "out of range"],
        ),
        (
            "a width that does not divide",
            |p| _ = p.metadata.insert("llama.embedding_length".into(), Value::U32(40)),
            &["llama.embedding_length", "blocks of 32"],
        ),
        (
            "scaled positions",
            |p| _ = p.metadata.insert("llama.rope.scaling.type".into(), Value::String("yarn".into())),
            &["llama.rope.scaling.type", "yarn"],
        ),
        (
            "experts",
            |p| _ = p.metadata.insert("llama.expert_count".into(), Value::U32(8)),
            &["llama.expert_count", "8 is not supported"],
        ),
        (
            "a negative base",
            |p| _ = p.metadata.insert("llama.rope.freq_base".into(), Value::F32(-1.0)),
            &["llama.rope.freq_base", "-1"],
        ),
    ]);
}

#[test]
fn a_wrong_tensor_or_tokenizer_is_refused_by_its_name() {
    assert_refused(&[
        ("no tensor", |p| _ = p.tensors.remove("blk.0.ffn_up.weight"), &["blk.0.ffn_up.weight is missing", "[64, 32]"]),
        (
            "a tensor of another shape",
            |p| _ = p.tensors.insert("blk.0.attn_k.weight".into(), (vec![32, 32], vec![0.0; 1024])),
            &["blk.0.attn_k.weight", "[32, 32]", "[16, 32]"],
        ),
        (
            "a norm that is not a number",
            |p| p.tensors.get_mut("output_norm.weight").unwrap().1[3] = f32::NAN,
            &["output_norm.weight", "number 3 is NaN"],
        ),
        ("no tokens", |p| _ = p.metadata.remove("tokenizer.ggml.tokens"), &["tokenizer", "tokenizer.ggml.tokens"]),
        (
            "another tokenizer",
            |p| _ = p.metadata.insert("tokenizer.ggml.model".into(), Value::String("llama".into())),
            &["tokenizer", "unsupported tokenizer model `llama`", "gpt2"],
        ),
        (
            "an alignment of 0",
            |p| _ = p.metadata.insert("general.alignment".into(), Value::U32(0)),
            &["not a readable GGUF file"],
        ),
    ]);
}

#[test]
fn a_file_that_is_no_gguf_file_is_refused() {
    for (name, bytes) in [("empty", &b""[..]), ("text", b"It was a dark and stormy night; the rain fell in torrents.")]
    {
        let error = load(name, bytes).expect_err(name);
        assert!(error.contains("not a readable GGUF file"), "{name}: {error}");
    }
    let error = Model::load("/nonexistent/model.gguf".as_ref(), &mut |_, _| {}).err().unwrap().to_string();
    assert!(error.contains("/nonexistent/model.gguf") && error.contains("embedded"), "{error}");
    let error = Model::load(&std::env::temp_dir(), &mut |_, _| {}).err().unwrap().to_string();
    assert!(error.contains("cannot be read"), "{error}");
}

#[test]
fn a_file_that_was_cut_anywhere_is_refused() {
    let bytes = Parts::good().bytes();
    // The last tensor is padded: a cut in its padding takes nothing away.
    for cut in (0..bytes.len() - 32).step_by(97) {
        load("cut", &bytes[..cut]).expect_err("a cut file");
    }
}

#[test]
fn a_damaged_file_never_panics() {
    let good = Parts::good().bytes();
    let mut state = 7_u64;
    for _ in 0..400 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut bytes = good.clone();
        // Header and metadata lie in the first part; that is where lengths and types are.
        let at = (state >> 33) as usize % 3000;
        bytes[at] ^= 1 << (state >> 30 & 7);
        // Either is right: not every bit matters.
        let _ = load("damaged", &bytes);
    }
}
