"""Files: written whole or not at all."""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path


def write(path: str | Path, text: str) -> None:
    """Write a text file so that at any moment, and whatever fails, it is the old one or the new one, whole.

    The text goes into a temporary file of the same folder, which takes the file's place once it is on the disk; several
    processes may write one file at the same time. Permissions are those of a plain write: an existing file keeps its own. A
    symbolic link is followed, and stays. What is no regular file (a terminal, a pipe) is written plainly.

    Raises OSError where a plain write would, and if the folder takes no new file.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            if target.exists():
                with target.open("a"):  # raises what a plain write raises if it may not be written
                    os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
