//! What the client asks for as messages, and what messages say as an account.

use super::super::message::{
    self, ConnectRequest, ConnectResults, DATAGRAM_SOCKET, OmniRequest, OmniResults, SIZE_UNSET,
    STREAM_SOCKET, StreamRequest, StreamResults, Text, direction, flag,
};
use super::super::meter::Usage;
use super::super::pace::Length;
use super::super::socket::Buffers;
use super::super::transfer::Tally;
use super::{ServerReply, Side, Test, TestOptions, nonsense};
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

fn signed(n: Option<usize>) -> i32 {
    n.map_or(-1, |n| i32::try_from(n).unwrap_or(i32::MAX))
}

fn family(server: SocketAddr) -> u32 {
    if server.is_ipv4() { message::FAMILY_V4 } else { message::FAMILY_V6 }
}

pub fn omni_request(options: &TestOptions, server: SocketAddr) -> OmniRequest {
    let (test, remote) = (options.test, &options.remote);
    let set = |on: bool, bit: u32| if on { bit } else { 0 };
    let size = |n: Option<usize>| n.map_or(SIZE_UNSET, |n| u32::try_from(n).unwrap_or(SIZE_UNSET));
    let is_rr = test.exchanges_messages();
    let exchange = |n: usize| if is_rr { signed(Some(n)) } else { -1 };
    // What we send they receive.
    let they_send = is_rr || test == Test::TcpMaerts;
    let they_receive = is_rr || test != Test::TcpMaerts;
    OmniRequest {
        send_buffer: signed(remote.tuning.send_buffer),
        send_bytes: size(remote.send_bytes),
        send_alignment: 8,
        request_bytes: exchange(options.exchange_bytes.0),
        recv_buffer: signed(remote.tuning.recv_buffer),
        recv_bytes: size(remote.recv_bytes),
        recv_alignment: 8,
        response_bytes: exchange(options.exchange_bytes.1),
        flags: set(remote.tuning.nodelay, flag::NODELAY)
            | set(test.is_per_connection(), flag::PER_CONNECTION)
            | set(options.measures_remote, flag::MEASURE_CPU),
        length: options.length.number(),
        family: family(server),
        socket_type: if test.is_udp() { DATAGRAM_SOCKET } else { STREAM_SOCKET },
        protocol: if test.is_udp() { 17 } else { 6 },
        direction: set(they_send, direction::SEND) | set(they_receive, direction::RECEIVE),
        priority: -1,
        tos: -1,
        fill_file: options.remote_fill.as_deref().map(Text::new).unwrap_or_default(),
        ..OmniRequest::default()
    }
}

pub fn stream_request(options: &TestOptions, server: SocketAddr) -> StreamRequest {
    let remote = &options.remote;
    StreamRequest {
        send_buffer: signed(remote.tuning.send_buffer),
        recv_buffer: signed(remote.tuning.recv_buffer),
        recv_bytes: remote.recv_bytes.map_or(0, |n| u32::try_from(n).unwrap_or(0)),
        recv_alignment: 8,
        nodelay: remote.tuning.nodelay.into(),
        measure_cpu: options.measures_remote.into(),
        // The classic server arms a timer with this; a number of bytes has no sign here, and a
        // negative one would ring at once.
        length: match options.length {
            Length::Time(_) => options.length.number(),
            _ => i32::MAX / 2,
        },
        family: family(server),
        posted: options.remote_posted.into(),
        ..StreamRequest::default()
    }
}

pub fn connect_request(options: &TestOptions, server: SocketAddr) -> ConnectRequest {
    let remote = &options.remote;
    ConnectRequest {
        recv_buffer: signed(remote.tuning.recv_buffer),
        send_buffer: signed(remote.tuning.send_buffer),
        recv_alignment: 8,
        send_alignment: 8,
        nodelay: remote.tuning.nodelay.into(),
        measure_cpu: options.measures_remote.into(),
        length: options.length.number(),
        family: family(server),
        ..ConnectRequest::default()
    }
}

fn unsigned(n: i32) -> usize {
    usize::try_from(n).unwrap_or(0)
}

pub fn server_reply(
    port: u32,
    send_buffer: i32,
    recv_buffer: i32,
    send_bytes: u32,
    recv_bytes: u32,
) -> io::Result<ServerReply> {
    let port = u16::try_from(port).ok().filter(|p| *p != 0);
    let port = port.ok_or_else(|| nonsense("its data port is none"))?;
    let buffers = Buffers { send: unsigned(send_buffer), recv: unsigned(recv_buffer) };
    let known = |bytes: u32| if bytes == SIZE_UNSET { 0 } else { bytes as usize };
    Ok(ServerReply { port, buffers, send_bytes: known(send_bytes), recv_bytes: known(recv_bytes) })
}

/// A figure of the other side's: not a number is none.
fn figure(n: f32) -> f64 {
    if n.is_finite() { n.into() } else { -1.0 }
}

pub fn omni_side(r: &OmniResults, server_reply: &ServerReply) -> Side {
    let usage = Usage {
        elapsed: Duration::from_secs_f64(figure(r.elapsed).clamp(0.0, 1e9)),
        is_measured: true,
        cpu_percent: figure(r.cpu_percent),
        user_percent: figure(r.user_percent),
        system_percent: figure(r.system_percent),
        iowait_percent: figure(r.iowait_percent),
        irq_percent: figure(r.irq_percent),
        softirq_percent: figure(r.softirq_percent),
        peak: (unsigned(r.peak_cpu), figure(r.peak_percent)),
    };
    Side {
        tally: Tally {
            bytes_sent: r.bytes_sent,
            send_calls: r.send_calls.into(),
            failed_sends: r.failed_sends.into(),
            bytes_received: r.bytes_received,
            recv_calls: r.recv_calls.into(),
            transactions: r.transactions.into(),
        },
        buffers: (
            server_reply.buffers,
            Buffers { send: unsigned(r.send_buffer), recv: unsigned(r.recv_buffer) },
        ),
        usage,
        cpu_method: r.cpu_method,
        cpus: r.cpus,
        retransmits: u64::try_from(r.retransmits).ok(),
        ..sizes(server_reply)
    }
}

fn sizes(server_reply: &ServerReply) -> Side {
    Side {
        send_bytes: server_reply.send_bytes,
        recv_bytes: server_reply.recv_bytes,
        buffers: (server_reply.buffers, server_reply.buffers),
        ..Side::default()
    }
}

pub fn stream_side(r: &StreamResults, server_reply: &ServerReply) -> Side {
    let bytes = if r.bytes_received.is_finite() { r.bytes_received.max(0.0) } else { 0.0 };
    Side {
        tally: Tally {
            bytes_received: bytes as u64,
            recv_calls: r.recv_calls.into(),
            ..Tally::default()
        },
        usage: usage(r.elapsed, r.cpu_percent),
        cpu_method: r.cpu_method,
        cpus: r.cpus,
        ..sizes(server_reply)
    }
}

pub fn connect_side(r: &ConnectResults, server_reply: &ServerReply) -> Side {
    Side {
        tally: Tally { transactions: r.transactions.into(), ..Tally::default() },
        usage: usage(r.elapsed, r.cpu_percent),
        cpu_method: r.cpu_method,
        cpus: r.cpus,
        ..sizes(server_reply)
    }
}

fn usage(elapsed: f32, cpu_percent: f32) -> Usage {
    Usage {
        elapsed: Duration::from_secs_f64(figure(elapsed).clamp(0.0, 1e9)),
        is_measured: true,
        cpu_percent: figure(cpu_percent),
        ..Usage::default()
    }
}
