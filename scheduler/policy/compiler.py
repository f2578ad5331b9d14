"""What torch.compile between the organs cannot work with. Knows no torch: the start checks it before anything is loaded."""


def why_no_compiler(*, on_gpus: bool, is_invariant: bool, in_halves: bool) -> str:
    """Say why models are not compiled with these settings; "" if they can be."""
    if not on_gpus:
        return "--enable-torch-compile is for GPUs; the CPU's kernels are compiled already: leave it out"
    if is_invariant:
        return (
            "--enable-torch-compile does not go with --batch-invariant: compiled sums may have another order for "
            "another number of rows; leave one of them out"
        )
    if in_halves:
        return (
            "--enable-torch-compile does not go with --enable-dbo, whose halves run on two threads; leave one of "
            "them out"
        )
    return ""
