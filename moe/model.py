"""Build a model to serve: `transformers`' own modules with our three organs, and this rank's share of weights.

Built on the meta device, checked against the checkpoint's headers, then materialised. A model's forward takes a
packed batch [1, T] described by a `Step`; see `Model.forward`.

Legend: T tokens (padded rows), V vocabulary, R rows whose logits are wanted.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numba
import torch
from torch import Tensor
from transformers import PreTrainedModel

from dispatch.dispatched import TokenDispatcher
from expert_placement.placement import EMPTY, Placement
from kvcache.paged_cache import PagedCache
from kvcache.step import Step
from moe.backend import Backend, Experts
from moe.cpu.backend import CPU
from moe.current_step import CurrentStep
from moe.expert_weights import ExpertWeights, read_slot
from moe.families import build_on_meta, check_layout, experts_modules, read_config
from moe.kept_body import KeptBody
from moe.load.checkpoint import Checkpoint
from moe.load.loader import Loader, Report
from moe.load.plan import LoadPlan
from moe.load.quantisation import read_quantisation
from moe.load.stored_tensors import StoredTensors
from moe.load_counts import LoadCounts
from moe.rehearsal import rehearse
from moe.replicas import routes
from moe.slot_changes import Held, change_slots
from moe.spare_slots import SpareSlots


class Skeleton:
    """A model on the meta device: what it needs and holds is known, nothing is read or allocated yet."""

    def __init__(self, directory: Path, backend: Backend = CPU) -> None:
        """Read the configuration and build the modules.

        Args:
            directory: the model's.
            backend: of the device that the model will run on.

        Raises:
            UnsupportedModelError: the model cannot be served, and why.
        """
        backend.register()
        self.directory, self.backend = directory, backend
        config = read_config(directory)
        self.quantisation = read_quantisation(getattr(config, "quantization_config", None))
        self.model: PreTrainedModel = build_on_meta(config, backend.model_dtype)
        self.experts = experts_modules(self.model)
        check_layout(self.experts, self.quantisation)
        self.num_experts = int(next(iter(self.experts.values())).num_experts)
        self.cache_shapes = rehearse(self.model)
        backend.check(self.model, self.cache_shapes, self.quantisation)
        self.model.set_attn_implementation(backend.attention)
        self.model.set_experts_implementation(backend.experts)


class Model:
    """One rank's model: run a packed batch, get logits."""

    def __init__(
        self,
        skeleton: Skeleton,
        *,
        dispatcher: TokenDispatcher,
        placement: Placement,
        rank: int,
        step: Step,
        dtype: str = "auto",
        num_spare: int = 0,
        checkpoint: Checkpoint | None = None,
        report: Report = lambda _stage, _fraction: None,
    ) -> None:
        """Load this rank's weights.

        Args:
            skeleton: consumed.
            dispatcher: of the group whose ranks the placement speaks of.
            placement: the slots of all ranks.
            rank: this one.
            step: the backend's; refilled by the caller before every forward.
            dtype: auto, float32 or bfloat16; what weights are kept in, if not quantised, on a CPU, which computes in
                float32.
            num_spare: experts that may move to this rank at once; see `backend.Backend.load_experts`.
            checkpoint: what has the weights; None: the skeleton's directory.
            report: called with (stage, fraction).

        Raises:
            CheckpointError: listing what does not fit.
        """
        self.skeleton, self.placement, self._rank = skeleton, placement, rank
        self.current = CurrentStep(step)
        self.checkpoint = checkpoint or Checkpoint(skeleton.directory)
        self._net = skeleton.model
        parameters = {
            f"{name}.{leaf}": int(module.num_experts)
            for name, module in skeleton.experts.items()
            for leaf in dict(module.named_parameters(recurse=False))
        }
        stored = StoredTensors(self.checkpoint, skeleton.quantisation)
        plan = LoadPlan(self._net, stored, parameters)
        self._loader = loader = Loader(self._net, stored, plan, dtype)
        self._backend = skeleton.backend
        self.load_counts = self._make_counts()
        with torch.no_grad():
            loader.load_plain(self._backend.keep_with(self.current, loader.stored), report)
            self.layers = self._load_experts(loader, dispatcher, num_spare, report)
            _restore_buffers(self._net)
            self._backend.finish(self._net)
        self._body = KeptBody(self._net)

    def hold(self, wanted: Held, held: Held, spare: SpareSlots, most_spare: int) -> None:
        """Let this rank's slots hold other experts, reading those that it has not; local, while no step runs.

        Args:
            wanted: what they are to hold; of another length than `held` on a CPU only.
            held: what they hold; kept true, whatever happens.
            spare, most_spare: see `change_slots`.

        Raises:
            CheckpointError, OSError, SafetensorError: an expert could not be read.
            NoSpareSlotError, RuntimeError: there is no room for it.
        """
        with (
            torch.no_grad()
        ):  # not inference mode, whose tensors the thread that moves experts could not write to
            for index, (name, module) in enumerate(self.skeleton.experts.items()):
                read = partial(self._read_expert, name, module)
                change_slots(self.layers[index], held[index], wanted[index], read, spare, most_spare)

    def serve(self, placement: Placement, rank: int, dispatcher: TokenDispatcher) -> None:
        """Go on among other ranks, with slots that hold this rank's part already; local, while no step runs.

        Args:
            rank: this one's place among them.
            dispatcher: of the group whose ranks the placement speaks of.
        """
        self.placement, self._rank = placement, rank
        self.load_counts = self._make_counts()
        ways = zip(self.layers, routes(placement, rank), self.load_counts.layers, strict=True)
        for layer, route, counts in ways:
            layer.dispatcher, layer.route, layer.counts = dispatcher, route, counts

    def _make_counts(self) -> LoadCounts:
        placement = self.placement
        return self._backend.make_counts(
            placement.num_layers,
            num_experts=placement.num_experts,
            num_ranks=placement.num_ranks,
            slots_per_rank=placement.slots_per_rank,
        )

    def _read_expert(self, name: str, module: Any, expert: int, into: ExpertWeights) -> None:
        self._backend.read_expert(self._loader, name, module, expert, into)

    def _load_experts(
        self, loader: Loader, dispatcher: TokenDispatcher, num_spare: int, report: Report
    ) -> list[Experts]:
        modules, ways = self.skeleton.experts, routes(self.placement, self._rank)
        local_LS = self.placement.local(self._rank)
        slots = self._backend.load_experts(loader, modules, local_LS, report, num_spare)
        layers = []
        for index, module in enumerate(modules.values()):
            layer = self._backend.open_layer(slots[index], ways[index], module, dispatcher, self.current)
            for leaf in [*dict(module.named_parameters(recurse=False))]:
                delattr(module, leaf)
            layer.counts = self.load_counts.layers[index]
            module.expert_layer = layer
            layers.append(layer)
        return layers

    @torch.inference_mode()
    def forward(
        self, token_T: Tensor, cache: PagedCache, logits_R: Tensor, *, keeps_hidden: bool = False
    ) -> Tensor:
        """Run the step that `step` and `cache.step` describe; collective over the dispatcher's group.

        Args:
            token_T: [num_padded] int64 token ids; rows past the step's tokens are any valid id.
            cache: written at the step's places.
            logits_R: [R] int64 rows whose logits are wanted.
            keeps_hidden: let `logits_of` be asked for more rows, until the next forward.

        Returns:
            [R, V] float32 logits, new.
        """
        cache.step = self.step
        self._body.keep(keeps_hidden)
        output: Any = self._net(
            input_ids=token_T[None],
            position_ids=self.step.positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=logits_R,
            pages=cache,
        )
        logits: Tensor = output.logits[0].float()
        return logits

    @torch.inference_mode()
    def logits_of(self, rows_R: Tensor) -> Tensor:
        """Compute more rows' logits of the last forward, which kept its hidden states; local.

        Returns:
            [R, V] float32, the bits that `forward` gives for these rows.
        """
        return self._body.logits(rows_R)

    @property
    def step(self) -> Step:
        """The step that a forward runs: the caller fills it."""
        return self.current.step

    @property
    def device(self) -> torch.device:
        """Where its inputs are."""
        return self._backend.device

    @property
    def modules(self) -> list[Any]:
        """The experts modules of `layers`, in the same order."""
        return list(self.skeleton.experts.values())

    @property
    def lm_head(self) -> Tensor:
        """The output projection, [V, D]."""
        weight: Tensor = self._net.get_output_embeddings().weight
        return weight

    def slot_bytes(self, layer: int) -> int:
        """Bytes that one more slot of a layer would take."""
        return read_slot(self.layers[layer], 0).num_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of the experts that this rank holds, as they are kept; `reserved_expert_bytes` has the rest too."""
        held = (self.placement.local(self._rank) != EMPTY).sum(axis=1).tolist()
        return sum(
            count * (layer.up.slot_bytes + layer.down.slot_bytes)
            for count, layer in zip(held, self.layers, strict=True)
        )

    @property
    def reserved_expert_bytes(self) -> int:
        """Bytes that this rank's slots take, empty ones and the kernels' padding included."""
        return sum(layer.up.num_bytes + layer.down.num_bytes for layer in self.layers)


def _restore_buffers(model: PreTrainedModel) -> None:
    """Recompute the buffers that no checkpoint has (rotary frequencies), which the meta device dropped; on the CPU."""
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    for module in model.modules():
        lost = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        if not lost:
            continue
        for name in lost:
            module._buffers[name] = torch.empty_like(getattr(module, name), device="cpu")
        model._init_weights(module)
    stranded = [
        name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta
    ]
    assert not stranded, f"not materialised: {stranded}"


def set_threads(count: int) -> None:
    """Give this process's kernels so many threads; PyTorch's own small operations stay on one."""
    torch.set_num_threads(1)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
