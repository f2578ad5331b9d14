"""The kernels as operators: torch.compile takes them without a break, and they give what the functions give."""

from importlib.util import find_spec
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support.gpu_attention import SCALE, Heads, Paged, make_paged
from tests.support.ranks import RankPool

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton: pip install -r requirements-dev.txt"
)

HEADS = Heads(4, 2, 32, 16)


def load() -> tuple[ModuleType, ModuleType]:
    from attention.gpu import ops  # noqa: PLC0415 - in the interpreter
    from kvcache.gpu import ops as write_ops  # noqa: PLC0415

    return ops, write_ops


def run_all(paged: Paged, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    """Every operator once, as a layer would: rotate, write, prefill, decode, latents."""
    ops, write_ops = load()
    from attention.gpu.decode import DecodeScratch  # noqa: PLC0415 - in the interpreter
    from attention.gpu.prefill import tile_tokens  # noqa: PLC0415

    step, keys, values = paged
    tiles = torch.from_numpy(step.tiles(tile_tokens(4, 2)))
    scratch = DecodeScratch(max_sequences=2, heads=4, value_dim=16, max_tokens=64, device=query.device)
    angles, sequences = torch.ones(query.shape[0], 8), paged.of(2)
    latents, slots = keys[:, 0].contiguous(), step.cache_slot_T[: step.num_tokens]

    def layer(query: Tensor, key: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
        query = query * 2
        ops.rotate(query, angles, angles, keys_TGD=key * 2)
        write_ops.write_pages(key, slots, keys)
        write_ops.write_pages(key, slots, keys, key[..., :16], torch.zeros_like(values))
        prefilled = ops.paged_prefill(
            query, keys, values, tiles, step.query_start_S, step.context_S, step.block_table_SM, scale=SCALE
        )
        decoded = ops.paged_decode(query[:2], keys, values, *sequences, scratch, scale=SCALE, window=9)
        absorbed = ops.latent_decode(query[:2], latents, *sequences, scratch, latent_dim=16, scale=SCALE)
        return prefilled + 1, decoded + 1, absorbed + 1

    return (*layer(query, key, keys), *compiled_results(layer, query, key, keys))


def compiled_results(layer: object, query: Tensor, key: Tensor, keys: Tensor) -> tuple[Tensor, ...]:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")  # type: ignore[call-overload]
    return tuple(compiled(query, key, keys.clone()))


def compile_all() -> None:
    paged = make_paged([(0, 3), (17, 2)], HEADS)
    query, key = torch.randn(5, 4, 32), torch.randn(5, 2, 32)
    prefilled, decoded, latents, *compiled = run_all(paged, query, key)
    assert (prefilled.shape, decoded.shape, latents.shape) == ((5, 4, 16), (2, 4, 16), (2, 4, 16))
    assert not torch.equal(prefilled[:2], decoded)  # other queries: not everything is the same
    for plain, same in zip((prefilled, decoded, latents), compiled, strict=True):
        assert plain.isfinite().all()
        assert torch.equal(plain, same)


@pytest.mark.slow
def test_compiled_code_holds_every_operator_without_a_break(interpreter: RankPool) -> None:
    interpreter.run(compile_all)


def shape_all() -> None:
    """Results have the shapes, types and devices that compilers are told."""
    ops, _ = load()
    from attention.gpu.decode import DecodeScratch  # noqa: PLC0415 - in the interpreter

    query = torch.empty(3, 4, 32, dtype=torch.bfloat16, device="meta")
    keys = torch.empty(7, 2, 16, 32, dtype=torch.bfloat16, device="meta")
    about = (torch.empty(3, device="meta"), torch.empty(3, 5, device="meta"))
    scratch = DecodeScratch(max_sequences=3, heads=4, value_dim=16, max_tokens=64, device=query.device)
    found = [
        ops.paged_decode(query, keys, keys[..., :16], *about, scratch, scale=1.0),
        ops.latent_decode(query, keys[:, 0], *about, scratch, latent_dim=16, scale=1.0),
        ops.paged_prefill(query, keys, keys[..., :16], *about, *about, scale=1.0),
    ]
    assert all((f.shape, f.dtype, f.device) == ((3, 4, 16), query.dtype, query.device) for f in found[:2])
    assert found[2].shape == (3, 4, 16)


def test_operators_tell_compilers_their_results_shape(interpreter: RankPool) -> None:
    interpreter.run(shape_all)
