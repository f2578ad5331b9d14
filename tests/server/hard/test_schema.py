"""schemathesis over our own /openapi.json: the service must do what its description promises."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.server.hard.test_fuzz import check_good
from tests.support.service.paced_front import PacedFront

EXAMPLES = 20  # per operation
TIMEOUT_S = 60.0
# These write files, wait for ranks or refuse all other requests: `test_fuzz` covers them.
LEFT_OUT = r"expert_distribution_record|/experts/record|/sleep|memory_occupation|weights?_checker|weights_update_group|transfer_engine"


def complaints(operation: Any, checks: Sequence[Any]) -> str | None:
    """Return how an operation differs from its description, or None."""

    # schemathesis' pytest plugin does not work with our version of pytest.
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        case.call_and_validate(checks=checks, timeout=TIMEOUT_S)

    try:
        check()
    except (Exception, BaseExceptionGroup) as failure:  # noqa: BLE001 - any failure is a complaint, and all are reported
        return f"{operation.label}: {failure}"
    return None


@pytest.mark.slow
def test_the_service_does_what_its_description_says(hard_front: PacedFront) -> None:
    # Imported here because the import takes seconds that the other test does not need.
    schemathesis = pytest.importorskip("schemathesis")
    conformance = pytest.importorskip("schemathesis.specs.openapi.checks")
    checks = [
        schemathesis.checks.not_a_server_error,
        conformance.status_code_conformance,
        conformance.content_type_conformance,
        conformance.response_schema_conformance,
    ]
    schema = schemathesis.openapi.from_url(f"{hard_front.url}/openapi.json").exclude(path_regex=LEFT_OUT)
    operations = [each.ok() for each in schema.get_all_operations()]
    assert len(operations) > 10
    wrong = [complaint for each in operations if (complaint := complaints(each, checks))]
    assert not wrong, "\n\n".join(wrong)
    check_good(hard_front)


def test_the_description_is_honest(hard_front: PacedFront) -> None:
    described = hard_front.get("/openapi.json").json()
    names = [
        each["operationId"] for operations in described["paths"].values() for each in operations.values()
    ]
    assert len(set(names)) == len(names), "operation ids are unique"
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert {"4XX", "5XX"} <= set(responses), f"{method} {path} does not describe its errors"
            assert "422" not in responses, f"{method} {path} promises FastAPI's own errors"
    for path in ("/v1/chat/completions", "/v1/completions"):
        operation = described["paths"][path]["post"]
        assert "text/event-stream" in operation["responses"]["200"]["content"]
        assert "$ref" in operation["requestBody"]["content"]["application/json"]["schema"], "bodies are typed"
    prompt = described["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]
    assert len(prompt["anyOf"]) == 4, "the four forms of a prompt"
