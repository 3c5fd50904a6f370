"""An error in somebody's own method names the method, its file and line, and the declaration that is missing."""

import inspect

import pytest
import torch

import forked
import vitreous
from small_models import golden_model
from vitreous.errors import MethodError, UnsupportedModelError
from vitreous.methods import TokenReadout, View, register
from vitreous.methods.integrated import PathIntegral
from vitreous.methods.registry import _methods
from vitreous.plugin import load_plugin, method
from vitreous.tape import Pass

pytestmark = pytest.mark.usefixtures("registry")

PLUGIN = """
from vitreous.plugin import method
from vitreous.tape import Pass

LOGIT = Pass("plain", "logit")

@method("mine", layer=1{declared})
def mine(view, layer):
    rows = slice(None)
    return {read}
"""
LINE = 10  # of what it returns

READS = {
    "view.tokens(layer).sum(-1)": ("the tokens", "activations", "tokens"),
    "view.norm(layer).sum(-1)": ("the first norm's output", "activations", "norms"),
    "view.residual_mid(layer).sum(-1)": ("the stream inside", "activations", "residual"),
    "view.after_attention(layer).sum(-1)": ("the stream inside", "activations", "residual"),
    "view.residual_post(layer).sum(-1)": ("the stream inside", "activations", "residual"),
    "view.attention(layer).rows(rows).mean((1, 2))": ("the attention", "activations", "attention"),
    "view.attention(layer)[:, :, 0].mean(1)": ("the attention", "activations", "attention"),
    "view.attention_matrix(layer).mean((1, 2))": ("the attention", "activations", "attention"),
    "view.attention(layer).score_rows(rows).mean((1, 2))": ("the attention", "activations", "attention"),
    "view.value(layer).norm(dim=-1).mean(1)": ("the values", "activations", "attention_rows"),
    "view.token_gradient(LOGIT, layer).sum(-1)": ("the gradient of the tokens", "gradients", "tokens"),
    "view.norm_gradient(LOGIT, layer).sum(-1)": ("the gradient of the first norm's output", "gradients", "norms"),
    "view.attention_gradient(LOGIT, layer).mean((1, 2))": ("the gradient of the attention", "gradients", "attention"),
    "view.attention_gradient(LOGIT, layer, rows).mean((1, 2))": (
        "the gradient of the attention",
        "gradients",
        "attention",
    ),
    "view.biases(LOGIT, layer)": ("bias x gradient", "gradients", "biases"),
}


@pytest.fixture
def write(tmp_path):
    """Write a plugin and load it."""

    def written(read, declared=""):
        file = tmp_path / "my_file.py"
        file.write_text(PLUGIN.format(read=read, declared=declared))
        load_plugin(file)
        return file

    return written


def explain(methods="mine"):
    model, images = golden_model()
    return vitreous.explain(model, images, methods)


@pytest.mark.parametrize("read", READS)
def test_what_was_not_declared_is_named_and_declaring_it_helps(write, read):
    what, argument, name = READS[read]
    write(read)
    wanted = (
        f"method mine (my_file.py, line {LINE}): it reads {what} of block 1, which it did not declare: "
        f"add {argument}=({name!r},)"
    )
    with pytest.raises(MethodError) as raised:
        explain()
    assert str(raised.value) == wanted
    write(read, f", {argument}=({name!r},)")
    scores = explain().scores["mine"]
    assert scores.isfinite().all()
    assert scores.std() > 0


def test_another_method_that_has_it_recorded_changes_nothing(write):
    write("view.tokens(layer).sum(-1)")
    with pytest.raises(MethodError, match="which it did not declare"):
        explain(["ixg.plus", "mine"])


def test_what_was_declared_is_kept_in_what_to_write(write):
    write("view.output_projection(layer).sum((0, 2))", ", activations=('tokens',)")
    with pytest.raises(MethodError, match=r"W_O of block 1, .*: add activations=\('tokens', 'projections'\)$"):
        explain()


def test_a_gradient_of_another_pass_than_the_declared_one_is_named(write):
    write("view.token_gradient(LOGIT, layer).sum(-1)", ", gradients=('tokens',), rule='frozen'")
    with pytest.raises(MethodError, match=r"line 10\): .*rule='plain'.* but declares .*rule='frozen'.* the same$"):
        explain()


@pytest.mark.parametrize("block", ["layer + 1", "-1", "99"])
def test_another_block_than_the_one_given_is_refused(write, block):
    write(f"view.attention({block}).rows(rows).mean((1, 2))", ", activations=('attention',)")
    with pytest.raises(MethodError, match=r"line 10\): it reads the attention of block .* recorded of block 1 alone"):
        explain()


def test_blocks_of_the_spelling_may_be_read_together(write):
    write("view.tokens(0).sum(-1) + view.tokens(layer).sum(-1)", ", activations=('tokens',)")
    assert explain("mine.plus").scores["mine.plus"].isfinite().all()


@pytest.mark.parametrize(
    ("read", "said"),
    [
        ("nothing_of_this_name", "NameError: name 'nothing_of_this_name' is not defined"),
        ("view.tokens(layer)[10 ** 6]", "IndexError: "),
        ("view.tokens(layer) @ view.tokens(layer)", "RuntimeError: "),
        ("view.tokenz(layer)", "AttributeError: "),
        ("view.tokens(layer)", "it must return scores of all tokens"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("[][0]", "IndexError: list index out of range"),
    ],
)
def test_any_error_names_the_method_and_its_line(write, read, said):
    write(read, ", activations=('tokens',)")
    line = 8 if "must return" in said else LINE  # what it returns is looked at behind its end
    with pytest.raises(MethodError) as raised:
        explain()
    place = f"method mine (my_file.py, line {line}): {said}"
    decorated = f"method mine (my_file.py, line {line - 1}): {said}"
    assert str(raised.value).startswith((place, decorated))
    assert "\n" not in str(raised.value)


def test_what_is_said_of_the_model_stays_as_it_is(tmp_path):
    file = tmp_path / "refusing.py"
    file.write_text(
        "from vitreous.errors import UnsupportedModelError\nfrom vitreous.plugin import method\n"
        "@method('refusing')\ndef refusing(view, layer):\n    raise UnsupportedModelError('no such part')\n"
    )
    load_plugin(file)
    with pytest.raises(UnsupportedModelError, match=r"^no such part$"):
        explain("refusing")


def test_memory_that_is_short_is_not_the_methods_fault(write):
    write("(_ for _ in ()).throw(MemoryError())")
    with pytest.raises(MemoryError):
        explain()


def test_a_class_of_ones_own_is_named_too():
    class Reading(TokenReadout):
        activations = ("attention",)

        def read(self, view, layer):
            return view.tokens(layer).sum(-1)

    @register("own_class", family="plugin", paper="unpublished", year=0, class_specific=False, signed=False)
    def make(*, wrong: bool = False) -> Reading:
        """Reads what it does not declare."""
        return Reading() if not wrong else Reading(wrong)

    with pytest.raises(
        MethodError, match=r"method own_class \(test_own_method_errors.py, line \d+\): it reads the tok"
    ):
        explain("own_class")
    with pytest.raises(MethodError, match=r"method own_class \(test_own_method_errors.py, line \d+\): TypeError"):
        explain("own_class:wrong=yes")


def test_a_method_typed_into_a_session_is_named_by_its_line():
    space = {"method": method}
    exec(compile("@method('typed')\ndef typed(view, layer):\n    return missing\n", "<cell 7>", "exec"), space)
    with pytest.raises(MethodError, match=r"^method typed \(line 3\): NameError: name 'missing' is not defined$"):
        explain("typed")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = 1\nundefined\n", "line 2: the plugin does not run: NameError: name 'undefined' is not defined"),
        ("x = 1\nif x\n", "line 2: the plugin does not run: SyntaxError: "),
        (
            "from vitreous.plugin import method\n\n@method('wrong', activations=('tokns',))\ndef wrong(v, l): ...\n",
            "line 3: the method 'wrong': activations 'tokns' is not one of ",
        ),
    ],
)
def test_a_plugin_that_does_not_load_is_named_with_its_line(tmp_path, content, said):
    file = tmp_path / "broken.py"
    file.write_text(content)
    with pytest.raises(MethodError) as raised:
        load_plugin(file)
    assert str(raised.value).startswith(f"{file}, {said}")


def test_the_command_line_says_it_in_one_line_and_asks_nobody_to_report_it(write, photo, tmp_path):
    file = write("nothing_of_this_name")
    photo.save(tmp_path / "photo.png")
    options = ["--plugin", str(file), "--method", "mine", "--out", str(tmp_path / "out")]
    command = ["-m", "vitreous", "explain", str(tmp_path / "photo.png")]
    result = forked.run([*command, "--model", "timm/test_vit@random", *options])
    assert result.returncode not in (0, 70), result.stderr
    assert f"method mine (my_file.py, line {LINE}): NameError: name 'nothing_of_this_name'" in result.stderr
    assert "please report it" not in result.stderr
    assert "Traceback" not in result.stderr


class TestView:
    @pytest.fixture
    def view(self):
        """The view that a method of one's own gets."""
        seen = []

        @method("looking", activations=("tokens", "attention"), gradients=("attention",), layer=1)
        def looking(view, layer):
            seen.append(view)
            return view.tokens(layer).sum(-1)

        explain("looking")
        assert "looking" in _methods
        return seen[0]

    def test_dir_lists_what_can_be_read_and_every_name_is_documented(self, view):
        names = dir(view)
        assert not [name for name in names if name.startswith("_")]
        assert {"tokens", "attention", "attention_matrix", "attention_gradient", "value", "layout", "depth"} <= set(
            names
        )
        fields = {"tape", "gradients", "target", "runner", "readout", "declared"}  # told in the class's docstring
        for name in set(names) - fields - {"over"}:
            assert inspect.getdoc(inspect.getattr_static(type(view), name)), name

    def test_the_docstring_tells_how_everything_is_declared(self):
        for name, member in vars(View).items():
            if inspect.isfunction(member) and not name.startswith("_"):
                assert f"``{name}(" in View.__doc__

    def test_former_names_still_work_with_a_warning(self, view):
        with pytest.warns(DeprecationWarning, match=r"^view.subject is now called view.runner$") as told:
            assert view.subject is view.runner
        assert told[0].filename == __file__
        assert not {"subject", "heads_to_stream"} & set(dir(view))
        with pytest.raises(AttributeError, match=r"^'CheckedView' object has no attribute 'subjekt'$"):
            _ = view.subjekt

    def test_the_output_projection_is_read_under_both_names(self):
        found = {}

        @method("projecting", activations=("attention_rows", "projections"), layer=1)
        def projecting(view, layer):
            found["new"] = view.output_projection(layer)
            with pytest.warns(DeprecationWarning, match=r"^view.heads_to_stream is now called view.output_projection$"):
                found["old"] = view.heads_to_stream(layer)
            return view.value(layer).sum((1, 3))

        model, _ = golden_model()
        explain("projecting")
        assert torch.equal(found["old"], found["new"])
        assert torch.equal(found["new"].flatten(1), model.blocks[1].attn.proj.weight)

    def test_it_shows_itself_in_one_line(self, view):
        rows, columns = view.layout.grid
        assert f"{view.depth} blocks, {view.layout.tokens} tokens, the last {rows} x {columns} of them" in repr(view)
        assert "\n" not in repr(view)

    def test_attention_is_a_tensor_in_every_way_to_ask_for_it(self):
        found = {}

        @method("compared", activations=("attention",), gradients=("attention",), layer=1)
        def compared(view, layer):
            found["rows"] = view.attention(layer).rows(slice(None))
            found["matrix"] = view.attention_matrix(layer)
            found["indexed"] = view.attention(layer)[...]
            found["one"] = view.attention(layer)[:, 0, 2:4]
            found["gradient"] = view.attention_gradient(Pass("plain", "logit"), layer)
            return found["matrix"].mean((1, 2))

        explain("compared")
        assert torch.equal(found["rows"], found["matrix"])
        assert torch.equal(found["rows"], found["indexed"])
        assert torch.equal(found["rows"][:, 0, 2:4], found["one"])
        assert found["gradient"].shape == found["rows"].shape


def test_a_path_of_ones_own_sees_the_recorded_run_for_a_given_class_too():
    """Methods of the package that are like it make all of their runs themselves then."""

    class Path(PathIntegral):
        def map(self, view):
            return super().map(view) + 0 * view.tape.logits.sum()

    @register("mine", family="plugin", paper="", year=2026, class_specific=True, signed=True)
    def make():
        """Mine."""
        return Path("pixels", "patch", 2, "zero", "gauss")

    model, images = golden_model()
    found = vitreous.explain(model, images, ["mine"], 1)
    expected = vitreous.explain(model, images, ["integrated_gradients:steps=2"], 1)
    assert torch.equal(found.scores["mine"], expected.scores["integrated_gradients:steps=2"])
