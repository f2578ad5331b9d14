"""Views of membership: the status, readiness for requests, permission for placement changes, metrics."""

from prometheus_client import CollectorRegistry, generate_latest

from server.front.journal import Journal
from server.front.members.membership import Epochs
from server.front.members.readiness import why_no_change, why_not_ready, why_service_not_ready
from server.http.observability.gauges import MembershipMetrics
from server.http.observability.ops import phase_of, status_of
from server.options.pools import Role


def service(num_ranks: int = 2) -> Epochs:
    """Return a service that serves."""
    epochs = Epochs(num_ranks, recovery_timeout_s=600.0)
    for rank in range(num_ranks):
        epochs.attach(rank, 0.0)
    return epochs


def test_the_status_says_who_is_away_why_and_since_when() -> None:
    epochs = service()
    epochs.lose(1, "killed", 10.0)
    epochs.take_regrouped(0, 1, 10.5)
    assert status_of({"both": epochs}, 12.0, 1000.0) == {
        "schema_version": 1,
        "phase": "serving",
        "epoch": 1,
        "members": [0],
        "missing": [{"rank": 1, "reason": "killed", "since": 998.0, "seconds": 2.0}],
        "faults": [],
        "draining": [],
        "losses": 1,
        "total_engines": 2,
        "engines": [{"id": 0, "status": "healthy"}, {"id": 1, "status": "dead", "fault_info": "killed"}],
        "pools": [
            {"pool": "both", "role": "both", "ranks": [0, 1], "phase": "serving", "epoch": 1, "members": [0]}
        ],
    }


def pools() -> dict[str, Epochs]:
    """Return a pool of rank 0 and one of ranks 1 and 2, which both serve."""
    found = {
        "prefill": Epochs(1, recovery_timeout_s=600.0),
        "decode": Epochs(2, recovery_timeout_s=600.0, first_rank=1),
    }
    for epochs in found.values():
        for rank in epochs.ranks:
            epochs.attach(rank, 0.0)
    return found


def test_the_status_is_that_of_all_pools_and_has_each_of_them() -> None:
    both = pools()
    both["decode"].lose(1, "killed", 10.0)
    status = status_of(both, 12.0, 1000.0, roles={"prefill": Role.PREFILL, "decode": Role.BOTH})
    assert [each["role"] for each in status["pools"]] == ["prefill", "both"], "roles may differ from names"
    assert (status["phase"], status["epoch"], status["members"]) == ("serving", 1, [0, 2])
    assert (status["losses"], status["total_engines"]) == (1, 3)
    assert [each["id"] for each in status["engines"]] == [0, 1, 2]
    assert [each["rank"] for each in status["missing"]] == [1]
    assert [(each["pool"], each["phase"], each["epoch"]) for each in status["pools"]] == [
        ("prefill", "serving", 0),
        ("decode", "regrouping", 1),
    ]
    both["prefill"].lose(0, "killed", 13.0)
    assert status_of(both, 14.0, 1000.0)["phase"] == "regrouping"
    both["decode"].lose(2, "killed", 15.0)
    assert status_of(both, 16.0, 1000.0)["phase"] == "waiting"


def test_one_pool_suffices_to_serve_once_all_have_started() -> None:
    both = pools()
    assert why_service_not_ready(both) is None
    both["decode"] = Epochs(2, recovery_timeout_s=600.0, first_rank=1)
    assert why_service_not_ready(both) == "pool decode: waiting for ranks 1, 2"
    assert phase_of(list(both.values())).value == "starting"
    both["decode"].resume(0.0)  # the front was restarted, and the pool has served before
    assert why_service_not_ready(both) is None and phase_of(list(both.values())).value == "serving"
    both["prefill"].lose(0, "killed", 1.0)
    assert why_service_not_ready(both) == (
        "pool prefill: waiting for a rank to come back; rank 0 is lost: killed; pool decode: waiting for ranks 1, 2"
    )
    alone = {"both": Epochs(1, recovery_timeout_s=600.0)}
    assert why_service_not_ready(alone) == "waiting for rank 0 of 1"


def test_metrics_of_several_pools_have_their_names() -> None:
    both = pools()
    both["decode"].lose(2, "killed", 10.0)
    registry = CollectorRegistry()
    registry.register(MembershipMetrics(both, Journal(), lambda: 0, "m"))
    lines = generate_latest(registry).decode().splitlines()
    for wanted in (
        'wideep:epoch{model_name="m",pool="prefill"} 0.0',
        'wideep:epoch{model_name="m",pool="decode"} 1.0',
        'wideep:members{model_name="m",pool="decode"} 1.0',
        'vllm:engine_healthy{engine="0",model_name="m"} 1.0',
        'vllm:engine_healthy{engine="2",model_name="m"} 0.0',
        'wideep:rank_losses_total{engine="2",model_name="m"} 1.0',
    ):
        assert wanted in lines, lines
    assert len([line for line in lines if line.startswith("# TYPE wideep:epoch ")]) == 1


def test_a_rank_whose_steps_broke_off_is_unhealthy_and_so_are_those_that_wait_for_it() -> None:
    epochs = service()
    epochs.take_fault(0, 0, "a time-out", is_final=False, now_s=10.0)
    status = status_of({"both": epochs}, 12.0, 1000.0)
    assert status["phase"] == "regrouping" and status["faults"] == [{"rank": 0, "reason": "a time-out"}]
    assert [engine["status"] for engine in status["engines"]] == ["unhealthy", "unhealthy"]
    assert status["engines"][0]["fault_info"] == "a time-out"


def test_requests_are_taken_while_somebody_serves_or_will_at_once() -> None:
    starting = Epochs(3, recovery_timeout_s=600.0)
    starting.attach(1, 0.0)
    assert why_not_ready(starting) == why_no_change(starting) == "waiting for ranks 0, 2 of 3"
    epochs = service()
    assert why_not_ready(epochs) is None and why_no_change(epochs) is None
    epochs.lose(1, "killed", 1.0)
    assert why_not_ready(epochs) is None, "the members are regrouping"
    assert why_no_change(epochs) == "rank 1 is lost: killed"
    epochs.take_fault(0, 1, "no memory", is_final=True, now_s=2.0)
    reason = "rank 1 is lost: killed; rank 0 cannot continue without it: no memory"
    assert why_not_ready(epochs) == f"waiting for a rank to come back; {reason}"
    epochs.attach(1, 3.0)
    assert why_not_ready(epochs) is None
    assert why_no_change(epochs) == "the ranks are meeting in epoch 2"
    for rank in (0, 1):
        epochs.take_regrouped(rank, 2, 4.0)
    assert why_no_change(epochs) is None


def test_with_only_ranks_that_came_back_requests_are_taken_when_one_of_them_serves() -> None:
    epochs = service(1)
    epochs.lose(0, "killed", 1.0)
    assert why_not_ready(epochs) == "waiting for a rank to come back; rank 0 is lost: killed"
    epochs.attach(0, 2.0)
    assert why_not_ready(epochs) == "rank 0 came back and will serve soon"
    epochs.take_regrouped(0, 1, 3.0)
    assert why_not_ready(epochs) is None


def test_metrics_tell_of_ranks_and_of_what_went_on_elsewhere() -> None:
    epochs = service()
    epochs.lose(1, "killed", 10.0)
    epochs.take_regrouped(0, 1, 10.5)
    registry = CollectorRegistry()
    registry.register(MembershipMetrics({"both": epochs}, Journal(), lambda: 5, "m"))
    lines = generate_latest(registry).decode().splitlines()
    for wanted in (
        'wideep:epoch{model_name="m"} 1.0',
        'wideep:members{model_name="m"} 1.0',
        'wideep:parked_choices{model_name="m"} 5.0',
        'wideep:replayed_requests_total{model_name="m"} 0.0',
        'vllm:engine_healthy{engine="0",model_name="m"} 1.0',
        'vllm:engine_healthy{engine="1",model_name="m"} 0.0',
        'wideep:rank_losses_total{engine="1",model_name="m"} 1.0',
    ):
        assert wanted in lines, lines
