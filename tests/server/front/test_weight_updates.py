"""The front's part in updates of the base weights: what ranks are ordered, what is refused, and what a lost or new rank gets."""

import asyncio
import json
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scheduler.weights.versions import WeightAction, WeightDigests, WeightOrder, WeightReport, WeightState
from server.front.errors import ApiError
from server.front.weights.files import FoundWeights, WeightFilesError
from server.front.weights.updates import WeightUpdates
from server.link.messages import RankFacts
from tests.support.clock import Clock

TIMEOUT_S = 10.0
FACTS: dict[str, Any] = {
    "world_size": 2, "host": "a", "pid": 1, "max_model_len": 64, "num_blocks": 4, "block_tokens": 16, "max_num_seqs": 2,
    "max_num_batched_tokens": 64, "device": "cpu",
}  # fmt: skip


def write_folder(folder: Path, *names: str, model_type: str = "tiny", extra: int = 0) -> str:
    """Write a safetensors file with tensors of 4 bytes, and a configuration."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "model.safetensors").write_bytes(safetensors(*names) + bytes(extra))
    return str(folder)


def safetensors(*names: str) -> bytes:
    header = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * place, 4 * place + 4]}
        for place, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(4 * len(names))


class Service:
    """Updates over two ranks of one pool, each with one expert. `orders` are those of rank 0."""

    def __init__(
        self,
        folder: Path,
        *,
        answers: bool = True,
        check: Callable[[FoundWeights], None] | None = None,
        kept: Path | None = None,
    ) -> None:
        self.orders: list[WeightOrder] = []
        self.posted: list[tuple[int, WeightOrder]] = []
        self.given_up: list[tuple[int, str]] = []
        self.ready: list[int] = []
        self.now: Collection[int] | None = (0, 1)
        self.epoch, self.moves, self.answers = 0, False, answers
        self.why: str | None = None
        self.clock, self.num_served = Clock(), 0
        self.sums = {0: ("p", [[5, 0]]), 1: ("p", [[0, 6]])}
        self.states = {0: WeightState.STAGED, 1: WeightState.STAGED}
        self.updates = WeightUpdates(
            self, self, folder=folder, model_type="tiny", why_not_now=lambda: self.why, on_served=self.count,
            clock=self.clock, check=check, kept=kept,
        )  # fmt: skip
        self.updates.on_ready = self.ready.append

    def count(self) -> None:
        self.num_served += 1

    def members(self) -> Collection[int] | None:
        return self.now

    def epochs(self) -> tuple[int, ...]:
        return (self.epoch,)

    def is_moving(self) -> bool:
        return self.moves

    def post(self, rank: int, message: Any) -> None:
        self.posted.append((rank, message))

    def post_all(self, message: Any) -> None:
        self.orders.append(message)
        if self.answers:
            for rank in (0, 1):
                self.answer(rank, message)

    def give_up(self, rank: int, reason: str) -> None:
        self.given_up.append((rank, reason))

    def answer(self, rank: int, order: WeightOrder) -> None:
        """Report what a rank does with an order."""
        plain, experts = self.sums[rank]
        state = {
            WeightAction.STAGE: self.states[rank], WeightAction.SERVE: WeightState.SERVING,
            WeightAction.CHECK: WeightState.CHECKED,
        }.get(order.action)  # fmt: skip
        if state is not None:
            self.updates.take_report(
                WeightReport(
                    rank=rank, number=order.version.number, state=state, reason="the reason",
                    digests=WeightDigests(plain, np.array(experts, np.uint64)),
                )
            )  # fmt: skip

    async def update(self, path: str, label: str = "", *, partial: bool = False) -> None:
        self.updates.begin(label, is_partial=partial)
        await self.updates.add_folder(path)
        await self.updates.finish(timeout_s=TIMEOUT_S)

    async def refusal(self, path: str, **how: Any) -> ApiError:
        with pytest.raises(ApiError) as caught:
            await self.update(path, **how)
        return caught.value


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path / "uploads")


@pytest.mark.parametrize("label", ["", "7"])
def test_ranks_load_and_then_serve(service: Service, tmp_path: Path, label: str) -> None:
    asyncio.run(service.update(write_folder(tmp_path / "new", "a", "b"), label))
    stage, serve = service.orders
    assert (stage.action, serve.action) == (WeightAction.STAGE, WeightAction.SERVE)
    assert stage.version.number == serve.version.number == 1 and serve.version.hides_checkpoint
    assert len(serve.version.digest) == 32 and stage.version.digest == ""
    assert serve.digests is not None and serve.digests.plain == "p"
    assert serve.digests.experts_LE.tolist() == [[5, 6]]
    assert service.num_served == 1 and service.updates.number() == 1
    assert service.updates.label_of(1) == service.updates.label_of(None) == label
    info = service.updates.info()
    assert (info["weight_version"], info["number"], info["update"]) == (label or "default", 1, None)
    assert service.updates.why_no_moves() is None


@pytest.mark.parametrize(
    ("state", "status"),
    [(WeightState.REFUSED, 400), (WeightState.NO_ROOM, 507), (WeightState.FAILED, 500)],
)
def test_if_one_rank_cannot_use_the_weights_all_drop_them(
    service: Service, tmp_path: Path, state: WeightState, status: int
) -> None:
    service.states[1] = state
    failure = asyncio.run(service.refusal(write_folder(tmp_path / "new", "a")))
    assert failure.status == status and failure.message == "Rank 1 cannot use the new weights: the reason."
    assert [order.action for order in service.orders] == [WeightAction.STAGE, WeightAction.DROP]
    assert service.updates.number() == 0 and service.updates.info()["update"] is None
    service.states[1] = WeightState.STAGED
    asyncio.run(service.update(write_folder(tmp_path / "new", "a")))
    assert service.updates.number() == 2, "numbers are not used again"


@pytest.mark.parametrize(
    ("sums", "named"),
    [
        (("other", [[0, 6]]), "ranks 0 and 1 have different weights outside the experts"),
        (("p", [[4, 6]]), "rank 1 has another copy of expert 0 in MoE layer 0"),
    ],
)
def test_copies_that_differ_never_serve(
    service: Service, tmp_path: Path, sums: tuple[str, list[list[int]]], named: str
) -> None:
    service.sums[1] = sums
    failure = asyncio.run(service.refusal(write_folder(tmp_path / "new", "a")))
    assert failure.status == 500 and named in failure.message
    assert service.orders[-1].action is WeightAction.DROP and service.updates.number() == 0


def test_calls_in_a_wrong_order_are_refused(service: Service, tmp_path: Path) -> None:
    async def test() -> None:
        updates = service.updates
        for call in (updates.add_folder("/x"), updates.add_upload(b""), updates.finish()):
            with pytest.raises(ApiError, match="No weight update has begun") as caught:
                await call
            assert caught.value.status == 409
        updates.begin()
        with pytest.raises(ApiError, match="has begun already") as caught:
            updates.begin()
        assert caught.value.status == 409
        with pytest.raises(ApiError, match="has no tensors") as caught:
            await updates.finish()
        assert caught.value.status == 400
        await updates.abort()
        await updates.abort()
        updates.begin()
        await updates.add_folder(write_folder(tmp_path / "new", "a"))
        service.why = "it sleeps"
        with pytest.raises(ApiError, match="cannot change now: it sleeps"):
            await updates.finish()
        assert updates.is_open, "it can be finished later"
        await updates.abort()
        with pytest.raises(ApiError, match="cannot change now: it sleeps") as caught:
            updates.begin()
        assert caught.value.status == 409
        assert service.orders == []

    asyncio.run(test())


def test_versions_that_are_numbers_do_not_go_backwards(service: Service, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "new", "a")
    asyncio.run(service.update(folder, "7"))
    for label in ("6", "0"):
        failure = asyncio.run(service.refusal(folder, label=label))
        assert failure.status == 409 and "must not go backwards" in failure.message
        with pytest.raises(ApiError, match="version 7 is serving"):
            service.updates.relabel(label)
    for label in ("7", "8", "a name"):
        asyncio.run(service.update(folder, label))
    service.updates.relabel("3")  # a name has no place among numbers
    assert service.updates.label_of(None) == "3" and service.updates.label_of(3) == "8"
    assert service.orders[-1].version.label == "3", "a restarted front learns it from the ranks"


def test_bad_folders_are_named(service: Service, tmp_path: Path) -> None:
    good = write_folder(tmp_path / "good", "a")
    (tmp_path / "empty").mkdir()
    cut = write_folder(tmp_path / "cut", "a", extra=3)
    damaged = tmp_path / "damaged"
    write_folder(damaged, "a")
    (damaged / "model.safetensors").write_bytes(b"12345678nonsense")
    other = write_folder(tmp_path / "other", "a", model_type="large")
    for path, named in (
        ("good", "not an absolute path"),
        (f"{good}/none", "is not a folder"),
        (str(tmp_path / "empty"), "has no .safetensors files"),
        (cut, "its header describes"),
        (str(damaged), "is not a safetensors file"),
        (other, "a folder of another model: its model_type is 'large', and this service has 'tiny'"),
    ):
        failure = asyncio.run(service.refusal(path))
        assert failure.status == 400 and named in failure.message and failure.param == "path"
        asyncio.run(service.updates.abort())
    assert service.orders == []


def test_bad_tensors_are_refused_however_they_come(service: Service) -> None:
    deep = b"[" * 100_000
    nested = len(deep).to_bytes(8, "little") + deep

    async def receive(folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "part-0.safetensors").write_bytes(nested)

    service.updates.begin()
    for added in (service.updates.add_upload(nested), service.updates.add_received(receive)):
        with pytest.raises(ApiError, match="is not a safetensors file") as caught:
            asyncio.run(added)
        assert caught.value.status == 400


def test_tensors_that_the_front_cannot_take_are_refused_before_ranks_load(tmp_path: Path) -> None:
    def check(found: FoundWeights) -> None:
        if "tower" in found.names:
            raise WeightFilesError("tower changes")

    service = Service(tmp_path / "uploads", check=check)

    async def test() -> None:
        service.updates.begin(is_partial=True)
        with pytest.raises(ApiError, match="tower changes") as caught:
            await service.updates.add_folder(write_folder(tmp_path / "new", "a", "tower"))
        assert caught.value.status == 400
        with pytest.raises(ApiError, match="tower changes"):
            await service.updates.add_upload(safetensors("tower"))
        await service.updates.add_upload(safetensors("a"))
        await service.updates.finish(timeout_s=TIMEOUT_S)

    asyncio.run(test())
    [folder] = service.updates.serving.folders
    assert "part-1" in folder.path, "refused tensors are not part of the update"


def test_partial_updates_are_stacked_and_hidden_folders_are_left_out(
    service: Service, tmp_path: Path
) -> None:
    one, two = write_folder(tmp_path / "one", "a", "b"), write_folder(tmp_path / "two", "b", "c")
    asyncio.run(service.update(one, partial=True))
    asyncio.run(service.update(two, partial=True))
    version = service.updates.serving
    assert [folder.path for folder in version.folders] == [one, two] and not version.hides_checkpoint
    asyncio.run(service.update(write_folder(tmp_path / "three", "a", "b"), partial=True))
    paths = [folder.path for folder in service.updates.serving.folders]
    assert paths == [two, str(tmp_path / "three")], "all tensors of the first folder are hidden"
    asyncio.run(service.update(write_folder(tmp_path / "all", "a", "b", "c")))
    asyncio.run(service.update(one, partial=True))
    version = service.updates.serving
    assert [Path(folder.path).name for folder in version.folders] == [
        "all",
        "one",
    ] and version.hides_checkpoint


def test_uploads_are_kept_while_they_serve(service: Service, tmp_path: Path) -> None:
    async def test() -> None:
        updates, folder = service.updates, tmp_path / "uploads"
        updates.begin(is_partial=True)
        await updates.add_upload(safetensors("a"))
        await updates.add_upload(safetensors("b"))
        with pytest.raises(ApiError, match="the upload has"):
            await updates.add_upload(safetensors("c")[:-1])
        await updates.finish()
        first = [Path(each.path) for each in updates.serving.folders]
        assert len(first) == 2 and all((each / "model.safetensors").is_file() for each in first)
        updates.begin()
        await updates.add_upload(safetensors("z"))
        await updates.abort()
        assert len(list(folder.iterdir())) == 1
        updates.begin()
        await updates.add_upload(safetensors("a", "b"))
        await updates.finish()
        assert not any(each.exists() for each in first)

    asyncio.run(test())


async def update_by_upload(service: Service) -> None:
    service.updates.begin()
    await service.updates.add_upload(safetensors("a"))
    await service.updates.finish(timeout_s=TIMEOUT_S)


def test_a_restarted_front_removes_the_uploads_of_the_front_before_it(tmp_path: Path) -> None:
    async def test() -> None:
        folder, kept = tmp_path / "uploads", tmp_path / "uploads.json"
        (folder / "of another service").mkdir(parents=True)
        first = Service(folder, kept=kept)
        await update_by_upload(first)
        first.updates.begin()
        await first.updates.add_upload(safetensors("z"))  # the front dies
        again = Service(folder, kept=kept)
        again.now = None
        again.updates.begin()
        await again.updates.add_upload(safetensors("a"))
        with pytest.raises(ApiError, match="do not serve together"):
            await again.updates.finish(timeout_s=0.0)
        serving = Path(first.updates.serving.folders[0].path)
        assert serving.is_dir(), "no rank has attached, so the front does not know what serves"
        again.now = (0, 1)
        for rank in again.now:
            assert again.updates.may_join(facts(rank, first.orders[-1]))
            again.updates.take_report(WeightReport(rank=rank, number=1, state=WeightState.SERVING))
        await update_by_upload(again)
        [new] = [Path(each.path) for each in again.updates.serving.folders]
        assert {each.name for each in folder.iterdir()} == {new.parent.name, "of another service"}
        assert json.loads(kept.read_text()) == [str(new.parent)]

    asyncio.run(test())


@pytest.mark.parametrize("ends_by", ["abort", "finish"])
@pytest.mark.parametrize("is_upload", [True, False])
def test_tensors_that_are_stored_after_the_end_of_their_update_are_removed(
    tmp_path: Path, ends_by: str, is_upload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        service, loop = Service(tmp_path / "uploads"), asyncio.get_running_loop()
        updates, begun, may_store = service.updates, asyncio.Event(), threading.Event()

        def check_later(content: bytes) -> None:
            loop.call_soon_threadsafe(begun.set)
            assert may_store.wait(TIMEOUT_S)

        async def receive(folder: Path) -> None:
            await asyncio.to_thread(check_later, b"")
            folder.mkdir(parents=True)
            (folder / "part-0.safetensors").write_bytes(safetensors("b"))

        updates.begin()
        await updates.add_folder(write_folder(tmp_path / "new", "a"))
        monkeypatch.setattr("server.front.weights.sources.check_upload", check_later)
        adding = asyncio.create_task(
            updates.add_upload(safetensors("b")) if is_upload else updates.add_received(receive)
        )
        await begun.wait()
        await (updates.abort() if ends_by == "abort" else updates.finish(timeout_s=TIMEOUT_S))
        may_store.set()
        with pytest.raises(ApiError, match="The update ended while its tensors were read") as caught:
            await adding
        assert caught.value.status == 409 and not list((tmp_path / "uploads").iterdir())

    asyncio.run(test())


def test_ranks_load_again_if_some_are_lost_meanwhile(tmp_path: Path) -> None:
    async def test() -> None:
        service = Service(tmp_path / "uploads", answers=False)
        service.moves = True
        call = asyncio.create_task(service.update(write_folder(tmp_path / "new", "a")))
        await asyncio.sleep(0.1)
        assert service.orders == [] and service.updates.why_no_moves() is not None
        service.moves = False
        await asyncio.sleep(0.1)
        [first] = service.orders
        service.answer(0, first)
        service.epoch, service.now = 1, None
        await asyncio.sleep(0.1)
        assert [order.action for order in service.orders] == [WeightAction.STAGE, WeightAction.DROP]
        service.now, service.sums[0] = (0,), ("p", [[5, 6]])
        await asyncio.sleep(0.1)
        again = service.orders[-1]
        assert (again.action, again.version.number) == (WeightAction.STAGE, 2)
        service.answer(0, first)  # late
        await asyncio.sleep(0.1)
        assert service.orders[-1] is again
        service.answer(0, again)
        await asyncio.sleep(0.1)
        serve = service.orders[-1]
        assert serve.action is WeightAction.SERVE and not call.done()
        service.answer(0, serve)
        await call
        assert service.updates.why_no_moves() is None

    asyncio.run(test())


def test_time_that_is_up_changes_nothing_before_the_order_to_serve_and_is_told_after_it(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        service = Service(tmp_path / "uploads", answers=False)
        call = asyncio.create_task(service.update(write_folder(tmp_path / "new", "a")))
        await asyncio.sleep(0.1)
        service.answer(1, service.orders[0])
        service.clock.now_s += TIMEOUT_S
        with pytest.raises(
            ApiError, match=r"ranks 0 have not answered\. The weights have not changed"
        ) as caught:
            await call
        assert caught.value.status == 504 and service.orders[-1].action is WeightAction.DROP
        call = asyncio.create_task(service.update(str(tmp_path / "new")))
        await asyncio.sleep(0.1)
        for rank in (0, 1):
            service.answer(rank, service.orders[-1])
        await asyncio.sleep(0.1)
        service.answer(0, service.orders[-1])
        service.clock.now_s += TIMEOUT_S
        with pytest.raises(ApiError, match=r"ranks 1 have not switched .* version 2 will serve") as caught:
            await call
        assert caught.value.status == 504 and service.updates.number() == 2
        assert service.updates.why_no_moves() is not None, "one rank has not switched"

    asyncio.run(test())


def facts(rank: int, weights: WeightOrder | None = None) -> RankFacts:
    return RankFacts(rank=rank, weights=weights, **FACTS)


def test_a_rank_that_attaches_loads_the_serving_version_before_it_joins(
    service: Service, tmp_path: Path
) -> None:
    assert service.updates.may_join(facts(1)) and service.posted == []
    asyncio.run(service.update(write_folder(tmp_path / "new", "a")))
    assert not service.updates.lose(1)
    assert not service.updates.may_join(facts(1))
    [(rank, order)] = service.posted
    assert rank == 1 and order.action is WeightAction.SERVE and order.version == service.updates.serving
    service.updates.take_report(WeightReport(rank=1, number=1, state=WeightState.STAGED))
    assert service.ready == [1]
    assert not service.updates.lose(1), "it has joined"


def test_a_rank_that_cannot_load_the_serving_version_is_given_up(service: Service, tmp_path: Path) -> None:
    asyncio.run(service.update(write_folder(tmp_path / "new", "a")))
    assert not service.updates.may_join(facts(1))
    service.updates.take_report(WeightReport(rank=1, number=1, state=WeightState.REFUSED, reason="no file"))
    assert service.given_up == [(1, "it cannot serve version 1 of the weights: no file")]
    assert service.updates.lose(1) and service.ready == []


def test_a_restarted_front_goes_on_from_the_newest_version_of_its_ranks(
    service: Service, tmp_path: Path
) -> None:
    asyncio.run(service.update(write_folder(tmp_path / "new", "a"), "7"))
    known = service.orders[-1]
    again = Service(tmp_path / "uploads")
    assert again.updates.may_join(facts(0, known))
    assert again.updates.number() == 1 and again.updates.label_of(None) == "7"
    assert not again.updates.may_join(facts(1)), "it was restarted with the checkpoint's weights"
    assert again.posted == [(1, known)]
    again.updates.take_report(WeightReport(rank=1, number=1, state=WeightState.STAGED))
    assert again.ready == [1]


def test_check_sums_are_compared_with_what_was_loaded(service: Service, tmp_path: Path) -> None:
    async def check() -> dict[str, Any]:
        return await service.updates.check()

    assert asyncio.run(check())["success"] is True
    asyncio.run(service.update(write_folder(tmp_path / "new", "a")))
    found = asyncio.run(check())
    assert found["success"] is True and found["digest"] == service.updates.serving.digest
    service.sums[1] = ("p", [[0, 7]])
    found = asyncio.run(check())
    assert found["success"] is False and "differ from those that were loaded" in found["message"]
    service.sums[1] = ("q", [[0, 6]])
    assert "different weights outside the experts" in asyncio.run(check())["message"]


def test_an_update_stays_open_during_a_check(tmp_path: Path) -> None:
    async def test() -> None:
        service = Service(tmp_path / "uploads", answers=False)
        updates, folder = service.updates, write_folder(tmp_path / "new", "a")
        updates.begin()
        check = asyncio.create_task(updates.check())
        await asyncio.sleep(0.1)
        await updates.add_folder(folder)
        assert (
            updates.info()["update"] == "open" and updates.why_no_moves() == "the weights are being checked"
        )
        for call in (updates.finish(), updates.check()):
            with pytest.raises(ApiError, match="now: the weights are being checked") as caught:
                await call
            assert caught.value.status == 409
        for rank in (0, 1):
            service.answer(rank, service.orders[0])
        assert (await check)["success"] is True
        service.answers = True
        assert (await updates.finish()).number == 1

    asyncio.run(test())


def test_a_list_of_uploads_that_cannot_be_read_does_not_stop_a_front(tmp_path: Path) -> None:
    kept = tmp_path / "uploads.json"
    kept.write_text("[")
    assert Service(tmp_path / "uploads", kept=kept).updates.serving.number == 0
