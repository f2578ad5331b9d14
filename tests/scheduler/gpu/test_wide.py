"""Two interpreted ranks of the GPU path serve the tokens of transformers. A restarted rank can serve alone."""

from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from dispatch.errors import WireUnavailable
from scheduler.assembly import assemble
from scheduler.epochs.orders import Order
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import RankStats, RequestOutput
from tests.support.engines.serving import own_share, request, serve
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.path import SETTINGS, build_interpreted
from tests.support.models.families import VOCABULARY, write_checkpoint
from tests.support.ranks import RankPool

pytestmark = [
    pytest.mark.slow,
    needs_triton,
]


def tokens_served(
    directory: Path, prompts: list[list[int]], backend: str, compiler: str
) -> tuple[dict[str, list[int]], str]:
    built = build_interpreted(
        directory, all2all_backend=backend, enable_torch_compile=bool(compiler), compiler=compiler
    )
    asked = [request(str(index), prompt, max_tokens=4) for index, prompt in enumerate(prompts)]
    served = serve(built, own_share(asked)).token_ids
    return served, built.wire


@pytest.mark.parametrize(
    ("backend", "says", "family", "compiler"),
    [
        ("auto", "shm and shared memory, as kernels are interpreted", "mixtral", ""),
        ("gloo", "gloo, as it was requested", "mixtral", ""),
        (
            "auto",
            "shm and shared memory, as kernels are interpreted",
            "qwen2_moe",
            "aot_eager",
        ),  # with shared experts
    ],
)
def test_ranks_on_gpus_serve_transformers_tokens(
    interpreting_pair: RankPool, tmp_path: Path, backend: str, says: str, family: str, compiler: str
) -> None:
    oracle = write_checkpoint(family, tmp_path, is_shallow=True)
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 18, 9)]
    parts = interpreting_pair.run(tokens_served, tmp_path, prompts, backend, compiler, timeout_s=400.0)
    served = {name: ids for tokens, _ in parts for name, ids in tokens.items()}
    for index, prompt in enumerate(prompts):
        made = oracle.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False, eos_token_id=None)
        assert served[str(index)] == made[0, len(prompt) :].tolist()
    assert all(wire.startswith(says) for _, wire in parts)


def open_by_node(directory: Path) -> str:
    try:
        build_interpreted(directory, dispatch_node_size=1)
    except WireUnavailable as error:
        return str(error)
    return "no error"


def test_node_limited_dispatch_is_refused_by_name(interpreting_pair: RankPool, tmp_path: Path) -> None:
    write_checkpoint("mixtral", tmp_path)
    for text in interpreting_pair.run(open_by_node, tmp_path):
        assert text == "--dispatch-node-size is 1; between GPUs every rank sends to every other: give 0"


class Silent:
    """The doorbell of a single rank that never sleeps."""

    def ring(self, step: int) -> None: ...

    def wait(self, step: int) -> None: ...


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
    oracle = write_checkpoint("mixtral", tmp_path, is_shallow=True)
    prompt = torch.randint(3, VOCABULARY, (9,), generator=torch.Generator().manual_seed(6)).tolist()
    served = interpreter.run(serve_as_newcomer, tmp_path, prompt, timeout_s=300.0)[0]
    made = oracle.generate(torch.tensor([prompt]), max_new_tokens=3, do_sample=False, eos_token_id=None)
    assert served == made[0, len(prompt) :].tolist()
