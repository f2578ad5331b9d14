"""The cluster key between real processes, and in the job's store."""

import json
import sys
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

from dispatch.ports import free_port
from server.link.messages import RankFacts
from server.link.rank_link import LinkError, RankLink
from server.link.seal import MAC_BYTES
from server.serve.store.signed_store import SignedStore, UnsignedError
from tests.support.service.forked import WIDEEP
from tests.support.service.real_service import START_S, RealService, write_tiny_model

KEY = b"k" * 32


def test_a_value_is_read_under_its_own_name_and_key_only() -> None:
    plain = HashStore()
    store = PrefixStore("epoch/1", SignedStore(plain, KEY))
    store.set("a", "one")
    assert store.get("a") == b"one"
    assert store.check(["a"])
    plain.set("epoch/2/a", plain.get("epoch/1/a"))
    plain.set("epoch/1/b", "one")
    for name in ("epoch/2/a", "epoch/1/b"):
        with pytest.raises(UnsignedError, match=r"is not signed with this cluster key; give all nodes"):
            SignedStore(plain, KEY).get(name)
    with pytest.raises(dist.DistError, match="not signed"):
        PrefixStore("epoch/1", SignedStore(plain, b"o" * 32)).get("a")
    for value in ("one", "two"):
        assert store.compare_set("first", "", value) == b"one"
    plain.set("epoch/1/first", "one")
    with pytest.raises(dist.DistError, match="not signed"):
        store.compare_set("first", "", "one")
    store.delete_key("a")
    assert not plain.check(["epoch/1/a"])


def key_file(path: Path, key: str) -> Path:
    path.write_text(key + "\n")
    path.chmod(0o600)
    return path


@pytest.mark.slow
def test_a_rank_with_another_cluster_key_is_refused(tmp_path: Path) -> None:
    model, port = write_tiny_model(tmp_path / "tiny"), free_port()
    for rank in range(2):
        key_file(tmp_path / f"key-{rank}", f"{rank}" * 64)
    wideep = tmp_path / "wideep"
    wideep.write_text(
        f'#!/bin/sh\nexec {" ".join(WIDEEP)} "$@" --cluster-key-file {tmp_path}/key-$LOCAL_RANK\n'
    )
    wideep.chmod(0o755)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"),
        *(str(wideep), "worker", str(model), f"--port={port}", "--kv-cache-memory=16M"),
    ]
    with RealService(port, [command], tmp_path / "output.txt") as service:
        assert service.processes[0].wait(START_S) != 0
        assert "rank 1: UnsignedError:" in service.output()
        assert (
            "is not signed with this cluster key; give all nodes the same --cluster-key-file"
            in service.output()
        )


@pytest.mark.slow
def test_a_program_of_the_same_machine_cannot_take_a_ranks_place(tmp_path: Path) -> None:
    """`wideep serve` without a key file: the imposter can read the token in the store, but is refused."""
    model = write_tiny_model(tmp_path / "tiny")
    with RealService.serve(model, tmp_path / "output.txt", "-dp=1") as service:
        service.wait_ready()
        (engine,) = [pid for pid in service.descendants() if b"\0engine\0" in command_of(pid)]
        words = Path(f"/proc/{engine}/environ").read_bytes().split(b"\0")
        environment = dict(word.split(b"=", 1) for word in words if b"=" in word)
        port, secret = int(environment[b"MASTER_PORT"]), environment[b"WIDEEP_OWN_CLUSTER_KEY"]
        assert len(secret) == 64
        assert not any(secret in command_of(pid) for pid in service.descendants())
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        said = store.get("wideep/service")
        front = json.loads(said[MAC_BYTES:])["front"]
        facts = RankFacts(
            rank=0, world_size=1, host="h", pid=7, max_model_len=128, num_blocks=9, block_tokens=16, max_num_seqs=4,
            max_num_batched_tokens=64, device="cpu", num_restarts=99,
        )  # fmt: skip
        for key in (None, b"o" * 32):
            with pytest.raises(LinkError, match="cluster key"):
                RankLink(front["ranks_address"], front["token"], facts, Mock(), cluster_key=key).open(30)
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 8, "ignore_eos": True}
        answer = service.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 8
        assert service.output().count("is lost") == 0


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_ranks_with_the_same_cluster_key_serve(tmp_path: Path) -> None:
    key = key_file(tmp_path / "key", "k" * 64)
    model = write_tiny_model(tmp_path / "tiny")
    flags = ("-dp=2", f"--cluster-key-file={key}", "--all2all-backend=gloo")
    with RealService.serve(model, tmp_path / "output.txt", *flags) as service:
        service.wait_ready()
        body = {"model": "tiny", "prompt": "the cat", "max_tokens": 8, "ignore_eos": True}
        answer = service.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 8
