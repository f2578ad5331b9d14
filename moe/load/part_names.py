"""Which weight a tensor of a quantised checkpoint belongs to, and as what, by its name. Knows nothing else of it.

Parts are: codes, scales, zeros; factor and divisor, which are second scales; order, the block of every input; shape. A
weight whose codes have its own name (`W` of FP8, beside `W_scale_inv`) is no part by that name.
"""

from collections.abc import Callable

# What belongs to a weight, by the end of its name; of fused experts "gate_up_proj_weight_scale" as well.
_PARTS = {
    "weight_packed": "codes",
    "weight_scale_inv": "scales",
    "weight_scale": "scales",
    "weight_scale_2": "factor",
    "weight_global_scale": "divisor",
    "weight_zero_point": "zeros",
    "weight_g_idx": "order",
    "weight_shape": "shape",
}
_AUTO_PARTS = {"qweight": "codes", "qzeros": "zeros", "scales": "scales", "g_idx": "order"}  # of AWQ and GPTQ
_FP8_PARTS = {"scale": "scales", "qscale_weight": "scales"}  # DeepSeek-V4's and Mistral Large 4's
# Of rows and of keys and values, which are left as they are.
UNREAD = (
    ".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale", ".output_scale", ".qscale_act",
    ".k_scale", ".v_scale", ".kv_scale", ".q_scale", "_input_scale", "_activation_scale",
)  # fmt: skip


def part_of(name: str, method: str, is_small: Callable[[str], bool]) -> tuple[str, str]:
    """Return the weight and the part; "" for a tensor that is a weight itself.

    Args:
        method: quant_method.
        is_small: whether there is a tensor of a name, in a type of eight bits or less.
    """
    base, _, end = name.rpartition(".")
    if method == "mxfp4":
        for suffix, part in (("_blocks", "codes"), ("_scales", "scales")):
            if name.endswith(suffix):
                return name.removesuffix(suffix), part
        return name, ""
    if method in ("awq", "gptq"):
        return (f"{base}.weight", _AUTO_PARTS[end]) if end in _AUTO_PARTS else (name, "")
    if end in _PARTS:
        return f"{base}.weight", _PARTS[end]
    if method in ("fp8", "mxfp8") and end in _FP8_PARTS and is_small(f"{base}.weight"):
        return f"{base}.weight", _FP8_PARTS[end]
    if end.endswith("_scale_inv"):
        return name.removesuffix("_scale_inv"), "scales"
    for suffix, part in _PARTS.items():
        if end.endswith(f"_{suffix}"):
            return name.removesuffix(f"_{suffix}"), part
    return name, ""
