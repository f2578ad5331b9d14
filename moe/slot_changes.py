"""From the slots that a rank has to those that another placement gives it: keep, move, read, let go.

For an epoch in which other ranks are members, while no step runs. An expert that the rank holds already comes to its
new slot without a byte being copied, whatever slot it is in; others are read into memory that serves nothing any more,
then into spare memory, which grows where there is none. What is left over is kept as spare up to a bound, or given back.

Knows no groups and no checkpoint; whoever asks says how an expert is read. A read that fails leaves all layers whole:
`held` says at any time what each slot holds.
"""

from collections.abc import Callable, Sequence

from expert_placement.placement import EMPTY
from moe.backend import Experts
from moe.expert_weights import ExpertWeights, read_slot
from moe.spare_slots import SpareSlots

Held = list[list[int]]  # by layer, the expert of each of this rank's slots; EMPTY where there is none
Read = Callable[[int, ExpertWeights], None]  # reads an expert of the layer into memory


def num_to_read(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Count the experts of one layer that are wanted and not held."""
    return len(set(wanted) - set(held) - {EMPTY})


def change_slots(
    layer: Experts, held: list[int], wanted: Sequence[int], read: Read, spare: SpareSlots, most_spare: int
) -> None:
    """Let a layer's slots hold `wanted`, whose number may be another one on a CPU.

    Args:
        held: what they hold; made to be `wanted`, or what is true if a read fails.
        read: called once for each expert that is not held.
        spare: taken from and given to.
        most_spare: that may wait there afterwards; more is given back to the system.

    Raises:
        whatever `read` raises; NoSpareSlotError: the device has no room for more slots.
    """
    if held == list(wanted):
        return
    memory = [read_slot(layer, slot) for slot in range(len(held))]
    sources = _sources(held, wanted)
    free = [slot for slot in range(len(held)) if slot not in sources]
    parts: list[ExpertWeights] = []
    for slot, (expert, source) in enumerate(zip(wanted, sources, strict=True)):
        if source is not None:
            parts.append(memory[source])
            continue
        into = _memory_for(layer, slot, free, memory, held, spare)
        if expert != EMPTY:
            read(expert, into)
        parts.append(into)
    layer.up.rearrange([part.up for part in parts])
    layer.down.rearrange([part.down for part in parts])
    held[:] = wanted
    for slot in free:
        spare.give_back(memory[slot], most_spare)


def _sources(held: Sequence[int], wanted: Sequence[int]) -> list[int | None]:
    """For each wanted slot the one that holds its expert now; None where none does."""
    slot_of = {expert: slot for slot, expert in enumerate(held) if expert != EMPTY}
    return [slot_of.get(expert) if expert != EMPTY else None for expert in wanted]


def _memory_for(
    layer: Experts,
    slot: int,
    free: list[int],
    memory: Sequence[ExpertWeights],
    held: list[int],
    spare: SpareSlots,
) -> ExpertWeights:
    """Find memory for a slot that takes over none: its own if that is free, another's, or spare one."""
    if not free:
        return spare.take(layer)
    taken = slot if slot in free else free[-1]
    free.remove(taken)
    held[taken] = EMPTY  # true from the first byte that is read into it
    return memory[taken]
