//! What can only be known by trying it.

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Command, ExitCode, Stdio};

use rustix::fs::MemfdFlags;

use super::root::Root;
use super::row::Row;
use crate::calls;
use crate::error::CliError;

/// What another process looks for in this one.
static KNOWN: [u8; 32] = *b"kvferry doctor: these are known.";

/// Memory that two processes can map, and the sockets that pass it on.
pub(crate) fn sharing() -> Vec<Row> {
    let memfd = match rustix::fs::memfd_create("kvferry-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING) {
        Ok(_) => Row::ok("memfd", "can be made and sealed; /dev/shm is not needed"),
        Err(error) => {
            let mend =
                "memory cannot be shared between processes: allow memfd_create in the container's seccomp profile";
            Row::note("memfd", error.to_string(), mend)
        }
    };
    let unix = match UnixStream::pair().and_then(|_| abstract_listener()) {
        Ok(_) => Row::ok("Unix sockets", "streams and abstract names"),
        Err(error) => {
            Row::note("Unix sockets", error.to_string(), "processes of one host must take TCP: allow AF_UNIX sockets")
        }
    };
    vec![memfd, unix]
}

fn abstract_listener() -> std::io::Result<UnixListener> {
    let name = format!("kvferry-doctor-{}", std::process::id());
    UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
}

/// Whether another process may read this one's memory: kvferry's `cma`, by which memory without a file of its own goes, and UCX's.
pub(crate) fn other_memory(root: &Root) -> Row {
    const NAME: &str = "other process's memory";
    let scope = match root.number("proc/sys/kernel/yama/ptrace_scope") {
        Some(0) => "Yama scope 0 (any process of this user)",
        Some(1) => "Yama scope 1 (parents only)",
        Some(2) => "Yama scope 2 (administrators only)",
        Some(_) => "Yama scope 3 (nobody)",
        None => "no Yama",
    };
    let pid = std::process::id().to_string();
    let tried = itself(&["try-memory", &pid, &(KNOWN.as_ptr() as usize).to_string()]);
    match tried {
        Ok(_) => Row::ok(NAME, format!("readable; {scope}")),
        Err(why) => {
            let mend = "memory that an engine allocated itself, as vLLM does, goes by uds instead of cma: sysctl -w \
                        kernel.yama.ptrace_scope=0, or --cap-add SYS_PTRACE for a container";
            Row::note(NAME, format!("not readable: {why}; {scope}"), mend)
        }
    }
}

/// Reads the known bytes of another process; its own exit code says how it went.
pub(crate) fn try_memory(pid: i32, address: usize) -> Result<ExitCode, CliError> {
    let mut found = [0; KNOWN.len()];
    calls::read_process(pid, address, &mut found).map_err(CliError::io("process_vm_readv"))?;
    Ok(if found == KNOWN { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Libraries that are looked for at run time.
pub(crate) fn libraries() -> Vec<Row> {
    [
        ("libibverbs", "libibverbs.so.1", "the transport rdma needs it: apt-get install libibverbs1 ibverbs-providers"),
        (
            "CUDA driver",
            "libcuda.so.1",
            "only caches in GPU memory need it; it comes with NVIDIA's driver, not with the toolkit",
        ),
    ]
    .map(|(name, file, mend)| match itself(&["try-library", file]) {
        Ok(_) => Row::ok(name, format!("{file} opens")),
        Err(why) => Row::note(name, why, mend),
    })
    .into()
}

/// Opens a library, and says why not.
pub(crate) fn try_library(name: &str) -> Result<ExitCode, CliError> {
    Ok(match calls::open_library(name) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    })
}

/// Runs this program again; gives what it prints, or the first line of what it complains about.
pub(super) fn itself(arguments: &[&str]) -> Result<Vec<u8>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let output =
        Command::new(program).args(arguments).stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let line = said.lines().next().map(|line| line.trim_start_matches("kvferry: ").to_owned());
    // A library may take its process down without a word.
    Err(line.unwrap_or_else(|| format!("it was tried in a process of its own, which ended with {}", output.status)))
}
