//! When a process ends: on a signal, or with the process that started it.

use std::io::{IsTerminal, Read};
use std::process::ExitCode;

use tokio::sync::oneshot;

/// Waits for Ctrl-C or SIGTERM, or, with `with_stdin`, for the end of standard input: a parent that dies in any way closes it.
///
/// # Errors
/// The system's, if signals cannot be listened for.
pub async fn until_end(with_stdin: bool) -> std::io::Result<()> {
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let (sender, closed) = oneshot::channel();
    if with_stdin {
        // A thread of its own: the runtime would wait for a read that never returns.
        std::thread::Builder::new().name("stdin".into()).spawn(move || {
            let mut buffer = [0; 256];
            while std::io::stdin().read(&mut buffer).is_ok_and(|count| count > 0) {}
            // Nobody listens if a signal came first.
            let _ = sender.send(());
        })?;
    }
    tokio::select! {
        result = tokio::signal::ctrl_c() => result,
        _ = terminate.recv() => Ok(()),
        _ = closed, if with_stdin => Ok(()),
    }
}

/// Log lines on standard error, as `RUST_LOG` asks; warnings without it.
pub fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env();
    let filter = filter.unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    log.with_ansi(std::io::stderr().is_terminal()).init();
}

/// What a program ends with; an error is told with what caused it, without a backtrace: it is the user's to mend.
#[must_use]
pub fn exit(result: anyhow::Result<ExitCode>) -> ExitCode {
    result.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        // Errors that pass on another one's words would say them twice.
        let mut told = error.to_string();
        for cause in error.chain().skip(1).map(ToString::to_string) {
            if !told.contains(&cause) {
                eprintln!("  caused by: {cause}");
            }
            told = cause;
        }
        ExitCode::FAILURE
    })
}
