"""How `benchmarks.peers` handles peers that are not installed and rows that do not count."""

import contextlib
from pathlib import Path
from typing import IO, Any

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import llama_cpp
from benchmarks.peers.folder import MissingPeerError, needs, peers_folder, run
from benchmarks.serving.closed_loop import RequestTiming
from benchmarks.serving.transformers_peer import PeerError

OPTIONS = peers.PeerOptions(["qwen3-moe"], ["exact"], [1], 2, 2, {"transformers"}, False)


class Running:
    """An installed peer: this process."""

    start_s = 0.5

    def __init__(self) -> None:
        self.process = self
        self.pid = 1

    def run(self, prompts: Any, num_tokens: int, concurrency: int) -> list[RequestTiming]:
        """Answer at once."""
        return [RequestTiming(0.0, [0.1, 0.1 + 0.01 * num_tokens], num_tokens) for _ in prompts]


class Prompts:
    """Source of short prompts."""

    def take(self, count: int) -> list[list[int]]:
        """Return `count` prompts."""
        return [[1]] * count


def there(_model: Path, _options: peers.PeerOptions, _log: IO[bytes]) -> Any:
    return contextlib.nullcontext(Running())


def not_there(_model: Path, _options: peers.PeerOptions, _log: IO[bytes]) -> Any:
    needs("a-compiler-that-does-not-exist")


def test_what_cannot_be_installed_is_named_and_the_others_run() -> None:
    programs = [
        peers.Program("wideep 1 rank", there),
        peers.Program("llama.cpp bf16", not_there),
        peers.Program("transformers", not_there),
    ]
    with contextlib.ExitStack() as stack:
        running, missing = peers._start(stack, programs, Path(), OPTIONS)
    assert list(running) == ["wideep 1 rank"]
    assert missing == {"llama.cpp bf16": "a-compiler-that-does-not-exist not found"}
    with contextlib.ExitStack() as stack, pytest.raises(MissingPeerError):
        peers._start(stack, [peers.Program("wideep 1 rank", not_there)], Path(), OPTIONS)


def test_a_peer_that_cannot_run_the_model_is_missing_too() -> None:
    class Failing(Running):
        def run(self, prompts: Any, num_tokens: int, concurrency: int) -> list[RequestTiming]:
            raise PeerError("it said:\nno such layer")

    running, missing = {"wideep": Running(), "transformers": Failing()}, dict[str, str]()
    peers._drop_those_that_fail(running, missing, Prompts())  # type: ignore[arg-type]
    assert list(running) == ["wideep"] and "no such layer" in missing["transformers"]


def test_rows_beside_others_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([(10.0, True), (20.0, False), (30.0, False)])

    def measured(*_: object) -> dict[str, Any]:
        rate, noisy = next(rates)
        values = {"tokens_per_s": rate, "ttft_p50_ms": 1.0, "itl_p50_ms": 1.0, "itl_p99_ms": 2.0}
        return {**values, "peak_pss_mib": 5, "own_cores": 1.0, "other_cores": 0.0, "noisy": noisy}

    monkeypatch.setattr(peers, "_measure_row", measured)
    level = peers._measure_level({"wideep": Running()}, Prompts(), 1, OPTIONS)  # type: ignore[arg-type]
    assert [row["tokens_per_s"] for row in level["rows"]] == [20.0, 30.0]
    assert level["programs"]["wideep"]["tokens_per_s"] == 25.0 and level["programs"]["wideep"]["rounds"] == 2


def test_the_folder_is_outside_of_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WIDEEP_PEERS", str(tmp_path / "elsewhere"))
    assert peers_folder() == tmp_path / "elsewhere" and peers_folder().is_dir()
    monkeypatch.delenv("WIDEEP_PEERS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(__file__).parents[2] not in peers_folder().parents


def test_a_step_that_fails_says_what_it_printed() -> None:
    with pytest.raises(MissingPeerError, match=r"sh ended with 3: no room"):
        run("vllm", ["sh", "-c", "echo no room; exit 3"])


def test_llama_cpp_is_told_of_this_processor() -> None:
    assert all(option.startswith("-DGGML_") for option in llama_cpp._instructions())
    assert not any("AMX" in option for option in llama_cpp._instructions())


@pytest.mark.parametrize(
    "arguments", [["--shapes", "gpt"], ["--sets", "fp8"], ["--concurrency", "0"], ["--without", "sglang"]]
)
def test_other_names_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        peers._options(arguments)
    assert ended.value.code == 2 and arguments[0] in capsys.readouterr().err
