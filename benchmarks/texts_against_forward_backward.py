"""Time of every one-pass method on a padded batch of texts, as a ratio to a plain forward + backward of the same batch.

    python benchmarks/texts_against_forward_backward.py [--size minilm] [--lengths 64 192 320 512 ...] [--repeats 5]
        [--methods attnlrp decompx ...] [--json FILE]

The classifier has BERT's architecture in the size of MiniLM-L6 or of BERT base and random weights, which cost as much
as trained ones. The baseline runs it on the same padded batch with frozen parameters and fused attention, backward to
the embedded tokens. Each repetition runs every job once, in turn, and the median ratio counts. Processor time of one
thread is counted, since it does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import transformers
from rows import median_ratio, time_in_turn, write_rows
from torch import Tensor, nn

from vitreous.api.explain import find_recipes
from vitreous.api.run_methods import run_methods
from vitreous.errors import VitreousError
from vitreous.inputs.model_io import Texts
from vitreous.inputs.targets import find_targets
from vitreous.methods import list_methods
from vitreous.methods.spelling import cost_of

SIZES = {
    "minilm": {"num_hidden_layers": 6, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536},
    "base": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
}
PAD, CLASS, END, FIRST_WORD = range(4)
VOCABULARY = 1000


def make_model(size: str) -> nn.Module:
    """A random classifier with frozen parameters."""
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=VOCABULARY, num_labels=2, pad_token_id=PAD, **SIZES[size])
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model.eval().requires_grad_(requires_grad=False)


def make_texts(lengths: Sequence[int]) -> Texts:
    """Random texts of some lengths, special tokens included, padded to the longest."""
    places, ends = torch.arange(max(lengths)), torch.tensor(lengths)[:, None] - 1
    numbers = torch.randint(FIRST_WORD, VOCABULARY, (len(lengths), len(places)))
    numbers[:, 0] = CLASS
    numbers[places == ends] = END
    numbers[places > ends] = PAD
    parts = {"input_ids": numbers, "attention_mask": (places <= ends).long()}
    return Texts(parts, torch.tensor(lengths), (places > 0) & (places < ends), {"pad": PAD})


def one_pass_methods() -> list[str]:
    """Every method that needs no more than one run of the model and one backward pass."""
    costs = {info.name: cost_of(info.name) for info in list_methods()}
    return [name for name, cost in costs.items() if cost.one_run and len(cost.passes) <= 1]


def jobs(model: nn.Module, texts: Texts, methods: Sequence[str]) -> Mapping[str, Callable[[], object]]:
    """What is measured, by name; the baseline first."""
    embeddings: nn.Module = model.get_submodule("bert.embeddings")

    def forward_backward() -> None:
        def leaf(_module: nn.Module, _inputs: object, tokens: Tensor) -> Tensor:
            return tokens.detach().requires_grad_()

        with embeddings.register_forward_hook(leaf):
            logits = model(**texts.parts).logits
        logits.gather(1, logits.argmax(1, keepdim=True)).sum().backward()

    def explain(spelling: str) -> Callable[[], object]:
        return lambda: run_methods(
            model, texts, find_recipes(spelling), lambda logits: find_targets(logits, None, None)
        )

    return {"forward+backward": forward_backward, **{method: explain(method) for method in methods}}


def serving(model: nn.Module, methods: Sequence[str]) -> dict[str, str | None]:
    """Why a method does not serve this model, seen on a short text; ``None`` where it does."""
    refusals: dict[str, str | None] = {}
    for method, job in list(jobs(model, make_texts([8, 5]), methods).items())[1:]:
        try:
            job()
            refusals[method] = None
        except VitreousError as error:
            refusals[method] = str(error).partition(". Methods")[0]  # what works instead is not the question here
    return refusals


def measure(model: nn.Module, methods: Sequence[str], lengths: Sequence[int], repeats: int) -> dict[str, float]:
    """The ratio of every method on one padded batch."""
    seconds = time_in_turn(jobs(model, make_texts(lengths), methods), repeats)
    baseline = seconds["forward+backward"]
    return {method: median_ratio(seconds[method], baseline) for method in methods}


def described(lengths: Sequence[int]) -> str:
    """A batch in words."""
    shortest, longest = min(lengths), max(lengths)
    return f"{len(lengths)} texts of {shortest}" + ("" if shortest == longest else f" to {longest}") + " tokens"


def main() -> None:
    """Print the ratio of every method, largest first, and what was refused."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="minilm")
    parser.add_argument(
        "--lengths", type=int, nargs="+", action="append", metavar="TOKENS", help="of each text; again: another batch"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", nargs="+", help="spellings instead of all one-pass methods")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(given.size)
    refusals = serving(model, given.methods or one_pass_methods())
    methods = [method for method, refusal in refusals.items() if refusal is None]
    batches = given.lengths or [[64] * 8, [64, 192, 320, 512]]
    ratios = {described(lengths): measure(model, methods, lengths, given.repeats) for lengths in batches}
    methods.sort(key=lambda method: -max(found[method] for found in ratios.values()))
    rows = [{"method": method, **{batch: found[method] for batch, found in ratios.items()}} for method in methods]
    for row in rows:
        print(f"{row['method']:24s}", *(f"{row[batch]:6.2f} x ({batch})" for batch in ratios))
    for method, refusal in refusals.items():
        if refusal is not None:
            print(f"{method:24s} refused: {refusal}")
    write_rows(given.json, rows, size=given.size, lengths=batches, repeats=given.repeats)


if __name__ == "__main__":
    main()
