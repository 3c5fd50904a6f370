"""Write docs/metrics.md, all metrics with their direction and range, from their data and docstrings.

python scripts/write_metrics_page.py [--check]
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from generated import first_paragraph, metric_rows, write_or_check

from vitreous import metrics

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
INTRODUCTION = """# Metrics

Written by `scripts/write_metrics_page.py` from the metrics' data and docstrings; do not edit.

A metric is a pure function in `vitreous.metrics` from arrays to numbers in float64, independent of the method. Arrays
may be numpy arrays, torch tensors or lists. A mask is 0 for background, 1 and above for objects and -1 for ignored
pixels. Invalid inputs (shapes that do not match, NaN) raise a `MetricError`; undefined values (a mask without an
object) are NaN.

```python
import numpy as np

from vitreous import metrics

maps, masks = np.random.rand(8, 224, 224), np.random.randint(-1, 2, (8, 224, 224))
metrics.two_class_average_precision(maps[0], masks[0])  # of one map
metrics.aopc(original=[0.9], perturbed=[[0.7, 0.4, 0.2]])  # p0 of one image, pk at three steps
```

A number over a data set is a `Metric`: it has a direction and a range, and combines the means of the values stored for
every image, so that pixel accuracy and IoU count the pixels of the whole data set.

```python
counts = metrics.count_pixels(metrics.above_mean(maps), masks)  # (images, 4)
miou = metrics.list_metrics()["mIoU"]
miou.direction, miou.range  # ("higher", (0.0, 1.0))
float(miou.combine(counts.mean(axis=0)))
```
"""


def page() -> str:
    """The whole page."""
    public = [getattr(metrics, name) for name in metrics.__all__]
    helpers = (metrics.list_metrics, metrics.prefixed, metrics.row)  # about metrics, and none themselves
    functions = [each for each in public if inspect.isfunction(each) and each not in helpers]
    return "\n".join(
        [
            INTRODUCTION,
            "## Functions on arrays\n",
            "| function | what it does |",
            "| --- | --- |",
            *(f"| `{each.__name__}({_arguments(each)})` | {_about(each)} |" for each in functions),
            "",
            "## Numbers over a data set\n",
            "As `list_metrics()` has them; [protocols](protocols.md) say which they use.\n",
            *metric_rows(metrics.list_metrics().values()),
            "",
        ]
    )


def _arguments(function: Callable[..., Any]) -> str:
    return ", ".join(inspect.signature(function).parameters)


def _about(function: Callable[..., Any]) -> str:
    return first_paragraph(function).replace("``", "`").replace("|", r"\|")


def main() -> None:
    """Write the page, or with --check fail if it is not what the metrics say."""
    write_or_check(PAGE, page(), "write_metrics_page")


if __name__ == "__main__":
    main()
