//! Socket options: Linux's options that fulmar has, under Linux's numbers. All others return ENOPROTOOPT.

use fulmar_stack::base::{Duration, SlotId};
use fulmar_stack::shard::{ListenOptions, SocketOptions, TcpEntry};
use fulmar_stack::tcp::{CongestionControl, Keepalive};

use crate::fast_open::FastOpenSocket;
use crate::settings::{Dialect, Settings};
use crate::sockets::{Answer, Machine, Refusal};
use crate::tcp_info;

/// TCP_NOTSENT_LOWAT (include/uapi/linux/tcp.h), which `libc` lacks.
const TCP_NOTSENT_LOWAT: i32 = 25;
/// TCP_FASTOPEN_KEY (include/uapi/linux/tcp.h), which `libc` lacks.
const TCP_FASTOPEN_KEY: i32 = 33;
/// What Linux takes as TCP_MAXSEG (TCP_MIN_MSS to MAX_TCP_WINDOW).
const MAXSEG_BYTES: std::ops::RangeInclusive<u16> = 88..=32_767;
/// TCP_MAXSEG of a socket without a connection (TCP_MSS_DEFAULT).
const DEFAULT_MSS: u16 = 536;
/// TCP_CC_INFO (include/uapi/linux/tcp.h), which `libc` lacks.
const TCP_CC_INFO: i32 = 26;
/// Numbers of SO_MEMINFO (include/uapi/linux/sock_diag.h, SK_MEMINFO_VARS).
const MEMINFO_WORDS: usize = 9;
/// Bytes of the name of a controller (include/net/tcp.h, TCP_CA_NAME_MAX).
const MAX_NAME_BYTES: usize = 16;

/// Options of a socket that were set; `None` where none was.
#[derive(Clone, Default, Debug)]
pub struct Options {
    reuse_address: bool,
    only_v6: bool,
    nodelay: Option<bool>,
    cork: bool,
    keepalive: bool,
    keepalive_times: Keepalive,
    user_timeout: Option<Duration>,
    linger: Option<Duration>,
    send_buffer_bytes: Option<usize>,
    recv_buffer_bytes: Option<usize>,
    congestion: Option<CongestionControl>,
    ttl: Option<u8>,
    /// IP_TOS and IPV6_TCLASS.
    tos: u8,
    /// TCP_NOTSENT_LOWAT, and what a sysctl sets for sockets without.
    notsent_low_water: Option<u32>,
    default_notsent_low_water: Option<u32>,
    /// TCP_MAXSEG.
    max_segment: Option<u16>,
    /// TCP_SYNCNT.
    syn_retries: Option<u32>,
    /// Fast Open.
    pub fast_open: FastOpenSocket,
    /// SO_RCVLOWAT.
    pub recv_low_water: usize,
}

impl Options {
    /// Those of a new socket.
    pub fn new(settings: &Settings) -> Options {
        Options {
            keepalive_times: settings.keepalive(),
            default_notsent_low_water: settings.notsent_low_water(),
            ..Options::default()
        }
    }

    /// Sets them on a connection.
    pub fn apply(&self, entry: &mut TcpEntry) {
        let tcb = &mut entry.tcb;
        if let Some(on) = self.nodelay {
            tcb.set_nodelay(on);
        }
        if self.cork {
            tcb.set_cork(true);
        }
        if self.keepalive || tcb.keepalive().is_some() {
            tcb.set_keepalive(self.keepalive.then_some(self.keepalive_times));
        }
        if self.user_timeout != tcb.user_timeout() {
            tcb.set_user_timeout(self.user_timeout);
        }
        if let Some(bytes) = self.send_buffer_bytes {
            tcb.set_send_buffer(bytes);
        }
        if let Some(bytes) = self.recv_buffer_bytes {
            tcb.set_recv_buffer(bytes);
        }
        if let Some(which) = self.congestion {
            tcb.set_congestion(which);
        }
        let notsent_low_water = self.notsent_low_water.or(self.default_notsent_low_water);
        if notsent_low_water != tcb.notsent_low_water() {
            tcb.set_notsent_low_water(notsent_low_water);
        }
        if self.max_segment != tcb.max_segment() {
            tcb.set_max_segment(self.max_segment);
        }
        if let Some(retries) = self.syn_retries {
            tcb.set_syn_retries(retries);
        }
        tcb.set_recv_low_water(self.recv_low_water.max(1));
        entry.linger = self.linger;
        entry.ttl = self.ttl;
        entry.set_tos(self.tos);
    }

    /// Sets one of them, which has just been set, on a connection.
    fn apply_one(&self, option: (i32, i32), entry: &mut TcpEntry) {
        let tcb = &mut entry.tcb;
        match option {
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => tcb.set_nodelay(self.nodelay == Some(true)),
            (libc::IPPROTO_TCP, libc::TCP_CORK) => tcb.set_cork(self.cork),
            // Their setters restart timers.
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => tcb.set_user_timeout(self.user_timeout),
            _ => {
                let others = Options { nodelay: None, cork: false, ..self.clone() };
                others.apply(entry);
            }
        }
    }

    /// Those that a listener takes when it is opened.
    pub fn for_listener(&self) -> ListenOptions {
        ListenOptions {
            reuse_address: self.reuse_address,
            only_v6: self.only_v6,
            socket: self.inherited(),
            ..ListenOptions::default()
        }
    }

    /// What connections of a listener have from their SYN,ACK on.
    fn inherited(&self) -> SocketOptions {
        SocketOptions {
            nodelay: self.nodelay == Some(true),
            congestion: self.congestion,
            keepalive: self.keepalive.then_some(self.keepalive_times),
            user_timeout: self.user_timeout,
            ttl: self.ttl,
            tos: self.tos,
            max_segment: self.max_segment,
            send_buffer: self.send_buffer_bytes,
            recv_buffer: self.recv_buffer_bytes,
            notsent_low_water: self.notsent_low_water.or(self.default_notsent_low_water),
            ..SocketOptions::default()
        }
    }

    fn set(&mut self, level: i32, name: i32, value: &[u8]) -> Result<(), i32> {
        match level {
            libc::SOL_SOCKET => self.set_of_socket(name, value),
            libc::IPPROTO_TCP => self.set_of_tcp(name, value),
            libc::IPPROTO_IP if name == libc::IP_TTL => self.set_ttl(number(value)?),
            libc::IPPROTO_IPV6 if name == libc::IPV6_UNICAST_HOPS => self.set_ttl(number(value)?),
            libc::IPPROTO_IP if name == libc::IP_TOS => {
                // The least significant byte counts (net/ipv4/ip_sockglue.c).
                self.tos = short_number(value)? as u8;
                Ok(())
            }
            libc::IPPROTO_IPV6 if name == libc::IPV6_TCLASS => {
                self.set_traffic_class(number(value)?)
            }
            libc::IPPROTO_IP if name == libc::IP_MTU_DISCOVER => {
                // A hint: fulmar's segments always have DF.
                let kinds = libc::IP_PMTUDISC_DONT..=libc::IP_PMTUDISC_DO;
                kinds.contains(&short_number(value)?).then_some(()).ok_or(libc::EINVAL)
            }
            libc::IPPROTO_IPV6 if name == libc::IPV6_V6ONLY => {
                self.only_v6 = number(value)? != 0;
                Ok(())
            }
            _ => Err(libc::ENOPROTOOPT),
        }
    }

    fn set_ttl(&mut self, ttl: i32) -> Result<(), i32> {
        match (ttl, u8::try_from(ttl)) {
            (-1, _) => self.ttl = None,
            (_, Ok(ttl @ 1..)) => self.ttl = Some(ttl),
            _ => return Err(libc::EINVAL),
        }
        Ok(())
    }

    /// -1 is the default (net/ipv6/ipv6_sockglue.c).
    fn set_traffic_class(&mut self, class: i32) -> Result<(), i32> {
        self.tos = if class == -1 { 0 } else { u8::try_from(class).map_err(|_| libc::EINVAL)? };
        Ok(())
    }

    fn set_of_socket(&mut self, name: i32, value: &[u8]) -> Result<(), i32> {
        match name {
            libc::SO_REUSEADDR => self.reuse_address = number(value)? != 0,
            libc::SO_KEEPALIVE => self.keepalive = number(value)? != 0,
            libc::SO_SNDBUF => self.send_buffer_bytes = Some(size(value)?),
            libc::SO_RCVBUF => self.recv_buffer_bytes = Some(size(value)?),
            libc::SO_RCVLOWAT => self.recv_low_water = size(value)?,
            libc::SO_LINGER => {
                let (on, seconds) = (number(value)?, number(value.get(4..).unwrap_or(&[]))?);
                let seconds = u64::try_from(seconds).map_err(|_| libc::EINVAL)?;
                self.linger = (on != 0).then(|| Duration::from_secs(seconds));
            }
            _ => return Err(libc::ENOPROTOOPT),
        }
        Ok(())
    }

    fn set_of_tcp(&mut self, name: i32, value: &[u8]) -> Result<(), i32> {
        let seconds = |value| positive(value).map(|n| Duration::from_secs(u64::from(n)));
        match name {
            libc::TCP_NODELAY => self.nodelay = Some(number(value)? != 0),
            libc::TCP_CORK => self.cork = number(value)? != 0,
            libc::TCP_KEEPIDLE => self.keepalive_times.idle = seconds(value)?,
            libc::TCP_KEEPINTVL => self.keepalive_times.interval = seconds(value)?,
            libc::TCP_KEEPCNT => self.keepalive_times.count = positive(value)?,
            TCP_NOTSENT_LOWAT => {
                // 0 is what the sysctl says.
                self.notsent_low_water = Some(number(value)? as u32).filter(|n| *n > 0);
            }
            libc::TCP_MAXSEG => {
                let bytes = u16::try_from(number(value)?).map_err(|_| libc::EINVAL)?;
                if !MAXSEG_BYTES.contains(&bytes) {
                    return Err(libc::EINVAL);
                }
                self.max_segment = Some(bytes);
            }
            libc::TCP_SYNCNT => self.syn_retries = Some(positive(value)?),
            libc::TCP_FASTOPEN => {
                self.fast_open.backlog = Some(size(value)?).filter(|n| *n > 0);
            }
            libc::TCP_FASTOPEN_CONNECT => self.fast_open.connect = number(value)? != 0,
            TCP_FASTOPEN_KEY => self.fast_open.set_keys(value)?,
            // It changes a connection and nothing else.
            libc::TCP_QUICKACK => {}
            libc::TCP_USER_TIMEOUT => {
                let ms = u64::try_from(number(value)?).map_err(|_| libc::EINVAL)?;
                self.user_timeout = (ms > 0).then(|| Duration::from_millis(ms));
            }
            libc::TCP_CONGESTION => {
                let name = std::str::from_utf8(value).map_err(|_| libc::ENOENT)?;
                let name = name.trim_end_matches('\0');
                self.congestion = Some(name.parse().map_err(|_| libc::ENOENT)?);
            }
            _ => return Err(libc::ENOPROTOOPT),
        }
        Ok(())
    }

    /// The value of an option that the socket itself knows.
    fn get(&self, level: i32, name: i32) -> Option<Vec<u8>> {
        let times = &self.keepalive_times;
        let seconds = |d: Duration| d.as_secs() as i32;
        let n = match (level, name) {
            (libc::SOL_SOCKET, libc::SO_REUSEADDR) => i32::from(self.reuse_address),
            (libc::SOL_SOCKET, libc::SO_KEEPALIVE) => i32::from(self.keepalive),
            (libc::SOL_SOCKET, libc::SO_RCVLOWAT) => self.recv_low_water.max(1) as i32,
            (libc::SOL_SOCKET, libc::SO_TYPE) => libc::SOCK_STREAM,
            (libc::IPPROTO_IP, libc::IP_TOS) | (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => {
                // Of a stream socket the user has no say in the ECN field.
                i32::from(self.tos & !3)
            }
            (libc::IPPROTO_TCP, libc::TCP_NODELAY) => i32::from(self.nodelay == Some(true)),
            (libc::IPPROTO_TCP, libc::TCP_CORK) => i32::from(self.cork),
            (libc::IPPROTO_TCP, TCP_NOTSENT_LOWAT) => self.notsent_low_water.unwrap_or(0) as i32,
            (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE) => seconds(times.idle),
            (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL) => seconds(times.interval),
            (libc::IPPROTO_TCP, libc::TCP_KEEPCNT) => times.count as i32,
            (libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT) => {
                self.user_timeout.map_or(0, |t| t.as_millis() as i32)
            }
            (libc::SOL_SOCKET, libc::SO_LINGER) => {
                let mut bytes = i32::from(self.linger.is_some()).to_ne_bytes().to_vec();
                bytes.extend(self.linger.map_or(0, seconds).to_ne_bytes());
                return Some(bytes);
            }
            _ => return None,
        };
        Some(n.to_ne_bytes().to_vec())
    }
}

fn number(value: &[u8]) -> Result<i32, i32> {
    value.first_chunk().map(|b| i32::from_ne_bytes(*b)).ok_or(libc::EINVAL)
}

/// As Linux reads options of IP: one byte, or four.
fn short_number(value: &[u8]) -> Result<i32, i32> {
    number(value).or_else(|_| value.first().map(|b| i32::from(*b)).ok_or(libc::EINVAL))
}

fn positive(value: &[u8]) -> Result<u32, i32> {
    u32::try_from(number(value)?).ok().filter(|n| *n > 0).ok_or(libc::EINVAL)
}

fn size(value: &[u8]) -> Result<usize, i32> {
    usize::try_from(number(value)?).map_err(|_| libc::EINVAL)
}

impl Machine {
    /// setsockopt(2).
    pub fn set_option(&mut self, fd: i32, level: i32, name: i32, value: &[u8]) -> Answer<()> {
        let is_linux = self.is_linux();
        let needs_client = (level, name) == (libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT);
        if needs_client && !self.world.settings().has_fast_open_client() {
            return Err(Refusal::Errno(libc::EOPNOTSUPP));
        }
        let socket = self.socket_of(fd)?;
        socket.options.set(level, name, value).map_err(Refusal::Errno)?;
        if (level, name) == (libc::SOL_SOCKET, libc::SO_SNDBUF) && is_linux {
            // socket(7): the kernel doubles the value, half of it for its own structures. Half of the receive
            // buffer is not offered as a window; of the send buffer all can hold payload.
            socket.options.send_buffer_bytes = socket.options.send_buffer_bytes.map(|n| 2 * n);
        }
        let (options, stream, listener) =
            (socket.options.clone(), socket.stream(), socket.listener());
        if let Some(id) = stream {
            let on = value.first().is_some_and(|b| *b != 0);
            let is_quickack = (level, name) == (libc::IPPROTO_TCP, libc::TCP_QUICKACK);
            self.world.call(|shard, now| {
                shard.with_tcb(now, id, |entry| {
                    if is_quickack {
                        entry.tcb.set_quickack(on);
                    } else {
                        options.apply_one((level, name), entry);
                    }
                })
            })?;
        }
        if let Some(id) = listener {
            let inherited = options.inherited();
            let fast_open = self.world.settings().fast_open(&options.fast_open);
            self.world.call(|shard, _| {
                shard.listener(id).map(|l| {
                    l.options = inherited;
                    l.set_fast_open(fast_open);
                })
            })?;
        }
        Ok(())
    }

    fn is_linux(&self) -> bool {
        self.world.settings().dialect() == Dialect::Linux
    }

    /// getsockopt(2).
    pub fn option(&mut self, fd: i32, level: i32, name: i32) -> Answer<Vec<u8>> {
        let socket = self.socket_of(fd)?;
        let (own, stream, listens) =
            (socket.options.get(level, name), socket.stream(), socket.listener().is_some());
        if let Some(value) = own {
            return Ok(value);
        }
        let word = |n: i32| Ok(n.to_ne_bytes().to_vec());
        match (level, name) {
            (libc::SOL_SOCKET, libc::SO_ERROR) => word(self.take_error(fd)?),
            (libc::SOL_SOCKET, libc::SO_ACCEPTCONN) => word(i32::from(listens)),
            (libc::SOL_SOCKET, libc::SO_SNDBUF | libc::SO_RCVBUF) => {
                word(self.buffer_size(fd, name)?)
            }
            (libc::SOL_SOCKET, libc::SO_MEMINFO) => Ok(vec![0; 4 * MEMINFO_WORDS]),
            (libc::IPPROTO_TCP, libc::TCP_INFO) => Ok(match stream {
                Some(id) => {
                    let info = self.world.call(|shard, now| {
                        shard.tcp_entry(id).map(|entry| entry.tcb.info_at(now))
                    })?;
                    tcp_info::of_connection(&info)
                }
                None => tcp_info::of_no_connection(listens),
            }),
            (libc::IPPROTO_TCP, libc::TCP_MAXSEG) => {
                let set = self.socket_of(fd)?.options.max_segment.unwrap_or(DEFAULT_MSS);
                word(match stream {
                    Some(id) => self.world.shard().tcp_entry(id)?.tcb.info().mss_bytes as i32,
                    None => i32::from(set),
                })
            }
            // Of the controllers that Linux describes there, none is fulmar's.
            (libc::IPPROTO_TCP, TCP_CC_INFO) => Ok(Vec::new()),
            (libc::IPPROTO_TCP, libc::TCP_CONGESTION) => {
                let which = match stream {
                    Some(id) => self.world.shard().tcp_entry(id)?.tcb.congestion(),
                    None => self.configured_congestion(fd)?,
                };
                let mut name = which.name().as_bytes().to_vec();
                name.resize(MAX_NAME_BYTES, 0);
                Ok(name)
            }
            _ => Err(Refusal::Errno(libc::ENOPROTOOPT)),
        }
    }

    fn configured_congestion(&mut self, fd: i32) -> Answer<CongestionControl> {
        let configured = self.world.settings().stack_config().tcp.congestion;
        Ok(self.socket_of(fd)?.options.congestion.unwrap_or(configured))
    }

    /// SO_ERROR, which is cleared.
    fn take_error(&mut self, fd: i32) -> Answer<i32> {
        if self.is_connecting(fd) {
            return match self.connected(fd) {
                Err(Refusal::Errno(errno)) => Ok(errno),
                _ => Ok(0),
            };
        }
        let Some(id) = self.socket_of(fd)?.stream() else { return Ok(0) };
        let error = self.world.shard().tcp_entry(id)?.tcb.take_error();
        Ok(error.map_or(0, |e| fulmar_stack::socket::SocketError::from(e).errno()))
    }

    fn buffer_size(&mut self, fd: i32, name: i32) -> Answer<i32> {
        let socket = self.socket_of(fd)?;
        let (options, stream) = (socket.options.clone(), socket.stream());
        let is_send = name == libc::SO_SNDBUF;
        let set = if is_send { options.send_buffer_bytes } else { options.recv_buffer_bytes };
        let config = self.world.settings().stack_config().tcp;
        let default = if is_send { config.send_buffer_bytes } else { config.recv_buffer_bytes };
        let bytes = match stream {
            Some(id) => of_connection(self, id, is_send)?,
            None => set.unwrap_or(default),
        };
        let doubled = !is_send && set.is_some() && self.is_linux();
        Ok((if doubled { 2 * bytes } else { bytes }) as i32)
    }
}

fn of_connection(machine: &mut Machine, id: SlotId, is_send: bool) -> Answer<usize> {
    let info = machine.world.shard().tcp_entry(id)?.tcb.info();
    Ok(if is_send { info.send_buffer_bytes } else { info.recv_buffer_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket() -> (Machine, i32) {
        let mut machine = Machine::default();
        let fd = machine.socket(libc::AF_INET, libc::SOCK_STREAM, 0).unwrap();
        (machine, fd)
    }

    #[test]
    fn an_option_that_fulmar_lacks_is_refused() {
        let (mut machine, fd) = socket();
        let absent = machine.set_option(fd, libc::IPPROTO_TCP, libc::TCP_MD5SIG, &[1, 0, 0, 0]);
        assert_eq!(absent, Err(Refusal::Errno(libc::ENOPROTOOPT)));
        let bad = machine.set_option(fd, libc::IPPROTO_TCP, libc::TCP_CONGESTION, b"vegas");
        assert_eq!(bad, Err(Refusal::Errno(libc::ENOENT)));
    }

    #[test]
    fn a_set_buffer_is_reported_doubled_as_by_linux() {
        let (mut machine, fd) = socket();
        let bytes = 10_000i32.to_ne_bytes();
        machine.set_option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, &bytes).unwrap();
        let told = machine.option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).unwrap();
        assert_eq!(told, 20_000i32.to_ne_bytes());
    }
}
