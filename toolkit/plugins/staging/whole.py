"""``python -m toolkit.plugins.staging.whole``: tell which copies on this node still have all their files.

A cleaner of temporary files may have removed some, also of a copy that a job uses. It reads a JSON object of the copies
by the paths of their originals, and prints those that are whole in the same form.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from toolkit.files import records
from toolkit.files.records import COUNT, TEXT, Record

#: Begins the name of a user's folder of copies on a disk of a node.
OWN_FOLDER = "toolkit-stage-"
_MARK = Record({"boot": TEXT, "files": COUNT, "bytes": COUNT})


def is_whole(own: Path, key: str) -> bool:
    """True if the copy is complete. After a crash of the node its files may be empty, so it must be of this boot."""
    known = records.read_or(own / f"{key}.json", _MARK, {}, [])
    return bool(known) and known == mark(own / key)


def mark(copied: Path) -> dict[str, Any]:
    """Return what a copy has now, without the compiled files that Python adds to it."""
    files = size_bytes = 0
    for folder, folders, names in os.walk(copied):
        if "__pycache__" in folders:
            folders.remove("__pycache__")
        files += len(folders) + len(names)
        size_bytes += sum(os.lstat(f"{folder}/{name}").st_size for name in names)
    return {"boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "files": files, "bytes": size_bytes}


def _is_whole_copy(copy: Path) -> bool:
    place = copy if copy.parent.name.startswith(OWN_FOLDER) else copy.parent  # a file lies in a folder of its own
    return is_whole(place.parent, place.name)


def main() -> None:
    """Print the copies that are whole."""
    copies = json.load(sys.stdin)
    print(json.dumps({source: copy for source, copy in copies.items() if _is_whole_copy(Path(copy))}))


if __name__ == "__main__":
    main()
