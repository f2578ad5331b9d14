"""Models of published shapes with random weights: configurations, our engine with them, and transformers' with the same.

Only a configuration is written to disk. The weights (60 GB) are drawn on the device, by name, so that our engine and
transformers hold equal ones. Shapes are those of the published config.json files (Qwen3-30B-A3B and gpt-oss-20b of 2025,
DeepSeek-V3 of 2024, Qwen3-Next and DeepSeek-V3.2 of 2025), and tiny replacements. DeepSeek-V3 is cut to four layers (one dense,
three of 256 experts, 68 GB in bfloat16). DeepSeek-V3.2 has 32 experts per layer, and its index chooses 32 tokens, so that short
prompts have a choice.

Legend of names: qwen3 (Qwen3-30B-A3B), gpt-oss (20b), deepseek (V3, cut), qwen3-next (80B-A3B: three of four layers are
recurrent), deepseek-v32 (a sparse index). gpt-oss-mxfp4 and deepseek-fp8 have the published formats of weights.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV32Config,
    GptOssConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.interpreter import patch_once
from benchmarks.gpu.results import Setting
from moe.load.random_checkpoint import RandomCheckpoint
from scheduler.policy.config import EngineConfig
from scheduler.policy.request import Request, SamplingParams
from scheduler.policy.sequence import Sequence as Served


class AttentionShape(NamedTuple):
    """Attention heads of one layer."""

    heads: int
    kv_heads: int
    dim: int  # of a key
    window: int = 0
    has_sinks: bool = False
    value_dim: int = 0  # of a value; 0 if it is that of a key

    @property
    def values(self) -> int:
        """Return the dim of a value."""
        return self.value_dim or self.dim


class LatentShape(NamedTuple):
    """Multi-head latent attention: heads, latent and rotary dims."""

    heads: int
    latent: int
    rope: int
    scale: float


class ExpertShape(NamedTuple):
    """One rank's slots of one layer: gate_up is [2 * inner, hidden] per slot, down [hidden, inner]."""

    slots: int
    hidden: int
    inner: int
    gate: str
    has_bias: bool = False
    form: str = "plain"  # storage format of weights: plain, or a name from `expert_calls`


QWEN3 = AttentionShape(32, 4, 128)
GPT_OSS = AttentionShape(64, 8, 64, has_sinks=True)
GPT_OSS_WINDOW = GPT_OSS._replace(window=128)
GEMMA = AttentionShape(16, 8, 256)  # Gemma 2 9B
DEEPSEEK_EXPANDED = AttentionShape(128, 128, 192, value_dim=128)
DEEPSEEK = LatentShape(128, 512, 64, (128 + 64) ** -0.5)
TINY_ATTENTION = AttentionShape(4, 2, 16)
TINY_SINKS = AttentionShape(4, 2, 16, window=5, has_sinks=True)
TINY_LATENT = LatentShape(4, 32, 16, 0.2)

QWEN3_EXPERTS = ExpertShape(128, 2048, 768, "silu")
GPT_OSS_EXPERTS = ExpertShape(32, 2880, 2880, "swiglu_oai", has_bias=True)
GPT_OSS_MXFP4 = GPT_OSS_EXPERTS._replace(form="mxfp4")
DEEPSEEK_EXPERTS = ExpertShape(32, 7168, 2048, "silu", form="fp8")
KIMI_EXPERTS = ExpertShape(12, 7168, 2048, "silu", form="int4")  # K2.5 on one of 32 ranks
EXPERTS = {
    "qwen3": QWEN3_EXPERTS,
    "gpt-oss": GPT_OSS_EXPERTS,
    "gpt-oss mxfp4": GPT_OSS_MXFP4,
    "deepseek fp8": DEEPSEEK_EXPERTS,
    "deepseek nvfp4": DEEPSEEK_EXPERTS._replace(form="nvfp4"),
    "kimi int4": KIMI_EXPERTS,
}
TINY_EXPERTS = ExpertShape(4, 64, 32, "silu")
TINY_BIASED = ExpertShape(3, 32, 48, "swiglu_oai", has_bias=True)
SMALL_QUANTISED = ExpertShape(8, 2048, 768, "silu")  # in any form
TINY_QUANTISED = ExpertShape(2, 256, 32, "silu")
TINY_FP8 = ExpertShape(2, 256, 128, "silu", form="fp8")


MODELS = ("qwen3", "gpt-oss", "deepseek")  # timed and checked
QUANTISED: dict[str, dict[str, Any]] = {  # the published quantization_config, by name; timed
    "gpt-oss-mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    },
    "deepseek-fp8": {
        "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic",
    },
}  # fmt: skip
HYBRID, SPARSE = "qwen3-next", "deepseek-v32"
OTHER_ATTENTION = (HYBRID, SPARSE)  # checked
POSITIONS = 40960
_GIB = 1 << 30
_MOST_CACHE_BYTES = 60 * _GIB
_STEP_BYTES = 6 * _GIB  # for steps and graphs


def timed_models(setting: Setting) -> tuple[str, ...]:
    """Return the names of the timed models. With tiny shapes, quantised models replace the same plain ones."""
    return ("qwen3", *QUANTISED) if setting.is_tiny else (*MODELS, *QUANTISED)


def config_of(name: str, setting: Setting, *, layers: int | None = None) -> PreTrainedConfig:
    """Return a model's configuration, cut to `layers` layers if given."""
    plain = name.rpartition("-")[0] if name in QUANTISED else name
    config = _tiny(plain, layers or 2) if setting.is_tiny else _real(plain, layers)
    if name in QUANTISED:
        config.quantization_config = QUANTISED[name]
    return config


@contextmanager
def engine_config(
    config: PreTrainedConfig, setting: Setting, *, max_num_seqs: int, max_model_len: int, **options: Any
) -> Iterator[EngineConfig]:
    """Yield settings of one rank for a model with random weights; its folder exists as long as the context.

    Unless `kv_cache_bytes` is given, the KV cache takes what the weights leave of the device's memory, up to 60 GiB.
    """
    if setting.is_interpreted:
        patch_once()
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        yield EngineConfig(
            directory=Path(folder),
            device=setting.device,
            load_format="dummy",
            kv_cache_bytes=options.pop("kv_cache_bytes", None) or _cache_bytes(config, setting),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            **options,
        )


def transformers_model(config: PreTrainedConfig, bench: Bench, dtype: torch.dtype | None = None) -> Any:
    """Build transformers' model on the device, with the weights that our engine draws there."""
    with torch.device(bench.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype or bench.dtype).eval()
    checkpoint = RandomCheckpoint(Path("."), model, device=bench.device, dtype=bench.dtype)
    own = model.state_dict()
    with torch.no_grad():
        for name in checkpoint.names():
            if own[name].dim() == 3 and ".experts." in name:  # one expert at a time
                for row, part in enumerate(own[name]):
                    part.copy_(checkpoint.read_row(name, row)[0])
            else:
                own[name].copy_(checkpoint.read(name))
    return model


def _cache_bytes(config: PreTrainedConfig, setting: Setting) -> int:
    if setting.is_tiny:
        return _GIB
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).parameters()
    free_bytes, _total = torch.cuda.mem_get_info()
    left: int = free_bytes - sum(each.numel() for each in weights) * 2 - _STEP_BYTES
    return max(_GIB, min(_MOST_CACHE_BYTES, left))


def _real(name: str, layers: int | None) -> PreTrainedConfig:
    common: dict[str, Any] = {"max_position_embeddings": POSITIONS, "eos_token_id": None}
    if name == "qwen3":
        return Qwen3MoeConfig(
            vocab_size=151936, hidden_size=2048, num_hidden_layers=layers or 48, num_attention_heads=32, num_key_value_heads=4,
            head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, intermediate_size=6144,
            norm_topk_prob=True, tie_word_embeddings=False, **common,
        )  # fmt: skip
    if name == "gpt-oss":
        return GptOssConfig(
            vocab_size=201088, hidden_size=2880, num_hidden_layers=layers or 24, num_attention_heads=64, num_key_value_heads=8,
            head_dim=64, num_local_experts=32, num_experts_per_tok=4, intermediate_size=2880, sliding_window=128, **common,
        )  # fmt: skip
    if name == HYBRID:
        return Qwen3NextConfig(num_hidden_layers=layers or 48, **common)
    if name == SPARSE:
        return DeepseekV32Config(
            num_hidden_layers=layers or 4,
            first_k_dense_replace=1,
            n_routed_experts=32,
            index_topk=32,
            **common,
        )
    assert name == "deepseek", f"no model is called {name}"
    return DeepseekV3Config(
        num_hidden_layers=layers or 4, first_k_dense_replace=1, num_nextn_predict_layers=0, **common
    )


def _tiny(name: str, layers: int) -> PreTrainedConfig:
    common: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4,
        "max_position_embeddings": 512, "eos_token_id": None, "num_experts_per_tok": 2,
    }  # fmt: skip
    if name == "qwen3":
        return Qwen3MoeConfig(
            num_key_value_heads=2, head_dim=16, num_experts=4, moe_intermediate_size=32, intermediate_size=64,
            norm_topk_prob=True, **common,
        )  # fmt: skip
    if name == "gpt-oss":
        return GptOssConfig(
            num_key_value_heads=2, head_dim=16, num_local_experts=4, intermediate_size=32, sliding_window=8, **common
        )  # fmt: skip
    if name == HYBRID:
        return Qwen3NextConfig(
            num_key_value_heads=2, head_dim=16, num_experts=4, moe_intermediate_size=32, intermediate_size=64,
            shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4,
            linear_key_head_dim=16, linear_value_head_dim=16, **common,
        )  # fmt: skip
    latent: dict[str, Any] = {
        "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 32, "intermediate_size": 64, "q_lora_rank": 24, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, **common,
    }  # fmt: skip
    if name == SPARSE:
        return DeepseekV32Config(head_dim=16, index_topk=8, index_head_dim=16, index_n_heads=16, **latent)
    return DeepseekV3Config(num_nextn_predict_layers=0, **latent)


def sequence_of(ids: Sequence[int], blocks: Sequence[int], params: SamplingParams) -> Served:
    """Return a sequence of prompt tokens on given blocks."""
    request = Request(
        request_id=f"{blocks[0]}" if blocks else "alone", prompt_ids=tuple(ids), params=params, arrival_s=0.0
    )
    sequence = Served.from_request(request)
    sequence.block_ids = list(blocks)
    return sequence


class Silent:
    """Doorbell of a single rank."""

    def ring(self, step: int) -> None:
        """Do nothing: no rank sleeps."""

    def wait(self, step: int) -> None:
        """Do nothing: the rank never sleeps."""
