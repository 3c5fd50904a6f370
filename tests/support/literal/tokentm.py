"""TokenTM (Wu et al., CVPR 2024), equations 8 to 20, with transformed tokens and update matrices written out."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from literal.forward import Run, attention_gradients, mean, positive, scaled


def tokentm(
    model: VisionTransformer,
    record: Run,
    target: int,
    *,
    gradient: str = "probability",
    components: str = "af_l_necc",
    necc: str = "paper",
    depth: int | None = None,
) -> Tensor:
    """C = U_L ... U_1 C_0, the class token's row, patches."""
    objective = record.logits[target]
    if gradient == "probability":
        powers = torch.exp(record.logits)
        objective = powers[target] / powers.sum()
    grads = attention_gradients(record, objective)
    tokens = len(record.tokens[0])
    identity = torch.eye(tokens, dtype=torch.float64)
    if components == "baseline":  # eq. 8 on the input tokens
        pairs = zip(grads[0], record.attention[0], strict=True)
        return mean([positive(slope) * matrix for slope, matrix in pairs])[0, record.prefix :]
    with_length = components in {"af_l", "af_l_necc"}
    contribution = torch.diag(record.tokens[0].norm(dim=1)) if with_length else identity  # eq. 14
    for block in range(record.depth if depth is None else depth):
        parts = []
        for head, transformed in enumerate(transformed_tokens(model, record, block)):
            weight = weights(record.tokens[block], transformed, components, necc)
            parts.append(positive(grads[block][head]) * (record.attention[block][head] @ weight))
        contribution = (identity + mean(parts)) @ contribution
        weight = weights(record.middle[block], record.feed_forward[block], components, necc)
        contribution = (identity + weight) @ contribution
    return contribution[0, record.prefix :]


def transformed_tokens(model: VisionTransformer, record: Run, block: int) -> list[Tensor]:
    """Ẽ_h = v_h W_O^h, (n, d) per head; LayerScale is part of the way back to the stream, the output bias is not."""
    module = model.blocks[block]
    result = []
    for head, value in enumerate(record.value[block]):
        width = value.shape[1]
        projection = module.attn.proj.weight[:, head * width : (head + 1) * width]
        result.append(scaled(module.ls1, value @ projection.T))
    return result


def weights(original: Tensor, transformed: Tensor, components: str, necc: str) -> Tensor:
    """W = diag(||Ẽ_j|| / ||E_j|| * NECC(j)), (n, n)."""
    tokens = len(original)
    if components == "af":
        return torch.eye(tokens, dtype=torch.float64)
    entries = []
    cosines = [(original[j] @ transformed[j]) / (original[j].norm() * transformed[j].norm()) for j in range(tokens)]
    powers = torch.exp(torch.stack(cosines))
    for j in range(tokens):
        entry = transformed[j].norm() / original[j].norm()
        if components == "af_l_necc":
            entry = entry * powers[j] / powers.sum() * (tokens if necc == "rescaled" else 1)
        entries.append(entry)
    return torch.diag(torch.stack(entries))
