"""Nodes of tests: asks a service from inside a network namespace, sets its link, its firewall and its hosts file, fakes another version of a package.

The fixture `namespaces` makes them.
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
    """Send a request from inside a namespace; None when it is not answered with 200."""
    content = json.dumps(body) if body else ""
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", _ASK, method, url, content]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return answer.stdout if answer.returncode == 0 else None


def members(namespace: str, url: str) -> list[int]:
    """The ranks that serve, as the service at this root says; none while it does not answer."""
    answer = ask(namespace, "GET", f"{url}/v1/fault_tolerance/status")
    return json.loads(answer)["members"] if answer else []


def set_link(namespace: str, *words: str) -> None:
    """Say to `ip link` what becomes of the namespace's interface."""
    subprocess.run(["ip", "-n", namespace, "link", "set", "veth0", *words], check=True, timeout=10)


def close_ports(namespace: str, ports: str) -> None:
    """Let a node drop what comes to these ports, as a firewall does: by a rule before that of its own addresses."""
    for words in (
        "add pref 100 lookup local",
        "del pref 0",
        f"add pref 10 iif veth0 ipproto tcp dport {ports} blackhole",
    ):
        subprocess.run(["ip", "-n", namespace, "rule", *words.split()], check=True, timeout=10)


@contextlib.contextmanager
def hosts_files(contents: Mapping[str, str]) -> Iterator[None]:
    """Let namespaces see an /etc/hosts of their own (`ip netns exec` mounts it), by name."""
    folders = [Path("/etc/netns") / name for name in contents]
    try:
        for folder, text in zip(folders, contents.values(), strict=True):
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(text)
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # not ours alone
            folders[0].parent.rmdir()


def other_version(package: str, version: str, directory: Path) -> Path:
    """Make a folder for PYTHONPATH in which a package has another version, found before the real one's."""
    faked = directory / "other" / f"{package}-{version}.dist-info"
    faked.mkdir(parents=True)
    (faked / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return faked.parent
