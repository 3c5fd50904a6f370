"""A newcomer's own method: one function in a file of their own, from Python and from the command line."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import forked
import vitreous
from small_models import golden_model
from vitreous.cli import app
from vitreous.errors import MethodError
from vitreous.explanation.explanation import Explanation
from vitreous.methods import TokenReadout, list_methods
from vitreous.methods.registry import _methods
from vitreous.plugin import load_plugin

PLUGIN = '''
from vitreous.plugin import method

@method("{name}", activations=("tokens",), gradients=("tokens",), signed=True)
def mine(view, layer):
    """Token x gradient, written again."""
    return (view.tokens(layer) * view.token_gradient(mine_pass, layer)).sum(-1)

from vitreous.tape import Pass
mine_pass = Pass("plain", "logit")
'''


@pytest.fixture
def plugin(tmp_path):
    """A plugin file; what it registers is forgotten again."""
    before = dict(_methods)
    file = tmp_path / "my_method.py"
    file.write_text(PLUGIN.format(name="mine"))
    yield file
    _methods.clear()
    _methods.update(before)


def test_a_plugin_is_a_method_like_any_other(plugin):
    model, images = golden_model()
    load_plugin(plugin)
    ours, theirs = "mine.skipplus", "ixg.skipplus"
    explanation = vitreous.explain(model, images, [ours, theirs])
    # The same arithmetic in the same order.
    assert torch.equal(explanation.scores[ours], explanation.scores[theirs])
    assert explanation.signed[ours]
    info = next(info for info in list_methods() if info.name == "mine")
    assert (info.family, info.class_specific, info.summary) == ("plugin", True, "Token x gradient, written again.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "objective='prob'",
            "objective 'prob' is not one of logit, probability, others, inter.*; did you mean prob",
        ),
        ("rule='frozn'", "rule 'frozn' is not one of plain, frozen, .*; did you mean frozen"),
        ("activations=('tokns',)", "activations 'tokns' is not one of tokens, .*; did you mean tokens"),
        ("activations=('picture',)", "activations 'picture' is not one of"),
        ("activations=('gradients_again',)", "activations 'gradients_again' is not one of"),
        ("activations='tokens'", r"activations are several, so write activations=\('tokens',\)"),
        ("gradients=('token',)", "gradients 'token' is not one of tokens, .*; did you mean tokens"),
        ("aggregation='skip'", "aggregation 'skip' is not one of plus, skipplus; did you mean skipplus"),
        ("aggregation='rollout'", "aggregation 'rollout' is not one of plus, skipplus$"),
    ],
)
def test_what_does_not_exist_is_refused_when_a_method_is_registered(tmp_path, registry, options, message):
    file = tmp_path / "wrong.py"
    file.write_text(f"from vitreous.plugin import method\n@method('wrong', {options})\ndef wrong(view, layer): ...\n")
    with pytest.raises(MethodError, match=f"the method 'wrong': {message}"):
        load_plugin(file)
    assert "wrong" not in _methods


def test_a_name_that_is_taken_is_refused(tmp_path, plugin):
    taken = tmp_path / "taken.py"
    taken.write_text(PLUGIN.format(name="gae"))
    with pytest.raises(MethodError, match="there is a method 'gae' already"):
        load_plugin(taken)


@pytest.mark.parametrize(("content", "reason"), [(None, "no such plugin"), ("1 / 0", "ZeroDivisionError")])
def test_a_plugin_that_does_not_run_is_one_sentence(tmp_path, content, reason):
    file = tmp_path / "broken.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(MethodError, match=reason):
        load_plugin(file)


def test_scores_of_the_wrong_shape_are_refused(tmp_path, plugin):
    file = tmp_path / "wrong.py"
    file.write_text(PLUGIN.format(name="wrong").replace(".sum(-1)", ""))
    load_plugin(file)
    model, images = golden_model()
    with pytest.raises(MethodError, match="must return scores of all tokens"):
        vitreous.explain(model, images, "wrong")


@pytest.mark.usefixtures("plugin")  # so that the method is forgotten again
def test_a_map_of_nan_takes_nothing_else_with_it(tmp_path, photo):
    file = tmp_path / "nanny.py"
    file.write_text(PLUGIN.format(name="nanny").replace(".sum(-1)", ".sum(-1) / 0 * 0"))
    for name in ("a.png", "b.png"):
        photo.save(tmp_path / name)
    photos = [str(tmp_path / name) for name in ("a.png", "b.png")]
    options = ["--model", "timm/test_vit@random", "--plugin", str(file), "--method", "gae,nanny.plus", "--json"]
    places = ["--out", str(tmp_path / "out"), "--report", str(tmp_path / "report.html")]
    result = CliRunner().invoke(app, ["explain", *photos, *options, *places])
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    assert [one["photo"] for one in told["photos"]] == [one["photo"] for one in told["failures"]] == photos
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 2
    for name, error in zip(photos, errors, strict=True):
        assert name in error
        assert "nanny.plus: the scores contain NaN" in error
        assert "gae" not in error
    for one in told["photos"]:
        saved = Explanation.load(one["folder"])
        assert saved.shows("gae")
        assert not saved.shows("nanny.plus")
        assert Path(one["comparison"]).is_file()
    assert (tmp_path / "report.html").read_text().count("<polyline") == 2 * 2  # gae's


def test_the_command_line_takes_a_plugin(plugin, tmp_path):
    command = ["-m", "vitreous", "explain", "demo", "--plugin", str(plugin), "--method", "mine.plus"]
    model = ["--model", "timm/test_vit@random", "--out", str(tmp_path / "out")]
    result = forked.run([*command, *model])
    assert result.returncode == 0, result.stderr
    assert list(Path(tmp_path / "out").glob("*/overlay-*mine*.png"))


def test_the_page_of_all_methods_is_up_to_date():
    script = Path(__file__).parents[2] / "scripts" / "write_methods_page.py"
    result = forked.run([str(script), "--check"])
    assert result.returncode == 0, result.stderr


def test_the_former_name_of_the_stream_inside_a_block_is_accepted_with_a_warning(plugin):
    read = 'def {0}(view, layer):\n    """x"""\n    return view.after_attention(layer).sum(-1)\n'
    methods = {"inside": "residual", "inside_before": "halves"}
    parts = [f'@method("{name}", activations=("{value}",))\n{read.format(name)}' for name, value in methods.items()]
    plugin.write_text("\n".join(["from vitreous.plugin import method", *parts]))
    with pytest.warns(UserWarning, match="activations 'halves' is now called 'residual'"):
        load_plugin(plugin)
    model, images = golden_model()
    scores = vitreous.explain(model, images, ["inside", "inside_before"]).scores
    assert torch.equal(scores["inside"], scores["inside_before"])


def test_the_former_arguments_of_a_method_are_accepted_with_a_warning(plugin, registry):
    body = "def {0}(view, layer):\n    return view.token_gradient(LOGIT, layer).sum(-1) * view.tokens(layer).sum(-1)\n"
    head = "from vitreous.plugin import method\nfrom vitreous.tape import Pass\nLOGIT = Pass('plain', 'logit')\n"
    plugin.write_text(
        f"{head}@method('now', activations=('tokens',), gradients=('tokens',))\n{body.format('now')}"
        f"@method('former', values=('tokens',), slopes=('tokens',))\n{body.format('former')}"
    )
    with pytest.warns(DeprecationWarning, match="(values= is now called activations|slopes= is now called gradients)="):
        load_plugin(plugin)
    model, images = golden_model()
    scores = vitreous.explain(model, images, ["now", "former"]).scores
    assert torch.equal(scores["now"], scores["former"])


def test_a_read_out_with_the_former_attributes_is_accepted_with_a_warning():
    def read(self, view, layer):
        return view.tokens(layer).sum(-1)

    with pytest.warns(DeprecationWarning, match="values is now called activations"):
        kind = type("Former", (TokenReadout,), {"values": ("tokens",), "read": read})
    assert kind().needs(1, 3).tokens == {1}
