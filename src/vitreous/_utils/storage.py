"""Atomic writes of files and folders, manifests with checksums, and expansion of paths."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitreous.errors import InputError, VitreousError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


MANIFEST = "manifest.json"
CHECKSUM = "sha256"  # key of the checksum in a sealed manifest
# How hard PNG files are compressed. Level 6, the default of Pillow, takes three times as long as this one, most of the
# time that drawing a figure takes, and makes maps on photos 2% smaller.
PNG_LEVEL = 4


class StorageError(VitreousError, OSError):
    """A file or folder cannot be written, already exists, or is damaged."""


@contextmanager
def atomic_folder(directory: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield a temporary folder that becomes ``directory`` only if the block ends without an exception.

    On any exception, including an interrupt, the temporary folder is removed and an earlier folder is unchanged.

    Args:
        directory: The folder to write; missing parents are created.
        overwrite: Replace an earlier folder written by this function. A folder with any other file is refused.
    """
    try:
        place = _end_of_links(directory)
        _refuse_to_destroy(place, overwrite=overwrite)
        with _parents_of(place):
            draft = _unused_sibling(place)
            try:
                draft.mkdir()
                yield draft
                _move_into_place(draft, place)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
    except VitreousError:
        raise
    except OSError as error:
        raise StorageError(f"{directory} cannot be written: {error.strerror or error}") from error


@contextmanager
def atomic_file(file: Path) -> Iterator[Path]:
    """Yield a temporary file that becomes ``file`` only if the block ends without an exception.

    Missing parents are created. A symbolic link is kept and its target replaced. Pipes and devices are written to.
    """
    try:
        place = _end_of_links(file)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists() and not place.is_file() and not place.is_dir():
            yield place
            return
        draft = _unused_sibling(place)
        try:
            yield draft
            draft.replace(place)
        finally:
            with suppress(OSError):
                draft.unlink()
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror or error}") from error


def _end_of_links(file: Path) -> Path:
    try:
        return file.resolve()
    except RuntimeError as error:  # before Python 3.13: a link to itself
        raise StorageError(f"{file} cannot be written: {error}") from error


def write_text(file: Path, text: str) -> None:
    """Write a text file atomically; missing parents are created."""
    with atomic_file(file) as draft:
        draft.write_text(text, encoding="utf-8", errors="backslashreplace")


def write_manifest(folder: Path, kind: str, schema: int, contents: Mapping[str, Any]) -> None:
    """Write the manifest of a folder, with the size and SHA-256 of every file in it."""
    files = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in sorted(folder.iterdir())}
    manifest = {"format": kind, "schema": schema, **contents, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def sealed(contents: Mapping[str, Any]) -> bytes:
    """Serialise a manifest as JSON whose last member is the SHA-256 of all bytes before it; see ``is_sealed``."""
    text = json.dumps(contents, indent=2, ensure_ascii=False)
    # A path may contain characters that UTF-8 cannot encode; JSON uses the same escape.
    body = text.removesuffix("\n}").encode("utf-8", errors="backslashreplace")
    return body + _seal(body)


def is_sealed(content: bytes) -> bool:
    """Whether the bytes of a manifest are exactly those that ``sealed`` returned."""
    body = content[: -len(_seal(b""))]
    return content == body + _seal(body)


def _seal(body: bytes) -> bytes:
    return f',\n  "{CHECKSUM}": "{hashlib.sha256(body).hexdigest()}"\n}}\n'.encode()


def read_manifest(folder: Path, kind: str, schema: int) -> dict[str, Any]:
    """Read the manifest of a folder and verify every file it lists."""
    manifest = parse_manifest(folder, kind, schema)
    for name, recorded in _listed_files(folder, manifest).items():
        _verify(folder / name, recorded)
    return manifest


def parse_manifest(folder: Path, kind: str, schema: int, *, sealed_since: int | None = None) -> dict[str, Any]:
    """Read the manifest of a folder and check its format and schema.

    Args:
        folder: the folder.
        kind: the expected format.
        schema: the current schema; with ``sealed_since``, older ones are accepted as well.
        sealed_since: the first schema whose manifests must be sealed.
    """
    content = _manifest_bytes(folder)
    manifest = _parsed(folder, content)
    if manifest.get("format") != kind:
        raise StorageError(f"{folder} does not hold a {kind}")
    found = manifest.get("schema")
    known = [schema] if sealed_since is None else [*range(1, schema + 1)]
    if isinstance(found, bool) or found not in known:
        raise StorageError(f"{folder} has schema {found}; this version of vitreous reads {schema}")
    if sealed_since is not None and found >= sealed_since and not is_sealed(content):
        raise StorageError(f"{folder / MANIFEST} is damaged: its content does not have the checksum at its end")
    return manifest


def _any_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder, whatever it describes."""
    return _parsed(folder, _manifest_bytes(folder))


def _manifest_bytes(folder: Path) -> bytes:
    if not folder.is_dir():
        raise StorageError(f"{folder} is not a folder")
    file = folder / MANIFEST
    if file.exists() and not file.is_file():  # reading a pipe would block
        raise StorageError(f"{file} is not a file")
    try:
        return file.read_bytes()
    except OSError as error:
        raise StorageError(f"{folder} has no readable {MANIFEST}: {error.strerror}") from error


def _parsed(folder: Path, content: bytes) -> dict[str, Any]:
    try:
        manifest = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise StorageError(f"{folder / MANIFEST} is damaged: it is not JSON") from error
    if not isinstance(manifest, dict):
        raise StorageError(f"{folder / MANIFEST} is damaged: it describes nothing")
    return manifest


def _listed_files(folder: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the files that a manifest lists."""
    files = manifest.get("files")
    # A name with a path could point outside of the folder.
    if not isinstance(files, dict) or any(Path(name).name != name for name in files):
        raise StorageError(f"{folder / MANIFEST} is damaged: it has no valid list of files")
    return files


def _verify(file: Path, recorded: object) -> None:
    """Compare a file with its entry in the manifest."""
    if not file.is_file():
        raise StorageError(f"{file} is missing")
    if not isinstance(recorded, dict) or _sha256(file) != recorded.get("sha256"):
        raise StorageError(f"{file} is damaged: its SHA-256 is not the one in {MANIFEST}")


def _sha256(file: Path) -> str:
    """Hash a file without reading it into memory at once."""
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from error


def _refuse_to_destroy(place: Path, *, overwrite: bool) -> None:
    """Raise unless ``place`` does not exist, is empty, or contains only an earlier result that may be replaced."""
    if not place.exists():
        return
    if not place.is_dir():
        raise StorageError(f"{place} is a file, not a folder")
    present = {entry.name for entry in place.iterdir()}
    if not present:
        return
    if not overwrite:
        raise StorageError(f"{place} already exists; overwrite=True replaces it")
    foreign = present - {MANIFEST}
    if MANIFEST in present:
        foreign -= set(_listed_files(place, _any_manifest(place)))
    if foreign:
        raise StorageError(f"{place} is not replaced: it holds files vitreous did not write, such as {min(foreign)}")


@contextmanager
def _parents_of(place: Path) -> Iterator[None]:
    """Create the missing parents of ``place``, and remove them if the block fails."""
    missing = [parent for parent in place.parents if not parent.exists()]
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for parent in missing:
            if any(parent.iterdir()):
                break
            parent.rmdir()
        raise


def _unused_sibling(place: Path) -> Path:
    """Return a temporary name next to ``place``, so that moving it is a rename within one file system."""
    return place.with_name(f".vitreous-{secrets.token_hex(6)}.partial")


def _move_into_place(draft: Path, place: Path) -> None:
    """Rename ``draft`` to ``place``; an earlier folder is deleted last, or restored on failure."""
    if not place.exists():
        draft.rename(place)
        return
    earlier = _unused_sibling(place)
    try:
        place.rename(earlier)
        draft.rename(place)
    except BaseException:
        if earlier.exists() and not place.exists():
            earlier.rename(place)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def expanded(path: str | Path) -> Path:
    """Expand ``~`` and ``~name``.

    Raises:
        InputError: There is no such user, or the path is not valid, such as a name of more than 255 bytes.
    """
    try:
        place = Path(path).expanduser()
        place.exists()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except RuntimeError as error:
        raise InputError(f"{path}: there is no such home folder") from error
    return place
