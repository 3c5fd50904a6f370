"""A class of a model as JSON, the same for photos and texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitreous.predicted import Predicted


def class_as_json(explanation: Predicted, class_index: int, index: int = 0) -> dict[str, Any]:
    """Give its number and name, and how likely the model finds it; where its outputs are values, the value."""
    said: dict[str, Any] = {"probability": explanation.probability(class_index, index)}
    if said["probability"] is None:
        said["value"] = float(explanation.logits[index, class_index])
    name = explanation.class_names[class_index] if explanation.class_names else None
    return {"index": class_index, "name": name, **said}
