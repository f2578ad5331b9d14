"""Transfer experts between ranks: a manifest, the tensors in pieces, a checksum, and sample outputs to compare.

The receiver verifies everything. The manifest must name exactly the tensors of its own slots, the checksum must be the
source's, and the new expert's outputs for real rows must equal the source's bit for bit. A transfer that fails still
runs to its end, so that both ends stay in step, and is then rejected.
"""

import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expert_placement.moves import Transfer
from moe.backend import ExpertLayer
from moe.expert_weights import Digest, ExpertWeights, flat_bytes, manifest, read_slot, sample, try_out
from scheduler.moves.channel import Pace, PeerChannel
from scheduler.moves.reports import Cause

_HEAD_BYTES = 2048


class MoveError(RuntimeError):
    """An expert arrived that differs from the one sent. It must not serve."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class MovableLayer(NamedTuple):
    """A layer with experts that may move: its slots, and the module with their gate function."""

    layer: ExpertLayer
    module: Any


def send_expert(
    place: MovableLayer, slot: int, transfer: Transfer, channel: PeerChannel, peer: int, pace: Pace
) -> int:
    """Send one slot's expert. Returns the number of bytes."""
    weights = read_slot(place.layer, slot)
    tensors = weights.tensors()
    x_TD = sample(place.layer)
    pace.take(0)
    y_TD = try_out(place.layer, place.module, weights, x_TD)
    tail = {"sample": x_TD.contiguous(), "answer": y_TD}
    head = {"transfer": list(transfer), "weights": manifest(tensors), "tail": manifest(tail)}
    channel.send(_head_bytes(head), peer)
    taken = Digest()
    for tensor in tensors.values():
        for piece in torch.split(flat_bytes(tensor), pace.piece_bytes):
            pace.take(len(piece))
            on_host = piece.cpu()
            channel.send(on_host, peer)
            taken.add(on_host)
    channel.send(torch.frombuffer(bytearray(taken.value()), dtype=torch.uint8), peer)
    for tensor in tail.values():
        channel.send(flat_bytes(tensor), peer)
    return weights.num_bytes


def receive_expert(
    place: MovableLayer,
    weights: ExpertWeights,
    transfer: Transfer,
    channel: PeerChannel,
    peer: int,
    pace: Pace,
) -> int:
    """Receive one expert into memory that does not serve, and verify it. Returns the number of bytes.

    Raises:
        MoveError: The expert differs from what was sent, or does not fit this layer.
    """
    head_bytes = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
    channel.receive(head_bytes, peer)
    head = json.loads(head_bytes.numpy().tobytes().rstrip(b"\0"))
    tensors = weights.tensors()
    fits = head["weights"] == manifest(tensors) and head["transfer"] == list(transfer)
    into = tensors if fits else _reserve(head["weights"])
    taken = Digest()
    for tensor in into.values():
        for piece in torch.split(flat_bytes(tensor), pace.piece_bytes):
            pace.take(0)  # the sender counts the bytes
            on_host = piece if piece.is_cpu else torch.empty_like(piece, device="cpu")
            channel.receive(on_host, peer)
            taken.add(on_host)
            if on_host is not piece:
                piece.copy_(on_host)
    wanted = torch.empty(len(taken.value()), dtype=torch.uint8)
    channel.receive(wanted, peer)
    tail = _reserve(head["tail"])
    for tensor in tail.values():
        channel.receive(flat_bytes(tensor), peer)
    if not fits:
        raise MoveError(
            Cause.MANIFEST,
            f"{_named(transfer)} came from rank {peer} as {head['weights']}; it must be {manifest(tensors)}",
        )
    if wanted.numpy().tobytes() != taken.value():
        raise MoveError(
            Cause.CHECK_SUM,
            f"{_named(transfer)} came from rank {peer} with a checksum that differs from the source's",
        )
    pace.take(0)
    _check_answer(place, weights, tail["sample"], tail["answer"], transfer)
    return weights.num_bytes


def copy_expert(
    place: MovableLayer, slot: int, weights: ExpertWeights, transfer: Transfer, pace: Pace
) -> int:
    """Copy an expert from one of this rank's slots, and verify the copy. Returns the number of bytes.

    Raises:
        MoveError: The copy differs.
    """
    source = read_slot(place.layer, slot)
    tensors, copies = source.tensors(), weights.tensors()
    taken, wanted = Digest(), Digest()
    for name, tensor in tensors.items():
        pieces = (torch.split(flat_bytes(each), pace.piece_bytes) for each in (tensor, copies[name]))
        for piece, copy in zip(*pieces, strict=True):
            pace.take(len(piece))
            copy.copy_(piece)
            wanted.add(piece)
            taken.add(copy)
    if taken.value() != wanted.value():
        raise MoveError(
            Cause.CHECK_SUM, f"{_named(transfer)} has a checksum that differs from the source slot's"
        )
    x_TD = sample(place.layer)
    pace.take(0)
    _check_answer(place, weights, x_TD, try_out(place.layer, place.module, source, x_TD), transfer)
    return weights.num_bytes


def _check_answer(
    place: MovableLayer, weights: ExpertWeights, x_TD: Tensor, y_TD: Tensor, transfer: Transfer
) -> None:
    ours = try_out(place.layer, place.module, weights, x_TD)
    if not torch.equal(ours.view(torch.int32), y_TD.view(torch.int32)):  # as bits, so that NaN equals itself
        raise MoveError(
            Cause.ANSWER, f"{_named(transfer)} has other outputs for {len(x_TD)} rows than in its source slot"
        )


def _named(transfer: Transfer) -> str:
    return f"expert {transfer.expert} of layer {transfer.layer} for slot {transfer.target}"


def _head_bytes(head: dict[str, Any]) -> Tensor:
    text = json.dumps(head).encode()
    assert len(text) <= _HEAD_BYTES, f"a manifest of {len(text)} bytes"
    return torch.frombuffer(bytearray(text.ljust(_HEAD_BYTES, b"\0")), dtype=torch.uint8)


def _reserve(described: dict[str, list[Any]]) -> dict[str, Tensor]:
    """Allocate the tensors of a manifest."""
    return {
        name: torch.empty(shape, dtype=getattr(torch, kind.removeprefix("torch.")))
        for name, (kind, *shape) in described.items()
    }
