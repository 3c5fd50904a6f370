"""Files that are written whole or not at all, whatever is at their place."""

import os
import stat
import sys
import threading

import pytest

from vitreous._utils.storage import StorageError, atomic_file, write_text
from vitreous.pictures.canvas import Canvas

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes of POSIX")


def fail_half_way(file):
    with atomic_file(file) as draft:
        draft.write_text("half")
        raise ZeroDivisionError


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path):
    file = tmp_path / "new" / "page.html"
    write_text(file, "old")
    with pytest.raises(ZeroDivisionError):
        fail_half_way(file)
    assert file.read_text() == "old"
    assert list(file.parent.iterdir()) == [file]


def test_the_longest_name_can_be_written(tmp_path):
    file = tmp_path / ("n" * 250 + ".txt")
    write_text(file, "content")
    assert file.read_text() == "content"


@POSIX
@pytest.mark.parametrize("write", [lambda file: write_text(file, "new"), lambda file: Canvas(10, 10).save(file)])
def test_a_link_stays_one_and_its_target_is_written(tmp_path, write):
    target, link = tmp_path / "target.png", tmp_path / "link.png"
    target.write_text("old")
    link.symlink_to(target.name)
    write(link)
    assert link.is_symlink()
    assert target.read_bytes() != b"old"


@POSIX
def test_a_pipe_is_written_and_not_replaced(tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "new")
    reader.join(timeout=20)
    assert found == ["new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@POSIX
def test_what_cannot_be_written_is_one_sentence(tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop.name)
    (tmp_path / "file").write_text("")
    for place in (loop, tmp_path / "file" / "below", tmp_path):
        with pytest.raises(StorageError, match="cannot be written"):
            write_text(place, "new")
