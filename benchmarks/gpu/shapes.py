"""The shapes of the models that a day measures, as their published config.json files have them, and tiny stand-ins.

Qwen3-30B-A3B (Qwen, 2025), gpt-oss-20b (OpenAI, 2025), DeepSeek-V3 (DeepSeek, 2024; one of 8 ranks' slots).
"""

from typing import NamedTuple


class AttentionShape(NamedTuple):
    """Heads of one layer."""

    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    has_sinks: bool = False


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
    form: str = "plain"  # how weights are stored: plain, fp8, mxfp4


QWEN3 = AttentionShape(32, 4, 128)
GPT_OSS = AttentionShape(64, 8, 64, has_sinks=True)
GPT_OSS_WINDOW = GPT_OSS._replace(window=128)
DEEPSEEK = LatentShape(128, 512, 64, (128 + 64) ** -0.5)
TINY_ATTENTION = AttentionShape(4, 2, 16)
TINY_SINKS = AttentionShape(4, 2, 16, window=5, has_sinks=True)
TINY_LATENT = LatentShape(4, 32, 16, 0.2)

QWEN3_EXPERTS = ExpertShape(128, 2048, 768, "silu")
GPT_OSS_EXPERTS = ExpertShape(32, 2880, 2880, "swiglu_oai", has_bias=True)
GPT_OSS_MXFP4 = GPT_OSS_EXPERTS._replace(form="mxfp4")
DEEPSEEK_EXPERTS = ExpertShape(32, 7168, 2048, "silu", form="fp8")
EXPERTS = {
    "qwen3": QWEN3_EXPERTS,
    "gpt-oss": GPT_OSS_EXPERTS,
    "gpt-oss mxfp4": GPT_OSS_MXFP4,
    "deepseek fp8": DEEPSEEK_EXPERTS,
}
TINY_EXPERTS = ExpertShape(4, 64, 32, "silu")
TINY_BIASED = ExpertShape(3, 32, 48, "swiglu_oai", has_bias=True)
TINY_FP8 = ExpertShape(2, 128, 128, "silu", form="fp8")
TINY_MXFP4 = ExpertShape(2, 64, 32, "silu", form="mxfp4")
