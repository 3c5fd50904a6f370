"""Build the source archive and, from it, the wheel; install the wheel in an empty environment and run the demo there.

    python scripts/check_packages.py --out dist

The environment has nothing but the wheel. Its dependencies (PyTorch is large) are those of the interpreter that runs
this script, added behind everything else on the path.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
# Besides the package: what a person who opens the archive looks for.
IN_THE_ARCHIVE = (
    "README.md",
    "LICENSE",
    "CITATION.cff",
    "CHANGELOG.md",
    "pyproject.toml",
    "docs/index.md",
    "tests/conftest.py",
)


def build(folder: Path) -> tuple[Path, Path]:
    """Build the source archive and the wheel, which is made of the unpacked archive. Return both."""
    for old in (*folder.glob("vitreous-*.tar.gz"), *folder.glob("vitreous-*.whl")):
        old.unlink()
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
    (archive,), (wheel,) = folder.glob("vitreous-*.tar.gz"), folder.glob("vitreous-*.whl")
    return archive, wheel


def check_contents(archive: Path, wheel: Path) -> None:
    """Compare what is in both with the files of the repository."""
    files = {path.relative_to(SOURCES).as_posix() for path in SOURCES.joinpath("vitreous").rglob("*") if path.is_file()}
    wanted = {file for file in files if "__pycache__" not in file}
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if ".dist-info/" not in name}
    _same(wheel.name, wanted, packed)
    with tarfile.open(archive) as opened_archive:
        members = {member.name.partition("/")[2] for member in opened_archive if member.isfile()}
    absent = [name for name in (*IN_THE_ARCHIVE, *(f"src/{file}" for file in wanted)) if name not in members]
    if absent:
        sys.exit(f"{archive.name} has no {', '.join(absent)}")
    print(f"{wheel.name}: {len(packed)} files, {wheel.stat().st_size / 2**20:.1f} MB")
    print(f"{archive.name}: {len(members)} files, {archive.stat().st_size / 2**20:.1f} MB")


def _same(name: str, wanted: set[str], packed: set[str]) -> None:
    if wanted - packed:
        sys.exit(f"{name} has no {', '.join(sorted(wanted - packed))}")
    if packed - wanted:
        sys.exit(f"{name} has {', '.join(sorted(packed - wanted))}, which is not in src")


def install(wheel: Path, folder: Path) -> Path:
    """Make an environment in a folder, install the wheel there, and return its interpreter."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True)  # noqa: S603
    (packages,) = folder.glob("lib/python*/site-packages")
    # A plain line adds a folder at the end of the path; its own .pth files, one of an editable install, are not read.
    packages.joinpath("dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


def check_installed(python: Path, folder: Path) -> None:
    """Run the installed command on the shipped photos, far from the repository."""
    clean = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    where = _run([str(python), "-c", "import vitreous; print(vitreous.__file__)"], folder, clean)
    if python.parents[1] not in Path(where.strip()).parents:
        sys.exit(f"the environment imports {where.strip()}, not the wheel")
    command = str(python.parent / "vitreous")
    print(_run([command, "--version"], folder, clean).strip(), "from", where.strip())
    _run([command, "methods"], folder, clean)
    explain = [command, "explain", "demo-two", "--method", "twoscale", "--topk", "2", "--out", "out", "--json"]
    (photo,) = json.loads(_run(explain, folder, clean))["photos"]
    named = ", ".join(f"{target['name']} {target['probability']:.0%}" for target in photo["targets"])
    if not (folder / photo["comparison"]).is_file() or len(photo["targets"]) != 2:
        sys.exit("the demo of the wheel wrote no picture")
    print(f"the demo runs from the wheel: {named}")


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(  # noqa: S603
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Build, look inside, install, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of both files")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    archive, wheel = build(folder)
    check_contents(archive, wheel)
    with tempfile.TemporaryDirectory() as temporary:
        python = install(wheel, Path(temporary) / "environment")
        check_installed(python, Path(temporary))


if __name__ == "__main__":
    main()
