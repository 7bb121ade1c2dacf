//! Where a gateway writes its messages: standard error, a file of bounded length, or the system's log.

use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use super::output;

/// Bytes of a log file at most, by default.
pub const DEFAULT_BYTES: u64 = 1 << 20;
const SYSTEM_LOG: &str = "/dev/log";
/// Facility daemon, severities error and informational (RFC 5424 section 6.2.1).
const ERROR: u8 = 3 * 8 + 3;
const INFORMATION: u8 = 3 * 8 + 6;

enum Sink {
    Stderr,
    File { file: File, written_bytes: u64, max_bytes: u64 },
    System(UnixDatagram),
    Nothing,
}

/// The log of a gateway. Its copies write to the same place.
#[derive(Clone)]
pub struct Log {
    sink: Arc<Mutex<Sink>>,
    name: Arc<str>,
    is_quiet: bool,
}

impl Log {
    /// To standard error.
    pub fn to_stderr(name: &str, is_quiet: bool) -> Log {
        Log { sink: Arc::new(Mutex::new(Sink::Stderr)), name: name.into(), is_quiet }
    }

    /// To the end of a file. When it is full it begins anew.
    ///
    /// # Errors
    /// Those of `open`.
    pub fn use_file(&self, path: &Path, max_bytes: u64) -> io::Result<()> {
        // What a guest asks for is not for others.
        let mut file = output::open(path, 0o600, true)?;
        let written_bytes = file.seek(SeekFrom::End(0))?;
        self.replace(Sink::File { file, written_bytes, max_bytes });
        Ok(())
    }

    /// To the system's log, or nowhere if there is none; but a file stays the place.
    pub fn use_system(&self) {
        if matches!(&*self.sink.lock().unwrap_or_else(PoisonError::into_inner), Sink::File { .. }) {
            return;
        }
        let connected = UnixDatagram::unbound().and_then(|socket| {
            socket.connect(SYSTEM_LOG)?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        });
        self.replace(connected.map_or(Sink::Nothing, Sink::System));
    }

    fn replace(&self, sink: Sink) {
        *self.sink.lock().unwrap_or_else(PoisonError::into_inner) = sink;
    }

    /// A message for those who want to know.
    pub fn say(&self, message: &str) {
        if !self.is_quiet {
            self.write(INFORMATION, message);
        }
    }

    /// An error message.
    pub fn fail(&self, message: &str) {
        self.write(ERROR, message);
    }

    fn write(&self, priority: u8, message: &str) {
        let name = &self.name;
        // A message that cannot be written is lost: there is no other place to report the error.
        let _ = match &mut *self.sink.lock().unwrap_or_else(PoisonError::into_inner) {
            // Whole: others write to it, too.
            Sink::Stderr => io::stderr().write_all(format!("{name}: {message}\n").as_bytes()),
            Sink::File { file, written_bytes, max_bytes } => {
                let line = format!("{name}: {message}\n");
                if *written_bytes + line.len() as u64 > *max_bytes {
                    *written_bytes = 0;
                    let _ = file.set_len(0);
                }
                *written_bytes += line.len() as u64;
                file.write_all(line.as_bytes())
            }
            Sink::System(socket) => {
                let line = format!("<{priority}>{name}[{}]: {message}", std::process::id());
                socket.send(line.as_bytes()).map(|_| ())
            }
            Sink::Nothing => Ok(()),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_file_begins_anew() {
        let path = std::env::temp_dir().join(format!("fulmar-log-{}", std::process::id()));
        std::fs::write(&path, "old\n").unwrap();
        let log = Log::to_stderr("pasta", true);
        log.use_file(&path, 40).unwrap();
        log.say("quiet");
        log.fail("one");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "old\npasta: one\n");
        for _ in 0..100 {
            log.fail("something longer");
            assert!(std::fs::metadata(&path).unwrap().len() <= 40);
        }
        std::fs::remove_file(&path).unwrap();
    }
}
