"""Files and folders that are either whole or absent, whatever kills the program or fills the disk.

Both writers build a hidden sibling (`.NAME.fitune-tmp-…`), flush it to the disk and rename it into place. The writer
holds a lock on its sibling, which the system drops when the process dies: a sibling nobody locks is a leftover, and
the next write in the same folder removes it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from fitune.errors import EXIT_BAD_INPUT, EXIT_FAILED, UserError
from fitune.units import format_bytes

try:
    import fcntl
except ImportError:  # Windows has no flock; leftovers are then taken to be unused
    fcntl = None  # type: ignore[assignment]

Buffer: TypeAlias = bytes | bytearray | memoryview
# Windows would else put a carriage return before every line feed; `fsync` there wants a file that is open for writing.
BINARY: int = getattr(os, "O_BINARY", 0)
_TO_SYNC = os.O_RDONLY if os.name == "posix" else os.O_RDWR | BINARY
_LARGEST_WRITE = 64 << 20  # bytes a call: a signal is answered in between
_TEMP = "fitune-tmp"
_OLD = "fitune-old"
_LEFTOVER = re.compile(rf"\.(?P<name>.+)\.(?P<kind>{_TEMP}|{_OLD})-[0-9a-f]{{12}}")
# Siblings that this process is building: another of its threads may write beside them, where nothing can be locked.
_building: set[Path] = set()
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# How libraries word a full disk when they do not raise OSError: safetensors (the first three), and torch.save, whose
# zip writer (inline_container.cc) only notices that less was written than asked. Seen with torch 2.13 on a full tmpfs.
_DISK_FULL_WORDS = ("No space left on device", "os error 28", "Disk quota exceeded", "inline_container.cc")


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` means that the disk or the quota is used up, also in the words of torch and safetensors."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _DISK_FULL
    return any(words in str(error) for words in _DISK_FULL_WORDS)


def file_error(doing: str, path: Path, error: BaseException) -> UserError:
    """The `UserError` for a failed file operation: "cannot DOING PATH", its cause and a way out."""
    elsewhere = "choose another place with --out"
    code = error.errno if isinstance(error, OSError) else None
    if is_disk_full(error):
        why, fix = f"the disk is full ({_free(path)}, more is needed)", f"free some space there, or {elsewhere}"
    elif code == errno.EFBIG:
        why = "a file may not become that large there (4 GiB on FAT32; or a limit, see `ulimit -f`)"
        return UserError(f"cannot {doing} {path}", why, f"raise the limit, or {elsewhere}", EXIT_FAILED)
    elif code in (errno.EACCES, errno.EPERM):
        why, fix = "you have no permission there", f"change the permissions, or {elsewhere}"
    elif code == errno.EROFS:
        why, fix = "the file system is read-only", elsewhere
    elif code in (errno.ENOTDIR, errno.EEXIST):
        why, fix = f"a file is in the way: {_blocker(path)}", f"move it, or {elsewhere}"
    elif code == errno.EISDIR:
        why, fix = "it is a folder, not a file", elsewhere
    elif code == errno.ENOENT:
        why, fix = "the file or folder does not exist", "check the path"
    else:
        why, fix = str(getattr(error, "strerror", None) or error), "check the path and the disk"
    return UserError(f"cannot {doing} {path}", why, fix, EXIT_FAILED if is_disk_full(error) else EXIT_BAD_INPUT)


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turns an `OSError` of the block into a `UserError` that says "cannot DOING PATH" and why."""
    try:
        yield
    except OSError as error:
        raise file_error(doing, path, error) from error


def atomic_write(path: Path, content: str | bytes) -> None:
    """Writes a file so that at every moment it holds the old content or the new, never a part.

    Text is written as UTF-8. The folder must exist; a link is followed.

    Raises:
        UserError: disk full, no permission, read-only, or a folder stands there. The old file is still whole.
    """
    data = content.encode() if isinstance(content, str) else content
    with explained("write", path):
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        clean_leftovers(target.parent)
        temp, descriptor = _claim(target, folder=False)
        try:
            try:
                write_out(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temp, target)
            _sync_folder(target.parent)
        finally:
            temp.unlink(missing_ok=True)
            _building.discard(temp)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder to write into; when the block ends it takes the place of `path` by a rename.

    A folder that was there before stays whole until that moment, and for good if the block raises. Missing parents
    are created. A process killed between the two renames of the swap leaves both whole; `clean_leftovers` (which every
    write here calls first) puts the earlier one back.

    Raises:
        UserError: disk full (also as torch and safetensors report it), no permission, read-only, a file in the way.
    """
    with explained("write", path):
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        clean_leftovers(target.parent)
        temp, descriptor = _claim(target, folder=True)
    try:
        yield temp
        with explained("write", path):
            _sync_tree(temp)
            _swap(temp, target)
    except Exception as error:
        if isinstance(error, UserError) or not _about_writing(error, temp):
            raise
        raise file_error("write", path, error) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        _building.discard(temp)
        if descriptor >= 0:
            os.close(descriptor)


def claim_scratch(target: Path) -> tuple[Path, int]:
    """A new hidden sibling of `target` to work in, and the descriptor that locks it (-1: a system without locks). Once
    that is closed, or this process dead, it is a leftover.

    Raises:
        OSError: it cannot be made.
    """
    path, descriptor = _claim(target, folder=True)
    _building.discard(path)
    return path, descriptor


def remove_folder(path: Path) -> None:
    """Removes a folder so that nothing half-removed has its name when the process is killed meanwhile.

    What cannot be removed stays.
    """
    going = _sibling(path, _TEMP)  # a leftover, should the rest not happen: the next write here removes it
    try:
        os.rename(path, going)
    except OSError:  # no room for another name
        going = path
    shutil.rmtree(going, ignore_errors=True)


def write_out(descriptor: int, data: Buffer) -> None:
    """All of `data` into an open file. What fitune writes by itself goes through here: the one place where a test can
    make the disk full at any moment.

    Raises:
        OSError: as `os.write`; a part may have been written.
    """
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(descriptor, view[:_LARGEST_WRITE]) :]


def parse_json(text: str | bytes) -> Any:
    """`json.loads` of text that anybody may have written: every failure is a ValueError.

    Python raises RecursionError for deep nesting; JSONDecodeError (with its line and column) is a ValueError already.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal. Raises OSError when it cannot be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def clean_leftovers(folder: Path) -> None:
    """Removes what killed writes left in `folder`, and puts back a folder whose swap was cut in the middle.

    What a living process is writing is locked and stays.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        match = _LEFTOVER.fullmatch(name)
        if match is None or folder / name in _building:
            continue
        with _held(folder / name) as free:  # held until it is gone, so that nobody begins to write into it
            if free:
                _tidy(folder / name, match)


def _tidy(leftover: Path, match: re.Match[str]) -> None:
    if match["kind"] == _OLD and not os.path.lexists(leftover.with_name(match["name"])):
        os.rename(leftover, leftover.with_name(match["name"]))
    elif leftover.is_dir():
        shutil.rmtree(leftover, ignore_errors=True)
    else:
        leftover.unlink(missing_ok=True)


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """Locks an open file until it is closed or the process dies. False: another holder has it.

    Where the system or the file system knows no locks the answer is True.
    """
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
    return True


def size_on_disk(folder: Path) -> int:
    """Bytes of all files below `folder`; what vanishes or cannot be read while counting counts as 0."""
    total_bytes = 0
    for base, _, names in os.walk(folder):
        for name in names:
            try:
                total_bytes += os.lstat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total_bytes


def _claim(target: Path, folder: bool) -> tuple[Path, int]:
    """A new locked sibling of `target` and its descriptor (-1: a folder on a system without locks)."""
    while True:
        temp = _sibling(target, _TEMP)
        _building.add(temp)
        claimed = False
        try:
            if folder:
                temp.mkdir()
                descriptor = os.open(temp, os.O_RDONLY) if fcntl is not None else -1
            else:
                descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY, 0o666)
            # Another writer may have swept it up between its birth and the lock.
            claimed = descriptor < 0 or (try_lock(descriptor) and temp.exists())
            if claimed:
                return temp, descriptor
            os.close(descriptor)
        except FileNotFoundError:  # swept up so early, or the folder itself is gone
            if not target.parent.is_dir():
                raise
        finally:
            if not claimed:
                _building.discard(temp)


def _sibling(target: Path, kind: str) -> Path:
    return target.with_name(f".{target.name}.{kind}-{secrets.token_hex(6)}")


def _swap(temp: Path, target: Path) -> None:
    if not target.exists():
        os.rename(temp, target)
        _sync_folder(target.parent)
        return
    old = _sibling(target, _OLD)
    lock = os.open(target, os.O_RDONLY) if fcntl is not None else -1
    try:
        if lock >= 0:
            try_lock(lock)  # so that nobody takes `old` for a leftover before the new one is in place
        os.rename(target, old)
        try:
            os.rename(temp, target)
        finally:
            if not os.path.lexists(target):
                os.rename(old, target)
        _sync_folder(target.parent)
    finally:
        if lock >= 0:
            os.close(lock)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _held(path: Path) -> Iterator[bool]:
    """Locks a leftover; False where somebody writes it, or it is gone or not ours."""
    if fcntl is None:
        yield True
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


def _about_writing(error: BaseException, temp: Path) -> bool:
    """Whether the failure concerns the folder being written, not something that the block read elsewhere."""
    if is_disk_full(error):
        return True
    if not isinstance(error, OSError) or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG):
        return False
    return error.filename is None or str(error.filename).startswith(str(temp))


def _sync_tree(folder: Path) -> None:
    for base, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(os.path.join(base, name), _TO_SYNC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _sync_folder(Path(base))


def _sync_folder(folder: Path) -> None:
    """Makes renames in `folder` survive a power cut; only POSIX can open a folder for that."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _blocker(path: Path) -> Path:
    """The nearest part of `path` that exists and is not a folder."""
    for part in (path, *path.parents):
        if os.path.lexists(part) and not part.is_dir():
            return part
    return path


def _free(path: Path) -> str:
    for part in (path, *path.absolute().parents):
        try:
            return f"{format_bytes(shutil.disk_usage(part).free)} free"
        except OSError:
            continue
    return "no space left"
