"""How decode cuts contexts on GPUs: in Triton's interpreter, and on a GPU if there is one."""

import random
from collections import Counter
from typing import Any

import torch

from tests.fixtures import OnDevice

TILE = 32
UNEVEN = [0, 1, 700, 32, 4096, 33, 2048, 250, 65]


def make_cuts(
    *, programs: int = 4, turns: int = 4, of_split: int = 4, value_dim: int = 128, multiprocessors: int = 132,
    is_invariant: bool = False, window: int = 0,
) -> Any:  # fmt: skip
    """Return the cuts on a GPU, by default an H200 with its multiprocessors."""
    from attention.gpu.splits import DecodeScratch  # noqa: PLC0415 - in the interpreter

    scratch = DecodeScratch(
        max_sequences=256, heads=8, value_dim=value_dim, max_tokens=32768, device=torch.device("meta"),
        is_invariant=is_invariant,
    )  # fmt: skip
    scratch.multiprocessors = multiprocessors
    cuts = scratch.cuts(TILE, programs, turns, of_split, window)
    scratch.check(256, 8, value_dim, cuts)
    return cuts


def cut(device: str, contexts: list[int], *, window: int = 0, **options: Any) -> list[tuple[int, ...]]:
    """Return the splits."""
    from tests.support.gpu.split_lists import splits_found  # noqa: PLC0415 - in the interpreter

    cuts = make_cuts(window=window, **options)
    found = splits_found(contexts, cuts, device, tile=TILE, window=window)
    assert len(found) <= cuts.most_parts(len(contexts))
    return found


def count(device: str, contexts: list[int], **options: Any) -> list[int]:
    """Return the numbers of splits."""
    from tests.support.gpu.split_lists import splits_counted  # noqa: PLC0415 - in the interpreter

    cuts = make_cuts(**options)
    counts = splits_counted(contexts, cuts, device, tile=TILE)
    assert sum(counts) <= cuts.most_parts(len(contexts))
    return counts


def check_cover(contexts: list[int], found: list[tuple[int, ...]], window: int = 0) -> None:
    """Every token seen is in one split, splits are in order and begin with a tile, and differ by a tile at most."""
    counts = Counter(sequence for sequence, *_ in found)
    at, lengths = 0, list[int]()
    for number, (sequence, has_parts, begin, stop) in enumerate(found):
        end = contexts[sequence]
        is_first = number == 0 or found[number - 1][0] != sequence
        at = max(end - window, 0) // TILE * TILE if window and is_first else 0 if is_first else at
        assert begin == at and begin % TILE == 0 and (stop > begin or end == 0), (sequence, begin, stop)
        assert bool(has_parts) == (counts[sequence] > 1)
        lengths = [] if is_first else lengths
        lengths.append(-(-(stop - begin) // TILE))
        assert max(lengths) - min(lengths) <= 1
        assert (number + 1 < len(found) and found[number + 1][0] == sequence) or stop == end
        at = stop
    assert [sequence for sequence, *_ in found] == sorted(counts.elements())
    assert set(counts) >= {sequence for sequence, context in enumerate(contexts) if context}


def cover(device: str) -> None:
    small = {"multiprocessors": 3}  # few splits, for the interpreter
    options: list[dict[str, Any]] = [
        small,
        {"is_invariant": True, "value_dim": 512},
        small | {"turns": 1, "value_dim": 512},
    ]
    for own in [*options, small | {"window": 1000}]:
        check_cover(UNEVEN, cut(device, UNEVEN, **own), own.get("window", 0))
    check_cover([5, 40], cut(device, [5, 40], window=30), 30)
    check_cover([8191] * 3, cut(device, [8191] * 3, multiprocessors=2))
    assert not cut(device, [0, 0])


def test_splits_cover_every_context_evenly(on_device: OnDevice) -> None:
    on_device(cover)


QWEN3 = {"of_split": 4}
GEMMA = {"of_split": 8, "programs": 2}
LATENTS = {"of_split": 2, "programs": 1, "value_dim": 512}
MEASURED: list[tuple[dict[str, int], int, int, int]] = [
    # Shape, sequences, tokens of each, tokens of a split.
    (QWEN3, 1, 2048, 64),
    (QWEN3, 8, 2048, 256),
    (QWEN3, 256, 2048, 2048),
    ({"of_split": 8}, 1, 8192, 256),
    (GEMMA, 1, 8192, 256),
    (LATENTS, 1, 8192, 128),
    (LATENTS, 8, 2048, 256),
    (LATENTS, 8, 8192, 1024),
    (LATENTS, 128, 8192, 8192),
]


def choose(device: str) -> None:
    for shape, sequences, tokens, expected in MEASURED:
        counts = count(device, [tokens] * sequences, **shape)
        assert counts == [tokens // expected] * sequences, (shape, sequences, tokens)


def test_equal_contexts_have_the_splits_that_were_fastest_on_an_h200(on_device: OnDevice) -> None:
    on_device(choose)


def spread(device: str) -> None:
    generator = random.Random(0)
    contexts = [generator.randint(1, 4096) for _ in range(256)]
    ends = {}
    for turns in (1, 4):
        work, number = [0.0] * 132, 0
        for tokens, splits in zip(contexts, count(device, contexts, turns=turns, **QWEN3), strict=True):
            for _ in range(splits):
                work[number % 132] += tokens / splits
                number += 1
        ends[turns] = max(work)
    assert ends[4] < 1.3 * sum(contexts) / 132 < ends[1]
    long, *others = count(device, [20000, *[100] * 60], **LATENTS)
    assert long > 20 and set(others) == {1}, "one long context among short ones is spread"


def test_uneven_contexts_are_cut_so_that_programs_have_even_work(on_device: OnDevice) -> None:
    on_device(spread)
