"""Published figures of other deployments, the roofline's prediction for each, and the error.

Model, devices, rows of a rank, context, formats and overlap are those in the source; if the source omits one, the note gives
the assumption. The shares of `roofline` are the same for all figures. One of them (`whole`) was fitted to the two figures
with `is_asked`; no other share was fitted to a figure.
The balance is `estimate.balancedness` for the deployment's slots, or 1 if the source made routing even.
"""

import statistics
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple

from server.tools.size.costs.device_table import DEVICES
from server.tools.size.costs.estimate import balancedness
from server.tools.size.costs.model_costs import ModelCosts
from server.tools.size.costs.read_model import read_config_values
from server.tools.size.costs.roofline import EngineTraits, Roofline
from server.tools.size.costs.step_times import RankRows

_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_NVFP4 = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    # Of nvidia/DeepSeek-R1-0528-FP4-v2: attention except its output projection is not quantised; the engines then use FP8.
    "ignore": ["*.q_a_proj", "*.q_b_proj", "*.kv_a_proj_with_mqa", "*.kv_b_proj", "lm_head"],
}
_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "n_group": 8,
    "topk_group": 4, "first_k_dense_replace": 3, "max_position_embeddings": 163840, "dtype": "bfloat16",
}  # fmt: skip
_QWEN3_235B: dict[str, Any] = {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 151936, "hidden_size": 4096,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "max_position_embeddings": 40960, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
# Values from the models' config.json on the hub.
MODELS: Mapping[str, Mapping[str, Any]] = {
    "deepseek-v3": {**_DEEPSEEK_V3, "quantization_config": _FP8},
    "deepseek-v3-nvfp4": {**_DEEPSEEK_V3, "quantization_config": _NVFP4},
    "kimi-k2": {
        **_DEEPSEEK_V3, "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "vocab_size": 163840, "max_position_embeddings": 131072,
        "quantization_config": _FP8,
    },
    "qwen3-235b": _QWEN3_235B,
    "qwen3-235b-fp8": {**_QWEN3_235B, "quantization_config": _FP8},
    "gpt-oss-120b": {
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "dtype": "bfloat16",
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        },
    },
}  # fmt: skip

_FP8_ROW, _FP4_ROW = 1 + 4 / 128, 0.5 + 1 / 16  # including scales
_DECODE = EngineTraits("low-latency DeepEP", True, True, _FP8_ROW, 2, 2, "choice", "choice")
_PREFILL = EngineTraits("normal DeepEP", True, True, _FP8_ROW, 2, 2, "node", "node")
_NVL72 = _DECODE._replace(name="DeepEP over NVLink", overlaps=False)
_NVL72_FP4 = _NVL72._replace(name="DeepEP over NVLink, FP4 rows, FP8 KV", row_bytes=_FP4_ROW, kv_bytes=1)
_NVL72_PREFILL = _PREFILL._replace(name="normal mode over NVLink", overlaps=False)
_FP4_PREFILL = _NVL72_PREFILL._replace(name="FP4 rows, FP8 KV", row_bytes=_FP4_ROW, kv_bytes=1)
_ONE = EngineTraits("vLLM on one device", True, False, 2, 2, 2, "rank", "rank")
_GPUSTACK = "https://docs.gpustack.ai/latest/performance-lab/gpt-oss-120b/h100"
_SGLANG_96 = "https://lmsys.org/blog/2025-05-05-large-scale-ep/"
_SGLANG_GB200_1 = "https://lmsys.org/blog/2025-06-16-gb200-part-1/"
_SGLANG_GB200 = "https://lmsys.org/blog/2025-09-25-gb200-part-2/"
_DEEPSEEK = "https://github.com/deepseek-ai/open-infra-index/blob/main/202502OpenSourceWeek/day_6_one_more_thing_deepseekV3R1_inference_system_overview.md"
_PROFILE = "https://github.com/deepseek-ai/profile-data"


class Figure(NamedTuple):
    """One published figure: tokens per second and device, output tokens for decode or input tokens for prefill."""

    what: str
    model: str  # key of MODELS
    device: str
    engine: EngineTraits
    num_ranks: int
    slots_per_rank: int
    phase: Literal["decode", "prefill"]
    rows: int  # in a step of a rank
    context: int  # tokens that a decode reads, or tokens of a whole prompt
    published: float
    source: str
    note: str = ""
    is_even: bool = False  # the source made routing even
    is_planned: bool = True  # its placement follows the load
    tokens_per_row: float = 1.0  # less if some drafts are rejected
    prefill_rows: int = 0  # in a decode step
    is_asked: bool = False  # `RateShares.whole` was fitted to it, so it does not count as a prediction


_MTP = "128 requests with one draft each; the source accepts 60 % of the drafts"
FIGURES = (
    Figure("DeepSeek, online, decode", "deepseek-v3", "h800", _DECODE, 144, 2, "decode", 88, 4989, 14800 / 8, _DEEPSEEK,
           "rows computed from 14,800 tokens/s of 8 devices at 21 per user; an average over day and night"),
    Figure("DeepSeek, profile, decode", "deepseek-v3", "h800", _DECODE, 128, 2, "decode", 256, 4096, 18598 / 8, _SGLANG_96,
           _MTP, is_even=True, tokens_per_row=0.8, is_asked=True),
    Figure("DeepSeek, profile, prefill", "deepseek-v3", "h800", _PREFILL, 32, 8, "prefill", 16384, 4096, 62713 / 8, _SGLANG_96,
           f"trace: {_PROFILE}", is_even=True, is_asked=True),
    Figure("SGLang, decode", "deepseek-v3", "h100", _DECODE, 72, 4, "decode", 256, 2050, 22282 / 8, _SGLANG_96),
    Figure("SGLang, decode, simulated MTP", "deepseek-v3", "h100", _DECODE, 72, 4, "decode", 256, 4000, 17373 / 8, _SGLANG_96,
           _MTP, tokens_per_row=0.8),
    Figure("SGLang, prefill of 1k", "deepseek-v3", "h100", _PREFILL, 32, 9, "prefill", 16384, 1024, 57674 / 8, _SGLANG_96),
    Figure("SGLang, prefill of 4k", "deepseek-v3", "h100", _PREFILL, 32, 9, "prefill", 16384, 4096, 50302 / 8, _SGLANG_96),
    Figure("SGLang, prefill of 4k, even", "deepseek-v3", "h100", _PREFILL, 32, 9, "prefill", 16384, 4096, 59337 / 8, _SGLANG_96,
           is_even=True),
    Figure("SGLang, Kimi K2, decode", "kimi-k2", "h200", _DECODE, 96, 5, "decode", 480, 2050, 24000 / 8,
           "https://lmsys.org/blog/2025-07-17-k2-large-scale-ep/", "from its table by node; its cluster total is a third higher"),
    Figure("SGLang, Kimi K2, prefill", "kimi-k2", "h200", _PREFILL, 32, 13, "prefill", 16384, 2000, 56000 / 8,
           "https://lmsys.org/blog/2025-07-17-k2-large-scale-ep/", "rows and slots as in SGLang's DeepSeek figures"),
    Figure("vLLM, gpt-oss-120b, mixed", "gpt-oss-120b", "h100", _ONE, 1, 128, "decode", 21, 4100, 678, _GPUSTACK,
           "14,247 tokens/s, of which 200 in 4,200 are output; rows computed from these and 31.7 ms per token", prefill_rows=430),
    Figure("llm-d and vLLM, decode", "deepseek-v3", "h200", _DECODE, 16, 16, "decode", 128, 3000, 1741,
           "https://github.com/llm-d/llm-d/tree/main/guides/wide-ep-lws/experimental-dp-aware", "2,048 users on 16 devices, 2k in and out; no EPLB",
           is_planned=False),
    Figure("SGLang, GB200 part I, decode", "deepseek-v3", "gb200", _NVL72, 48, 6, "decode", 768, 2050, 7583, _SGLANG_GB200_1,
           "half the rows of part II, which has a KV cache of half the bytes"),
    Figure("SGLang, GB200 part II, decode", "deepseek-v3", "gb200", _NVL72, 48, 6, "decode", 768, 2050, 9087, _SGLANG_GB200,
           "FP8 experts, bfloat16 attention; rows as above"),
    Figure("SGLang, GB200, decode, FP4", "deepseek-v3-nvfp4", "gb200", _NVL72_FP4, 48, 6, "decode", 1408, 2050, 13386, _SGLANG_GB200),
    Figure("SGLang, GB200, prefill", "deepseek-v3", "gb200", _NVL72_PREFILL, 4, 72, "prefill", 16384, 2000, 18471, _SGLANG_GB200,
           "the source does not give the rows of a step"),
    Figure("SGLang, GB200, prefill, FP4", "deepseek-v3-nvfp4", "gb200", _FP4_PREFILL, 2, 144, "prefill", 16384, 2000, 26156,
           _SGLANG_GB200, "the source does not give the rows of a step"),
    Figure("vLLM, GB200, prefill, FP4", "deepseek-v3-nvfp4", "gb200", _FP4_PREFILL, 2, 128, "prefill", 32768, 2000, 26200,
           "https://blog.vllm.ai/2026/02/03/dsr1-gb200-part1.html", "according to the source, 64k tokens saturate two devices", is_planned=False),
    Figure("vLLM, GB300, prefill, FP4", "deepseek-v3-nvfp4", "gb300", _FP4_PREFILL, 2, 128, "prefill", 32768, 2000, 22476,
           "https://blog.vllm.ai/2026/02/13/gb300-deepseek.html", is_planned=False),
)  # fmt: skip


class Compared(NamedTuple):
    """A figure and its prediction."""

    figure: Figure
    balance: float
    predicted: float  # tokens per second and device

    @property
    def error(self) -> float:
        """Return the relative error: predicted over published, minus one."""
        return self.predicted / self.figure.published - 1

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        figure = {**self.figure._asdict(), "engine": self.figure.engine._asdict()}
        return {**figure, "balancedness": self.balance, "foretold": self.predicted, "error": self.error}


@cache
def costs_of(model: str) -> ModelCosts:
    """Return the costs of one of `MODELS`, in bfloat16 for weights that are not quantised."""
    return read_config_values(MODELS[model], float_bytes=2).costs


def compare(figure: Figure, costs: ModelCosts) -> Compared:
    """Return the prediction for a figure."""
    balance = (
        1.0
        if figure.is_even
        else balancedness(
            costs.num_experts, figure.num_ranks, figure.slots_per_rank, is_planned=figure.is_planned
        )
    )
    times = Roofline(costs, DEVICES[figure.device], figure.engine, slots_per_rank=figure.slots_per_rank)
    if figure.phase == "decode":
        of_prompts = figure.prefill_rows * figure.context // 2
        attended = figure.rows * figure.context + of_prompts
        rows = RankRows(figure.prefill_rows, figure.rows, attended, of_prompts)
    else:
        attended = figure.rows * figure.context // 2
        rows = RankRows(figure.rows, 0, attended, attended)
    seconds = times.step([rows] * figure.num_ranks, balance).total_s
    return Compared(figure, balance, figure.rows * figure.tokens_per_row / seconds)


def median_error(compared: list[Compared]) -> float:
    """Return the median of the absolute errors, over figures that no share was fitted to."""
    return statistics.median(abs(each.error) for each in compared if not each.figure.is_asked)
