"""Build a model for a GPU: weights in the checkpoint's layout and the model's type, kernels in Triton.

With tensors on the CPU and Triton's interpreter, the same path runs without a GPU, as in the tests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention import latents
from attention.gpu import operator as attention_operator
from attention.gpu import organ as attention_organ
from attention.gpu.sparse import choose_from_pages, choose_pools
from attention.recurrences.gpu import RECURRENCES
from dispatch.dispatched import TokenDispatcher
from dispatch.mode import SMALLEST_CAPACITY, prompt_capacity
from kvcache.codes import E4M3
from kvcache.gpu.cache import DeviceCache, token_bytes
from kvcache.gpu.operators import OperatedCache
from kvcache.gpu.step import ROWS, DeviceStep
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Inputs, Span, Step
from moe import long_rotary, scaled_experts
from moe.adopt.adopt import SampleRows, adopt
from moe.adopt.attention import attention
from moe.adopt.exchanged import SequenceParts, exchange_parts
from moe.adopt.gates import gate_of
from moe.adopt.mlp import GatedMlps
from moe.adopt.norms import Norms
from moe.adopt.rotary import rotary
from moe.adopt.routers import Routers
from moe.adopt.shared import SharedSums
from moe.adopt.stream import start_streams
from moe.adopt.whole import TRIAL_BLOCKS, note_products
from moe.backend import Backend, LoadedModel
from moe.gpu import compiling, limits
from moe.gpu import experts as experts_organ
from moe.gpu.choose import DeviceLoadCounts
from moe.gpu.device_weight import DeviceWeight, OneGroup, try_products
from moe.gpu.experts import DeviceExpertLayer
from moe.gpu.gate import silu_gate
from moe.gpu.lora.absorbed import AbsorbedAdapters
from moe.gpu.lora.adapted import AdaptedRows, DeviceExpertAdapters
from moe.gpu.lora.low_rank import RANKS, WHOLE, FactorView, launch_without_rows
from moe.gpu.norm import add_rms_norm, rms_norm
from moe.gpu.products import fp8
from moe.gpu.products.library_products import LibraryProducts
from moe.gpu.products.widened import Workspace
from moe.gpu.routing import can_multiply_wide, multiply_wide, route
from moe.gpu.weights.slots import DeviceExperts, DeviceSlots
from moe.load.loader import Keep, Loader, Weight
from moe.load.quantisation import Quantisation
from moe.load.quantised_weight import QuantisedWeight
from moe.mtp.layers import drafting_of
from moe.slot_choice import SlotChoice


@dataclass(frozen=True, kw_only=True)
class GpuDevice:
    """A GPU or the interpreter, and its settings.

    Attributes:
        device: Device of weights, cache and steps.
        dtype: Type in which modules compute and weights are stored.
        is_invariant: A row's bits do not depend on the number of other rows. This is slower.
        compiler: Backend of torch.compile for the code between the organs; "" disables it.
        activation_dtype: Whether rows are quantised for FP8 weights if the checkpoint does so: auto (on GPUs with FP8
            units), fp8 (refuses other GPUs and checkpoints) or bf16 (never).
        has_adapters: The model takes LoRA adapters. Rows are then not quantised by default.
    """

    device: torch.device
    dtype: torch.dtype
    is_invariant: bool = False
    compiler: str = ""
    activation_dtype: str = "auto"
    has_adapters: bool = False

    @property
    def fp8_rows(self) -> bool:
        """Whether rows are quantised if the checkpoint does so. The interpreter does it on request only."""
        is_chosen = self.activation_dtype == "fp8" or (
            self.activation_dtype == "auto" and self.device.type == "cuda" and not self.has_adapters
        )
        return is_chosen and fp8.why_no_fp8(self.device) is None


def open_backend(
    device: str,
    dtype: str,
    *,
    is_invariant: bool = False,
    compiler: str = "",
    activation_dtype: str = "auto",
    has_adapters: bool = False,
) -> Backend:
    """Return the backend of `cuda`, `cuda:1` or `interpreter`.

    Args:
        dtype: auto, bfloat16 or float32. auto is bfloat16 on a GPU and float32 in the interpreter, which rounds
            bfloat16 wrongly.
        is_invariant, compiler, activation_dtype, has_adapters: See `GpuDevice`.
    """
    if device == "interpreter":
        place, default = torch.device("cpu"), torch.float32
    else:
        place, default = torch.device(device if ":" in device else f"{device}:0"), torch.bfloat16
        torch.cuda.set_device(place)  # the device for kernel launches
    chosen = {"auto": default, "bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]
    on = GpuDevice(
        device=place, dtype=chosen, is_invariant=is_invariant, compiler=compiler, activation_dtype=activation_dtype,
        has_adapters=has_adapters,
    )  # fmt: skip
    return backend_on(on)


def backend_on(on: GpuDevice) -> Backend:
    """Return the backend of a device."""
    return Backend(
        device=on.device,
        model_dtype=on.dtype,
        attention=attention_operator.NAME if on.compiler else attention_organ.NAME,
        experts=compiling.NAME if on.compiler else experts_organ.NAME,
        warms_up_together=True,
        fp8_rows=on.fp8_rows,
        register=_register,
        why_unserved=partial(_why_unserved, on),
        keep_with=partial(_keep_with, on),
        open_experts=partial(DeviceExperts, dtype=on.dtype, device=on.device, fp8_rows=on.fp8_rows),
        open_layer=partial(_open_layer, on, Workspace(on.device)),
        make_counts=partial(DeviceLoadCounts, device=on.device),
        make_step=partial(_make_step, on),
        make_cache=partial(_make_cache, on),
        token_bytes=partial(token_bytes, dtype=on.dtype),
        finish=partial(_finish, on),
        enter_thread=partial(_enter_thread, on),
        warm_up=partial(warm_up, on),
        keeps_addresses=True,
        runs_image_experts=not on.compiler,
        wait=partial(_wait, on),
    )


def _register() -> None:
    attention_organ.register()
    attention_operator.register()
    experts_organ.register()
    compiling.register()


def _why_unserved(
    on: GpuDevice, net: PreTrainedModel, shapes: list[LayerShape], quantisation: Quantisation | None
) -> str | None:
    problem = limits.why_unserved(net, shapes, quantisation) or _why_no_fp8_rows(on, quantisation)
    if any(shape.codes is E4M3 for shape in shapes) and (needed := fp8.why_no_fp8(on.device)) is not None:
        problem = problem or f"keys and values for --kv-cache-dtype fp8, which needs {needed}: use int8"
    keeps_more = any(shape.state or shape.index_dim for shape in shapes)
    keeps_more = keeps_more or bool(scaled_experts.blocks(net))
    if on.has_adapters:
        problem = problem or _why_no_adapters(on, scales_inputs=bool(scaled_experts.blocks(net)))
    if on.compiler and (keeps_more or long_rotary.limit_of(net.config) is not None):
        what = "recurrent layers, a sparse index, longrope or experts with scaled inputs"
        problem = problem or f"{what}, which --enable-torch-compile does not support: remove it"
    if on.compiler and drafting_of(net) is not None:
        what = "layers for multi-token prediction, which --enable-torch-compile does not support: remove it"
        problem = problem or what
    if on.compiler and not compiling.decoder_layers(net):
        problem = problem or "no decoder layers that torch.compile can compile (--enable-torch-compile)"
    return problem


def _why_no_adapters(on: GpuDevice, *, scales_inputs: bool) -> str | None:
    if scales_inputs:
        what = "experts with scaled inputs"
        return f"{what}, which --enable-lora does not support on GPUs: use --device cpu, or merge an adapter into the weights"
    if on.compiler:
        return "no compiled form with adapters: use --enable-lora without --enable-torch-compile"
    if on.activation_dtype == "fp8":
        return "no FP8 activations with adapters: use --enable-lora with --activation-dtype auto"
    return None


def _why_no_fp8_rows(on: GpuDevice, quantisation: Quantisation | None) -> str | None:
    if on.activation_dtype != "fp8":
        return None
    formats = () if quantisation is None else quantisation.formats
    if not any(each.fp8_rows for each in formats):
        return (
            "no FP8 weights with activations that are quantised at run time, which --activation-dtype fp8 needs: "
            "use auto"
        )
    problem = fp8.why_no_fp8(on.device)
    return None if problem is None else f"--activation-dtype fp8, which needs {problem}: use auto"


def _keep_with(on: GpuDevice, step: Step, loader: Loader) -> Keep:
    """Move every weight to the device, in the type that the model declared, or quantised."""
    assert isinstance(step, DeviceStep), "a step of another backend"
    products = LibraryProducts(step.sizes, step.max_rows)
    adapted = AdaptedRows(step) if step.num_adapters else None
    group = OneGroup(
        on.device, is_invariant=on.is_invariant, fp8_rows=on.fp8_rows, products=products, adapted=adapted
    )
    is_kept = on.is_invariant or adapted is not None

    def keep(name: str, tensor: Weight, declared: Tensor) -> Tensor | nn.Parameter:
        is_matrix = (
            name.endswith(".weight") and len(tensor.shape) == 2 and not name.endswith(latents.ABSORBED)
        )
        tensor = loader.stored(name, tensor) if is_matrix else tensor
        if is_matrix and (is_kept or isinstance(tensor, QuantisedWeight)):
            group.weights.append(DeviceWeight(tensor, group, declared.dtype, on.device))
            return group.weights[-1]
        if isinstance(tensor, QuantisedWeight):
            tensor = tensor.dequantised()
        return nn.Parameter(tensor.to(on.device, declared.dtype), requires_grad=False)

    return keep


def _open_layer(
    on: GpuDevice,
    workspace: Workspace,
    up: DeviceSlots,
    down: DeviceSlots,
    choice: SlotChoice,
    module: Any,
    dispatcher: TokenDispatcher,
    step: Step,
) -> DeviceExpertLayer:
    assert isinstance(step, DeviceStep), "a step of another backend"
    gate, adapters = gate_of(module), None
    if step.num_adapters:
        adapters = DeviceExpertAdapters(len(up.places_S), gate, step)
    return DeviceExpertLayer(
        up,
        down,
        choice,
        int(module.num_experts),
        dispatcher,
        step,
        workspace=workspace,
        gate=gate,
        dtype=on.dtype,
        adapters=adapters,
    )


def _make_step(on: GpuDevice, *, threads: int, **sizes: int) -> DeviceStep:
    return DeviceStep(device=on.device, is_invariant=on.is_invariant, **sizes)


def _make_cache(
    on: GpuDevice, shapes: list[LayerShape], num_blocks: int, num_states: int, step: Step
) -> PagedCache:
    assert isinstance(step, DeviceStep), "a step of another backend"
    kind = OperatedCache if on.compiler else DeviceCache
    cache = kind(shapes, num_blocks, num_states, dtype=on.dtype, device=on.device)
    cache.step = step
    return cache


def _finish(on: GpuDevice, net: PreTrainedModel, step: Step, shapes: list[LayerShape]) -> None:
    """Move buffers to the device, adopt the kernels' forms of modules, and avoid expanding latents twice."""
    net.to(on.device)
    if step.num_adapters:
        _open_absorbed(net, step)
    rows, make_cache = SampleRows(on.dtype, on.device), partial(_make_cache, on)
    parts = SequenceParts(RECURRENCES, choose_from_pages, choose_pools, attention_organ.NAME, make_cache)
    exchange_parts(net, step, rows, parts)
    if not on.compiler:
        wide_product = multiply_wide if can_multiply_wide(on.device, on.dtype) else None
        routers = Routers(route, wide_product=wide_product)
        adopt(net.modules(), (Norms(rms_norm, add_rms_norm), routers, SharedSums()), rows)
        adopt(net.modules(), (attention, rotary, GatedMlps(silu_gate)), rows)  # after the norms of heads
        start_streams(compiling.decoder_layers(net))
        try_products(net)
        if step.num_adapters:
            note_products(net, step, _make_cache(on, shapes, TRIAL_BLOCKS, 0, step))
        return
    adopt(compiling.outside_layers(net), (Norms(rms_norm),), rows)
    adopt(net.modules(), (Routers(compiling.route, route),), rows)
    attention_operator.enter(net)
    compiling.enter(net)
    compiling.compile_layers(net, on.compiler)


def _open_absorbed(net: PreTrainedModel, step: Step) -> None:
    """Give the modules that cache latents room for adapters of `kv_b_proj`."""
    assert isinstance(step, DeviceStep), "a step of another backend"
    for module in latents.latent_modules(net):
        unrotated, value_dim = int(module.qk_nope_head_dim), int(module.v_head_dim)
        heads = len(module.kv_b_proj.weight) // (unrotated + value_dim)
        module.absorbed_adapters = AbsorbedAdapters(
            step, heads=heads, unrotated_dim=unrotated, value_dim=value_dim
        )


def _enter_thread(on: GpuDevice) -> None:
    """Set the device and, once per thread, another stream than the steps'. It waits for the steps launched so far."""
    if on.device.type != "cuda":
        return
    torch.cuda.set_device(on.device)
    steps = torch.cuda.default_stream(on.device)
    if torch.cuda.current_stream(on.device) == steps:
        torch.cuda.set_stream(torch.cuda.Stream(on.device))  # type: ignore[no-untyped-call]
    torch.cuda.current_stream(on.device).wait_stream(steps)


def _wait(on: GpuDevice) -> None:
    if on.device.type == "cuda":
        torch.cuda.current_stream(on.device).synchronize()


def warm_up(
    on: GpuDevice,
    model: LoadedModel,
    cache: PagedCache,
    report: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Run steps that compile the kernels of later steps, and reserve their memory.

    These are a prompt and a decode of one token on the first block, which is free, and on a GPU the largest step of
    prompts, in which experts use other tiles. torch.compile generalises its code at a second number of rows. Collective
    with several ranks, like every step. Counts and samples of these rows are dropped.
    """
    step = model.step
    assert isinstance(step, DeviceStep), "a step of another backend"
    longer = [(ROWS + 1, 0, 0)] if on.compiler and step.max_rows > ROWS else []
    wide = [(1, 0, prompt_capacity(step.max_tokens))] if step.num_ranks > 1 else []  # allocates memory
    tried = ((1, 0, 0), *longer, *wide, (1, 1, SMALLEST_CAPACITY))
    for done, (num_tokens, num_decodes, agreed_tokens) in enumerate(tried):
        report(done, len(tried) + 1)
        span = Span(0, num_tokens, range(-(-num_tokens // step.block_tokens)))
        step.fill([span], num_decodes, agreed_tokens=agreed_tokens)
        _try_out(on, model, cache, step.inputs([0] * num_tokens, [0]))
    report(len(tried), len(tried) + 1)
    if on.device.type == "cuda":  # the interpreter compiles nothing and is slow
        vocabulary = model.net.get_output_embeddings().weight.shape[0]
        _try_out(on, model, cache, step.fill_with_prompts(cache.num_blocks, vocabulary))
        for layer in model.layers:
            assert isinstance(layer, DeviceExpertLayer), "a layer of another backend"
            layer.launch_tiles()
        if step.num_adapters:
            launch_without_rows(_adapted_sizes(model), on.dtype, on.device)
    report(len(tried) + 1, len(tried) + 1)
    model.load_counts.clear()
    for layer in model.layers:
        layer.sample_TD = None


def _adapted_sizes(model: LoadedModel) -> set[tuple[int, int, FactorView]]:
    """Return the inputs and outputs of the matrices that take adapters, and how adapters lie in memory."""
    held = [getattr(module, "weight", None) for module in model.net.modules()]
    weights = [each for each in held if isinstance(each, DeviceWeight)]
    experts: list[Any] = [slots for layer in model.layers for slots in (layer.up, layer.down)]
    # An embedding has only the product with B.
    embedded = {(RANKS, each.in_dim, WHOLE) for each in weights}
    found = {(each.in_dim, each.out_dim, WHOLE) for each in (*weights, *experts)} | embedded
    for module in latents.latent_modules(model.net):
        found |= module.absorbed_adapters.sizes(int(module.kv_b_proj.weight.shape[1]))
    return found


def _try_out(on: GpuDevice, model: LoadedModel, cache: PagedCache, inputs: Inputs) -> None:
    """Run a step with its drafts, and wait: the next step is written to the memory that this one is copied from."""
    model.forward(inputs.token_T, cache, inputs.row_R)
    first_T = torch.zeros_like(inputs.token_T)
    for layer in range(model.num_mtp_layers):
        model.draft(layer, inputs.token_T, cache, inputs.row_R, first_T)
    if on.device.type == "cuda":
        torch.cuda.synchronize(on.device)
