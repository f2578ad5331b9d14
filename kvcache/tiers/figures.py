"""What the tiers of a rank's cache did: counters since its start, and the present sizes."""

from typing import NamedTuple


class TierFigures(NamedTuple):
    """Figures of one rank. The sizes are those of its node, because the ranks of a node share the tiers."""

    # Counters: prompt tokens that requests loaded before their first start.
    host_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    peer_hit_tokens: int = 0  # fetched from another node
    host_load_bytes: int = 0
    disk_load_bytes: int = 0
    load_s: float = 0.0  # time of the thread that loads
    host_load_s: float = 0.0  # of that, the time of reads from the tier
    disk_load_s: float = 0.0
    host_store_bytes: int = 0
    disk_store_bytes: int = 0
    store_s: float = 0.0  # time of the threads that save blocks and copy them to the disk
    host_store_s: float = 0.0  # time of writes to the tier
    disk_store_s: float = 0.0  # of another thread, if there is host memory, too
    num_lookups: int = 0  # requests that looked for more of their prefix than the device had
    peer_fetch_bytes: int = 0  # received from other nodes
    peer_read_bytes: int = 0  # of these, read with NIXL
    peer_fetch_s: float = 0.0  # time of the threads that fetch, over all peers
    peer_serve_bytes: int = 0  # sent to other nodes
    # Fetches by outcome: something came, the peer had nothing, computing was predicted to be faster, the peer failed.
    num_fetches_whole: int = 0
    num_fetches_empty: int = 0
    num_fetches_declined: int = 0
    num_fetches_failed: int = 0
    num_faults: int = 0  # records with a wrong checksum, in a tier or after a transfer
    num_dropped: int = 0  # blocks that were not stored in a tier because copies fell behind
    host_bytes: int = 0  # gauges: bytes of the records in the tier
    host_capacity_bytes: int = 0
    disk_bytes: int = 0
    disk_capacity_bytes: int = 0
    is_disk_off: bool = False  # the disk failed, and the tier disabled itself
