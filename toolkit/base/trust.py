"""Who may write where, and so whose files are trusted.

What a run executes or resumes from is only as trustworthy as everyone who may change it, or replace it. Besides this
user these are trusted: root; for the folders above, the owner of the file system; and everyone that ``$TOOLKIT_TRUST``
names: users, and groups as ``@group``, with commas between them.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from toolkit.base import fsio
from toolkit.base.errors import RequestError

TRUST_VARIABLE = "TOOLKIT_TRUST"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def refuse_untrusted(path: Path, doing: str) -> None:
    """Raise RequestError if someone who is not trusted may change or replace ``path``.

    ``path`` itself must belong to a trusted user and be writable by no other. A folder above it may be writable by
    others if it is sticky, as /tmp is: there users can rename only their own files. A path that does not exist passes.
    """
    why = reason_against(path)
    if why is not None:
        raise RequestError(f"{doing}: {why}; {_advice(path.stat())}")
    for above in _way_to(path):
        status = above.lstat()
        is_sticky = bool(status.st_mode & stat.S_ISVTX) or stat.S_ISLNK(status.st_mode)  # a link has no mode of its own
        if not is_sticky and _others_write(status):
            mode = f"{stat.S_IMODE(status.st_mode):04o}"
            why = f"others may write into {above} (mode {mode}) and replace what lies in it"
        # Closed or sticky: only the owner could replace what lies in it.
        elif status.st_uid in _trusted_users() or status.st_uid == _file_system_owner(above, status.st_dev):
            continue
        else:
            why = f"{above} belongs to {user_name(status.st_uid)}, who may replace what lies in it"
        raise RequestError(f"{doing}: {why}; {_advice(status)}")


def reason_against(path: Path) -> str | None:
    """Return why what lies at ``path`` is not trusted. None: it is, or nothing is there.

    A link stands for its target. The folders above are not examined.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    if status.st_uid in _trusted_users() and not _others_write(status):
        return None
    return (
        f"{path} belongs to {user_name(status.st_uid)} and has mode {stat.S_IMODE(status.st_mode):04o}: users other "
        f"than {user_name(os.geteuid())} may write there"
    )


def _advice(status: os.stat_result) -> str:
    trusted = [user_name(status.st_uid)] if status.st_uid not in _trusted_users() else []
    is_open = not stat.S_ISLNK(status.st_mode) and _others_write(status)
    # If only the group may write, it is enough to trust the group.
    if is_open and not status.st_mode & stat.S_IWOTH:
        trusted.append(f"@{group_name(status.st_gid)}")
    close = "close it (chmod go-w; chmod +t for a shared folder above)" if is_open else "use a folder of your own"
    names = ",".join(trusted)
    return f"{close}, or, if you trust {names}, set {TRUST_VARIABLE}={names}" if names else close


def own_part(folder: Path) -> Path:
    """Return ``folder``, or this user's part of it, if several users share it. The part need not exist yet.

    A folder is shared if it belongs to another user and this user may write into it.
    """
    try:
        status = folder.stat()
    except OSError:
        return folder
    is_shared = status.st_uid != os.geteuid() and status.st_mode & _OTHERS_WRITE
    return folder / user_name(os.geteuid()) if is_shared else folder


def trust_owner(path: Path) -> None:
    """Trust the owner of ``path`` in this process and in those that it starts."""
    named = os.environ.get(TRUST_VARIABLE)
    owner = user_name(path.stat().st_uid)
    os.environ[TRUST_VARIABLE] = f"{named},{owner}" if named else owner


def user_name(uid: int) -> str:
    """Return the name of a user, or the number if it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return the name of a group, or the number."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _trusted_names() -> list[str]:
    return [name.strip() for name in os.environ.get(TRUST_VARIABLE, "").split(",") if name.strip()]


def _trusted_users() -> set[int]:
    trusted = {os.geteuid(), 0}
    for name in _trusted_names():
        if name.isdigit():
            trusted.add(int(name))
        elif not name.startswith("@"):
            try:
                trusted.add(pwd.getpwnam(name).pw_uid)
            except KeyError:
                raise RequestError(f"{TRUST_VARIABLE}: there is no user {name!r} here; a group is @{name}") from None
    return trusted


def _others_write(status: os.stat_result) -> bool:
    if status.st_mode & stat.S_IWOTH:
        return True
    return bool(status.st_mode & stat.S_IWGRP) and not _is_own_group(status.st_gid)


def _is_own_group(gid: int) -> bool:
    """True if a group is root's, is trusted by name, or has this user alone, as many systems make one."""
    if gid == 0 or f"@{group_name(gid)}" in _trusted_names() or f"@{gid}" in _trusted_names():
        return True
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return me.pw_gid == gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


def _file_system_owner(path: Path, device: int) -> int:
    """Return the owner of the folder at which the file system of ``path`` begins."""
    while path.parent != path and path.parent.stat().st_dev == device:
        path = path.parent
    return path.stat().st_uid


def _way_to(path: Path) -> Iterator[Path]:
    """Yield each folder and link by which the system comes to ``path``, in its order, up to the path's end.

    The caller has made sure that links do not lead in a circle.
    """
    at, names = Path("/"), list(reversed(path.absolute().parts[1:]))
    yield at
    while names:
        name = names.pop()
        at = at.parent if name == ".." else at / name
        try:
            is_link = stat.S_ISLNK(at.lstat().st_mode)
        except FileNotFoundError:
            return
        yield at
        # Continue with the link's target, from the folder of the link.
        if is_link:
            target = at.readlink()
            at = Path("/") if target.is_absolute() else at.parent
            names += [part for part in reversed(target.parts) if part != "/"]


def cache_dir() -> Path | None:
    """Return this user's cache folder, 0700. None if it cannot be written, or if others may change it."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = fsio.expand(base) / "slurm-batch-toolkit"
    try:
        if not folder.is_absolute() or reason_against(fsio.make_dir(folder)) is not None:
            return None
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
