"""Build the model that a rank serves: `transformers`' own modules with our three organs, and this rank's share of weights.

A model is built on the meta device, checked against the checkpoint's headers, then loaded. Its forward takes a
packed batch [1, T], which a `Step` describes; see `Model.forward`.

Legend: T tokens (padded rows), V vocabulary, R rows that need logits.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attention.recurrences import mixers
from attention.transformers_names import CACHE
from dispatch.dispatched import TokenDispatcher
from expert_placement.placement import EMPTY, Placement
from kvcache.codes import CODES
from kvcache.memory import give_back
from kvcache.paged_cache import PagedCache
from kvcache.step import Step
from moe.backend import Backend, ExpertLayer
from moe.cpu.backend import CPU
from moe.expert_weights import ExpertWeights, Held, Ready, SpareSlots, change_slots, read_slot
from moe.families import (
    UnsupportedModelError,
    build_on_meta,
    experts_modules,
    find_mtp_layers,
    leaves,
    quantisation_of,
    read_config,
)
from moe.load.checkpoint import Checkpoint, CheckpointError
from moe.load.loader import EXPERTS, Loader, Report, restore_buffers
from moe.load.plan import LoadPlan
from moe.load.stored_tensors import StoredTensors
from moe.load_counts import LoadCounts
from moe.lora.bank import AdapterBank
from moe.mtp.layers import Origin, drafting_of
from moe.overwrite import Overwrite
from moe.projection import KeptBody
from moe.rehearsal.rehearse import rehearse
from moe.scaled_experts import use_experts
from moe.slot_choice import slot_choices
from moe.text_part import use_attention
from moe.vision import image_experts
from moe.vision.places import ImagePlaces
from moe.weight_digests import digest_experts, digest_plain, expert_digest, plain_tensors


class Skeleton:
    """A model on the meta device. Its structure and its needs are known; nothing is read or allocated yet."""

    def __init__(
        self, directory: Path, backend: Backend = CPU, *, has_mtp: bool = False, kv_cache_dtype: str = "auto"
    ) -> None:
        """Read the configuration and build the modules.

        Args:
            directory: Model directory.
            backend: Backend of the device that the model will run on.
            has_mtp: Include the checkpoint's multi-token-prediction layers, for `Model.draft`. `cache_shapes` and `experts`
                then list them after the decoder's layers. Otherwise they are not read.
            kv_cache_dtype: Format of the KV cache, a key of `kvcache.codes.CODES`.

        Raises:
            UnsupportedModelError: The model cannot be served; the message gives the reason.
        """
        backend.register()
        self.directory, self.backend = directory, backend
        config = read_config(directory)
        self.quantisation = quantisation_of(directory, config)
        mtp_layers = find_mtp_layers(directory, config) if has_mtp else ()
        self.model: PreTrainedModel = build_on_meta(config, backend.model_dtype, mtp_layers)
        experts_modules(self.model)  # refuses a model without experts before the rehearsal
        # Whether the decoder can run rows of images on the device.
        self.takes_images = backend.runs_image_experts or not image_experts.has_any(self.model)
        if backend.runs_image_experts:  # otherwise the rehearsal removes experts that no text reaches
            image_experts.exchange(self.model)
        codes = CODES[kv_cache_dtype]
        self.cache_shapes = [replace(shape, codes=codes) for shape in rehearse(self.model)]
        self.experts = experts_modules(self.model)
        self.num_experts = int(next(iter(self.experts.values())).num_experts)
        problem = backend.why_unserved(self.model, self.cache_shapes, self.quantisation)
        if problem is not None:
            remedy = "" if backend is CPU else "; serve it with --device cpu"
            raise UnsupportedModelError(f"{config.model_type} has {problem}{remedy}")
        use_attention(self.model, backend.attention)
        use_experts(self.model, backend.experts)

    @property
    def num_mtp_layers(self) -> int:
        """Number of multi-token-prediction layers in the model."""
        drafting = drafting_of(self.model)
        return 0 if drafting is None else drafting.num_layers


class Model:
    """One rank's model: runs a packed batch and returns logits."""

    def __init__(
        self,
        skeleton: Skeleton,
        *,
        dispatcher: TokenDispatcher,
        placement: Placement,
        rank: int,
        step: Step,
        dtype: str = "auto",
        quantization: str | None = None,
        num_spare: int = 0,
        most_adapters: int = 0,
        lora_dtype: str = "auto",
        checkpoint: Checkpoint | None = None,
        report: Report = lambda _stage, _done, _total: None,
    ) -> None:
        """Load this rank's weights.

        Args:
            skeleton: Model to load; it must not be used for another `Model`.
            dispatcher: Dispatcher of the group that the placement is for.
            placement: Slots of all ranks.
            rank: This rank.
            step: A step of the backend; the caller refills it before every forward.
            dtype: auto, float32 or bfloat16: type in which a CPU stores weights that are not quantised. It computes in
                float32.
            quantization: int8 or int4: quantise experts and linear layers to this while they are read.
            num_spare: Number of experts that may move to this rank at once; see `Backend.open_experts`.
            most_adapters: Most adapters to keep in memory, if the step has places for them.
            lora_dtype: float32 or bfloat16: type to which their factors are rounded. auto: bfloat16, unless the weights are float32.
            checkpoint: Source of the weights. None means the skeleton's directory.
            report: Called while weights are read, with (stage, bytes done, total bytes).

        Raises:
            CheckpointError: The checkpoint does not fit; the message lists what differs.
        """
        self.skeleton, self.placement, self._rank = skeleton, placement, rank
        self.step = step  # read by every forward; filled by the caller
        self.checkpoint = checkpoint or Checkpoint(skeleton.directory)
        # Check sums [layers, experts] that experts must have when they are read later; None for a checkpoint's own weights.
        self.digests_LE: np.ndarray | None = None
        parameters = {
            f"{name}.{leaf}": int(module.num_experts)
            for name, module in skeleton.experts.items()
            for leaf in dict(module.named_parameters(recurse=False))
        }
        stored = StoredTensors(self.checkpoint, skeleton.quantisation)
        plan = LoadPlan(self.net, stored, parameters)
        loader = Loader(self.net, stored, plan, dtype, quantization)
        self._backend = skeleton.backend
        self.load_counts = self._make_counts()
        local_LS = placement.local(rank)
        local = {
            f"{name}.{leaf}": local_S
            for (name, module), local_S in zip(skeleton.experts.items(), local_LS, strict=True)
            for leaf in leaves(module)
        }
        with torch.no_grad():
            loader.check_scales(local)
            loader.load_plain(self._backend.keep_with(self.step, loader), report)
            self._reader = self._backend.open_experts(loader, skeleton.experts, local_LS.shape[1], num_spare)
            sizes = {target: loader.expert_bytes(target, local_S) for target, local_S in local.items()}
            self.layers = self._load_layers(local_LS, dispatcher, sizes, report)
            restore_buffers(self.net)
            self._backend.finish(self.net, self.step, skeleton.cache_shapes)
        self.adapters: AdapterBank | None = None  # None if the model takes no adapters
        if step.num_adapters:
            held = local_LS.tolist()
            self.adapters = AdapterBank(
                self.net,
                skeleton.experts,
                self.layers,
                held,
                step,
                most_loaded=most_adapters,
                dtype=_factor_dtype(lora_dtype, dtype, self.checkpoint),
            )
        self.checkpoint.release_memory()
        self._body = KeptBody(self.net)
        self._images = ImagePlaces(self.net)
        self.step.takes_axes = self._images.have_axes
        self._drafting = drafting_of(self.net)
        # Rows that drafts start from: the decoder's and the last draft's. Captured steps write the same memory.
        self._hidden_TD = self._drafted_TD = self._make_hidden()
        self._uses_cache = not mixers.lightning_modules(self.net)

    def hold(
        self, wanted: Held, held: Held, spare: SpareSlots, most_spare: int, ready: Ready | None = None
    ) -> None:
        """Change the experts that this rank's slots hold, and read the missing ones. Local, while no step runs.

        Args:
            wanted: Experts that the slots are to hold. The number of slots may change on a CPU only.
            held: Experts that the slots hold now. Stays correct if a read fails.
            spare, most_spare: See `change_slots`.
            ready: Experts that `read_expert` has read. Those that the slots use are removed from it.

        Raises:
            CheckpointError, OSError, SafetensorError: An expert could not be read.
            NoSpareSlotError, RuntimeError: There is no memory for an expert.
        """
        ready = {} if ready is None else ready
        # Not in inference mode: the thread that moves experts could not write to such tensors.
        with torch.no_grad():
            for index, (name, module) in enumerate(self.skeleton.experts.items()):
                read = partial(self._read_expert, name, module)
                own = {expert: weights for (layer, expert), weights in ready.items() if layer == index}
                missing = set(wanted[index]) - set(held[index])
                change_slots(self.layers[index], held[index], wanted[index], read, spare, most_spare, own)
                for expert in own.keys() & missing:
                    del ready[index, expert]
            if self.adapters is not None:
                self.adapters.hold(wanted)

    def read_expert(self, layer: int, expert: int, into: ExpertWeights) -> None:
        """Read one expert into spare memory. Any thread, one at a time; steps may run.

        Raises:
            CheckpointError, OSError, SafetensorError: The expert could not be read.
        """
        name, module = list(self.skeleton.experts.items())[layer]
        with torch.no_grad():  # as in `hold`
            self._read_expert(name, module, expert, into)

    def release_experts(self, spare: SpareSlots) -> None:
        """Give back the memory of this rank's experts, and of spare slots, while no step runs. On a CPU only.

        Their addresses stay valid. No step may run before `read_experts` has filled them again.
        """
        own = (read_slot(layer, slot) for layer in self.layers for slot in range(layer.up.num_slots))
        for weights in (*own, *spare.free):
            give_back(weights.tensors().values())

    def read_experts(self, held: Held, is_over: Callable[[], bool]) -> bool:
        """Read all experts that this rank's slots hold again. Any thread, while no step runs.

        Args:
            held: Experts of the slots.
            is_over: Whether the experts are not needed any more; called before each one.

        Returns:
            Whether all were read.

        Raises:
            CheckpointError, OSError, SafetensorError: An expert could not be read.
        """
        with torch.no_grad():  # as in `hold`
            for layer, (name, module), experts in zip(
                self.layers, self.skeleton.experts.items(), held, strict=True
            ):
                for slot, expert in enumerate(experts):
                    if is_over():
                        return False
                    if expert != EMPTY:
                        self._read_expert(name, module, expert, read_slot(layer, slot))
        self.checkpoint.release_memory()
        return True

    def serve(self, placement: Placement, rank: int, dispatcher: TokenDispatcher) -> None:
        """Switch to another group of ranks; the slots already hold this rank's experts. Local, while no step runs.

        Args:
            rank: This rank's number in the group.
            dispatcher: Dispatcher of the group that the placement is for.
        """
        self.placement, self._rank = placement, rank
        self.load_counts = self._make_counts()
        choices = slot_choices(placement, rank)
        for layer, choice, counts in zip(self.layers, choices, self.load_counts.layers, strict=True):
            layer.dispatcher, layer.choice, layer.counts = dispatcher, choice, counts

    def join(self, other: "Model") -> None:
        """Run steps next to another model, between its steps, with its ranks and threads. Local, while no step runs.

        The models have the same placement. This one has separate counters.
        """
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            ours.dispatcher, ours.choice = theirs.dispatcher, theirs.choice
        self.step.team = other.step.team

    def exchange(self, other: "Model") -> None:
        """Exchange weights, and all that was built from them, with another model of the same ranks. Local, while no step runs.

        Everything that has a reference to this model then runs the other's weights. Counters, dispatchers, threads and adapters
        stay.
        """
        other.placement, other._rank, other.load_counts = self.placement, self._rank, self.load_counts
        for ours, theirs in zip(self.layers, other.layers, strict=True):
            theirs.dispatcher, theirs.choice, theirs.counts = ours.dispatcher, ours.choice, ours.counts
        self.step.team, other.step.team = other.step.team, self.step.team
        if self.adapters is not None and other.adapters is not None:
            self.adapters.move_to(other.adapters)
            self.adapters, other.adapters = other.adapters, self.adapters  # the exchange below returns it
        self.__dict__, other.__dict__ = other.__dict__, self.__dict__

    @torch.inference_mode()
    def overwrite(self, other: "Model", plain: Overwrite) -> None:
        """Copy the weights of another model of the same ranks and placement over these. Local, while no step runs. For devices
        that keep addresses: `exchange` would have no effect on captured steps.

        Args:
            other: Stays as it is.
            plain: Copies all weights except experts.
        """
        plain.run()
        for layer, source in zip(self.layers, other.layers, strict=True):
            for slot in range(self.placement.slots_per_rank):
                new = read_slot(source, slot).tensors()
                for name, tensor in read_slot(layer, slot).tensors().items():
                    tensor.copy_(new[name])
        self.checkpoint, self.digests_LE = other.checkpoint, other.digests_LE
        self._reader.loader = other._reader.loader.for_model(self.net)
        self._backend.wait()

    def dismantle(self) -> None:
        """Free all weights. The model cannot be used any more. Modules and their programs refer to each other, so Python
        would free them late."""
        for module in list(self.net.modules()):
            vars(module).clear()
        vars(self).clear()

    def plain_digest(self) -> str:
        """Return the check sum of all weights except experts."""
        with torch.no_grad():
            return digest_plain(self.net)

    def expert_digests(self, held: Held) -> np.ndarray:
        """Return the check sums of this rank's experts, [layers, experts] uint64. `held`: experts of the slots."""
        return digest_experts(self.layers, held, self.skeleton.num_experts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all of this rank's weights in memory."""
        plain = sum(tensor.nbytes for tensor in plain_tensors(self.net))
        return plain + self.reserved_expert_bytes

    def _make_counts(self) -> LoadCounts:
        placement = self.placement
        return self._backend.make_counts(
            placement.num_layers,
            num_experts=placement.num_experts,
            num_ranks=placement.num_ranks,
            slots_per_rank=placement.slots_per_rank,
        )

    def _make_hidden(self) -> Tensor:
        rows = 0 if self._drafting is None else len(self.step.token_T)
        return torch.empty(rows, self.hidden_dim, dtype=self._backend.model_dtype, device=self.device)

    def _read_expert(self, name: str, module: Any, expert: int, into: ExpertWeights) -> None:
        for leaf, slots in zip(leaves(module), into, strict=True):
            self._reader.read(name, leaf, expert, slots)
        if self.digests_LE is not None:
            layer = list(self.skeleton.experts).index(name)
            if expert_digest(into) != self.digests_LE[layer, expert]:
                raise CheckpointError(
                    f"expert {expert} of {name} in {self.checkpoint.directory} is not the one that serves: a file has "
                    f"changed since the weights were updated"
                )

    def _load_layers(
        self, local_LS: np.ndarray, dispatcher: TokenDispatcher, sizes: Mapping[str, int], report: Report
    ) -> list[ExpertLayer]:
        """Read this rank's experts layer by layer. `sizes` are the bytes of its parameters in the files."""
        modules, choices = self.skeleton.experts, slot_choices(self.placement, self._rank)
        layers = []
        done, total = 0, sum(sizes.values())
        for index, (name, module) in enumerate(modules.items()):
            up, down = (self._reader.load(name, leaf, local_LS[index]) for leaf in leaves(module))
            layer = self._backend.open_layer(up, down, choices[index], module, dispatcher, self.step)
            layer.counts = self.load_counts.layers[index]
            for leaf in [*dict(module.named_parameters(recurse=False))]:
                delattr(module, leaf)
            module.expert_layer = layer
            layers.append(layer)
            done += sum(sizes[f"{name}.{leaf}"] for leaf in leaves(module))
            report(EXPERTS, done, total)
        return layers

    @torch.inference_mode()
    def forward(
        self,
        token_T: Tensor,
        cache: PagedCache,
        logits_R: Tensor,
        *,
        keeps_hidden: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run the step that `step` and `cache.step` describe; collective over the dispatcher's group.

        Args:
            token_T: [num_padded] int64 token ids; padding rows hold any valid id.
            cache: Cache to write at the step's positions.
            logits_R: [R] int64 rows that need logits.
            keeps_hidden: Keep hidden states until the next forward, so that `logits_of` can return more rows.
            out: [R, V] float32 to write the logits into. None: a new tensor.

        Returns:
            [R, V] float32 logits.
        """
        cache.step = self.step
        self.step.projected_R = logits_R
        # Hidden states are kept by a hook on the decoder, which a program of the whole model does not call.
        run = partial(type(self.net).forward, self.net) if keeps_hidden else self.net
        keeps = keeps_hidden or self._drafting is not None
        with self._body.keeping(keeps), self._images.filled(self.step.images):
            output: Any = run(
                input_ids=token_T[None],
                position_ids=self.step.model_positions,
                use_cache=self._uses_cache,
                logits_to_keep=logits_R,
                pages=cache,
                **{CACHE: cache},
            )
        logits: Tensor = output.logits[0].float() if out is None else out.copy_(output.logits[0])
        if self._drafting is not None:
            # A program of the whole model returns its hidden states in the output.
            found_TD = getattr(output, "hidden_TD", None)
            found_TD = self._body.hidden_TD if found_TD is None else found_TD
            self._hidden_TD[: len(found_TD)] = found_TD
        return logits

    @torch.inference_mode()
    def draft(
        self, depth: int, token_T: Tensor, cache: PagedCache, rows_R: Tensor, hidden_T: Tensor
    ) -> Tensor:
        """Run a multi-token-prediction layer on the rows of `step`; collective over the dispatcher's group.

        A row at position q takes the token at q + 1 and predicts the one at q + 2. Its keys and values are cached at its
        position, in the layer's own pages: the layer must have seen all earlier positions. Rows of images in `step` have the
        places of the tokens that they replace. If a model has several layers,
        a deeper draft runs the next layer on the same positions, with tokens one position later. If it has one, that layer
        runs again on the next position with the newest draft, and its cache entry there must be written again later.

        Args:
            depth: 0 after a forward, 1 or more after a draft. Depths beyond the last layer use the layers again.
            token_T: [num_padded] int64 token after each row; padding rows hold any valid id.
            cache: Cache to write at the step's positions.
            rows_R: [R] int64 rows that need logits.
            hidden_T: [num_padded] int64 row of the previous call (depth 0: the last forward; otherwise the last draft)
                with the hidden state that each row continues from.

        Returns:
            [R, V] float32 logits, new.
        """
        assert self._drafting is not None, "the model was built without its multi-token-prediction layers"
        cache.step = self.step
        before_TD = self._drafted_TD if depth else self._hidden_TD
        with self._images.filled(self.step.images):
            drafted = self._drafting.draft(
                depth, token_T, Origin(before_TD, hidden_T), self.step.model_positions, cache, rows_R
            )
        self._drafted_TD = drafted.hidden_TD
        return drafted.logits_RV

    @torch.inference_mode()
    def logits_of(self, rows_R: Tensor) -> Tensor:
        """Compute logits of more rows of the last forward, which must have kept its hidden states; local.

        Returns:
            [R, V] float32, bit-identical to those of `forward` for these rows.
        """
        self.step.projected_R = rows_R
        return self._body.logits(rows_R)

    @property
    def net(self) -> PreTrainedModel:
        """Return the modules."""
        return self.skeleton.model

    @property
    def num_mtp_layers(self) -> int:
        """Number of layers that draft."""
        return self.skeleton.num_mtp_layers

    @property
    def device(self) -> torch.device:
        """Device of the model's inputs."""
        return self._backend.device

    @property
    def modules(self) -> list[Any]:
        """Return the experts modules of `layers`, in the same order."""
        return list(self.skeleton.experts.values())

    @property
    def hidden_dim(self) -> int:
        """Return the number of hidden values of a token."""
        return int(self.net.get_input_embeddings().weight.shape[1])

    @property
    def lm_head(self) -> Tensor:
        """Return the output projection, [V, D]."""
        weight: Tensor = self.net.get_output_embeddings().weight
        return weight

    def slot_bytes(self, layer: int) -> int:
        """Return the bytes of one more slot of a layer."""
        return read_slot(self.layers[layer], 0).num_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of the experts on this rank, without padding and empty slots (see `reserved_expert_bytes`)."""
        held = (self.placement.local(self._rank) != EMPTY).sum(axis=1).tolist()
        return sum(
            count * (layer.up.slot_bytes + layer.down.slot_bytes)
            for count, layer in zip(held, self.layers, strict=True)
        )

    @property
    def reserved_expert_bytes(self) -> int:
        """Bytes of this rank's slots, including empty ones and the kernels' padding."""
        return sum(layer.up.num_bytes + layer.down.num_bytes for layer in self.layers)


def _factor_dtype(lora_dtype: str, dtype: str, checkpoint: Checkpoint) -> torch.dtype:
    """Return the type of adapters' factors. Without a given type, the checkpoint's largest tensor decides."""
    wanted = dtype if lora_dtype == "auto" else lora_dtype
    if wanted == "auto":
        largest = max(checkpoint.names(), key=checkpoint.num_bytes)
        wanted = "float32" if checkpoint.dtype(largest) == "F32" else "bfloat16"
    return torch.float32 if wanted == "float32" else torch.bfloat16
