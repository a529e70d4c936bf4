//! Real models, and configurations that cannot be sized.

use super::*;

fn sized(config: &str, tp_size: u16, tokens_per_block: u16) -> Sizing {
    let cache = CacheShape { tp_size, tokens_per_block, element_bytes: None };
    let geometry = Geometry::from_config(config).unwrap();
    Sizing::new(&geometry, &cache, &budget(80 << 30), Placement::Packed { align_bytes: 1 }).unwrap()
}

fn budget(memory_bytes: u64) -> Budget {
    Budget { memory_bytes, share: 1.0, weights_bytes: 0, activations_bytes: 0, graphs_bytes: 0 }
}

fn grouped(layers: u32, heads: u32, kv_heads: u32, hidden: u32, head_dim: &str) -> String {
    format!(
        r#"{{"num_hidden_layers": {layers}, "num_attention_heads": {heads}, "num_key_value_heads": {kv_heads}, "hidden_size": {hidden},
            "head_dim": {head_dim}, "torch_dtype": "bfloat16"}}"#
    )
}

/// The table of vLLM's blog on its offloading connector (0.11 to 0.12): what one copy moved before, and after, of a block of 16 tokens.
/// Geometries are those of the models' own `config.json`.
#[test]
fn blocks_of_the_published_models_have_the_published_sizes() {
    let deepseek = r#"{"num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048,
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16"}"#;
    let kib = 1024.0;
    for (name, config, tp_size, tokens_per_block, old_kib, new_mib) in [
        ("DeepSeek-R1-Distill-Qwen-32B", grouped(64, 40, 8, 5120, "null"), 2, 16, 16.0, 2.0),
        ("DeepSeek-V2-Lite-Chat", deepseek.to_owned(), 1, 64, 72.0, 1.9),
        ("Llama-3.1-8B", grouped(32, 32, 8, 4096, "null"), 1, 16, 32.0, 2.0),
        ("Llama-3.2-1B", grouped(16, 32, 8, 2048, "64"), 1, 16, 16.0, 0.5),
        ("Llama-3.1-70B", grouped(80, 64, 8, 8192, "null"), 4, 16, 8.0, 1.25),
        ("Mistral-7B-v0.2", grouped(32, 32, 8, 4096, "null"), 1, 16, 32.0, 2.0),
        ("Mistral-Small-24B", grouped(40, 32, 8, 5120, "128"), 1, 16, 32.0, 2.5),
        ("Qwen2.5-1.5B", grouped(28, 12, 2, 1536, "null"), 1, 16, 8.0, 0.44),
        ("Qwen2.5-3B", grouped(36, 16, 2, 2048, "null"), 1, 16, 8.0, 0.56),
        ("Qwen2.5-7B", grouped(28, 28, 4, 3584, "null"), 1, 16, 16.0, 0.87),
        ("Qwen3-0.6B", grouped(28, 16, 8, 1024, "128"), 1, 16, 32.0, 1.75),
        ("Qwen3-1.7B", grouped(28, 16, 8, 2048, "128"), 1, 16, 32.0, 1.75),
        ("Qwen3-4B", grouped(36, 32, 8, 2560, "128"), 1, 16, 32.0, 2.25),
        // Published as 28 KB and 1.97 MB, which no geometry of 36 layers gives: eight heads of 128 make these.
        ("Qwen3-8B", grouped(36, 32, 8, 4096, "128"), 1, 16, 32.0, 2.25),
        ("Qwen3-32B", grouped(64, 64, 8, 5120, "128"), 2, 16, 16.0, 2.0),
    ] {
        let Sizing { run_bytes, block_bytes, token_bytes, .. } = sized(&config, tp_size, tokens_per_block);
        assert_eq!(run_bytes as f64 / kib, old_kib, "{name}");
        let mib = block_bytes as f64 / kib / kib;
        assert!((mib - new_mib).abs() < 0.01, "{name}: {mib} MiB");
        assert_eq!(token_bytes * u64::from(tokens_per_block), block_bytes, "{name}");
    }
}

#[test]
fn what_is_left_of_the_memory_is_blocks() {
    let config = grouped(32, 32, 8, 4096, "null");
    let geometry = Geometry::from_config(&config).unwrap();
    let cache = CacheShape { tp_size: 1, tokens_per_block: 16, element_bytes: None };
    let profile = || Ok::<_, SizingError>((15 << 30, 17 << 30));
    let measured = Budget::profiled(80 << 30, 0.9, 1 << 30, profile).unwrap();
    assert_eq!((measured.weights_bytes, measured.activations_bytes), (15 << 30, 2 << 30));
    let packed = Sizing::new(&geometry, &cache, &measured, Placement::Packed { align_bytes: 1 }).unwrap();
    assert_eq!((packed.blocks, packed.tokens, packed.requests_of(8192)), (27_648, 442_368, 54));
    assert_eq!((packed.requests_of(8193), packed.requests_of(0)), (53, 27_648), "a block that is begun is taken");
    let padded = Sizing::new(&geometry, &cache, &measured, Placement::Packed { align_bytes: 3 << 20 }).unwrap();
    assert_eq!(padded.blocks, 18_432);
    let odd = Budget { memory_bytes: measured.memory_bytes - 1, ..measured };
    let layers = Sizing::new(&geometry, &cache, &odd, Placement::PerLayer).unwrap();
    assert_eq!(layers.blocks, 27_647);
    let half = CacheShape { element_bytes: Some(1), ..cache };
    let half = Sizing::new(&geometry, &half, &measured, Placement::PerLayer).unwrap();
    assert_eq!(half.blocks, 2 * packed.blocks);
}

#[test]
fn heads_are_spread_or_kept_by_several_ranks() {
    let config = grouped(32, 32, 8, 4096, "null");
    let run = |tp_size| sized(&config, tp_size, 16).run_bytes >> 10;
    assert_eq!([1, 2, 8, 16].map(run), [32, 16, 4, 4]);
    let latent =
        r#"{"text_config": {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, "dtype": "float16"}"#;
    assert_eq!(sized(latent, 8, 1).block_bytes, 2 * 576 * 2, "a latent vector is not spread");
    let other_v = r#"{"num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 192, "v_head_dim": 128, "dtype": "bfloat16"}"#;
    assert_eq!(sized(other_v, 1, 1).block_bytes, 4 * (192 + 128) * 2);
}

#[test]
fn what_cannot_be_sized_is_refused() {
    let config = grouped(32, 32, 8, 4096, "null");
    let geometry = Geometry::from_config(&config).unwrap();
    let cache = CacheShape { tp_size: 3, tokens_per_block: 16, element_bytes: None };
    let packed = Placement::Packed { align_bytes: 1 };
    let ranks = Sizing::new(&geometry, &cache, &budget(1 << 30), packed);
    assert!(matches!(ranks, Err(SizingError::Ranks { kv_heads: 8, tp_size: 3 })));
    let none = CacheShape { tp_size: 0, ..cache };
    assert!(matches!(Sizing::new(&geometry, &none, &budget(1 << 30), packed), Err(SizingError::Ranks { .. })));
    let cache = CacheShape { tp_size: 1, ..cache };
    let small = Sizing::new(&geometry, &cache, &budget((2 << 20) - 1), packed);
    assert!(matches!(small, Err(SizingError::Memory { block_bytes, .. }) if block_bytes == 2 << 20));
    for share in [0.0, 1.01, f64::NAN] {
        let budget = Budget { share, ..budget(1 << 30) };
        assert!(matches!(Sizing::new(&geometry, &cache, &budget, packed), Err(SizingError::Share { .. })));
    }
    for (config, what) in [
        (
            r#"{"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"], "head_dim": 4, "num_attention_heads": 1,
             "dtype": "bfloat16"}"#,
            "linear_attention",
        ),
        (r#"{"num_hidden_layers": 2, "mamba_d_state": 128}"#, "mamba_d_state"),
        (r#"{"is_encoder_decoder": true}"#, "is_encoder_decoder"),
    ] {
        let refused = Geometry::from_config(config);
        assert!(matches!(&refused, Err(SizingError::Unsized { what: found }) if found == what), "{refused:?}");
    }
    for (config, key) in [
        ("{}", "num_hidden_layers"),
        (r#"{"num_hidden_layers": -1}"#, "num_hidden_layers"),
        (r#"{"num_hidden_layers": 2, "num_attention_heads": 0}"#, "num_attention_heads"),
        (r#"{"num_hidden_layers": 2, "num_attention_heads": 2}"#, "hidden_size"),
        (r#"{"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 64}"#, "dtype"),
        (r#"{"num_hidden_layers": 99999, "num_attention_heads": 2, "head_dim": 64}"#, "num_hidden_layers"),
        (r#"{"num_hidden_layers": 2, "kv_lora_rank": 512}"#, "qk_rope_head_dim"),
    ] {
        let refused = Geometry::from_config(config);
        assert!(matches!(refused, Err(SizingError::Key { key: found }) if found == key), "{config}: {refused:?}");
    }
    assert!(matches!(Geometry::from_config("[1"), Err(SizingError::Json { .. })));
}

/// What vLLM 0.32.0 answers for the same layers, 40 GiB and 8192 tokens in flight: its groups' layers, its bytes of a block, and how many
/// requests of 8192 and 131072 tokens its blocks hold. Asked by `plan` of `tests/engine_groups/reference.py`.
#[test]
fn windows_are_sized_as_vllm_sizes_them() {
    let config = |types: &[&str], heads: u32, head_dim: u32, window: u32| {
        let types = serde_json::to_string(types).unwrap();
        let layers = types.matches("attention").count();
        format!(
            r#"{{"num_hidden_layers": {layers}, "num_attention_heads": 64, "num_key_value_heads": {heads}, "head_dim": {head_dim},
            "sliding_window": {window}, "dtype": "bfloat16", "layer_types": {types}}}"#
        )
    };
    let (full, sliding) = ("full_attention", "sliding_attention");
    let gpt_oss: Vec<&str> = (0..24).map(|at| if at % 2 == 0 { sliding } else { full }).collect();
    let gemma: Vec<&str> = (0..62).map(|at| if at % 6 == 5 { full } else { sliding }).collect();
    let cache = CacheShape { tp_size: 1, tokens_per_block: 16, element_bytes: None };
    for (name, config, groups, block_bytes, blocks, requests, flat) in [
        ("gpt-oss-20b", config(&gpt_oss, 8, 64, 128), vec![12, 12], 393_216, 109_226, [106, 12], [106, 6]),
        ("gemma-3-27b", config(&gemma, 16, 128, 1024), vec![9, 9, 9, 9, 8, 8, 10], 1_310_720, 32_768, [9, 2], [10, 0]),
    ] {
        let geometry = Geometry::from_config(&config).unwrap();
        let sized = GroupSizing::new(&config, &geometry, &cache, &budget(40 << 30), Placement::PerLayer, 8192).unwrap();
        assert_eq!(sized.plan.groups.iter().map(|group| group.layers.len()).collect::<Vec<_>>(), groups, "{name}");
        assert_eq!((sized.plan.block_bytes, sized.blocks), (block_bytes, blocks), "{name}");
        assert_eq!([8192, 131_072].map(|tokens| sized.requests_of(tokens)), requests, "{name}");
        let whole = Sizing::new(&geometry, &cache, &budget(40 << 30), Placement::PerLayer).unwrap();
        assert_eq!([8192, 131_072].map(|tokens| whole.requests_of(tokens)), flat, "{name}, without groups");
    }
    let missing = config(&gpt_oss, 8, 64, 0);
    let geometry = Geometry::from_config(&missing).unwrap();
    let refused = GroupSizing::new(&missing, &geometry, &cache, &budget(40 << 30), Placement::PerLayer, 8192);
    assert!(matches!(refused, Err(SizingError::Key { key: "sliding_window" })), "{refused:?}");
}
