//! The messages of netperf's control connection.
//!
//! ```text
//!  word 0      word 1                        words 2 to 163
//! +-----------+-----------------------------+---------------------------------------------+
//! | kind      | request: CPU to run on, -1  | body: integers, floats, text, in the order  |
//! |           | response: errno, 0 is fine  | of the fields of the struct                 |
//! +-----------+-----------------------------+---------------------------------------------+
//! ```
//! Every message has [`MESSAGE_BYTES`], numbers are big-endian, floats are IEEE 754, text is padded
//! with zeros. There is no version and no length field; what a body leaves unused is zero. A body is
//! declared once (`body!`), and its encoder and decoder follow from that. Decoding takes any bytes
//! at all and never fails: what a number *means* is checked where it is used.
//!
//! Sources: netperf 2.7.1 (`netlib.h`, `nettest_bsd.h`), observed on the wire.

use std::fmt;

/// Bytes of every message, in both directions.
pub const MESSAGE_BYTES: usize = 656;
/// Bytes before the body.
const BODY_AT: usize = 8;

/// The request or response in a message.
pub mod kind {
    /// Starts debug output at the server.
    pub const DEBUG_ON: u32 = 1;
    /// Ends it.
    pub const DEBUG_OFF: u32 = 2;
    /// The answer to both.
    pub const DEBUG_OK: u32 = 3;
    /// Asks how fast the server's CPUs are; the answer has the same kind.
    pub const CPU_CALIBRATE: u32 = 5;
    /// A passphrase; not answered.
    pub const PASSPHRASE: u32 = 6;
    /// Asks for a classic stream to the server; TCP_SENDFILE uses it.
    pub const STREAM: u32 = 10;
    /// The answer.
    pub const STREAM_RESPONSE: u32 = 11;
    /// Traffic received by the server.
    pub const STREAM_RESULTS: u32 = 12;
    /// Asks for any of the tests that became one: streams, request and response.
    pub const OMNI: u32 = 97;
    /// The answer.
    pub const OMNI_RESPONSE: u32 = 98;
    /// Results of the server; netserver itself leaves [`OMNI_RESPONSE`] in it.
    pub const OMNI_RESULTS: u32 = 99;
    /// Asks for classic connect and close.
    pub const CONNECT: u32 = 300;
    /// The answer.
    pub const CONNECT_RESPONSE: u32 = 301;
    /// Results of the server.
    pub const CONNECT_RESULTS: u32 = 302;
}

/// The errno that netserver answers to a kind it does not know.
pub const UNKNOWN_TEST: u32 = 998;

/// Bits of [`OmniRequest::flags`] and [`OmniResponse::flags`].
pub mod flag {
    /// No Nagle algorithm.
    pub const NODELAY: u32 = 0x1;
    /// A connection per transaction.
    pub const PER_CONNECTION: u32 = 0x4;
    /// Measure CPU.
    pub const MEASURE_CPU: u32 = 0x8;
}

/// Bits of [`OmniRequest::direction`], as the server sees it.
pub mod direction {
    /// The server sends.
    pub const SEND: u32 = 2;
    /// The server receives.
    pub const RECEIVE: u32 = 4;
}

/// IP version 4 in a `family` field.
pub const FAMILY_V4: u32 = 4;
/// IP version 6 in a `family` field.
pub const FAMILY_V6: u32 = 6;
/// A size of -1 or 0: the server decides.
pub const SIZE_UNSET: u32 = u32::MAX;

/// One message.
#[derive(Clone, PartialEq, Eq)]
pub struct Message([u8; MESSAGE_BYTES]);

impl Message {
    /// A message of this kind; the second word is `second`.
    pub fn new(kind: u32, second: u32, body: &impl Body) -> Message {
        let mut bytes = [0; MESSAGE_BYTES];
        let mut rest = bytes.as_mut_slice();
        kind.put(&mut rest);
        second.put(&mut rest);
        body.encode(&mut rest);
        Message(bytes)
    }

    /// The received traffic.
    pub fn from_bytes(bytes: [u8; MESSAGE_BYTES]) -> Message {
        Message(bytes)
    }

    /// The traffic to send.
    pub fn as_bytes(&self) -> &[u8; MESSAGE_BYTES] {
        &self.0
    }

    /// One of [`kind`], if the sender is honest.
    pub fn kind(&self) -> u32 {
        u32::take(&mut &self.0[..])
    }

    /// In a response the errno; in a request the CPU to run on, `u32::MAX` for none.
    pub fn second(&self) -> u32 {
        u32::take(&mut &self.0[4..])
    }

    /// The body, read as a `B`.
    pub fn body<B: Body>(&self) -> B {
        B::decode(&mut &self.0[BODY_AT..])
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Message")
            .field("kind", &self.kind())
            .field("second", &self.second())
            .finish()
    }
}

/// A value with a fixed place in a body.
trait Field: Sized {
    /// Takes it from the front of `bytes`; missing bytes are zero.
    fn take(bytes: &mut &[u8]) -> Self;
    /// Puts it at the front of `room`; what does not fit is left out.
    fn put(&self, room: &mut &mut [u8]);
}

/// All fields of a message's body.
pub trait Body: Sized {
    /// Reads the fields in their order.
    fn decode(bytes: &mut &[u8]) -> Self;
    /// Writes the fields in their order.
    fn encode(&self, room: &mut &mut [u8]);
}

/// Bytes of fixed length; as text, up to the first zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Text<const N: usize>(pub [u8; N]);

impl<const N: usize> Text<N> {
    /// The text, if it is any.
    pub fn as_str(&self) -> Option<&str> {
        let text = self.0.split(|b| *b == 0).next().unwrap_or_default();
        std::str::from_utf8(text).ok().filter(|t| !t.is_empty())
    }
}

impl<const N: usize> Default for Text<N> {
    fn default() -> Self {
        Text([0; N])
    }
}

impl<const N: usize> fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str().unwrap_or_default())
    }
}

impl<const N: usize> Field for Text<N> {
    fn take(bytes: &mut &[u8]) -> Self {
        let mut text = Text::default();
        let n = N.min(bytes.len());
        let (front, rest) = bytes.split_at(n);
        text.0[..n].copy_from_slice(front);
        *bytes = rest;
        text
    }

    fn put(&self, room: &mut &mut [u8]) {
        let n = N.min(room.len());
        let (front, rest) = std::mem::take(room).split_at_mut(n);
        front.copy_from_slice(&self.0[..n]);
        *room = rest;
    }
}

macro_rules! number {
    ($($kind:ty),*) => { $(
        impl Field for $kind {
            fn take(bytes: &mut &[u8]) -> Self {
                <$kind>::from_be_bytes(Text::take(bytes).0)
            }

            fn put(&self, room: &mut &mut [u8]) {
                Text(self.to_be_bytes()).put(room);
            }
        }
    )* };
}

number!(u32, i32, f32, u64, f64);

/// Declares a body: the fields in the order of the wire.
macro_rules! body {
    ($(#[$about:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $kind:ty,)* }) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Debug, Default)]
        pub struct $name {
            $($(#[$doc])* pub $field: $kind,)*
        }

        impl Body for $name {
            fn decode(bytes: &mut &[u8]) -> Self {
                $name { $($field: Field::take(bytes),)* }
            }

            fn encode(&self, room: &mut &mut [u8]) {
                $(self.$field.put(room);)*
            }
        }
    };
}

/// No body: everything zero.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Empty;

impl Body for Empty {
    fn decode(_: &mut &[u8]) -> Self {
        Empty
    }

    fn encode(&self, _: &mut &mut [u8]) {}
}

body! {
    /// The answer to [`kind::CPU_CALIBRATE`].
    Calibration {
        /// Idle counts per second, where the method counts; 0 for /proc/stat.
        rate: f32,
        /// CPUs of the server.
        cpus: u32,
    }
}

body! {
    /// [`kind::OMNI`]: every test in one; which one follows from `direction`, `protocol`, the sizes
    /// and the flags. The names are the server's point of view.
    OmniRequest {
        /// SO_SNDBUF, bytes; negative: as it comes.
        send_buffer: i32,
        /// Bytes per send; [`SIZE_UNSET`] or 0: the server decides.
        send_bytes: u32,
        /// Alignment of the send buffer.
        send_alignment: u32,
        /// Offset from it.
        send_offset: u32,
        /// Buffers in the send ring; 0: the server decides.
        send_width: u32,
        /// Bytes of a request; not positive: no transactions.
        request_bytes: i32,
        /// SO_RCVBUF, bytes; negative: as it comes.
        recv_buffer: i32,
        /// Bytes per receive; as `send_bytes`.
        recv_bytes: u32,
        /// Alignment of the receive buffer.
        recv_alignment: u32,
        /// Offset from it.
        recv_offset: u32,
        /// Buffers in the receive ring.
        recv_width: u32,
        /// Bytes of a response; not positive: no transactions.
        response_bytes: i32,
        /// Bits of [`flag`].
        flags: u32,
        /// Result of an earlier calibration.
        cpu_rate: f32,
        /// Seconds; negative: bytes or transactions; 0: until the other side ends it.
        length: i32,
        /// Avoid copies when receiving; ignored.
        avoid_recv_copy: u32,
        /// Avoid copies when sending; ignored.
        avoid_send_copy: u32,
        /// Words to make dirty before a send; ignored.
        send_dirty: u32,
        /// Words to make dirty before a receive; ignored.
        recv_dirty: u32,
        /// Words to read before a receive; ignored.
        recv_clean: u32,
        /// The port of the data socket; 0: the server chooses.
        data_port: u32,
        /// [`FAMILY_V4`] or [`FAMILY_V6`].
        family: u32,
        /// 1: a stream, 2: datagrams.
        socket_type: u32,
        /// IP protocol number.
        protocol: u32,
        /// Bits of [`direction`]; none: connect only.
        direction: u32,
        /// The client's data port, where the server must know it.
        client_port: u32,
        /// Operations per interval; ignored.
        interval_burst: u32,
        /// Length of the interval; ignored.
        interval_us: u32,
        /// The client's data address; see [`address`].
        client_ip: Text<16>,
        /// The server's data address; zero: any.
        server_ip: Text<16>,
        /// SO_PRIORITY; ignored.
        priority: i32,
        /// Type of service; ignored.
        tos: i32,
        /// Congestion control; ignored.
        congestion: Text<16>,
        /// The file from which the server fills its buffers.
        fill_file: Text<32>,
    }
}

body! {
    /// [`kind::OMNI_RESPONSE`]: the data socket stands.
    OmniResponse {
        /// SO_RCVBUF, bytes.
        recv_buffer: i32,
        /// Bytes per receive.
        recv_bytes: u32,
        /// Buffers in the receive ring.
        recv_width: i32,
        /// SO_SNDBUF, bytes.
        send_buffer: i32,
        /// Bytes per send.
        send_bytes: u32,
        /// Buffers in the send ring.
        send_width: i32,
        /// Bits of [`flag`] that were granted.
        flags: u32,
        /// Idle counts per second.
        cpu_rate: f32,
        /// As asked.
        length: i32,
        /// Copies are avoided when receiving.
        avoid_recv_copy: u32,
        /// Copies are avoided when sending.
        avoid_send_copy: u32,
        /// The port of the data socket.
        data_port: u32,
        /// As asked.
        interval_burst: u32,
        /// As asked.
        interval_us: u32,
        /// MHz.
        cpu_mhz: u32,
        /// Kinds of security modules.
        security: u32,
        /// SO_PRIORITY.
        priority: i32,
        /// Type of service.
        tos: i32,
        /// Type of the machine.
        system: Text<33>,
        /// Type of the CPU.
        cpu: Text<80>,
        /// Security modules in words.
        security_words: Text<16>,
    }
}

body! {
    /// [`kind::OMNI_RESULTS`]: results of the server.
    OmniResults {
        /// Bytes that the server received.
        bytes_received: u64,
        /// Receive calls.
        recv_calls: u32,
        /// SO_RCVBUF at the end.
        recv_buffer: i32,
        /// Bytes that the server sent.
        bytes_sent: u64,
        /// In this many calls.
        send_calls: u32,
        /// SO_SNDBUF at the end.
        send_buffer: i32,
        /// Sends that failed without ending the test.
        failed_sends: u32,
        /// Transactions.
        transactions: u32,
        /// Seconds.
        elapsed: f32,
        /// Percent of the whole machine.
        cpu_percent: f32,
        /// Percent in programs.
        user_percent: f32,
        /// In the kernel.
        system_percent: f32,
        /// Waiting for disks.
        iowait_percent: f32,
        /// In hardware interrupts.
        irq_percent: f32,
        /// In software interrupts.
        softirq_percent: f32,
        /// Ignored by clients, which compute it themselves.
        service_demand: f32,
        /// How CPU was measured: see `meter::METHOD_PROC_STAT`.
        cpu_method: u32,
        /// CPUs of the server.
        cpus: u32,
        /// The busiest of them.
        peak_cpu: i32,
        /// Its load in percent.
        peak_percent: f32,
        /// PCI vendor of the interface.
        vendor: i32,
        /// PCI device.
        device: i32,
        /// PCI subvendor.
        subvendor: i32,
        /// PCI subdevice.
        subdevice: i32,
        /// Segments sent again; -1: not known.
        retransmits: i32,
    }
}

body! {
    /// [`kind::STREAM`]: the client sends, the server receives.
    StreamRequest {
        /// SO_SNDBUF; negative or 0: as it comes.
        send_buffer: i32,
        /// SO_RCVBUF; negative or 0: as it comes.
        recv_buffer: i32,
        /// Bytes per receive; 0: the server decides.
        recv_bytes: u32,
        /// Alignment.
        recv_alignment: u32,
        /// Offset.
        recv_offset: u32,
        /// No Nagle algorithm.
        nodelay: u32,
        /// Measure CPU.
        measure_cpu: u32,
        /// Result of an earlier calibration.
        cpu_rate: f32,
        /// Seconds. A number of bytes is sent as it is, without a sign.
        length: i32,
        /// Ignored.
        avoid_recv_copy: u32,
        /// Ignored.
        avoid_send_copy: u32,
        /// Ignored.
        dirty: u32,
        /// Ignored.
        clean: u32,
        /// The port of the data socket; 0: the server chooses.
        data_port: u32,
        /// [`FAMILY_V4`] or [`FAMILY_V6`].
        family: u32,
        /// Receive into posted buffers.
        posted: u32,
    }
}

body! {
    /// [`kind::STREAM_RESPONSE`].
    StreamResponse {
        /// SO_RCVBUF.
        recv_buffer: i32,
        /// Bytes per receive.
        recv_bytes: u32,
        /// No Nagle algorithm.
        nodelay: u32,
        /// CPU is measured.
        measure_cpu: u32,
        /// As asked.
        length: i32,
        /// SO_SNDBUF.
        send_buffer: i32,
        /// The port of the data socket.
        data_port: u32,
        /// Idle counts per second.
        cpu_rate: f32,
        /// Copies are avoided.
        avoid_recv_copy: u32,
        /// Copies are avoided.
        avoid_send_copy: u32,
    }
}

body! {
    /// [`kind::STREAM_RESULTS`].
    StreamResults {
        /// Bytes that the server received.
        bytes_received: f64,
        /// In this many calls.
        recv_calls: u32,
        /// Seconds.
        elapsed: f32,
        /// Percent of the whole machine.
        cpu_percent: f32,
        /// Ignored by clients.
        service_demand: f32,
        /// How CPU was measured.
        cpu_method: u32,
        /// CPUs of the server.
        cpus: u32,
        /// SO_RCVBUF at the end.
        recv_buffer: i32,
        /// SO_SNDBUF at the end.
        send_buffer: i32,
    }
}

body! {
    /// [`kind::CONNECT`]: the client connects, the server closes.
    ConnectRequest {
        /// SO_RCVBUF; negative or 0: as it comes.
        recv_buffer: i32,
        /// SO_SNDBUF; negative or 0: as it comes.
        send_buffer: i32,
        /// Alignment.
        recv_alignment: u32,
        /// Offset.
        recv_offset: u32,
        /// Alignment.
        send_alignment: u32,
        /// Offset.
        send_offset: u32,
        /// Not used by this test.
        request_bytes: i32,
        /// Not used by this test.
        response_bytes: i32,
        /// No Nagle algorithm.
        nodelay: u32,
        /// Measure CPU.
        measure_cpu: u32,
        /// Result of an earlier calibration.
        cpu_rate: f32,
        /// Seconds; negative: transactions.
        length: i32,
        /// Ignored.
        avoid_recv_copy: u32,
        /// Ignored.
        avoid_send_copy: u32,
        /// The port of the data socket; 0: the server chooses.
        data_port: u32,
        /// [`FAMILY_V4`] or [`FAMILY_V6`].
        family: u32,
    }
}

body! {
    /// [`kind::CONNECT_RESPONSE`].
    ConnectResponse {
        /// SO_RCVBUF.
        recv_buffer: i32,
        /// No Nagle algorithm.
        nodelay: u32,
        /// CPU is measured.
        measure_cpu: u32,
        /// As asked.
        length: i32,
        /// SO_SNDBUF.
        send_buffer: i32,
        /// The port of the data socket.
        data_port: u32,
        /// Idle counts per second.
        cpu_rate: f32,
        /// Copies are avoided.
        avoid_recv_copy: u32,
        /// Copies are avoided.
        avoid_send_copy: u32,
    }
}

body! {
    /// [`kind::CONNECT_RESULTS`].
    ConnectResults {
        /// Ignored.
        bytes_received: u32,
        /// Ignored.
        recv_calls: u32,
        /// Connections.
        transactions: u32,
        /// Seconds.
        elapsed: f32,
        /// Percent of the whole machine.
        cpu_percent: f32,
        /// Ignored by clients.
        service_demand: f32,
        /// How CPU was measured.
        cpu_method: u32,
        /// CPUs of the server.
        cpus: u32,
    }
}

/// The address in a field of sixteen bytes; `None` if it is zero or of no family.
///
/// IPv4 stands in the first four bytes in network order. IPv6 went through a conversion of each
/// word that it did not need, so on little-endian machines its words are reversed.
pub fn address(field: &Text<16>, family: u32) -> Option<std::net::IpAddr> {
    let bytes = field.0;
    let address: std::net::IpAddr = match family {
        FAMILY_V4 => std::net::Ipv4Addr::new(bytes[0], bytes[1], bytes[2], bytes[3]).into(),
        FAMILY_V6 => {
            let mut straight = bytes;
            straight.chunks_exact_mut(4).for_each(<[u8]>::reverse);
            std::net::Ipv6Addr::from(straight).into()
        }
        _ => return None,
    };
    (!address.is_unspecified()).then_some(address)
}

/// The field for an address, and its family.
#[cfg(test)]
pub fn address_field(address: std::net::IpAddr) -> (Text<16>, u32) {
    let mut field = Text::default();
    match address {
        std::net::IpAddr::V4(a) => {
            field.0[..4].copy_from_slice(&a.octets());
            (field, FAMILY_V4)
        }
        std::net::IpAddr::V6(a) => {
            field.0 = a.octets();
            field.0.chunks_exact_mut(4).for_each(<[u8]>::reverse);
            (field, FAMILY_V6)
        }
    }
}

#[cfg(test)]
mod tests;
