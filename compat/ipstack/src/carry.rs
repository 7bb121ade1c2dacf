//! Packets between the device and the stack.

use std::future::Future;
use std::io::{self, ErrorKind};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use etherparse::IpSlice;
use fulmar_tokio::{PacketReceiver, PacketSender};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc::{self, Receiver, Sender};

use crate::{IpNumber, IpStackConfig, IpStackStream, IpStackUnknownTransport};

/// Packets in each direction after which other tasks run.
const BATCH: usize = 128;
/// Answers to packets of other protocols that wait for the device.
const WAITING_ANSWERS: usize = 256;
/// Longest IP packet.
const MAX_PACKET_BYTES: usize = 65_535;
/// Flags and EtherType, which a TUN puts before a packet (`packet_information`).
const INFORMATION_BYTES: usize = 4;

/// Reads the device until it has nothing more, passes these packets together, and writes what the stack sends. Ends with
/// an error of the device, or when the stack ends.
pub(crate) struct Carry<D> {
    device: D,
    sender: PacketSender,
    receiver: PacketReceiver,
    others: Sender<IpStackStream>,
    answer: Sender<Vec<u8>>,
    answers: Receiver<Vec<u8>>,
    mtu: usize,
    has_information: bool,
    buf: Box<[u8]>,
    /// Bytes in `buf` that the stack has no space for yet.
    held: usize,
    /// The part of a packet that the device has not taken yet.
    out: Vec<u8>,
}

impl<D: AsyncRead + AsyncWrite + Unpin> Carry<D> {
    pub(crate) fn new(
        config: &IpStackConfig,
        device: D,
        sender: PacketSender,
        receiver: PacketReceiver,
        others: Sender<IpStackStream>,
    ) -> Carry<D> {
        let (answer, answers) = mpsc::channel(WAITING_ANSWERS);
        Carry {
            device,
            sender,
            receiver,
            others,
            answer,
            answers,
            mtu: config.mtu.into(),
            has_information: config.packet_information && cfg!(unix),
            buf: vec![0; INFORMATION_BYTES + MAX_PACKET_BYTES].into(),
            held: 0,
            out: Vec::new(),
        }
    }

    /// From the device to the stack. Ready: there may be more.
    fn poll_in(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        for _ in 0..BATCH {
            if self.held == 0 {
                let mut buf = ReadBuf::new(&mut self.buf);
                match Pin::new(&mut self.device).poll_read(cx, &mut buf)? {
                    Poll::Ready(()) => self.held = buf.filled().len(),
                    Poll::Pending => {
                        ready!(pin!(self.sender.flush()).poll(cx))?;
                        return Poll::Pending;
                    }
                }
                if self.held == 0 {
                    return Poll::Ready(Err(ErrorKind::UnexpectedEof.into()));
                }
            }
            ready!(self.pass_in(cx))?;
            self.held = 0;
        }
        pin!(self.sender.flush()).poll(cx)
    }

    /// Passes the packet in `buf`.
    fn pass_in(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let start = if self.has_information { INFORMATION_BYTES } else { 0 };
        let packet = self.buf.get(start..self.held).unwrap_or_default();
        let other = match IpSlice::from_slice(packet) {
            // The stack checks everything else, and joins fragments.
            Ok(ip) if matches!(ip.payload_ip_number(), IpNumber::TCP | IpNumber::UDP) => {
                return pin!(self.sender.push(packet)).poll(cx);
            }
            Ok(ip) => IpStackStream::UnknownTransport(IpStackUnknownTransport {
                src: ip.source_addr(),
                dst: ip.destination_addr(),
                protocol: ip.payload_ip_number(),
                payload: ip.payload().payload.to_vec(),
                mtu: self.mtu,
                answers: self.answer.clone(),
            }),
            Err(_) => IpStackStream::UnknownNetwork(packet.to_vec()),
        };
        // Dropped if too many wait.
        let _ = self.others.try_send(other);
        Poll::Ready(Ok(()))
    }

    /// From the stack to the device. Ready: there may be more.
    fn poll_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        for _ in 0..BATCH {
            ready!(self.finish_out(cx))?;
            if let Poll::Ready(Some(answer)) = self.answers.poll_recv(cx) {
                put(&mut self.out, self.has_information, &answer);
                continue;
            }
            let mut packet = match self.receiver.get_mut().try_recv() {
                Ok(packet) => packet,
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    ready!(pin!(self.receiver.readable()).poll(cx))?;
                    continue;
                }
                Err(e) => return Poll::Ready(Err(e)),
            };
            if !self.has_information {
                match Pin::new(&mut self.device).poll_write(cx, packet)? {
                    Poll::Ready(n) if n == packet.len() => continue,
                    Poll::Ready(n) => packet = &packet[n..],
                    Poll::Pending => {}
                }
            }
            put(&mut self.out, self.has_information, packet);
        }
        Poll::Ready(Ok(()))
    }

    /// Writes the packet that is left.
    fn finish_out(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.out.is_empty() {
            let n = ready!(Pin::new(&mut self.device).poll_write(cx, &self.out))?;
            if n == 0 {
                return Poll::Ready(Err(ErrorKind::WriteZero.into()));
            }
            self.out.drain(..n);
        }
        Poll::Ready(Ok(()))
    }
}

/// Queues a packet, after flags of 0 and its EtherType if these are wanted.
fn put(out: &mut Vec<u8>, has_information: bool, packet: &[u8]) {
    if has_information {
        let is_v6 = packet.first().is_some_and(|first| first >> 4 == 6);
        out.extend_from_slice(if is_v6 { &[0, 0, 0x86, 0xdd] } else { &[0, 0, 8, 0] });
    }
    out.extend_from_slice(packet);
}

impl<D: AsyncRead + AsyncWrite + Unpin> Future for Carry<D> {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let more_in = self.poll_in(cx)?.is_ready();
        let more_out = self.poll_out(cx)?.is_ready();
        // A device that is not done wakes this task.
        let _ = Pin::new(&mut self.device).poll_flush(cx)?;
        if more_in || more_out {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    }
}
