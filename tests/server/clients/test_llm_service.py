"""`LLM` and `wideep run-batch` with private engines: the same tokens as from a service, and no process left behind."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server.offline import LLM, SamplingParams
from tests.support.service.forked import WIDEEP
from tests.support.service.private_services import import_once
from tests.support.service.real_service import REPOSITORY, RealService
from tests.support.service.service_processes import HEARS_CTRL_C, has_ended

pytestmark = pytest.mark.slow

PROMPTS = [f"{number} the cat sat " * (1 + number % 4) for number in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
SCRIPT = f"""
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
from server.offline import LLM, SamplingParams
from tests.support.service.private_services import import_once
import_once()
llm = LLM(sys.argv[1], kv_cache_memory="16M")
print(llm.generate("the cat", SamplingParams(max_tokens=4))[0].outputs[0].token_ids, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run gloo over the loopback device, regardless of the address of the machine's name."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    import_once()


def test_an_llm_and_a_batch_give_the_services_tokens(model: Path, tmp_path: Path) -> None:
    with RealService.serve(model, tmp_path / "output.txt") as service:
        service.wait_ready()
        body = {"prompt": PROMPTS, **GREEDY.body(), "return_token_ids": True}
        answer = service.post("/v1/completions", json=body, timeout_s=120).json()
    expected = [(choice["text"], choice["token_ids"]) for choice in answer["choices"]]
    with LLM(str(model), kv_cache_memory="16M", data_parallel_size=1) as llm:
        results = llm.generate(PROMPTS, GREEDY)
        chat = llm.chat([{"role": "user", "content": "hello"}], GREEDY)[0]
        sampled = [llm.generate("hello", SamplingParams(seed=seed))[0].outputs[0].text for seed in (5, 5, 6)]
    assert [(result.outputs[0].text, result.outputs[0].token_ids) for result in results] == expected
    assert all(position for result in results for position in result.outputs[0].logprobs or [{}])
    assert chat.prompt == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert sampled[0] == sampled[1] != sampled[2]
    with pytest.raises(RuntimeError, match="is closed"):
        llm.generate("x")


def test_a_batch_with_a_service_of_its_own(model: Path, tmp_path: Path) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {"prompt": prompt}}
        for number, prompt in enumerate(PROMPTS)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [*WIDEEP, "run-batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", str(model)]
    answer = subprocess.run(
        [*command, "-dp=1", "--kv-cache-memory=16M"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (answer.returncode, answer.stdout) == (0, ""), answer.stderr
    assert answer.stderr.endswith("wideep run-batch: 12 of 12 lines have successful responses\n")
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {entry["custom_id"] for entry in out} == set(map(str, range(12)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, None])
def test_nothing_is_left_of_an_llm_whose_script_ends_without_closing_it(
    model: Path, number: signal.Signals | None
) -> None:
    script = subprocess.Popen(
        [*HEARS_CTRL_C, sys.executable, "-c", SCRIPT, str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert script.stdout is not None
    with script:
        assert script.stdout.readline().startswith("[")
        below = _descendants(script.pid)
        assert len(below) >= 6, "serve, torchrun, front, two workers and two engines"
        if number is None:
            script.communicate("\n", timeout=60)  # the script runs to its end
            assert script.returncode == 0
        else:
            script.send_signal(number)
    assert all(has_ended(pid, 10.0) for pid in below)


def _descendants(pid: int) -> list[int]:
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    return [*children, *(below for child in children for below in _descendants(child))]
