"""Kinds of faults that a campaign injects."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.faults.campaign import Campaign, Fault, LeftOutError
from benchmarks.faults.resizes import begin_resize, scale, wait_for_resize

PAUSE_S = 0.7  # between stopping and continuing an engine: too short for the service to abandon it
DRAIN_S = 5.0  # limit of the wait for an empty rank
ORDER_S = 2.0  # of a slow or full disk, of slow links, and of changed bytes
CHANCE_S = 20.0  # limit of the wait for a transfer to disturb
NUM_FLUSHES = 3
AUTOMATIC_MOVE = "kill during an automatic move"
KILL_A_FRONT, SUPERVISOR = "kill a front", "kill a supervisor"
FRONT_DURING_RESIZE = "kill the front during a resize"
_POLL_S = 0.05


async def _kill(campaign: Campaign, count: int) -> int:
    ranks = campaign.some_ranks(count)
    campaign.send(signal.SIGKILL, *ranks)
    return len(ranks)


async def _kill_during_move(campaign: Campaign) -> int:
    apply = asyncio.create_task(campaign.apply_plan())
    await asyncio.sleep(campaign.drawn.uniform(0.0, 0.5))
    num_lost = await _kill(campaign, 1)
    await apply
    return num_lost


async def _kill_during_automatic_move(campaign: Campaign) -> int:
    """Kill an engine while experts move by the service's own decision (`--enable-eplb`)."""
    ranks = await campaign.wait_for_own_move()
    campaign.send(signal.SIGKILL, campaign.drawn.choice(ranks))
    return 1


async def _kill_while_starting(campaign: Campaign) -> int:
    """Kill an engine, and kill it again while it loads."""
    [rank] = campaign.some_ranks(1)
    old_pid = campaign.engines()[rank]
    campaign.send(signal.SIGKILL, rank)
    await campaign.wait_for_new_engine(rank, old_pid)
    await asyncio.sleep(campaign.drawn.uniform(0.0, 3.0))
    campaign.send(signal.SIGKILL, rank)
    return 1  # the second engine may not have joined


async def _kill_another_while_one_is_away(campaign: Campaign) -> int:
    first, second = campaign.some_ranks(2)
    old_pid = campaign.engines()[first]
    campaign.send(signal.SIGKILL, first)
    await campaign.wait_for_new_engine(first, old_pid)
    await asyncio.sleep(campaign.drawn.uniform(0.0, 10.0))  # also while it joins, or just after
    campaign.send(signal.SIGKILL, second)
    return 2


async def _hang(campaign: Campaign) -> int:
    """Stop an engine for good: the service must abandon, kill and restart it."""
    campaign.send(signal.SIGSTOP, *campaign.some_ranks(1))
    return 1


async def _pause(campaign: Campaign) -> int:
    """Stop an engine briefly: nothing may be lost, not even the rank."""
    ranks = campaign.some_ranks(1)
    campaign.send(signal.SIGSTOP, *ranks)
    await asyncio.sleep(PAUSE_S)
    campaign.send(signal.SIGCONT, *ranks)
    return 0


async def _kill_front(campaign: Campaign) -> int:
    campaign.front_is_away = True
    os.kill(campaign.front(), signal.SIGKILL)
    return 0


async def _kill_a_front(campaign: Campaign) -> int:
    """Kill any front, and wait for its replacement. Clients of the others notice nothing."""
    fronts = campaign.fronts()
    victim = campaign.drawn.choice(fronts)
    campaign.front_is_away = True
    os.kill(victim, signal.SIGKILL)
    await campaign.wait_for_fronts(len(fronts), without=victim)
    return 0


async def _kill_supervisor(campaign: Campaign) -> int:
    """Kill a supervisor, and with it its engine. The first supervisor also takes the front with it."""
    [rank] = campaign.some_ranks(1)
    campaign.front_is_away = rank == 0
    engine = Path(f"/proc/{campaign.engines()[rank]}/stat").read_text()
    front = campaign.front()
    os.kill(int(engine.rpartition(")")[2].split()[1]), signal.SIGKILL)  # state, parent
    if rank == 0:
        await campaign.wait_for_end(front)
    return 1


async def _clients_leave(campaign: Campaign) -> int:
    await campaign.leave(campaign.num_open)
    return 0


async def _drain(campaign: Campaign) -> int:
    """Drain a rank until it is empty, then another one while the first takes requests again."""
    for rank in campaign.some_ranks(2):
        await campaign.drain(rank, timeout_s=DRAIN_S)
        await campaign.drain(rank, undo=True)
    return 0


async def _kill_during_drain(campaign: Campaign) -> int:
    """Drain a rank, and kill it or another one while its requests move."""
    rank = campaign.some_ranks(1)[0]
    await campaign.drain(rank)
    await asyncio.sleep(campaign.drawn.uniform(0.0, 0.3))
    num_lost = await _kill(campaign, 1)
    await campaign.drain(rank, undo=True)
    return num_lost


async def _leave_during_drain(campaign: Campaign) -> int:
    rank = campaign.some_ranks(1)[0]
    leaving = asyncio.create_task(campaign.leave(campaign.num_open))
    await campaign.drain(rank)
    await leaving
    await campaign.drain(rank, undo=True)
    return 0


async def _resize(campaign: Campaign) -> int:
    """Add two ranks, and let them leave one after the other."""
    num_ranks = campaign.num_ranks
    for num_more in (2, 1, 0):
        await scale(campaign, num_ranks + num_more)
    return 0


async def _kill_during_growth(campaign: Campaign) -> int:
    """Add a rank, and kill it or another one at any moment until it has joined."""
    num_ranks = campaign.num_ranks
    await begin_resize(campaign, num_ranks + 1)
    await campaign.wait_for_new_engine(num_ranks, 0)
    await asyncio.sleep(campaign.drawn.uniform(0.0, 10.0))
    _kill_if_there(campaign, campaign.drawn.randrange(num_ranks + 1))
    await wait_for_resize(campaign)
    await scale(campaign, num_ranks)
    return 0


async def _kill_during_shrinking(campaign: Campaign) -> int:
    """Let a rank leave, and kill it or another one meanwhile."""
    num_ranks = campaign.num_ranks
    await scale(campaign, num_ranks + 1)
    await begin_resize(campaign, num_ranks)
    await asyncio.sleep(campaign.drawn.uniform(0.0, 0.5))
    _kill_if_there(campaign, campaign.drawn.randrange(num_ranks + 1))
    await wait_for_resize(campaign)
    await scale(campaign, num_ranks)
    return 0


async def _kill_front_during_resize(campaign: Campaign) -> int:
    """Add a rank, and kill the front meanwhile. Its replacement has the former or the new number of ranks."""
    num_ranks = campaign.num_ranks
    await begin_resize(campaign, num_ranks + 1)
    await asyncio.sleep(campaign.drawn.uniform(0.0, 10.0))
    front = campaign.front()
    await _kill_front(campaign)
    await campaign.wait_for_end(front)
    await wait_for_resize(campaign)
    await scale(campaign, num_ranks)
    return 0


def _kill_if_there(campaign: Campaign, rank: int) -> None:
    """Kill an engine, unless it has left."""
    if rank in campaign.engines():
        campaign.send(signal.SIGKILL, rank)


async def _sleep(campaign: Campaign) -> int:
    """Put the service to sleep, and wake it. Its open requests are kept."""
    await campaign.act(f"/sleep?mode=keep&level={campaign.drawn.choice((1, 2))}")
    await campaign.act("/wake_up")
    return 0


async def _flush(campaign: Campaign) -> int:
    """Forget all cached prefixes, several times under load."""
    for _ in range(NUM_FLUSHES):
        await campaign.act("/flush_cache")
        await asyncio.sleep(campaign.drawn.uniform(0.0, 0.2))
    return 0


async def _order(campaign: Campaign, **orders: object) -> int:
    """Give orders to the processes of the service for some time."""
    with campaign.orders.given(**orders):
        await asyncio.sleep(ORDER_S)
    return 0


async def _slow_disk(campaign: Campaign) -> int:
    """Make the disk slow, perhaps so slow that loads exceed their time limit."""
    return await _order(campaign, disk=campaign.drawn.choice((0.05, 1.0, 4.0)))


async def _full_disk(campaign: Campaign) -> int:
    """Fill the disk. Ranks serve without their tier on disk until they are restarted."""
    return await _order(campaign, disk="full")


async def _slow_transfers(campaign: Campaign) -> int:
    """Slow the copies to and from host memory and between nodes, perhaps so much that the other end counts as lost."""
    return await _order(campaign, transfers=campaign.drawn.choice((0.02, 0.3, 1.5)))


async def _flip_bytes(campaign: Campaign) -> int:
    """Change a bit of each record on its way to a rank."""
    before = campaign.orders.flips.num
    with campaign.orders.given(flips=True):
        await _until(lambda: campaign.orders.flips.num > before, "no record was on its way")
        await asyncio.sleep(ORDER_S)
    return 0


async def _slow_front_link(campaign: Campaign) -> int:
    """Delay each message between a rank and the front."""
    return await _order(campaign, link=[campaign.some_ranks(1)[0], campaign.drawn.choice((0.02, 0.2, 0.5))])


async def _cut_front_link(campaign: Campaign) -> int:
    """Cut the connection between a rank and the front. The rank attaches again."""
    if not campaign.cut_links(campaign.some_ranks(1)[0], [campaign.front()]):
        raise LeftOutError("the rank has no TCP connection to the front")
    return 1


async def _cut_links_of_a_pool(campaign: Campaign) -> int:
    """Cut all connections between a rank and the others of its pool. If steps use them, the pool regroups with all of them."""
    [rank] = campaign.some_ranks(1)
    engines, epoch = campaign.engines(), (await campaign.status())["epoch"]
    others = [engines[each] for each in campaign.pool_of(rank) if each != rank]
    if not campaign.cut_links(rank, others):
        raise LeftOutError("the ranks of a pool have no TCP connections to each other")
    await campaign.wait_for_epoch_after(epoch)
    return 0


async def _cut_transfers(campaign: Campaign) -> int:
    """Cut the connections over which pools fetch prefixes from each other."""

    def has_cut() -> bool:
        engines = campaign.engines()
        cut = [
            campaign.cut_links(rank, [pid for other, pid in engines.items() if other not in pool])
            for pool in campaign.pools.values()
            for rank in pool
        ]
        return any(cut)

    await _until(has_cut, "no prefix was fetched")
    return 0


async def _until(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait until a condition holds.

    Raises:
        LeftOutError: It did not within a time limit.
    """
    until_s = time.perf_counter() + CHANCE_S
    while not holds():
        if time.perf_counter() > until_s:
            raise LeftOutError(f"{otherwise} within {CHANCE_S:g} s")
        await asyncio.sleep(_POLL_S)


async def _damage_records(campaign: Campaign) -> int:
    """Damage records, and kill a rank, so that others look for the prefixes of its requests."""
    campaign.orders.damage(campaign.drawn)
    return await _kill(campaign, 1)


# While one of these lasts, no rank serves, or clients cannot be reached.
OUTAGES = ("kill all", "kill the front", SUPERVISOR, "sleep and wake", FRONT_DURING_RESIZE)
OF_RESIZES: Mapping[str, Fault] = {
    "resize": _resize,
    "kill during growth": _kill_during_growth,
    "kill during shrinking": _kill_during_shrinking,
    FRONT_DURING_RESIZE: _kill_front_during_resize,
}
FAULTS: Mapping[str, Fault] = {
    "kill one": lambda campaign: _kill(campaign, 1),
    "kill two": lambda campaign: _kill(campaign, 2),
    "kill all": lambda campaign: _kill(campaign, campaign.num_ranks),
    "kill during a move": _kill_during_move,
    AUTOMATIC_MOVE: _kill_during_automatic_move,
    "kill while starting": _kill_while_starting,
    "kill another while one is away": _kill_another_while_one_is_away,
    "hang": _hang,
    "pause": _pause,
    "kill the front": _kill_front,
    KILL_A_FRONT: _kill_a_front,
    SUPERVISOR: _kill_supervisor,
    "clients leave": _clients_leave,
    "drain two ranks": _drain,
    "kill during a drain": _kill_during_drain,
    "clients leave during a drain": _leave_during_drain,
    "sleep and wake": _sleep,
    "cut a link to the front": _cut_front_link,
    "slow link to the front": _slow_front_link,
    "cut links of a pool": _cut_links_of_a_pool,
}
OF_TIERS: Mapping[str, Fault] = {
    "flush": _flush,
    "slow disk": _slow_disk,
    "full disk": _full_disk,
    "damaged records": _damage_records,
    "slow transfers": _slow_transfers,
    "bytes flipped in transit": _flip_bytes,
}
OF_NODES: Mapping[str, Fault] = {"cut transfers": _cut_transfers}
