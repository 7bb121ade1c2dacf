//! The sysctls of a script as a configuration of the stack. Those without a counterpart are ignored: what a
//! script expects of them shows in its packets.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use fulmar_stack::base::{Duration, Secrets};
use fulmar_stack::ip::IfAddr;
use fulmar_stack::mbuf::PoolConfig;
use fulmar_stack::route::{Prefix, Route};
use fulmar_stack::shard::{StackConfig, SynCookies};
use fulmar_stack::tcp::{EcnPolicy, Keepalive, MtuProbing};

/// The file of settings: a line `name=value` for each sysctl, in the order of the calls.
pub const SETTINGS_ENV: &str = "FULMAR_PACKETDRILL_SYSCTLS";

/// Memory of the stack, bytes: no script uses a quarter of it.
const BUDGET_BYTES: usize = 64 << 20;

/// MTU of the device: packetdrill's default.
const DEFAULT_MTU: usize = 1500;

/// The least MTU that fulmar takes (RFC 1122 section 3.3.3: the effective MTU for receiving).
const MIN_MTU: usize = 576;

/// The least MTU of a link that carries IPv6 (RFC 8200 section 5).
const MIN_V6_MTU: usize = 1280;

/// Whose options and default sizes a script expects. Behaviour is fulmar's in both.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Dialect {
    /// Sizes of SO_SNDBUF and SO_RCVBUF are doubled (socket(7)).
    #[default]
    Linux,
    /// Options of a SYN stand in FreeBSD's order; buffer sizes are as set.
    FreeBsd,
}

/// The sysctls that a script has set so far.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Settings {
    values: BTreeMap<String, String>,
}

impl Settings {
    /// Reads lines `name=value`; names may be paths below `/proc/sys/`. The last value counts.
    pub fn parse(text: &str) -> Settings {
        let mut settings = Settings::default();
        for (name, value) in text.lines().filter_map(|l| l.split_once('=')) {
            let name = name.trim().trim_start_matches("/proc/sys/").replace('/', ".");
            settings.values.insert(name, value.trim().trim_matches('"').to_owned());
        }
        settings
    }

    /// Those of the file that [`SETTINGS_ENV`] names; none if there is no such file.
    pub fn of_environment() -> Settings {
        let path = std::env::var_os(SETTINGS_ENV);
        let text = path.and_then(|path| std::fs::read_to_string(path).ok());
        Settings::parse(&text.unwrap_or_default())
    }

    /// FreeBSD's if one of its sysctls is set.
    pub fn dialect(&self) -> Dialect {
        let is_bsd = |name: &String| name.starts_with("net.inet.") || name.starts_with("kern.");
        if self.values.keys().any(is_bsd) { Dialect::FreeBsd } else { Dialect::Linux }
    }

    /// The script is compared without PSH: `fulmar.push=0`, a setting of the runner of the suites.
    pub fn ignores_push(&self) -> bool {
        self.number("fulmar.push") == Some(0)
    }

    pub(crate) fn text(&self, name: &str) -> Option<&str> {
        self.values.get(name).map(String::as_str)
    }

    fn number(&self, name: &str) -> Option<u64> {
        self.text(name)?.parse().ok()
    }

    fn millis(&self, name: &str) -> Option<Duration> {
        self.number(name).map(Duration::from_millis)
    }

    /// One of the three numbers of `tcp_rmem` and `tcp_wmem`: minimum, default, maximum.
    fn of_triple(&self, name: &str, at: usize) -> Option<usize> {
        self.text(name)?.split_whitespace().nth(at)?.parse().ok()
    }

    /// SYN cookies of a listener.
    pub fn syn_cookies(&self) -> SynCookies {
        let is_on = |name| self.number(name) == Some(1);
        match self.number("net.ipv4.tcp_syncookies") {
            Some(0) => SynCookies::Off,
            Some(2) => SynCookies::Always,
            _ if is_on("net.inet.tcp.syncookies_only") => SynCookies::Always,
            _ => SynCookies::WhenFull,
        }
    }

    /// MTU of the device: `fulmar.mtu`, a setting of the runner of the suites.
    pub fn mtu(&self) -> usize {
        let mtu = self.number("fulmar.mtu").and_then(|n| usize::try_from(n).ok());
        mtu.map_or(DEFAULT_MTU, |n| n.clamp(MIN_MTU, 65_535))
    }

    /// TCP_NOTSENT_LOWAT of sockets that set none.
    pub fn notsent_low_water(&self) -> Option<u32> {
        let bytes = self.number("net.ipv4.tcp_notsent_lowat")?;
        u32::try_from(bytes).ok().filter(|n| *n != u32::MAX)
    }

    /// Keepalive times of sockets that set none.
    pub fn keepalive(&self) -> Keepalive {
        let default = Keepalive::default();
        let count = self.number("net.inet.tcp.keepcnt").and_then(|n| u32::try_from(n).ok());
        Keepalive {
            idle: self.millis("net.inet.tcp.keepidle").unwrap_or(default.idle),
            interval: self.millis("net.inet.tcp.keepintvl").unwrap_or(default.interval),
            count: count.unwrap_or(default.count),
        }
    }

    fn tcp_config(&self) -> fulmar_stack::tcp::Config {
        let mut tcp = fulmar_stack::tcp::Config::default();
        let set = |field: &mut usize, value: Option<usize>| {
            *field = value.unwrap_or(*field);
        };
        let bytes = |name: &str| self.number(name).and_then(|n| usize::try_from(n).ok());
        set(&mut tcp.recv_buffer_bytes, self.of_triple("net.ipv4.tcp_rmem", 1));
        set(&mut tcp.send_buffer_bytes, self.of_triple("net.ipv4.tcp_wmem", 1));
        set(&mut tcp.max_buffer_bytes, self.of_triple("net.ipv4.tcp_rmem", 2));
        set(&mut tcp.recv_buffer_bytes, bytes("net.inet.tcp.recvspace"));
        set(&mut tcp.send_buffer_bytes, bytes("net.inet.tcp.sendspace"));
        set(&mut tcp.max_buffer_bytes, bytes("kern.ipc.maxsockbuf"));
        for name in ["net.ipv4.tcp_timestamps", "net.inet.tcp.rfc1323"] {
            tcp.timestamps = self.number(name).map_or(tcp.timestamps, |n| n != 0);
        }
        for name in ["net.ipv4.tcp_sack", "net.inet.tcp.sack.enable"] {
            tcp.sack = self.number(name).map_or(tcp.sack, |n| n != 0);
        }
        let congestion = self.text("net.ipv4.tcp_congestion_control");
        tcp.congestion = congestion.and_then(|name| name.parse().ok()).unwrap_or(tcp.congestion);
        // What else Linux has there, fulmar has not.
        if self.number("net.ipv4.tcp_ecn") == Some(3) {
            tcp.ecn = EcnPolicy::Ask;
        }
        tcp.mtu_probing = match self.number("net.ipv4.tcp_mtu_probing") {
            Some(0) => MtuProbing::Off,
            Some(2) => MtuProbing::Always,
            _ => MtuProbing::BlackHole,
        };
        let retries = self.number("net.ipv4.tcp_syn_retries");
        tcp.syn_retries = retries.and_then(|n| u32::try_from(n).ok()).unwrap_or(tcp.syn_retries);
        tcp.initial_rto = self.millis("net.inet.tcp.rexmit_initial").unwrap_or(tcp.initial_rto);
        tcp.delayed_ack = self.millis("net.inet.tcp.delacktime").unwrap_or(tcp.delayed_ack);
        if self.dialect() == Dialect::FreeBsd {
            tcp.quick_acks = 0;
        }
        tcp
    }

    /// The stack that a script starts with. It answers for every address, since packetdrill chooses its own at
    /// random.
    pub fn stack_config(&self) -> StackConfig {
        let v4 = IpAddr::V4(Ipv4Addr::new(192, 168, 255, 254));
        let v6 = IpAddr::V6(Ipv6Addr::new(0xfd3d, 0xfa7b, 0xd17d, 0, 0, 0, 0, 1));
        let mut addresses = vec![IfAddr { addr: v4, prefix_len: 32 }];
        let mut routes = vec![Route::on_link(Prefix::DEFAULT_V4)];
        if self.mtu() >= MIN_V6_MTU {
            addresses.push(IfAddr { addr: v6, prefix_len: 128 });
            routes.push(Route::on_link(Prefix::DEFAULT_V6));
        }
        StackConfig {
            addresses,
            routes,
            any_ip: true,
            pool: PoolConfig { huge_pages: false, ..PoolConfig::with_budget(BUDGET_BYTES) },
            tcp: self.tcp_config(),
            secrets: Some(Secrets::for_simulation(1)),
            burst_frames: 64,
            gro: false,
            ..StackConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_of_a_sysctl_counts_under_either_name() {
        let text = "net.ipv4.tcp_sack=1\nnet.ipv4.tcp_rmem=\"4096 540000 15728640\"\n\
                    /proc/sys/net/ipv4/tcp_sack=0\nnet.ipv4.tcp_congestion_control=reno\n";
        let settings = Settings::parse(text);
        let tcp = settings.stack_config().tcp;
        assert_eq!((tcp.sack, tcp.recv_buffer_bytes), (false, 540_000));
        assert_eq!(tcp.congestion, fulmar_stack::tcp::CongestionControl::NewReno);
        assert_eq!((tcp.window_scale(), settings.dialect()), (8, Dialect::Linux));
    }

    #[test]
    fn a_sysctl_of_freebsd_selects_its_dialect() {
        let settings = Settings::parse("kern.ipc.maxsockbuf=2097152\nnet.inet.tcp.recvspace=65536");
        let tcp = settings.stack_config().tcp;
        assert_eq!((settings.dialect(), tcp.window_scale()), (Dialect::FreeBsd, 6));
        assert_eq!(tcp.recv_buffer_bytes, 65_536);
    }
}
