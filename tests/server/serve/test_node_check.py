"""At a start, the first engines of nodes compare facts and test connections over the job's store, in any order."""

import concurrent.futures
import functools
import json
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore

from server.machine.roots import PACKAGES
from server.serve.preflight import equal
from server.serve.store import node_check
from server.serve.store.node_check import NodesDifferError, check_newcomer, check_nodes_together
from server.serve.store.rendezvous import Place
from server.serve.store.signed_store import SignedStore
from tests.support.models.fake_checkpoint import write_checkpoint, write_safetensors

ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}
TIMEOUT_S = 60.0


@pytest.fixture(autouse=True, scope="module")
def digests() -> Iterator[None]:
    """Compute each digest of our sources once: every check of a node reads hundreds of files three times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(equal, "source_digest", functools.cache(equal.source_digest))
        yield


@pytest.fixture
def store() -> HashStore:
    found = HashStore()
    found.set_timeout(timedelta(seconds=TIMEOUT_S))
    return found


def place(rank: int, *, of: int, local: int = 0, num_local: int = 2) -> Place:
    return Place(
        rank=rank, world_size=of, local_rank=local, local_world_size=num_local, master_addr="127.0.0.1", master_port=1
    )  # fmt: skip


def check_all(store: HashStore, models: list[Path], order: list[int]) -> list[str]:
    """Run the nodes' first engines one after the other, in an order. Return each one's refusal, or ""."""
    begun = [threading.Event() for _ in models]

    def check(at: int) -> str:
        if at:
            begun[at - 1].wait(TIMEOUT_S)
        begun[at].set()
        node = order[at]
        where = place(2 * node, of=2 * len(models))
        try:
            check_nodes_together(store, where, models[node], None, f"host{node}", ON_LOOPBACK)
        except NodesDifferError as error:
            return str(error)
        return ""

    with concurrent.futures.ThreadPoolExecutor(len(models)) as threads:
        found = list(threads.map(check, range(len(models))))
    return [found[order.index(node)] for node in range(len(models))]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_equal_nodes_go_on_whatever_the_order_and_leave_what_they_agreed_on(
    store: HashStore, tmp_path: Path, order: list[int]
) -> None:
    model = write_checkpoint(tmp_path)
    assert check_all(store, [model] * 3, order) == ["", "", ""]
    check_newcomer(store, place(4, of=6), model, None, "host2")


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_a_node_with_another_checkpoint_is_named_on_all_nodes(
    store: HashStore, tmp_path: Path, order: list[int]
) -> None:
    model, other = write_checkpoint(tmp_path / "model"), write_checkpoint(tmp_path / "other")
    write_safetensors(other / "model.safetensors", {"w": [3, 3]})
    found = check_all(store, [model, other, model], order)
    assert found[0] == found[1] == found[2]
    assert "different checkpoints: model.safetensors differ" in found[0]
    assert "on host0 (rank 0) and 1 more, " in found[0] and "on host1 (rank 2): copy the model" in found[0]


def test_a_newcomer_with_another_checkpoint_is_refused(store: HashStore, tmp_path: Path) -> None:
    model, other = write_checkpoint(tmp_path / "model"), write_checkpoint(tmp_path / "other", extra=1)
    check_all(store, [model, model], [0, 1])
    with pytest.raises(NodesDifferError, match=r"config\.json is \w+ on the service, \w+ on new \(rank 2\)"):
        check_newcomer(store, place(2, of=4), other, None, "new")


@pytest.mark.parametrize(("folder", "name"), [("server/link", "link"), ("moe", "dispatch")])
def test_a_newcomer_with_another_digest_is_refused_and_one_with_another_version_is_not(
    store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, name: str
) -> None:
    model = write_checkpoint(tmp_path)
    check_all(store, [model, model], [0, 1])
    digest_of = equal.source_digest

    def later(root: Path, folders: Sequence[str] = PACKAGES) -> str:
        """Return the digest of a version with a change in a folder."""
        return digest_of(root, folders) if folder not in folders else "1a7e"

    monkeypatch.setattr(equal, "source_digest", later)
    with pytest.raises(NodesDifferError, match=rf"wideep's {name} digest is \w+ on the service, 1a7e on new"):
        check_newcomer(store, place(2, of=4), model, None, "new")
    folder = "server"
    check_newcomer(store, place(2, of=4), model, None, "new")


def test_nodes_with_other_pools_are_refused(store: HashStore, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    def check(node: int) -> None:
        pools = ("both:2,both:2", "both:4")[node]
        check_nodes_together(
            store, place(2 * node, of=4), model, None, f"host{node}", ON_LOOPBACK, pools=pools
        )

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        checks = [threads.submit(check, node) for node in range(2)]
    for each in (check.exception(TIMEOUT_S) for check in checks):
        assert isinstance(each, NodesDifferError)
        assert "both:2,both:2 on host0 (rank 0), both:4 on host1 (rank 2): give all nodes the same" in str(
            each
        )
    with pytest.raises(
        NodesDifferError, match=r"different --pools: both:2,both:2 on the service, none on new"
    ):
        check_newcomer(store, place(2, of=4), model, None, "new")


def test_a_single_node_to_which_pools_may_come_leaves_its_facts_for_them(
    store: HashStore, tmp_path: Path
) -> None:
    model, other = write_checkpoint(tmp_path / "model"), write_checkpoint(tmp_path / "other", extra=1)
    check_nodes_together(
        store, place(0, of=2), model, None, "host0", {}, pools="both:1,both:1", may_grow=True
    )
    check_newcomer(store, place(2, of=4), model, None, "new", has_own_pool=True)
    with pytest.raises(NodesDifferError, match=r"config\.json is \w+ on the service, \w+ on new \(rank 2\)"):
        check_newcomer(store, place(2, of=4), other, None, "new", has_own_pool=True)


def test_nobody_is_asked_on_one_node_or_of_a_nodes_other_ranks(store: HashStore, tmp_path: Path) -> None:
    for where in (place(1, of=4, local=1), place(0, of=2)):
        check_nodes_together(store, where, tmp_path / "none", None, "host", {})
    check_newcomer(store, place(0, of=4), tmp_path / "none", None, "host")
    assert store.num_keys() == 0


@pytest.mark.parametrize("key", [None, b"k" * 32])
def test_a_node_that_is_late_is_named_and_waited_for(
    key: bytes | None, store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = PrefixStore("nodes", store if key is None else SignedStore(store, key))
    model, has_said = write_checkpoint(tmp_path), threading.Event()
    said: list[str] = []

    def hear(text: str, **_: object) -> None:
        said.append(text)
        has_said.set()

    monkeypatch.setattr(node_check, "say", hear)
    monkeypatch.setattr(node_check, "SAY_AFTER_S", 0.05)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        first = threads.submit(check_nodes_together, own, place(0, of=4), model, key, "host0", ON_LOOPBACK)
        assert has_said.wait(TIMEOUT_S)
        check_nodes_together(own, place(2, of=4), model, key, "host1", ON_LOOPBACK)
        first.result(TIMEOUT_S)
    assert said[0].startswith(
        "wideep: rank 0 has waited 0 s for the node of rank 2; check the messages on that node"
    )


def test_a_node_without_the_key_of_another_says_so(store: HashStore, tmp_path: Path) -> None:
    signed = SignedStore(store, b"k" * 32)
    signed.set("names/0", json.dumps({"num_ranks": 2, "value": "host0"}))
    with pytest.raises(NodesDifferError, match="the node of rank 0 has a cluster key, but this one does not"):
        check_nodes_together(store, place(2, of=4), tmp_path, None, "host1", ON_LOOPBACK)
