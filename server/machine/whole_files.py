"""Files that are replaced as a whole, because the process that writes them may be killed."""

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file. Readers find the old content or the new one, never a part.

    Raises:
        OSError: The file cannot be written.
    """
    partial_path = path.with_name(f"partial_{path.name}")
    partial_path.write_text(text)
    partial_path.replace(path)
