//! A host, a guest and a gateway between them.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use fulmar::internals::drivers::packet::{PacketConfig, PacketSocket};
use fulmar::internals::drivers::tap::{Tap, TapConfig};
use fulmar_gateway::config::Config;
use fulmar_gateway::guest::{GuestNetwork, GuestOptions};
use fulmar_gateway::host::HostNetwork;
use fulmar_gateway::netns::{Netns, VethEnd};
use fulmar_gateway::policy::Protocol;
use fulmar_gateway::ports::Forward;
use fulmar_gateway::rules::Rules;
use fulmar_gateway::stat::{Stat, Summary};
use fulmar_gateway::{Gateway, Handle};
use fulmar_stack::base::EtherAddr;
use fulmar_stack::device::Device;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, connect, socket};

/// Long enough for any machine; a test that waits for it fails.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const GUEST: &str = "10.0.0.2";
pub const GUEST_V6: &str = "fd00::2";
pub const ROUTER: &str = "10.0.0.1";
/// An address of the host that leads to itself.
pub const HOST: &str = "192.0.2.1";
pub const HOST_V6: &str = "2001:db8::1";

pub fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Queues of the worlds that are made from now on.
pub static QUEUES: AtomicU16 = AtomicU16::new(1);

/// Whether their guests have one end of a veth pair with packet sockets on the other, not a TAP.
pub static HAS_VETH: AtomicBool = AtomicBool::new(false);

/// The queues of a TAP of the calling thread's namespace.
pub fn open_tap(mtu: u32) -> io::Result<Vec<Tap>> {
    let config = TapConfig {
        name: "eth0".into(),
        mtu: Some(mtu as usize),
        predict: false,
        ..TapConfig::default()
    };
    let taps = Tap::open_queues(&config, QUEUES.load(Relaxed));
    taps.map_err(|e| io::Error::other(e.to_string()))
}

/// Packet sockets on the far end of a veth pair that has its near end in the guest's namespace.
fn open_veth(guest: &Netns, mtu: u32) -> io::Result<Vec<PacketSocket>> {
    let own = Netns::new()?;
    let [near, far] = [1, 2].map(|n| VethEnd { name: "eth0", mac: [2, 0, 0, 0, 2, n], mtu });
    own.netlink()?.add_veth_at(&far, &near, guest.as_fd(), 1 << 20)?;
    own.set_up_silent("eth0")?;
    let config =
        PacketConfig { interface: "eth0".into(), predict: false, ..PacketConfig::default() };
    own.run(|| Ok(PacketSocket::open_queues(&config, QUEUES.load(Relaxed))?))
}

/// The far end of a guest's interface.
fn open_far_end(guest: &Netns, mtu: u32) -> io::Result<Vec<Box<dyn Device>>> {
    fn boxed(devices: Vec<impl Device + 'static>) -> Vec<Box<dyn Device>> {
        devices.into_iter().map(|device| Box::new(device) as Box<dyn Device>).collect()
    }
    match HAS_VETH.load(Relaxed) {
        true => open_veth(guest, mtu).map(boxed),
        false => guest.run(|| open_tap(mtu)).map(boxed),
    }
}

/// Gives the host its addresses.
pub fn prepare_host() {
    let host = Netns::current().unwrap();
    host.set_address("lo", ip(HOST), 32).unwrap();
    host.set_address("lo", ip(HOST_V6), 128).unwrap();
}

/// The requests to the gateway's first thread.
enum Ask {
    Stat,
    /// Whether a port can be published, over TCP or UDP.
    Publish(Protocol, Forward, Sender<io::Result<()>>),
    /// To say that it waits, and to wait until the other end is gone.
    Hold(Sender<()>, Receiver<()>),
    /// To ask the policy again.
    Decide,
    /// To give the policy rules.
    Rules(Rules),
}

/// A running gateway and its guest.
pub struct World {
    pub guest: Netns,
    /// Ethernet address of the gateway.
    pub router: EtherAddr,
    stop: Option<UnixStream>,
    guest_end: Option<UnixStream>,
    ask: Sender<Ask>,
    said: Receiver<Stat>,
    asked: UnixStream,
    gateway: Option<JoinHandle<Summary>>,
}

fn network(mtu: u32) -> GuestNetwork {
    let options = GuestOptions {
        name: Some("eth0".into()),
        mtu: Some(mtu),
        addresses: vec![(ip(GUEST), Some(24)), (ip(GUEST_V6), Some(64))],
        gateways: vec![ip(ROUTER), ip("fd00::1")],
        ..GuestOptions::default()
    };
    GuestNetwork::like(&HostNetwork::default(), &options)
}

impl World {
    pub fn new() -> World {
        World::with(65520, |_| ())
    }

    pub fn with(mtu: u32, change: impl FnOnce(&mut Config)) -> World {
        World::with_prepared(mtu, change, || ())
    }

    /// The gateway's first thread begins with `prepare`; the others inherit what it does to itself.
    pub fn with_prepared(
        mtu: u32,
        change: impl FnOnce(&mut Config),
        prepare: impl FnOnce() + Send + 'static,
    ) -> World {
        let guest = Netns::new().unwrap();
        let network = network(mtu);
        let queues = open_far_end(&guest, mtu).unwrap();
        network.configure(&guest).unwrap();
        let router = queues[0].caps().ether;
        let mut config = Config::new(queues, network);
        change(&mut config);
        let mut gateway = Gateway::new(config).unwrap_or_else(|e| panic!("{e}"));
        let (stop, stopped) = UnixStream::pair().unwrap();
        let end = Box::new(|_: &OwnedFd, _: &mut Handle<'_>| ControlFlow::Break(()));
        gateway.on_readable(stopped.into(), end).unwrap();
        let (guest_end, guest_ended) = UnixStream::pair().unwrap();
        let end = Box::new(|_: &OwnedFd, handle: &mut Handle<'_>| {
            handle.note_guest_exited();
            ControlFlow::Break(())
        });
        gateway.on_readable(guest_ended.into(), end).unwrap();
        let (asked, asks) = UnixStream::pair().unwrap();
        let (ask, wanted) = channel();
        let (say, said) = channel();
        let answer = move |fd: &OwnedFd, handle: &mut Handle<'_>| {
            let mut byte = [0];
            nix::unistd::read(fd, &mut byte).unwrap();
            while let Ok(ask) = wanted.try_recv() {
                match ask {
                    Ask::Decide => handle.decide_again(),
                    Ask::Rules(rules) => handle.set_rules(rules),
                    Ask::Stat => say.send(handle.stat()).unwrap(),
                    Ask::Publish(Protocol::Udp, port, done) => {
                        done.send(handle.publish_udp(&port)).unwrap();
                    }
                    Ask::Publish(_, port, done) => done.send(handle.publish_tcp(&port)).unwrap(),
                    Ask::Hold(waits, until) => {
                        waits.send(()).unwrap();
                        until.recv().unwrap_err();
                    }
                }
            }
            ControlFlow::Continue(())
        };
        gateway.on_readable(asks.into(), Box::new(answer)).unwrap();
        let gateway = std::thread::spawn(move || {
            prepare();
            gateway.run().unwrap()
        });
        let (stop, guest_end) = (Some(stop), Some(guest_end));
        World { guest, router, stop, guest_end, ask, said, asked, gateway: Some(gateway) }
    }

    fn ask(&self, ask: Ask) {
        self.ask.send(ask).unwrap();
        nix::unistd::write(&self.asked, &[1]).unwrap();
    }

    /// The gateway's first thread then finds all events of the meantime at once.
    pub fn while_held<T>(&self, meantime: impl FnOnce() -> T) -> T {
        let ((waits, waiting), (release, until)) = (channel(), channel());
        self.ask(Ask::Hold(waits, until));
        waiting.recv_timeout(PATIENCE).unwrap();
        let done = meantime();
        drop(release);
        done
    }

    /// Lets the gateway ask the policy about flows that wait.
    pub fn decide_again(&self) {
        self.ask(Ask::Decide);
    }

    /// Gives the policy other rules.
    pub fn set_rules(&self, rules: Rules) {
        self.ask(Ask::Rules(rules));
    }

    /// Publishes a port while the gateway runs.
    pub fn publish(&self, protocol: Protocol, port: Forward) -> io::Result<()> {
        let (done, is_done) = channel();
        self.ask(Ask::Publish(protocol, port, done));
        is_done.recv_timeout(PATIENCE).unwrap()
    }

    pub fn stat(&self) -> Stat {
        self.ask(Ask::Stat);
        self.said.recv_timeout(PATIENCE).unwrap()
    }

    /// Waits until something is so; a test whose condition never comes fails.
    pub fn until(&self, what: &str, mut is_so: impl FnMut(&Stat) -> bool) {
        let begin = std::time::Instant::now();
        loop {
            let stat = self.stat();
            if is_so(&stat) {
                return;
            }
            assert!(begin.elapsed() < PATIENCE, "{what}: {:?} {:?}", stat.totals, stat.flows);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A connection of the guest.
    pub fn connect(&self, to: SocketAddr) -> io::Result<TcpStream> {
        let stream = self.guest.run(|| TcpStream::connect(to))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    /// A connection of the guest to a listener of the host, and the host's end.
    pub fn pair(&self, listener: &TcpListener) -> (TcpStream, TcpStream) {
        let guest = self.connect(listener.local_addr().unwrap()).unwrap();
        let (host, _) = listener.accept().unwrap();
        host.set_read_timeout(Some(PATIENCE)).unwrap();
        host.set_write_timeout(Some(PATIENCE)).unwrap();
        (guest, host)
    }

    /// Begins a connection of the guest, and does not wait for it.
    pub fn begin_connection(&self, (host, port): (&str, u16)) -> OwnedFd {
        let open = || {
            let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
            Ok(socket(AddressFamily::Inet, SockType::Stream, flags, None)?)
        };
        let fd = self.guest.run(open).unwrap();
        let to = SockaddrStorage::from(SocketAddr::new(ip(host), port));
        assert_eq!(connect(fd.as_raw_fd(), &to), Err(Errno::EINPROGRESS));
        fd
    }

    /// The message of the panic that ends the gateway.
    pub fn fault(mut self) -> String {
        let fault = self.gateway.take().unwrap().join().expect_err("it panics");
        match fault.downcast::<String>() {
            Ok(said) => *said,
            Err(fault) => (*fault.downcast::<&str>().unwrap()).to_owned(),
        }
    }

    /// Tells the gateway that the guest has no process any more.
    pub fn end_guest(&mut self) {
        drop(self.guest_end.take());
    }

    /// Waits for the end of the gateway.
    pub fn ended(mut self) -> Summary {
        self.gateway.take().unwrap().join().unwrap()
    }

    /// Ends the gateway.
    pub fn end(mut self) -> Summary {
        drop(self.stop.take());
        self.gateway.take().unwrap().join().unwrap()
    }
}

impl Drop for World {
    /// The ports of a world are free when it is gone.
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(gateway) = self.gateway.take() {
            let _ = gateway.join();
        }
    }
}

/// A gateway that does nothing beside, for what it says when it is built.
pub fn bare_config() -> Config {
    let guest = Netns::new().unwrap();
    Config::new(open_far_end(&guest, 65520).unwrap(), network(65520))
}

/// A listener of the host.
pub fn listener() -> TcpListener {
    TcpListener::bind((HOST, 0)).unwrap()
}
