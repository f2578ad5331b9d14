"""A rank of the GPU path that is started again meets nobody at its start, and serves from its first order on."""

from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from scheduler.assembly import assemble
from scheduler.epochs.orders import Order
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import RankStats, RequestOutput
from tests.support.families import VOCABULARY, write_checkpoint
from tests.support.gpu_path import SETTINGS
from tests.support.ranks import RankPool
from tests.support.serving import request

pytestmark = [
    pytest.mark.slow,
]


class Silent:
    """The doorbell of a rank that is alone and never sleeps."""

    def ring(self, step: int) -> None:
        """Nobody sleeps."""

    def wait(self, step: int) -> None:
        """Likewise."""


def serve_as_newcomer(directory: Path, prompt: list[int]) -> list[int]:
    config = EngineConfig(directory=directory, kv_cache_bytes=8 << 20, device="interpreter", **SETTINGS)
    engine = (built := assemble(config, Silent(), store=HashStore(), is_joining=True)).engine
    found: list[int] = []

    def on_step(outputs: list[RequestOutput], _stats: RankStats) -> None:
        for output in outputs:
            found.extend(output.token_ids)
            if output.finish_reason is not None:
                engine.stop()

    engine.regroup(Order(1, (0,), built.relocation.placement.with_version(5)))
    engine.submit(request("a", prompt, max_tokens=3))
    engine.run(on_step)
    engine.close()
    return found


def test_a_newcomer_serves_transformers_tokens(interpreter: RankPool, tmp_path: Path) -> None:
    oracle = write_checkpoint("mixtral", tmp_path)
    prompt = torch.randint(3, VOCABULARY, (9,), generator=torch.Generator().manual_seed(6)).tolist()
    served = interpreter.run(serve_as_newcomer, tmp_path, prompt, timeout_s=300.0)[0]
    made = oracle.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert served == made[0, len(prompt) :].tolist()
