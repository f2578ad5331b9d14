"""How a model is built for a GPU: weights as the checkpoint lays them out, in the model's type, kernels in Triton.

With tensors on the CPU and Triton's interpreter the same path runs without a GPU, which is how it is tested.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.gpu import operator as attention_operator
from attention.gpu import organ as attention_organ
from attention.gpu import served_shapes
from dispatch.dispatched import TokenDispatcher
from dispatch.mode import SMALLEST_CAPACITY
from kvcache.gpu.cache import DeviceCache, token_bytes
from kvcache.gpu.operators import OperatedCache
from kvcache.gpu.step import ROWS, DeviceStep
from kvcache.paged_cache import LayerShape, PagedCache
from kvcache.step import Inputs, Span, Step
from moe.adopt.norms import exchange_norms
from moe.adopt.rotary import exchange_rotary
from moe.adopt.routers import exchange_routers
from moe.backend import Slots
from moe.cpu.backend import leaves
from moe.current_step import CurrentStep
from moe.families import UnsupportedModelError
from moe.gpu import experts as experts_organ
from moe.gpu import operators
from moe.gpu.compiling import compile_layers, decoder_layers, outside_layers
from moe.gpu.device_weight import DeviceWeight, OneGroup
from moe.gpu.expert_loading import ExpertLoading, fused_gate
from moe.gpu.experts import DeviceExpertLayer
from moe.gpu.formats import SCALE_BLOCK
from moe.gpu.load_counts import DeviceLoadCounts
from moe.gpu.slots import DeviceSlots
from moe.load.loader import Keep, Loader, Report, Weight
from moe.load.quantisation import Quantisation
from moe.load.quantised_weight import QuantisedWeight
from moe.replicas import Route

if TYPE_CHECKING:
    from moe.model import Model


LEAST_FP8_CAPABILITY = (8, 9)  # older GPUs have no such type, and Triton refuses to compile it for them
_ABSORBED = ".kv_b_proj.weight"  # latent attention multiplies with parts of it, which have to be plain


class GpuBackend:
    """One GPU's way, or the interpreter's.

    Attributes:
        device: of weights, cache and steps.
        model_dtype: what modules compute in, and what weights are kept in.
    """

    warms_up_together = True

    def __init__(
        self, device: torch.device, dtype: torch.dtype, *, is_invariant: bool = False, compiler: str = ""
    ) -> None:
        """Choose a way.

        Args:
            is_invariant: no row's bits depend on how many rows are beside it, at a price in speed.
            compiler: a backend of torch.compile for what lies between the organs; "": it is not compiled.
        """
        self.device, self.model_dtype, self._is_invariant = device, dtype, is_invariant
        self._compiler = compiler
        self.attention = attention_operator.NAME if compiler else attention_organ.NAME
        self.experts = operators.NAME if compiler else experts_organ.NAME
        self._loading: ExpertLoading | None = None  # of the model that it loaded

    def register(self) -> None:
        """Make the organs known."""
        attention_organ.register()
        attention_operator.register()
        experts_organ.register()
        operators.register()

    def check(
        self, net: PreTrainedModel, shapes: list[LayerShape], quantisation: Quantisation | None
    ) -> None:
        """Refuse a model that the kernels lack something for."""
        ranks = [
            int(getattr(module, "kv_lora_rank", 0))
            for module in net.modules()
            if hasattr(module, "expand_kv")
        ]
        problem = served_shapes.why_not(shapes, ranks)
        if quantisation is not None and quantisation.method == "fp8":
            problem = problem or why_no_fp8(quantisation, self.device)
        if self._compiler and not decoder_layers(net):
            problem = (
                problem or "no decoder layers that torch.compile could be told of (--enable-torch-compile)"
            )
        if problem:
            raise UnsupportedModelError(f"{net.config.model_type} has {problem}; serve it with --device cpu")

    def keep_with(self, current: CurrentStep, stored: Callable[[Weight], Weight]) -> Keep:
        """Every weight goes to the device, of the type that the model declared; FP8 stays FP8."""
        group = OneGroup(self.device, is_invariant=self._is_invariant)

        def keep(name: str, tensor: Weight, declared: Tensor) -> Tensor | nn.Parameter:
            is_quantised = isinstance(tensor, QuantisedWeight)
            is_own = self._is_invariant and name.endswith(".weight") and len(tensor.shape) == 2
            if (is_quantised or is_own) and not name.endswith(_ABSORBED):
                return DeviceWeight(tensor, group, declared.dtype, self.device)
            if isinstance(tensor, QuantisedWeight):
                tensor = tensor.dequantised()
            return nn.Parameter(tensor.to(self.device, declared.dtype), requires_grad=False)

        return keep

    def load_experts(
        self,
        loader: Loader,
        modules: Mapping[str, Any],
        local_LS: np.ndarray,
        report: Report,
        num_spare: int = 0,
    ) -> list[tuple[Slots, Slots]]:
        """Copy each expert to its place as it is read."""
        self._loading = loading = ExpertLoading(
            loader,
            modules,
            slots_per_layer=local_LS.shape[1],
            num_spare=num_spare,
            dtype=self.model_dtype,
            device=self.device,
        )
        layers: list[tuple[Slots, Slots]] = []
        for index, (name, module) in enumerate(modules.items()):
            up, down = (loading.load(name, leaf, local_LS[index]) for leaf in leaves(module))
            layers.append((up, down))
            report("experts", (index + 1) / len(modules))
        return layers

    def read_expert(
        self, loader: Loader, name: str, module: Any, expert: int, into: tuple[Slots, Slots]
    ) -> None:
        """Copy the expert to its place."""
        assert self._loading is not None, "the model was loaded"
        for leaf, slots in zip(leaves(module), into, strict=True):
            assert isinstance(slots, DeviceSlots), "slots of another backend"
            self._loading.read(name, leaf, expert, slots)

    def open_layer(
        self,
        slots: tuple[Slots, Slots],
        route: Route,
        module: Any,
        dispatcher: TokenDispatcher,
        current: CurrentStep,
    ) -> DeviceExpertLayer:
        """Put one MoE layer together."""
        up, down = slots
        assert isinstance(up, DeviceSlots) and isinstance(down, DeviceSlots), "slots of another backend"
        assert isinstance(current.step, DeviceStep), "a step of another backend"
        gate = fused_gate(module, is_fp8=up.store.weight.dtype == torch.float8_e4m3fn)
        return DeviceExpertLayer(
            up,
            down,
            route,
            int(module.num_experts),
            dispatcher,
            current,
            len(up.places_S),
            gate,
            self.model_dtype,
            self._is_invariant,
        )

    def make_counts(
        self, num_layers: int, *, num_experts: int, num_ranks: int, slots_per_rank: int
    ) -> DeviceLoadCounts:
        """Counters for all layers."""
        return DeviceLoadCounts(
            num_layers,
            num_experts=num_experts,
            num_ranks=num_ranks,
            slots_per_rank=slots_per_rank,
            device=self.device,
        )

    def make_step(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        max_blocks: int,
        block_tokens: int,
        threads: int,
        num_ranks: int = 1,
    ) -> DeviceStep:
        """The step that the organs read."""
        return DeviceStep(
            max_tokens=max_tokens,
            max_sequences=max_sequences,
            max_blocks=max_blocks,
            block_tokens=block_tokens,
            device=self.device,
            num_ranks=num_ranks,
        )

    def make_cache(self, shapes: list[LayerShape], num_blocks: int, step: Step) -> PagedCache:
        """Reserve the pages."""
        assert isinstance(step, DeviceStep), "a step of another backend"
        kind = OperatedCache if self._compiler else DeviceCache
        cache = kind(shapes, num_blocks, dtype=self.model_dtype, device=self.device)
        cache.step = step
        return cache

    def token_bytes(self, shape: LayerShape) -> int:
        """Bytes of cache that one layer takes per token."""
        return token_bytes(shape, self.model_dtype)

    def finish(self, net: PreTrainedModel) -> None:
        """Move buffers to the device; exchange modules for kernels that compute the same; do not expand latents twice."""
        net.to(self.device)
        attention_organ.prepare(net)
        if self._compiler:
            self._compile(net)
            return
        exchange_norms(net.modules(), self.model_dtype)
        exchange_rotary(net, self.model_dtype, self.device)
        exchange_routers(net, self.model_dtype, self.device)

    def _compile(self, net: PreTrainedModel) -> None:
        exchange_norms(outside_layers(net), self.model_dtype)
        exchange_routers(net, self.model_dtype, self.device, operators.route)
        attention_operator.enter(net)
        operators.enter(net)
        compile_layers(net, self._compiler)

    def enter_thread(self) -> None:
        """See `Backend`. The stream is the device's default one, as on every thread."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def warm_up(self, model: "Model", cache: PagedCache) -> None:
        """Run a prompt and a decode of one token on the first block, which is free, and on a GPU the largest step of prompts,
        whose experts take other tiles: that compiles what steps use, and reserves their memory.

        torch.compile makes code for any number of rows when it sees a second one. Collective where there are several
        ranks, as every step is.
        """
        step = model.step
        assert isinstance(step, DeviceStep), "a step of another backend"
        longer = [(ROWS + 1, 0)] if self._compiler and step.max_rows > ROWS else []
        for num_tokens, num_decodes in ((1, 0), *longer, (1, 1)):
            span = Span(0, num_tokens, range(-(-num_tokens // step.block_tokens)))
            step.fill([span], num_decodes, agreed_tokens=SMALLEST_CAPACITY * num_decodes)
            self._try_out(model, cache, step.inputs([0] * num_tokens, [0]))
        if self.device.type == "cuda":  # the interpreter compiles nothing, and takes its time
            self._try_out(model, cache, step.fill_with_prompts(cache.num_blocks, model.lm_head.shape[0]))
        model.load_counts.clear()

    def _try_out(self, model: "Model", cache: PagedCache, inputs: Inputs) -> None:
        """Run a step, and wait: the next one is written where this one is copied from."""
        model.forward(inputs.token_T, cache, inputs.row_R)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def open_backend(device: str, dtype: str, *, is_invariant: bool = False, compiler: str = "") -> GpuBackend:
    """Return the way of `cuda`, `cuda:1` or `interpreter`.

    Args:
        dtype: auto, bfloat16 or float32; auto is bfloat16 on a GPU and float32 in the interpreter, which rounds
            bfloat16 wrongly.
        is_invariant, compiler: see `GpuBackend`.
    """
    if device == "interpreter":
        place, default = torch.device("cpu"), torch.float32
    else:
        place, default = torch.device(device if ":" in device else f"{device}:0"), torch.bfloat16
        torch.cuda.set_device(place)  # where kernels are launched
    return GpuBackend(
        place,
        {"auto": default, "bfloat16": torch.bfloat16, "float32": torch.float32}[dtype],
        is_invariant=is_invariant,
        compiler=compiler,
    )


def why_no_fp8(quantisation: Quantisation, device: torch.device) -> str:
    """Say why FP8 weights cannot be served on a device; "" if they can."""
    block = (quantisation.block_rows, quantisation.block)
    if block != (SCALE_BLOCK, SCALE_BLOCK):
        return f"FP8 weights in blocks of {block}; the GPU kernels take {(SCALE_BLOCK, SCALE_BLOCK)}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < LEAST_FP8_CAPABILITY:
        needed, found = LEAST_FP8_CAPABILITY, torch.cuda.get_device_capability(device)
        return f"FP8 weights, which take a GPU of compute capability {needed[0]}.{needed[1]}; this one has {found[0]}.{found[1]}"
    return ""
