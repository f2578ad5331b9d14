"""Build a model to serve: `transformers`' own modules with our three organs, and this rank's share of weights.

Built on the meta device, checked against the checkpoint's headers, then materialised. A model's forward takes a
packed batch [1, T] described by a `Step`; see `Model.forward`.

Legend: T tokens (padded rows), V vocabulary, R rows whose logits are wanted.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from attention.recurrences import mixers
from attention.transformers_names import CACHE
from dispatch.dispatched import TokenDispatcher
from expert_placement.placement import EMPTY, Placement
from kvcache.paged_cache import PagedCache
from kvcache.step import Step
from moe.backend import Backend, ExpertLayer
from moe.cpu.backend import CPU
from moe.expert_weights import ExpertWeights, Held, SpareSlots, change_slots, read_slot
from moe.families import (
    UnsupportedModelError,
    build_on_meta,
    experts_modules,
    find_mtp_layers,
    leaves,
    quantisation_of,
    read_config,
)
from moe.load.checkpoint import Checkpoint
from moe.load.loader import EXPERTS, Loader, Report
from moe.load.plan import LoadPlan
from moe.load.stored_tensors import StoredTensors
from moe.load_counts import LoadCounts
from moe.mtp.layers import Origin, drafting_of
from moe.rehearsal import rehearse
from moe.scaled_experts import use_experts
from moe.slot_choice import slot_choices
from moe.text_part import body_of, project, use_attention


class Skeleton:
    """A model on the meta device: what it needs and holds is known, nothing is read or allocated yet."""

    def __init__(self, directory: Path, backend: Backend = CPU, *, has_mtp: bool = False) -> None:
        """Read the configuration and build the modules.

        Args:
            directory: the model's.
            backend: of the device that the model will run on.
            has_mtp: with the checkpoint's multi-token-prediction layers, for `Model.draft`: `cache_shapes` and `experts`
                have theirs after the decoder's. Else they are left unread.

        Raises:
            UnsupportedModelError: the model cannot be served, and why.
        """
        backend.register()
        self.directory, self.backend = directory, backend
        config = read_config(directory)
        self.quantisation = quantisation_of(directory, config)
        mtp_layers = find_mtp_layers(directory, config) if has_mtp else ()
        self.model: PreTrainedModel = build_on_meta(config, backend.model_dtype, mtp_layers)
        experts_modules(self.model)  # are there any?
        self.cache_shapes = rehearse(self.model)
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
        """Multi-token-prediction layers that it was built with."""
        drafting = drafting_of(self.model)
        return 0 if drafting is None else drafting.num_layers


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
        quantization: str | None = None,
        num_spare: int = 0,
        checkpoint: Checkpoint | None = None,
        report: Report = lambda _stage, _done, _total: None,
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
            quantization: int8 or int4: what experts and linear layers are quantised to as they are read.
            num_spare: experts that may move to this rank at once; see `Backend.open_experts`.
            checkpoint: what has the weights; None: the skeleton's directory.
            report: called while weights are read, with (stage, bytes done, bytes in all).

        Raises:
            CheckpointError: listing what does not fit.
        """
        self.skeleton, self.placement, self._rank = skeleton, placement, rank
        self.step = step  # that a forward runs: the caller fills it
        self.checkpoint = checkpoint or Checkpoint(skeleton.directory)
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
            _restore_buffers(self.net)
            self._backend.finish(self.net, self.step, skeleton.cache_shapes)
        self.checkpoint.release_memory()
        self._body = _KeptBody(self.net)
        self._drafting = drafting_of(self.net)
        # Rows that drafts start from: the decoder's, and the last draft's. One memory, which captured steps write as well.
        self._hidden_TD = self._drafted_TD = self._make_hidden()
        self._uses_cache = not mixers.lightning_modules(self.net)

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
        # Not in inference mode, to whose tensors the thread that moves experts could not write.
        with torch.no_grad():
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
        choices = slot_choices(placement, rank)
        for layer, choice, counts in zip(self.layers, choices, self.load_counts.layers, strict=True):
            layer.dispatcher, layer.choice, layer.counts = dispatcher, choice, counts

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
        width = self.net.get_input_embeddings().weight.shape[1]
        return torch.empty(rows, width, dtype=self._backend.model_dtype, device=self.device)

    def _read_expert(self, name: str, module: Any, expert: int, into: ExpertWeights) -> None:
        for leaf, slots in zip(leaves(module), into, strict=True):
            self._reader.read(name, leaf, expert, slots)

    def _load_layers(
        self, local_LS: np.ndarray, dispatcher: TokenDispatcher, sizes: Mapping[str, int], report: Report
    ) -> list[ExpertLayer]:
        """Read this rank's experts, layer by layer; `sizes` are those of its parameters in the files."""
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
        # What is kept is the decoder's, which a program of the whole model does not call.
        run = partial(type(self.net).forward, self.net) if keeps_hidden else self.net
        with self._body.keeping(keeps_hidden or self._drafting is not None):
            output: Any = run(
                input_ids=token_T[None],
                position_ids=self.step.positions[None],
                use_cache=self._uses_cache,
                logits_to_keep=logits_R,
                pages=cache,
                **{CACHE: cache},
            )
        logits: Tensor = output.logits[0].float()
        if self._drafting is not None:
            # A program of the whole model says where it left them.
            found_TD = getattr(output, "hidden_TD", None)
            found_TD = self._body.hidden_TD if found_TD is None else found_TD
            self._hidden_TD[: len(found_TD)] = found_TD
        return logits

    @torch.inference_mode()
    def draft(
        self, depth: int, token_T: Tensor, cache: PagedCache, rows_R: Tensor, hidden_T: Tensor
    ) -> Tensor:
        """Run a multi-token-prediction layer for what `step` describes; collective over the dispatcher's group.

        A row at position q is given the token at q + 1 and predicts the one at q + 2. Its keys and values are cached at its
        place, in the layer's own pages: rows of all positions before must have been through the layer. Where a model has
        several layers, a deeper draft runs the next one on the same positions, with tokens one place on. Where it has one, this
        runs again on the next position, with the newest draft; what it caches there is to be written again.

        Args:
            depth: 0 after a forward; 1 and more after a draft. Deeper ones than there are layers use these again.
            token_T: [num_padded] int64 token behind each row; rows past the step's tokens are any valid id.
            cache: written at the step's places.
            rows_R: [R] int64 rows whose logits are wanted.
            hidden_T: [num_padded] int64 row of the call before (the last forward for depth 0, else the last draft) whose
                hidden state each row goes on from.

        Returns:
            [R, V] float32 logits, new.
        """
        assert self._drafting is not None, "the model was built without its multi-token-prediction layers"
        cache.step = self.step
        before_TD = self._drafted_TD if depth else self._hidden_TD
        drafted = self._drafting.draft(
            depth, token_T, Origin(before_TD, hidden_T), self.step.positions, cache, rows_R
        )
        self._drafted_TD = drafted.hidden_TD
        return drafted.logits_RV

    @torch.inference_mode()
    def logits_of(self, rows_R: Tensor) -> Tensor:
        """Compute more rows' logits of the last forward, which kept its hidden states; local.

        Returns:
            [R, V] float32, the bits that `forward` gives for these rows.
        """
        return self._body.logits(rows_R)

    @property
    def net(self) -> PreTrainedModel:
        """The modules."""
        return self.skeleton.model

    @property
    def num_mtp_layers(self) -> int:
        """Layers that draft."""
        return self.skeleton.num_mtp_layers

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
        weight: Tensor = self.net.get_output_embeddings().weight
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


class _KeptBody:
    """A model's hidden states, kept after a forward, so that logits of many rows can be computed a few at a time.

    Rejected: asking the one forward for all rows: logits of 8,192 rows over 150,000 tokens are 5 GB.
    """

    def __init__(self, net: PreTrainedModel) -> None:
        self._net, self._decoder = net, body_of(net)
        self._is_wanted = False
        self._output: Any = None
        self._decoder.register_forward_hook(self._note)

    @contextmanager
    def keeping(self, wanted: bool) -> Iterator[None]:
        """Forget what was kept; keep what a forward gives meanwhile, if that is wanted."""
        self._is_wanted, self._output = wanted, None
        try:
            yield
        finally:
            self._is_wanted = False

    @property
    def hidden_TD(self) -> Tensor:
        """What the decoder gave, its norm included."""
        rows: Tensor = self._kept[0][0]
        return rows

    def logits(self, rows_R: Tensor) -> Tensor:
        """Compute rows' logits: [R, V]."""
        return project(self._net, self._decoder, self._kept, rows_R)

    @property
    def _kept(self) -> Any:
        assert self._output is not None, "the last forward was not asked to keep its hidden states"
        return self._output

    def _note(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        if self._is_wanted:
            self._output = output


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
