"""Loopback addresses: one owner each among all processes, free again when the owner ends however it ends."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pipeline.errors import SandboxError
from workers.sandbox.network import loopback
from workers.sandbox.network.loopback import Loopback


@pytest.fixture
def leases() -> Iterator[list[Loopback]]:
    held: list[Loopback] = []
    yield held
    for lease in held:
        lease.release()


def test_addresses_differ_and_stay_away_from_the_machines_own(leases: list[Loopback]) -> None:
    leases += [loopback.lease() for _ in range(200)]
    assert len({lease.address for lease in leases}) == 200
    for lease in leases:
        address = ipaddress.IPv4Address(lease.address)
        assert address.is_loopback
        assert address not in ipaddress.IPv4Network("127.0.0.0/16")
        assert address.packed[-1] not in (0, 255)


def test_two_sandboxes_listen_on_the_same_port(leases: list[Loopback]) -> None:
    leases += [loopback.lease(), loopback.lease()]
    with socket.create_server((leases[0].address, 0)) as first:
        port = first.getsockname()[1]
        with socket.create_server((leases[1].address, port)) as second:
            assert second.getsockname()[1] == port


def only(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Leave 127.N.0.1 alone to draw."""
    monkeypatch.setattr(loopback.secrets, "randbelow", lambda below: number - 1 if below == 254 else 0)


def test_a_held_address_is_not_given_out_and_a_released_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, 77)
    first = loopback.lease()
    with pytest.raises(SandboxError, match="no free loopback address"):
        loopback.lease()
    first.release()
    first.release()
    again = loopback.lease()
    assert again.address == first.address == "127.77.0.77"
    again.release()


TAKE_ALL = """
import itertools
import sys
from workers.sandbox.network import loopback
draws = itertools.cycle([number for number in range(8) for _ in range(3)])
loopback.secrets.randbelow = lambda below: next(draws)
held = []
try:
    while True:
        held.append(loopback.lease())
except loopback.SandboxError:
    pass
print(*[lease.address for lease in held], flush=True)
sys.stdin.read()
"""


def test_processes_that_race_for_few_addresses_share_none() -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", TAKE_ALL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        taken = [address for each in processes if each.stdout for address in each.stdout.readline().split()]
        assert 8 == len(taken) == len(set(taken))
    finally:
        for each in processes:
            each.communicate()


def test_a_killed_owner_leaves_its_address_free(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, 78)
    held = loopback.lease()
    lock = held._lock.fileno()
    os.set_inheritable(lock, True)
    owner = subprocess.Popen(["sleep", "60"], close_fds=False)
    held.release()
    try:
        with pytest.raises(SandboxError):
            loopback.lease()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    loopback.lease().release()


def test_no_program_that_the_host_starts_keeps_an_address(leases: list[Loopback]) -> None:
    leases.append(loopback.lease())
    lock = leases[0]._lock.fileno()
    name = os.readlink(f"/proc/self/fd/{lock}")
    look = ["ls", "-l", "/proc/self/fd"]
    assert name not in subprocess.check_output(look, text=True, close_fds=False)
    os.set_inheritable(lock, True)
    assert name in subprocess.check_output(look, text=True, close_fds=False), "this look would have found nothing"
