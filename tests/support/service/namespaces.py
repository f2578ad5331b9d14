"""Nodes of tests: query a service inside a network namespace, change its link, firewall and hosts file, fake package versions.

The fixture `namespaces` creates the namespaces.
"""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_ASK = """
import sys, httpx
answer = httpx.request(sys.argv[1], sys.argv[2], content=sys.argv[3] or None, headers={'content-type': 'application/json'}, timeout=30)
print(answer.text); sys.exit(answer.status_code != 200)
"""


def ask(namespace: str, method: str, url: str, body: dict[str, Any] | None = None) -> str | None:
    """Send a request from inside a namespace. Return None unless the status is 200."""
    content = json.dumps(body) if body else ""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", _ASK, method, url, content]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return answer.stdout if answer.returncode == 0 else None


def members(namespace: str, url: str) -> list[int]:
    """Return the serving ranks as reported by the service at this URL, or none while it does not answer."""
    answer = ask(namespace, "GET", f"{url}/v1/fault_tolerance/status")
    return json.loads(answer)["members"] if answer else []


def set_link(namespace: str, *words: str) -> None:
    """Change the namespace's interface with `ip link`."""
    subprocess.run(["ip", "-n", namespace, "link", "set", "veth0", *words], check=True, timeout=10)


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
