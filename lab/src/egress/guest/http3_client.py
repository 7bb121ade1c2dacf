"""A GET over HTTP/3 for each name, from one port: http3_client.py [--v2] ADDRESS-OR-NAME[:PORT] SERVER-NAME..."""

import asyncio
import os
import ssl
import sys

from aioquic.asyncio import QuicConnectionProtocol, connect
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.packet import QuicProtocolVersion


class Client(QuicConnectionProtocol):
    def ask(self, name):
        self.answer = asyncio.get_running_loop().create_future()
        self.http = H3Connection(self._quic)
        stream = self._quic.get_next_available_stream_id()
        fields = [(b":method", b"GET"), (b":scheme", b"https"), (b":authority", name), (b":path", b"/")]
        self.http.send_headers(stream, fields, end_stream=True)
        self.transmit()
        return self.answer

    def quic_event_received(self, event):
        for found in self.http.handle_event(event) if hasattr(self, "http") else []:
            if isinstance(found, DataReceived) and not self.answer.done():
                self.answer.set_result(found.data)


async def main(at, names, version):
    host, _, port = at.partition(":")
    own_port = 40000 + os.getpid() % 20000
    for name in names:
        configuration = QuicConfiguration(
            alpn_protocols=H3_ALPN,
            server_name=name,
            verify_mode=ssl.CERT_NONE,
            original_version=version,
            supported_versions=[version],
        )
        options = {"configuration": configuration, "create_protocol": Client, "local_port": own_port}
        async with connect(host, int(port or 443), **options) as client:
            print((await asyncio.wait_for(client.ask(name.encode()), 5)).decode())


arguments = sys.argv[1:]
is_v2 = arguments[0] == "--v2"
to, *asked = arguments[is_v2:]
version = QuicProtocolVersion.VERSION_2 if is_v2 else QuicProtocolVersion.VERSION_1
asyncio.run(asyncio.wait_for(main(to, asked, version), 6))
