"""The stream between a rank and the front, with both ends real, without HTTP."""

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from queue import Queue
from typing import Any

import grpc
import pytest

from expert_placement.placement import linear_placement
from scheduler.epochs.heartbeat import Heartbeat
from scheduler.epochs.orders import Order
from scheduler.moves.reports import ExpertMap
from scheduler.policy.request import (
    FinishReason,
    Logprobs,
    RankStats,
    Request,
    RequestOutput,
    SamplingParams,
    Structure,
    TokenBias,
)
from server.link import rank_link
from server.link.messages import METHOD, SERVICE, Claim, Fault, RankFacts, Served, Welcome, encode
from server.link.rank_link import LinkError, RankLink, RefusedError, claim
from server.link.ranks import Ranks
from server.link.seal import MAC_BYTES, NONCE_KEY

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


class Told:
    """A listener that puts the name and arguments of each call into a queue."""

    def __init__(self) -> None:
        self.events: Queue[tuple[object, ...]] = Queue()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *told, **how: self.events.put((name, *told, *how.values()))


class FrontEnd:
    """`Ranks` in an event loop in a separate thread. All its calls land in `events`."""

    def __init__(self, cluster_key: bytes | None = None) -> None:
        told, self._cluster_key = Told(), cluster_key
        self.events = told.events
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self.ranks, self.address = self.run(self._open(told))
        self._links: list[RankLink] = []

    def attach(self, facts: RankFacts = FACTS) -> tuple[RankLink, "Queue[tuple[object, ...]]"]:
        """Return a rank's end that is attached until `close`, and the queue of its messages."""
        heard: Queue[tuple[object, ...]] = Queue()
        link = link_to(self, heard, facts=facts)
        link.open(30)
        assert self.events.get(timeout=30) == ("attached", facts)
        self._links.append(link)
        return link, heard

    async def _open(self, told: Told) -> tuple[Ranks, str]:
        ranks = Ranks(2, "secret", cluster_key=self._cluster_key)
        address = ranks.bind("127.0.0.1")
        await ranks.serve(told)
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


def link_to(
    front: FrontEnd, heard: "Queue[tuple[object, ...]]", *, token: str = "secret", facts: RankFacts = FACTS
) -> RankLink:
    told = Told()
    told.events = heard
    return RankLink(front.address, token, facts, told)


def test_a_request_reaches_the_rank_unchanged_and_its_output_comes_back(front: FrontEnd) -> None:
    link, heard = front.attach()
    front.say(front.ranks.submit, 0, REQUEST, now_s=0.0)
    kind, request = heard.get(timeout=30)
    assert kind == "submit" and isinstance(request, Request)
    assert replace(request, arrival_s=0.0) == REQUEST
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
    link.send([output], STATS)
    assert front.events.get(timeout=30) == ("stats", STATS)
    assert front.events.get(timeout=30) == ("outputs", 0, [output])


def test_an_order_reaches_its_members_unchanged_and_their_answers_come_back_in_order(front: FrontEnd) -> None:
    link, heard = front.attach(replace(FACTS, num_restarts=2))
    placement = linear_placement(3, 5, 1).with_version(9)
    front.say(front.ranks.regroup, Order(4, (0,), placement))
    kind, order = heard.get(timeout=30)
    assert kind == "regroup" and isinstance(order, Order)
    assert order[:2] == (4, (0,))
    assert (order.placement.digest(), order.placement.version) == (placement.digest(), 9)
    link.send_fault(4, "no memory", is_final=True)
    link.send_fault(5, "a peer is gone")
    link.send_regrouped(6)
    assert [front.events.get(timeout=30) for _ in range(3)] == [
        ("fault", 0, Fault(4, "no memory", True)),
        ("fault", 0, Fault(5, "a peer is gone")),
        ("regrouped", 0, 6),
    ]


def test_what_a_step_yielded_comes_before_the_fault_that_followed_it(front: FrontEnd) -> None:
    link, _ = front.attach()
    output = RequestOutput(request_id="r1", token_ids=[5])
    link.send([output])
    link.send_fault(0, "a peer is gone")
    assert front.events.get(timeout=30) == ("outputs", 0, [output])
    assert front.events.get(timeout=30)[0] == "fault"


def test_a_deadline_travels_as_time_that_is_left(front: FrontEnd) -> None:
    _, heard = front.attach()
    front.say(front.ranks.submit, 0, replace(REQUEST, deadline_s=130.0), now_s=100.0)
    request = heard.get(timeout=30)[1]
    assert isinstance(request, Request) and request.deadline_s is not None
    assert 29 < request.deadline_s - time.monotonic() <= 30
    front.say(front.ranks.submit, 0, replace(REQUEST, deadline_s=50.0), now_s=100.0)
    request = heard.get(timeout=30)[1]
    assert isinstance(request, Request) and request.deadline_s is not None, (
        "a passed deadline is still a deadline"
    )


def test_abort_and_stop_reach_the_rank_and_a_stop_is_no_loss(front: FrontEnd) -> None:
    link, heard = front.attach()
    front.say(front.ranks.abort, 0, "r1")
    assert heard.get(timeout=30) == ("abort", "r1")
    front.say(front.ranks.stop)
    assert heard.get(timeout=30) == ("stop",)
    link.send([RequestOutput(request_id="last", token_ids=[])])
    link.close()
    assert front.events.get(timeout=30)[0] == "outputs"
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
    assert front.events.get(timeout=30) == ("lost", 0, heard)


@pytest.mark.parametrize(("lived_s", "heard"), [(4.0, "; it was already restarted as often"), (6.0, "")])
def test_a_loss_says_when_the_rank_stays_away(
    front: FrontEnd, monkeypatch: pytest.MonkeyPatch, lived_s: float, heard: str
) -> None:
    link, _ = front.attach(replace(FACTS, restartable_in_s=5.0))
    now_s = front.ranks.attached[0].attached_s + lived_s
    monkeypatch.setattr(front.ranks, "_clock", lambda: now_s)
    link.close("killed")
    reason = str(front.events.get(timeout=30)[2])
    assert reason.startswith("killed") and reason.removeprefix("killed").startswith(heard)


def test_a_front_that_leaves_after_its_stop_is_not_lost(front: FrontEnd) -> None:
    link, heard = front.attach()
    front.say(front.ranks.stop)
    assert heard.get(timeout=30) == ("stop",)
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
    heard: Queue[tuple[object, ...]] = Queue()
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
    assert front.events.get(timeout=30)[:2] == ("lost", 0)
    assert front.events.get(timeout=30)[0] == "attached"
    link.close()


def test_a_rank_that_the_front_fails_to_take_may_attach_again(front: FrontEnd) -> None:
    told = front.ranks._told
    attached, told.attached = told.attached, lambda _facts: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(LinkError, match="was lost before it accepted rank 0") as caught:
        link_to(front, Queue()).open(30)
    assert not isinstance(caught.value, RefusedError), "the front has not refused it"
    assert front.events.get(timeout=30)[:2] == ("lost", 0) and not front.ranks.attached
    told.attached = attached  # type: ignore[method-assign]
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
    assert heard.get(timeout=30)[0] == "lost"
    assert link._channel is not None
    with pytest.raises(ValueError, match="Channel closed"):
        link._channel.stream_stream("/x/y")(iter(()))


def test_the_rank_hears_that_the_front_is_gone(front: FrontEnd) -> None:
    link, heard = front.attach()
    front.run(front.ranks.close())
    assert heard.get(timeout=30)[0] == "lost"
    link.send([RequestOutput(request_id="r", token_ids=[1])])  # has no effect
    link.close()
    assert heard.empty(), "a loss is reported once"


def test_no_front_is_an_error_that_names_the_address() -> None:
    link = RankLink("127.0.0.1:1", "t", FACTS, Told())
    with pytest.raises(LinkError, match=r"127\.0\.0\.1:1"):
        link.open(0.3)


def test_what_a_busy_stream_cannot_write_is_merged_and_loses_nothing(front: FrontEnd) -> None:
    link, _ = front.attach()
    for number in range(5_000):
        link.send([RequestOutput(request_id="r", token_ids=[number])])
    tokens: list[int] = []
    while len(tokens) < 5_000:
        outputs = front.events.get(timeout=30)[2]
        tokens += [token for output in outputs for token in output.token_ids]  # type: ignore[attr-defined]
    assert tokens == list(range(5_000))


def test_more_messages_than_any_queue_holds_are_no_fault_of_the_rank(front: FrontEnd) -> None:
    _, heard = front.attach()

    def say_much() -> None:
        for number in range(70_000):
            front.ranks.abort(0, str(number))

    front.say(say_much)
    for number in range(1000):  # all of them take many seconds
        assert heard.get(timeout=30) == ("abort", str(number))
    assert front.events.empty(), "a full queue does not make the front give up a rank"


def test_a_rank_that_does_not_read_is_lost_after_a_while(
    monkeypatch: pytest.MonkeyPatch, front: FrontEnd
) -> None:
    front.attach()
    stream, now_s = front.ranks.attached[0], time.monotonic()
    monkeypatch.setattr(front.ranks, "_clock", lambda: now_s + 31)
    stream.write_begun_s = now_s
    front.say(front.ranks.abort, 0, "r")
    assert front.events.get(timeout=30) == ("lost", 0, "it has not read its messages for 30 s")


def test_a_rank_that_is_lost_while_all_are_told_something_is_not_told(
    monkeypatch: pytest.MonkeyPatch, front: FrontEnd
) -> None:
    """The loss of a rank that does not read may make the front give up the next one."""
    for rank in (0, 1):
        front.attach(replace(FACTS, rank=rank))
    ranks, now_s = front.ranks, time.monotonic()
    listener: Any = ranks._listener
    monkeypatch.setattr(listener, "lost", lambda rank, _reason: rank or ranks.give_up(1, "it is stuck"))
    monkeypatch.setattr(ranks, "_clock", lambda: now_s + 31)
    ranks.attached[0].write_begun_s = now_s

    async def drop() -> None:
        ranks.drop_placement(3)

    front.run(drop())
    assert not ranks.attached


def test_an_error_in_what_takes_a_message_is_a_loss_that_is_told(front: FrontEnd) -> None:
    heard: Queue[tuple[object, ...]] = Queue()
    link = link_to(front, heard)
    link._listener.submit = lambda _request: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    link.open(30)
    front.events.get(timeout=30)
    front.say(front.ranks.submit, 0, REQUEST, now_s=0.0)
    assert heard.get(timeout=30) == (
        "lost",
        "invalid message from the front: ZeroDivisionError: division by zero",
        False,
    )


def test_a_rank_of_another_version_is_refused(front: FrontEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_link, "DEFINITION", "another")
    with pytest.raises(LinkError, match="another version of WideEP"):
        link_to(front, Queue()).open(30)


def test_all_addresses_are_bound_and_the_name_is_announced() -> None:
    async def bind(host: str) -> tuple[str, bool]:
        ranks = Ranks(1, "t")
        address = ranks.bind(host)
        await ranks.serve(Told())
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
    link.send_heartbeat(beat)
    assert front.events.get(timeout=30) == ("heartbeat", beat)
    now_s = front.ranks.attached[0].beat_s + 2.25
    monkeypatch.setattr(front.ranks, "_clock", lambda: now_s)
    front.say(front.ranks.give_up, 0, "its connection closed")
    lost = front.events.get(timeout=30)
    assert lost == ("lost", 0, "its connection closed, 2.2 s after its last heartbeat")


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
        told = Told()
        link = RankLink(front.address, "secret", FACTS, told, cluster_key=KEY)
        link.open(30)
        assert front.events.get(timeout=30) == ("attached", FACTS)
        for number in range(3):
            front.say(front.ranks.abort, 0, f"r{number}")
            link.send_regrouped(number)
        assert [told.events.get(timeout=30) for _ in range(3)] == [
            ("abort", f"r{number}") for number in range(3)
        ]
        assert [front.events.get(timeout=30) for _ in range(3)] == [
            ("regrouped", 0, number) for number in range(3)
        ]
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
    fronts: bytes | None, ranks: bytes | None, reason: str
) -> None:
    with front_with(fronts) as front:
        link = RankLink(front.address, "secret", FACTS, Told(), cluster_key=ranks)
        with pytest.raises(LinkError, match=f"{reason}.*same --cluster-key-file"):
            link.open(30)
        kind, _, said = front.events.get(timeout=30)
        assert (kind, str(said).startswith(reason)) == ("refused", True)
        assert not front.ranks.attached


@pytest.mark.parametrize("key", [None, OTHER_KEY])
def test_an_imposter_with_more_restarts_does_not_take_a_ranks_place(key: bytes | None) -> None:
    with front_with(KEY) as front:
        link = RankLink(front.address, "secret", FACTS, Told(), cluster_key=KEY)
        link.open(30)
        assert front.events.get(timeout=30) == ("attached", FACTS)
        imposter = RankLink(front.address, "secret", replace(FACTS, num_restarts=99), Told(), cluster_key=key)
        with pytest.raises(LinkError, match="cluster key"):
            imposter.open(30)
        assert front.events.get(timeout=30)[0] == "refused"
        link.send_regrouped(7)
        assert front.events.get(timeout=30) == ("regrouped", 0, 7), "the real one continues"
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
            RankLink(address, "secret", FACTS, Told(), cluster_key=KEY).open(30)
    finally:
        server.stop(0)


def test_a_claim_is_answered_under_the_cluster_key_only() -> None:
    with front_with(KEY) as front:
        with pytest.raises(LinkError, match="the front has a cluster key, but it does not"):
            claim(front.address, "secret", Claim("new", 0, 1), 30)
        with pytest.raises(LinkError, match="the cluster keys differ"):
            claim(front.address, "secret", Claim("new", 0, 1), 30, cluster_key=OTHER_KEY)
