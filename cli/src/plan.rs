//! `kvferry plan`: how large a model's KV blocks are, how many fit, and how many requests these hold.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

use kvferry::sizing::{Attention, Budget, CacheShape, Geometry, GroupSizing, Placement, Sizing};

use crate::args::PlanArgs;
use crate::error::CliError;
use crate::size::Size;

/// Sizes the cache and prints it.
pub(crate) fn run(options: &PlanArgs) -> Result<ExitCode, CliError> {
    print!("{}", plan(options)?);
    Ok(ExitCode::SUCCESS)
}

fn plan(options: &PlanArgs) -> Result<String, CliError> {
    let file = if options.config.is_dir() { options.config.join("config.json") } else { options.config.clone() };
    let name = file.display().to_string();
    let json = std::fs::read_to_string(&file).map_err(CliError::io(format!("reading {name}")))?;
    let refuse = |source| CliError::Sizing { config: name.clone(), source };
    let geometry = Geometry::from_config(&json).map_err(refuse)?;
    let beside = file.parent().map_or(0, safetensors_bytes).div_ceil(u64::from(options.tp));
    let weights_bytes = options.weights.map_or(beside, |weights| weights.0);
    let cache =
        CacheShape { tp_size: options.tp, tokens_per_block: options.block_tokens, element_bytes: options.kv_bytes };
    let budget = Budget {
        memory_bytes: options.memory.0,
        share: options.share,
        weights_bytes,
        activations_bytes: options.activations.0,
        graphs_bytes: options.graphs.0,
    };
    let size = |placement| Sizing::new(&geometry, &cache, &budget, placement).map_err(refuse);
    let packed = Placement::Packed { align_bytes: 1 };
    let sized = Sized { packed: size(packed)?, layered: size(Placement::PerLayer)?, grouped: None };
    let grouped = || {
        let in_flight = options.step_tokens as usize;
        GroupSizing::new(&json, &geometry, &cache, &budget, packed, in_flight).map_err(refuse)
    };
    let grouped = if geometry.window_layers > 0 { Some(grouped()?) } else { None };
    Ok(table(options, &geometry, weights_bytes, &Sized { grouped, ..sized }))
}

/// A cache in the ways in which it can lie.
struct Sized {
    packed: Sizing,
    layered: Sizing,
    /// Of models with windows.
    grouped: Option<GroupSizing>,
}

fn table(options: &PlanArgs, geometry: &Geometry, weights_bytes: u64, sized: &Sized) -> String {
    let Sized { packed, layered, grouped } = sized;
    let mut rows: Vec<(&str, String)> = Vec::new();
    let heads = match geometry.attention {
        Attention::Heads { kv_heads, head_size, head_size_v } if head_size == head_size_v => {
            format!("{kv_heads} KV heads of {head_size}")
        }
        Attention::Heads { kv_heads, head_size, head_size_v } => {
            format!("{kv_heads} KV heads of {head_size}, values of {head_size_v}")
        }
        Attention::Latent { width } => format!("a latent vector of {width}, whole on every rank"),
    };
    rows.push(("model", format!("{} layers, {heads}", geometry.layers)));
    if let Some(GroupSizing { plan, blocks, .. }) = grouped {
        let layers = plan.groups.iter().map(|group| group.layers.len()).max().unwrap_or(0);
        let window = format!(
            "{} layers need a window only: {} groups of up to {layers} layers, with {blocks} blocks of {} for all of them",
            geometry.window_layers,
            plan.groups.len(),
            binary(plan.block_bytes),
        );
        rows.push(("windows", window));
    }
    let weights = match (options.weights, weights_bytes) {
        (None, 0) => "not known, so nothing is taken off for them: give --weights".to_owned(),
        (None, bytes) => {
            format!("{} (.safetensors beside the configuration, over {} ranks)", binary(bytes), options.tp)
        }
        (Some(_), bytes) => binary(bytes),
    };
    rows.push(("weights of a rank", weights));
    rows.push(("KV of a token", format!("{} on each of {} ranks", binary(packed.token_bytes), options.tp)));
    rows.push((
        "block",
        format!(
            "{} tokens, {}; one copy is {} where layers, K and V lie apart, all of it where they are packed",
            options.block_tokens,
            binary(packed.block_bytes),
            binary(packed.run_bytes),
        ),
    ));
    rows.push(("blocks", format!("{} packed, {} layer by layer", packed.blocks, layered.blocks)));
    rows.push(("tokens", packed.tokens.to_string()));
    let lengths = options.tokens.iter().map(|tokens| {
        let whole = format!("{} at once", packed.requests_of(*tokens));
        match grouped {
            Some(grouped) => (*tokens, format!("{whole}, {} in groups", grouped.requests_of(*tokens))),
            None => (*tokens, whole),
        }
    });
    let mut text = String::new();
    for (name, value) in rows {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{name:<18}{value}");
    }
    for (tokens, requests) in lengths {
        let _ = writeln!(text, "{:<18}{requests}", format!("of {tokens} tokens"));
    }
    text
}

/// Bytes of all weights in a folder; 0 if there are none, or it cannot be read.
fn safetensors_bytes(folder: &Path) -> u64 {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let files = entries.flatten().filter(|entry| entry.path().extension().is_some_and(|end| end == "safetensors"));
    // Models are often links into a store.
    files.filter_map(|entry| std::fs::metadata(entry.path()).ok()).map(|metadata| metadata.len()).sum()
}

/// Whole bytes as a person reads them, to two places.
fn binary(bytes: u64) -> String {
    let units = [(1_u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.into_iter().find(|(unit, _)| bytes >= *unit) {
        Some((unit, name)) if !bytes.is_multiple_of(unit) => format!("{:.2} {name}", bytes as f64 / unit as f64),
        Some((unit, name)) => format!("{} {name}", bytes / unit),
        None => Size(bytes).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn planned(arguments: &[&str], config: &str, weights: Option<usize>) -> Result<String, CliError> {
        // Tests run at once, in one process.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("kvferry-plan-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("config.json"), config).unwrap();
        if let Some(bytes) = weights {
            std::fs::write(folder.join("model.safetensors"), vec![0; bytes]).unwrap();
        }
        let words = ["kvferry", "plan", folder.to_str().unwrap()].into_iter().chain(arguments.iter().copied());
        let Command::Plan(options) = Cli::try_parse_from(words).unwrap().command else { panic!("it is plan") };
        let text = plan(&options);
        std::fs::remove_dir_all(folder).unwrap();
        text
    }

    const LLAMA: &str = r#"{"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
        "dtype": "bfloat16"}"#;

    #[test]
    fn a_plan_says_what_fits() {
        let text =
            planned(&["--memory", "80GiB", "--tp", "4", "--weights", "33GiB", "--tokens", "8192,131072"], LLAMA, None);
        let text = text.unwrap();
        for line in [
            "model             80 layers, 8 KV heads of 128",
            "weights of a rank 33 GiB",
            "KV of a token     80 KiB on each of 4 ranks",
            "block             16 tokens, 1.25 MiB; one copy is 8 KiB where layers, K and V lie apart, all of it where they are packed",
            "blocks            29491 packed, 29491 layer by layer",
            "of 8192 tokens    57 at once",
            "of 131072 tokens  3 at once",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
    }

    #[test]
    fn windows_are_planned_in_groups_too() {
        let kinds = [r#""sliding_attention", "full_attention""#; 12].join(", ");
        let config = format!(
            r#"{{"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128,
            "dtype": "bfloat16", "layer_types": [{kinds}]}}"#
        );
        let options =
            ["--memory", "40GiB", "--share", "1", "--activations", "0B", "--graphs", "0B", "--tokens", "131072"];
        let text = planned(&options, &config, None).unwrap();
        for line in [
            "windows           12 layers need a window only: 2 groups of up to 12 layers, with 109226 blocks of 384 KiB for all of them",
            "of 131072 tokens  6 at once, 12 in groups",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
    }

    #[test]
    fn weights_are_those_beside_the_configuration_or_said_not_to_be_known() {
        let text = planned(&["--memory", "80GiB", "--tp", "2"], LLAMA, Some(4097)).unwrap();
        assert!(text.contains("weights of a rank 2.00 KiB (.safetensors beside"), "{text}");
        let text = planned(&["--memory", "80GiB"], LLAMA, None).unwrap();
        assert!(text.contains("weights of a rank not known"), "{text}");
    }

    #[test]
    fn what_cannot_be_planned_is_explained() {
        let refused = planned(&["--memory", "1GiB"], LLAMA, None).unwrap_err();
        assert!(crate::error::with_causes(&refused).contains("leave no block"), "{refused}");
        let refused = planned(&["--memory", "80GiB", "--tp", "3"], LLAMA, None).unwrap_err();
        assert!(crate::error::with_causes(&refused).contains("8 KV heads cannot be spread over 3 ranks"), "{refused}");
    }
}
