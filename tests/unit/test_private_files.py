"""Private files: what is made, what is refused, and what another user gets of it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.errors import NotPrivate
from kvferry.private_files import (
    create_private,
    open_private,
    private_directory,
    read_private,
    write_private,
)
from vllm_engines import open_log

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """What kvferry makes is private also where the umask grants everything."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_made_directories_are_private_with_their_parents(tmp_path: Path) -> None:
    private_directory(tmp_path / "a" / "b")
    assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    private_directory(tmp_path / "a" / "b")  # and are accepted


def test_too_open_directory_is_refused_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o750)
    with pytest.raises(NotPrivate, match=rf"mode 0750.*chmod 700 {tmp_path}/a`"):
        private_directory(tmp_path / "a")
    assert mode(tmp_path / "a") == 0o750


def test_nobody_is_told_to_close_a_directory_for_everybody(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(NotPrivate, match=r"mode 1777.*name a directory inside it") as refused:
        private_directory(tmp_path)
    assert "chmod" not in str(refused.value)


def test_links_are_not_followed(tmp_path: Path) -> None:
    private_directory(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(NotPrivate, match="symbolic link"):
        private_directory(tmp_path / "link")
    (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NotPrivate, match="symbolic link"):
        open_private(tmp_path / "file")
    with pytest.raises(FileExistsError):
        create_private(tmp_path / "file")
    assert not (tmp_path / "elsewhere").exists()


def test_created_files_are_private_and_new(tmp_path: Path) -> None:
    os.close(create_private(tmp_path / "f"))
    assert mode(tmp_path / "f") == 0o600
    with pytest.raises(FileExistsError):
        create_private(tmp_path / "f")


def test_write_and_read(tmp_path: Path) -> None:
    write_private(tmp_path / "f", b"one")
    with pytest.raises(FileExistsError):
        write_private(tmp_path / "f", b"two")
    assert read_private(tmp_path / "f", 3) == b"one"
    assert mode(tmp_path / "f") == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["f"]  # no parts are left
    with pytest.raises(NotPrivate, match="more than 2 bytes"):
        read_private(tmp_path / "f", 2)


def test_what_others_may_read_is_refused(tmp_path: Path) -> None:
    write_private(tmp_path / "f", b"key")
    (tmp_path / "f").chmod(0o604)
    with pytest.raises(NotPrivate, match=rf"mode 0604.*chmod 600 {tmp_path}/f`"):
        read_private(tmp_path / "f", 10)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(NotPrivate, match="expected a regular file"):
        read_private(tmp_path / "fifo", 10)


@needs_root
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    private_directory(tmp_path / "d")
    write_private(tmp_path / "f", b"planted")
    os.chown(tmp_path / "d", NOBODY, NOBODY)
    os.chown(tmp_path / "f", NOBODY, NOBODY)
    with pytest.raises(NotPrivate, match=r"belongs to user .*65534"):
        private_directory(tmp_path / "d")
    with pytest.raises(NotPrivate, match=r"belongs to user .*65534"):
        read_private(tmp_path / "f", 10)


@needs_root
def test_another_user_reads_nothing() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own lies in a private directory
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "open").write_bytes(b"for all")
        write_private(folder / "f", b"key")
        private_directory(folder / "d")
        write_private(folder / "d" / "f", b"key")
        (folder / "d" / "f").chmod(0o644)
        attack = (
            "import os, sys\n"
            f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
            "for path in sys.argv[1:]:\n"
            "    try: print(open(path).read())\n"
            "    except PermissionError: pass\n"
        )
        paths = [str(folder / part) for part in ("open", "f", "d/f")]
        command = [sys.executable, "-S", "-c", attack, *paths]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "for all\n"


def test_logs_are_private(tmp_path: Path) -> None:
    for words in (b"first", b"second"):
        with open_log(tmp_path / "logs" / "engine.log") as log:
            log.write(words)
    assert (tmp_path / "logs" / "engine.log").read_bytes() == b"second"
    assert mode(tmp_path / "logs" / "engine.log") == 0o600
