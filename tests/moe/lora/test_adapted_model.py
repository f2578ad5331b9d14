"""Rows with adapters equal the merged model, rows without one keep their bits, and neighbours change nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from moe.expert_weights import SpareSlots
from moe.lora.adapter_config import AdapterError
from moe.lora.adapter_files import read_adapter
from moe.lora.factors import _joined, _Piece
from scheduler.assembly import Assembled
from scheduler.policy.config import ConfigError
from tests.fixtures import PoolOf
from tests.support.engines.serving import build, own_share, request, serve, teacher_forced
from tests.support.engines.versions import version, write_other
from tests.support.models.adapters import FUSED, SINGLE, STACKED, DrawnAdapter, merged, write_adapter
from tests.support.models.families import VOCABULARY, make_model, write_checkpoint
from tests.support.models.greedy import greedy
from tests.support.placement.placements import random_placement

TOLERANCE = 1e-4
STEPS = 12
LENGTHS = (5, 21, 9, 17, 3, 12)
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERYWHERE = (*ATTENTION, "gate", "lm_head", "embed_tokens")
MODULES: dict[str, tuple[str, ...]] = {
    "qwen3_moe": EVERYWHERE,
    "mixtral": EVERYWHERE,
    "gpt_oss": (*ATTENTION, "router", "lm_head"),
    "deepseek_v3": (
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "gate",
    ),
    "qwen3_next": (*ATTENTION, "in_proj_qkvz", "in_proj_ba", "out_proj", "gate_proj", "up_proj", "down_proj", "shared_expert_gate"),
    "nemotron_h": (*ATTENTION, "in_proj", "out_proj"),
    "kimi_linear": ("q_proj", "kv_b_proj", "o_proj", "b_proj", "gate_proj", "up_proj", "down_proj"),
    "granitemoe": ATTENTION,
    "deepseek_v32": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate"),
}  # fmt: skip
SLOW = pytest.mark.slow


class Case(NamedTuple):
    directory: Path
    model: PreTrainedModel
    adapters: list[DrawnAdapter]

    @property
    def paths(self) -> list[Path]:
        return [each.directory for each in self.adapters]


class Answers(NamedTuple):
    """One rank's share."""

    together: list[np.ndarray]  # logits of a batch with several adapters and rows without one
    alone: list[np.ndarray]  # of its sequences, one in each step
    plain: list[np.ndarray]  # without adapters, of a model that takes none
    tokens: dict[str, list[int]]  # greedy, by request


def make_case(
    family: str, root: Path, layouts: Sequence[str] = (FUSED, SINGLE), *, modules: Sequence[str] = (),
    of_model: Mapping[str, Any] | None = None, **how: Any,
) -> Case:  # fmt: skip
    """`of_model`: settings of the model, besides those of its family. `how`: of the adapters."""
    model = make_model(family, **(of_model or {}))
    model.save_pretrained(root / "model")
    adapters = [
        write_adapter(
            root / f"adapter{index}", model, modules=modules or MODULES[family], experts=layout, rank=4 + 13 * index, seed=index,
            use_rslora=index == 1, **how,
        )
        for index, layout in enumerate(layouts)
    ]  # fmt: skip
    return Case(root / "model", model, adapters)


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def place_of(index: int, num_adapters: int) -> int:
    """Return the place of a sequence's adapter, which its number decides."""
    return index % (num_adapters + 1) - 1


def place_all(built: Assembled, paths: Sequence[Path]) -> list[str]:
    """Put adapters at the first places. Return their digests."""
    bank = built.model.adapters
    assert bank is not None
    digests = []
    for place, path in enumerate(paths):
        digests.append(read_adapter(path).digest)
        bank.place(place, bank.load(path, digests[-1], max_rank=64))
    return digests


def answer(directory: Path, paths: Sequence[Path], settings: dict[str, Any]) -> Answers:
    built = build(directory, max_model_len=128, enable_lora=True, max_loras=len(paths), **settings)
    digests = place_all(built, paths)
    own = own_share(list(enumerate(sequences())))
    places = [place_of(index, len(paths)) for index, _ in own]
    together = teacher_forced(built, [each for _, each in own], places)
    alone = [teacher_forced(built, [each], [place])[0] for (_, each), place in zip(own, places, strict=True)]
    waves = [
        [
            replace(
                request(f"{wave}-{index}", prompt, max_tokens=STEPS),
                adapter="" if place < 0 else digests[place],
                adapter_place=place,
            )
            for (index, prompt), place in zip(own, places, strict=True)
        ]
        for wave in range(2)  # the second finds prefixes
    ]
    served = serve(built, *waves)
    unadapted = build(directory, max_model_len=128, **settings)
    plain = teacher_forced(unadapted, [each for _, each in own])
    return Answers(together, alone, plain, served.token_ids)


def check(case: Case, answers: Sequence[Answers]) -> None:
    """Compare all ranks' answers with merged models."""
    models = [case.model, *(merged(case.model, each) for each in case.adapters)]
    for rank, found in enumerate(answers):
        own = list(enumerate(sequences()))[rank :: len(answers)]
        for place_in_share, (index, prompt) in enumerate(own):
            place = place_of(index, len(case.adapters))
            together = found.together[place_in_share]
            assert np.array_equal(together, found.alone[place_in_share]), "neighbours change a row"
            if place < 0:
                assert np.array_equal(together, found.plain[place_in_share]), (
                    "a row without an adapter has other bits"
                )
            with torch.inference_mode():
                wanted = models[place + 1](torch.tensor([prompt])).logits[0].numpy()
            assert np.abs(together - wanted).max() < TOLERANCE, f"sequence {index}, place {place}"
            answer = found.tokens[f"0-{index}"]
            tokens, _ = greedy(models[place + 1], prompt, answer, STEPS)
            assert [*prompt, *answer] == tokens, f"sequence {index}"
            assert found.tokens[f"1-{index}"] == answer, "a cached prefix changes an answer"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return a model with two adapters, for tests that do not change them."""
    return make_case("qwen3_moe", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(each, marks=SLOW) for each in MODULES if each != "qwen3_moe")]
)
def test_one_batch_mixes_adapters_and_plain_rows(family: str, tmp_path: Path) -> None:
    case = make_case(family, tmp_path)
    check(case, [answer(case.directory, case.paths, {})])


def test_adapters_that_leave_embedding_and_head_alone_run_in_one_program(tmp_path: Path) -> None:
    case = make_case("qwen3_moe", tmp_path, modules=ATTENTION)
    check(case, [answer(case.directory, case.paths, {})])


@pytest.mark.parametrize(
    "family", ["qwen3_moe", *(pytest.param(each, marks=SLOW) for each in ("deepseek_v3", "gpt_oss"))]
)
def test_values_of_bfloat16_files_are_exact_in_bfloat16(family: str, tmp_path: Path) -> None:
    case = make_case(family, tmp_path, dtype=torch.bfloat16)
    check(case, [answer(case.directory, case.paths, {"lora_dtype": "bfloat16"})])


@pytest.mark.parametrize(
    ("settings", "size"),
    [({}, 4), ({"lora_dtype": "bfloat16"}, 2), ({"dtype": "bfloat16"}, 2), ({"dtype": "bfloat16", "lora_dtype": "float32"}, 4)],
)  # fmt: skip
def test_the_type_of_the_weights_is_that_of_adapters_unless_another_is_given(
    settings: dict[str, str], size: int, qwen3: Case
) -> None:
    path = qwen3.paths[0]
    bank = build(qwen3.directory, enable_lora=True, max_loras=1, **settings).model.adapters
    assert bank is not None
    loaded = bank.load(path, read_adapter(path).digest, max_rank=64)
    numbers = sum(each.a_KW.numel() + each.b_RN.numel() for each in loaded.linears.values())
    assert sum(each.num_bytes for each in loaded.linears.values()) == size * numbers


def test_a_product_s_parts_may_have_different_scales() -> None:
    pieces = [_Piece(torch.randn(3, 8), torch.randn(6, 3), scale) for scale in (0.5, 2.0)]
    joined = _joined(pieces, torch.float32)
    assert joined is not None
    wanted = sum(each.scale * each.b_NR @ each.a_RK for each in pieces)
    assert torch.allclose(joined.scale * (joined.a_KW[:, :6] @ joined.b_RN).t(), wanted, atol=1e-5)


@SLOW
@pytest.mark.parametrize("layout", [FUSED, SINGLE, STACKED])
def test_experts_of_every_layout(layout: str, tmp_path: Path) -> None:
    case = make_case("qwen3_moe", tmp_path, [layout])
    check(case, [answer(case.directory, case.paths, {})])


@pytest.mark.parametrize(
    ("family", "wire"),
    [
        ("qwen3_moe", "shm"),
        pytest.param("qwen3_moe", "gloo", marks=SLOW),
        *(pytest.param(family, wire, marks=SLOW) for family in ("deepseek_v3", "gpt_oss") for wire in ("shm", "gloo")),
    ],
)  # fmt: skip
def test_the_adapter_travels_with_the_row(family: str, wire: str, pool_of: PoolOf, tmp_path: Path) -> None:
    case = make_case(family, tmp_path)
    check(case, pool_of(2).run(answer, case.directory, case.paths, {"all2all_backend": wire}))


def fp8_bits(directory: Path, paths: Sequence[Path]) -> list[np.ndarray]:
    return answer(directory, paths, {"dispatch_dtype": "fp8"}).together


@SLOW
def test_rows_that_travel_in_fp8_get_the_same_bits_on_one_and_two_ranks(
    pool_of: PoolOf, tmp_path: Path
) -> None:
    case = make_case("qwen3_moe", tmp_path)
    [alone] = pool_of(1).run(fp8_bits, case.directory, case.paths)
    shared = pool_of(2).run(fp8_bits, case.directory, case.paths)
    for index, wanted in enumerate(alone):
        assert np.array_equal(shared[index % 2][index // 2], wanted)


@SLOW
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_base_weights_keep_the_bits_of_plain_rows(quantization: str, tmp_path: Path) -> None:
    case = make_case("qwen3_moe", tmp_path)
    found = answer(case.directory, case.paths, {"quantization": quantization})
    for index, (together, alone, plain) in enumerate(
        zip(found.together, found.alone, found.plain, strict=True)
    ):
        assert np.array_equal(together, alone)
        assert np.array_equal(together, plain) == (place_of(index, 2) < 0)


def test_experts_that_change_their_slots_keep_their_adapters(qwen3: Case) -> None:
    built = build(qwen3.directory, max_model_len=128, enable_lora=True, max_loras=2)
    place_all(built, qwen3.paths)
    model, places = built.model, [place_of(index, 2) for index in range(len(LENGTHS))]
    wanted = teacher_forced(built, sequences(), places)
    before = model.placement
    after = random_placement(before.num_layers, before.num_experts, 1, before.slots_per_rank, seed=3)
    assert not np.array_equal(before.slot_expert, after.slot_expert)
    dispatcher = model.layers[0].dispatcher
    model.hold(after.local(0).tolist(), before.local(0).tolist(), SpareSlots(), 0)
    model.serve(after, 0, dispatcher)
    for found, same in zip(teacher_forced(built, sequences(), places), wanted, strict=True):
        assert np.array_equal(found, same)


def test_adapters_stay_at_their_places_when_the_base_weights_change(qwen3: Case, tmp_path: Path) -> None:
    other = write_other("qwen3_moe", tmp_path / "other")
    settings: dict[str, Any] = {"max_model_len": 128, "enable_lora": True, "max_loras": 3}
    fresh, built = build(other, **settings), build(qwen3.directory, **settings)
    for each in (fresh, built):
        place_all(each, qwen3.paths)
    places = [place_of(index, 2) for index in range(len(LENGTHS))]
    old, wanted = (teacher_forced(each, sequences(), places) for each in (built, fresh))
    bank, parts = built.model.adapters, built.engine.weights._parts
    assert bank is not None and parts is not None
    parts.install(parts.load(version(1, other), lambda: None), None)()
    for found, same, before in zip(teacher_forced(built, sequences(), places), wanted, old, strict=True):
        assert np.array_equal(found, same) and not np.array_equal(found, before)
    assert built.model.adapters is bank, "the bank that follows orders is the model's"
    bank.place(0, None)
    plain = teacher_forced(fresh, sequences()[1:2], [-1])
    assert np.array_equal(teacher_forced(built, sequences()[1:2], [0])[0], plain[0])


def test_an_emptied_place_adds_nothing(qwen3: Case) -> None:
    built = build(qwen3.directory, max_model_len=128, enable_lora=True, max_loras=2)
    wanted = teacher_forced(built, sequences())
    place_all(built, qwen3.paths)
    adapted = teacher_forced(built, sequences(), [1] * len(LENGTHS))
    assert not any(map(np.array_equal, adapted, wanted))
    assert built.model.adapters is not None
    built.model.adapters.place(1, None)
    for found, same in zip(teacher_forced(built, sequences(), [1] * len(LENGTHS)), wanted, strict=True):
        assert np.array_equal(found, same)


def test_an_adapter_that_does_not_fit_is_refused_by_name(qwen3: Case, tmp_path: Path) -> None:
    latent = write_checkpoint("deepseek_v3", tmp_path / "latent")
    built = build(qwen3.directory, max_model_len=64, enable_lora=True, max_loras=1)
    bank = built.model.adapters
    assert bank is not None

    def refusal(path: Path, digest: str = "") -> str:
        with pytest.raises(AdapterError) as caught:
            bank.load(path, digest or read_adapter(path).digest, max_rank=8)
        return str(caught.value)

    other = write_adapter(tmp_path / "other", latent, modules=("kv_b_proj",), experts="").directory
    assert "this model has no model.layers.0.self_attn.kv_b_proj" in refusal(other)
    stranger = write_adapter(tmp_path / "stranger", latent, modules=("q_a_proj",), experts="").directory
    assert "this model has no model.layers.0.self_attn.q_a_proj" in refusal(stranger)
    wide = write_checkpoint("mixtral", tmp_path / "wide")
    misshapen = write_adapter(tmp_path / "misshapen", wide, modules=(), experts=SINGLE, rank=9).directory
    assert "above the limit of 8" in refusal(misshapen)
    fitting = write_adapter(tmp_path / "fitting", qwen3.model, modules=("q_proj",), experts="").directory
    assert "its digest is" in refusal(fitting, "0" * 32)
    assert not bank._loaded, "nothing is half-loaded"


def test_messages_without_room_for_adapters_are_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-lora with 2 GPUs and --all2all-backend deep_ep"):
        build(tmp_path, enable_lora=True, device="cuda:0", rank=0, world_size=2, all2all_backend="deep_ep")


def test_an_adapter_whose_file_has_changed_is_spoiled_when_experts_arrive(tmp_path: Path) -> None:
    case = make_case("qwen3_moe", tmp_path)
    built = build(case.directory, max_model_len=128, enable_lora=True, max_loras=2)
    digests = place_all(built, case.paths)
    bank, model = built.model.adapters, built.model
    assert bank is not None
    spoiled: list[tuple[int, str]] = []
    bank.on_spoiled = lambda place, digest, reason: spoiled.append((place, digest))
    file = case.paths[0] / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes())
    held = model.placement.local(0).tolist()
    fewer = [row[: len(row) // 2] for row in held]
    bank.hold(fewer)  # as on a rank that had half of the experts
    for row, layer in zip(fewer, model.layers, strict=True):
        bank_layer: Any = layer
        assert bank_layer.adapters.num_slots == len(row)
    for adapter in bank._loaded.values():
        adapter.keep_only(set())
    with pytest.raises(AdapterError, match="has changed since it was loaded"):
        bank.arrive(held)
    bank.hold(held)
    assert spoiled == [(0, digests[0])]
    logits = teacher_forced(built, sequences()[:2], [0, -1])
    assert np.isnan(logits[0]).any() and np.isfinite(logits[1]).all()
    bank.place(0, None)
    assert np.isfinite(teacher_forced(built, sequences()[:1], [0])[0]).all()
