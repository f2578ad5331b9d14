"""Predict which network interface gloo and NCCL use on this node, and why.

Both libraries choose an interface by themselves, so this module applies their rules. gloo (torch's
ProcessGroupGloo and gloo's TCP device) uses the interface in GLOO_SOCKET_IFNAME; otherwise the first bindable address of the
node's host name; otherwise 127.0.0.1. NCCL (its socket.cc) uses the interfaces that NCCL_SOCKET_IFNAME selects; otherwise
those with a name that begins with ib; otherwise all except docker* and lo*; otherwise docker*; otherwise lo*. Rejected: a
query of the libraries, which needs a group of nodes and, for NCCL, GPUs. The check must work before these exist.
"""

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from server.machine.report import Check, failure, not_here, ok, warning

GLOO_VARIABLE, NCCL_VARIABLE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # linux/sockios.h: get an interface's first IPv4 address


class Interface(NamedTuple):
    """One network interface."""

    name: str
    addresses: tuple[str, ...]  # in the kernel's order, IPv4 first
    is_up: bool = True


class Taken(NamedTuple):
    """The interface that a library uses."""

    interface: str
    address: str  # "" without an address
    why: str
    problem: str = ""  # why it fails even on a single node
    remedy: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether the address is unreachable from other machines."""
        return bool(self.address) and ipaddress.ip_address(self.address).is_loopback


def find_interfaces(sys_root: Path = Path("/sys"), proc_root: Path = Path("/proc")) -> list[Interface]:
    """Return the interfaces of this network namespace, in the kernel's order."""
    found = []
    of_ipv6 = _ipv6_addresses(proc_root / "net" / "if_inet6")
    for _, name in socket.if_nameindex():
        addresses = (*_ipv4_address(name), *of_ipv6.get(name, ()))
        state = sys_root / "class" / "net" / name / "operstate"
        is_up = not state.exists() or state.read_text().strip() != "down"
        found.append(Interface(name, addresses, is_up))
    return found


def _ipv4_address(name: str) -> tuple[str, ...]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, contextlib.suppress(OSError):  # has none
        answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
        return (socket.inet_ntoa(answer[20:24]),)
    return ()


def _ipv6_addresses(table: Path) -> dict[str, list[str]]:
    """Return global addresses by interface. Other nodes cannot use link-local ones."""
    found: dict[str, list[str]] = {}
    for row in table.read_text().splitlines() if table.exists() else []:
        digits, _, _, _, _, name = row.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            found.setdefault(name, []).append(str(address))
    return found


def bindable_address(host: str) -> str:
    """Return the first address of a name that this node can bind (gloo's rule), or ""."""
    try:
        candidates = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return ""
    for family, kind, protocol, _, address in candidates:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return str(address[0])
    return ""


def has_endpoint(host: str) -> bool:
    """Return whether a rendezvous endpoint's host is this node. It then hosts torchrun's store and the doctors' meeting.

    torchrun's own rule compares host names, and fails on a node with a host name that resolves to loopback.
    """
    return bool(bindable_address(host))


def gloo_takes(
    environment: Mapping[str, str],
    interfaces: Sequence[Interface],
    host: str,
    resolve: Callable[[str], str] = bindable_address,
) -> Taken:
    """Return the interface that gloo uses.

    Args:
        host: This node's name.
        resolve: Function with the contract of `bindable_address`.
    """
    named = environment.get(GLOO_VARIABLE, "").split(",")[0]
    if named:
        return _named(named, interfaces)
    address = resolve(host)
    if not address:
        return Taken("lo", "127.0.0.1", f"the host name {host} resolves to no address of this node")
    name = next((each.name for each in interfaces if address in each.addresses), "lo")
    return Taken(name, address, f"the host name {host} resolves to it")


def _named(name: str, interfaces: Sequence[Interface]) -> Taken:
    found = next((each for each in interfaces if each.name == name), None)
    why = f"{GLOO_VARIABLE} selects it"
    others = ", ".join(each.name for each in interfaces if each.addresses) or "none"
    if found is None or not found.addresses:
        what = "there is no such interface" if found is None else "it has no address"
        return Taken(
            name, "", why, f"{GLOO_VARIABLE} is {name!r}, but {what} on this node", f"choose an interface with an address ({others})"
        )  # fmt: skip
    return Taken(name, found.addresses[0], why)


def other_interface(interfaces: Sequence[Interface]) -> Interface | None:
    """Return the first interface that other nodes may reach, as a suggestion, or None."""
    usable = [each for each in interfaces if each.is_up and each.addresses]
    return next((each for each in usable if not each.name.startswith(("lo", "docker", "veth_"))), None)


def check_gloo(taken: Taken, interfaces: Sequence[Interface], *, has_other_nodes: bool) -> Check:
    """Check the interface that gloo uses.

    Args:
        has_other_nodes: Whether other nodes must reach it.
    """
    if taken.problem:
        return failure("gloo interface", taken.problem, taken.remedy)
    found = f"gloo uses {taken.interface} ({taken.address}), because {taken.why}"
    if not taken.is_loopback or not has_other_nodes:
        return ok("gloo interface", found)
    better = other_interface(interfaces)
    remedy = f"set {GLOO_VARIABLE}={better.name} ({better.addresses[0]}) on this node" if better else "connect this node to a network"  # fmt: skip
    return failure("gloo interface", f"{found}; other nodes cannot reach it", remedy)


def check_nccl(
    environment: Mapping[str, str], interfaces: Sequence[Interface], *, has_gpus: bool, has_other_nodes: bool
) -> Check:
    """Check the interface that NCCL uses."""
    if not has_gpus:
        return not_here("NCCL interface", "no GPU, so NCCL is not used")
    chosen, why = _nccl_takes(environment.get(NCCL_VARIABLE, ""), interfaces)
    if not chosen:
        names = ", ".join(each.name for each in interfaces)
        return failure(
            "NCCL interface", f"NCCL finds no interface with an address ({why}; interfaces: {names})",
            f"set {NCCL_VARIABLE} to one with an address, or unset it",
        )  # fmt: skip
    text = f"NCCL uses {', '.join(f'{each.name} ({each.addresses[0]})' for each in chosen)}, because {why}"
    only_local = all(ipaddress.ip_address(each.addresses[0]).is_loopback for each in chosen)
    if only_local and has_other_nodes:
        return failure("NCCL interface", f"{text}; other nodes cannot reach it", f"set {NCCL_VARIABLE}")
    if chosen[0].name.startswith("docker") and has_other_nodes:
        return warning("NCCL interface", f"{text}, which is a container bridge", f"set {NCCL_VARIABLE}")
    return ok("NCCL interface", text)


def _nccl_takes(said: str, interfaces: Sequence[Interface]) -> tuple[list[Interface], str]:
    """Return the interfaces and the reason."""
    usable = [each for each in interfaces if each.addresses]
    if len(said) > 1:
        return [each for each in usable if _matches(each.name, said)], f"{NCCL_VARIABLE} is {said}"
    for rule, why in (
        ("ib", "its name begins with ib"),
        ("^docker,lo", "it is neither docker nor lo"),
        ("docker", "only docker interfaces are left"),
        ("lo", "only lo is left"),
    ):
        found = [each for each in usable if _matches(each.name, rule)]
        if found:
            return found, why
    return [], "no interface is selected"


def _matches(name: str, rule: str) -> bool:
    """Return whether an interface is selected: comma-separated prefixes; = matches whole names, ^ excludes."""
    is_excluded, rest = rule.startswith("^"), rule.removeprefix("^")
    is_exact, rest = rest.startswith("="), rest.removeprefix("=")
    words = [word for word in rest.split(",") if word]
    hit = any(name == word if is_exact else name.startswith(word) for word in words)
    return hit != is_excluded
