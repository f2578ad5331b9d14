"""Drafts change no token after images, and the draft layers see the rows and positions of images."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.cache_utils import MtpCache

from benchmarks.models.foreseeing import foresee
from kvcache.images import Image
from moe.vision.tower import Tower
from scheduler.assembly import Assembled
from scheduler.policy.speculative import parse_speculative_config
from scheduler.step import draft_passes
from tests.scheduler.drafts.test_served_drafts import MTP, NGRAM, SHARE, SUFFIX, always_draft
from tests.scheduler.test_invariance import Answers, collect
from tests.support.engines.serving import build, request, serve
from tests.support.gpu.interpreted import needs_triton
from tests.support.gpu.path import build_interpreted
from tests.support.models.mtp import PUBLISHED, Drafter, Tensors, write_mtp_checkpoint
from tests.support.models.seeing import SeenPrompt, draw_picture, prompt_of, write_seeing_checkpoint
from tests.support.ranks import RankPool

TOLERANCE = 1e-4
STEPS = 24
SETTINGS: tuple[dict[str, Any], ...] = ({}, {"max_num_batched_tokens": 23, "max_num_seqs": 8})


class Case(NamedTuple):
    directory: Path
    prompts: list[SeenPrompt]
    images: list[list[Image]]
    drafter: Drafter | None  # None: the checkpoint has no layers that draft


def write(family: str, directory: Path, change: Callable[[Tensors], Tensors] | None = None) -> Case:
    """Write a checkpoint that takes images.

    Args:
        change: Changes tensors of a checkpoint with layers that draft. None: the checkpoint has none.
    """
    settings = PUBLISHED[family].config if change else {}
    model = write_seeing_checkpoint(family, directory, **settings)
    drafter = write_mtp_checkpoint(family, directory, change=change, model=model) if change else None
    tall, wide, small = (
        draw_picture(*size, seed, model.config) for seed, size in enumerate(((8, 4), (4, 8), (4, 4)))
    )
    prompts = [
        prompt_of([5, wide, 7], 0),
        prompt_of([3, tall, 4, wide, 9], 1),
        prompt_of([small, 2, small, 6], 2),
        prompt_of([21], 3),
        prompt_of([4, tall], 4),
    ]
    tower = Tower(directory)
    return Case(directory, prompts, [prompt.images(tower) for prompt in prompts], drafter)


def answers_of(built: Assembled, case: Case, *, alone: bool = False) -> Answers:
    """Serve all prompts, alone or together; together they run twice, so that the second run hits cached prefixes."""
    asked = [
        request(str(at), prompt.token_ids, images=images, max_tokens=STEPS, stop_token_ids=(), num_logprobs=0)
        for at, (prompt, images) in enumerate(zip(case.prompts, case.images, strict=True))
    ]
    return collect(serve(built, *([[each] for each in asked] if alone else [asked, asked])).outputs)


@pytest.fixture(scope="module", params=["qwen3_vl_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.slow)])
def seen_alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, Answers]:
    """Return a checkpoint without layers that draft, and the answer to every prompt alone."""
    case = write(request.param, tmp_path_factory.mktemp(request.param))
    return case, answers_of(build(case.directory, max_model_len=160), case, alone=True)


@pytest.mark.parametrize(
    ("given", "settings", "knows"),
    [
        (NGRAM, SETTINGS[0], False),
        (NGRAM, SETTINGS[1], True),
        (SUFFIX, SETTINGS[0], True),
        (SUFFIX, SETTINGS[1], False),
    ],
)
def test_drafts_from_texts_change_no_bit_after_images(
    seen_alone: tuple[Case, Answers], given: str, settings: dict[str, Any], knows: bool
) -> None:
    """Any two of the source, the step's size, and drafts that are right come together."""
    case, wanted = seen_alone
    speculative = parse_speculative_config(given)
    built = build(case.directory, max_model_len=160, speculative_config=speculative, **settings)
    always_draft(wanted if knows else None, counts := [0, 0], built)
    assert answers_of(built, case) == wanted
    assert counts[1] > 20 and (not knows or counts[0] > 50)


@pytest.mark.parametrize(
    "settings", [SETTINGS[0], pytest.param(SETTINGS[1], marks=pytest.mark.slow)], ids=["full", "chunks"]
)
def test_drafts_of_own_layers_change_no_bit_after_images(settings: dict[str, Any], tmp_path: Path) -> None:
    case = write("qwen3_5_moe", tmp_path, partial(foresee, share=SHARE))
    wanted = answers_of(build(tmp_path, max_model_len=160), case, alone=True)
    built = build(tmp_path, max_model_len=160, speculative_config=parse_speculative_config(MTP), **settings)
    always_draft(None, counts := [0, 0], built)
    assert answers_of(built, case) == wanted
    assert 30 < counts[0] < counts[1]


class Pass(NamedTuple):
    """A draft of one sequence."""

    depth: int
    position: int  # of the row
    token_id: int  # its input
    logits: np.ndarray


class Drafted(NamedTuple):
    """Tokens of a prompt and its answer, and all drafts."""

    sequence: list[int]
    passes: list[Pass]


def drafts_of(built: Assembled, prompt: list[int], images: list[Image], num_tokens: int = 12) -> Drafted:
    """Serve one prompt."""
    always_draft(None, [0, 0], built)
    found: list[Pass] = []
    draft = built.model.draft

    def recorded(depth: int, token_T: Tensor, cache: Any, rows_R: Tensor, hidden_T: Tensor) -> Tensor:
        logits_RV = draft(depth, token_T, cache, rows_R, hidden_T)
        rows = rows_R.tolist() if built.model.step.num_sequences else []
        positions = built.model.step.positions[rows].tolist()
        parts = zip(positions, token_T[rows].tolist(), logits_RV.numpy().copy(), strict=False)
        found.extend(Pass(depth, *part) for part in parts)
        return logits_RV

    built.model.draft = recorded  # type: ignore[method-assign]
    asked = request("0", prompt, images=images, max_tokens=num_tokens, stop_token_ids=())
    return Drafted(prompt + serve(built, [asked]).token_ids["0"], found)


def drafts_with(directory: Path, prompt: list[int], images: list[Image], **settings: Any) -> Drafted:
    speculative = parse_speculative_config(MTP)
    built = build(directory, max_model_len=160, speculative_config=speculative, **settings)
    return drafts_of(built, prompt, images)


def interpreted_drafts(directory: Path, prompt: list[int], images: list[Image]) -> Drafted:
    """Draft in Triton's interpreter."""
    built = build_interpreted(directory, speculative_config=parse_speculative_config(MTP))
    return drafts_of(built, prompt, images, num_tokens=5)


class Reference:
    """Drafts of `transformers`' layers for a whole sequence, with the embeddings and positions of its whole model."""

    @torch.inference_mode()
    def __init__(self, drafter: Drafter, prompt: SeenPrompt, sequence: Sequence[int]) -> None:
        given: dict[str, Tensor] = {}
        hook = drafter.model.get_decoder().register_forward_pre_hook(
            lambda _module, _inputs, options: given.update(options), with_kwargs=True
        )
        output = drafter.model(**prompt.inputs(sequence), output_hidden_states=True, use_cache=False)
        hook.remove()
        self._mtp, self._axes = drafter.mtp, given["position_ids"][-3:]
        assert self._axes.shape == (3, 1, len(sequence))
        self._inputs = given["inputs_embeds"][:, 1:], output.hidden_states[-1][:, :-1]
        self._embedding = drafter.model.get_input_embeddings()
        hidden = self._run(*self._inputs)
        self.logits: np.ndarray = self._mtp._project_to_logits(hidden)[0].numpy()

    @torch.inference_mode()
    def deeper(self, position: int, token_id: int) -> np.ndarray:
        """Return the logits of the next draft after that of `position` - 1, which has chosen `token_id`."""
        embedded, hidden = (rows[:, :position] for rows in self._inputs)
        last = self._run(embedded, hidden)[:, -1:]
        drafted = self._embedding(torch.tensor([[token_id]]))
        out = self._run(torch.cat((embedded, drafted), 1), torch.cat((hidden, last), 1))
        logits: np.ndarray = self._mtp._project_to_logits(out)[0, -1].numpy()
        return logits

    def _run(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        rows, cache = embedded.shape[1], MtpCache(config=self._mtp.config)
        masks = self._mtp.create_masks_for_mtp_layer(0, embedded, cache, torch.arange(rows)[None])
        angles = self._mtp.rotary_emb(embedded, position_ids=self._axes[:, :, :rows])
        out: Tensor = self._mtp.layers[0](
            embedded, hidden, position_embeddings=angles, position_ids=None, past_key_values=cache, **masks
        )
        return out


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return write("qwen3_5_moe", tmp_path_factory.mktemp("drafting"), lambda tensors: tensors)


def differences(case: Case, at: int, drafted: Drafted) -> list[float]:
    """Return the largest difference of the logits of drafts from the reference, by depth."""
    assert case.drafter is not None
    sequence, passes = drafted
    reference, worst = Reference(case.drafter, case.prompts[at], sequence), list[float]()
    for depth in (0, 1):
        drafts = [each for each in passes if each.depth == depth and each.position < len(sequence) - 1]
        assert len(drafts) > 1, "the engine does not draft"
        wanted = [
            reference.deeper(each.position, each.token_id) if depth else reference.logits[each.position]
            for each in drafts
        ]
        pairs = zip(drafts, wanted, strict=True)
        worst.append(max(float(np.abs(each.logits - logits).max()) for each, logits in pairs))
    return worst


@pytest.mark.crossed("at", "settings", every=2)
@pytest.mark.parametrize("settings", SETTINGS, ids=["full", "chunks"])
@pytest.mark.parametrize("at", [0, 1, pytest.param(4, marks=pytest.mark.slow)])
def test_drafts_after_images_equal_a_whole_sequence_with_them(
    at: int, settings: dict[str, Any], drafting: Case
) -> None:
    prompt, images = drafting.prompts[at].token_ids, drafting.images[at]
    found = drafts_with(drafting.directory, prompt, images, **settings)
    assert max(differences(drafting, at, found)) < TOLERANCE


@pytest.mark.slow
@needs_triton
def test_drafts_on_the_gpu_path_equal_a_whole_sequence_with_images(
    drafting: Case, interpreter: RankPool
) -> None:
    prompt, images = drafting.prompts[0].token_ids, drafting.images[0]
    found = interpreter.run(interpreted_drafts, drafting.directory, prompt, images, timeout_s=400.0)[0]
    assert max(differences(drafting, 0, found)) < TOLERANCE


@pytest.mark.parametrize(("part", "missing"), [("axes_of", None), ("rows_in", ())])
def test_rows_and_positions_of_images_show_in_drafts(
    part: str, missing: Any, drafting: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(draft_passes, part, lambda *_arguments: missing)
    found = drafts_with(drafting.directory, drafting.prompts[1].token_ids, drafting.images[1])
    assert differences(drafting, 1, found)[0] > 100 * TOLERANCE
