//! Tables in texts that must say what the code says.

use kvferry::config::{KEYS, table};

/// Keys that vLLM says itself, or that can have one value only there.
const NOT_IN_VLLM: [&str; 13] = [
    "engine_id",
    "role",
    "order",
    "tp_size",
    "tp_rank",
    "pp_rank",
    "transport",
    "layerwise",
    "load_failure_policy",
    "same_host",
    "staging_bytes",
    "tier_bytes",
    "write_back_blocks",
];

#[test]
fn the_python_readme_has_the_keys_that_can_be_set_in_vllm() {
    let text = include_str!("../python/README.md");
    for key in KEYS {
        let line = format!("| `{}` |", key.name);
        let wanted = table().lines().find(|row| row.starts_with(&line)).expect("each key has a row").to_owned();
        let is_there = text.lines().any(|row| row == wanted);
        assert_eq!(is_there, !NOT_IN_VLLM.contains(&key.name), "in connector/python/README.md:\n{wanted}");
    }
}
