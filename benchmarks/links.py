"""Hosts on one machine: network namespaces with addresses of their own, and between them a link that can be slow, lossy
or cut. The kernel of a small machine often has no netem, so packets go through this process, one TUN device a host.

Needs root and iproute2. Everything it makes is named after its process and goes when it ends.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from types import TracebackType

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 1400


class Hosts:
    """So many hosts, 10.77.0.1 the first, that reach each other and nobody else.

    Attributes:
        delay: seconds that a packet takes, one way.
        loss: share of the packets that get lost.
        cut: hosts whose link is cut.
    """

    def __init__(self, number: int, seed: int = 0) -> None:
        self.names = [f"fed{os.getpid()}-{i + 1}" for i in range(number)]
        self.delay = self.loss = 0.0
        self.cut = set[int]()
        self.carried = self.lost = 0
        self._random, self._ended = random.Random(seed), False
        self._devices = list[int]()

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def run(self, host: int, command: Sequence[str]) -> list[str]:
        """Returns the command as it runs on that host."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def __enter__(self) -> "Hosts":
        for host, name in enumerate(self.names):
            _ip("netns", "add", name)
            self._devices.append(_device(name))
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "tun0")
            _ip("-n", name, "link", "set", "tun0", "mtu", str(MTU), "up")
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._ended = True
        self._thread.join(5)
        for device in self._devices:
            os.close(device)
        for name in self.names:
            _ip("netns", "del", name)

    def _carry(self) -> None:
        waiting, number = list[tuple[float, int, int, int, bytes]](), 0
        while not self._ended:
            rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for device in select.select(self._devices, (), (), min(rest, 0.1))[0]:
                packet, here = os.read(device, 2**16), self._devices.index(device)
                there = packet[19] - 1 if len(packet) >= 20 and packet[0] >> 4 == 4 else -1  # last of the address
                if not 0 <= there < len(self._devices):
                    continue
                if self._random.random() < self.loss:
                    self.lost += 1
                    continue
                number += 1
                heapq.heappush(waiting, (time.monotonic() + self.delay, number, here, there, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, here, there, packet = heapq.heappop(waiting)
                if not self.cut & {here, there}:
                    self.carried += 1
                    os.write(self._devices[there], packet)


def _device(namespace: str) -> int:
    """Opens the TUN device of a namespace, from a thread that enters it."""
    found = list[int]()

    def enter() -> None:
        with open(f"/var/run/netns/{namespace}") as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", b"tun0", IFF_TUN | IFF_NO_PI))
        found.append(device)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return found[0]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
