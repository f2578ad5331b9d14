"""Lists of modules that are not quantised: each tool's rule, and the cost of long lists."""

import re
import time

import pytest

from moe.load.exclusions import Exclusions, Rule
from moe.load.quantisation import Quantisation, UnservedQuantisationError, read_quantisation
from tests.support.models.published import PUBLISHED

LAYER = "model.layers.3"


def transformers_rule(patterns: list[str], module: str) -> bool:
    """Apply `should_convert_module` of transformers 5.23. The oracle."""
    boundary = r"(?:(?<=\.)|(?=\.|$))"
    return any(
        re.match(f"(?:{pattern}){boundary}", module) or module.endswith(pattern) for pattern in patterns
    )


NAMES = [
    "lm_head", "model.embed_tokens", "model", f"{LAYER}.mlp", f"{LAYER}.mlp.gate", f"{LAYER}.mlp.gate_proj",
    f"{LAYER}.mlp.experts.0.gate_proj", f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.indexer.k_norm", "model.layers.30.mlp",
    "model.layers.30.mlp.gate.e_score_correction_bias", "model.norm", "gate", "delegate",
]  # fmt: skip


@pytest.mark.parametrize(
    "patterns",
    [
        [], ["lm_head"], ["gate", "e_score_correction_bias", "lm_head"], [f"{LAYER}.mlp"], [f"{LAYER}.mlp.gate", "model.norm"],
        ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"], ["model"], [r"model\.layers\.\d\.mlp"], ["k_norm"],
        ["layers.3.mlp", ".*gate"],
    ],
    ids=str,
)  # fmt: skip
def test_transformers_rule_is_kept(patterns: list[str]) -> None:
    excluded = Exclusions(patterns, Rule.TRANSFORMERS)
    # "layers.3.mlp" is a layer's name without its stem, which transformers would not find at the start of a name.
    wanted = [f"model.{each}" if each.startswith("layers.") else each for each in patterns]
    assert [name in excluded for name in NAMES] == [transformers_rule(wanted, name) for name in NAMES]


@pytest.mark.parametrize(
    ("rule", "entry", "named", "others"),
    [
        (Rule.WILDCARDS, f"{LAYER}.self_attn*", [f"{LAYER}.self_attn.q_proj"], ["model.layers.30.self_attn.q_proj"]),
        (Rule.WILDCARDS, f"{LAYER}.mlp.gate", [f"{LAYER}.mlp.gate"], [f"{LAYER}.mlp.gate_proj"]),
        (Rule.WILDCARDS, "*.mlp.shared_expert.*", [f"{LAYER}.mlp.shared_expert.up_proj"], [f"{LAYER}.mlp.experts"]),
        (Rule.WILDCARDS, "re:.*self_attn.*", [f"{LAYER}.self_attn.q_proj"], [f"{LAYER}.mlp.gate"]),
        (Rule.WILDCARDS, r"re:.*mlp\.(gate|up)_proj$", [f"{LAYER}.mlp.up_proj"], [f"{LAYER}.mlp.experts.0.up_proj"]),
        (Rule.WILDCARDS, "lm_head", ["lm_head", "language_model.lm_head"], [f"{LAYER}.lm_header"]),
        (Rule.SUBSTRING, "model.layers.60.", ["model.layers.60.mlp.up_proj"], ["model.layers.6.mlp.up_proj"]),
        (Rule.SUBSTRING, "self_attn", [f"{LAYER}.self_attn.q_proj"], [f"{LAYER}.mlp.gate"]),
        (Rule.REGEX, ".*self_attn.*", [f"{LAYER}.self_attn.q_proj"], [f"{LAYER}.mlp.gate"]),
    ],
)  # fmt: skip
def test_every_tool_has_its_rule(rule: Rule, entry: str, named: list[str], others: list[str]) -> None:
    excluded = Exclusions([entry], rule)
    assert all(name in excluded for name in named)
    assert not any(name in excluded for name in others)


@pytest.mark.parametrize(
    ("rule", "end"),
    [
        (Rule.WILDCARDS, "layers.3.self_attn*"), (Rule.WILDCARDS, "layers.3.self_attn.q_proj"), (Rule.WILDCARDS, "layers.*.q_proj"),
        (Rule.SUBSTRING, "layers.3."), (Rule.TRANSFORMERS, "layers.3.self_attn"),
    ],
)  # fmt: skip
def test_a_layer_is_the_same_under_every_stem(rule: Rule, end: str) -> None:
    for stem in ("model.", "language_model.model.", "model.language_model.", "backbone.", ""):
        excluded = Exclusions([f"{stem}{end}"], rule)
        for own in ("model.", "model.language_model."):
            assert f"{own}layers.3.self_attn.q_proj" in excluded, (stem, own)
            assert f"{own}layers.4.mlp.up_proj" not in excluded, (stem, own)
        assert "vision_tower.encoder.layers.4.mlp.up_proj" not in excluded


@pytest.mark.parametrize("method", ["fp8", "modelopt", "compressed-tensors", "awq", "quark"])
def test_a_thousand_entries_are_cheap_for_a_thousand_modules(method: str) -> None:
    """GLM-5-FP8 lists 712 names. Compiled for every weight, these would take about a minute."""
    wild = "*" if method in ("modelopt", "quark") else ""
    entries = tuple(f"model.layers.{number}.input_layernorm{wild}" for number in range(1000))
    found = Quantisation(method=method, formats=(), plain_modules=entries)
    modules = [f"model.layers.{number % 9}.mlp.experts.{number}.up_proj" for number in range(1000)]
    began = time.process_time()
    assert not any(found.leaves_plain(module) for module in modules)
    assert found.leaves_plain("model.layers.999.input_layernorm")
    assert time.process_time() - began < 3


def test_an_expression_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_one = re.compile

    def counting(pattern: str) -> re.Pattern[str]:
        compiled.append(pattern)
        return compile_one(pattern)

    monkeypatch.setattr("moe.load.exclusions.re.compile", counting)
    found = Quantisation(
        method="fp8", formats=(), plain_modules=tuple(f"model.layers.{n}.(mlp|norm)" for n in range(600))
    )
    assert not any(found.leaves_plain(f"model.layers.{number}.self_attn") for number in range(20))
    assert len(compiled) == 600


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("compressed-tensors int4, groups of 32", "model.layers.0.mlp.gate"), ("ModelOpt NVFP4", "model.layers.7.mlp.gate"),
        ("AWQ", "model.layers.0.mlp.gate"), ("GPTQ's second format, symmetric", "model.layers.0.self_attn.q_proj"),
        ("Quark MXFP4", "model.layers.0.self_attn.q_proj"), ("MXFP8", "model.embed_tokens"), ("ModelOpt FP8", "model.layers.1.mlp.gate"),
    ],
)  # fmt: skip
def test_every_kind_of_published_configuration_gives_its_list(name: str, module: str) -> None:
    published = PUBLISHED[name]
    config = published.config or {"quant_method": "modelopt", **(published.file or {})}
    found = read_quantisation(config)
    assert found is not None
    assert found.leaves_plain(module) and not found.leaves_plain("model.layers.0.mlp.experts.0.up_proj")


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head'"),
        ({"quant_method": "fp8", "ignored_layers": ["(x"]}, "ignored_layers = "),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": [3]},
            "exclude_modules = [3]",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["re:("]}, "ignore = "),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"-:(": {}}}, "dynamic = "),
    ],
)
def test_a_list_that_is_none_is_refused(config: dict[str, object], seen: str) -> None:
    with pytest.raises(
        UnservedQuantisationError, match="not a list of names or regular expressions"
    ) as caught:
        read_quantisation(config)
    assert seen in str(caught.value)
