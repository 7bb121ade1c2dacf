"""One GET over HTTP/3: http3_client.py ADDRESS-OR-NAME SERVER-NAME."""

import asyncio
import ssl
import sys

from aioquic.asyncio import QuicConnectionProtocol, connect
from aioquic.h3.connection import H3_ALPN, H3Connection
from aioquic.h3.events import DataReceived
from aioquic.quic.configuration import QuicConfiguration


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


async def main(at, name):
    configuration = QuicConfiguration(alpn_protocols=H3_ALPN, server_name=name, verify_mode=ssl.CERT_NONE)
    async with connect(at, 443, configuration=configuration, create_protocol=Client) as client:
        print((await asyncio.wait_for(client.ask(name.encode()), 5)).decode())


asyncio.run(asyncio.wait_for(main(sys.argv[1], sys.argv[2]), 6))
