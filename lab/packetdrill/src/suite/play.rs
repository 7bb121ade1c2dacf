//! Plays the scripts of one suite from a copy.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Place, Suite};
use crate::settings::SETTINGS_ENV;

/// How a script ended.
pub enum Outcome {
    Passed,
    /// With packetdrill's message.
    Failed(String),
}

/// Real time of one script at most. All take milliseconds of CPU time, on a machine that may be busy.
const LIMIT: Duration = Duration::from_secs(60);

/// Commands of scripts that would change the machine. Those that set sysctls note them for the stack.
const HARMLESS: [&str; 8] =
    ["ip", "tc", "ethtool", "ifconfig", "kldload", "kldunload", "nstat", "modprobe"];

const SYSCTL: &str = "#!/bin/sh\nfor a; do case \"$a\" in *=*) echo \"$a\" >> \"$FULMAR_PACKETDRILL_SYSCTLS\";; esac; done\n";

/// A suite that is ready to be played; the copy is removed with it.
pub struct Stage<'a> {
    place: &'a Place,
    suite: &'a Suite,
    dir: PathBuf,
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        // A copy that stays is only in the way of the disk.
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// The Fast Open cookie of [`ADDRESSES`] under the key that scripts set.
const COOKIE: &str = "3021b9d889017eeb";
const ADDRESSES: [&str; 3] =
    ["--local_ip=192.168.0.1", "--netmask_ip=255.255.0.0", "--remote_ip=192.0.2.1"];

/// What google's own runner (gtests/net/packetdrill/run_all.py) gives to scripts that use it, for IPv4. Without the
/// addresses packetdrill takes random ones, which have another cookie.
fn arguments_of_runner(script: &str) -> Vec<String> {
    let mut arguments = Vec::new();
    if script.contains("TFO_COOKIE") || script.contains(COOKIE) {
        arguments.extend(ADDRESSES.map(str::to_owned));
        arguments.push(format!("-DTFO_COOKIE={COOKIE}"));
    }
    if script.contains(" CODE") {
        arguments.push("-DCODE=host_unreachable".to_owned());
    }
    arguments
}

fn told<T>(what: &Path, result: std::io::Result<T>) -> Result<T, String> {
    result.map_err(|e| format!("{}: {e}", what.display()))
}

fn write_command(path: &Path, text: &str) -> Result<(), String> {
    told(path, fs::write(path, text))?;
    told(path, fs::set_permissions(path, fs::Permissions::from_mode(0o755)))
}

impl<'a> Stage<'a> {
    /// Copies the suite and adds harmless substitutes of commands.
    pub fn new(place: &'a Place, suite: &'a Suite, from: &Path) -> Result<Stage<'a>, String> {
        let name = format!("fulmar-conformance-{}-{}", suite.name, std::process::id());
        let dir = std::env::temp_dir().join(name);
        let stage = Stage { place, suite, dir };
        stage.copy(from, &stage.dir.join("suite"))?;
        let commands = stage.dir.join("commands");
        told(&commands, fs::create_dir_all(&commands))?;
        write_command(&commands.join("sysctl"), SYSCTL)?;
        for name in HARMLESS {
            write_command(&commands.join(name), "#!/bin/sh\nexit 0\n")?;
        }
        Ok(stage)
    }

    fn copy(&self, from: &Path, to: &Path) -> Result<(), String> {
        told(to, fs::create_dir_all(to))?;
        for entry in told(from, fs::read_dir(from))? {
            let from = told(from, entry)?.path();
            let Some(name) = from.file_name() else { continue };
            let to = to.join(name);
            // Links are followed: google's suite has them.
            if from.is_dir() {
                if name != ".git" && name != "packetdrill" {
                    self.copy(&from, &to)?;
                }
            } else if name == "set_sysctls.py" {
                write_command(&to, SYSCTL)?;
            } else if from.extension().is_some_and(|e| e == "pkt") {
                let text = String::from_utf8_lossy(&told(&from, fs::read(&from))?).into_owned();
                told(&to, fs::write(&to, (self.suite.adapt)(&text)))?;
            } else {
                told(&from, fs::copy(&from, &to))?;
            }
        }
        Ok(())
    }

    fn scripts(&self) -> Result<Vec<String>, String> {
        let root = self.dir.join("suite").join(self.suite.scripts);
        let mut found = Vec::new();
        let mut open = vec![root.clone()];
        while let Some(dir) = open.pop() {
            for entry in told(&dir, fs::read_dir(&dir))? {
                let path = told(&dir, entry)?.path();
                if path.is_dir() {
                    open.push(path);
                } else if path.extension().is_some_and(|e| e == "pkt")
                    && let Ok(relative) = path.strip_prefix(&root)
                {
                    found.push(relative.to_string_lossy().into_owned());
                }
            }
        }
        found.sort();
        Ok(found)
    }

    /// Plays every script whose path contains `only`, one at a time on each CPU.
    pub fn play_all(&self, only: &str) -> Result<Vec<(String, Outcome)>, String> {
        let scripts: Vec<String> =
            self.scripts()?.into_iter().filter(|s| s.contains(only)).collect();
        let (next, outcomes) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        let workers = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| {
                    while let Some(script) = scripts.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let outcome = self.play(script).unwrap_or_else(Outcome::Failed);
                        let mut all = outcomes.lock().expect("no worker panics while it holds it");
                        all.push((script.clone(), outcome));
                    }
                });
            }
        });
        let mut outcomes = outcomes.into_inner().map_err(|_| "a worker panicked".to_owned())?;
        outcomes.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(outcomes)
    }

    fn play(&self, script: &str) -> Result<Outcome, String> {
        let path = self.dir.join("suite").join(self.suite.scripts).join(script);
        let file = script.replace('/', "_");
        let settings = self.dir.join(format!("{file}.sysctls"));
        let output = self.dir.join(format!("{file}.output"));
        let text = told(&path, fs::read_to_string(&path))?;
        let mtu = text.lines().find_map(|l| l.strip_prefix("--mtu="));
        let mtu = mtu.map(|mtu| format!("fulmar.mtu={mtu}\n")).unwrap_or_default();
        told(&settings, fs::write(&settings, mtu + self.suite.settings))?;
        let log = told(&output, fs::File::create(&output))?;
        let library = &self.place.library;
        let own_path = std::env::var("PATH").unwrap_or_default();
        let program = Command::new(&self.place.program)
            .arg(format!("--so_filename={}", library.display()))
            .args(arguments_of_runner(&text))
            .arg(path.file_name().unwrap_or_default())
            .current_dir(path.parent().unwrap_or(Path::new(".")))
            .env("PATH", format!("{}:{own_path}", self.dir.join("commands").display()))
            .env("LD_PRELOAD", library)
            .env(SETTINGS_ENV, &settings)
            .stdin(Stdio::null())
            .stdout(told(&output, log.try_clone())?)
            .stderr(log)
            .spawn();
        let mut program = told(&self.place.program, program)?;
        let start = Instant::now();
        let status = loop {
            match told(&self.place.program, program.try_wait())? {
                Some(status) => break Some(status),
                None if start.elapsed() > LIMIT => {
                    told(&self.place.program, program.kill())?;
                    told(&self.place.program, program.wait())?;
                    break None;
                }
                None => thread::sleep(Duration::from_millis(2)),
            }
        };
        if status.is_some_and(|s| s.success()) {
            return Ok(Outcome::Passed);
        }
        let text = fs::read_to_string(&output).unwrap_or_default();
        let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
        let message = if status.is_none() { "took too long".to_owned() } else { lines.join(" / ") };
        Ok(Outcome::Failed(message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_that_names_a_cookie_is_played_between_the_addresses_of_that_cookie() {
        let remote = "--remote_ip=192.0.2.1".to_owned();
        assert!(arguments_of_runner("+0 > S. 0:0(0) ack 1 <FO TFO_COOKIE>").contains(&remote));
        assert!(arguments_of_runner(&format!("+0 < S 0:9(9) <FO {COOKIE}>")).contains(&remote));
        assert_eq!(arguments_of_runner("+0 < S 0:0(0) win 9 <mss 1000>"), Vec::<String>::new());
    }
}
