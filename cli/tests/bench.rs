//! The bench as a process, at sizes that take no time.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// Every transport that each host has; the others need a library or a device, and must say so where that is missing.
const TRANSPORTS: &[&str] = &["tcp", "uds", "shm"];
const MISSING: &[&str] = &["ucx", "rdma"];

const SMALL: &[&str] = &["--block", "4KiB,16KiB", "--memory", "1MiB", "--rounds", "2", "--requests", "8", "--verify"];

fn kvferry() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.env_remove("KVFERRY_PSK");
    command
}

fn bench(arguments: &[&str]) -> Output {
    kvferry().arg("bench").args(arguments).output().expect("it runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The report of a run that went well.
fn report(arguments: &[&str]) -> Value {
    let output = bench(&[SMALL, arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn check(row: &Value, transport: &str, digest: bool) {
    assert_eq!(row["transport"], transport);
    assert_eq!((&row["digest"], &row["verified"]), (&digest.into(), &true.into()), "{row}");
    for key in ["gbps_median", "gbps_best", "connect_us", "limit_gbps", "ratio", "first_block_us"] {
        assert!(row[key].as_f64().is_some_and(|value| value > 0.0), "{key} of {row}");
    }
    for key in ["one_block_us", "request_us", "limit_one_block_us", "limit_request_us"] {
        let [p50, p99, p999] = ["p50", "p99", "p999"].map(|part| row[key][part].as_f64().expect("microseconds"));
        assert!(0.0 < p50 && p50 <= p99 && p99 <= p999, "{key} of {row}");
    }
    let lent = row["lent_share"].as_f64().expect("a share");
    assert_eq!(lent > 0.5, ["shm", "cma"].contains(&transport), "{row}");
    assert!(row["limit_name"].as_str().is_some_and(|name| !name.is_empty()), "{row}");
    assert_eq!((&row["wrong_blocks"], &row["wrong_digests"]), (&0.into(), &0.into()));
}

#[test]
fn encrypted_lanes_are_measured_too() {
    for transport in TRANSPORTS {
        for direction in ["push", "both"] {
            let found = report(&["--transport", transport, "--direction", direction, "--tls"]);
            let rows = found["sizes"].as_array().expect("a list");
            assert!(!rows.is_empty());
            for row in rows {
                check(row, transport, true);
                assert_eq!(row["tls"], true);
            }
        }
    }
}

#[test]
fn every_transport_is_measured_in_every_direction_with_and_without_digests() {
    for transport in TRANSPORTS {
        for direction in ["push", "pull", "both"] {
            for digest in ["on", "off"] {
                let found = report(&["--transport", transport, "--direction", direction, "--digest", digest]);
                let rows = found["sizes"].as_array().expect("a list");
                let blocks: Vec<_> = rows.iter().map(|row| row["block_bytes"].as_u64().unwrap()).collect();
                assert_eq!(blocks, [4 << 10, 16 << 10]);
                for row in rows {
                    assert_eq!(row["direction"], direction);
                    check(row, transport, digest == "on");
                }
            }
        }
    }
}

#[test]
fn blocks_are_read_in_place_in_every_direction_and_nothing_is_copied() {
    for direction in ["push", "pull", "both"] {
        for digest in ["on", "movers", "off"] {
            let arguments = ["--transport", "shm", "--in-place", "--direction", direction, "--digest", digest];
            for row in report(&arguments)["sizes"].as_array().expect("a list") {
                check(row, "shm", digest != "off");
                assert_eq!((&row["in_place"], row["lent_share"].as_f64()), (&true.into(), Some(1.0)), "{row}");
            }
        }
    }
    let output = bench(&[SMALL, &["--transport", "shm", "--in-place", "--spoil", "source"]].concat());
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("WRONG"), "{}", text(&output.stdout));
    let output = bench(&[SMALL, &["--transport", "uds", "--in-place"]].concat());
    assert!(text(&output.stderr).contains("--transport shm"), "{}", text(&output.stderr));
}

#[test]
#[ignore = "needs libucp"]
fn ucx_is_measured_beside_its_own_tool() {
    let found = report(&["--transport", "ucx", "--direction", "both"]);
    let rows = found["sizes"].as_array().expect("a list");
    assert_eq!(rows.len(), 2);
    for row in rows {
        assert_eq!((&row["transport"], &row["verified"]), (&"ucx".into(), &true.into()), "{row}");
        assert!(row["gbps_median"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
        let is_missing = row["limit_missing"].as_str().is_some_and(|why| why.contains("not installed"));
        assert!(is_missing || row["limit_gbps"].as_f64().is_some_and(|rate| rate > 0.0), "{row}");
    }
}

#[test]
fn a_pass_of_many_writes_with_a_rest_arrives() {
    for digest in ["on", "off"] {
        let found =
            report(&["--blocks", "61", "--batch", "7", "--posts", "3", "--digest", digest, "--direction", "both"]);
        for row in found["sizes"].as_array().unwrap() {
            check(row, "tcp", digest == "on");
            assert_eq!((&row["blocks"], &row["batch"], &row["request_blocks"]), (&61.into(), &7.into(), &61.into()));
        }
    }
}

#[test]
fn a_spoilt_byte_is_found() {
    for (spoil, digest, seen_by) in
        [("source", "on", "wrong_blocks"), ("source", "off", "wrong_blocks"), ("target", "on", "wrong_digests")]
    {
        for direction in ["push", "pull"] {
            let arguments = ["--spoil", spoil, "--digest", digest, "--direction", direction, "--json"];
            let output = bench(&[SMALL, &arguments].concat());
            assert_eq!(output.status.code(), Some(1), "{spoil}, {digest}: {}", text(&output.stderr));
            let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            for row in found["sizes"].as_array().unwrap() {
                assert!(row[seen_by].as_u64().unwrap() > 0, "{row}");
                assert_eq!(row["verified"], false);
            }
        }
    }
    // Digests are made of what is there: a wrong source has a right digest.
    for transport in ["uds", "shm"] {
        let output = bench(&[SMALL, &["--spoil", "source", "--transport", transport, "--digest", "off"]].concat());
        assert_eq!(output.status.code(), Some(1), "{transport}: {}", text(&output.stderr));
        assert!(text(&output.stdout).contains("WRONG"), "{}", text(&output.stdout));
    }
    let output = bench(&[SMALL, &["--spoil", "source", "--json"]].concat());
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(found["sizes"][0]["wrong_digests"], 0);
}

#[test]
fn the_table_and_the_plot_have_all_sizes() {
    let file = std::env::temp_dir().join(format!("kvferry-plot-{}.svg", std::process::id()));
    let output = bench(&[SMALL, &["--svg", file.to_str().unwrap()]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for word in ["4 KiB", "16 KiB", "limit at", "raw TCP socket", " yes"] {
        assert!(table.contains(word), "no {word:?} in\n{table}");
    }
    let svg = std::fs::read_to_string(&file).expect("a plot");
    std::fs::remove_file(&file).expect("it is ours");
    well_formed(&svg);
    for word in [">4 KiB<", ">16 KiB<", "<polyline", "raw TCP socket"] {
        assert!(svg.contains(word), "no {word:?} in\n{svg}");
    }
}

/// Every element is closed, in order, and text has no markup of its own.
fn well_formed(svg: &str) {
    let mut open = Vec::new();
    let mut rest = svg;
    while let Some(start) = rest.find('<') {
        assert!(!rest[..start].contains('>'), "a stray > in {:?}", &rest[..start]);
        let end = rest[start..].find('>').expect("a tag ends") + start;
        let tag = &rest[start + 1..end];
        let name = tag.trim_start_matches('/').split([' ', '/']).next().unwrap();
        assert!(tag.matches('"').count().is_multiple_of(2), "quotes of {tag}");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else if !tag.ends_with('/') {
            open.push(name);
        }
        rest = &rest[end + 1..];
    }
    assert!(open.is_empty() && svg.starts_with("<svg "), "{open:?} of {svg}");
}

#[test]
fn arguments_that_cannot_be_say_what_to_write() {
    for (arguments, words) in [
        (&["--block", "10"][..], ["--block 10 B", "multiple of 512"]),
        (&["--block", "many"], ["many", "such as 16KiB"]),
        (&["--blocks", "0"], ["--blocks 0", "write 1 to"]),
        (&["--block", "1GiB"], ["--blocks 0", "more memory"]),
        (&["--batch", "0"], ["--batch 0", "write 1"]),
        (&["--posts", "0"], ["--posts 0", "1 to 1024"]),
        (&["--lanes", "0"], ["--lanes 0", "give 1 to"]),
        (&["--rounds", "0"], ["--rounds 0", "1 to 1000"]),
        (&["--transport", "pigeon"], ["pigeon", "tcp"]),
        (&["--connect", "somewhere"], ["--key", "openssl rand"]),
        (&["--listen", "127.0.0.1:0"], ["--key", "KVFERRY_PSK"]),
        (&["--listen", "127.0.0.1:0", "--json"], ["--listen", "--json"]),
    ] {
        let output = bench(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        for word in words {
            assert!(said.contains(word), "{arguments:?}: no {word:?} in {said}");
        }
    }
    let output =
        kvferry().args(["bench", "--connect", "somewhere"]).env("KVFERRY_PSK", "0123456789abcdef").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("names are not looked up"), "{}", text(&output.stderr));
}

#[test]
fn a_transport_that_is_not_here_is_refused_and_none_takes_its_place() {
    for transport in MISSING {
        let mut command = kvferry();
        command.env("KVFERRY_UCX_LIB", "/nowhere/libucp.so.0").args(["bench", "--transport", transport]);
        let output = command.output().expect("it runs");
        assert_eq!(output.status.code(), Some(3), "{transport}");
        assert!(text(&output.stderr).contains(&format!("transport {transport} is not available")), "{output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
    }
}

#[test]
fn memory_of_the_other_process_is_read_or_the_reason_is_said() {
    let output = bench(&[SMALL, &["--transport", "cma", "--json"]].concat());
    // Containers may forbid it; then it is not replaced by another path.
    if output.status.code() == Some(3) {
        assert!(text(&output.stderr).contains("transport cma is not available"), "{output:?}");
        return;
    }
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    check(&found["sizes"][0], "cma", true);
}

/// A process that ends with its value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a side that listens; its process, and the address that it prints.
fn listening(arguments: &[&str], psk: Option<&str>) -> (Running, String) {
    let mut command = kvferry();
    command.args(arguments).envs(psk.map(|psk| ("KVFERRY_PSK", psk))).stdout(Stdio::piped());
    let mut child = command.spawn().expect("it starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).expect("a line");
    let ready: Value = serde_json::from_str(&line).expect("JSON");
    (Running(child), ready["address"].as_str().expect("an address").to_owned())
}

const PSK: &str = "a key of the bench's tests";

#[test]
fn two_sides_that_were_started_by_hand_measure_run_after_run() {
    let (_other, address) = listening(&["bench", "--listen", "127.0.0.1:0", "--memory", "1MiB"], Some(PSK));
    for direction in ["push", "pull"] {
        let mut command = kvferry();
        command.arg("bench").args(SMALL).args(["--connect", &address, "--direction", direction, "--json"]);
        let output = command.env("KVFERRY_PSK", PSK).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        check(&found["sizes"][1], "tcp", true);
    }
    // A side that offers another path is no side for this one, and nothing takes its place.
    let mut command = kvferry();
    command.arg("bench").args(SMALL).args(["--connect", &address, "--transport", "uds"]);
    let output = command.env("KVFERRY_PSK", PSK).output().unwrap();
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("transport uds is not available"), "{}", text(&output.stderr));
    // More memory than the other side allows is its refusal, and it goes on.
    let large = ["bench", "--connect", &address, "--block", "1MiB", "--memory", "2MiB", "--rounds", "1"];
    let output = kvferry().args(large).env("KVFERRY_PSK", PSK).output().unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert!(text(&output.stderr).contains("--memory"), "{}", text(&output.stderr));
    let output =
        kvferry().arg("bench").args(SMALL).args(["--connect", &address]).env("KVFERRY_PSK", PSK).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    // Another key never gets that far.
    let output = kvferry()
        .arg("bench")
        .args(SMALL)
        .args(["--connect", &address])
        .env("KVFERRY_PSK", "another key of tests")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4));
    assert!(text(&output.stderr).contains("same key"), "{}", text(&output.stderr));
}

#[test]
fn a_doctor_tells_machine_and_pair_and_which_key_is_wrong() {
    let output = kvferry().args(["doctor", "--json"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let rows = found["machine"].as_array().expect("rows");
    for name in ["cores", "memory", "memfd", "Unix sockets", "libibverbs", "other process's memory", "RDMA"] {
        let is_there = rows.iter().any(|row| row["name"].as_str().is_some_and(|found| found.starts_with(name)));
        assert!(is_there, "no {name} in {found}");
    }
    for row in rows {
        assert_eq!(row["state"] == "ok", row["mend"].is_null(), "{row}");
    }
    let (_other, address) = listening(&["doctor", "--listen", "127.0.0.1:0"], Some(PSK));
    let ask = |psk: &str| kvferry().args(["doctor", &address, "--json"]).env("KVFERRY_PSK", psk).output().unwrap();
    let output = ask(PSK);
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    // Both sides are on this host, so the best path is memory that they share.
    check(&found["pair"]["figures"]["sizes"][0], "shm", true);
    let rows = found["pair"]["rows"].as_array().unwrap();
    let path = rows.iter().find(|row| row["name"] == "path").map(|row| row["found"].clone());
    assert_eq!(path, Some("shm for memory files, cma for other memory, the best there is".into()), "{found}");
    let output = ask("another key of tests");
    assert_eq!(output.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = found["pair"]["rows"].as_array().unwrap();
    assert!(rows.iter().any(|row| row["name"] == "key" && row["state"] == "broken"), "{found}");
    let output = kvferry().args(["doctor", "127.0.0.1:1", "--json"]).env("KVFERRY_PSK", PSK).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("nobody listens there"), "{}", text(&output.stdout));
}

/// The arguments of certificates that the transport's tests have.
fn certificates(node: &str, authority: &str) -> Vec<String> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../transport/src/testing/tls");
    let file = |flag: &str, name: &str| format!("--tls-{flag}-file={folder}/{name}.pem");
    vec![file("certificate", node), file("key", &format!("{node}.key")), file("authority", authority)]
}

#[test]
fn a_doctor_tells_which_certificates_are_wrong() {
    let certificates_of_b = certificates("b", "authority");
    let listen = ["doctor", "--listen", "127.0.0.1:0", "--engine-id", "b", "--tls-names", "engine"];
    let listen: Vec<&str> = listen.into_iter().chain(certificates_of_b.iter().map(String::as_str)).collect();
    // Certificates do without a key.
    let (_other, address) = listening(&listen, None);
    let ask = |name: &str, shown: &[String]| {
        let output = kvferry().args(["doctor", &address, "--json", "--engine-id", name]).args(shown).output().unwrap();
        let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        (output.status.code(), found["pair"].clone())
    };
    let row = |pair: &Value, name: &str| {
        let rows = pair["rows"].as_array().unwrap();
        rows.iter().find(|row| row["name"] == name).map(|row| (row["state"].clone(), row["found"].to_string()))
    };
    let (code, pair) = ask("a", &certificates("a", "authority"));
    assert_eq!((code, row(&pair, "certificates").map(|row| row.0)), (Some(0), Some("ok".into())), "{pair}");
    assert_eq!(pair["figures"]["sizes"][0]["tls"], true, "{pair}");
    for (name, shown, told) in [
        ("a", certificates("a-other", "authority"), "certificate"),
        ("a", certificates("a", "other"), "certificate is not from an authority of ours"),
        ("c", certificates("a", "authority"), "name"),
    ] {
        let (code, pair) = ask(name, &shown);
        let (state, found) = row(&pair, "certificates").unwrap_or_else(|| panic!("{pair}"));
        assert_eq!((code, state), (Some(1), "broken".into()), "{pair}");
        assert!(found.contains(told), "{pair}");
    }
    // Files that cannot be used, or are missing, are arguments that cannot be.
    for (shown, told) in
        [(certificates("nobody", "authority"), "nobody.pem"), (vec![certificates_of_b[0].clone()], "--tls-key-file")]
    {
        let output = kvferry().args(["doctor", &address]).args(&shown).output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains(told), "{}", text(&output.stderr));
    }
}

#[test]
fn many_peers_are_watched_idle_and_busy() {
    let arguments =
        ["--peers", "3", "--idle-peers", "5", "--seconds", "1", "--block", "16KiB", "--memory", "1MiB", "--json"];
    let output = bench(&arguments);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let (idle, busy) = (&found["idle"], &found["busy"]);
    assert_eq!((&idle["peers"], &busy["peers"], &busy["verified"]), (&5.into(), &3.into(), &true.into()), "{found}");
    assert_eq!(idle["threads"][0], idle["threads"][1], "a thread for a peer: {found}");
    assert!(busy["gbps_least"].as_f64().unwrap() > 0.0 && busy["spread"].as_f64().unwrap() >= 0.0, "{found}");
    let jain = busy["jain"].as_f64().unwrap();
    assert!((1.0 / 3.0..=1.0).contains(&jain), "{found}");
    for writes in ["write_alone_us", "write_beside_us"] {
        assert!(idle[writes]["p50"].as_f64().unwrap() > 0.0, "{found}");
    }
    assert!(idle["descriptors_per_peer"].as_f64().unwrap() >= 3.0, "a control lane and two data lanes: {found}");
}

/// Waits until somebody is connected to this port of this host.
fn wait_connected(port: u16) {
    let wanted = format!(":{port:04X}");
    let is_connected = |line: &str| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        words.get(1).is_some_and(|local| local.ends_with(&wanted)) && words.get(3) == Some(&"01")
    };
    let start = Instant::now();
    while !std::fs::read_to_string("/proc/net/tcp").unwrap().lines().any(is_connected) {
        assert!(start.elapsed() < Duration::from_secs(60), "nobody connects to port {port}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn another_side_that_is_killed_ends_the_bench_with_a_word() {
    let (other, address) = listening(&["bench", "--listen", "127.0.0.1:0", "--memory", "1MiB"], Some(PSK));
    let mut command = kvferry();
    command.args(["bench", "--connect", &address, "--block", "4KiB", "--memory", "1MiB", "--rounds", "1000"]);
    command.env("KVFERRY_PSK", PSK).stdout(Stdio::piped()).stderr(Stdio::piped());
    let bench = command.spawn().unwrap();
    wait_connected(address.rsplit_once(':').unwrap().1.parse().unwrap());
    drop(other);
    let output = bench.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    assert!(output.stdout.is_empty(), "no figures of what did not end: {output:?}");
    // Which of its connections breaks first is chance, and whether a write was under way.
    let said = text(&output.stderr);
    assert!(["is gone", "socket", "a write failed"].iter().any(|word| said.contains(word)), "{said}");
}
