//! Tables of good and bad input.

use std::error::Error;
use std::num::NonZeroU16;
use std::time::Duration;

use kvferry_protocol::Incarnation;

use super::*;

const SECRET: &str = "correct horse battery staple";
const BASE: &str = "engine_id = 'p-0'\nrole = 'prefill'\n";

fn env(pairs: &[(&str, &str)]) -> Vec<(OsString, OsString)> {
    pairs.iter().map(|(name, value)| (name.into(), value.into())).collect()
}

fn load(toml: &str, pairs: &[(&str, &str)]) -> Result<ConnectorConfig, ConfigError> {
    let mut raw = RawConfig::from_toml(toml)?;
    raw.overlay_env(env(pairs))?;
    ConnectorConfig::try_from((raw, Incarnation::new(7)))
}

/// The error with its causes, as a program prints it.
fn told(error: &ConfigError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

#[test]
fn the_least_configuration_has_the_documented_defaults() {
    let config = load(BASE, &[("KVFERRY_PSK", SECRET)]).unwrap();
    assert_eq!(config.peer().to_string(), "p-0#7/pp0tp0");
    assert_eq!((config.role(), config.order()), (Role::Prefill, TransferOrder::DecodeFirst));
    assert_eq!((config.tp_size().get(), config.layerwise()), (1, true));
    assert_eq!(config.load_failure_policy(), LoadFailurePolicy::Recompute);
    let network = config.network();
    assert_eq!((network.transport, network.lanes), (TransportKind::Tcp, None));
    assert_eq!((network.advertise, network.link_gbps, network.peers.len()), (None, None, 0));
    assert_eq!(network.listen.to_string(), "127.0.0.1:0");
    assert_eq!(network.psk.as_ref().unwrap().expose(), SECRET.as_bytes());
    let Deadlines { transfer, progress, lease_ttl, verdict, absent, silence } = *config.deadlines();
    let spans = [transfer, progress, lease_ttl, verdict, absent, silence];
    assert_eq!(spans.map(|span| span.as_secs()), [30, 5, 30, 5, 5, 10]);
    let limits = *config.limits();
    assert_eq!((limits.movers.get(), limits.posts_in_flight.get(), config.layer_group()), (2, 8, None));
    let Limits { max_transfers, chunk_bytes, packed_run_bytes, slab_pool_bytes, tier_bytes, write_back_blocks, .. } =
        limits;
    assert_eq!(limits.staging_bytes, 256 << 20);
    assert_eq!((max_transfers.get(), packed_run_bytes), (1024, None));
    assert_eq!((chunk_bytes, slab_pool_bytes, tier_bytes, write_back_blocks), (4 << 20, 64 << 20, 0, 0));
}

#[test]
fn every_key_can_stand_in_the_file_and_in_the_environment() {
    let all = [
        ("engine_id", "'d.1'"),
        ("role", "'both'"),
        ("order", "'prefill-first'"),
        ("tp_size", "4"),
        ("tp_rank", "3"),
        ("pp_rank", "2"),
        ("transport", "'loopback'"),
        ("listen", "'[::]:7400'"),
        ("advertise", "'[fd00::1]:7400'"),
        ("rails", "['10.0.0.8']"),
        ("peers", "['10.0.0.1:1', '10.0.0.2:2']"),
        ("psk_file", "'Cargo.toml'"),
        ("psk_also_file", "'Cargo.toml'"),
        ("tls_certificate_file", "'Cargo.toml'"),
        ("tls_key_file", "'Cargo.toml'"),
        ("tls_authority_file", "'Cargo.toml'"),
        ("tls_names", "'engine'"),
        ("plain_payload", "true"),
        ("lanes", "2"),
        ("paths", "['uds', 'rdma', 'tcp']"),
        ("same_host", "'in-place'"),
        ("rdma_devices", "['mlx5_0']"),
        ("rdma_gid_index", "3"),
        ("link_gbps", "12.5"),
        ("layerwise", "false"),
        ("load_failure_policy", "'fail'"),
        ("transfer_deadline_ms", "1000"),
        ("progress_deadline_ms", "200"),
        ("lease_ttl_ms", "300"),
        ("verdict_timeout_ms", "400"),
        ("absent_deadline_ms", "500"),
        ("layer_group", "3"),
        ("silence_deadline_ms", "600"),
        ("max_transfers", "5"),
        ("chunk_bytes", "8192"),
        ("packed_run_bytes", "0"),
        ("movers", "3"),
        ("posts_in_flight", "4"),
        ("slab_pool_bytes", "16384"),
        ("tier_bytes", "65536"),
        ("write_back_blocks", "4"),
        ("staging_bytes", "1048576"),
    ];
    assert_eq!(all.map(|(name, _)| name).as_slice(), KEYS.iter().map(|key| key.name).collect::<Vec<_>>());
    let toml: String = all.iter().map(|(name, value)| format!("{name} = {value}\n")).collect();
    let variables: Vec<(OsString, OsString)> = KEYS
        .iter()
        .zip(all)
        .map(|(key, (_, value))| (key.variable().into(), value.replace(['\'', '[', ']'], "").into()))
        // The brackets of an IPv6 address belong to it.
        .map(|(name, value): (OsString, OsString)| match name.to_str() {
            Some("KVFERRY_LISTEN") => (name, "[::]:7400".into()),
            Some("KVFERRY_ADVERTISE") => (name, "[fd00::1]:7400".into()),
            _ => (name, value),
        })
        .collect();
    let file = RawConfig::from_toml(&toml).unwrap();
    let mut environment = RawConfig::default();
    environment.overlay_env(variables).unwrap();
    assert_eq!(file, environment);
    // What these name is read where it stands, and this file holds nothing of the kind.
    // Nor is there a tier beside reading in place.
    let mut raw = RawConfig { psk_file: None, psk_also_file: None, tls_names: None, same_host: None, ..file };
    (raw.tls_certificate_file, raw.tls_key_file, raw.tls_authority_file) = (None, None, None);
    let config = ConnectorConfig::try_from((raw, Incarnation::new(1))).unwrap();
    assert_eq!(config.peer().to_string(), "d.1#1/pp2tp3");
    assert_eq!(config.deadlines().verdict, Duration::from_millis(400));
    assert_eq!(config.network().peers[1].to_string(), "10.0.0.2:2");
    assert_eq!(config.limits().packed_run_bytes, Some(0));
    assert_eq!(config.layer_group().map(NonZeroU16::get), Some(3));
    assert_eq!((config.limits().movers.get(), config.limits().posts_in_flight.get()), (3, 4));
}

#[test]
fn the_environment_wins_over_the_file_and_the_program_over_both() {
    let mut raw = RawConfig::from_toml("engine_id = 'file'\nlanes = 2\nlease_ttl_ms = 1").unwrap();
    let others = [("KVFERRY_SERVICE_HOST", "10.0.0.1"), ("LANES", "7")];
    raw.overlay_env(env(&[&[("KVFERRY_ENGINE_ID", "env"), ("KVFERRY_LANES", " 3 ")], &others[..]].concat())).unwrap();
    assert_eq!((raw.engine_id.as_deref(), raw.lanes, raw.lease_ttl_ms), (Some("env"), Some(3), Some(1)));
    raw.lanes = Some(5);
    let raw = RawConfig { role: Some("decode".into()), transport: Some("loopback".into()), ..raw };
    let config = ConnectorConfig::try_from((raw, Incarnation::new(1))).unwrap();
    assert_eq!(config.network().lanes.map(NonZeroU16::get), Some(5));
}

#[test]
fn a_shorter_transfer_deadline_shortens_what_must_lie_within_it() {
    let config = load(&format!("{BASE}transfer_deadline_ms = 50"), &[("KVFERRY_PSK", SECRET)]).unwrap();
    let Deadlines { transfer, progress, verdict, .. } = *config.deadlines();
    assert_eq!([transfer, progress, verdict], [Duration::from_millis(50); 3]);
}

#[test]
fn a_bad_value_is_refused_with_its_key_what_was_found_and_what_to_write() {
    let cases = [
        // What is in the file beside the base, the words of the error.
        ("engine_id = 'a'", ["line 3", "engine_id", "duplicate"]),
        ("tp_rnk = 1", ["line 3", "tp_rnk", "tp_rank"]),
        ("\n\nlanes = 'four'", ["line 5", "lanes", "string \"four\", expected a whole number"]),
        ("lanes = -1", ["line 3", "lanes", "integer `-1`, expected a whole number"]),
        ("lanes = 4 5", ["line 3", "lanes", "expected"]),
        ("lanes = 0", ["configuration, line 3: lanes = 0", "1 to 64", ""]),
        ("lanes = 65", ["lanes = 65", "1 to 64", ""]),
        ("tp_size = 0", ["tp_size = 0", "1 to 1024", ""]),
        ("tp_size = 4\ntp_rank = 4", ["tp_rank = 4", "less than tp_size, which is 4", "from 0"]),
        ("tp_rank = 70000", ["tp_rank = 70000", "0 to 1023", ""]),
        ("pp_rank = 1024", ["pp_rank = 1024", "0 to 1023", ""]),
        ("order = 'push'", ["order = \"push\"", "decode-first, prefill-first", ""]),
        ("load_failure_policy = ''", ["load_failure_policy = \"\"", "recompute, fail", ""]),
        ("transport = 'rdma'", ["transport = \"rdma\"", "tcp, loopback", ""]),
        ("listen = 'localhost:1'", ["listen = \"localhost:1\"", "IP:port", "names are not looked up"]),
        ("listen = '0.0.0.0:7400'", ["listen = 0.0.0.0:7400", "set advertise", ""]),
        ("advertise = '0.0.0.0:7400'", ["advertise = 0.0.0.0:7400", "dialled", ""]),
        ("peers = ['1.2.3.4:5', '1.2.3.4:0']", ["peers = 1.2.3.4:0", "port 0", ""]),
        ("peers = '1.2.3.4:5'", ["peers", "expected a list", ""]),
        ("listen = '10.0.0.7:1'\nadvertise = '127.0.0.1:1'", ["advertise = 127.0.0.1:1", "find themselves", ""]),
        ("paths = ['tpc']", ["paths = tpc", "shm, cma, uds, rdma, ucx and tcp", ""]),
        ("paths = []", ["paths = nothing", "shm, cma, uds, rdma, ucx and tcp", ""]),
        ("paths = ['loopback']", ["paths = loopback", "shm, cma, uds, rdma, ucx and tcp", ""]),
        ("paths = ['uds', 'rdma']", ["paths = rdma", "write tcp beside rdma", ""]),
        ("paths = ['ucx']", ["paths = ucx", "write tcp beside ucx", ""]),
        ("rdma_gid_index = 256", ["rdma_gid_index = 256", "0 to 255", ""]),
        ("link_gbps = 0.0", ["link_gbps = 0", "more than 0", ""]),
        ("link_gbps = nan", ["link_gbps = NaN", "more than 0", ""]),
        ("link_gbps = inf", ["link_gbps = inf", "at most 100000", ""]),
        ("lease_ttl_ms = 0", ["lease_ttl_ms = 0", "1 to 3600000", ""]),
        ("transfer_deadline_ms = 3600001", ["transfer_deadline_ms = 3600001", "1 to 3600000", ""]),
        ("progress_deadline_ms = 30001", ["progress_deadline_ms = 30001", "at most transfer_deadline_ms", "30000"]),
        ("verdict_timeout_ms = 30001", ["verdict_timeout_ms = 30001", "at most transfer_deadline_ms", "30000"]),
        ("max_transfers = 65537", ["max_transfers = 65537", "1 to 65536", ""]),
        ("chunk_bytes = 100", ["chunk_bytes = 100", "4096 to 1073741824", ""]),
        ("slab_pool_bytes = 8388607", ["slab_pool_bytes = 8388607", "at least 8388608", "two chunks"]),
        ("packed_run_bytes = 4194305", ["packed_run_bytes = 4194305", "0 to 4194304", ""]),
    ];
    for (line, words) in cases {
        let error = load(&format!("{BASE}{line}"), &[("KVFERRY_PSK", SECRET)]).expect_err(line);
        for word in words {
            assert!(told(&error).contains(word), "{line:?} should name {word:?}: {}", told(&error));
        }
    }
}

#[test]
fn what_is_missing_or_mistyped_in_the_environment_is_named() {
    type Case<'a> = (&'a str, &'a [(&'a str, &'a str)], [&'a str; 2]);
    let psk = ("KVFERRY_PSK", SECRET);
    let cases: [Case<'_>; 11] = [
        ("role = 'both'", &[psk], ["engine_id is missing", "KVFERRY_ENGINE_ID"]),
        ("engine_id = 'a'", &[psk], ["role is missing", "prefill, decode or both"]),
        ("engine_id = 'a b'\nrole = 'both'", &[psk], ["engine_id = \"a b\"", "A-Z"]),
        ("engine_id = 'a'\nrole = 'master'", &[psk], ["role = \"master\"", "prefill, decode, both"]),
        (BASE, &[], ["psk_file is missing", "KVFERRY_PSK"]),
        (BASE, &[psk, ("KVFERRY_LANES", "many")], ["KVFERRY_LANES = \"many\"", "whole number"]),
        (BASE, &[psk, ("KVFERRY_LANES", "0")], ["KVFERRY_LANES = 0", "1 to 64"]),
        (BASE, &[psk, ("KVFERRY_LANES", "-1")], ["KVFERRY_LANES = \"-1\"", "not negative"]),
        (BASE, &[psk, ("KVFERRY_LINK_GBPS", "25G")], ["KVFERRY_LINK_GBPS = \"25G\"", "without a unit"]),
        (BASE, &[psk, ("KVFERRY_LAYERWISE", "yes")], ["KVFERRY_LAYERWISE = \"yes\"", "true or false"]),
        (BASE, &[psk, ("KVFERRY_PSK_FILE", "key")], ["KVFERRY_PSK_FILE = \"key\"", "unset this or KVFERRY_PSK"]),
    ];
    for (toml, pairs, words) in cases {
        let error = load(toml, pairs).expect_err(words[0]);
        for word in words {
            assert!(told(&error).contains(word), "{toml:?} {pairs:?} should name {word:?}: {}", told(&error));
        }
    }
}

#[test]
fn the_pre_shared_key_is_read_from_a_file_without_its_line_end() {
    let folder = std::env::temp_dir().join(format!("kvferry-config-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("psk");
    let toml = format!("{BASE}psk_file = {path:?}");
    std::fs::write(&path, format!("{SECRET}\r\n")).unwrap();
    let config = load(&toml, &[]).unwrap();
    assert_eq!(config.network().psk.as_ref().unwrap().expose(), SECRET.as_bytes());

    std::fs::write(&path, "short\n").unwrap();
    let error = told(&load(&toml, &[]).unwrap_err());
    assert!(
        error.contains(&format!("psk_file {} has 5 bytes", path.display())) && error.contains("16 to 64"),
        "{error}"
    );
    std::fs::write(&path, vec![b'x'; 3000]).unwrap();
    let error = told(&load(&toml, &[]).unwrap_err());
    assert!(error.contains("more than 128 bytes"), "{error}");
    std::fs::remove_dir_all(&folder).unwrap();
    let error = told(&load(&toml, &[]).unwrap_err());
    assert!(error.contains("psk_file names") && error.contains("No such file"), "{error}");
}

#[test]
fn certificates_are_files_that_fit_each_other_and_replace_the_key_or_go_beside_it() {
    use kvferry_transport::testing::certificates::{authority_pem, node_pem};

    let folder = std::env::temp_dir().join(format!("kvferry-config-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = |name: &str| folder.join(name);
    let (certificate, key) = node_pem("a");
    for (name, text) in [
        ("certificate", certificate),
        ("key", key),
        ("authority", &authority_pem(&["authority", "other"])),
        ("another", node_pem("b").1),
        ("nothing", b"\n"),
    ] {
        std::fs::write(path(name), text).unwrap();
    }
    let toml = |certificate: &str, key: &str, authority: &str| {
        let [certificate, key, authority] = [certificate, key, authority].map(path);
        format!(
            "{BASE}tls_certificate_file = {certificate:?}\ntls_key_file = {key:?}\ntls_authority_file = {authority:?}\n"
        )
    };
    let whole = toml("certificate", "key", "authority");
    let config = load(&whole, &[]).unwrap();
    let files = config.network().tls.as_ref().unwrap();
    assert_eq!((files.names, &files.key, config.network().psk.is_none()), (Names::Any, &path("key"), true));
    let config = load(&whole, &[("KVFERRY_PSK", SECRET), ("KVFERRY_TLS_NAMES", "engine")]).unwrap();
    assert_eq!(config.network().tls.as_ref().unwrap().names, Names::Engine);
    assert!(config.network().psk.is_some());
    for (toml, words) in [
        (toml("missing", "key", "authority"), ["tls_certificate_file names", "No such file"]),
        (toml("nothing", "key", "authority"), ["tls_certificate_file names", "there is none"]),
        (toml("certificate", "another", "authority"), ["tls_key_file names", "the certificate's own"]),
        (toml("certificate", "key", "nothing"), ["tls_authority_file names", "there is none"]),
        (format!("{BASE}tls_key_file = {:?}", path("key")), ["tls_certificate_file is missing", "all three"]),
        (format!("{BASE}tls_names = 'any'"), ["tls_certificate_file is missing", "all three"]),
        (format!("{whole}tls_names = 'all'"), ["tls_names = \"all\"", "any, engine"]),
    ] {
        let error = told(&load(&toml, &[("KVFERRY_PSK", SECRET)]).unwrap_err());
        assert!(words.iter().all(|word| error.contains(word)), "{words:?}: {error}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_secret_is_shown_by_nothing() {
    let config = load(BASE, &[("KVFERRY_PSK", SECRET)]).unwrap();
    let mut raw = RawConfig::default();
    raw.overlay_env(env(&[("KVFERRY_PSK", SECRET)])).unwrap();
    let misplaced = load(&format!("{BASE}psk = '{SECRET}'"), &[]).unwrap_err();
    assert!(told(&misplaced).contains("line 3, key \"psk\": a secret does not belong here"), "{misplaced}");
    let unclosed = load(&format!("{BASE}psk = '{SECRET}\nlanes = 1"), &[]).unwrap_err();
    let short = load(BASE, &[("KVFERRY_PSK", "hunter2")]).unwrap_err();
    for shown in [
        format!("{config:?}{raw:?}"),
        format!("{misplaced:?}{}", told(&misplaced)),
        format!("{unclosed:?}{}", told(&unclosed)),
        format!("{short:?}{}", told(&short)),
    ] {
        assert!(!shown.contains("horse") && !shown.contains("hunter2"), "{shown}");
    }
}

#[test]
fn the_configuration_file_is_read_with_its_limits() {
    let folder = std::env::temp_dir().join(format!("kvferry-config-file-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("kvferry.toml");
    std::fs::write(&path, format!("{BASE}transport = 'loopback'\n# ä\n")).unwrap();
    let config = ConnectorConfig::load(Some(&path), env(&[("KVFERRY_ROLE", "both")]), Incarnation::new(1)).unwrap();
    assert_eq!(config.role(), Role::Both);
    let cases: [(Vec<u8>, &str); 3] = [
        (vec![b'#'; (1 << 20) + 1], "more than 1048576 bytes"),
        (vec![0xff], "utf-8"),
        (b"lanes = 1\nlames = 1".to_vec(), "kvferry.toml, line 2, key \"lames\""),
    ];
    for (bytes, word) in cases {
        std::fs::write(&path, bytes).unwrap();
        let error = told(&ConnectorConfig::load(Some(&path), [], Incarnation::new(1)).unwrap_err());
        assert!(error.contains(word), "{error}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_value_that_the_program_set_is_not_said_to_be_in_the_file() {
    let mut raw = RawConfig::from_toml(&format!("{BASE}transport = 'loopback'\nlanes = 2")).unwrap();
    raw.lanes = Some(65);
    let error = ConnectorConfig::try_from((raw, Incarnation::new(1))).unwrap_err().to_string();
    assert!(error.starts_with("lanes = 65"), "{error}");
}

#[test]
fn the_table_of_keys_has_a_row_for_each() {
    assert_eq!(table().lines().count(), KEYS.len() + 2);
    assert!(table().contains("| `lanes` | 2 on one host, 4 to others | Data connections to each peer, 1 to 64. |"));
}

#[test]
fn a_program_sets_keys_by_name_and_an_error_says_where() {
    let mut raw = RawConfig::from_toml(BASE).unwrap();
    raw.psk = Some(PreSharedKey::new(SECRET.as_bytes(), "test").unwrap());
    raw.set_from("options", "lease_ttl_ms", "2000").unwrap();
    raw.set_from("options", "peers", "10.0.0.1:1,10.0.0.2:2").unwrap();
    let config = ConnectorConfig::try_from((raw.clone(), Incarnation::new(7))).unwrap();
    assert_eq!((config.deadlines().lease_ttl.as_secs(), config.network().peers.len()), (2, 2));
    for (name, text, want) in [
        ("lease_ttl_ms", "soon", "options: lease_ttl_ms = \"soon\": write a whole number"),
        ("psk", SECRET, "name a file with psk_file"),
        ("lease_ttl", "1", "the keys are engine_id, role"),
    ] {
        let error = told(&raw.set_from("options", name, text).unwrap_err());
        assert!(error.contains(want) && !error.contains(SECRET), "{error}");
    }
    raw.set_from("options", "lanes", "65").unwrap();
    let error = told(&ConnectorConfig::try_from((raw, Incarnation::new(7))).unwrap_err());
    assert!(error.contains("options: lanes = 65"), "{error}");
}
