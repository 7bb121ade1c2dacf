#!/usr/bin/env python3
"""Goodput of one stream over fulmar's impairing device, in a network namespace of its own."""
import os, socket, subprocess, sys, threading, time

def sink(result, seconds):
    s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("0.0.0.0", 9000)); s.listen(1); s.settimeout(20)
    c, _ = s.accept(); c.settimeout(1)
    start = time.monotonic(); got = 0
    while time.monotonic() - start < seconds:
        try: b = c.recv(1 << 20)
        except socket.timeout: continue
        if not b: break
        got += len(b)
    result.append(got * 8 / (time.monotonic() - start) / 1e6); c.close(); s.close()

def fulmar_sends(binary, faults, seconds, extra):
    result = []
    cmd = [binary, "nc", "10.77.0.1", "9000", "--device", "tap:wan0", "--addr", "10.77.0.2/24", "--peer-addr", "10.77.0.1/24"] + extra
    if faults: cmd += ["--faults", faults]
    t = threading.Thread(target=sink, args=(result, seconds)); t.start(); time.sleep(0.3)
    p = subprocess.Popen(cmd, stdin=open("/dev/zero"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    t.join(); p.kill(); p.wait()
    return result[0] if result else float("nan")

def linux_sends(binary, faults, seconds, algorithm):
    cmd = [binary, "nc", "-l", "9000", "--device", "tap:wan0", "--addr", "10.77.0.2/24", "--peer-addr", "10.77.0.1/24"]
    if faults: cmd += ["--faults", faults]
    p = subprocess.Popen(cmd, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(50):
        time.sleep(0.2)
        try:
            c = socket.socket(); c.setsockopt(socket.IPPROTO_TCP, 13, algorithm.encode()); c.settimeout(3)
            c.connect(("10.77.0.2", 9000)); break
        except OSError: c.close()
    c.settimeout(0.2); block = bytes(1 << 18); start = time.monotonic()
    while time.monotonic() - start < seconds:
        try: c.send(block)
        except socket.timeout: pass
    info = c.getsockopt(socket.IPPROTO_TCP, 11, 256)
    acked = int.from_bytes(info[120:128], "little")  # tcpi_bytes_acked
    rate = acked * 8 / (time.monotonic() - start) / 1e6
    p.kill(); p.wait(); c.close()
    return rate

if __name__ == "__main__":
    who, binary, faults, seconds = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
    if os.environ.get("IN_NS") != "1":
        os.environ["IN_NS"] = "1"
        os.execvp("unshare", ["unshare", "-n", sys.executable] + sys.argv)
    subprocess.run(["ip", "link", "set", "lo", "up"])
    faults = "" if faults == "clean" else faults
    if who == "fulmar": print(f"{fulmar_sends(binary, faults, seconds, sys.argv[5:]):.1f}")
    else: print(f"{linux_sends(binary, faults, seconds, who):.1f}")
