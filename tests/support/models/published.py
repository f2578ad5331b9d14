"""Checkpoints in tests as compressed-tensors, ModelOpt, AutoAWQ, GPTQModel, Quark, MiniMax and DeepSeek publish them.

Each format has an encoder written from its description, which shares no code with the product. It turns a matrix [N, K] into
the tensors of a file, by suffix of their names, and the values they encode. `write_published` writes a family's checkpoint
in a format, with the configuration of such checkpoints, and the same model in float32 in a second directory.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models.families import make_model
from tests.support.models.quantise import E2M1, Quantised, Tensors, quantise_fp8

Encoder = Callable[[Tensor], Quantised]
IGNORED = ("lm_head", "mlp.gate", "embed_tokens")


def by_blocks(weight: Tensor, block: int) -> Tensor:
    """Reshape [N, K] to [N, blocks, block]."""
    return weight.reshape(len(weight), -1, block or weight.shape[-1])


def fp8_channel(weight: Tensor) -> Quantised:
    """Encode as compressed-tensors' FP8 with a bfloat16 scale per output."""
    scales = (weight.abs().amax(-1, keepdim=True) / 448).bfloat16()
    codes = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return Quantised({"weight": codes, "weight_scale": scales}, codes.float() * scales.float())


def with_bound(encode: Encoder) -> Encoder:
    """Add FBGEMM's bound on the row scales, which must be ignored."""

    def encode_both(weight: Tensor) -> Quantised:
        made = encode(weight)
        return Quantised({**made.stored, "input_scale_ub": torch.tensor([1200.0])}, made.meaning)

    return encode_both


def fp8_tensor(scale_name: str = "weight_scale", shape: tuple[int, ...] = ()) -> Encoder:
    """Encode with one float32 scale per matrix. Add an activation scale, which must be ignored."""

    def encode(weight: Tensor) -> Quantised:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        stored = {"weight": codes, scale_name: scale.reshape(shape), "input_scale": torch.tensor(0.37)}
        return Quantised(stored, codes.float() * scale)

    return encode


def fp8_block(weight: Tensor) -> Quantised:
    """Encode as compressed-tensors' FP8 in blocks of 128 x 128."""
    made = quantise_fp8(weight, (128, 128))
    return Quantised({"weight": made.stored[""], "weight_scale": made.stored["_scale_inv"]}, made.meaning)


def fp8_block_of_powers(weight: Tensor) -> Quantised:
    """Encode as DeepSeek-V4 does, with scales that are powers of two."""
    powers = quantise_fp8(weight, (128, 128)).stored["_scale_inv"].log2().ceil().exp2()
    n, k = weight.shape
    wide = powers.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return Quantised({"weight": codes, "scale": powers.to(torch.float8_e8m0fnu)}, codes.float() * wide)


def fp8_four_dimensions(weight: Tensor) -> Quantised:
    """Encode as ModelOpt does, with scales of shape [rows, 1, columns, 1]."""
    made = fp8_block(weight)
    return Quantised(
        {**made.stored, "weight_scale": made.stored["weight_scale"][:, None, :, None]}, made.meaning
    )


def int8_channel(weight: Tensor) -> Quantised:
    """Encode the weights of W8A8."""
    scales = (weight.abs().amax(-1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127)
    return Quantised({"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales.float())


def in_words(numbers: Tensor, bits: int = 4) -> Tensor:
    """Pack unsigned numbers [..., n] into int32, the first in the lowest bits."""
    per_word = 32 // bits
    words = numbers.to(torch.int64).unflatten(-1, (-1, per_word))
    packed = (words << (bits * torch.arange(per_word))).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def packed_integers(block: int, *, bits: int = 4, is_symmetric: bool = True) -> Encoder:
    """Encode as compressed-tensors' pack-quantized: signed numbers stored as unsigned. Zeros are packed over outputs."""

    def encode(weight: Tensor) -> Quantised:
        blocks, half = by_blocks(weight, block), 2 ** (bits - 1)
        if is_symmetric:
            scales, zeros = blocks.abs().amax(-1) / (half - 0.5), torch.zeros(blocks.shape[:2])
        else:
            low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
            scales = (high - low) / (2 * half - 1)
            zeros = (-half - low / scales).round().clamp(-half, half - 1)
        scales = scales.bfloat16()
        codes = (blocks / scales.float()[..., None] + zeros[..., None]).round().clamp(-half, half - 1)
        stored = {
            "weight_packed": in_words(codes.flatten(1) + half, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            stored["weight_zero_point"] = in_words(zeros.T + half, bits).T.contiguous()
        meaning = (codes - zeros[..., None]) * scales.float()[..., None]
        return Quantised(stored, meaning.flatten(1))

    return encode


def e2m1(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the nearest codes, two per byte, and the values they encode."""
    code = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    code = (code + 8 * (values < 0)).to(torch.uint8)
    return (code[..., ::2] | (code[..., 1::2] << 4)).flatten(1), torch.cat((E2M1, -E2M1))[code.long()]


def nvfp4(names: tuple[str, str, str], *, divides: bool) -> Encoder:
    """Encode 16 e2m1 codes per e4m3 scale, and one global float32 scale, which multiplies (ModelOpt) or divides."""

    def encode(weight: Tensor) -> Quantised:
        blocks = by_blocks(weight, 16)
        whole = weight.abs().max() / (448 * 6)
        stored_whole = 1 / whole if divides else whole
        factor = 1 / stored_whole if divides else stored_whole
        scales = (blocks.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        both = scales.float() * factor
        codes, values = e2m1(blocks / both.clamp(min=1e-30)[..., None])
        packed, per_block, second = names
        shape = (1,) if divides else ()
        return Quantised(
            {packed: codes, per_block: scales, second: stored_whole.reshape(shape)},
            (values * both[..., None]).flatten(1),
        )

    return encode


CT_NVFP4 = nvfp4(("weight_packed", "weight_scale", "weight_global_scale"), divides=True)
MODELOPT_NVFP4 = nvfp4(("weight", "weight_scale", "weight_scale_2"), divides=False)


def mx(
    names: tuple[str, str], *, bits: int, code_type: torch.dtype | None = None, scale_type: torch.dtype = torch.uint8
) -> Encoder:  # fmt: skip
    """Encode 32 codes per scale that is a power of two."""

    def encode(weight: Tensor) -> Quantised:
        blocks = by_blocks(weight, 32)
        exponent = blocks.abs().amax(-1).clamp(min=2.0**-100).log2().floor() - (2 if bits == 4 else 8)
        wide = exponent.exp2()[..., None]
        if bits == 4:
            codes, values = e2m1(blocks / wide)
        else:
            codes = (blocks / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
            codes, values = codes.flatten(1), codes.float()
        scales = (exponent + 127).to(torch.uint8).view(scale_type)
        codes = codes if code_type is None else codes.view(code_type)
        return Quantised({names[0]: codes, names[1]: scales}, (values * wide).flatten(1))

    return encode


AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


def around_zeros(weight: Tensor, block: int, bits: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes [N, K], float16 scales [N, B], zeros [N, B] and the values they encode."""
    blocks = by_blocks(weight, block)
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).half()
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1)
    codes = (blocks / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1)
    return (
        codes.flatten(1),
        scales,
        zeros,
        ((codes - zeros[..., None]) * scales.float()[..., None]).flatten(1),
    )


def awq(block: int) -> Encoder:
    """Encode as AutoAWQ's gemm: int32 [K, N / 8]. The eight half bytes hold outputs 0, 2, 4, 6, 1, 3, 5, 7."""

    def encode(weight: Tensor) -> Quantised:
        codes, scales, zeros, meaning = around_zeros(weight, block, 4)

        def words(numbers: Tensor) -> Tensor:
            return in_words(numbers.T.unflatten(-1, (-1, 8))[..., AWQ_COLUMNS].flatten(-2))

        return Quantised(
            {"qweight": words(codes), "qzeros": words(zeros), "scales": scales.T.contiguous()}, meaning
        )

    return encode


def gptq(block: int, *, bits: int = 4, is_v2: bool = False, is_symmetric: bool = False) -> Encoder:
    """Encode as int32 [K / 8, N], packed over inputs. Zeros [B, N / 8] are stored minus one in the first format."""

    def encode(weight: Tensor) -> Quantised:
        middle = 2 ** (bits - 1)
        if is_symmetric:
            blocks = by_blocks(weight, block)
            scales = (blocks.abs().amax(-1) / (middle - 1)).half()
            zeros = torch.full(scales.shape, float(middle))
            wide = scales.float()[..., None]
            signed = (blocks / wide).round().clamp(-middle, middle - 1)
            codes, meaning = (signed + middle).flatten(1), (signed * wide).flatten(1)
        else:
            codes, scales, zeros, meaning = around_zeros(weight, block, bits)
        size = block or weight.shape[1]
        stored = {
            "qweight": in_words(codes, bits).T.contiguous(),
            "qzeros": in_words((zeros - int(not is_v2)).to(torch.int64).T & (2**bits - 1), bits),
            "scales": scales.T.contiguous(),
            "g_idx": (torch.arange(weight.shape[1]) // size).to(torch.int32),
        }
        return Quantised(stored, meaning)

    return encode


class Published(NamedTuple):
    """How a checkpoint is published."""

    experts: Encoder
    attention: Encoder | None  # of all other linear layers; None keeps them float
    config: dict[str, Any]  # quantization_config
    file: dict[str, Any] | None = None  # hf_quant_config.json instead of `config`
    has_head: bool = False  # the output projection is quantised like attention


def groups(
    layout: str, *schemes: tuple[list[str], dict[str, Any]], activations: dict[str, Any] | None = None
) -> dict[str, Any]:  # fmt: skip
    """Return the configuration of compressed-tensors."""
    listed = {
        f"group_{number}": {
            "input_activations": activations, "output_activations": None, "targets": targets,
            "weights": {"actorder": None, "block_structure": None, "dynamic": False, "observer": "minmax", **weights},
        }
        for number, (targets, weights) in enumerate(schemes)
    }  # fmt: skip
    return {
        "config_groups": listed, "format": layout, "global_compression_ratio": None,
        "ignore": ["lm_head", "re:.*mlp.gate$"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.13.0",
    }  # fmt: skip


def weights_of(bits: int, kind: str, strategy: str, size: int | None = None, **more: Any) -> dict[str, Any]:
    """Return one quantisation scheme of compressed-tensors."""
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "group_size": size,
        "symmetric": True,
        **more,
    }


LINEAR = ["Linear"]
PER_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
PRODUCER = {"name": "modelopt", "version": "0.41.0"}
NVFP4_LAYER, FP8_LAYER = {"quant_algo": "NVFP4", "group_size": 16}, {"quant_algo": "FP8"}
MXFP8_INV = mx(("weight", "weight_scale_inv"), bits=8)
PUBLISHED: dict[str, Published] = {
    "compressed-tensors FP8, a scale per output": Published(
        fp8_channel, fp8_channel,
        groups("float-quantized", (LINEAR, weights_of(8, "float", "channel")), activations=PER_TOKEN),
    ),
    "compressed-tensors FP8, a scale per matrix": Published(
        fp8_tensor(shape=(1,)), fp8_tensor(shape=(1,)),
        groups("float-quantized", (LINEAR, weights_of(8, "float", "tensor")), activations=PER_TOKEN),
    ),
    "compressed-tensors FP8 in blocks": Published(
        fp8_block, fp8_block,
        groups("float-quantized", (LINEAR, weights_of(8, "float", "block", block_structure=[128, 128]))),
    ),
    "compressed-tensors int8": Published(
        int8_channel, int8_channel, groups("int-quantized", (LINEAR, weights_of(8, "int", "channel")), activations=PER_TOKEN)
    ),
    "compressed-tensors int4, groups of 32": Published(
        packed_integers(32), None, groups("pack-quantized", (LINEAR, weights_of(4, "int", "group", 32)))
    ),
    "compressed-tensors int4 around zeros": Published(
        packed_integers(128, is_symmetric=False), packed_integers(128, is_symmetric=False),
        groups("pack-quantized", (LINEAR, weights_of(4, "int", "group", 128, symmetric=False))),
    ),
    "compressed-tensors int4, a scale per output": Published(
        packed_integers(0), None, groups("pack-quantized", (LINEAR, weights_of(4, "int", "channel")))
    ),
    "compressed-tensors int8, packed": Published(
        packed_integers(64, bits=8), None, groups("pack-quantized", (LINEAR, weights_of(8, "int", "group", 64)))
    ),
    "compressed-tensors NVFP4": Published(
        CT_NVFP4, CT_NVFP4, groups("nvfp4-pack-quantized", (LINEAR, weights_of(4, "float", "tensor_group", 16)))
    ),
    "compressed-tensors MXFP4": Published(
        mx(("weight_packed", "weight_scale"), bits=4), None,
        groups("mxfp4-pack-quantized", (LINEAR, weights_of(4, "float", "group", 32, scale_dtype="torch.uint8"))),
    ),
    "compressed-tensors MXFP8": Published(
        mx(("weight", "weight_scale"), bits=8), None,
        groups("mxfp8-quantized", (LINEAR, weights_of(8, "float", "group", 32, scale_dtype="torch.uint8"))),
    ),
    "compressed-tensors, int4 experts and FP8": Published(
        packed_integers(32), fp8_channel,
        groups(
            "mixed-precision", (["re:.*self_attn.*"], weights_of(8, "float", "channel")),
            (["re:.*mlp.experts.*"], weights_of(4, "int", "group", 32)),
        ),
    ),
    "ModelOpt FP8": Published(
        fp8_tensor(), fp8_tensor(), {},
        {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.mlp.gate"]},
    ),
    "ModelOpt FP8 in blocks": Published(
        fp8_four_dimensions, None, {},
        {"quant_algo": "FP8_PB_WO", "kv_cache_quant_algo": None, "group_size": 128, "exclude_modules": ["*self_attn*"]},
    ),
    "ModelOpt NVFP4": Published(
        MODELOPT_NVFP4, MODELOPT_NVFP4,
        {
            "ignore": ["lm_head", "model.layers.*.mlp.gate"], "quant_algo": "NVFP4", "producer": PRODUCER,
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "quant_method": "modelopt",
            "config_groups": {"group_0": {
                "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}, "targets": LINEAR,
            }},
        },
    ),
    "ModelOpt, NVFP4 experts and FP8": Published(
        MODELOPT_NVFP4, fp8_tensor(), {},
        {
            "quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None,
            "quantized_layers": {
                "model.layers.0.self_attn.q_proj": FP8_LAYER, "model.layers.0.mlp.experts": NVFP4_LAYER,
                "lm_head": FP8_LAYER,
            },
        },
        has_head=True,
    ),
    "AWQ": Published(
        awq(128), awq(128),
        {
            "bits": 4, "group_size": 128, "modules_to_not_convert": ["mlp.gate"], "quant_method": "awq",
            "version": "gemm", "zero_point": True,
        },
    ),
    "GPTQ": Published(
        gptq(128), gptq(128),
        {"bits": 4, "group_size": 128, "desc_act": False, "quant_method": "gptq", "sym": False},
    ),
    "GPTQ's second format, symmetric": Published(
        gptq(32, is_v2=True, is_symmetric=True), None,
        {
            "bits": 4, "checkpoint_format": "gptq_v2", "desc_act": False, "dynamic": {"-:.*self_attn.*": {}},
            "group_size": 32, "lm_head": False, "quant_method": "gptq", "sym": True,
        },
    ),
    "GPTQ of eight bits": Published(
        gptq(0, bits=8, is_symmetric=True), None,
        {"bits": 8, "group_size": -1, "desc_act": True, "quant_method": "gptq", "sym": True},
    ),
    "AutoRound": Published(
        gptq(128, is_symmetric=True), None,
        {
            "autoround_version": "0.7.1", "bits": 4, "block_name_to_quantize": "model.layers", "data_type": "int",
            "extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}}, "group_size": 128,
            "packing_format": "auto_round:auto_gptq", "quant_method": "auto-round", "sym": True,
        },
    ),
    "FBGEMM FP8": Published(
        with_bound(fp8_channel), with_bound(fp8_channel),
        {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8"},
    ),
    "SGLang W8A8 int8": Published(
        int8_channel, int8_channel, {"activation_scheme": "dynamic", "quant_method": "w8a8_int8"},
    ),
    "MXFP8": Published(
        MXFP8_INV, MXFP8_INV,
        {
            "activation_scheme": "dynamic", "fmt": "e4m3", "ignored_layers": ["lm_head", "model.embed_tokens"],
            "quant_method": "mxfp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32],
        },
    ),
    "FP8, a scale per matrix": Published(
        fp8_tensor("weight_scale_inv"), fp8_tensor("weight_scale_inv"),
        {"activation_scheme": "static", "modules_to_not_convert": ["lm_head"], "quant_method": "fp8", "weight_block_size": None},
    ),
    "FP4 experts and FP8 in blocks": Published(
        mx(("weight", "scale"), bits=4, code_type=torch.int8, scale_type=torch.float8_e8m0fnu), fp8_block_of_powers,
        {
            "activation_scheme": "dynamic", "expert_dtype": "fp4", "fmt": "e4m3", "quant_method": "fp8",
            "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
        },
    ),
    "Quark MXFP4": Published(
        mx(("weight", "weight_scale"), bits=4), None,
        {
            "exclude": ["lm_head", "re:.*self_attn.*"], "export": {"weight_format": "real_quantized"}, "quant_method": "quark",
            "global_quant_config": {
                "input_tensors": {"dtype": "fp4", "is_dynamic": True},
                "weight": {
                    "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0",
                },
            },
            "layer_quant_config": {},
        },
    ),
}  # fmt: skip


def write_published(name: str, directory: Path, family: str = "qwen3_moe", **settings: Any) -> Path:
    """Write a family's checkpoint in the format PUBLISHED[name].

    Returns:
        The directory next to it with the decoded weights in float32.
    """
    published, meant = PUBLISHED[name], directory.with_name(f"{directory.name}-meant")
    make_model(family, **settings).save_pretrained(meant)
    tensors: Tensors = {}
    meanings: Tensors = {}
    for full, tensor in load_file(meant / "model.safetensors").items():
        encode = published.experts if ".experts." in full else published.attention
        module = full.removesuffix(".weight")
        is_ignored = module.endswith(IGNORED) and not (published.has_head and module == "lm_head")
        if encode is None or tensor.dim() != 2 or is_ignored:
            tensors[full] = meanings[full] = tensor
            continue
        made = encode(tensor)
        tensors |= {f"{module}.{end}": part.contiguous() for end, part in made.stored.items()}
        meanings[full] = made.meaning.contiguous()
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    save_file(meanings, meant / "model.safetensors", {"format": "pt"})
    config = json.loads((meant / "config.json").read_text())
    if published.config:
        config["quantization_config"] = published.config
    if published.file:
        content = {"producer": PRODUCER, "quantization": published.file}
        (directory / "hf_quant_config.json").write_text(json.dumps(content))
    (directory / "config.json").write_text(json.dumps(config))
    return meant
