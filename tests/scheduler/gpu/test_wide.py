"""Two ranks whose GPU path is interpreted serve the tokens of transformers, prompts and decodes going their own ways."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dispatch.errors import WireUnavailable
from tests.support.families import VOCABULARY, write_checkpoint
from tests.support.gpu_path import build_interpreted
from tests.support.interpreted import interpret, needs_triton
from tests.support.ranks import RankPool
from tests.support.serving import own_share, request, serve

pytestmark = [
    pytest.mark.slow,
    needs_triton,
]


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks of their own: the interpreter must be chosen before anything in a process imports triton."""
    with RankPool(2, timeout_s=120.0) as pool:
        pool.run(interpret)
        yield pool


def tokens_served(
    directory: Path, prompts: list[list[int]], backend: str, compiler: str
) -> tuple[dict[str, list[int]], str]:
    built = build_interpreted(directory, all2all_backend=backend, compiler=compiler)
    asked = [request(str(index), prompt, max_tokens=4) for index, prompt in enumerate(prompts)]
    served = serve(built, own_share(asked)).token_ids
    return served, built.wire


@pytest.mark.parametrize(
    ("backend", "says", "family", "compiler"),
    [
        ("auto", "shm and shared memory, as kernels are interpreted", "mixtral", ""),
        ("gloo", "gloo, as it was asked for", "mixtral", ""),
        (
            "auto",
            "shm and shared memory, as kernels are interpreted",
            "qwen2_moe",
            "aot_eager",
        ),  # shared experts
    ],
)
def test_ranks_on_gpus_serve_transformers_tokens(
    pair: RankPool, tmp_path: Path, backend: str, says: str, family: str, compiler: str
) -> None:
    oracle = write_checkpoint(family, tmp_path)
    generator = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in (3, 18, 9)]
    parts = pair.run(tokens_served, tmp_path, prompts, backend, compiler, timeout_s=400.0)
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


def test_node_limited_dispatch_is_refused_by_name(pair: RankPool, tmp_path: Path) -> None:
    write_checkpoint("mixtral", tmp_path)
    for text in pair.run(open_by_node, tmp_path):
        assert text == "--dispatch-node-size is 1; between GPUs every rank sends to every other: give 0"
