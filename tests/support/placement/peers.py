"""Placement policies of other programs, reimplemented from their published descriptions for comparison.

They contain no code of these programs, and the product uses none of them. Each takes a load [layers, experts] and returns
slots [layers, slots]. Copies share load evenly, as these programs assume.
"""

import heapq

import numpy as np


def eplb_global(load: np.ndarray, num_slots: int, num_ranks: int) -> np.ndarray:
    """DeepSeek EPLB, global policy: add copies by largest load per copy, then pack heaviest first onto the lightest GPU."""
    return np.stack([_replicate_and_pack(row, num_slots, num_ranks)[0].reshape(-1) for row in load])


def eplb_hierarchical(
    load: np.ndarray, num_slots: int, num_groups: int, num_nodes: int, num_ranks: int
) -> np.ndarray:
    """DeepSeek EPLB, hierarchical policy: pack whole groups onto nodes, then place copies on GPUs within each node."""
    size, slots_per_node, ranks_per_node = (
        load.shape[1] // num_groups,
        num_slots // num_nodes,
        num_ranks // num_nodes,
    )
    rows = []
    for row in load:
        groups_of_node = pack(row.reshape(num_groups, size).sum(axis=1), num_nodes)
        blocks = []
        for groups in groups_of_node:
            experts = (groups[:, None] * size + np.arange(size)).reshape(-1)
            local, _ = _replicate_and_pack(row[experts], slots_per_node, ranks_per_node)
            blocks.append(experts[local])
        rows.append(np.concatenate(blocks).reshape(-1))
    return np.stack(rows)


def zigzag(load: np.ndarray, num_slots: int, num_ranks: int) -> np.ndarray:
    """ADRS's evolved packing: EPLB's copies, sorted, then dealt out forwards and backwards in turn."""
    rows = []
    for row in load:
        experts = _replicate(row, num_slots)
        order = np.argsort(-(row / np.bincount(experts, minlength=len(row)))[experts], kind="stable")
        dealt = experts[order].reshape(-1, num_ranks)
        dealt[1::2] = dealt[1::2, ::-1]
        rows.append(dealt.T.reshape(-1))
    return np.stack(rows)


def pack(weight: np.ndarray, num_packs: int) -> np.ndarray:
    """Pack the longest first, with equally many items per pack. Return [packs, items per pack] indices."""
    room = len(weight) // num_packs
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    heap = [(0.0, index) for index in range(num_packs)]
    for item in np.argsort(-weight, kind="stable").tolist():
        carried, lightest = heapq.heappop(heap)
        packs[lightest].append(item)
        if len(packs[lightest]) < room:
            heapq.heappush(heap, (carried + float(weight[item]), lightest))
    return np.array(packs)


def _replicate(row: np.ndarray, num_slots: int) -> np.ndarray:
    """Give each further slot to the expert with the largest load per copy. Return the experts of the slots."""
    copies = [1] * len(row)
    heap = [(-float(value), expert) for expert, value in enumerate(row)]
    heapq.heapify(heap)
    experts = list(range(len(row)))
    for _ in range(num_slots - len(row)):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        experts.append(expert)
        heapq.heappush(heap, (-float(row[expert]) / copies[expert], expert))
    return np.array(experts)


def _replicate_and_pack(row: np.ndarray, num_slots: int, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    experts = _replicate(row, num_slots)
    each = (row / np.bincount(experts, minlength=len(row)))[experts]
    packs = pack(each, num_ranks)
    return experts[packs], each[packs]


def swift(load: np.ndarray, slots: np.ndarray, num_ranks: int, most_swaps: int = 100) -> np.ndarray:
    """vllm-ascend's Swift balancer: keep first copies, choose redundant ones again, then swap with the hottest card.

    As described there: a swap must lower the hotter card by 1 % of the mean, a pair of cards swaps once, and a layer
    below 1.01 is left unchanged.
    """
    return np.stack(
        [_swift_layer(row, own, num_ranks, most_swaps) for row, own in zip(load, slots, strict=True)]
    )


def _swift_layer(row: np.ndarray, slots: np.ndarray, num_ranks: int, most_swaps: int) -> np.ndarray:
    cards = [list(card) for card in slots.reshape(num_ranks, -1).tolist()]
    mean = row.sum() / num_ranks
    if _card_loads(row, cards).max() < 1.01 * mean:
        return slots
    _choose_redundant_anew(row, cards)
    done: set[tuple[int, int]] = set()
    for _ in range(most_swaps):
        loads = _card_loads(row, cards)
        each = row / np.bincount(np.concatenate(cards), minlength=len(row))
        hot, best = int(loads.argmax()), (0.01 * mean, -1, -1, -1)
        for card in range(num_ranks):
            if card == hot or (min(card, hot), max(card, hot)) in done:
                continue
            for i, mine in enumerate(cards[hot]):
                for j, theirs in enumerate(cards[card]):
                    moved = each[mine] - each[theirs]
                    gain = loads[hot] - max(loads[hot] - moved, loads[card] + moved)
                    if gain > best[0] and mine not in cards[card] and theirs not in cards[hot]:
                        best = (gain, card, i, j)
        _, card, i, j = best
        if card < 0:
            break
        cards[hot][i], cards[card][j] = cards[card][j], cards[hot][i]
        done.add((min(card, hot), max(card, hot)))
    return np.concatenate(cards)


def _choose_redundant_anew(row: np.ndarray, cards: list[list[int]]) -> None:
    seen: set[int] = set()
    free = []
    for card, experts in enumerate(cards):
        for place, expert in enumerate(experts):
            if expert in seen:
                free.append((card, place))
                cards[card][place] = -1
            seen.add(expert)
    copies = np.ones(len(row))
    for _ in range(len(free)):
        copies[int((row / copies).argmax())] += 1
    wanted = np.repeat(np.arange(len(row)), (copies - 1).astype(int))
    each = row / copies
    loads = np.array([sum(each[e] for e in experts if e >= 0) for experts in cards])
    for expert in wanted[np.argsort(-each[wanted], kind="stable")].tolist():
        places = sorted(free, key=lambda at: (expert in cards[at[0]], loads[at[0]]))
        card, place = places[0]
        free.remove((card, place))
        cards[card][place] = expert
        loads[card] += each[expert]


def _card_loads(row: np.ndarray, cards: list[list[int]]) -> np.ndarray:
    each = row / np.bincount(np.concatenate(cards), minlength=len(row))
    return np.array([each[card].sum() for card in cards])


def even_imbalance(load: np.ndarray, slots: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return fullest over mean rank for copies that share evenly; a rank may hold two copies of an expert: [layers]."""
    result = []
    for row, own in zip(load, slots, strict=True):
        each = row / np.maximum(np.bincount(own, minlength=len(row)), 1)
        ranks = each[own].reshape(num_ranks, -1).sum(axis=1)
        result.append(ranks.max() / ranks.mean())
    return np.array(result)


def moved_part(load_slots: np.ndarray, new_slots: np.ndarray, num_ranks: int) -> float:
    """Return the fraction of slots with an expert that their rank did not have before."""
    moved = 0
    for old, new in zip(load_slots, new_slots, strict=True):
        for before, after in zip(old.reshape(num_ranks, -1), new.reshape(num_ranks, -1), strict=True):
            have = before.tolist()
            for expert in after.tolist():
                if expert in have:
                    have.remove(expert)
                else:
                    moved += 1
    return moved / new_slots.size
