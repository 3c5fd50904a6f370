"""The options of ``evaluate`` are declared once: for Python, for the command line and for the documentation."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import vitreous
from loading_scripts import load_script
from vitreous.cli import app
from vitreous.errors import RunError
from vitreous.evaluation.options import EvaluateOptions, list_options, resolve_options

OPTIONS = {option.name: option for option in list_options()}
COMMAND = typer.main.get_command(app).commands["evaluate"]


def test_options_that_are_not_given_have_their_defaults():
    resolved = resolve_options({"limit": 4})
    assert resolved == {
        "limit": 4,
        "shuffle": False,
        "stratify": False,
        "controls": True,
        "engine": "local",
        "workers": None,
        "threads": None,
        "shard_size": 16,
        "seed": 0,
        "plugins": (),
        "retry_failed": False,
        "outputs": None,
    }
    assert list(resolved) == list(EvaluateOptions.__annotations__)
    assert resolve_options(resolved) == resolved


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"limit": 0}, "limit must be a whole number of at least 1, not 0"),
        ({"limit": True}, "limit must be a whole number of at least 1, not True"),
        ({"workers": 1.5}, "workers must be a whole number of at least 1, not 1.5"),
        ({"shard_size": None}, "shard_size must be a whole number of at least 1, not None"),
        ({"seed": -1}, f"seed must be a whole number of at least 0 and at most {2**63 - 1}, not -1"),
        ({"seed": 2**63}, f"seed must be a whole number of at least 0 and at most {2**63 - 1}, not {2**63}"),
        ({"engine": "rya"}, "engine must be local or ray, not 'rya'"),
        ({"outputs": "softmax"}, "outputs must be logits, probabilities, sigmoid or value, not 'softmax'"),
    ],
)
def test_values_that_are_not_valid_are_refused_in_one_sentence(given, message):
    with pytest.raises(RunError) as raised:
        resolve_options(given)
    assert str(raised.value) == message


def test_an_unknown_name_is_what_python_says_of_it():
    with pytest.raises(TypeError, match=r"evaluate\(\) got an unexpected keyword argument 'limits'"):
        vitreous.evaluate("demo", "masks:/nowhere", "chefer-2021-segmentation", limits=4)


def test_every_option_is_one_of_the_command_line_with_the_same_default_bounds_and_choices():
    parameters = {parameter.name: parameter for parameter in COMMAND.params}
    for name, option in OPTIONS.items():
        parameter = parameters[name]
        assert "/".join([*parameter.opts, *parameter.secondary_opts]) == option.command_line_flag
        assert parameter.help.replace("\\[", "[") == option.help
        assert (parameter.default or ()) == (option.default or ())
    shown = " ".join(CliRunner().invoke(app, ["evaluate", "--help"], env={"COLUMNS": "300"}).stdout.split())
    assert "--engine local|ray " in shown
    assert "--workers N " in shown
    assert "x>=1]" in shown
    assert "(processors / workers)" in shown


@pytest.mark.parametrize(
    ("flag", "value"), [("--limit", "0"), ("--limit", "4.5"), ("--seed", str(2**63)), ("--engine", "rya")]
)
def test_the_command_line_refuses_the_same_values(flag, value):
    arguments = ["evaluate", "--protocol", "chefer-2021-segmentation", "--data", "masks:/nowhere", flag, value]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"invalid value for '{flag}'" in result.stderr


def test_the_command_line_hands_all_options_on(monkeypatch, tmp_path):
    given = {}

    def evaluate(*_arguments, **options):
        given.update(options)
        raise RunError("enough")

    monkeypatch.setattr(vitreous, "evaluate", evaluate)
    flags = ["--limit", "3", "--shuffle", "--engine", "local", "--workers", "2", "--threads", "1", "--shard-size", "5"]
    flags += [
        "--stratify",
        "--no-controls",
        "--seed",
        "7",
        "--plugin",
        "a.py",
        "--plugin",
        "b.py",
        "--retry-failed",
        "--outputs",
        "value",
    ]
    required = ["--protocol", "chefer-2021-segmentation", "--data", "masks:/nowhere", "--out", str(tmp_path)]
    assert CliRunner().invoke(app, ["evaluate", *required, *flags]).exit_code == 2
    assert {name: given[name] for name in OPTIONS} == {
        "limit": 3,
        "shuffle": True,
        "stratify": True,
        "controls": False,
        "engine": "local",
        "workers": 2,
        "threads": 1,
        "shard_size": 5,
        "seed": 7,
        "plugins": (Path("a.py"), Path("b.py")),
        "retry_failed": True,
        "outputs": "value",
    }


def test_the_table_in_the_documentation_is_up_to_date(monkeypatch):
    script = load_script("write_options_table", monkeypatch)
    text = script.PAGE.read_text(encoding="utf-8")
    assert text == script.page(text), "run `make catalog`"
    assert all(f"`{option.command_line_flag}` | `{option.name}`" in text for option in OPTIONS.values())
