"""Nodes of tests: network namespaces, requests from inside them, changes of link, firewall and hosts file, fake packages."""

import contextlib
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.service.forked import enter_network


@contextlib.contextmanager
def made_namespaces(count: int) -> Iterator[list[str]]:
    """Create namespaces on one switch, with addresses 10.213.7.1 and up. Skip the test if this machine does not permit it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the `ip` program to make network namespaces")
    token = secrets.token_hex(4)
    hub, *names = [f"wideep-{token}-{node}" for node in range(count + 1)]
    commands = [f"ip netns add {name}" for name in (hub, *names)]
    commands += [f"ip -n {hub} link add switch type bridge", f"ip -n {hub} link set switch up"]
    for node, name in enumerate(names, start=1):
        commands += [f"ip -n {name} link add veth0 type veth peer name veth{node} netns {hub}"]
        commands += [f"ip -n {hub} link set veth{node} master switch up"]
        commands += [f"ip -n {name} addr add 10.213.7.{node}/24 dev veth0"]
        commands += [f"ip -n {name} link set {device} up" for device in ("lo", "veth0")]
    try:
        for command in commands:
            answer = subprocess.run(command.split(), capture_output=True, text=True, timeout=10)
            if answer.returncode:
                pytest.skip(f"cannot make network namespaces here: {command}: {answer.stderr.strip()}")
        yield names
    finally:
        for name in (hub, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


def threads_inside(namespace: str, count: int = 1) -> ThreadPoolExecutor:
    """Return threads with sockets of a namespace. A process inside it would first import its HTTP client each time."""
    return ThreadPoolExecutor(count, initializer=enter_network, initargs=(namespace,))


def ask(namespace: str, method: str, url: str, body: dict[str, Any] | None = None) -> str | None:
    """Send a request from inside a namespace. Return None unless the status is 200."""
    with threads_inside(namespace) as thread:
        asked = thread.submit(httpx.request, method, url, json=body, timeout=30, verify=False)
        try:
            answer = asked.result()
        except httpx.TransportError:
            return None
    return answer.text if answer.status_code == 200 else None


def members(namespace: str, url: str) -> list[int]:
    """Return the serving ranks as reported by the service at this URL, or none while it does not answer."""
    answer = ask(namespace, "GET", f"{url}/v1/fault_tolerance/status")
    return json.loads(answer)["members"] if answer else []


def set_link(namespace: str, *words: str) -> None:
    """Change the namespace's interface with `ip link`."""
    subprocess.run(["ip", "-n", namespace, "link", "set", "veth0", *words], check=True, timeout=10)


def cut_link(names: Sequence[str], nodes: Collection[int], *, is_cut: bool = True) -> None:
    """Drop all packets between these nodes, without a sign to either side. Their links to other nodes stay.

    Args:
        names: All namespaces of `made_namespaces`.
    """
    hub = f"{names[0].rpartition('-')[0]}-0"
    for node in nodes:
        words = f"dev veth{node + 1} type bridge_slave isolated {'on' if is_cut else 'off'}"
        subprocess.run(["ip", "-n", hub, "link", "set", *words.split()], check=True, timeout=10)


def close_ports(namespace: str, ports: str) -> None:
    """Drop packets to these ports on a node, like a firewall: with a rule before the one for its own addresses."""
    for words in (
        "add pref 100 lookup local",
        "del pref 0",
        f"add pref 10 iif veth0 ipproto tcp dport {ports} blackhole",
    ):
        subprocess.run(["ip", "-n", namespace, "rule", *words.split()], check=True, timeout=10)


@contextlib.contextmanager
def hosts_files(contents: Mapping[str, str]) -> Iterator[None]:
    """Give namespaces, by name, their own /etc/hosts (`ip netns exec` mounts it)."""
    folders = [Path("/etc/netns") / name for name in contents]
    try:
        for folder, text in zip(folders, contents.values(), strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(text)
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # others may use the folder too
            folders[0].parent.rmdir()


def other_version(package: str, version: str, directory: Path) -> Path:
    """Create a folder for PYTHONPATH with another version of a package, found before the real one."""
    faked = directory / "other" / f"{package}-{version}.dist-info"
    faked.mkdir(parents=True)
    (faked / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return faked.parent
