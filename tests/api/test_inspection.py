"""What is seen of a model, which methods work on it, and what is left out."""

import json
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import vitreous
from small_models import CLASSES, random_images, small_vit
from vitreous.api.runs import try_methods
from vitreous.cli import app
from vitreous.errors import InputError, MethodError, RefusedMethodsError, TargetError, UnsupportedModelError
from vitreous.explanation.explanation import Explanation
from vitreous.text.explanation import TextExplanation


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


class PoolingMixer(nn.Module):
    """Blocks without attention, as functions: tokens are mixed by a convolution."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, 8)
        self.mixing = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, groups=8) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images):
        x = self.patches(images)
        for mixing in self.mixing:
            x = x + mixing(nn.functional.group_norm(x, 1))
        return self.head(x.mean((2, 3)))


class WrittenOut(nn.Module):
    """Attention by einsum in a post-norm block that is no module of its own."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 12, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 2, 12))
        self.qkv, self.out = nn.Linear(12, 36), nn.Linear(12, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def forward(self, images):
        x = self.patches(images).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        for _ in range(2):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 3)).unbind(2)
            weights = torch.einsum("bihc,bjhc->bhij", q, k).softmax(-1)
            x = self.norm(x + self.out(torch.einsum("bhij,bjhc->bihc", weights, v).flatten(2)))
        return self.head(self.pool(x))

    def pool(self, x):
        return x[:, 0]


class TestInspect:
    def test_a_plain_vision_transformer(self):
        seen = vitreous.inspect(small_vit(), random_images(), ["gae", "ixg", "decompx.skipplus"])
        assert (seen.name, seen.image_size, seen.stage) == ("VisionTransformer", (32, 32), 0)
        (stage,) = seen.stages
        assert (stage.tokens, stage.channels, len(stage.blocks)) == (17, 24, 4)
        assert (seen.patch_grid, seen.prefix_tokens, seen.pooling) == ((4, 4), 1, "class token")
        assert seen.read_tokens == (0,)
        for number, block in enumerate(stage.blocks):
            assert (block.name, block.module, block.norms) == (f"blocks.{number}", "Block", "pre")
            (call,) = block.attention
            assert (call.spelling, call.queries, call.keys, call.heads, call.windows) == ("fused", 17, 17, 3, 1)
            assert block.output_projection
            assert block.value_weights
            assert block.steps[0] <= call.step <= block.steps[1] < seen.steps
        assert [block.steps[1] + 1 for block in stage.blocks[:-1]] == [block.steps[0] for block in stage.blocks[1:]]
        assert seen.supported.methods == ("gae", "ixg", "decompx.skipplus")
        with pytest.raises(FrozenInstanceError):
            seen.name = "another"

    def test_blocks_that_are_no_modules_and_attention_that_is_written_out(self):
        torch.manual_seed(0)
        seen = vitreous.inspect(WrittenOut().eval(), random_images(dtype=torch.float32), ["gae", "ixg"])
        assert len(seen.stages[0].blocks) == 2
        for block in seen.stages[0].blocks:
            assert (block.name, block.module) == ("", "")
            assert [(call.spelling, call.queries, call.heads) for call in block.attention] == [("written out", 18, 4)]
        assert seen.stages[0].blocks[0].norms == "post"
        assert (seen.prefix_tokens, seen.read_tokens) == (2, (0,))

    def test_windows_are_told_from_heads(self):
        model = pytest.importorskip("timm").create_model("swin_tiny_patch4_window7_224", img_size=112, window_size=7)
        seen = vitreous.inspect(model.eval(), torch.randn(1, 3, 112, 112), "ixg")
        assert [stage.grid for stage in seen.stages[:3]] == [(28, 28), (14, 14), (7, 7)]
        first = seen.stages[0].blocks[0].attention[0]
        assert (first.queries, first.heads, first.windows) == (49, 3, 16)

    def test_printed_as_a_table_and_as_json(self):
        seen = vitreous.inspect(small_vit(), random_images(), ["gae", "ixg"])
        text = str(seen)
        for part in (
            "17 tokens of 24 channels, 4 blocks",
            "blocks.3 (Block)",
            "fused 17 x 17, 3 heads",
            "patch grid: 4 x 4",
        ):
            assert part in text
        assert json.loads(json.dumps(seen.as_dict()))["stages"][0]["blocks"][1]["norms"] == "pre"
        assert seen.as_dict()["supported"] == {"methods": ["gae", "ixg"], "refused": {}}

    def test_a_model_without_tokens_and_images_that_do_not_fit_are_refused(self):
        flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, CLASSES))
        with pytest.raises(UnsupportedModelError, match="no residual stream"):
            vitreous.inspect(flat, random_images(dtype=torch.float32))
        with pytest.raises(InputError):
            vitreous.inspect(small_vit(), torch.randn(1, 3, 31, 33))

    def test_the_model_and_torch_are_left_as_they_were(self):
        model = small_vit().train()
        with torch.no_grad():
            vitreous.inspect(model, random_images(), ["gae", "occlusion"])
            assert not torch.is_grad_enabled()
        assert model.training
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class TestSupported:
    def test_every_method_works_on_a_plain_model_and_is_as_explain_has_it(self):
        model, images = small_vit(depth=2), random_images(1)
        found = vitreous.supported(model, images)
        assert found.methods == tuple(info.name for info in vitreous.list_methods())
        assert not found.refused
        assert "gae" in found
        assert len(list(found)) == len(found)

    def test_reasons_of_what_does_not_work_agree_with_explain(self):
        torch.manual_seed(0)
        model, images = PoolingMixer().eval(), random_images(dtype=torch.float32)
        found = vitreous.supported(model, images, ["gae", "ixg", "occlusion", "atman", "tokentm"])
        assert found.methods == ("ixg", "occlusion")
        assert set(found.refused) == {"gae", "atman", "tokentm"}
        for method in ("ixg", "occlusion"):
            vitreous.explain(model, images, method)
        for method, reason in found.refused.items():
            with pytest.raises(UnsupportedModelError) as refusal:
                vitreous.explain(model, images, method)
            assert reason in str(refusal.value)
        assert "not gae, atman, tokentm: its blocks do not attend" in str(found)

    def test_methods_that_run_the_model_again_are_stopped_after_a_few_runs(self):
        model, images = small_vit(depth=2), random_images(1)
        vitreous.supported(model, images, "ixg")  # what is found out once
        count = []
        handle = model.register_forward_pre_hook(lambda _module, inputs: count.append(len(inputs[0])))
        assert "rise" in vitreous.supported(model, images, "rise")
        handle.remove()
        assert 0 < sum(count) < 20  # RISE itself takes thousands

    def test_where_no_map_can_be_laid_out_no_method_is_tried(self):
        class ReadsTheLastToken(WrittenOut):
            def pool(self, x):
                return x[:, -1]

        seen = vitreous.inspect(ReadsTheLastToken().eval(), random_images(dtype=torch.float32), ["ixg", "gae"])
        assert seen.supported.methods == ()
        assert set(seen.supported.refused.values()) == {seen.problem}
        assert (seen.patch_grid, seen.pooling) == (None, None)
        assert f"problem: {seen.problem}" in str(seen)

    def test_wrong_spellings_are_errors(self):
        with pytest.raises(MethodError):
            vitreous.supported(small_vit(), random_images(), "no_such_method")


class TestTrials:
    @staticmethod
    def runner(refused=(), broken=(), error=UnsupportedModelError):
        """Refuses some methods by name, and fails with others without saying which."""
        runs = []

        def run(methods):
            runs.append(tuple(methods))
            if reasons := {method: f"{method} lacks something" for method in methods if method in refused}:
                raise RefusedMethodsError("some do not work", reasons)
            if set(methods) & set(broken):
                raise error("one of them fails")
            return "+".join(methods)

        return run, runs

    def test_together_where_all_work(self):
        run, runs = self.runner()
        found = try_methods(run, ["a", "b"])
        assert (found.served, found.results, found.reasons, runs) == (["a", "b"], ["a+b"], {}, [("a", "b")])

    def test_again_without_those_that_are_refused(self):
        run, runs = self.runner(refused="b")
        found = try_methods(run, ["a", "b", "c"])
        assert (found.served, found.results) == (["a", "c"], ["a+c"])
        assert found.reasons == {"b": "b lacks something"}
        assert runs == [("a", "b", "c"), ("a", "c")]

    def test_one_by_one_where_no_error_says_which(self):
        run, runs = self.runner(refused="b", broken="d")
        found = try_methods(run, ["a", "b", "c", "d"])
        assert (found.served, found.results) == (["a", "c"], ["a", "c"])
        assert found.reasons == {"b": "b lacks something", "d": "one of them fails"}
        assert runs == [("a", "b", "c", "d"), ("a", "c", "d"), ("a",), ("c",), ("d",)]

    def test_other_errors_are_raised(self):
        run, _ = self.runner(broken="a", error=TargetError)
        with pytest.raises(TargetError):
            try_methods(run, ["a", "b"])
        assert try_methods(run, ["a", "b"], lambda _error: True).served == ["b"]

    def test_none_works(self):
        run, _ = self.runner(refused="ab")
        found = try_methods(run, ["a", "b"])
        assert (found.served, found.results, list(found.reasons)) == ([], [], ["a", "b"])


class TestLeftOut:
    def test_is_in_the_explanation_saved_and_loaded(self, tmp_path):
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match="tokentm is left out: its blocks do not attend"):
            explanation = vitreous.explain(PoolingMixer().eval(), random_images(dtype=torch.float32))
        assert explanation.methods == ("decompx.skipplus", "fullgrad_plus:rule=libra")
        missing = ("twoscale", "tokentm", "gae", "gradtoken")
        assert explanation.left_out == dict.fromkeys(missing, "its blocks do not attend")
        assert explanation.select(1).left_out == explanation.left_out
        assert Explanation.load(explanation.save(tmp_path / "saved")).left_out == explanation.left_out

    def test_is_empty_where_methods_were_asked_for(self):
        assert vitreous.explain(small_vit(), random_images(), "gae").left_out == {}

    def test_of_texts(self, tmp_path):
        explanation = TextExplanation(
            texts=("a",),
            pieces=((),),
            words=((),),
            scores={"gae": (torch.zeros(0),)},
            target=torch.zeros(1, dtype=torch.int64),
            logits=torch.zeros(1, 2),
            signed={"gae": False},
            left_out={"tokentm": "why"},
        )
        assert TextExplanation.load(explanation.save(tmp_path / "text.json")).left_out == {"tokentm": "why"}


class TestCheck:
    def test_prints_what_was_seen(self):
        result = run("models", "check", "timm/test_vit@random", "--image-size", "48", "--methods", "gae,ixg")
        assert result.exit_code == 0, result.output
        for part in (
            "images of 48 x 48",
            "10 tokens of 64 channels, 6 blocks",
            "blocks.0 (Block)",
            "pooling: class token",
        ):
            assert part in result.stdout
        assert "methods that work: gae, ixg" in result.stdout

    def test_a_model_of_ones_own_as_json(self, tmp_path):
        file = tmp_path / "own.py"
        file.write_text(
            "import timm\n\ndef build():\n    model = timm.create_model('test_vit', img_size=32, num_classes=3)\n"
            "    model.image_size = 32\n    return model\n"
        )
        arguments = (
            "models",
            "check",
            f"py/{file}:build",
            "--mean",
            "0.5",
            "--std",
            "0.5",
            "--method",
            "gae",
            "--json",
        )
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        seen = json.loads(result.stdout)
        assert (seen["model"], seen["patch_grid"]) == (f"py/{file}:build", [2, 2])
        assert seen["supported"] == {"methods": ["gae"], "refused": {}}

    def test_what_cannot_be_checked_is_one_line(self):
        result = run("models", "check", "no-such-model")
        assert result.exit_code == 2
        assert "error: the model name 'no-such-model' is not understood" in result.stderr

    def test_without_a_command_models_are_listed_as_before(self):
        assert "timm/NAME@random" in run("models").stdout
        assert json.loads(run("models", "--json").stdout)["names"]
