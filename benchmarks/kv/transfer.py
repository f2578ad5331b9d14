"""How fast does a prefix get from one rank to another: through the host memory of a node, and over a socket between nodes?

One process computes nothing: it saves random blocks to host memory. Then they are loaded into another cache of the same node, and
fetched by a process with its own host memory, over loopback and over a pair of virtual interfaces between two network
namespaces (root only), by TCP and with NIXL if it is installed (set UCX_TLS=tcp,self: otherwise UCX copies between processes of one
machine). Fetched blocks are loaded too, as a request does it. Bytes are compared before times are taken.

How much of a hand-over is not hidden behind the prompt? The saving rank gets the blocks in chunks, as its steps compute them, and
the other rank loads each block when it is there. What is left after the last chunk is not hidden. Copies layer by layer begin
while a chunk is still computed: its layers end one after the other, the last one with the step.
`benchmarks.kv.hand_over` measures this in a service.

Expected bound: through host memory, each block is copied and summed twice. Over a socket, it is read, summed, sent, received, summed
and written; on one machine both ends share its cores and its memory.

Run: `python -m benchmarks.kv.transfer [--blocks 64] [--layers 32] [--rounds 15] [--save]`. The defaults move 64 MiB a
round.
"""

import argparse
import contextlib
import itertools
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from benchmarks.card import environment_card, print_card, print_tail, save_result
from kvcache.paged_cache import BLOCK_TOKENS, LayerShape, PagedCache
from kvcache.prefix import ROOT_KEY, PrefixIndex
from kvcache.tiers.early import WrittenLayers
from kvcache.tiers.jobs import FetchJob, LoadJob, SaveJob
from kvcache.tiers.opening import Kinds, open_host
from kvcache.tiers.peers import PeerNetwork, Peers
from kvcache.tiers.records import RecordLayout, file_bytes
from kvcache.tiers.remote_memory import RemoteMemoryError, check_installed
from kvcache.tiers.tiers import Tiers, Units
from kvcache.unit import CacheUnit, block_parts, parts_after

_HEADS, _DIM = 2, 128  # per layer; float32
_SECRET = b"of this benchmark"
_NETWORK = "10.213.8"
_PATIENCE_S = 60.0


class TransferEnd:
    """A cache with host memory, as a rank has it."""

    def __init__(
        self,
        args: argparse.Namespace,
        host: str,
        seed: int,
        *,
        shared: "TransferEnd | None" = None,
        has_nixl: bool = False,
    ) -> None:
        """`shared`: a rank of the same node. Both use its host memory."""
        shape = LayerShape(num_kv_heads=_HEADS, key_dim=_DIM, value_dim=_DIM)
        self.cache = PagedCache([shape] * args.layers, args.blocks)
        generator = torch.Generator().manual_seed(seed)
        for part in block_parts(self.cache):
            if part.numel():
                part.copy_(torch.rand(part.shape, generator=generator))
        self.record_bytes = CacheUnit(block_parts(self.cache)).num_bytes
        self.tokens = list(range(args.blocks * BLOCK_TOKENS))
        self._network, self._shared = PeerNetwork(host, _SECRET, has_nixl), shared
        self._open()

    def _open(self) -> None:
        layout = RecordLayout(bytes(32), bytes(32), self.record_bytes)
        size = file_bytes(2 * self.cache.num_blocks, self.record_bytes)
        if self._shared is None:
            self._tier = open_host(Kinds(layout, None), size, store=None, host="", secret=None)
        else:
            self._tier = self._shared._tier
        self.tiers = Tiers(
            [self._tier],
            lambda: Units(CacheUnit(block_parts(self.cache)), CacheUnit([])),
            layers=WrittenLayers(self.cache.progress, parts_after(self.cache)),
        )
        self.peers = Peers(
            self.tiers, self._tier, self._network,
            memory="", blocks=layout, states=None, block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
        self.tiers.peers = self.peers

    def close(self) -> None:
        """Free the host memory, with all records."""
        self.tiers.close()
        if self._shared is None:
            self._tier.blocks.close()

    def renew(self) -> None:
        """Continue with an empty host memory."""
        self.close()
        self._open()

    def keys(self) -> list[bytes]:
        """Return the keys of all blocks."""
        return PrefixIndex(BLOCK_TOKENS, self.tiers.secret).keys_of(self.tokens, ROOT_KEY)

    def seconds(self, *jobs: SaveJob | LoadJob | FetchJob) -> float:
        """Do jobs, one after the other, and return the time until the last one has ended."""
        begun_s, left = time.perf_counter(), len(jobs)
        for job in jobs:
            if isinstance(job, SaveJob):
                self.tiers.save(job)
            elif isinstance(job, LoadJob):
                self.tiers.load(job)
            else:
                self.tiers.fetch(job)
        while left:
            left -= len(self.tiers.finished())
            if time.perf_counter() - begun_s > _PATIENCE_S:
                raise TimeoutError("a copy does not end")
            time.sleep(1e-4)
        return time.perf_counter() - begun_s

    def save(self) -> float:
        """Save all blocks."""
        return self.seconds(*(SaveJob(number, key) for number, key in enumerate(self.keys())))

    def load(self) -> float:
        """Load all blocks."""
        job = LoadJob(self.keys(), list(range(self.cache.num_blocks)))
        seconds = self.seconds(job)
        if job.num_loaded != self.cache.num_blocks:
            raise RuntimeError(f"only {job.num_loaded} blocks are in host memory")
        return seconds

    def fetch(self, address: str) -> float:
        """Fetch all blocks but the first one, over a connection that has fetched that one."""
        self.seconds(FetchJob(address, self.tokens[:BLOCK_TOKENS], ROOT_KEY))
        job = FetchJob(address, self.tokens, ROOT_KEY)
        seconds = self.seconds(job)
        if len(job.keys) != self.cache.num_blocks - 1:
            raise RuntimeError(f"only {len(job.keys)} blocks were fetched")
        return seconds


class HandOver(NamedTuple):
    """One hand-over through the host memory of a node."""

    total_s: float  # of all copies
    left_s: float  # from the last chunk to the last loaded block


class Way(NamedTuple):
    """A way to hand over."""

    follows: bool = True  # load each block when it is there; otherwise load all of them after the last chunk
    by_layer: bool = False  # copy a chunk's layers while its step runs


WAYS = {
    "load afterwards": Way(follows=False),
    "load as blocks are saved": Way(),
    "copy layer by layer": Way(by_layer=True),
}


def _run_step(args: argparse.Namespace, cache: PagedCache) -> None:
    """Take the time of a step. Its layers end one after the other, and the last one's rows are there when it ends."""
    with cache.progress.running():
        for layer in range(args.layers):
            cache.progress.note(layer)
            time.sleep(args.step_ms / 1000 / args.layers)


def hand_over(args: argparse.Namespace, way: Way) -> HandOver:
    """Save all blocks in chunks, with the pause of a step before each, and load them into another rank's cache."""
    first = TransferEnd(args, "127.0.0.1", seed=1)
    second = TransferEnd(args, "127.0.0.1", seed=2, shared=first)
    try:
        keys, load = first.keys(), LoadJob(second.keys(), list(range(args.blocks)))
        if way.follows:
            load.until_s = time.monotonic() + _PATIENCE_S
            second.tiers.load(load)
        for begin in range(0, args.blocks, args.chunk_blocks):
            chunk = range(begin, min(args.blocks, begin + args.chunk_blocks))
            if way.by_layer:
                first.tiers.save_early((number, keys[number]) for number in chunk)
            _run_step(args, first.cache)
            chunk_s = time.perf_counter()
            for number in chunk:
                first.tiers.save(SaveJob(number, keys[number]))
        if not way.follows:
            while not first.tiers.has(keys[-1]):
                time.sleep(1e-4)
            second.tiers.load(load)
        while load not in second.tiers.finished():
            time.sleep(1e-4)
        left_s = time.perf_counter() - chunk_s
        if load.num_loaded != args.blocks:
            raise RuntimeError(f"only {load.num_loaded} blocks were handed over")
        _compare(first.cache, second.cache)
        return HandOver(first.tiers.figures.store_s + second.tiers.figures.load_s, left_s)
    finally:
        second.close()
        first.close()


def measure_hand_overs(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print and return what is left of a hand-over after the prompt. All ways take turns."""
    found = {}
    runs_of: dict[str, list[HandOver]] = {name: [] for name in WAYS}
    for _ in range(args.rounds + 1):
        for name, way in WAYS.items():
            runs_of[name].append(hand_over(args, way))
    for name, (_, *runs) in runs_of.items():
        total_s, left_s = (statistics.median(values) for values in zip(*runs, strict=True))
        share = left_s / total_s
        found[name] = {"total_s": round(total_s, 4), "left_s": round(left_s, 4), "share": round(share, 3)}
        print(
            f"hand over in chunks of {args.chunk_blocks}: {name:26} {1e3 * left_s:7.1f} ms left of "
            f"{1e3 * total_s:.1f} ms of copies, {share:.0%}",
            flush=True,
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table and one JSON line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.transfer", allow_abbrev=False)
    parser.add_argument("--blocks", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument(
        "--save", action="store_true", help="write benchmarks/results/transfer-<date>-<cpu>.json"
    )
    parser.add_argument("--chunk-blocks", type=int, default=32, help="of a step (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=200.0, help="of a chunk (default: %(default)s)")
    parser.add_argument("--serve", metavar="HOST", help=argparse.SUPPRESS)
    parser.add_argument("--nixl", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.serve:
        return _serve(args)
    card = environment_card()
    print_card(card)
    result: dict[str, Any] = {"benchmark": "transfer", "environment": card, "options": vars(args)}
    result["hand_overs"] = measure_hand_overs(args)
    result["ways"] = measure(args)
    print_tail(result)
    if args.save:
        save_result("transfer", result)
    return 0


def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Print and return the rates of all ways."""
    ways: dict[str, dict[str, float]] = {}
    side = TransferEnd(args, "127.0.0.1", seed=1)
    print(
        f"{args.blocks} blocks of {side.record_bytes / 2**20:.2f} MiB, {args.rounds} rounds after a warm-up\n"
    )
    other = TransferEnd(args, "127.0.0.1", seed=2)
    other.close()

    def add(name: str, once: Callable[[], float], num_blocks: int = args.blocks) -> None:
        num_bytes = side.record_bytes * num_blocks
        times = [once() for _ in range(args.rounds + 1)][1:]
        median_s, best_s = statistics.median(times), min(times)
        ways[name] = {
            "median_s": round(median_s, 4),
            "best_s": round(best_s, 4),
            "mb_per_s": round(num_bytes / median_s / 1e6, 1),
            "best_mb_per_s": round(num_bytes / best_s / 1e6, 1),
        }
        rates = f"{ways[name]['mb_per_s']:10,.0f} MB/s, at best {ways[name]['best_mb_per_s']:,.0f}"
        print(f"{name:40} {1e3 * median_s:9.1f} ms {rates}", flush=True)

    def save_again() -> float:
        side.renew()
        return side.save()

    add("save to host memory", save_again)
    add("load from host memory", side.load)
    side.close()
    loopback: tuple[str, list[str], str] = "loopback", [], "127.0.0.1"
    # The virtual interface first: UCX does not see interfaces that are made later.
    for name, prefix, host in itertools.chain(_veth(), [loopback]):
        for by_nixl in (False, True) if _has_nixl() else (False,):
            ends = f"{name}, with NIXL" if by_nixl else name
            side = TransferEnd(args, "127.0.0.1", seed=1, has_nixl=by_nixl)
            with prefix_served(args, prefix, host, by_nixl) as address:

                def fetch_again(side: TransferEnd = side, address: str = address) -> float:
                    side.renew()
                    return side.fetch(address)

                def fetch_and_load(
                    side: TransferEnd = side, fetch: Callable[[], float] = fetch_again
                ) -> float:
                    return fetch() + side.load()

                fetch_and_load()
                if bool(side.tiers.figures.peer_read_bytes) != by_nixl:
                    raise RuntimeError("NIXL has failed")
                _compare(side.cache, other.cache)
                add(f"fetch over {ends}", fetch_again, args.blocks - 1)
                add(f"fetch over {ends} and load", fetch_and_load, args.blocks - 1)
            side.close()
    return ways


def _has_nixl() -> bool:
    try:
        check_installed()
    except RemoteMemoryError as error:
        print(f"{error}: left out")
        return False
    return True


def _compare(ours: PagedCache, theirs: PagedCache) -> None:
    pairs = zip(block_parts(ours), block_parts(theirs), strict=True)
    if not all(torch.equal(our, their) for our, their in pairs):
        raise RuntimeError("blocks differ from those that were sent")


@contextlib.contextmanager
def prefix_served(
    args: argparse.Namespace, prefix: Sequence[str], host: str, has_nixl: bool
) -> Iterator[str]:
    """Run a process that serves the blocks, behind a command such as `ip netns exec`. Yields its address."""
    options = [f"--{name}={getattr(args, name)}" for name in ("blocks", "layers")]
    options += ["--nixl"] * has_nixl
    command = [*prefix, sys.executable, "-m", "benchmarks.kv.transfer", f"--serve={host}", *options]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the process that serves the blocks has ended")
        yield json.loads(line)["address"]
        process.stdin.close()  # ends it


def _serve(args: argparse.Namespace) -> int:
    side = TransferEnd(args, args.serve, seed=2, has_nixl=args.nixl)
    side.save()
    print(json.dumps({"address": side.peers.address.address}), flush=True)
    sys.stdin.read()
    side.close()
    return 0


def _veth() -> Iterator[tuple[str, list[str], str]]:
    """Make a namespace with a virtual interface to this one, if this is permitted. Removed at the end."""
    name, device = f"wideep-{secrets.token_hex(4)}", f"wd{secrets.token_hex(4)}"
    if os.geteuid() != 0 or shutil.which("ip") is None:
        print("virtual interfaces need root and the program ip: left out")
        return
    commands = (
        f"ip netns add {name}",
        f"ip link add {device} type veth peer name veth0 netns {name}",
        f"ip addr add {_NETWORK}.1/24 dev {device}",
        f"ip link set {device} up",
        f"ip -n {name} addr add {_NETWORK}.2/24 dev veth0",
        f"ip -n {name} link set veth0 up",
        f"ip -n {name} link set lo up",
    )
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, capture_output=True, timeout=10)
        yield "a virtual interface", ["ip", "netns", "exec", name], f"{_NETWORK}.2"
    except subprocess.CalledProcessError as error:
        print(f"virtual interfaces cannot be made here: {error}: left out")
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


if __name__ == "__main__":
    sys.exit(main())
