"""DecompX as a forward decomposition, (tokens x tokens x channels) through every block, beside the one backward pass.

    python benchmarks/forward_decomposition.py [--cases vit_tiny_patch16_224:224:16 ...] [--whole 200] [--repeats 5]
        [--json FILE]

A forward decomposition writes every token as a sum of vectors, one for each start token, and carries all of them
through the blocks; attention matrices, deviations of norms and gates of activations are those of the real run, biases
are left out. One such run gives the scores of one start layer; DecompX-SkipPLUS sums those of all start layers of the
upper half, so it needs a run from each of them: 6 + 5 + ... + 1 blocks of 12. ``vitreous`` has the same numbers from
one backward pass.

First the maps are compared, where the whole decomposition is computed, then processor time of one thread is. Start
tokens do not mix, so for more than ``--whole`` tokens, where that would take hours and tens of gigabytes, some start
tokens are carried through one block and the time is multiplied; ``measured`` says so.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F  # noqa: N812
from rows import seconds, time_in_turn, write_rows
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import vitreous

NUMBERS_AT_ONCE = 1 << 27  # of the largest tensor, the hidden layer of the feed-forward part: 0.5 GB in float32

CASES = [
    f"{name}:{size}:{patch}"
    for name in ("vit_tiny_patch16_224", "vit_base_patch16_224")
    for patch in (16, 8)
    for size in (224, 384)
]


@dataclass
class BlockRun:
    """What the real run leaves of one block for one image.

    Attributes:
        block: the block itself.
        tokens: x_l, (tokens, channels).
        matrices: A of all heads, (head, tokens, tokens).
        first_deviation: of the first norm, (tokens, 1).
        second_deviation: of the second norm, (tokens, 1).
        gate: gelu(u)/u, (tokens, hidden).
    """

    block: nn.Module
    tokens: Tensor
    matrices: Tensor
    first_deviation: Tensor
    second_deviation: Tensor
    gate: Tensor


@dataclass
class Run:
    """The real run of a timm ViT with a class token on one image; ``deviation`` is the last norm's."""

    model: VisionTransformer
    blocks: list[BlockRun]
    deviation: Tensor


@torch.no_grad()
def real_run(model: VisionTransformer, image: Tensor) -> Run:
    """Run a model on one image (1, 3, height, width) and keep what the decomposition holds constant."""
    stream = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(image))))[0]  # noqa: SLF001
    blocks = []
    for block in model.blocks:
        tokens, attention = stream, block.attn
        normed = block.norm1(tokens)
        query, key, value = (
            part.unflatten(-1, (attention.num_heads, -1)).transpose(0, 1)
            for part in F.linear(normed, attention.qkv.weight, attention.qkv.bias).chunk(3, dim=-1)
        )
        matrices = ((query * attention.scale) @ key.transpose(-2, -1)).softmax(dim=-1)
        stream = tokens + block.ls1(attention.proj((matrices @ value).transpose(0, 1).flatten(1)))
        hidden = block.mlp.fc1(block.norm2(stream))
        gate = torch.where(hidden == 0, 0.5, block.mlp.act(hidden) / hidden)
        deviations = _deviation(block.norm1, tokens), _deviation(block.norm2, stream)
        blocks.append(BlockRun(block, tokens, matrices, *deviations, gate))
        stream = stream + block.ls2(block.mlp.fc2(block.mlp.act(hidden)))
    return Run(model, blocks, _deviation(model.norm, stream))


def _deviation(norm: nn.LayerNorm, tokens: Tensor) -> Tensor:
    return (tokens.var(dim=-1, unbiased=False, keepdim=True) + norm.eps).sqrt()


@torch.no_grad()
def decomposed(run: Run, start: int, target: int) -> Tensor:
    """What each token of x_start contributes to a logit, (tokens,): DecompX without bias from one start layer."""
    count = len(run.blocks[start].tokens)
    at_once = max(1, min(count, NUMBERS_AT_ONCE // (count * run.blocks[start].gate.shape[1])))
    scores = [
        _of_some(run, start, target, range(first, min(first + at_once, count))) for first in range(0, count, at_once)
    ]
    return torch.cat(scores)


def _of_some(run: Run, start: int, target: int, origins: range) -> Tensor:
    """The same for some of the start tokens, which do not mix."""
    parts = start_parts(run.blocks[start].tokens, origins)
    for block in run.blocks[start:]:
        parts = through_block(block, parts)
    last = _normalised(run.model.norm, run.deviation, parts)[0]
    return last @ run.model.head.weight[target]


def start_parts(tokens: Tensor, origins: range) -> Tensor:
    """Every token is made of itself alone: (tokens, start tokens, channels)."""
    parts = tokens.new_zeros(len(tokens), len(origins), tokens.shape[1])
    for number, origin in enumerate(origins):
        parts[origin, number] = tokens[origin]
    return parts


@torch.no_grad()
def through_block(run: BlockRun, parts: Tensor) -> Tensor:
    """Carry (tokens, start tokens, channels) through one block."""
    block = run.block
    parts = parts + block.ls1(_attended(run, _normalised(block.norm1, run.first_deviation, parts)))
    hidden = F.linear(_normalised(block.norm2, run.second_deviation, parts), block.mlp.fc1.weight)
    return parts + block.ls2(F.linear(hidden.mul_(run.gate[:, None]), block.mlp.fc2.weight))


def _normalised(norm: nn.LayerNorm, deviation: Tensor, parts: Tensor) -> Tensor:
    """Each part loses its own mean and is divided by the real token's deviation."""
    centred = parts - parts.mean(dim=-1, keepdim=True)
    return centred.mul_(norm.weight).div_(deviation[:, None])


def _attended(run: BlockRun, parts: Tensor) -> Tensor:
    """Values of every part, mixed by the real attention matrices, through the output projection."""
    attention = run.block.attn
    count, origins, width = parts.shape
    values = F.linear(parts, attention.qkv.weight[2 * width :])
    by_head = values.view(count, origins, attention.num_heads, -1).permute(2, 0, 1, 3).flatten(2)
    mixed = torch.bmm(run.matrices, by_head)  # (head, tokens, start tokens x channels of a head)
    joined = mixed.unflatten(2, (origins, -1)).permute(1, 2, 0, 3).reshape(count, origins, width)
    return F.linear(joined, attention.proj.weight)


def upper_half(depth: int) -> range:
    """The start layers of SkipPLUS."""
    return range(math.ceil(depth / 2), depth)


def forward_scores(run: Run, starts: Sequence[int], target: int) -> Tensor:
    """Scores of the patches summed over start layers."""
    scores = torch.stack([decomposed(run, start, target) for start in starts]).sum(dim=0)
    return scores[run.model.num_prefix_tokens :]


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a part of the largest score."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def share_of_block(run: Run, seconds_wanted: float) -> tuple[float, int]:
    """Seconds that one block would take for all start tokens, and how many start tokens that was measured with."""
    block, count = run.blocks[-1], len(run.blocks[-1].tokens)
    origins = max(1, min(8, count))
    while True:
        parts = start_parts(block.tokens, range(origins))
        took = seconds(lambda parts=parts: through_block(block, parts))
        fits = 2 * origins * count * block.gate.shape[1] <= NUMBERS_AT_ONCE
        if took >= seconds_wanted or origins >= count or not fits:
            return took * count / origins, origins
        origins = min(2 * origins, count)


def measure(name: str, size: int, patch: int, whole: int, repeats: int) -> list[dict[str, Any]]:
    """Rows of one model: DecompX from the first block, and DecompX-SkipPLUS."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=size, patch_size=patch).eval().requires_grad_(requires_grad=False)
    image = torch.randn(1, 3, size, size)
    run = real_run(model, image)
    depth, count = len(run.blocks), len(run.blocks[0].tokens)
    of_block, origins = (0.0, count) if count <= whole else share_of_block(run, 1.0)
    rows = []
    for spelling, starts in (("decompx", [0]), ("decompx.skipplus", upper_half(depth))):
        blocks = sum(depth - start for start in starts)
        explain = lambda spelling=spelling: vitreous.explain(model, image, spelling, 0)  # noqa: E731
        ours = statistics.median(time_in_turn({spelling: explain}, repeats)[spelling])
        row = {"model": name, "size": size, "patch": patch, "tokens": count, "method": spelling, "blocks": blocks}
        if count <= whole:
            scores: list[Tensor] = []
            theirs = seconds(lambda starts=starts, scores=scores: scores.append(forward_scores(run, starts, 0)))
            found = difference(explain().scores[spelling][0], scores[0])
            assert found < 1e-3, f"{spelling} and the forward decomposition differ by {found:.1e} of the largest score"
            row |= {"measured": "all blocks, all start tokens", "difference": found}
        else:
            theirs = of_block * blocks
            row["measured"] = f"one block with {origins} of {count} start tokens, times {count / origins:g}, "
            row["measured"] += f"times {blocks}"
        row |= {"forward_decomposition_seconds": theirs, "seconds": ours, "ratio": theirs / ours}
        row["tensor_bytes"] = count**2 * model.embed_dim * 4
        rows.append(row)
        agreement = f"difference {row['difference']:.1e}" if "difference" in row else "not compared"
        print(
            f"{name}, {size} px, patches of {patch}: {spelling:18} {theirs / ours:8.0f} x  "
            f"({theirs:.1f} s against {ours:.3f} s; {row['measured']}; {agreement})",
            flush=True,
        )
    return rows


def main() -> None:
    """Print and write one row per model, picture size, patch size and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=CASES, help="model:pixels:patch")
    parser.add_argument("--whole", type=int, default=200, help="more tokens than this are measured in part")
    parser.add_argument("--repeats", type=int, default=5, help="of ours")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for case in given.cases:
        name, size, patch = case.split(":")
        rows += measure(name, int(size), int(patch), given.whole, given.repeats)
        write_rows(given.json, rows, batch=1)  # after each, for the large ones take long


if __name__ == "__main__":
    main()
