//! Samples of this process, taken by the kernel's `perf`, kernel functions included.
//!
//! `perf record` is attached to this process and follows the threads that it starts later; `perf
//! script` turns what it wrote into text, which [`parse`] reads. Without `perf` there are no samples,
//! and [`Recording::start`] says what to install.

use std::fs::{self, File};
use std::io::{self, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::file::{path_for_others, unnamed};
use crate::sys;

/// Samples per second and CPU where nothing else is asked for: no multiple of a timer's rate.
pub const FREQUENCY_HZ: u32 = 4999;

/// How long `perf` may take to begin and to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// A function on a stack.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    /// Where in its file; the kernel's own addresses for the kernel.
    pub address: u64,
    /// Its name, `[unknown]` without one.
    pub function: String,
    /// The file: a program, a library, `[kernel.kallsyms]`.
    pub file: String,
}

impl Frame {
    /// Whether it is the kernel's.
    pub fn is_kernel(&self) -> bool {
        self.file.starts_with('[') && self.file != "[unknown]" && self.file != "[vdso]"
    }
}

/// One look at one thread.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Sample {
    /// The thread's name.
    pub thread: String,
    /// The process.
    pub pid: u32,
    /// The call stack, innermost function first.
    pub frames: Vec<Frame>,
}

impl Sample {
    /// Whether it was taken in the kernel.
    pub fn is_in_kernel(&self) -> bool {
        self.frames.first().is_some_and(Frame::is_kernel)
    }
}

/// A recording that goes on.
pub struct Recording {
    perf: Child,
    /// Its output: an unnamed file, so that nothing is left however this process ends.
    data: File,
}

impl Recording {
    /// Begins to look at this process and at all threads that it starts from now on.
    ///
    /// # Errors
    /// `NotFound` without `perf`; the message of `perf` if it has no permission.
    pub fn start(frequency_hz: u32) -> io::Result<Recording> {
        let data = unnamed(&std::env::temp_dir())?;
        let pid = std::process::id().to_string();
        let spawned = Command::new("perf")
            .args(["record", "-q", "-g", "-e", "cpu-clock", "-F", &frequency_hz.to_string()])
            .args(["-p", &pid, "-o"])
            .arg(path_for_others(&data))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn();
        let mut recording = Recording { perf: spawned.map_err(explain)?, data };
        recording.wait_until_it_looks()?;
        Ok(recording)
    }

    /// Waits until the counters are open: perf then writes to the file.
    fn wait_until_it_looks(&mut self) -> io::Result<()> {
        let start = Instant::now();
        while self.data.metadata().map_or(0, |m| m.len()) == 0 {
            if let Some(status) = self.perf.try_wait()? {
                let said = self.said();
                return Err(io::Error::other(format!("perf ended immediately ({status}): {said}")));
            }
            if start.elapsed() > PATIENCE {
                return Err(io::Error::other("perf did not start recording"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        // From its file to its first sample it has little left to do.
        std::thread::sleep(Duration::from_millis(100));
        Ok(())
    }

    fn said(&mut self) -> String {
        let mut text = String::new();
        if let Some(stderr) = &mut self.perf.stderr {
            let _ = io::Read::read_to_string(stderr, &mut text);
        }
        text.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// Ends the recording and returns the samples.
    ///
    /// # Errors
    /// The error of `perf script`.
    pub fn finish(mut self) -> io::Result<Vec<Sample>> {
        sys::interrupt(&self.perf)?;
        let start = Instant::now();
        while self.perf.try_wait()?.is_none() {
            if start.elapsed() > PATIENCE {
                return Err(io::Error::other("perf did not end"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let script = Command::new("perf")
            .args(["script", "--no-inline", "-F", "comm,pid,ip,sym,dso", "-i"])
            .arg(path_for_others(&self.data))
            .stdin(Stdio::null())
            .output()?;
        if !script.status.success() {
            let said = String::from_utf8_lossy(&script.stderr);
            return Err(io::Error::other(format!("perf script: {}", said.trim())));
        }
        Ok(parse(&String::from_utf8_lossy(&script.stdout)))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.perf.try_wait().is_ok_and(|status| status.is_none()) {
            let _ = self.perf.kill();
            let _ = self.perf.wait();
        }
    }
}

fn explain(e: io::Error) -> io::Error {
    if e.kind() != io::ErrorKind::NotFound {
        return e;
    }
    let advice = "`perf` is not installed, so there are no samples and no flame graph; on Debian and Ubuntu, \
        install linux-perf or \
                  linux-tools-generic";
    io::Error::new(io::ErrorKind::NotFound, advice)
}

/// Reads what `perf script -F comm,pid,ip,sym,dso` prints: a line with the thread, a line per frame
/// from the innermost out, an empty line. What does not look like that is passed over.
pub fn parse(text: &str) -> Vec<Sample> {
    let mut samples = Vec::new();
    let mut current: Option<Sample> = None;
    for line in text.lines() {
        if line.trim().is_empty() {
            samples.extend(current.take().filter(|s| !s.frames.is_empty()));
        } else if line.starts_with(char::is_whitespace) && current.is_some() {
            let frame = frame_of(line);
            if let (Some(s), Some(frame)) = (&mut current, frame) {
                s.frames.push(frame);
            }
        } else {
            samples.extend(current.take().filter(|s| !s.frames.is_empty()));
            current = head_of(line);
        }
    }
    samples.extend(current.filter(|s| !s.frames.is_empty()));
    samples
}

fn head_of(line: &str) -> Option<Sample> {
    let (thread, pid) = line.trim().rsplit_once(char::is_whitespace)?;
    Some(Sample { thread: thread.trim().to_owned(), pid: pid.parse().ok()?, frames: Vec::new() })
}

fn frame_of(line: &str) -> Option<Frame> {
    let (address, rest) = line.trim().split_once(' ')?;
    let (function, file) = rest.rsplit_once(" (")?;
    Some(Frame {
        address: u64::from_str_radix(address, 16).ok()?,
        function: function.to_owned(),
        file: file.strip_suffix(')')?.to_owned(),
    })
}

/// Writes text to a file, naming it in the error.
///
/// # Errors
/// The error of writing.
pub fn write(path: &std::path::Path, bytes: &[u8]) -> io::Result<()> {
    let written = fs::File::create(path).and_then(|mut f| f.write_all(bytes));
    written.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCRIPT: &str = "near end   917 \n\
        \tffffffff81b9764c tcp_sendmsg ([kernel.kallsyms])\n\
        \t           14813 <fulmar_stack::tcp::Tcb>::output (inlined) (/opt/a b/fulmar)\n\
        \t               0 [unknown] ([unknown])\n\
        \n\
        perf nonsense\n\
        empty 3\n\
        \n\
        x 4\n\
        \t10 f (/lib/libc.so.6)\n";

    #[test]
    fn threads_frames_and_files_are_read_whatever_their_names_hold() {
        let samples = parse(SCRIPT);
        assert_eq!(samples.len(), 2);
        assert_eq!((samples[0].thread.as_str(), samples[0].pid), ("near end", 917));
        assert_eq!(samples[0].frames.len(), 3);
        assert!(samples[0].frames[0].is_kernel() && !samples[0].frames[2].is_kernel());
        assert_eq!(samples[0].frames[1].file, "/opt/a b/fulmar");
        assert_eq!(samples[0].frames[1].address, 0x14813);
        assert_eq!(samples[1].frames[0].function, "f");
    }

    #[test]
    fn any_text_at_all_is_survived() {
        for end in 0..SCRIPT.len() {
            parse(&SCRIPT[end..]);
            parse(&SCRIPT[..end]);
        }
        assert!(parse("\t( (\n)\n  zz\n").is_empty());
    }
}
