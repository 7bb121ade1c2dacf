//! Ways out of a network namespace besides the network: Unix sockets by path and inherited sockets, through which other
//! processes act for a program.
//!
//! Sources: unix(7), dbus-daemon(1), ssh-agent(1), sd_bus_open_user(3), Xserver(1), tmux(1).

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use caps::{CapSet, Capability};
use nix::sys::socket::{
    AddressFamily, SockType, SockaddrLike, SockaddrStorage, getpeername, getsockname, getsockopt,
    sockopt,
};
use nix::sys::stat::{SFlag, fstat};
use nix::unistd::{AccessFlags, access, geteuid};

/// Services that open connections or start programs for their clients, and where their sockets are. `@` is the user's
/// runtime folder, `~` the home folder, `#` the user's id; a path that ends in a slash is a folder of sockets.
const SERVICES: [(&str, &[&str]); 21] = [
    (
        "Docker",
        &[
            "/run/docker.sock",
            "@/docker.sock",
            "~/.docker/run/docker.sock",
            "~/.docker/desktop/docker.sock",
        ],
    ),
    ("containerd", &["/run/containerd/containerd.sock", "@/containerd/containerd.sock"]),
    ("Podman", &["/run/podman/podman.sock", "@/podman/podman.sock"]),
    ("BuildKit", &["/run/buildkit/buildkitd.sock", "@/buildkit/buildkitd.sock"]),
    ("CRI-O", &["/run/crio/crio.sock"]),
    ("libvirt", &["/run/libvirt/libvirt-sock", "@/libvirt/libvirt-sock"]),
    (
        "LXD or Incus",
        &[
            "/var/lib/lxd/unix.socket",
            "/var/snap/lxd/common/lxd/unix.socket",
            "/var/lib/incus/unix.socket",
        ],
    ),
    ("snapd", &["/run/snapd.socket"]),
    ("nix-daemon", &["/nix/var/nix/daemon-socket/socket"]),
    ("the D-Bus session", &["@/bus"]),
    ("systemd", &["/run/systemd/private", "@/systemd/private"]),
    ("ssh-agent", &["@/openssh_agent", "@/ssh-agent.socket", "@/keyring/ssh"]),
    ("gpg-agent", &["@/gnupg/S.gpg-agent", "~/.gnupg/S.gpg-agent", "@/gnupg/S.gpg-agent.ssh"]),
    ("X11", &["/tmp/.X11-unix/"]),
    ("Wayland", &["@/wayland-0", "@/wayland-1"]),
    ("PulseAudio", &["@/pulse/native"]),
    ("PipeWire", &["@/pipewire-0"]),
    ("Windows", &["/run/WSL/"]),
    ("Emacs", &["@/emacs/", "/tmp/emacs#/"]),
    ("tmux", &["/tmp/tmux-#/"]),
    ("screen", &["/run/screen/S-#/", "~/.screen/"]),
];

/// Variables that name a socket: of a path, or of an address with `unix:`.
const VARIABLES: [(&str, &str); 14] = [
    ("Docker", "DOCKER_HOST"),
    ("Podman", "CONTAINER_HOST"),
    ("the D-Bus session", "DBUS_SESSION_BUS_ADDRESS"),
    ("the D-Bus system bus", "DBUS_SYSTEM_BUS_ADDRESS"),
    ("ssh-agent", "SSH_AUTH_SOCK"),
    ("Wayland", "WAYLAND_DISPLAY"),
    ("PulseAudio", "PULSE_SERVER"),
    ("tmux", "TMUX"),
    ("Visual Studio Code", "VSCODE_IPC_HOOK_CLI"),
    ("Windows", "WSL_INTEROP"),
    ("sway", "SWAYSOCK"),
    ("i3", "I3SOCK"),
    ("kitty", "KITTY_LISTEN_ON"),
    ("Neovim", "NVIM"),
];

/// A socket of a service.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ServiceSocket {
    /// The service.
    pub name: &'static str,
    /// Where it is.
    pub path: PathBuf,
}

/// The known sockets to which this user may connect, by service. `variable`: looks up the environment.
pub fn service_sockets(variable: impl Fn(&str) -> Option<OsString>) -> Vec<ServiceSocket> {
    let mut found: Vec<ServiceSocket> = Vec::new();
    let mut add = |name, path: PathBuf| {
        let Ok(path) = path.canonicalize() else { return };
        if is_reachable(&path) && !found.iter().any(|own| own.path == path) {
            found.push(ServiceSocket { name, path });
        }
    };
    for (name, known) in VARIABLES {
        let paths = variable(known).map(|value| paths_of(&value)).unwrap_or_default();
        let runtime = variable("XDG_RUNTIME_DIR").unwrap_or_default();
        paths.into_iter().for_each(|path| add(name, Path::new(&runtime).join(path)));
    }
    for (name, places) in SERVICES {
        let full = places.iter().filter_map(|place| expand(place, &variable));
        full.flat_map(|path| sockets_at(&path)).for_each(|path| add(name, path));
    }
    found.sort_by_key(|socket| SERVICES.iter().position(|(name, _)| *name == socket.name));
    found
}

/// The paths of a variable: `unix:path=/run/bus,guid=0;...`, `unix:///run/docker.sock`, `/tmp/tmux-0/default,1,0`, or a
/// path.
fn paths_of(value: &OsStr) -> Vec<PathBuf> {
    let path = |address: &[u8]| {
        let address = address.strip_prefix(b"unix:").unwrap_or(address);
        let part = address.split(|byte| *byte == b',').find_map(|part| match part {
            [b'/', ..] => Some(part),
            _ => part.strip_prefix(b"path="),
        });
        let part = part.or(Some(address).filter(|a| !a.contains(&b':') && !a.contains(&b'=')))?;
        let part = part.strip_prefix(b"//").unwrap_or(part);
        (!part.is_empty()).then(|| PathBuf::from(OsString::from_vec(part.to_vec())))
    };
    value.as_bytes().split(|byte| *byte == b';').filter_map(path).collect()
}

fn expand(place: &str, variable: &impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let below = |name: &str, rest: &str| {
        let folder = variable(name).filter(|value| !value.is_empty())?;
        Some(Path::new(&folder).join(rest.trim_start_matches('/')))
    };
    match place.split_at(1) {
        ("@", rest) => below("XDG_RUNTIME_DIR", rest)
            .or_else(|| Some(PathBuf::from(format!("/run/user/{}{rest}", geteuid())))),
        ("~", rest) => below("HOME", rest),
        _ => Some(place.replace('#', &geteuid().to_string()).into()),
    }
}

/// The path itself, or the entries of a folder.
fn sockets_at(path: &Path) -> Vec<PathBuf> {
    if !path.as_os_str().as_bytes().ends_with(b"/") {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Whether a path is a socket to which this user may connect (unix(7)).
fn is_reachable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| m.file_type().is_socket())
        && access(path, AccessFlags::W_OK).is_ok()
}

/// The sockets among the inherited descriptors, without standard streams that lead to their other ends only. To be called
/// before this process opens a socket.
pub fn inherited_sockets() -> Vec<RawFd> {
    let is_socket = |fd: &RawFd| {
        let target = fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
        target.as_os_str().as_bytes().starts_with(b"socket:")
    };
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let further = numbers.filter(|fd| *fd > libc::STDERR_FILENO).filter(is_socket);
    let of_streams = STREAMS.iter().map(|(_, _, stream)| stream());
    let open = of_streams.filter(|stream| matches!(open_socket(stream.as_fd()), Ok(Some(_))));
    let mut found: Vec<RawFd> =
        open.map(|stream| stream.as_fd().as_raw_fd()).chain(further).collect();
    found.sort_unstable();
    found
}

/// Whether a program would keep this process's capabilities over its namespaces, which it could leave then
/// ([`enter_with_mounts`](crate::netns::enter_with_mounts)).
pub fn has_capabilities() -> bool {
    caps::has_cap(None, CapSet::Effective, Capability::CAP_SYS_ADMIN).unwrap_or(false)
}

/// The standard streams: a name, how to put a pipe or nothing in the place of one, and the stream.
type Stream = (&'static str, &'static str, fn() -> Box<dyn AsFd>);
const STREAMS: [Stream; 3] = [
    ("standard input", "`cat | fulmar run ...`; in a systemd unit StandardInput=null", || {
        Box::new(io::stdin())
    }),
    ("standard output", "`fulmar run ... | cat`; in a systemd unit StandardOutput=journal", || {
        Box::new(io::stdout())
    }),
    (
        "standard error",
        "`fulmar run ... 2>&1 | cat`; in a systemd unit StandardError=journal",
        || Box::new(io::stderr()),
    ),
];

/// Checks that the standard streams lead nowhere but to their other ends: a folder leads to all files of the
/// caller's mount namespace, and a socket to every address of its family, unless it is a connected Unix stream.
///
/// # Errors
/// A sentence that names the stream and what to use instead.
pub fn check_standard_streams() -> io::Result<()> {
    for (name, instead, stream) in STREAMS {
        let stream = stream();
        let Some(what) = folder(stream.as_fd())?.or(open_socket(stream.as_fd())?) else { continue };
        let sentence = format!(
            "{name} is {what}, through which the program reaches others; use a file or a pipe instead ({instead})"
        );
        return Err(io::Error::new(io::ErrorKind::InvalidInput, sentence));
    }
    Ok(())
}

fn folder(stream: BorrowedFd<'_>) -> io::Result<Option<&'static str>> {
    Ok(is_a(SFlag::S_IFDIR, stream)?.then_some("a folder"))
}

/// A socket that its owner can connect to others, or send from to others: all but Unix ones with a peer for life
/// (unix(7)). A TCP connection is dissolved by AF_UNSPEC (connect(2)).
fn open_socket(stream: BorrowedFd<'_>) -> io::Result<Option<&'static str>> {
    if !is_a(SFlag::S_IFSOCK, stream)? {
        return Ok(None);
    }
    let family = getsockname::<SockaddrStorage>(stream.as_raw_fd())?.family();
    Ok(match (family, getsockopt(&stream, sockopt::SockType)?) {
        (Some(AddressFamily::Unix), SockType::Stream | SockType::SeqPacket) => {
            let has_peer = getpeername::<SockaddrStorage>(stream.as_raw_fd()).is_ok();
            (!has_peer).then_some("a Unix socket without a peer")
        }
        (Some(AddressFamily::Unix), _) => Some("a Unix datagram socket"),
        (Some(AddressFamily::Inet | AddressFamily::Inet6), _) => Some("an Internet socket"),
        _ => Some("a socket"),
    })
}

fn is_a(kind: SFlag, stream: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(SFlag::from_bits_truncate(fstat(stream)?.st_mode) & SFlag::S_IFMT == kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    fn paths(value: &str) -> Vec<String> {
        let paths = paths_of(OsStr::new(value));
        paths.into_iter().map(|path| path.display().to_string()).collect()
    }

    #[test]
    fn a_variable_names_a_socket_by_path_or_address() {
        assert_eq!(paths("/tmp/ssh-x/agent.1"), ["/tmp/ssh-x/agent.1"]);
        assert_eq!(paths("unix:///run/docker.sock"), ["/run/docker.sock"]);
        assert_eq!(paths("unix:path=/run/bus,guid=7;unix:path=/b"), ["/run/bus", "/b"]);
        assert_eq!(paths("unix:guid=7,path=/run/bus"), ["/run/bus"]);
        assert_eq!(paths("/tmp/tmux-0/default,12,0"), ["/tmp/tmux-0/default"]);
        assert_eq!(paths("unix:/run/pulse/native"), ["/run/pulse/native"]);
        assert_eq!(paths("wayland-0"), ["wayland-0"]);
        for none in ["", ";", "tcp://127.0.0.1:2375", "unix:abstract=/tmp/x", "tcp:localhost:4713"]
        {
            assert!(paths(none).is_empty(), "{none}: {:?}", paths(none));
        }
    }

    #[test]
    fn sockets_of_variables_and_of_known_places_are_found_once() {
        let folder = std::env::temp_dir().join(format!("fulmar-outside-{}", std::process::id()));
        fs::create_dir_all(folder.join("pulse")).unwrap();
        let folder = folder.canonicalize().unwrap();
        let _listening = ["bus", "wayland-7", "agent"]
            .map(|name| UnixListener::bind(folder.join(name)).unwrap());
        fs::write(folder.join("pulse/native"), "no socket").unwrap();
        let variable = |name: &str| match name {
            "XDG_RUNTIME_DIR" | "HOME" => Some(folder.clone().into_os_string()),
            "SSH_AUTH_SOCK" => Some(folder.join("agent").into_os_string()),
            "DBUS_SESSION_BUS_ADDRESS" => {
                Some(format!("unix:path={}", folder.join("bus").display()).into())
            }
            "WAYLAND_DISPLAY" => Some("wayland-7".into()),
            _ => None,
        };
        let found = service_sockets(variable);
        let own = found.iter().filter(|socket| socket.path.starts_with(&folder));
        let names: Vec<_> = own.map(|socket| socket.name).collect();
        assert_eq!(names, ["the D-Bus session", "ssh-agent", "Wayland"]);
        fs::remove_dir_all(&folder).unwrap();
    }
}
