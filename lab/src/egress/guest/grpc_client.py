"""One unary call of gRPC to HOST:PORT."""

import sys

import grpc

with grpc.insecure_channel(sys.argv[1]) as channel:
    print(channel.unary_unary("/egress.Test/Greet")(b"", timeout=5).decode())
