"""A rank's adapters: those that it has loaded, and the places from which its kernels read them.

A place is an index that all ranks use for the same adapter, so that a row's place may travel to another rank. What an adapter adds to
an expert is held for the experts of this rank's slots, redundant copies included. If these change, the missing factors are read from
the adapter's file before the new experts serve (`arrive`), and enter the tables when they do (`hold`). So a move, a lost rank and a
rank that joins need nothing from other ranks, and every rank checks the same digest.

Loaded adapters without a place stay in memory up to a limit; the least recently used ones are dropped.

If an adapter's file can no longer be read when its experts change, rows that use it give NaN and the front ends their requests: the
other requests, and the ranks, go on.

`load` and `arrive` may run on any thread, next to steps. `place`, `spoil`, `hold` and `move_to` change what steps read: only while none runs.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from attention.cpu.latents import AbsorbedWeight
from attention.cpu.tiles import LANES
from kvcache.step import Step
from moe.backend import ExpertLayer
from moe.expert_weights import Held
from moe.lora.adapter_config import AdapterError
from moe.lora.adapter_files import read_adapter
from moe.lora.factors import LoadedAdapter
from moe.lora.tables import Factors, FactorTable
from moe.lora.targets import LayerExperts, Targets, WeightShape

_COPY = ".base_layer"


class AdaptedWeight(Protocol):
    """A weight [N, K] with tables for adapters: `moe.cpu.weights.packed_weight`, `moe.gpu.device_weight`."""

    out_dim: int  # N
    in_dim: int  # K
    adapters: FactorTable | None  # of its products; None if the model takes no adapters
    embedded_adapters: FactorTable | None  # of its rows as an embedding
    is_head: bool  # the output projection, which gets the step's `projected_R`

    @property
    def takes_rows(self) -> bool:
        """Whether its products were seen with rows of a step."""

    @property
    def is_quantised(self) -> bool:
        """Whether it is stored as codes."""

    def plain(self) -> Tensor:
        """Return its values."""


class _AdaptedLayer(NamedTuple):
    path: str
    layer: Any  # with `adapters`


class AdapterBank:
    """The adapters of one rank's model."""

    def __init__(
        self, net: Any, experts: Mapping[str, Any], layers: Sequence[ExpertLayer], held: Held, step: Step, *, most_loaded: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        """Take a loaded model with tables for its weights.

        Args:
            net: The model. experts: Its experts modules by path; `layers` are theirs.
            held: Experts of this rank's slots.
            step: The model's, which notes whether any adapter has a place.
            most_loaded: Most adapters to keep in memory.
            dtype: Type of their factors, float32 or bfloat16.
        """
        self._weights, self._embeddings = _adapted_weights(net)
        self._absorbed = {
            f"{path}.kv_b_proj": module
            for path, module in net.named_modules()
            if getattr(module, "absorbed_adapters", None) is not None
        }
        self._layers = [_AdaptedLayer(path, layer) for path, layer in zip(experts, layers, strict=True)]
        self.targets = _targets(self._weights, self._embeddings, self._absorbed, experts, layers)
        self._held: Held = [list(row) for row in held]
        self._step = step
        self._most_loaded, self._dtype = most_loaded, dtype
        self._lock = threading.Lock()
        # By digest, the least recently used first.
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()
        self._places: dict[int, LoadedAdapter] = {}
        self._spoiled: set[int] = set()
        # Called with a place, its adapter's digest and the reason if the adapter cannot follow its experts.
        self.on_spoiled: Callable[[int, str, str], None] = lambda _place, _digest, _reason: None

    def load(self, directory: Path, digest: str, *, max_rank: int) -> LoadedAdapter:
        """Load an adapter, or return it if it is in memory. Its experts' factors are read for this rank's slots.

        Args:
            digest: Digest that the adapter must have.

        Raises:
            AdapterError: It does not fit the model, cannot be read, or is another one.
        """
        with self._lock:
            found = self._loaded.get(digest)
            held = [list(row) for row in self._held]
        if found is None:
            files = read_adapter(directory, max_rank=max_rank)
            if files.digest != digest:
                raise AdapterError(
                    f"{directory} holds another adapter on this rank: its digest is {files.digest}, not {digest}"
                )
            found = LoadedAdapter(files, self.targets, self._base_rows, self._dtype)
        self._read(found, held)
        with self._lock:
            self._loaded[digest] = found
            self._loaded.move_to_end(digest)
            self._drop_unused()
        return found

    def forget(self, digest: str) -> None:
        """Drop an adapter that has no place."""
        with self._lock:
            if all(each.digest != digest for each in self._places.values()):
                self._loaded.pop(digest, None)

    def _drop_unused(self) -> None:
        placed = {each.digest for each in self._places.values()}
        for digest in [each for each in self._loaded if each not in placed]:
            if len(self._loaded) <= self._most_loaded:
                return
            del self._loaded[digest]

    def place(self, place: int, adapter: LoadedAdapter | None) -> None:
        """Let rows with this place use an adapter, or none. While no step runs.

        Raises:
            AdapterError: Factors of experts that have arrived since it was loaded cannot be read.
        """
        with self._lock:
            held = [list(row) for row in self._held]
        if adapter is not None:
            self._read(adapter, held)
        self._put_everywhere(place, adapter, held)
        with self._lock:
            self._spoiled.discard(place)
            if adapter is None:
                self._places.pop(place, None)
            else:
                self._places[place] = adapter
            self._drop_unused()
        self._note_places()

    def spoil(self, place: int) -> None:
        """Let rows with this place give NaN, because what an adapter adds to their experts is missing. While no step runs.

        A row of another rank must not get an expert's answer without the adapter. The front ends its request.
        """
        with self._lock:
            self._places.pop(place, None)
            self._spoiled.add(place)
            held = [list(row) for row in self._held]
        for (_, layer), row in zip(self._layers, held, strict=True):
            self._spoil(layer, place, len(row))
        self._note_places()

    def _note_places(self) -> None:
        self._step.has_placed = bool(self._places or self._spoiled)

    def _spoil(self, layer: Any, place: int, num_slots: int) -> None:
        nothing = Factors(torch.full((layer.up.in_dim, LANES), torch.nan), torch.zeros(1, layer.up.out_dim))
        for slot in range(num_slots):
            layer.adapters.put(place, slot, nothing, None)

    def arrive(self, held: Held) -> None:
        """Read what the placed adapters add to experts that this rank will hold. Drop what concerns neither these nor present ones.

        Raises:
            AdapterError: A file cannot be read, or has changed.
        """
        for _, reason in self._unreadable(held):
            raise AdapterError(reason)
        with self._lock:
            present, loaded = self._held, list(self._loaded.values())
        wanted = {
            (path, expert)
            for rows in (present, held)
            for (path, _), row in zip(self._layers, rows, strict=True)
            for expert in row
        }
        for adapter in loaded:
            adapter.keep_only(wanted)

    def _unreadable(self, held: Held) -> list[tuple[int, str]]:
        """Read the missing factors. Return the places with unreadable adapters, and the reasons."""
        with self._lock:
            placed, present = dict(self._places), self._held
        changed = [[] if new == old else new for new, old in zip(held, present, strict=True)]
        failed = []
        for place, adapter in placed.items():
            try:
                self._read(adapter, changed)
            except AdapterError as error:
                failed.append((place, str(error)))
        return failed

    def hold(self, held: Held) -> None:
        """Follow a change of the experts of this rank's slots. Spoil places with unreadable adapters. While no step runs."""
        failed = self._unreadable(held)
        with self._lock:
            before, self._held = self._held, [list(row) for row in held]
            placed = {place: adapter for place, adapter in self._places.items() if place not in dict(failed)}
            spoiled = set(self._spoiled)
        for (path, layer), old, new in zip(self._layers, before, held, strict=True):
            is_resized = layer.adapters.resize(len(new))
            for place in spoiled if is_resized else ():
                self._spoil(layer, place, len(new))
            for slot, expert in enumerate(new):
                if is_resized or old[slot] != expert:
                    for place, adapter in placed.items():
                        self._put(layer, path, place, slot, expert, adapter)
        self._report_unreadable(failed)

    def _report_unreadable(self, failed: Sequence[tuple[int, str]]) -> None:
        """Spoil the places, and report why."""
        for place, reason in failed:
            with self._lock:
                digest = self._places[place].digest
            self.spoil(place)
            self.on_spoiled(place, digest, reason)

    def move_to(self, other: "AdapterBank") -> None:
        """Serve another model of this rank, and put the adapters at the same places there. While no step runs.

        Args:
            other: The bank of that model, in which no adapter has a place. It must not be used afterwards.
        """
        failed = self._unreadable(other._held)
        with self._lock:
            self._weights, self._embeddings, self._absorbed = (
                other._weights,
                other._embeddings,
                other._absorbed,
            )
            self._layers, self.targets, self._held = other._layers, other.targets, other._held
            self._step = other._step
            placed, spoiled, held = dict(self._places), set(self._spoiled), [list(row) for row in self._held]
        for place, adapter in placed.items():
            if place not in dict(failed):
                self._put_everywhere(place, adapter, held)
        for place in spoiled:
            self.spoil(place)
        self._note_places()
        self._report_unreadable(failed)

    def _put_everywhere(self, place: int, adapter: LoadedAdapter | None, held: Held) -> None:
        for path, weight in self._weights.items():
            _table(weight.adapters).put(place, None if adapter is None else adapter.linears.get(path))
        for path, module in self._absorbed.items():
            factors = None if adapter is None else adapter.linears.get(path)
            module.absorbed_adapters.put(place, None if factors is None else factors.scaled())
        for path, weight in self._embeddings.items():
            _table(weight.embedded_adapters).put(
                place, None if adapter is None else adapter.embeddings.get(path)
            )
        for (path, layer), row in zip(self._layers, held, strict=True):
            for slot, expert in enumerate(row):
                self._put(layer, path, place, slot, expert, adapter)

    def _put(
        self, layer: Any, path: str, place: int, slot: int, expert: int, adapter: LoadedAdapter | None
    ) -> None:
        if adapter is None or expert < 0:
            layer.adapters.put(place, slot, None, None)
        else:
            layer.adapters.put(place, slot, *adapter.experts(path, [expert])[0])

    def _read(self, adapter: LoadedAdapter, held: Held) -> None:
        for (path, _), row in zip(self._layers, held, strict=True):
            adapter.experts(path, [expert for expert in row if expert >= 0])

    def _base_rows(self, name: str) -> Tensor | None:
        """Return the values of the base weight that a tensor of an adapter's file copies."""
        path = name.removeprefix("base_model.model.").removesuffix(".weight").removesuffix(_COPY)
        of_kind = self._weights if path in self._weights else self._embeddings
        return of_kind[path].plain().float().cpu() if path in of_kind else None


def _table(table: FactorTable | None) -> FactorTable:
    assert table is not None, "the model was built without places for adapters"
    return table


def _adapted_weights(net: Any) -> tuple[dict[str, AdaptedWeight], dict[str, AdaptedWeight]]:
    """Return the weights of linear layers and of embeddings, by path."""
    head = net.get_output_embeddings()
    weights: dict[str, AdaptedWeight] = {}
    embeddings: dict[str, AdaptedWeight] = {}
    for path, module in net.named_modules():
        weight: Any = getattr(module, "weight", None)
        if getattr(weight, "adapters", None) is None:
            continue
        if isinstance(module, nn.Embedding):
            embeddings[path] = weight
            continue
        weight.is_head = weight.is_head or module is head
        weights[path] = weight
    return weights, embeddings


def _absorbed_shape(module: Any) -> WeightShape:
    if hasattr(module, "kv_b_proj"):
        return WeightShape(*module.kv_b_proj.weight.shape)
    weight: AbsorbedWeight = module.absorbed  # on CPUs it replaces the layer
    heads, _, latent, _ = weight.value.shape
    return WeightShape(heads * (weight.key.shape[2] + weight.value_dim), latent)


def _targets(
    weights: Mapping[str, AdaptedWeight], embeddings: Mapping[str, AdaptedWeight], absorbed: Mapping[str, Any],
    experts: Mapping[str, Any], layers: Sequence[ExpertLayer],
) -> Targets:  # fmt: skip
    takes = {path for path, weight in weights.items() if weight.takes_rows or weight.is_head}
    return Targets(
        linears={
            **{path: WeightShape(weights[path].out_dim, weights[path].in_dim) for path in weights if path in takes},
            **{path: _absorbed_shape(module) for path, module in absorbed.items()},
        },
        embeddings={
            path: WeightShape(weight.out_dim, weight.in_dim)
            for path, weight in embeddings.items()
            if not weight.is_quantised
        },
        experts={
            path: LayerExperts(
                int(module.num_experts), layer.up.in_dim, layer.down.in_dim, bool(module.has_gate),
                bool(module.is_concatenated),
            )
            for (path, module), layer in zip(experts.items(), layers, strict=True)
        },
        other=frozenset(weights.keys() - takes),
    )  # fmt: skip
