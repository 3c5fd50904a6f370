"""What counts as somebody's own code: the files beside it that it needs, and nothing that is installed there too."""

import sys
from pathlib import Path

import pytest
from torch import nn

import vitreous
from vitreous._utils.messages import run_user_file, source_hash
from vitreous.models import loaded as fingerprint

INSTALLED = ".venv/lib/python3.11/site-packages"
ENVIRONMENT = "miniconda3/lib"


@pytest.fixture
def changes(tmp_path, monkeypatch):
    """Whether the hash of a file at the root of a project changes with a module in a folder of it."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def differs(folder):
        place = tmp_path / folder
        place.mkdir(parents=True, exist_ok=True)
        monkeypatch.syspath_prepend(place)
        found = set()
        for number in (1, 22):
            (place / "needed_by_it.py").write_text(f"NUMBER = {number}\n")
            (tmp_path / "at_the_root.py").write_text("import needed_by_it\n")
            monkeypatch.delitem(sys.modules, "needed_by_it", raising=False)
            module = run_user_file(tmp_path / "at_the_root.py", "model")
            assert Path(module.needed_by_it.__file__).parent == place
            found.add(source_hash(module))
        monkeypatch.delitem(sys.modules, "needed_by_it")
        return len(found) == 2

    return differs


def test_files_below_its_folder_count_unless_they_are_installed_there(changes, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "miniconda3"))
    assert changes("parts")
    assert not changes(INSTALLED)
    assert not changes(ENVIRONMENT)


def test_in_a_folder_of_an_environment_files_count_as_anywhere_else(changes, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert changes("parts")
    assert not changes(INSTALLED)


def test_the_library_itself_does_not_count_where_it_lies_below(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "at_the_root.py").write_text("import vitreous\n")
    module = run_user_file(tmp_path / "at_the_root.py", "model")
    alone = source_hash(module)
    moved = Path(vitreous.__file__).parents[2] / "at_the_root.py"
    monkeypatch.setattr("vitreous._utils.messages._file_of", lambda found: _moved(found, module, moved))
    assert source_hash(module) == alone


def _moved(found, module, place):
    return place if found is module else Path(getattr(found, "__file__", None) or "/nowhere")


class Part(nn.Module):
    """Code of one's own, of which a model has many."""


def test_code_that_many_parts_share_is_read_once(monkeypatch):
    asked = []
    monkeypatch.setattr(fingerprint, "source_hash", lambda written: asked.append(written) or "")
    fingerprint.fingerprint_of(nn.Sequential(*(Part() for _ in range(5))))
    assert asked == [Part]
