"""schemathesis over our own /openapi.json: what the description promises is what the service does."""

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.server.hard.test_fuzz import check_good
from tests.support.paced_front import PacedFront

schemathesis = pytest.importorskip("schemathesis")
conformance = pytest.importorskip("schemathesis.specs.openapi.checks")

CHECKS = [
    schemathesis.checks.not_a_server_error,
    conformance.status_code_conformance,
    conformance.content_type_conformance,
    conformance.response_schema_conformance,
]
EXAMPLES = 60  # per operation
TIMEOUT_S = 30.0
# They write files or wait for ranks, and take no body: `test_fuzz` has them.
LEFT_OUT = r"expert_distribution_record|/experts/record"


@pytest.fixture
def api_schema(hard_front: PacedFront) -> Any:
    """Our description, read from the running front."""
    loaded = schemathesis.openapi.from_url(f"{hard_front.url}/openapi.json")
    return loaded.exclude(path_regex=LEFT_OUT)


schema = schemathesis.pytest.from_fixture("api_schema")


@pytest.mark.slow
@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_the_service_does_what_its_description_says(case: Any) -> None:
    case.call_and_validate(checks=CHECKS, timeout=TIMEOUT_S)


@pytest.mark.slow
def test_a_good_request_is_answered_afterwards(hard_front: PacedFront) -> None:
    check_good(hard_front)


def test_the_description_is_honest(hard_front: PacedFront) -> None:
    described = hard_front.get("/openapi.json").json()
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
