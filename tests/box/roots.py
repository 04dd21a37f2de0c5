"""Root folders with a Slurm in them, made once by debootstrap and cached.

One mechanism serves every Slurm version: each version is the one that a Debian release ships. Only debootstrap and
iproute2 are installed on the machine itself, and they start no service.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tests.box.errors import BoxError, BoxUnavailable

USER = "alice"
USER_ID = 2000

COMMON_PACKAGES = (
    # the cluster; MariaDB's core packages bring the server without its service, its scripts and 150 MB
    *("slurmctld", "slurmd", "slurm-client", "slurmdbd", "munge", "mariadb-server-core", "mariadb-client-core"),
    # what people type on a login node
    *("procps", "iproute2", "make", "git", "openssh-server"),
    # what the machine's Python and the wheels in its environment link to
    *("libffi8", "libsqlite3-0", "libbz2-1.0", "liblzma5", "libncursesw6", "libexpat1", "libuuid1", "libstdc++6"),
    "libgomp1",
)


@dataclass(frozen=True)
class Release:
    """A Debian release, its Slurm version, and the packages whose names differ between releases."""

    slurm: str
    suite: str
    packages: tuple[str, ...]


RELEASES = {
    release.slurm: release
    for release in (
        Release("22.05", "bookworm", ("libpmix2", "libssl3", "libreadline8")),
        Release("24.11", "trixie", ("libpmix2t64", "libssl3t64", "libreadline8t64")),
    )
}

# Runs inside the fresh root. Whatever changes here changes the recipe's hash, so that an old root is not used for it.
FINISH = f"""set -eu
export DEBIAN_FRONTEND=noninteractive
# Slurm opens libpmix.so, a link that only libpmix-dev has, and that would bring a compiler along
cd /usr/lib/*/pmix2/lib && ln -sf libpmix.so.2 libpmix.so
echo '127.0.0.1 localhost' >/etc/hosts
mariadb-install-db --user=root --force --datadir=/var/lib/mysql --auth-root-authentication-method=normal \
  --skip-test-db --innodb-log-file-size=4M >/dev/null
# slurmdbd would make it, and libmariadb 3.4 of 11.8.9 then forgets the limit of columns: every query fails with 5027
install -d /var/lib/mysql/slurm_acct_db
echo '{USER}:x:{USER_ID}:{USER_ID}::/home/{USER}:/bin/bash' >>/etc/passwd
echo '{USER}:x:{USER_ID}:' >>/etc/group
install -d -m 0755 -o {USER_ID} -g {USER_ID} /home/{USER}
chmod 0755 /root            # bind mounts below it must be within the plain user's reach
printf '[safe]\\n\\tdirectory = *\\n' >/etc/gitconfig
rm -rf /var/cache/apt/archives /var/lib/apt/lists /usr/share/doc /usr/share/man /usr/share/locale /usr/share/info
: >/etc/resolv.conf         # no name server: a reverse look-up answers at once instead of after 10 s
"""


def cache_dir() -> Path:
    """Where roots and running boxes are kept: ``$TOOLKIT_BOX_CACHE``, else a folder in the user's cache."""
    named = os.environ.get("TOOLKIT_BOX_CACHE")
    return Path(named).resolve() if named else Path.home() / ".cache/slurm-batch-toolkit/box"


def ensure_root(slurm: str) -> Path:
    """Return the root folder with this Slurm version.

    Bootstrap it first if it is not in the cache, which takes about a minute. Raises BoxUnavailable where that can't be
    done.
    """
    release = _release(slurm)
    _ensure_privileges()
    _ensure_tools()
    root = cache_dir() / f"{release.suite}-{_recipe_hash(release)}"
    if root.is_dir():
        return root
    root.parent.mkdir(parents=True, exist_ok=True)
    with locked(root.parent / f"{root.name}.lock"):
        if not root.is_dir():  # somebody else may have finished it while we waited for the lock
            _bootstrap(release, root)
    return root


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock on `path`, and hold it. The kernel frees it if we are killed."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _release(slurm: str) -> Release:
    try:
        return RELEASES[slurm]
    except KeyError:
        raise BoxError(f"no Slurm {slurm!r} to be had; there are: {', '.join(RELEASES)}") from None


def _packages(release: Release) -> list[str]:
    return sorted((*COMMON_PACKAGES, *release.packages))


def _recipe_hash(release: Release) -> str:
    recipe = "\n".join([release.suite, *_packages(release), FINISH])
    return hashlib.sha256(recipe.encode()).hexdigest()[:10]


def _ensure_privileges() -> None:
    """Raise BoxUnavailable early where namespaces are forbidden. Most containers forbid them, even to root."""
    if os.geteuid() != 0:
        raise BoxUnavailable("a Slurm in a box needs root (namespaces, mounts, debootstrap)")
    probe = ["unshare", "--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "mount", "-t", "tmpfs", "box", "/mnt"]
    done = subprocess.run(probe, capture_output=True, text=True)
    if done.returncode != 0:
        raise BoxUnavailable(f"this machine does not let root make namespaces: {done.stderr.strip()}")


def _ensure_tools() -> None:
    missing = [tool for tool in ("debootstrap", "ip", "nsenter", "setpriv") if shutil.which(tool) is None]
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise BoxUnavailable(f"{', '.join(missing)} not found, and no apt-get to install them with (not a Debian?)")
    packages = ["debootstrap", "iproute2", "debian-archive-keyring", "util-linux"]
    _say(f"{', '.join(missing)} not found: apt-get install {' '.join(packages)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        argv = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *command]  # two suites may begin at once
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        raise BoxUnavailable(f"apt-get install {' '.join(packages)} failed: {done.stderr.strip()[-500:]}")


def _bootstrap(release: Release, root: Path) -> None:
    """Build a root folder under a temporary name, and rename it when complete. So a folder with its name is whole."""
    _say(f"bootstrapping Debian {release.suite} with Slurm {release.slurm} into {root} (once, about a minute)")
    building = root.with_name(f"{root.name}.building")
    shutil.rmtree(building, ignore_errors=True)
    mirror = [os.environ["TOOLKIT_BOX_MIRROR"]] if "TOOLKIT_BOX_MIRROR" in os.environ else []
    include = f"--include={','.join(_packages(release))}"
    with root.with_name(f"{root.name}.log").open("w+") as log:
        _step(["debootstrap", "--variant=minbase", include, release.suite, str(building), *mirror], log)
        _step(["chroot", str(building), "/bin/sh", "-c", FINISH], log)
    building.chmod(0o755)
    building.rename(root)


def _step(argv: list[str], log: TextIO) -> None:
    # in namespaces of its own: what it mounts and what it starts ends with it, even when it is killed
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *argv]
    done = subprocess.run(apart, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_clean_environment())
    if done.returncode != 0:
        log.seek(0)
        end = "".join(log.readlines()[-15:])
        raise BoxUnavailable(f"{argv[0]} failed with {done.returncode}; the end of {log.name}:\n{end}")


def _clean_environment() -> dict[str, str]:
    """Return proxies of our environment, with a plain PATH and locale. Others would change the root's programs."""
    kept = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    return {**kept, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"}


def _say(message: str) -> None:
    print(f"box: {message}", file=sys.stderr, flush=True)
