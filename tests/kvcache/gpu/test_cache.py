"""Pages on a device hold what was written at the step's places, token by token; padded rows leave no trace."""

import torch

from kvcache.paged_cache import BLOCK_TOKENS, LayerShape
from kvcache.step import Span
from tests.support.ranks import RankPool

HEADS = LayerShape(num_kv_heads=2, key_dim=8, value_dim=6)
LATENT = LayerShape(num_kv_heads=1, key_dim=12, value_dim=0, latent=True)


def write() -> list[bool]:
    """Write five tokens of one sequence and one of another, padded to eight rows; say what is as it should be."""
    from kvcache.gpu.cache import DeviceCache, token_bytes  # noqa: PLC0415 - in the interpreter
    from kvcache.gpu.step import DeviceStep  # noqa: PLC0415

    device = torch.device("cpu")
    cache = DeviceCache([HEADS, LATENT], 4, dtype=torch.float32, device=device)
    step = DeviceStep(max_tokens=8, max_sequences=2, max_blocks=2, block_tokens=BLOCK_TOKENS, device=device)
    cache.step = step
    step.fill([Span(14, 5, [3, 1]), Span(0, 1, [2])])
    step.inputs(range(6), [5])
    key, value = torch.randn(1, 2, 8, 8), torch.randn(1, 8, 2, 6).transpose(1, 2)
    latent, rope = torch.randn(1, 1, 8, 8), torch.randn(1, 1, 8, 4)
    returned = cache.update(key, value, 0)
    cache.update(latent, rope, 1)
    places = [(3, 14), (3, 15), (1, 0), (1, 1), (1, 2), (2, 0)]
    right = [returned[0] is key and returned[1] is value]
    for row, (block, token) in enumerate(places):
        right.append(torch.equal(cache.keys[0][block, :, token], key[0, :, row]))
        right.append(torch.equal(cache.values[0][block, :, token], value[0, :, row]))
        right.append(torch.equal(cache.keys[1][block, token], torch.cat((latent, rope), -1)[0, 0, row]))
    written = sum(int((page != 0).any(-1).sum()) for page in (cache.keys[0], cache.values[0]))
    right.append(written == 2 * 2 * len(places) and int((cache.keys[1] != 0).any(-1).sum()) == len(places))
    for layer, shape in enumerate((HEADS, LATENT)):
        right.append(len(cache.block_bytes(layer, 1)) == BLOCK_TOKENS * token_bytes(shape, torch.float32))
    right.append(token_bytes(HEADS, torch.bfloat16) == 2 * (8 + 6) * 2)
    return right


def test_rows_lie_where_the_step_says_and_padding_nowhere(interpreter: RankPool) -> None:
    assert all(interpreter.run(write)[0])
