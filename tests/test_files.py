from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fitune import files
from fitune.errors import UserError
from fitune.files import atomic_folder, atomic_write, clean_leftovers, is_disk_full, size_on_disk

ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """Without root's power to write anywhere, so that permissions count."""
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


def fail_with(code: int):
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_write_replaces_the_content_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    atomic_write(path, "计划 1")
    atomic_write(path, "计划 2")
    assert path.read_text(encoding="utf-8") == "计划 2"
    atomic_write(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert os.listdir(tmp_path) == ["plan.json"]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_write_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("real.txt")
    atomic_write(tmp_path / "link.txt", "new")
    assert (tmp_path / "link.txt").is_symlink() and (tmp_path / "real.txt").read_text() == "new"


@pytest.mark.parametrize(
    ("code", "why", "exit_code"),
    [
        (errno.ENOSPC, "the disk is full", 1),
        (errno.EDQUOT, "the disk is full", 1),
        (errno.EROFS, "the file system is read-only", 2),
        (errno.EIO, "Input/output error", 2),
    ],
)
def test_a_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, why: str, exit_code: int
) -> None:
    path = tmp_path / "plan.json"
    atomic_write(path, "old")
    monkeypatch.setattr(os, "fsync", fail_with(code))
    with pytest.raises(UserError) as caught:
        atomic_write(path, "new")
    assert caught.value.what == f"cannot write {path}" and why in caught.value.why
    assert caught.value.exit_code == exit_code
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]


def test_no_permission_is_explained(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    with as_nobody(folder):
        with pytest.raises(UserError) as caught:
            atomic_write(folder / "plan.json", "new")
        with pytest.raises(UserError) as caught_folder, atomic_folder(folder / "adapter"):
            raise AssertionError("not reached")
    for error in (caught.value, caught_folder.value):
        assert error.why == "you have no permission there" and "--out" in error.fix


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError) as caught:
        atomic_write(tmp_path / "folder", "x")
    assert "it is a folder, not a file" in caught.value.why
    with pytest.raises(UserError) as caught:
        atomic_write(tmp_path / "missing" / "x", "x")
    assert "does not exist" in caught.value.why
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError) as caught, atomic_folder(path):
            raise AssertionError("not reached")
        assert f"a file is in the way: {tmp_path / 'file'}" in caught.value.why
    assert (tmp_path / "file").read_text() == "mine"


def test_folder_appears_whole_and_replaces_the_previous_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "adapter"
    with atomic_folder(path) as temp:
        (temp / "a").write_text("1")
        (temp / "sub").mkdir()
        (temp / "sub" / "b").write_text("22")
        assert not path.exists()
    assert size_on_disk(path) == 3
    with atomic_folder(path) as temp:
        (temp / "c").write_text("new")
        assert (path / "a").read_text() == "1"
    assert os.listdir(path) == ["c"] and os.listdir(path.parent) == ["adapter"]


@pytest.mark.parametrize(
    ("error", "becomes", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), UserError, "the disk is full"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), UserError, "is full"),
        (ValueError("Error while serializing: No space left on device (os error 28)"), UserError, "disk is full"),
        (PermissionError(errno.EACCES, "Permission denied"), UserError, "no permission"),
        (PermissionError(errno.EACCES, "Permission denied", "/elsewhere/shard"), PermissionError, "/elsewhere/shard"),
        (ValueError("a bug"), ValueError, "a bug"),
        (KeyboardInterrupt("ctrl-c"), KeyboardInterrupt, "ctrl-c"),
    ],
)
def test_a_failed_block_keeps_the_previous_folder(
    tmp_path: Path, error: BaseException, becomes: type[BaseException], text: str
) -> None:
    path = tmp_path / "adapter"
    with atomic_folder(path) as temp:
        (temp / "a").write_text("old")
    with pytest.raises(becomes, match=text), atomic_folder(path) as temp:
        (temp / "a").write_text("half")
        raise error
    assert (path / "a").read_text() == "old" and os.listdir(tmp_path) == ["adapter"]


def test_a_failed_swap_keeps_the_previous_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "adapter"
    with atomic_folder(path) as temp:
        (temp / "a").write_text("old")
    real = os.rename

    def fail_second(source: Path, target: Path) -> None:
        if Path(target) == path and "tmp" in Path(source).name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(source, target)

    monkeypatch.setattr(os, "rename", fail_second)
    with pytest.raises(UserError, match="the disk is full"), atomic_folder(path) as temp:
        (temp / "a").write_text("new")
    assert (path / "a").read_text() == "old" and os.listdir(tmp_path) == ["adapter"]


@pytest.mark.parametrize("moment", ["writing", "between the renames"])
def test_what_a_killed_process_left_is_mended_by_the_next(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "checkpoints" / "step-10"
    with atomic_folder(path) as temp:
        (temp / "a").write_text("old")
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom fitune import files\n"
        "real = os.rename\n"
        "def rename(a, b):\n"
        "    if 'fitune-tmp' in str(a): os.kill(os.getpid(), signal.SIGKILL)\n"
        "    real(a, b)\n"
        "os.rename = rename\n"
        "with files.atomic_folder(Path(sys.argv[1])) as temp:\n"
        "    (temp / 'a').write_text('new')\n"
        "    if sys.argv[2] == 'writing': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path), moment], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    left = os.listdir(path.parent)
    assert any("fitune-tmp" in name for name in left)
    assert path.exists() == (moment == "writing")
    with atomic_folder(path.parent / "step-20") as temp:  # another name: it mends the whole folder
        (temp / "a").write_text("next")
    assert (path / "a").read_text() == "old"
    assert sorted(os.listdir(path.parent)) == ["step-10", "step-20"]


def test_cleaning_leaves_what_a_living_process_writes_and_what_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".plan.json.fitune-tmp-0123456789ab").write_text("leftover")
    (tmp_path / "notes.fitune-tmp-0123456789ab").write_text("not hidden, not ours")
    with atomic_folder(tmp_path / "adapter") as temp:
        (temp / "a").write_text("1")
        clean_leftovers(tmp_path)
        assert (temp / "a").exists()
    assert sorted(os.listdir(tmp_path)) == [".git", "adapter", "notes.fitune-tmp-0123456789ab"]
    clean_leftovers(tmp_path / "missing")


def test_what_this_process_builds_stays_where_nothing_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, and file systems without locks: one thread writes a checkpoint, another one a file beside it."""
    monkeypatch.setattr(files, "fcntl", None)
    left = tmp_path / ".old.fitune-tmp-0123456789ab"
    left.write_text("left by a killed process")
    with atomic_folder(tmp_path / "step-1") as temp:
        (temp / "parameters").write_text("whole")
        atomic_write(tmp_path / "best.json", "1")
        assert not left.exists()
    assert (tmp_path / "step-1" / "parameters").read_text() == "whole"
    assert sorted(os.listdir(tmp_path)) == ["best.json", "step-1"] and not files._building


def test_a_file_that_may_not_become_so_large(tmp_path: Path) -> None:
    """`ulimit -f`, or a file of 4 GiB on FAT32: told in one message, and what was there before stays."""
    import resource

    with atomic_folder(tmp_path / "saved") as temp:
        (temp / "a").write_bytes(b"before")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(UserError) as caught, atomic_folder(tmp_path / "saved") as temp:
            descriptor = os.open(temp / "a", os.O_WRONLY | os.O_CREAT)
            try:
                files.write_out(descriptor, bytes(10_000))
            finally:
                os.close(descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.what == f"cannot write {tmp_path / 'saved'}" and caught.value.exit_code == 1
    assert "may not become that large" in caught.value.why and "raise the limit" in caught.value.fix
    assert (tmp_path / "saved" / "a").read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1


def test_full_disk_is_known_from_other_failures() -> None:
    assert is_disk_full(OSError(errno.ENOSPC, "x"))
    assert not is_disk_full(OSError(errno.EACCES, "No space left on device"))
    assert not is_disk_full(RuntimeError("CUDA out of memory"))
