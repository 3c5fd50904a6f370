"""Maps and trust figures while a model is trained, read back from what the loggers wrote."""

import os
import random

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from small_models import random_images, small_vit
from vitreous.errors import InputError, MethodError
from vitreous.integrations.training import MapLogger, find_logger, lightning_callback, watch


class Kept:
    """A logger of one's own."""

    def __init__(self):
        self.numbers, self.images = [], []

    def log_numbers(self, numbers, step):
        self.numbers.append((step, dict(numbers)))

    def log_images(self, images, step):
        self.images.append((step, dict(images)))

    @property
    def steps(self):
        return [step for step, _ in self.numbers]


@pytest.fixture
def images():
    return random_images(2, dtype=torch.float32)


@pytest.fixture
def model():
    return small_vit(depth=2, dtype=torch.float32).train()


def train(model, images, steps, optimizer):
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), torch.tensor([0, 1])).backward()
        optimizer.step()


class TestTensorBoard:
    def test_what_is_in_the_event_file(self, model, images, tmp_path):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with (
            SummaryWriter(str(tmp_path)) as writer,
            watch(model, images, writer, every=2, methods=["gae", "ixg"], target=[0, 1], optimizer=optimizer),
        ):
            train(model, images, 5, optimizer)
        events = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
        events.Reload()
        tags = events.Tags()
        assert set(tags["images"]) == {f"vitreous/{image}/{method}" for image in "01" for method in ("gae", "ixg")}
        assert [event.step for event in events.Images("vitreous/0/gae")] == [0, 2, 4]
        gaps = events.Scalars("vitreous/trust/gap/gae")
        assert [event.step for event in gaps] == [0, 2, 4]
        assert {"vitreous/trust/good", "vitreous/trust/probability", "vitreous/trust/agreement"} <= set(tags["scalars"])
        alike = events.Scalars("vitreous/similarity_to_last/gae")
        assert [event.step for event in alike] == [2, 4]
        assert all(-1 <= event.value <= 1 for event in alike)
        picture = events.Images("vitreous/0/gae")[0]
        assert min(picture.width, picture.height) >= 32

    def test_a_folder_is_enough(self, model, images, tmp_path):
        logger = find_logger(tmp_path)
        watch(model, images, logger, methods="gae", trust=False)
        logger.close()
        assert list(tmp_path.iterdir())


def test_a_logger_of_ones_own_and_explicit_steps(model, images):
    logger = Kept()
    assert isinstance(logger, MapLogger)
    watcher = watch(model, images, logger, every=10, methods="gae", trust=False, at_start=False, names=["a", "b"])
    assert [watcher.step(step) for step in (5, 10, 15, 20)] == [False, True, False, True]
    assert logger.steps == [10, 20]
    assert set(logger.images[0][1]) == {"vitreous/a/gae", "vitreous/b/gae"}
    assert all(isinstance(image, Image.Image) for image in logger.images[0][1].values())
    assert watcher.last.methods == ("gae",)
    # Nothing was trained between the two.
    assert logger.numbers[1][1]["vitreous/similarity_to_last/gae"] == pytest.approx(1)


def test_training_goes_as_without(images):
    """Mode, gradients and random numbers stay: with dropout, two runs end in the same weights."""

    def run(*, watched):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model = small_vit(depth=2, dtype=torch.float32, proj_drop_rate=0.3).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if watched:
            watch(model, images, Kept(), every=1, methods=["gae", "rise:budget=8"], optimizer=optimizer)
        train(model, images, 3, optimizer)
        assert model.training
        drawn = torch.rand(3).tolist(), random.random(), np.random.rand()  # noqa: NPY002
        gradients = [parameter.grad for parameter in model.parameters()]
        return [*model.parameters(), *gradients], drawn

    (plain, drawn), (watched, drawn_watched) = run(watched=False), run(watched=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    assert drawn == drawn_watched


def test_what_is_wrong_is_told_at_the_start_and_later_a_warning(model, images):
    with pytest.raises(MethodError, match="there is no method"):
        watch(model, images, Kept(), methods="gaee")
    with pytest.raises(InputError, match="every"):
        watch(model, images, Kept(), every=0)
    with pytest.raises(InputError, match="logger must be"):
        watch(model, images, object())
    with pytest.raises(InputError, match="names"):
        watch(model, images, Kept(), names=["one"], methods="gae")

    class Failing(Kept):
        def log_images(self, images, step):
            if step:
                raise InputError("the disk is full")

    watcher = watch(model, images, Failing(), methods="gae", every=1, trust=False)
    with pytest.warns(UserWarning, match="not logged at step 1: the disk is full"):
        watcher.step()


def test_a_model_that_diverged_is_no_end_of_training(model, images):
    logger = Kept()
    watcher = watch(model, images, logger, methods="gae", every=1)
    with torch.no_grad():
        model.head.weight.fill_(torch.nan)
    with pytest.warns(UserWarning, match="not logged at step 1: .* NaN"):
        watcher.step()
    assert logger.steps == [0]


def test_pictures_are_drawn_on(tmp_path, photo):
    import timm

    model = timm.create_model("test_vit", num_classes=4).train()
    logger = Kept()
    watch(model, [photo], logger, methods="gae", trust=False)
    (image,) = logger.images[0][1].values()
    assert np.asarray(image).std() > 0


class TestLightning:
    def test_fit(self, images, tmp_path):
        import pytorch_lightning as lightning
        from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger

        class Classifier(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = small_vit(depth=2, dtype=torch.float32)

            def forward(self, pixels):
                return self.net(pixels)

            def training_step(self, batch, _):
                pixels, labels = batch
                return torch.nn.functional.cross_entropy(self(pixels), labels)

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        data = torch.utils.data.TensorDataset(random_images(8, dtype=torch.float32), torch.arange(8) % 5)
        board = TensorBoardLogger(str(tmp_path), name="run", version=0)
        callback = lightning_callback(images, model="net", every=2, methods="gae", trust=False)
        trainer = lightning.Trainer(
            max_steps=4,
            accelerator="cpu",
            devices=1,
            logger=[board, CSVLogger(str(tmp_path), name="csv")],
            callbacks=[callback, lightning_callback(images, logger=(kept := Kept()), every=2, methods="gae")],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accumulate_grad_batches=2,
        )
        trainer.fit(Classifier(), torch.utils.data.DataLoader(data, batch_size=1))
        board.finalize("success")
        events = EventAccumulator(board.log_dir, size_guidance={"images": 0})
        events.Reload()
        assert [event.step for event in events.Images("vitreous/0/gae")] == [0, 2, 4]
        assert kept.steps == [0, 2, 4]


def test_mlflow(model, images, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    import mlflow
    from pytorch_lightning.loggers import MLFlowLogger

    mlflow.set_tracking_uri(f"file:{tmp_path / 'runs'}")
    with pytest.raises(InputError, match=r"call mlflow\.start_run"):
        find_logger("mlflow")
    with mlflow.start_run() as run:
        watch(model, images, "mlflow", methods="gae")
        watch(model, images, run, methods="ixg:layer=1", trust=False)
    stored = mlflow.MlflowClient()
    history = stored.get_metric_history(run.info.run_id, "vitreous/trust/gap/gae")
    assert [(each.step, np.isfinite(each.value)) for each in history] == [(0, True)]
    names = [each.path for each in stored.list_artifacts(run.info.run_id, "images")]
    assert sum(name.endswith(".png") for name in names) == 4
    assert any("ixg-layer-1" in name for name in names)
    lightning_logger = MLFlowLogger(tracking_uri=f"file:{tmp_path / 'runs'}", run_id=run.info.run_id)
    watch(model, images, lightning_logger, methods="rollout", trust=False)
    names = [each.path for each in stored.list_artifacts(run.info.run_id, "images")]
    assert sum("rollout" in name and name.endswith(".png") for name in names) == 2


def test_wandb(model, images, tmp_path, monkeypatch):
    import wandb
    from pytorch_lightning.loggers import WandbLogger

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(InputError, match=r"call wandb\.init"):
        find_logger("wandb")
    run = wandb.init(project="test", dir=str(tmp_path), mode="offline")
    watcher = watch(model, images, run, methods="gae", every=1)
    run.log({"loss": 1.0})
    watcher.step()
    assert run.summary["vitreous/step"] == 1
    assert "vitreous/trust/gap/gae" in dict(run.summary)
    watch(model, images, WandbLogger(experiment=run), methods="rollout", trust=False)
    run.finish()
    pictures = [name for _, _, files in os.walk(tmp_path) for name in files if name.endswith(".png")]
    assert len(pictures) == 6
    assert sum("rollout" in name for name in pictures) == 2
    assert [file.suffix for file in tmp_path.glob("wandb/offline-run-*/*.wandb")] == [".wandb"]
