use super::*;

fn manifest() -> Manifest {
    Manifest {
        model: "SmolLM2-135M-Instruct".into(),
        model_fingerprint: Fingerprint([7; 32]),
        kv_dtype: KvDtype::F16,
        layers: 30,
        kv_heads: 3,
        head_size_k: 64,
        head_size_v: 64,
        planes: Planes::KeyValue,
        rope: Rope {
            style: RopeStyle::Half,
            theta_bits: 100_000.0f64.to_bits(),
            rotary_elements: 64,
            scaling: "none".into(),
        },
        scales: Scales { per: ScalePer::None, fingerprint: Fingerprint::default() },
        hash_scheme: "h1".into(),
        digest_scheme: "d1".into(),
        options: Options::default(),
    }
}

fn options(pairs: &[(&str, &str)]) -> Options {
    Options::new(pairs.iter().map(|&(name, value)| (name.into(), value.into())).collect()).unwrap()
}

#[test]
fn equal_manifests_match() {
    assert_eq!(compare(&manifest(), &manifest()), Ok(()));
}

#[test]
fn each_field_that_differs_is_named_with_both_values() {
    type Change = fn(&mut Manifest);
    let cases: [(&str, Change, &str, &str); 17] = [
        (
            "model_fingerprint",
            |m| m.model_fingerprint.0[31] = 0xab,
            "0707070707070707070707070707070707070707070707070707070707070707",
            "07070707070707070707070707070707070707070707070707070707070707ab",
        ),
        ("kv_dtype", |m| m.kv_dtype = KvDtype::Bf16, "F16", "Bf16"),
        ("layers", |m| m.layers = 32, "30", "32"),
        ("kv_heads", |m| m.kv_heads = 9, "3", "9"),
        ("head_size_k", |m| m.head_size_k = 128, "64", "128"),
        ("head_size_v", |m| m.head_size_v = 0, "64", "0"),
        ("planes", |m| m.planes = Planes::Latent, "KeyValue", "Latent"),
        ("rope.style", |m| m.rope.style = RopeStyle::Interleaved, "Half", "Interleaved"),
        ("rope.theta", |m| m.rope.theta_bits = 10_000.5f64.to_bits(), "100000", "10000.5"),
        ("rope.rotary_elements", |m| m.rope.rotary_elements = 32, "64", "32"),
        ("rope.scaling", |m| m.rope.scaling = "llama3".into(), "\"none\"", "\"llama3\""),
        ("scales.per", |m| m.scales.per = ScalePer::Head, "None", "Head"),
        (
            "scales.fingerprint",
            |m| m.scales.fingerprint = Fingerprint([0x11; 32]),
            "0000000000000000000000000000000000000000000000000000000000000000",
            "1111111111111111111111111111111111111111111111111111111111111111",
        ),
        ("hash_scheme", |m| m.hash_scheme = "h2".into(), "\"h1\"", "\"h2\""),
        ("digest_scheme", |m| m.digest_scheme = "d2".into(), "\"d1\"", "\"d2\""),
        ("options.lora", |m| m.options = options(&[("lora", "a")]), "absent", "\"a\""),
        ("rope.theta", |m| m.rope.theta_bits = f64::NAN.to_bits(), "100000", "NaN"),
    ];
    for (field, change, ours, theirs) in cases {
        let mut changed = manifest();
        change(&mut changed);
        let mismatch = Mismatch { field: field.into(), ours: ours.into(), theirs: theirs.into() };
        assert_eq!(compare(&manifest(), &changed), Err(vec![mismatch]));
    }
}

#[test]
fn a_name_counts_only_where_no_fingerprint_says_that_the_weights_are_equal() {
    let (mut ours, mut theirs) = (manifest(), Manifest { model: "x".into(), ..manifest() });
    assert_eq!(compare(&ours, &theirs), Ok(()));
    let fields = |ours: &Manifest, theirs: &Manifest| -> Vec<String> {
        compare(ours, theirs).unwrap_err().into_iter().map(|mismatch| mismatch.field).collect()
    };
    theirs.model_fingerprint = Fingerprint([8; 32]);
    assert_eq!(fields(&ours, &theirs), ["model", "model_fingerprint"]);
    // One name, other weights.
    assert_eq!(fields(&ours, &Manifest { model: ours.model.clone(), ..theirs.clone() }), ["model_fingerprint"]);
    (ours.model_fingerprint, theirs.model_fingerprint) = Default::default();
    assert_eq!(fields(&ours, &theirs), ["model"]);
}

#[test]
fn all_mismatches_are_named_at_once() {
    let ours = Manifest { options: options(&[("a", "1"), ("b", "2")]), ..manifest() };
    let theirs = Manifest { layers: 1, kv_heads: 1, options: options(&[("b", "3"), ("c", "4")]), ..manifest() };
    let mismatches = compare(&ours, &theirs).unwrap_err();
    let fields: Vec<&str> = mismatches.iter().map(|mismatch| mismatch.field.as_str()).collect();
    assert_eq!(fields, ["layers", "kv_heads", "options.a", "options.b", "options.c"]);
    assert_eq!(mismatches[0].to_string(), "layers: ours is 30, theirs is 1");
}

#[test]
fn the_number_of_options_is_limited() {
    let many: BTreeMap<Text, Text> = (0..33).map(|n| (Text::from(n.to_string()), Text::default())).collect();
    assert_eq!(Options::new(many), Err(TooManyOptions { found: 33, limit: 32 }));
}
