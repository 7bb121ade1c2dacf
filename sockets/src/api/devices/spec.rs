//! Devices by name, as on a command line or in a configuration.

use std::fmt;
use std::io;
use std::str::FromStr;

use crate::drivers::OpenError;
use fulmar_stack::device::Device;

use super::{PacketConfig, PacketSocket, Queues, packet_queues, shm, tap_queues, tun_queues};

/// The forms of a device's name, for an error message.
pub(super) const SYNTAX: &str =
    "expected NAME (an interface), tap:NAME, tun:NAME, packet:INTERFACE or shm:NAME";
/// An interface name with its final zero (IFNAMSIZ of linux/if.h).
const IFNAMSIZ: usize = 16;

/// A device by its name.
///
/// ```
/// use fulmar::devices::Spec;
///
/// let spec: Spec = "tap:tap0".parse()?;
/// assert_eq!(spec, Spec::Tap("tap0".to_owned()));
/// // `spec.open(4)?` opens four queues.
/// # Ok::<(), fulmar::devices::ParseSpecError>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
#[allow(clippy::exhaustive_enums, reason = "a caller decides about each kind")]
pub enum Spec {
    /// `NAME`: an interface of any kind. A TAP if it is one or does not exist yet, a TUN if it is one, else
    /// as [`Spec::Packet`].
    Interface(String),
    /// `tap:NAME`: see [`tap`](super::tap).
    Tap(String),
    /// `tun:NAME`: see [`tun`](super::tun).
    Tun(String),
    /// `packet:INTERFACE`: see [`packet`](super::packet).
    Packet(String),
    /// `shm:NAME`: see [`shm`](super::shm).
    Shm(String),
}

/// The text is not the name of a device.
///
/// ```
/// use fulmar::devices::{ParseSpecError, Spec};
///
/// let error: ParseSpecError = "tap:".parse::<Spec>().unwrap_err();
/// assert!(error.to_string().contains("expected NAME (an interface), tap:NAME"));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ParseSpecError(pub(super) String);

impl fmt::Display for ParseSpecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {SYNTAX}", self.0)
    }
}

impl std::error::Error for ParseSpecError {}

impl FromStr for Spec {
    type Err = ParseSpecError;

    fn from_str(text: &str) -> Result<Spec, ParseSpecError> {
        match text.split_once(':') {
            None if !matches!(text, "" | "tap" | "tun" | "packet" | "shm") => {
                interface_name(text).map(Spec::Interface)
            }
            Some(("tap", name)) => interface_name(name).map(Spec::Tap),
            Some(("tun", name)) => interface_name(name).map(Spec::Tun),
            Some(("packet", name)) => interface_name(name).map(Spec::Packet),
            Some(("shm", name)) if !name.is_empty() => Ok(Spec::Shm(name.to_owned())),
            _ => Err(ParseSpecError(format!("invalid device `{text}`"))),
        }
    }
}

/// Linux names interfaces with 1 to 15 bytes, no slash, no colon, no space (dev_valid_name), and ends a name at
/// a zero.
fn interface_name(name: &str) -> Result<String, ParseSpecError> {
    let fits = (1..IFNAMSIZ).contains(&name.len()) && name != "." && name != "..";
    let is_clean = !name.contains(|c: char| c == '/' || c == ':' || c == '\0' || c.is_whitespace());
    if fits && is_clean {
        return Ok(name.to_owned());
    }
    Err(ParseSpecError(format!(
        "invalid interface name `{name}` (1 to 15 characters, no space, slash or colon)"
    )))
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Spec::Interface(name) => f.write_str(name),
            Spec::Tap(name) => write!(f, "tap:{name}"),
            Spec::Tun(name) => write!(f, "tun:{name}"),
            Spec::Packet(name) => write!(f, "packet:{name}"),
            Spec::Shm(name) => write!(f, "shm:{name}"),
        }
    }
}

impl Spec {
    /// Opens `queues` queues of the device, each for a shard of its own: see [`Builder::devices`](crate::Builder::devices).
    ///
    /// # Errors
    /// As [`open`](super::open); [`Spec::Shm`] has one queue.
    pub fn open(&self, queues: u16) -> Result<Queues, OpenError> {
        match self {
            Spec::Interface(name) => open_interface(name, queues),
            Spec::Tap(name) => tap_queues(name, queues),
            Spec::Tun(name) => tun_queues(name, queues),
            Spec::Packet(name) => packet_queues(name, queues),
            Spec::Shm(_) if queues > 1 => {
                let what = format!("cannot open {queues} queues of {self}");
                let unsupported = io::ErrorKind::Unsupported.into();
                Err(OpenError::new(what, unsupported, "shared memory supports one queue"))
            }
            Spec::Shm(name) => Ok(vec![shm(name)?.0]),
        }
    }

    /// Opens the first queue alone.
    pub(super) fn open_one(&self) -> Result<Box<dyn Device>, OpenError> {
        let mut queues = self.open(1)?;
        Ok(queues.pop().expect("invariant: one queue was asked for"))
    }
}

/// As a TAP; if it is no TAP, as a TUN; if it is neither, or they cannot be had here, as the Ethernet interface
/// that it is.
fn open_interface(name: &str, queues: u16) -> Result<Queues, OpenError> {
    let mut refused = match tap_queues(name, queues) {
        // A TAP of another program: frames would be shared with that.
        Err(e) if e.source.kind() != io::ErrorKind::ResourceBusy => e,
        opened => return opened,
    };
    let is_no_tap = refused.source.kind() == io::ErrorKind::InvalidInput;
    // An interface of this name exists, so that none is created.
    if is_no_tap && let Ok(opened) = tun_queues(name, queues) {
        return Ok(opened);
    }
    match sole_packet_queues(name, queues) {
        Err(e) if is_no_tap || is_interface(name) => Err(e),
        Err(_) => {
            refused.advice.push_str("; or run the program as `fulmar sandbox -- PROGRAM`");
            Err(refused)
        }
        opened => opened,
    }
}

/// Queues of an Ethernet interface that no other program opens by its plain name.
fn sole_packet_queues(name: &str, queues: u16) -> Result<Queues, OpenError> {
    let config =
        PacketConfig { interface: name.to_owned(), exclusive: true, ..PacketConfig::default() };
    let sockets = PacketSocket::open_queues(&config, queues)?;
    Ok(sockets.into_iter().map(|s| Box::new(s) as _).collect())
}

/// Whether the network namespace has an interface of this name.
fn is_interface(name: &str) -> bool {
    let interfaces = std::fs::read_to_string("/proc/net/dev").unwrap_or_default();
    interfaces.lines().any(|line| line.split_once(':').is_some_and(|(of, _)| of.trim() == name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_named_by_kind_and_interface() {
        for (text, spec) in [
            ("fulmar0", Spec::Interface("fulmar0".into())),
            ("tap:t0", Spec::Tap("t0".into())),
            ("tun:t0", Spec::Tun("t0".into())),
            ("packet:eth0.5", Spec::Packet("eth0.5".into())),
            ("shm:/tmp/a:b", Spec::Shm("/tmp/a:b".into())),
        ] {
            assert_eq!(text.parse(), Ok(spec.clone()));
            assert_eq!(spec.to_string(), text);
        }
    }

    #[test]
    fn an_invalid_device_is_refused_with_the_valid_forms() {
        let long = "tap:sixteen-letters-";
        for text in [
            "", "shm", "shm:", "tap", "tap:", "tun", "tun:", "tap:a/b", "tap:..", "a b", "a\0b",
            long,
        ] {
            let error = text.parse::<Spec>().unwrap_err().to_string();
            assert!(error.contains("packet:INTERFACE"), "{text}: {error}");
        }
    }

    #[test]
    fn shared_memory_is_refused_with_several_queues_before_it_waits_for_anybody() {
        let error = Spec::Shm("nobody".into()).open(2).err().expect("one queue").to_string();
        assert!(error.contains("one queue"), "{error}");
    }
}
