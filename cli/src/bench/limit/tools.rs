//! The limit of a card or of UCX: the tools that their makers measure with, run between two processes of this machine.

use std::ffi::OsStr;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use kvferry_transport::ucx::{self, UcxConfig};

use crate::bench::case::Case;
use crate::bench::endpoint::ucx_config;
use crate::error::CliError;

/// How long a tool's server may take to listen: minutes pass quickly in a machine that is emulated.
const PATIENCE: Duration = Duration::from_secs(60);
/// What a tool moves at least, so that its own start is no part of the figure.
const LEAST_ITERATIONS: u64 = 100;
/// Puts of all blocks at once.
const UCX_ITERATIONS: u64 = 4;

/// A tool that is installed.
pub(crate) struct Tool {
    which: Which,
    program: PathBuf,
    case: Case,
    /// What it finds in its environment.
    variables: Vec<(String, String)>,
}

/// Which tool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Which {
    /// UCX's own: puts into the other process's memory, by the transports and with the settings that ours uses.
    Ucx,
    /// perftest's: RDMA WRITE over one queue pair.
    Verbs,
}

impl Which {
    const fn program(self) -> &'static str {
        match self {
            Self::Ucx => "ucx_perftest",
            Self::Verbs => "ib_write_bw",
        }
    }

    const fn package(self) -> &'static str {
        match self {
            Self::Ucx => "ucx-utils",
            Self::Verbs => "perftest",
        }
    }

    /// What both sides are told.
    fn arguments(self, case: &Case, port: u16) -> Vec<String> {
        // UCX's tool puts one buffer again and again: one of a block would stay in the cache, so it gets one of all blocks.
        let (size, iterations) = match self {
            Self::Ucx => (case.bytes(), UCX_ITERATIONS),
            Self::Verbs => (case.block_bytes, u64::from(case.blocks).max(LEAST_ITERATIONS)),
        };
        let (size, iterations, port) = (size.to_string(), iterations.to_string(), port.to_string());
        let words: &[&str] = match self {
            // Without the ten thousand puts that would warm it up. (`-f`, final figures only, prints no `Final:`.)
            Self::Ucx => &["-t", "ucp_put_bw", "-s", &size, "-n", &iterations, "-w", "1", "-p", &port],
            // CPU frequencies may vary; gigabits leave no doubt about what a megabyte is.
            Self::Verbs => &["-s", &size, "-n", &iterations, "-F", "--report_gbits", "-p", &port],
        };
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    /// GB/s out of what the client prints.
    fn rate(self, printed: &str) -> Option<f64> {
        match self {
            // `Final: iterations, overheads (median, average, overall), MB/s (average, overall), messages/s (average, overall)`.
            Self::Ucx => {
                let line = printed.lines().find_map(|line| line.trim_start().strip_prefix("Final:"))?;
                let mebibytes: f64 = line.split_ascii_whitespace().nth(5)?.parse().ok()?;
                Some(mebibytes * f64::from(1 << 20) / 1e9)
            }
            // `#bytes #iterations BW peak BW average MsgRate`, then a line of numbers.
            Self::Verbs => {
                let mut lines = printed.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
                let numbers = lines.nth(1)?;
                let gigabits: f64 = numbers.split_ascii_whitespace().nth(3)?.parse().ok()?;
                Some(gigabits / 8.0)
            }
        }
    }
}

impl Tool {
    /// Looks for the tool in folders as `PATH` names them; the error says what to install.
    pub(crate) fn find(which: Which, case: &Case, paths: &OsStr) -> Result<Self, String> {
        let program =
            std::env::split_paths(paths).map(|folder| folder.join(which.program())).find(|file| file.is_file());
        let missing = || format!("{} is not installed (apt-get install {})", which.program(), which.package());
        Ok(Self { which, program: program.ok_or_else(missing)?, case: case.clone(), variables: Vec::new() })
    }

    /// Takes care that UCX's tool uses the transports that our links use, as they use them.
    pub(crate) fn like_ours(mut self) -> Result<Self, String> {
        if self.which == Which::Ucx {
            self.variables = ucx_variables()?;
        }
        Ok(self)
    }

    pub(crate) fn name(&self) -> &'static str {
        match self.which {
            Which::Ucx => "ucx_perftest ucp_put_bw",
            Which::Verbs => "ib_write_bw",
        }
    }

    /// GB/s of one run, of both its processes.
    pub(crate) fn pass(&self) -> Result<f64, CliError> {
        let refused = |why: String| CliError::Tool { name: self.name(), why };
        let port = free_port().map_err(CliError::io("a free port"))?;
        let arguments = self.which.arguments(&self.case, port);
        let mut server = self.command(&arguments);
        server.stdout(Stdio::null()).stderr(Stdio::null());
        let mut server = Server(server.spawn().map_err(CliError::io(self.name()))?);
        server.listens(port).map_err(refused)?;
        let client = self.command(&arguments).arg("127.0.0.1").output().map_err(CliError::io(self.name()))?;
        let Output { status, stdout, stderr } = client;
        let printed = String::from_utf8_lossy(&stdout);
        match self.which.rate(&printed) {
            Some(rate) if status.success() => Ok(rate),
            _ => Err(refused(format!("{status}: {}{printed}", String::from_utf8_lossy(&stderr)))),
        }
    }

    fn command(&self, arguments: &[String]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(arguments).stdin(Stdio::null()).envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }
}

fn ucx_variables() -> Result<Vec<(String, String)>, String> {
    let config = UcxConfig::try_from(ucx_config()).map_err(|error| error.to_string())?;
    let facts = ucx::survey(&config).map_err(|error| error.to_string())?;
    let settings = facts.settings.iter().map(|setting| (format!("UCX_{}", setting.key), setting.value.to_string()));
    Ok(settings.chain([("UCX_TLS".to_owned(), facts.transports.join(","))]).collect())
}

/// A tool's server; ends with the value.
struct Server(Child);

impl Server {
    /// Waits until it listens; a connection to try would be taken for the client's.
    fn listens(&mut self, port: u16) -> Result<(), String> {
        let start = Instant::now();
        while !is_listening(port) {
            if let Ok(Some(status)) = self.0.try_wait() {
                return Err(format!("its server ended with {status}"));
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("its server does not listen after {} s", PATIENCE.as_secs()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_listening(port: u16) -> bool {
    let tables = ["/proc/net/tcp", "/proc/net/tcp6"].map(|path| std::fs::read_to_string(path).unwrap_or_default());
    tables.iter().any(|table| has_listener(table, port))
}

/// Whether a table of `/proc/net/tcp` has a socket that listens (state 0A) on a port.
fn has_listener(table: &str, port: u16) -> bool {
    let wanted = format!(":{port:04X}");
    table.lines().skip(1).any(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (local, state) = (words.next().unwrap_or_default(), words.nth(1).unwrap_or_default());
        local.ends_with(&wanted) && state == "0A"
    })
}

/// Somebody else may take it meanwhile; then the tool says so.
fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_from_what_the_tools_print() {
        let ucx = "+--------------+--------------+------------------------------+---------------------+\n\
                   Final:                  1000      0.512     6.104     6.104    10240.00    10000.00      163840     160000\n";
        let rate = Which::Ucx.rate(ucx).unwrap();
        assert!((rate - 10.48576).abs() < 1e-9, "{rate}");
        let verbs = "---------------------------------------------------------------------------------------\n \
                     #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n \
                     65536      5000             98.10              97.60                0.186\n";
        assert_eq!(Which::Verbs.rate(verbs), Some(12.2));
        for which in [Which::Ucx, Which::Verbs] {
            assert_eq!(which.rate("Couldn't connect to 127.0.0.1:18515\n"), None);
        }
    }

    #[test]
    fn a_listener_is_found_in_the_kernels_table() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n   \
                     0: 0100007F:3571 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0\n   \
                     1: 0100007F:4A11 0100007F:3571 01 00000000:00000000 00:00000000 00000000     0\n";
        assert!(has_listener(table, 0x3571));
        assert!(!has_listener(table, 0x4a11), "it is connected, it does not listen");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        assert!(is_listening(listener.local_addr().unwrap().port()));
    }

    #[test]
    fn a_tool_is_found_in_its_folder_and_else_named_with_its_package() {
        let case = Case::new(4096, Some(1), None, 1, 4096).unwrap();
        let folder = std::env::temp_dir().join(format!("kvferry-tools-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for which in [Which::Ucx, Which::Verbs] {
            let why = Tool::find(which, &case, folder.as_os_str()).err().unwrap();
            assert!(why.contains(which.program()) && why.contains("apt-get install"), "{why}");
            std::fs::write(folder.join(which.program()), "").unwrap();
            assert!(Tool::find(which, &case, folder.as_os_str()).is_ok());
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
