//! Which of UCX's transports may carry puts, and which an endpoint really uses.
//!
//! Two things are asked of one that carries puts.
//!
//! **The receiver can shut it.** The receiver must be able to end a sender's writes alone, by closing its own worker. That holds where the bytes pass through
//! something that the receiver owns: a socket (tcp), a queue pair (rc, ud, dc). Shared memory (posix, sysv, xpmem), cma and the
//! device-to-device copies write straight from the sender's process; a sender that was stopped in the middle goes on whenever it
//! is woken. They are kept out of the context, so neither the worker's address nor a packed key names them.
//!
//! **A dead sender does not take the receiver along.** Over tcp and ud UCX emulates puts: its receiver copies each message and sends
//! an acknowledgement, and if that meets a connection that has failed meanwhile, UCX ends the whole process
//! (`ucp_request_try_send`: "Fatal: unexpected error: Endpoint timeout"; seen with 1.13.1 to 1.22.0 when the sender was killed). So
//! they have to be asked for. Links of sessions never put there: they send loads, active messages that nobody acknowledges (`tcp::ucx`). But
//! UCX takes emulated puts from whoever reaches its port.

use std::collections::BTreeSet;

/// The transports by which the device itself puts, and the groups that UCX_TLS knows them by.
const NATIVE: [(&str, &[&str]); 3] = [
    ("rc_verbs", &["rc_verbs", "rc_v", "rc", "ib"]),
    ("rc_mlx5", &["rc_mlx5", "rc_x", "rc", "ib"]),
    ("dc_mlx5", &["dc_mlx5", "dc_x", "dc", "ib"]),
];
/// Needed to set up those above; as carriers of puts they are emulated.
const AUXILIARY: [(&str, &[&str]); 2] =
    [("ud_verbs", &["ud_verbs", "ud_v", "ud", "ib"]), ("ud_mlx5", &["ud_mlx5", "ud_x", "ud", "ib"])];
/// The transports over which UCX emulates puts by messages that its own receiver copies and acknowledges.
const EMULATED: [(&str, &[&str]); 1] = [("tcp", &["tcp"])];
/// Transports that copy inside one process, between its own host and device memory.
const LOCAL: [(&str, &[&str]); 4] = [
    ("cuda_copy", &["cuda_copy", "cuda"]),
    ("gdr_copy", &["gdr_copy", "cuda"]),
    ("rocm_copy", &["rocm_copy", "rocm"]),
    ("ze_copy", &["ze_copy", "ze"]),
];

/// What of the transports `found` may be used, if the user's UCX_TLS is `wish` (UCX's syntax: a list, or `^` and a list of what
/// to leave out). Empty if none of them may carry puts.
pub(super) fn choose(found: &BTreeSet<String>, wish: Option<&str>, emulated_puts: bool) -> Vec<String> {
    let (is_negative, listed) = match wish.map(str::trim).filter(|wish| !wish.is_empty() && *wish != "all") {
        None => (true, Vec::new()),
        Some(wish) => {
            let is_negative = wish.starts_with('^');
            // `ud_v:aux` permits a transport for setting up connections only: it is fenced all the same. `\rc` is exact.
            let name = |name: &str| name.trim().trim_start_matches('\\').split(':').next().unwrap_or("").to_owned();
            (is_negative, wish.trim_start_matches('^').split(',').map(name).collect::<Vec<_>>())
        }
    };
    let is_wanted = |groups: &[&str]| groups.iter().any(|group| listed.iter().any(|l| l == group)) != is_negative;
    let of = |table: &[(&str, &[&str])]| -> Vec<String> {
        let usable = table.iter().filter(|(name, groups)| found.contains(*name) && is_wanted(groups));
        usable.map(|(name, _)| (*name).to_owned()).collect()
    };
    let mut chosen = of(&NATIVE);
    if emulated_puts {
        chosen.extend(of(&EMULATED));
    }
    if !chosen.is_empty() || emulated_puts {
        chosen.extend(of(&AUXILIARY));
    }
    if !chosen.is_empty() {
        // Without these UCX takes no device memory, so a list that names only networks is not meant to leave them out.
        chosen.extend(LOCAL.iter().filter(|(name, _)| found.contains(*name)).map(|(name, _)| (*name).to_owned()));
    }
    chosen
}

/// Whether the device puts by one of these lanes itself.
pub(super) fn is_native(lanes: &[String]) -> bool {
    lanes.iter().any(|lane| NATIVE.iter().any(|(name, _)| transport(lane) == *name))
}

fn transport(lane: &str) -> &str {
    lane.split('/').next().unwrap_or("")
}

/// The transports in what UCX prints of a context: lines like `resource 0  :  md 0  dev 0  flags -- tcp/eth0`.
pub(super) fn resources(printed: &str) -> Vec<String> {
    let after = |line: &str| line.split_once("flags")?.1.split_ascii_whitespace().nth(1).map(str::to_owned);
    printed.lines().filter(|line| line.contains("resource ")).filter_map(after).collect()
}

/// The transports in what UCX prints of an endpoint: lines like `lane[0]:  1:tcp/lo.0 md[0]  -> md[0]/tcp/sysdev[255] am`.
///
/// `None` if there is no lane, or one that cannot be read: then nothing is known of what carries the bytes.
pub(super) fn endpoint_lanes(printed: &str) -> Option<Vec<String>> {
    let lanes = printed.lines().filter_map(|line| line.split_once("lane[").map(|(_, lane)| lane));
    let read = |lane: &str| {
        let resource = lane.split_once("]:")?.1.split_ascii_whitespace().next()?;
        let (index, name) = resource.split_once(':')?;
        let is_index = !index.is_empty() && index.bytes().all(|byte| byte.is_ascii_digit());
        (is_index && name.contains('/')).then(|| name.to_owned())
    };
    let lanes: Option<Vec<String>> = lanes.map(read).collect();
    lanes.filter(|lanes| !lanes.is_empty())
}

/// The lanes of an endpoint that are none of `allowed`.
pub(super) fn unfenced(lanes: &[String], allowed: &[String]) -> Vec<String> {
    lanes.iter().filter(|lane| !allowed.iter().any(|allowed| allowed == transport(lane))).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn only_what_the_receiver_can_shut_carries_puts_whatever_the_user_wishes() {
        let laptop = ["self", "tcp", "sysv", "posix", "cma"];
        let pod =
            ["self", "tcp", "posix", "cma", "xpmem", "knem", "rc_mlx5", "ud_mlx5", "dc_mlx5", "cuda_copy", "cuda_ipc"];
        let ib = ["rc_verbs", "ud_verbs", "tcp", "posix"];
        for (found, wish, emulated, want) in [
            (&laptop[..], None, true, "tcp"),
            (&laptop, Some("all"), true, "tcp"),
            (&laptop, Some(""), true, "tcp"),
            (&laptop, Some("posix,cma,tcp"), true, "tcp"),
            (&laptop, Some("posix,cma,sm,self"), true, ""),
            (&laptop, Some("^tcp"), true, ""),
            (&laptop, Some("rc"), true, ""),
            (&laptop, None, false, ""),
            (&pod, None, false, "rc_mlx5,dc_mlx5,ud_mlx5,cuda_copy"),
            (&pod, None, true, "rc_mlx5,dc_mlx5,tcp,ud_mlx5,cuda_copy"),
            (&pod, Some("^tcp"), true, "rc_mlx5,dc_mlx5,ud_mlx5,cuda_copy"),
            (&pod, Some("rc,ud,cuda_ipc,sm"), false, "rc_mlx5,ud_mlx5,cuda_copy"),
            (&pod, Some("dc_x, rc_x"), false, "rc_mlx5,dc_mlx5,cuda_copy"),
            (&pod, Some("ib"), false, "rc_mlx5,dc_mlx5,ud_mlx5,cuda_copy"),
            (&pod, Some("^ib,cuda_copy"), true, "tcp,cuda_copy"),
            (&pod, Some("^ib,cuda_copy"), false, ""),
            (&pod, Some("ud,tcp"), false, ""),
            (&ib, Some("\\rc_verbs,ud_verbs:aux"), false, "rc_verbs,ud_verbs"),
            (&["posix", "new_transport"], None, true, ""),
        ] {
            assert_eq!(choose(&set(found), wish, emulated).join(","), want, "{found:?} {wish:?} {emulated}");
        }
    }

    #[test]
    fn puts_are_native_where_the_device_makes_them() {
        let is_native = |lanes: &[&str]| is_native(&lanes.iter().map(|&lane| lane.to_owned()).collect::<Vec<_>>());
        assert!(is_native(&["ud_verbs/rxe0:1.0", "rc_verbs/rxe0:1.0"]) && is_native(&["dc_mlx5/mlx5_0:1.0"]));
        assert!(!is_native(&["tcp/lo.0"]) && !is_native(&["ud_mlx5/mlx5_0:1.0"]) && !is_native(&[]));
    }

    const ENDPOINT: &str = "#
# UCP endpoint \n#
#               peer: <no debug data>
#                 lane[0]:  1:tcp/lo.0 md[0]                -> md[0]/tcp/sysdev[255] am am_bw#0 wireup
#                 lane[1]:  7:cma/memory.0 md[4]            -> md[4]/cma/sysdev[255] rma_bw#0
#
#                  rma_bw: mds #
";

    #[test]
    fn what_an_endpoint_uses_is_read_back() {
        let lanes = endpoint_lanes(ENDPOINT).unwrap();
        assert_eq!(lanes, ["tcp/lo.0", "cma/memory.0"]);
        assert_eq!(unfenced(&lanes, &["tcp".to_owned()]), ["cma/memory.0"]);
        assert!(unfenced(&lanes, &["tcp".to_owned(), "cma".to_owned()]).is_empty());
    }

    #[test]
    fn an_endpoint_that_cannot_be_read_has_no_known_lane() {
        assert_eq!(endpoint_lanes("# UCP endpoint\n#  peer: x\n"), None);
        for lane in ["# lane[0]: <unconnected>\n", "# lane[0]:\n", "# lane[0]: tcp\n", "# lane[0]: x:tcp/lo\n"] {
            assert_eq!(endpoint_lanes(&format!("{ENDPOINT}{lane}")), None, "{lane}");
        }
    }

    #[test]
    fn a_context_names_what_it_found() {
        let printed = "#     component 1  :  tcp\n#      resource 0  :  md 0  dev 0  flags -- tcp/eth0\n\
                       #      resource 1  :  md 0  dev 1  flags -a rc_verbs/rxe0:1\n#\n# memory: 0.16MB\n";
        assert_eq!(resources(printed), ["tcp/eth0", "rc_verbs/rxe0:1"]);
    }
}
