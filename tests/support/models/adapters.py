"""LoRA adapters in PEFT's layouts, written by hand, and models merged with them: the oracle of adapters.

An adapter is drawn together with the change that it means for each parameter, which `merged` adds to a copy of the model. So the
oracle shares no code with the reader.
"""

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

PREFIX = "base_model.model."
FUSED, SINGLE, STACKED = "fused", "single", "stacked"  # layouts of experts
_SPREAD = 0.12  # of values, as of the weights of `families`


@dataclass
class DrawnAdapter:
    """An adapter on disk, and what it adds to the model's parameters."""

    directory: Path
    changes: dict[str, Tensor] = field(default_factory=dict)  # by the parameter's name


def write_adapter(
    directory: Path,
    model: PreTrainedModel,
    *,
    modules: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
    experts: str = FUSED,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> DrawnAdapter:
    """Draw and write an adapter. `dtype` is the type of its tensors.

    Args:
        modules: Ends of the names of adapted modules: linear layers, routers, embeddings.
        experts: Layout of experts, or "" to leave them out.
        settings: Further fields of the configuration.
    """
    drawn, tensors = DrawnAdapter(directory), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(seed)
    scale = alpha / rank**0.5 if settings.get("use_rslora") else alpha / rank

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * _SPREAD).to(dtype).float()

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in modules and hasattr(module, "weight"):
            _adapt_module(drawn, tensors, name, module, draw, rank, scale)
        elif experts and name.endswith(".experts") and hasattr(module, "down_proj"):
            _LAYOUTS[experts](drawn, tensors, name, module, draw, rank, scale)
    fields = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": list(modules),
        "target_parameters": _targeted(model) if experts == FUSED else None,
        "bias": "none", "lora_dropout": 0.0, "init_lora_weights": True, "use_dora": False, "peft_version": "0.21.2", **settings,
    }  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    save_file(
        {PREFIX + name: each.to(dtype).contiguous() for name, each in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    return drawn


def _targeted(model: PreTrainedModel) -> list[str]:
    """Return the ends of the names of the experts' parameters, not in the modules' order."""
    modules = [module for name, module in model.named_modules() if name.endswith(".experts")]
    return [
        "experts.down_proj",
        *{f"experts.{_first(module)}" for module in modules if hasattr(module, "down_proj")},
    ]


def merged(model: PreTrainedModel, adapter: DrawnAdapter) -> PreTrainedModel:
    """Return a copy of a model with an adapter in its weights."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, change in adapter.changes.items():
            twin.get_parameter(name).add_(change)
    return twin


Draw = Callable[..., Tensor]
Tensors = dict[str, Tensor]


def _adapt_module(
    drawn: DrawnAdapter, tensors: Tensors, name: str, module: Any, draw: Draw, rank: int, scale: float
) -> None:
    rows, columns = module.weight.shape
    if isinstance(module, nn.Embedding):
        a, b = draw(rank, rows), draw(columns, rank)
        tensors |= {f"{name}.lora_embedding_A": a, f"{name}.lora_embedding_B": b}
        drawn.changes[f"{name}.weight"] = scale * (b @ a).t()
    else:
        a, b = draw(rank, columns), draw(rows, rank)
        tensors |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
        drawn.changes[f"{name}.weight"] = scale * b @ a


def _first(module: Any) -> str:
    """Return the name of the parameter before the activation."""
    return "gate_up_proj" if module.has_gate else "up_proj"


def _shape(module: Any, leaf: str) -> tuple[int, int, int]:
    """Return the experts, outputs and inputs of a parameter."""
    experts, rows, columns = getattr(module, leaf).shape
    return (experts, columns, rows) if module.is_transposed else (experts, rows, columns)


def _note_experts(drawn: DrawnAdapter, name: str, module: Any, leaf: str, change_ENK: Tensor) -> None:
    change = change_ENK.transpose(1, 2) if module.is_transposed else change_ENK
    key = f"{name}.{leaf}"
    drawn.changes[key] = drawn.changes.get(key, torch.zeros_like(change)) + change


def _fused(
    drawn: DrawnAdapter, tensors: Tensors, name: str, module: Any, draw: Draw, rank: int, scale: float
) -> None:
    for place, leaf in ((f"{name}.base_layer", _first(module)), (name, "down_proj")):
        experts, rows, columns = _shape(module, leaf)
        a, b = draw(rank * experts, columns), draw(rows, rank * experts)
        tensors |= {f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}
        changes = []
        for expert in range(experts):
            of_a = a[expert * rank : (expert + 1) * rank]
            of_b = torch.stack([b[:, each * experts + expert] for each in range(rank)], dim=1)
            changes.append(scale * of_b @ of_a)
        _note_experts(drawn, name, module, leaf, torch.stack(changes))


def _apart(
    drawn: DrawnAdapter, tensors: Tensors, name: str, module: Any, draw: Draw, rank: int, scale: float
) -> None:
    for leaf in ("gate_proj", "up_proj", "down_proj")[not module.has_gate :]:
        parameter = "down_proj" if leaf == "down_proj" else _first(module)
        experts, rows, columns = _shape(module, parameter)
        rows = rows // 2 if parameter == "gate_up_proj" else rows
        changes = []
        for expert in range(experts):
            a, b = draw(rank, columns), draw(rows, rank)
            key = f"{name}.{expert}.{leaf}"
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            changes.append(scale * b @ a)
        _note_experts(drawn, name, module, parameter, _in_place(module, leaf, torch.stack(changes)))


def _stacked(
    drawn: DrawnAdapter, tensors: Tensors, name: str, module: Any, draw: Draw, rank: int, scale: float
) -> None:
    """Share A of w1 and w3, and B of w2."""
    for leaf, end in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        parameter = "down_proj" if leaf == "down_proj" else _first(module)
        experts, rows, columns = _shape(module, parameter)
        rows = rows if leaf == "down_proj" else rows // 2
        of_a, of_b = (experts, 1) if leaf == "down_proj" else (1, experts)
        a, b = draw(of_a, rank, columns), draw(of_b, rows, rank)
        tensors |= {f"{name}.{end}.lora_A.weight": a, f"{name}.{end}.lora_B.weight": b}
        _note_experts(drawn, name, module, parameter, _in_place(module, leaf, scale * b @ a))


def _in_place(module: Any, leaf: str, change_ENK: Tensor) -> Tensor:
    """Put the change of a gate or an up projection at its place in the joint parameter."""
    if leaf == "down_proj" or not module.has_gate:
        return change_ENK
    experts, rows, columns = change_ENK.shape
    both = torch.zeros(experts, 2 * rows, columns)
    if module.is_concatenated:
        both[:, :rows] = change_ENK if leaf == "gate_proj" else 0
        both[:, rows:] = change_ENK if leaf == "up_proj" else 0
    else:
        both[:, 0 if leaf == "gate_proj" else 1 :: 2] = change_ENK
    return both


_LAYOUTS = {FUSED: _fused, SINGLE: _apart, STACKED: _stacked}
