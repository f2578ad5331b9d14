"""The stream between a rank and the front, with both ends real, without HTTP."""

import asyncio
import concurrent.futures
import contextlib
import gc
import hashlib
import itertools
import re
import socket
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple
from unittest.mock import AsyncMock, Mock

import grpc
import numpy as np
import pytest

from expert_placement.placement import linear_placement
from kvcache.images import Image, ImageRowsError, read_rows, write_rows
from scheduler.epochs.heartbeat import Heartbeat
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap, MoveState, PlacementReport
from scheduler.policy.request import (
    FinishReason,
    ForgetPrefixes,
    Logprobs,
    RankStats,
    Request,
    RequestOutput,
    SamplingParams,
    Structure,
    TokenBias,
)
from server.link import messages, rank_link
from server.link.image_rows import row_parts
from server.link.messages import (
    METHOD,
    SERVICE,
    Abort,
    Claim,
    DropPlacement,
    Fault,
    PlacementUpdate,
    RankFacts,
    Regrouped,
    Served,
    StepOutput,
    Stop,
    Submit,
    ToRank,
    Welcome,
    encode,
)
from server.link.rank_link import FrontLost, LinkError, RankLink, RefusedError, claim
from server.link.ranks import AttachedRank, RankLost, Ranks
from server.link.seal import MAC_BYTES, NONCE_KEY
from tests.support.placement.load_reports import counts
from tests.support.placement.load_reports import report as load_report

FACTS = RankFacts(
    rank=0, world_size=2, host="h", pid=7, max_model_len=128, num_blocks=9, block_tokens=16, max_num_seqs=4,
    max_num_batched_tokens=64, device="cpu",
)  # fmt: skip
STATS = RankStats(
    rank=0,
    step=3,
    num_running=1,
    num_waiting=2,
    num_free_blocks=3,
    num_blocks=9,
    num_step_tokens=5,
    num_preemptions=6,
    prefix_query_tokens=7,
    prefix_hit_tokens=8,
)
REQUEST = Request(
    request_id="r1",
    prompt_ids=(1, 2, 3),
    params=SamplingParams(
        max_tokens=5,
        temperature=0.7,
        top_p=0.9,
        seed=2**64 - 1,
        stop_token_ids=(9,),
        num_logprobs=0,
        structure=Structure("regex", "a+é", after="</think>"),
        logprob_token_ids=(3, 2**31),
        num_prompt_logprobs=0,
        allowed_token_ids=(8, 1),
        bad_words=((4,), (5, 6)),
        logit_bias=(TokenBias(0, -99.9), TokenBias(7, 0.1)),
    ),
    arrival_s=0.0,
    replayed_ids=(4,),
)


Heard = Queue[ToRank | FrontLost]


class FrontEnd:
    """`Ranks` in an event loop in a separate thread. Its messages land in `events`, with their rank."""

    def __init__(self, cluster_key: bytes | None = None) -> None:
        self._cluster_key = cluster_key
        self.events: Queue[tuple[int, Any]] = Queue()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.ranks, self.address = self.run(self._open())
        self._links: list[RankLink] = []

    def attach(self, facts: RankFacts = FACTS) -> tuple[RankLink, Heard]:
        """Return a rank's end that is attached until `close`, and the queue of its messages."""
        heard: Heard = Queue()
        link = link_to(self, heard, facts=facts)
        link.open(30)
        assert self.events.get(timeout=30) == (facts.rank, facts)
        self._links.append(link)
        return link, heard

    async def _open(self) -> tuple[Ranks, str]:
        ranks = Ranks(2, "secret", cluster_key=self._cluster_key)
        address = ranks.bind("127.0.0.1")
        await ranks.serve(lambda rank, message: self.events.put((rank, message)), Mock(), Mock())
        return ranks, address

    def run(self, waiting: Coroutine[object, object, Any]) -> Any:
        """Run a coroutine in the loop and return its result."""
        return asyncio.run_coroutine_threadsafe(waiting, self.loop).result(30)

    def say(self, function: object, *args: object, **kwargs: object) -> None:
        self.loop.call_soon_threadsafe(lambda: function(*args, **kwargs))  # type: ignore[operator]

    def close(self) -> None:
        """Let the ranks leave, then stop the server and its loop."""
        for link in self._links:
            link.close()
        self.run(self.ranks.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)
        self.loop.close()


@pytest.fixture
def front() -> Iterator[FrontEnd]:
    end = FrontEnd()
    yield end
    end.close()


def link_to(front: FrontEnd, heard: Heard, *, token: str = "secret", facts: RankFacts = FACTS) -> RankLink:
    return RankLink(front.address, token, facts, heard.put)


def tokens_of(name: str, *token_ids: int) -> StepOutput:
    return StepOutput([RequestOutput(request_id=name, token_ids=list(token_ids))], None)


def request_in(heard: Heard) -> Request:
    submit = heard.get(timeout=30)
    assert isinstance(submit, Submit)
    return submit.request_at(0.0)


def test_a_request_reaches_the_rank_unchanged_and_its_output_comes_back(front: FrontEnd) -> None:
    link, heard = front.attach()
    front.say(front.ranks.submit, 0, REQUEST, now_s=0.0)
    assert request_in(heard) == REQUEST
    output = RequestOutput(
        request_id="r1",
        token_ids=[5, 6],
        logprobs=[Logprobs(5, -0.1, [5, 8], [-0.1, -2.5]), Logprobs(6, -0.2, [], [])],
        prompt_logprobs=[Logprobs(2, -3.5, [1], [-0.1], rank=17), Logprobs(3, -0.2, [], [], rank=1)],
        num_cached_tokens=2,
        queued_s=0.125,
        finish_reason=FinishReason.LENGTH,
        error="",
    )
    link.send(StepOutput([output], STATS))
    assert front.events.get(timeout=30) == (0, StepOutput([output], STATS))
    assert front.ranks.attached[0].stats == STATS


def image_request(path: Path, rows: np.ndarray) -> Request:
    """Return a request that shows two images, the first one twice. Their rows are in files of a folder."""
    images = []
    for place, name in enumerate(("a", "b", "a")):
        digest = hashlib.sha256(name.encode()).hexdigest()
        (path / name).touch()
        write_rows(f"{path / name}", digest, rows if name == "a" else -rows)
        images.append(Image(digest, 1 + 3 * place, 3, height=1, width=3, path=f"{path / name}"))
    return replace(REQUEST, prompt_ids=(5, *[9] * 9), replayed_ids=(), images=tuple(images))


ROWS = np.random.default_rng(0).standard_normal((2, 3, 7)).astype(np.float32)  # 168 bytes


def test_a_rank_of_another_host_gets_rows_of_images_in_parts(
    front: FrontEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.link.image_rows._PART_BYTES", 50)
    _, heard = front.attach()
    request = image_request(tmp_path, ROWS)
    assert [part.start for part in row_parts(request)] == [0, 50, 100, 150] * 2, "equal images go once"
    for each in (request, replace(REQUEST, replayed_ids=())):
        front.say(front.ranks.submit, 0, each, now_s=0.0)
    got = [heard.get(timeout=30) for _ in range(2)]
    (tmp_path / "a").unlink()
    first, second = (each.request_at(0.0) for each in got if isinstance(each, Submit))
    assert [image._replace(rows=None) for image in first.images] == list(request.images)
    for image, sign in zip(read_rows(first.images, 7), (1, -1, 1), strict=True):
        np.testing.assert_array_equal(image.rows, sign * ROWS, strict=True)
    assert first.key_ids == request.key_ids and not second.images


def test_a_rank_of_the_fronts_host_gets_paths_of_images(front: FrontEnd, tmp_path: Path) -> None:
    _, heard = front.attach(replace(FACTS, host=socket.gethostname()))
    assert not front.ranks.has_far
    request = image_request(tmp_path, ROWS)
    front.say(front.ranks.submit, 0, request, now_s=0.0)
    submit = heard.get(timeout=30)
    assert isinstance(submit, Submit) and submit.request.images == request.images
    front.attach(replace(FACTS, rank=1))
    assert front.ranks.has_far


def test_rows_of_images_above_the_limit_are_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = image_request(tmp_path, ROWS)
    monkeypatch.setattr("server.link.image_rows.MOST_ROW_BYTES", 2 * ROWS.nbytes)
    assert len([*row_parts(request)]) == 2
    monkeypatch.setattr("server.link.image_rows.MOST_ROW_BYTES", 2 * ROWS.nbytes - 1)
    with pytest.raises(ImageRowsError, match="have 336 bytes, and a rank of another host takes at most 335"):
        next(row_parts(request))
    (tmp_path / "b").unlink()
    with pytest.raises(ImageRowsError, match="cannot be read"):
        next(row_parts(request))


def test_an_order_reaches_its_members_unchanged_and_their_answers_come_back_in_order(front: FrontEnd) -> None:
    link, heard = front.attach(replace(FACTS, num_restarts=2))
    placement = linear_placement(3, 5, 1).with_version(9)
    front.say(front.ranks.regroup, Order(4, (0,), placement))
    order = heard.get(timeout=30)
    assert isinstance(order, Order) and order[:2] == (4, (0,))
    assert (order.placement.digest(), order.placement.version) == (placement.digest(), 9)
    answers = (Fault(4, "no memory", True), Fault(5, "a peer is gone"), Regrouped(6))
    for answer in answers:
        link.send(answer)
    assert [front.events.get(timeout=30) for _ in answers] == [(0, answer) for answer in answers]


def test_what_a_step_yielded_comes_before_the_fault_that_followed_it(front: FrontEnd) -> None:
    link, _ = front.attach()
    output = tokens_of("r1", 5)
    link.send(output)
    link.send(Fault(0, "a peer is gone"))
    assert front.events.get(timeout=30) == (0, output)
    assert front.events.get(timeout=30) == (0, Fault(0, "a peer is gone"))


def test_a_deadline_travels_as_time_that_is_left(front: FrontEnd) -> None:
    _, heard = front.attach()
    front.say(front.ranks.submit, 0, replace(REQUEST, deadline_s=130.0), now_s=100.0)
    submit = heard.get(timeout=30)
    assert isinstance(submit, Submit) and submit.timeout_s == 30.0
    assert submit.request_at(7.0).deadline_s == 37.0
    front.say(front.ranks.submit, 0, replace(REQUEST, deadline_s=50.0), now_s=100.0)
    submit = heard.get(timeout=30)
    assert isinstance(submit, Submit) and submit.timeout_s == -50.0, "a passed deadline is still a deadline"


def test_abort_and_stop_reach_the_rank_and_a_stop_is_no_loss(front: FrontEnd) -> None:
    link, heard = front.attach()
    front.say(front.ranks.post, 0, Abort("r1"))
    assert heard.get(timeout=30) == Abort("r1")
    front.say(front.ranks.stop)
    assert heard.get(timeout=30) == Stop()
    link.send(tokens_of("last"))
    link.close()
    assert front.events.get(timeout=30) == (0, tokens_of("last"))
    front.run(front.ranks.wait_until_empty())
    assert front.events.empty()
    assert heard.empty(), "closing is not a loss"


@pytest.mark.parametrize(
    ("reason", "heard"), [("out of memory", "out of memory"), ("", "it left without a request to stop")]
)
def test_goodbye_is_a_loss_that_says_why_unless_a_stop_was_asked_for(
    front: FrontEnd, reason: str, heard: str
) -> None:
    link, _ = front.attach()
    link.close(reason)
    assert front.events.get(timeout=30) == (0, RankLost(heard))


@pytest.mark.parametrize(("lived_s", "heard"), [(4.0, "; it was already restarted as often"), (6.0, "")])
def test_a_loss_says_when_the_rank_stays_away(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch, lived_s: float, heard: str
) -> None:
    link, _ = front.attach(replace(FACTS, restartable_in_s=5.0))
    now_s = front.ranks.attached[0].attached_s + lived_s
    monkeypatch.setattr(front.ranks, "_clock", lambda: now_s)
    link.close("killed")
    reason = front.events.get(timeout=30)[1].reason
    assert reason.startswith("killed") and reason.removeprefix("killed").startswith(heard)


def test_a_front_that_leaves_after_its_stop_is_not_lost(front: FrontEnd) -> None:
    link, heard = front.attach()
    front.say(front.ranks.stop)
    assert heard.get(timeout=30) == Stop()
    front.run(front.ranks.close())
    assert link._reader is not None
    link._reader.join(5)
    assert heard.empty()


@pytest.mark.parametrize(
    ("token", "changes", "words"),
    [
        ("wrong", {}, "token"),
        ("secret", {"rank": 2}, "does not belong to this service of 2"),
        ("secret", {"world_size": 3}, "does not belong"),
    ],
)
def test_a_rank_that_does_not_belong_is_refused_with_a_reason(
    front: FrontEnd, token: str, changes: dict[str, int], words: str
) -> None:
    heard: Heard = Queue()
    with pytest.raises(LinkError, match=words):
        link_to(front, heard, token=token, facts=replace(FACTS, **changes)).open(30)
    assert heard.empty()


def test_a_rank_number_attaches_once(front: FrontEnd) -> None:
    front.attach()
    with pytest.raises(LinkError, match="already attached"):
        link_to(front, Queue()).open(30)


def test_a_rank_that_comes_back_before_its_broken_connection_is_noticed_takes_its_place(
    front: FrontEnd,
) -> None:
    front.attach()
    served = Served(3, 7, None, 10, ExpertMap(7, 2, 2, (0,), 1, linear_placement(1, 2, 2).slot_expert))
    back = replace(FACTS, served=served)
    link = link_to(front, Queue(), facts=back)
    link.open(30)
    assert front.events.get(timeout=30) == (0, RankLost("it reconnected"))
    assert isinstance(front.events.get(timeout=30)[1], RankFacts)
    link.close()


AHEAD = 1 << 62  # a generation of a clock that is a century ahead


def forget(front: FrontEnd) -> int:
    """Order all ranks to forget prefixes. Returns the order's generation."""

    async def order() -> None:
        front.ranks.forget_prefixes()

    front.run(order())
    ordered: ForgetPrefixes | None = front.ranks._forgotten
    assert ordered is not None
    return ordered.generation


def take_generation(front: FrontEnd, facts: RankFacts) -> None:
    """Do what the leading front does if a rank attaches."""

    async def take() -> None:
        front.ranks.take_generation(facts)

    front.run(take())


def test_each_order_to_forget_exceeds_the_last_one_and_the_generations_of_ranks(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, heard = front.attach()
    monkeypatch.setattr("server.link.ranks.time", Mock(time_ns=lambda: 1000, monotonic=time.monotonic))
    assert [forget(front), forget(front)] == [1000, 1001], "the clock is behind"
    take_generation(front, replace(FACTS, forgotten=1001, kv_generation=1001))
    assert [heard.get(timeout=30) for _ in range(2)] == [ForgetPrefixes(1000), ForgetPrefixes(1001)]
    take_generation(front, replace(FACTS, rank=1, forgotten=1001, kv_generation=AHEAD))
    assert forget(front) == AHEAD + 1
    assert heard.get(timeout=30) == ForgetPrefixes(AHEAD + 1)


@pytest.mark.parametrize("forgotten", [0, AHEAD])
def test_all_ranks_get_another_order_if_the_generation_of_a_late_one_exceeds_it(
    front: FrontEnd, forgotten: int
) -> None:
    _, heard = front.attach()
    first = ForgetPrefixes(forget(front))
    ahead = replace(FACTS, rank=1, forgotten=forgotten, kv_generation=AHEAD)
    _, late = front.attach(ahead)
    take_generation(front, ahead)
    assert [heard.get(timeout=30) for _ in range(2)] == [first, ForgetPrefixes(AHEAD + 1)]
    if not forgotten:
        assert late.get(timeout=30) == first
    assert late.get(timeout=30) == ForgetPrefixes(AHEAD + 1)


def test_a_restarted_front_passes_on_the_last_order_to_ranks_that_were_away(front: FrontEnd) -> None:
    away = replace(FACTS, forgotten=3, kv_generation=3)
    _, heard = front.attach(away)
    take_generation(front, away)
    present = replace(FACTS, rank=1, forgotten=5, kv_generation=5)
    _, other = front.attach(present)
    take_generation(front, present)
    assert heard.get(timeout=30) == ForgetPrefixes(3)
    assert heard.get(timeout=30) == ForgetPrefixes(5)
    assert other.get(timeout=30) == ForgetPrefixes(5)
    assert forget(front) > 5


def test_an_engine_that_begins_with_the_generation_of_the_last_order_causes_no_other_one(
    front: FrontEnd,
) -> None:
    generation = forget(front)
    again = replace(FACTS, kv_generation=generation)  # from the file that its node's ranks share
    _, heard = front.attach(again)
    take_generation(front, again)
    assert heard.get(timeout=30) == ForgetPrefixes(generation)
    after = forget(front)
    assert heard.get(timeout=30) == ForgetPrefixes(after)


def test_a_rank_that_the_front_fails_to_take_may_attach_again(front: FrontEnd) -> None:
    receive = front.ranks._receive

    def fail(rank: int, message: object) -> None:
        if isinstance(message, RankFacts):
            raise ZeroDivisionError
        receive(rank, message)

    front.ranks._receive = fail
    with pytest.raises(LinkError, match="was lost before it accepted rank 0") as caught:
        link_to(front, Queue()).open(30)
    assert not isinstance(caught.value, RefusedError), "the front has not refused it"
    assert isinstance(front.events.get(timeout=30)[1], RankLost) and not front.ranks.attached
    front.ranks._receive = receive
    front.attach()


def test_a_front_that_dies_before_its_welcome_has_not_refused_the_rank(front: FrontEnd) -> None:
    greeted = threading.Event()

    async def greet(*_: object) -> None:
        greeted.set()
        await asyncio.Event().wait()

    front.ranks._greet = greet  # type: ignore[method-assign, assignment]
    closing = threading.Thread(target=lambda: greeted.wait(30) and front.run(front.ranks.close()))
    closing.start()
    link = link_to(front, Queue())
    with pytest.raises(LinkError, match="was lost before it accepted rank 0") as caught:
        link.open(30)
    assert not isinstance(caught.value, RefusedError)
    closing.join(30)


def test_a_link_that_is_lost_closes_its_channel(front: FrontEnd) -> None:
    link, heard = front.attach()
    front.say(front.ranks.give_up, 0, "a reason")
    assert isinstance(heard.get(timeout=30), FrontLost)
    assert link._channel is not None
    with pytest.raises(ValueError, match="Channel closed"):
        link._channel.stream_stream("/x/y")(iter(()))


@pytest.mark.slow
def test_a_rank_that_is_dropped_during_a_write_is_disconnected(front: FrontEnd) -> None:
    """The front drops the rank some turns of its loop after the rank has attached, while it writes the first message. One in
    twenty streams stayed open when such a write was cancelled."""

    def drop(left: int) -> None:
        if 0 in front.ranks.attached and left <= 0:
            front.ranks.give_up(0, "a reason")
        else:
            front.loop.call_soon(drop, left - (0 in front.ranks.attached))

    for turns in 8 * [*range(12)]:
        heard: Heard = Queue()
        link = link_to(front, heard)
        front.say(drop, turns)
        with contextlib.suppress(LinkError):  # lost before it was accepted
            link.open(30)
            assert isinstance(heard.get(timeout=30), FrontLost)
        link.close()


def test_the_rank_hears_that_the_front_is_gone(front: FrontEnd) -> None:
    link, heard = front.attach()
    front.run(front.ranks.close())
    assert isinstance(heard.get(timeout=30), FrontLost)
    link.send(tokens_of("r", 1))  # has no effect
    link.close()
    assert heard.empty(), "a loss is reported once"


@pytest.mark.crossed("num_messages", every=2)
@pytest.mark.parametrize("num_messages", [1, 4])
def test_a_front_that_closes_during_a_write_logs_no_error(
    num_messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def close_during_a_write() -> None:
        ranks = Ranks(2, "t")
        address = ranks.bind("127.0.0.1")
        await ranks.serve(Mock(), Mock(), Mock())
        link = RankLink(address, "t", FACTS, Mock())
        await asyncio.to_thread(link.open, 30)
        closing = asyncio.create_task(ranks.close())
        for _ in range(num_messages):
            ranks.post(0, Abort("r"))
            await asyncio.sleep(0)  # the write begins
        await closing
        link.close()

    for _ in range(8):
        asyncio.run(close_during_a_write())
    gc.collect()  # reports unretrieved exceptions
    assert "never retrieved" not in caplog.text


def test_a_stream_that_is_cancelled_twice_is_lost() -> None:
    """gRPC may cancel it at the end of the connection, and again when the server stops."""

    async def cancel_twice() -> None:
        ranks, received = Ranks(1, "t"), list[object]()
        ranks._receive = lambda _rank, message: received.append(message)
        stream = AttachedRank(FACTS, 0.0, Mock(seal=lambda content: content))
        ranks.attached[FACTS.rank] = stream
        ranks._greet = AsyncMock(return_value=stream)  # type: ignore[method-assign]
        stream.post(Welcome())
        writing = AsyncMock(side_effect=_never_written)
        attached = asyncio.create_task(ranks._attach(_silence(), Mock(write=writing)))
        while not writing.called:
            await asyncio.sleep(0)
        for _ in range(2):
            attached.cancel()
            await asyncio.sleep(0)
        await asyncio.gather(attached, return_exceptions=True)
        assert not ranks.attached and received == [RankLost("its connection closed")]

    asyncio.run(cancel_twice())


async def _never_written(_message: bytes) -> None:
    await asyncio.Event().wait()


async def _silence() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


def test_no_front_is_an_error_that_names_the_address() -> None:
    link = RankLink("127.0.0.1:1", "t", FACTS, Mock())
    with pytest.raises(LinkError, match=r"127\.0\.0\.1:1"):
        link.open(0.3)


def test_what_a_busy_stream_cannot_write_is_merged_and_loses_nothing(front: FrontEnd) -> None:
    link, _ = front.attach()
    for number in range(5_000):
        link.send(tokens_of("r", number))
    tokens: list[int] = []
    while len(tokens) < 5_000:
        outputs = front.events.get(timeout=30)[1].outputs
        tokens += [token for output in outputs for token in output.token_ids]
    assert tokens == list(range(5_000))


def test_messages_that_wait_leave_in_their_order_and_only_the_newest_of_some() -> None:
    """The link has no front yet, so all messages wait."""
    link = RankLink("127.0.0.1:1", "t", FACTS, Mock())
    report = PlacementReport(rank=0, version=7, state=MoveState.SERVING)
    slots = linear_placement(1, 2, 2).slot_expert
    experts = [ExpertMap(version, 2, 2, (0,), 1, slots) for version in (6, 7)]
    beats = [Heartbeat(0, 1, step, 3, False, True, 0.5, 2.0) for step in (1, 2)]
    loads = [load_report(0, step, counts(0)) for step in (1, 2)]
    in_order = (PlacementUpdate(report), Regrouped(1), Fault(1, "a peer is gone"), Regrouped(2))
    kept = [RequestOutput(request_id="r", token_ids=[5])]
    sent = (loads[0], *in_order[:2], experts[0], StepOutput(kept, STATS), beats[0], loads[1], *in_order[2:])
    for message in (*sent, tokens_of("r", 6), experts[1], beats[1]):
        link.send(message)
    assert len(kept) == 1, "the sender's list is not changed"
    outputs = StepOutput([*kept, *tokens_of("r", 6).outputs], STATS)
    expected = [FACTS, beats[1], outputs, experts[1], *in_order, loads[1]]
    assert [*itertools.islice(link._messages(), len(expected))] == expected


class Ping(NamedTuple):
    """A message of this test only."""

    number: int


def test_a_new_message_needs_its_class_a_sender_and_a_receiver(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, heard = front.attach()
    link.send(Ping(1))
    assert front.events.get(timeout=30) == (0, RankLost("its connection closed")), "it is not defined"
    assert isinstance(heard.get(timeout=30), FrontLost)
    monkeypatch.setitem(messages._MESSAGES, "Ping", Ping)
    link, heard = front.attach()
    link.send(Ping(1))
    front.say(front.ranks.post, 0, Ping(2))
    front.say(front.ranks.post_all, Ping(3))
    assert front.events.get(timeout=30) == (0, Ping(1))
    received: list[object] = [heard.get(timeout=30) for _ in range(2)]
    assert received == [Ping(2), Ping(3)]


def test_a_rank_that_introduces_itself_twice_is_lost(front: FrontEnd) -> None:
    link, _ = front.attach()
    link.send(FACTS)
    assert front.events.get(timeout=30) == (0, RankLost("its connection closed"))


def test_more_messages_than_any_queue_holds_are_no_fault_of_the_rank(front: FrontEnd) -> None:
    _, heard = front.attach()

    def say_much() -> None:
        for number in range(70_000):
            front.ranks.post(0, Abort(str(number)))

    front.say(say_much)
    for number in range(1000):  # all of them take many seconds
        assert heard.get(timeout=30) == Abort(str(number))
    assert front.events.empty(), "a full queue does not make the front drop a rank"


def test_a_rank_that_does_not_read_is_lost_after_a_while(
    monkeypatch: pytest.MonkeyPatch, front: FrontEnd
) -> None:
    front.attach()
    stream, now_s = front.ranks.attached[0], time.monotonic()
    monkeypatch.setattr(front.ranks, "_clock", lambda: now_s + 31)

    def post_amid_a_write() -> None:  # in the event loop: its writer sets the time, too
        stream.write_begun_s = now_s
        front.ranks.post(0, Abort("r"))

    front.say(post_amid_a_write)
    assert front.events.get(timeout=30) == (0, RankLost("it has not read its messages for 30 s"))


def test_a_rank_that_is_lost_while_all_are_told_something_is_not_told(
    monkeypatch: pytest.MonkeyPatch, front: FrontEnd
) -> None:
    """The loss of a rank that does not read may make the front drop the next one."""
    for rank in (0, 1):
        front.attach(replace(FACTS, rank=rank))
    ranks, now_s = front.ranks, time.monotonic()
    monkeypatch.setattr(ranks, "_receive", lambda rank, _lost: rank or ranks.give_up(1, "it is stuck"))
    monkeypatch.setattr(ranks, "_clock", lambda: now_s + 31)

    async def drop() -> None:
        ranks.attached[0].write_begun_s = now_s
        ranks.post_all(DropPlacement(3))

    front.run(drop())
    assert not ranks.attached


def test_an_error_in_what_takes_a_message_is_a_loss_that_is_told(front: FrontEnd) -> None:
    heard: Heard = Queue()

    def fail(message: ToRank | FrontLost) -> None:
        if isinstance(message, Abort):
            raise ZeroDivisionError("division by zero")
        heard.put(message)

    link = RankLink(front.address, "secret", FACTS, fail)
    link.open(30)
    front.events.get(timeout=30)
    front.say(front.ranks.post, 0, Abort("r1"))
    assert heard.get(timeout=30) == FrontLost(
        "invalid message from the front: ZeroDivisionError: division by zero", is_broken=False
    )


def test_a_rank_of_another_version_is_refused(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_link, "DEFINITION", "another")
    with pytest.raises(LinkError, match="another version of WideEP"):
        link_to(front, Queue()).open(30)


def test_all_addresses_are_bound_and_the_name_is_announced() -> None:
    async def bind(host: str) -> tuple[str, bool]:
        ranks = Ranks(1, "t")
        address = ranks.bind(host)
        await ranks.serve(Mock(), Mock(), Mock())
        port = int(address.rpartition(":")[2])
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        others = "::1" if ":" in host else "127.0.0.2"  # another address of this machine than the name's
        with socket.socket(family) as probe:
            is_open = probe.connect_ex((others, port)) == 0
        await ranks.close()
        return address.rpartition(":")[0], is_open

    assert asyncio.run(bind("a-name-that-is-known-elsewhere")) == ("a-name-that-is-known-elsewhere", True)
    assert asyncio.run(bind("127.0.0.1")) == ("127.0.0.1", False)
    assert asyncio.run(bind("fe80::1")) == ("[fe80::1]", True)


def test_a_heartbeat_comes_and_a_stream_that_ends_long_after_one_says_so(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, _ = front.attach()
    beat = Heartbeat(0, 1, 2, 3, is_idle=False, is_waiting=True, stalled_s=0.5, patience_s=2.0)
    link.send(beat)
    assert front.events.get(timeout=30) == (0, beat)
    now_s = front.ranks.attached[0].beat_s + 2.25
    monkeypatch.setattr(front.ranks, "_clock", lambda: now_s)
    front.say(front.ranks.give_up, 0, "its connection closed")
    lost = RankLost("its connection closed, 2.2 s after its last heartbeat")
    assert front.events.get(timeout=30) == (0, lost)


KEY, OTHER_KEY = b"k" * 32, b"o" * 32


@contextlib.contextmanager
def front_with(cluster_key: bytes | None) -> Iterator[FrontEnd]:
    end = FrontEnd(cluster_key)
    try:
        yield end
    finally:
        end.close()


def test_with_a_cluster_key_messages_come_in_both_directions() -> None:
    with front_with(KEY) as front:
        heard: Heard = Queue()
        link = RankLink(front.address, "secret", FACTS, heard.put, cluster_key=KEY)
        link.open(30)
        assert front.events.get(timeout=30) == (0, FACTS)
        for number in range(3):
            front.say(front.ranks.post, 0, Abort(f"r{number}"))
            link.send(Regrouped(number))
        for number in range(3):
            assert heard.get(timeout=30) == Abort(f"r{number}")
            assert front.events.get(timeout=30) == (0, Regrouped(number))
        link.close()


@pytest.mark.parametrize(
    ("fronts", "ranks", "reason"),
    [
        (KEY, OTHER_KEY, "the cluster keys differ"),
        (KEY, None, "the front has a cluster key, but it does not"),
        (None, KEY, "it has a cluster key, but the front does not"),
    ],
)
def test_a_rank_without_the_fronts_cluster_key_is_refused_and_both_sides_say_why(
    fronts: bytes | None, ranks: bytes | None, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with front_with(fronts) as front:
        link = RankLink(front.address, "secret", FACTS, Mock(), cluster_key=ranks)
        with pytest.raises(LinkError, match=f"{reason}.*same --cluster-key-file"):
            link.open(30)
        assert re.search(f"refused a rank at .*: {reason}", caplog.text)
        assert not front.ranks.attached and front.events.empty()


@pytest.mark.parametrize("key", [None, OTHER_KEY])
def test_an_imposter_with_more_restarts_does_not_take_a_ranks_place(key: bytes | None) -> None:
    with front_with(KEY) as front:
        link = RankLink(front.address, "secret", FACTS, Mock(), cluster_key=KEY)
        link.open(30)
        assert front.events.get(timeout=30) == (0, FACTS)
        imposter = RankLink(front.address, "secret", replace(FACTS, num_restarts=99), Mock(), cluster_key=key)
        with pytest.raises(LinkError, match="cluster key"):
            imposter.open(30)
        link.send(Regrouped(7))
        assert front.events.get(timeout=30) == (0, Regrouped(7)), "the real one continues"
        link.close()


def test_a_front_that_does_not_know_the_cluster_key_is_not_believed() -> None:
    """It copies the messages of a real one, but cannot seal them."""

    def attach(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.send_initial_metadata(((NONCE_KEY, "c" * 64),))
        next(messages)
        yield bytes(MAC_BYTES) + encode(Welcome())

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(1))
    handler = grpc.stream_stream_rpc_method_handler(attach)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with pytest.raises(LinkError, match="the cluster keys differ"):
            RankLink(address, "secret", FACTS, Mock(), cluster_key=KEY).open(30)
    finally:
        server.stop(0)


def test_a_claim_is_answered_under_the_cluster_key_only() -> None:
    with front_with(KEY) as front:
        with pytest.raises(LinkError, match="the front has a cluster key, but it does not"):
            claim(front.address, "secret", Claim("new", 0, 1), 30)
        with pytest.raises(LinkError, match="the cluster keys differ"):
            claim(front.address, "secret", Claim("new", 0, 1), 30, cluster_key=OTHER_KEY)
