"""``vitreous explain``: explain the predictions of a model for image files, volumes or clips."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitreous._utils.defaults import DEFAULT_METHODS, split_spellings
from vitreous._utils.storage import expanded
from vitreous.cli.console import (
    DebugOption,
    DeviceOption,
    ExitCode,
    InputSizeOption,
    JsonOption,
    MeanOption,
    MethodOption,
    OutputsOption,
    PluginOption,
    PromptOption,
    StageOption,
    StdOption,
    TargetOption,
    check_prompts,
    check_target_or_topk,
    one_line,
    parse_channels,
    parse_html_path,
    parse_input_size,
    parse_window,
    print_json,
    print_line,
    print_pictures,
    shows_pictures,
    stderr_console,
    stdout_console,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from vitreous.cli.explain_images import ExplainedImage, ExplainRequest, ExplainResult
    from vitreous.explanation.explanation import Explanation, Prediction
    from vitreous.explanation.prediction import Predicted

_TOP = 5  # predictions shown of an image
_DETAILED = 3  # images up to which each gets a table
_PREVIEW_WIDTH = 26  # columns of a preview, at least


def explain(
    *,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGE",
            help="Image files, folders of images, or a shipped image: demo, a cat; demo-two, a cat and a dog. "
            "For models of volumes or clips: .nii, .npy and DICOM files, or folders of frames.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="A model by name, see `vitreous models`: demo, timm/NAME, timm/NAME@FILE, hf/ID, py/FILE.py:FUNCTION."
        ),
    ] = "demo",
    method: MethodOption = None,
    target: TargetOption = None,
    prompt: PromptOption = None,
    topk: Annotated[
        int | None, typer.Option(min=1, metavar="K", help="Explain the K most likely classes of each image.")
    ] = None,
    similar_to: Annotated[
        list[str] | None,
        typer.Option(metavar="IMAGE", help="Explain the similarity to another image. Repeat the option for several."),
    ] = None,
    mask: Annotated[
        Path | None,
        typer.Option(
            help="Explain pixels of a dense output: a mask as large as the image, 0 outside. --target names the class."
        ),
    ] = None,
    outputs: OutputsOption = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Part of what the model returns, by name, path or place: dog_head, heads.dog, 1."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the results, one subfolder per image.")] = Path(
        "vitreous-output"
    ),
    mean: MeanOption = None,
    std: StdOption = None,
    image_size: InputSizeOption = None,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="CENTRE,WIDTH",
            help="Of volumes: the values that become 0 to 1, such as 40,400; range: from the smallest to the largest.",
            show_default="the values as they are",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also write a self-contained HTML report; its perturbation curves take longer."
        ),
    ] = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="Measure how reliable the maps are, by removing patches; costs some seven forward passes."
        ),
    ] = False,
    recursive: Annotated[
        bool, typer.Option("--recursive", "-r", help="Include images in the subfolders of a folder.")
    ] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Images explained at once.")] = 8,
    device: DeviceOption = "cpu",
    precision: Annotated[
        Literal["model", "bf16"],
        typer.Option(help="model: the model's own precision; bf16: bfloat16, for methods that allow it."),
    ] = "model",
    compile_model: Annotated[
        bool,
        typer.Option("--compile", help="Compile the model for methods with many forward passes (perturbation)."),
    ] = False,
    stage: StageOption = None,
    preview: Annotated[
        bool | None,
        typer.Option(
            "--preview/--no-preview",
            help="Show the first method's maps in the terminal; never in a pipe or file.",
            show_default="where the terminal has colours",
        ),
    ] = None,
    plugin: PluginOption = None,
    as_json: JsonOption = False,
    _debug: DebugOption = False,
) -> None:
    """Explain images: write heatmaps, overlays, a comparison of the methods and the raw scores.

    Exit code: 0 if all images are done, 1 if some failed, 2 if nothing could be done.
    """
    others = [*(target or []), *(similar_to or []), *([str(mask)] if mask else [])]
    check_target_or_topk(others, topk)
    check_prompts(prompt, others, topk)
    report_path = parse_html_path(report, "--report")
    methods = split_spellings(method) if method else None
    channel_mean, channel_std = parse_channels(mean, "--mean"), parse_channels(std, "--std")
    size = parse_input_size(image_size)
    values = parse_window(window)

    from vitreous.cli import explain_images  # noqa: PLC0415  # imports torch
    from vitreous.plugin import load_plugins  # noqa: PLC0415

    load_plugins(plugin or [])
    request = explain_images.ExplainRequest(
        model=model,
        methods=methods,
        targets=target or [],
        prompts=list(dict.fromkeys(prompt or [])),
        topk=topk,
        outputs=outputs,
        output=output,
        similar_to=similar_to or [],
        mask=None if mask is None else expanded(mask),
        out=expanded(out),
        mean=channel_mean,
        std=channel_std,
        image_size=size,
        window=values,
        batch_size=batch_size,
        device=device,
        precision=precision,
        compile=compile_model,
        stage=stage,
        report=report_path,
        command=shlex.join(("vitreous", *sys.argv[1:])),
        recursive=recursive,
        trust=trust,
    )
    result = explain_images.run(images, request, stderr_console())
    if as_json:
        print_json(_as_json(result, request))
    else:
        console = stdout_console()
        wanted = shows_pictures(console) if preview is None else preview and console.is_terminal
        _print_result(result, request, console, preview=wanted)
    if result.failures:
        raise typer.Exit(ExitCode.SOME_FAILED if result.explained else ExitCode.FAILED)


def class_as_json(explanation: Predicted, class_index: int, index: int = 0) -> dict[str, Any]:
    """Return a class of an image or text as JSON values: index, name and probability, or value if there is none.

    A target that is not a class has no index.
    """
    output: dict[str, Any] = {"probability": explanation.probability(class_index, index)}
    if output["probability"] is None:
        output["value"] = explanation.value(class_index, index)
    classes = explanation.logits.shape[1]
    if class_index >= classes:
        target = explanation.targets[class_index - classes]
        return {"index": None, "name": target.label(explanation.class_names), "target": str(target), **output}
    name = explanation.class_names[class_index] if explanation.class_names else None
    return {"index": class_index, "name": name, **output}


def _as_json(result: ExplainResult, request: ExplainRequest) -> dict[str, Any]:
    explained = result.explained
    methods = request.methods or (explained[0].explanation.methods if explained else DEFAULT_METHODS)
    return {
        "model": request.model,
        "methods": list(methods),
        "left_out": dict(explained[0].explanation.left_out) if explained else {},
        "report": None if request.report is None or not explained else str(request.report),
        "photos": [_image_as_json(one) for one in explained],
        "failures": [{"photo": image, "error": error} for image, error in result.failures.items()],
    }


def _image_as_json(explained: ExplainedImage) -> dict[str, Any]:
    explanation = explained.explanation
    targets = [explanation.class_index(0, number) for number in range(explanation.classes_per_image)]
    return {
        "photo": str(explained.image),
        "folder": str(explained.folder),
        "comparison": str(explained.comparison),
        "predictions": [class_as_json(explanation, found.class_index) for found in explanation.top(_TOP)],
        "targets": [class_as_json(explanation, target) for target in targets],
        **({} if explained.trust is None else {"trust": explained.trust.as_dict()}),
    }


def _print_result(result: ExplainResult, request: ExplainRequest, console: Console, *, preview: bool) -> None:
    """Print predictions and paths: a table for each of a few images, one line each for many."""
    if len(result.explained) > _DETAILED:
        _print_summary(result.explained, console)
    else:
        for explained in result.explained:
            _print_image(explained, console, preview=preview)
    if result.explained and request.report is not None:
        print_line(console, f"report:    {request.report}")


def _print_image(explained: ExplainedImage, console: Console, *, preview: bool) -> None:
    explanation = explained.explanation
    table = Table(title=Text(one_line(explained.image.name)), title_justify="left", title_style="bold", box=None)
    table.add_column("class")
    table.add_column(explanation.quantity, justify="right")
    table.add_column()
    for prediction in explanation.top(_TOP):
        table.add_row(
            _label(explanation, prediction), explanation.format_output(prediction.class_index), _bar(prediction)
        )
    console.print(table)
    targets = [_explained(explanation, number) for number in range(explanation.classes_per_image)]
    if preview:
        _print_preview(explained, targets, console)
    print_line(console, f"explained: {'; '.join(targets)}")
    print_line(console, f"pictures:  {explained.comparison}")
    if explained.trust is not None:
        print_line(console, one_line(explained.trust.sentence))
    console.print()


def _print_preview(explained: ExplainedImage, targets: Sequence[str], console: Console) -> None:
    """Print the image and the first method's maps of the first targets, as far as they fit side by side."""
    from PIL import Image  # noqa: PLC0415

    method = explained.explanation.methods[0]
    maps = [(f"{method}: {name}", explained.map_file(method, number)) for number, name in enumerate(targets)]
    files = [(explained.image.name, explained.image_file), *((name, file) for name, file in maps if file is not None)]
    pictures = []
    for name, file in files[: max(1, console.width // _PREVIEW_WIDTH)]:
        with Image.open(file) as picture:
            pictures.append((name, picture.convert("RGB")))
    print_pictures(console, pictures)


def _print_summary(explained: Sequence[ExplainedImage], console: Console) -> None:
    table = Table(box=None)
    for heading in ("image", "class"):
        table.add_column(heading, overflow="fold")
    table.add_column(explained[0].explanation.quantity, justify="right")
    table.add_column()
    for one in explained:
        for number in range(one.explanation.classes_per_image):
            name = Text(one_line(one.image.name) if number == 0 else "")
            table.add_row(name, *_summary_cells(one.explanation, number))
    console.print(table)
    for one in explained:
        if one.trust is not None:
            print_line(console, one_line(f"{one.image.name}: {one.trust.sentence}"))
    comparison = explained[0].comparison
    print_line(console, f"pictures: {comparison.parent.parent / 'IMAGE' / comparison.name}, one folder per image")


def _summary_cells(explanation: Explanation, number: int) -> list[Any]:
    """Return name, output and bar of an explained class; a target that is not a class has its value in the name."""
    if not explanation.is_class(0, number):
        return [Text(one_line(_explained(explanation, number))), ""]
    index = explanation.class_index(0, number)
    probability = explanation.probability(index)
    bar = ProgressBar(total=1, completed=probability or 0.0, width=10)
    return [Text(one_line(_explained(explanation, number))), explanation.format_output(index), bar]


def _explained(explanation: Explanation, number: int) -> str:
    """Name a target; one that is not a class with its value."""
    if explanation.is_class(0, number):
        label = explanation.label(0, number)
        return label if explanation.class_names else f"class {label}"
    return f"{explanation.target_name(0, number)} ({explanation.format_output(explanation.class_index(0, number))})"


def _bar(prediction: Prediction) -> ProgressBar:
    return ProgressBar(total=1, completed=prediction.probability or 0.0, width=24)


def _label(explanation: Explanation, prediction: Prediction) -> Text:
    return Text(one_line(prediction.label if explanation.class_names else f"class {prediction.label}"))
