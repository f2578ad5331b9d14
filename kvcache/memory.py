"""Give memory back to the operating system while its addresses stay valid.

Kernels and step programs hold addresses. So a tensor that is not needed for a while keeps its addresses, and only its pages
go. Later reads see zeros, or a file's content, and writes get new pages. Rejected: freeing the tensors, because every address
would have to be found and replaced.
"""

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor

_DONTNEED = 4  # MADV_DONTNEED of Linux


def drop_pages(begin: int, end: int) -> None:
    """Give back the whole pages between two addresses of private memory.

    Raises:
        OSError: The system refuses.
    """
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        return
    library = ctypes.CDLL(None, use_errno=True)
    if library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _DONTNEED) != 0:
        raise OSError(ctypes.get_errno(), "madvise failed")


def give_back(tensors: Iterable[Tensor]) -> None:
    """Give back the memory of contiguous tensors on a CPU. Their values are lost: whole pages become zeros."""
    for tensor in tensors:
        assert tensor.is_contiguous(), "other tensors may share the memory between the rows"
        drop_pages(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
