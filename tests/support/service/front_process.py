"""A real front in its own process, with scripted ranks attached from this one."""

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import httpx
from tokenizers import Tokenizer

from expert_placement.placement import Placement, linear_placement
from scheduler.policy.request import Request
from server.link.messages import Served
from server.serve.children import LISTENER_VARIABLE, READY_VARIABLE
from server.serve.store.rendezvous import listens_on
from tests.support.models.tiny_tokenizer import MAX_LEN
from tests.support.requests import plain_http
from tests.support.service.fake_rank import EXPERT_BYTES, FakeRank, Script, experts_of
from tests.support.service.forked import FIRST_FD, WIDEEP, Forked, Kind
from tests.support.service.service_processes import wait_until

TIMEOUT_S = 60.0


def without_times(text: str) -> str:
    """Return log lines without their time and level."""
    return re.sub(r"^\d{4}-\d\d-\d\dT[\d:.]+Z [A-Z]+ +", "", text, flags=re.MULTILINE)


class FrontProcess:
    """`wideep front` on free ports."""

    def __init__(
        self,
        model: Path,
        *flags: str,
        num_ranks: int = 2,
        max_len: int = MAX_LEN,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
        listener: socket.socket | None = None,
        **how: Any,
    ) -> None:
        """Start the front. Its standard output goes to `log` if given. `how` configures its ranks (`FakeRank`)."""
        self.num_ranks = num_ranks
        self._max_len, self._how = max_len, how
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.ranks: list[FakeRank] = []
        self._scripts: dict[str, Script] = {}
        self.headers: dict[str, str] = {}  # of requests without their own
        read_fd, write_fd = os.pipe()
        stderr_fd, their_stderr_fd = os.pipe()
        # Without statistics, the log contains only problems.
        words = ["front", str(model), "--port=0", f"--ranks={num_ranks}", *flags, "--disable-log-stats"]
        environment = {**os.environ, **(environment or {}), READY_VARIABLE: str(FIRST_FD)}
        kept_fds = [write_fd]
        if listener is not None:
            environment[LISTENER_VARIABLE] = str(FIRST_FD + 1)
            kept_fds.append(listener.fileno())
        with contextlib.ExitStack() as files:
            out_fd = 1 if log is None else files.enter_context(log.open("w")).fileno()
            self.process = Forked(
                Kind.FRONT,
                [*WIDEEP, *words],
                stdout_fd=out_fd,
                stderr_fd=their_stderr_fd,
                cwd=model,
                environment=environment,
                kept_fds=kept_fds,
            )
        os.close(write_fd)
        os.close(their_stderr_fd)
        with os.fdopen(read_fd) as ready:
            line = ready.readline()
        self._stderr: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(os.fdopen(stderr_fd),), daemon=True)
        self._reader.start()
        assert line, f"the front did not announce its address: {self.wait()}"
        said = json.loads(line)
        self.url, self.ranks_address, self.token = said["http"], said["ranks_address"], said["token"]

    def _read(self, stream: object) -> None:
        for line in stream:  # type: ignore[attr-defined]
            self._stderr.append(line)

    def attach(
        self,
        rank: int,
        *,
        num_restarts: int = 0,
        world_size: int | None = None,
        loaded: Placement | None = None,
        newest_epoch: int = 0,
        served: Served | None = None,
        kv_generation: int = 0,
    ) -> FakeRank:
        """Attach one rank, which knows all scripts.

        Args:
            world_size: Number of ranks that it knows; that of the start by default.
            loaded: The placement of a rank that joins. `newest_epoch`: of its pool before.
            served: The state for a front that replaces another.
            kv_generation: That of the records in its tiers.
        """
        fake = FakeRank(
            rank,
            world_size or self.num_ranks,
            self.ranks_address,
            self.token,
            decode=self.decode,
            max_model_len=self._max_len,
            num_restarts=num_restarts,
            loaded=None
            if loaded is None
            else Served(newest_epoch, 0, loaded, EXPERT_BYTES, experts_of(loaded)),
            **self._how,
        )
        fake.scripts.update(self._scripts)
        fake.link._facts = replace(fake.link._facts, served=served, kv_generation=kv_generation)
        self.ranks.append(fake.open())
        return fake

    def attach_all(self) -> Self:
        """Attach every rank. Return when the front answers."""
        for rank in range(self.num_ranks):
            self.attach(rank)
        assert self.get("/health").status_code == 200
        return self

    def wait_listening(self) -> Self:
        """Wait until the front accepts connections. A replacement among several fronts does not at first."""
        port = int(self.url.rpartition(":")[2])
        wait_until(lambda: listens_on(self.process.pid, port), lambda: self.said)
        return self

    def forget(self) -> None:
        """Let every rank forget its scripts and recorded calls, for the next tests."""
        self._scripts.clear()
        for rank in self.ranks:
            rank.forget()

    @property
    def said(self) -> str:
        """Return the stderr of the process so far, without times and notes on unknown fields."""
        lines = without_times("".join(self._stderr)).splitlines(keepends=True)
        return "".join(line for line in lines if " ignores the unknown field " not in line)

    def script(self, word: str, answer: str | Sequence[int], **how: object) -> Script:
        """Let every rank answer prompts that hold `word`."""
        token_ids = self.encode(answer) if isinstance(answer, str) else answer
        script = self._scripts[word] = Script(token_ids, **how)  # type: ignore[arg-type]
        for rank in self.ranks:
            rank.scripts[word] = script
        return script

    def encode(self, text: str) -> list[int]:
        """Tokenize as the front does."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def served(self, word: str) -> FakeRank:
        """Return the rank that got a prompt with `word`. Wait until one did."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for rank in self.ranks:
                if any(word in self.decode(request.prompt_ids) for request in list(rank.requests)):
                    return rank
            threading.Event().wait(0.02)
        raise AssertionError(f"no rank was given {word!r}")

    def asked(self, word: str) -> Request:
        """Return the newest request with `word` in its prompt. Wait until a rank got one."""
        given = list(self.served(word).requests)
        return [request for request in given if word in self.decode(request.prompt_ids)][-1]

    def get(self, path: str, **how: object) -> httpx.Response:
        return plain_http.get(self.url + path, timeout=TIMEOUT_S, **{"headers": self.headers, **how})  # type: ignore[arg-type]

    def post(self, path: str, **how: object) -> httpx.Response:
        return plain_http.post(self.url + path, timeout=TIMEOUT_S, **{"headers": self.headers, **how})  # type: ignore[arg-type]

    def wait(self) -> tuple[int, str]:
        """Wait for the process to end. Return its status and stderr."""
        status = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return status, self.said

    def close(self) -> tuple[int, str]:
        """Stop the process at once, and wait for its end."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.wait()
        finally:
            self.process.kill()
            for rank in self.ranks:
                rank.close()


@contextlib.contextmanager
def operated_front(model: Path, keys_folder: Path) -> Iterator[FrontProcess]:
    """Run a front with two ranks and an operator's key, which its requests send. Rank 0 has reported the placement."""
    keys = keys_folder / "operators"
    keys.write_text("sesame\n")
    process = FrontProcess(model, "--served-model-name=m", f"--operator-key-file={keys}")
    process.headers = {"Authorization": "Bearer sesame"}
    process.attach_all()
    process.ranks[0].begin(linear_placement(2, 4, 2))
    wait_until(
        lambda: process.get("/experts/history").status_code == 200, lambda: "the placement is not known"
    )
    yield process
    code, _ = process.close()
    assert code == 0
