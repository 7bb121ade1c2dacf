"""The servers of `fulmar-lab bench egress`: servers.py internet|host FOLDER.

Every server that a guest must not reach notes a mark (`tk` and twelve hexadecimal digits) that it receives, as one line
`PLACE MARK` in FOLDER/reached. The edge serves every name at one address, as a CDN does: there only a mark in a name
other than ok.test counts (`MARK.evil.test` as Host, SNI, :authority), since the allowed name may be told anything.
Prints `ready` when all listen.
"""

import asyncio
import base64
import gzip
import hashlib
import io
import json
import os
import re
import socket
import ssl
import struct
import sys
import tarfile
import threading
import zipfile

ALLOWED = "ok.test"
EDGE, EVIL, RESOLVER = "45.10.0.10", "45.10.0.66", "45.10.0.53"
# An address without servers.
SILENT = "45.10.0.67"
EDGE6, EVIL6 = "2a0a::10", "2a0a::66"
PRIVATE, PRIVATE6 = "10.20.0.5", "fd12::5"
METADATA, METADATA6 = "169.254.169.254", "fd00:ec2::254"
NAT64 = ["64:ff9b::a9fe:a9fe", "64:ff9b::a14:5"]
HOST, HOST6, HOST_OTHER = "45.10.0.1", "2a0a::1", "45.10.0.2"
HOST_PORT = 8100
OK = b"egress-ok\n"
MARK = re.compile(rb"tk[0-9a-f]{12}", re.I)
NAMED = re.compile(rb"(tk[0-9a-f]{12})\.evil\.test", re.I)

folder = sys.argv[2] if len(sys.argv) > 2 else "."
lock = threading.Lock()


def note(place, found):
    """Notes marks that arrived where none may."""
    with lock, open(f"{folder}/reached", "a") as log:
        for mark in sorted(set(found)):
            log.write(f"{place} {mark.decode().lower()}\n")


def listen(address, port, serve, place=""):
    """Serves each TCP connection on a thread of its own."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, port), family=family, backlog=128)

    def run(connection):
        with connection:
            try:
                connection.settimeout(20)
                serve(connection, place)
            except (OSError, ValueError, IndexError):
                pass

    def accept():
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=run, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def listen_udp(address, port, answer, place="", group=None):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = socket.socket(family, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((address, port))
    if group:
        server.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton(group) + socket.inet_aton(EVIL))

    def run():
        while True:
            data, peer = server.recvfrom(65535)
            try:
                reply = answer(data, place)
                if reply:
                    server.sendto(reply, peer)
            except (OSError, ValueError, IndexError):
                pass

    threading.Thread(target=run, daemon=True).start()


# ---- what a guest must not reach ----


def trap(connection, place):
    """Notes every mark that arrives, and answers as HTTP."""
    seen = b""
    while True:
        data = connection.recv(65536)
        if not data:
            return
        seen += data
        found = MARK.findall(seen)
        if found:
            note(place, found)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\nConnection: close\r\n\r\nreached\n")
            return


def trap_tls(connection, place):
    hello = connection.recv(65536, socket.MSG_PEEK)
    note(place, MARK.findall(hello))
    with tls_context(lambda *_: None).wrap_socket(connection, server_side=True) as inside:
        trap(inside, place)


def trap_udp(data, place):
    found = MARK.findall(data)
    note(place, found)
    return b"reached\n" if found else None


def listen_icmp():
    """Notes what echo requests carry to another server than the allowed one."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)

    def run():
        while True:
            packet = listener.recv(65535)
            if packet[16:20] == socket.inet_aton(EVIL):
                note("another server (ICMP)", MARK.findall(packet[20:]))

    threading.Thread(target=run, daemon=True).start()


# ---- the edge: HTTP, TLS ----


def tls_context(on_name):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{folder}/edge.pem", f"{folder}/edge.key")
    context.sni_callback = on_name
    return context


def edge_tls(connection, place):
    hello = connection.recv(65536, socket.MSG_PEEK)
    if b"\xfe\x0d" in hello:
        # The name inside an encrypted ClientHello is readable here, so that no keys are needed.
        note("edge: encrypted ClientHello", MARK.findall(hello))

    def on_name(_, name, __):
        note(f"{place}: SNI", NAMED.findall((name or "").encode()))

    with tls_context(on_name).wrap_socket(connection, server_side=True) as inside:
        edge_http(inside, f"{place} (TLS)")


class Stream:
    """Buffered reads of a connection."""

    def __init__(self, connection):
        self.connection, self.buffer = connection, b""

    def more(self):
        data = self.connection.recv(65536)
        if not data:
            raise ValueError("end")
        self.buffer += data

    def until(self, end):
        while end not in self.buffer:
            self.more()
        head, self.buffer = self.buffer.split(end, 1)
        return head

    def exactly(self, count):
        while len(self.buffer) < count:
            self.more()
        data, self.buffer = self.buffer[:count], self.buffer[count:]
        return data


def edge_http(connection, place):
    """A lenient server of HTTP/1 that believes every way in which a request names a host."""
    stream = Stream(connection)
    while True:
        while len(stream.buffer) < 14 and b"\n" not in stream.buffer:
            stream.more()
        if stream.buffer.startswith(b"PROXY "):
            stream.until(b"\r\n")
        while stream.buffer[:1] in (b"\r", b"\n", b" "):
            stream.buffer = stream.buffer[1:]
        if not stream.buffer:
            continue
        if stream.buffer.startswith(b"PRI * HTTP/2.0"):
            return edge_h2(stream, place)
        head = stream.until(b"\n\n" if lenient_end(stream) else b"\r\n\r\n")
        fields = dict(
            (line.split(b":", 1)[0].strip().lower(), line.split(b":", 1)[1].strip())
            for line in head.split(b"\n")[1:]
            if b":" in line
        )
        note(f"{place}: HTTP", NAMED.findall(head))
        read_body(stream, fields)
        method, target = head.split(b" ", 2)[:2]
        if fields.get(b"upgrade", b"").lower() == b"websocket":
            return websocket(connection, stream, fields)
        if method == b"CONNECT":
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            continue
        path = re.sub(rb"^[a-z]+://[^/]*", b"", target).decode() or "/"
        status, kind, content = resource(path)
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n"
        if path.startswith("/v2/"):
            head += f"Docker-Content-Digest: {digest(content)}\r\nDocker-Distribution-Api-Version: registry/2.0\r\n"
        connection.sendall(head.encode() + b"\r\n" + (b"" if method == b"HEAD" else content))
        if fields.get(b"connection", b"").lower() == b"close":
            return


def lenient_end(stream):
    """Reads until either end of a head is there; whether it is the lenient one."""
    while b"\r\n\r\n" not in stream.buffer and b"\n\n" not in stream.buffer:
        stream.more()
    strict, lenient = stream.buffer.find(b"\r\n\r\n"), stream.buffer.find(b"\n\n")
    return lenient >= 0 and (strict < 0 or lenient < strict)


def read_body(stream, fields):
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        body = b""
        while True:
            size = int(stream.until(b"\r\n").split(b";")[0], 16)
            body += stream.exactly(size)
            stream.until(b"\r\n")
            if size == 0:
                return body
    return stream.exactly(int(fields.get(b"content-length", b"0")))


def edge_h2(stream, place):
    """HTTP/2 as far as the tests need it: names in requests are sent without compression."""
    stream.connection.sendall(b"\0\0\0\x04\0\0\0\0\0")
    while True:
        note(f"{place}: HTTP/2", NAMED.findall(stream.buffer))
        stream.more()


def websocket(connection, stream, fields):
    accept = hashlib.sha1(fields[b"sec-websocket-key"] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    answer = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
    connection.sendall(answer + base64.b64encode(accept) + b"\r\n\r\n" + b"\x81" + bytes([len(OK)]) + OK)
    stream.exactly(6)


# ---- what the clients fetch ----


def digest(content):
    return "sha256:" + hashlib.sha256(content).hexdigest()


def tar(files, prefix=""):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(prefix + name)
            info.size, info.mode = len(text), 0o644
            archive.addfile(info, io.BytesIO(text))
    return out.getvalue()


def deb():
    """A package of Debian without files."""
    control = b"Package: hello-egress\nVersion: 1.0\nArchitecture: all\nMaintainer: test <a@ok.test>\nDescription: test\n"
    members = [
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", gzip.compress(tar({"control": control}, "./"), mtime=0)),
        ("data.tar.gz", gzip.compress(tar({}), mtime=0)),
    ]
    out = b"!<arch>\n"
    for name, text in members:
        out += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(text):<10}`\n".encode() + text + b"\n" * (len(text) % 2)
    listed = control + f"Filename: ./hello.deb\nSize: {len(out)}\nSHA256: {hashlib.sha256(out).hexdigest()}\n\n".encode()
    return {"/apt/hello.deb": out, "/apt/./hello.deb": out, "/apt/./Packages": listed, "/apt/Packages": listed}


def wheel():
    out = io.BytesIO()
    info = "hello_egress-1.0.dist-info"
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("hello_egress.py", "text = 'egress-ok'\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: hello-egress\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"hello_egress.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    name = "hello_egress-1.0-py3-none-any.whl"
    page = f'<!DOCTYPE html><a href="/pip/{name}">{name}</a>'.encode()
    return {"/pip/hello-egress/": page, f"/pip/{name}": out.getvalue()}


def npm_package():
    about = {"name": "hello-egress", "version": "1.0.0"}
    packed = gzip.compress(tar({"package.json": json.dumps(about).encode()}, "package/"), mtime=0)
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(packed).digest()).decode()
    dist = {"tarball": f"http://{ALLOWED}/npm/hello-egress/-/hello-egress-1.0.0.tgz", "integrity": integrity}
    document = {"name": "hello-egress", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": {**about, "dist": dist}}}
    return {"/npm/hello-egress": json.dumps(document).encode(), "/npm/hello-egress/-/hello-egress-1.0.0.tgz": packed}


def crate():
    manifest = b'[package]\nname = "hello-egress"\nversion = "1.0.0"\nedition = "2021"\n'
    packed = gzip.compress(tar({"Cargo.toml": manifest, "src/lib.rs": b"\n"}, "hello-egress-1.0.0/"), mtime=0)
    checksum = hashlib.sha256(packed).hexdigest()
    line = {"name": "hello-egress", "vers": "1.0.0", "deps": [], "cksum": checksum, "features": {}, "yanked": False}
    return {
        "/cargo/config.json": json.dumps({"dl": f"http://{ALLOWED}/cargo/crates"}).encode(),
        "/cargo/he/ll/hello-egress": json.dumps(line).encode(),
        "/cargo/crates/hello-egress/1.0.0/download": packed,
    }


def go_module():
    module, version = "example.test/hello", "v1.0.0"
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(f"{module}@{version}/go.mod", f"module {module}\n")
        archive.writestr(f"{module}@{version}/hello.go", "package hello\n")
    at = f"/go/{module}/@v"
    info = json.dumps({"Version": version, "Time": "2026-01-01T00:00:00Z"}).encode()
    return {
        f"{at}/list": f"{version}\n".encode(),
        f"{at}/{version}.info": info,
        f"/go/{module}/@latest": info,
        f"{at}/{version}.mod": f"module {module}\n".encode(),
        f"{at}/{version}.zip": out.getvalue(),
    }


def image():
    layer = gzip.compress(tar({"egress": OK}), mtime=0)
    diff = digest(gzip.decompress(layer))
    config = json.dumps(
        {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": [diff]}}
    ).encode()
    kind = "application/vnd.docker"
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": f"{kind}.distribution.manifest.v2+json",
            "config": {"mediaType": f"{kind}.container.image.v1+json", "size": len(config), "digest": digest(config)},
            "layers": [{"mediaType": f"{kind}.image.rootfs.diff.tar.gzip", "size": len(layer), "digest": digest(layer)}],
        }
    ).encode()
    return {
        "/v2/": b"{}",
        "/v2/hello/manifests/latest": manifest,
        f"/v2/hello/manifests/{digest(manifest)}": manifest,
        f"/v2/hello/blobs/{digest(config)}": config,
        f"/v2/hello/blobs/{digest(layer)}": layer,
    }


FILES = {"/": OK, **deb(), **wheel(), **npm_package(), **crate(), **go_module(), **image()}


def resource(path):
    path = path.split("?")[0]
    content = FILES.get(path)
    if content is None:
        # The edge answers every other path of the clients' kind, so that attacks get an answer.
        is_registry = path.split("/")[1] in ("apt", "pip", "npm", "cargo", "go", "v2")
        return ("404 Not Found", "text/plain", b"none\n") if is_registry else ("200 OK", "text/plain", OK)
    kind = "text/html" if path.startswith("/pip/") and path.endswith("/") else "application/octet-stream"
    if "/manifests/" in path:
        kind = "application/vnd.docker.distribution.manifest.v2+json"
    elif path.startswith("/npm/") and not path.endswith(".tgz"):
        kind = "application/json"
    return "200 OK", kind, content


# ---- other protocols of the allowed name ----


def banner(connection, _):
    connection.sendall(b"SSH-2.0-egress-ok\r\n")
    connection.recv(1000)


def line_server(connection, _):
    """Answers each line."""
    stream = Stream(connection)
    while True:
        connection.sendall(b"egress-ok " + stream.until(b"\n") + b"\n")


def postgres(connection, _):
    stream = Stream(connection)
    while True:
        body = stream.exactly(struct.unpack(">I", stream.exactly(4))[0] - 4)
        if body[:4] != struct.pack(">I", 80877103):
            break
        connection.sendall(b"N")

    def message(kind, content):
        return kind + struct.pack(">I", len(content) + 4) + content

    ready = message(b"Z", b"I")
    parameters = message(b"S", b"server_version\x0015.0\0") + message(b"S", b"client_encoding\0UTF8\0")
    connection.sendall(message(b"R", struct.pack(">I", 0)) + parameters + ready)
    while stream.exactly(1) != b"X":
        stream.exactly(struct.unpack(">I", stream.exactly(4))[0] - 4)
        column = b"text\0" + struct.pack(">IHIhIH", 0, 0, 25, -1, 0xFFFFFFFF, 0)
        row = struct.pack(">HI", 1, 9) + b"egress-ok"
        described = message(b"T", struct.pack(">H", 1) + column)
        connection.sendall(described + message(b"D", row) + message(b"C", b"SELECT 1\0") + ready)


def postgres_tls(connection, place):
    """Agrees to TLS, and looks at the name in it."""
    connection.recv(8)
    connection.sendall(b"S")
    edge_tls(connection, place)


def redis(connection, _):
    stream = Stream(connection)
    while True:
        count = int(stream.until(b"\r\n")[1:])
        words = []
        for _ in range(count):
            words.append(stream.exactly(int(stream.until(b"\r\n")[1:])))
            stream.exactly(2)
        connection.sendall(b"*0\r\n" if words[0].upper() == b"COMMAND" else b"$9\r\negress-ok\r\n")


def imap(connection, _):
    stream = Stream(connection)
    connection.sendall(b"* OK egress-ok\r\n")
    while True:
        tag, command = stream.until(b"\r\n").split(b" ", 1)
        name = command.split(b" ")[0].upper()
        more = {b"CAPABILITY": b"* CAPABILITY IMAP4rev1\r\n", b"LIST": b'* LIST () "/" egress-ok\r\n'}.get(name, b"")
        connection.sendall(more + tag + b" OK done\r\n")
        if name == b"LOGOUT":
            return


def ldap(connection, _):
    """A bind and a search (RFC 4511), with one entry."""
    stream = Stream(connection)

    def wrapped(tag, content):
        return bytes([tag, len(content)]) + content

    def result(number, tag):
        return wrapped(0x30, number + wrapped(tag, b"\x0a\x01\x00\x04\x00\x04\x00"))

    while True:
        stream.exactly(1)
        size = stream.exactly(1)[0]
        if size & 0x80:
            size = int.from_bytes(stream.exactly(size & 0x7F), "big")
        body = stream.exactly(size)
        number, kind = body[:3], body[3]
        if kind == 0x60:
            connection.sendall(result(number, 0x61))
        elif kind == 0x63:
            values = wrapped(0x30, wrapped(4, b"cn") + wrapped(0x31, wrapped(4, b"egress-ok")))
            entry = wrapped(0x64, wrapped(4, b"cn=a") + wrapped(0x30, values))
            connection.sendall(wrapped(0x30, number + entry) + result(number, 0x65))
        else:
            return


# ---- DNS ----

A, CNAME, TXT, AAAA = 1, 5, 16, 28
RECORDS = {
    "ok.test": [(A, EDGE), (AAAA, EDGE6)],
    "v4.test": [(A, EDGE)],
    "evil.test": [(A, EVIL), (AAAA, EVIL6)],
    "meta.test": [(A, METADATA)],
    "meta6.test": [(AAAA, METADATA6)],
    "private.test": [(A, PRIVATE)],
    "ula.test": [(AAAA, PRIVATE6)],
    "loop.test": [(A, "127.0.0.1")],
    "loop6.test": [(AAAA, "::1")],
    "zero.test": [(A, "0.0.0.0")],
    "host.test": [(A, HOST)],
    "host6.test": [(AAAA, HOST6)],
    "mapped.test": [(AAAA, "::ffff:169.254.169.254")],
    "nat64.test": [(AAAA, NAT64[0])],
    "nat64p.test": [(AAAA, NAT64[1])],
    "mixed.test": [(A, PRIVATE), (A, SILENT)],
    "alias.test": [(CNAME, "meta.test")],
}
flips = {}


def name_at(message, at):
    labels = []
    while message[at]:
        labels.append(message[at + 1 : at + 1 + message[at]].decode("latin-1").lower())
        at += 1 + message[at]
    return ".".join(labels), at + 1


def encoded(name):
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def answers(name, kind):
    if name.startswith("flip-") and kind == A:
        # First a public address, then one of the site: rebinding.
        with lock:
            flips[name] = flips.get(name, 0) + 1
        return [(A, EDGE if flips[name] < 2 else PRIVATE)]
    records = RECORDS.get(name, [])
    if records and records[0][0] == CNAME:
        return records + RECORDS[records[0][1]]
    return records


def dns(message, place):
    """Answers what it knows; whatever else it is asked leaves for the server of an attacker."""
    note(place, MARK.findall(message.lower()))
    name, end = name_at(message, 12)
    kind = struct.unpack(">H", message[end : end + 2])[0]
    out = b""
    found = [record for record in answers(name, kind) if record[0] in (kind, CNAME)]
    for of_kind, value in found:
        if of_kind == CNAME:
            data = encoded(value)
        else:
            data = socket.inet_pton(socket.AF_INET if of_kind == A else socket.AF_INET6, value)
        owner = b"\xc0\x0c" if of_kind == CNAME or len(found) == 1 or found[0][0] != CNAME else encoded(found[0][1])
        out += owner + struct.pack(">HHIH", of_kind, 1, 0 if name.startswith("flip-") else 60, len(data)) + data
    is_known = name in RECORDS or name.startswith("flip-")
    if name.endswith("evil.test") and kind in (A, TXT):
        data = socket.inet_aton(EVIL) if kind == A else b"\x07reached"
        out, found, is_known = b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 1, len(data)) + data, [1], True
    flags = 0x8180 | (0 if is_known else 3)
    return message[:2] + struct.pack(">HHHHH", flags, 1, len(found), 0, 0) + message[12 : end + 4] + out


def dns_tcp(connection, place):
    stream = Stream(connection)
    while True:
        answer = dns(stream.exactly(struct.unpack(">H", stream.exactly(2))[0]), place)
        connection.sendall(struct.pack(">H", len(answer)) + answer)


# ---- HTTP/3 and gRPC, where their libraries are ----


def http3():
    from aioquic.asyncio import QuicConnectionProtocol, serve
    from aioquic.h3.connection import H3_ALPN, H3Connection
    from aioquic.h3.events import HeadersReceived
    from aioquic.quic.configuration import QuicConfiguration
    from aioquic.quic.events import ProtocolNegotiated

    class Protocol(QuicConnectionProtocol):
        http = None

        def quic_event_received(self, event):
            if isinstance(event, ProtocolNegotiated):
                self.http = H3Connection(self._quic)
            for request in self.http.handle_event(event) if self.http else []:
                if isinstance(request, HeadersReceived):
                    named = b" ".join(value for name, value in request.headers if name in (b":authority", b"host"))
                    note("edge: HTTP/3", NAMED.findall(named))
                    self.http.send_headers(request.stream_id, [(b":status", b"200")])
                    self.http.send_data(request.stream_id, OK, end_stream=True)
                    self.transmit()

    async def main():
        configuration = QuicConfiguration(is_client=False, alpn_protocols=H3_ALPN)
        configuration.load_cert_chain(f"{folder}/edge.pem", f"{folder}/edge.key")
        for at in (EDGE, EDGE6):
            for port in (443, 8443):
                await serve(at, port, configuration=configuration, create_protocol=Protocol)
        await asyncio.Future()

    threading.Thread(target=lambda: asyncio.run(main()), daemon=True).start()


def grpc_server():
    import concurrent.futures
    import grpc

    def greet(_, __):
        return OK

    handler = grpc.method_handlers_generic_handler("egress.Test", {"Greet": grpc.unary_unary_rpc_method_handler(greet)})
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((handler,))
    server.add_insecure_port(f"{EDGE}:50051")
    server.add_insecure_port(f"[{EDGE6}]:50051")
    server.start()
    return server


def internet():
    for at in (EDGE, EDGE6):
        listen(at, 80, edge_http, "edge")
        listen(at, 443, edge_tls, "edge")
        for port, serve in [(2200, banner), (7, line_server), (5432, postgres), (6379, redis), (143, imap), (389, ldap)]:
            listen(at, port, serve)
        listen(at, 5433, postgres_tls, "edge (PostgreSQL)")
        listen_udp(at, 7, lambda data, _: b"egress-ok " + data)
    for at in (EVIL, EVIL6):
        for port in (22, 80, 3128, 5432, 8080):
            listen(at, port, trap, "another server")
        for port in (443, 853):
            listen(at, port, trap_tls, "another server (TLS)")
        listen(at, 53, dns_tcp, "another DNS server")
        listen_udp(at, 53, dns, "another DNS server")
        for port in (7, 123, 443, 5000):
            listen_udp(at, port, trap_udp, "another server (UDP)")
    for port, at in ((5353, "224.0.0.251"), (5000, "239.9.9.9"), (5000, "45.10.0.7"), (5000, "255.255.255.255")):
        listen_udp(at, port, trap_udp, f"group {at}", at if at.startswith("2") and at != "255.255.255.255" else None)
    for at, place in [(PRIVATE, "the site"), (PRIVATE6, "the site"), (METADATA, "metadata"), (METADATA6, "metadata")]:
        listen(at, 80, trap, place)
    for at in NAT64:
        listen(at, 80, trap, "NAT64")
    listen_icmp()
    listen_udp(RESOLVER, 53, dns, "a name server, by the host's resolver")
    listen(RESOLVER, 53, dns_tcp, "a name server, by the host's resolver")
    kept = []
    for name, start in (("http3", http3), ("grpc", grpc_server)):
        try:
            kept.append(start())
        except ImportError as error:
            print(f"{name} is not served: {error}", file=sys.stderr)
    return kept


def unix(path):
    """A daemon behind a path: it asks the network for whoever connects."""
    if not path.startswith("\0"):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    if not path.startswith("\0"):
        os.chmod(path, 0o666)
    server.listen()
    shown = path.replace("\0", "@")

    def run():
        while True:
            connection, _ = server.accept()
            with connection:
                found = MARK.findall(connection.recv(65536))
                note(f"the daemon of {shown}", found)
                connection.sendall(b"reached\n")

    threading.Thread(target=run, daemon=True).start()


def host():
    for at in ("127.0.0.1", "::1", HOST, HOST6, HOST_OTHER):
        listen(at, HOST_PORT, trap, "the host")
        listen_udp(at, HOST_PORT, trap_udp, "the host (UDP)")
    for path in ("/run/docker.sock", "/run/nscd/socket", "/run/systemd/resolve/io.systemd.Resolve", "/run/bus"):
        unix(path)
    unix("\0egress")


if __name__ == "__main__":
    running = {"internet": internet, "host": host}[sys.argv[1]]()
    print("ready", flush=True)
    threading.Event().wait()
