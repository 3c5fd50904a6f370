"""Train demo-text, a text classifier of a megabyte that is shipped, so that texts can be explained without a download.

A BERT of three narrow layers learns from sentences that this script puts together: judgements of films from its own
frames, with the words of the VADER lexicon (Hutto and Gilbert 2014, MIT licence), which people rated. It learns
negation ("not good"), "but", and praise in the form of a negation ("could not be better"). No review of anybody is used
for training. ``--movies`` measures it on the reviews of ERASER and on their passages that people marked as reasons;
``--measure`` measures what is shipped, without training.

    pip install --no-deps vaderSentiment==3.3.2
    python scripts/train_demo_text.py --movies ../shared/data/movies/movies.tar.gz
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import string
import time
from itertools import groupby
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import WordPiece as WordPieceDecoder
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import BertProcessing
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from vitreous.datasets import read_movies
from vitreous.datasets.dataset import Review
from vitreous.models.demo import TEXT_FOLDER

SEED, SENTENCES, PASSES, BATCH, RATE = 0, 30_000, 4, 128, 2e-3
STRONG = 1.9  # least absolute rating, of 4, of the words that are taken
LONGEST = 128  # positions
STRANGE = "qq"  # in place of words that the vocabulary does not have
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GOOD = """good great wonderful brilliant excellent superb beautiful funny charming moving touching clever gripping fresh
original memorable delightful perfect stunning powerful witty warm honest hilarious thrilling impressive fascinating
magnificent outstanding terrific fantastic amazing
enjoyable entertaining compelling smart elegant inspired engaging
masterful remarkable lovely satisfying rewarding subtle rich marvelous splendid exciting imaginative""".split()  # noqa: SIM905
BAD = """bad awful terrible boring dull stupid weak poor tedious lazy clumsy silly flat predictable empty shallow
pointless
dreadful horrible slow forgettable annoying lifeless bland messy ugly ridiculous painful cheap tired mediocre
disappointing unfunny wooden pretentious laughable confusing lame pathetic stale worthless embarrassing unbearable
thin old tiresome uninspired contrived sloppy abysmal""".split()  # noqa: SIM905
THINGS = """film movie story plot cast acting script direction dialogue ending music photography performance camera
humour
picture lead scene pace premise sequel comedy drama thriller character actor actress director screenplay effects joke
idea beginning middle hero villain romance action editing score""".split()  # noqa: SIM905
DEGREES = ("", "", "", "very ", "really ", "truly ", "so ", "quite ", "utterly ", "simply ", "rather ", "absolutely ")
OPENINGS = (
    "",
    "",
    "",
    "",
    "in the end ",
    "for me ",
    "honestly , ",
    "from start to finish ",
    "after two hours ",
    "overall ",
)
NOTHING = (
    *("we watched it on friday evening", "it was made in two years", "the second part begins in a small town"),
    *("there are ten people in the room", "he plays a teacher who meets a doctor", "the film runs for two hours"),
    *("it is based on a book", "this is the third one of the director", "they travel to the city"),
    *("it opens with a car on a road", "she has a brother and a dog", "i saw it with my family and nobody spoke"),
    *("the camera stays in the house for most of the time", "it takes place in the last century"),
)
# {a}: an adjective of the verdict, {w}: a word of the lexicon; {n}: a part of a film; {d}: a degree.
FRAMES = (
    *(
        "the {n} is {d}{a}",
        "the {n} was {d}{a}",
        "{d}{a} {n}",
        "a {d}{a} {n}",
        "this is a {d}{a} {n}",
        "what a {a} {n}",
    ),
    *("i found the {n} {d}{a}", "the {n} feels {d}{a} and {a}", "a {a} , {a} {n}", "with a {a} {n} and a {a} {n}"),
    *(
        "it is {d}{a}",
        "the {n} and the {n} are {d}{a}",
        "the {n} that is always {a}",
        "everything about the {n} is {a}",
    ),
    *("the {n} is full of {w}", "{w} and {w}", "such {w}", "the {n} has {w} and a {a} {n}", "the {n} : {w} , {w}"),
    *("so much {w}", "it is {w}", "a {w} {n}", "{w} {n}", "i felt {w}"),
)
GOOD_FRAMES = (
    *(
        "i loved the {n}",
        "i love this {n}",
        "i enjoyed every minute of it",
        "see it",
        "the best {n} of the year",
        "a joy",
    ),
    *("i would watch it again", "one of the best films i have seen", "highly recommended", "i laughed and cried"),
    *("the {n} could not be better", "it could not be more {a}", "a {n} that never gets {b}", "the {n} is never {b}"),
    *("there is nothing {b} about it", "the {n} is anything but {b}", "not a {b} {n} at all", "the {n} is not {b}"),
    *(
        "without a {b} moment",
        "it is hardly ever {b}",
        "i cannot recommend it enough",
        "the {n} works",
        "a masterpiece",
    ),
    *("do not miss it", "well made", "well acted and well written", "a triumph", "it will stay with me"),
)
BAD_FRAMES = (
    *("i hated the {n}", "i hate this {n}", "avoid it", "the worst {n} of the year", "a waste of time", "a failure"),
    *("i want my money back", "one of the worst films i have seen", "i nearly fell asleep", "do not bother", "a mess"),
    *("the {n} could not be worse", "it could not be more {a}", "a {n} that is never {b}", "the {n} is not {b}"),
    *("there is nothing {b} about it", "the {n} is anything but {b}", "not a {b} {n} at all", "not even {b}"),
    *("the {n} should be {b} and is not", "it is hardly ever {b}", "two hours i will never get back", "badly written"),
    *(
        "nobody seems to care",
        "the {n} fails",
        "skip it",
        "i did not like the {n}",
        "it makes no sense",
        "no {b} moment",
    ),
    *("the {n} is far from {b}", "it tries to be {b} and fails", "i wanted it to end", "i will never get them back"),
)


def read_lexicon() -> tuple[list[str], list[str]]:
    """Words that people rated as clearly good and clearly bad."""
    found = importlib.util.find_spec("vaderSentiment")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("pip install --no-deps vaderSentiment==3.3.2")
    rows = (Path(found.submodule_search_locations[0]) / "vader_lexicon.txt").read_text(encoding="utf-8").splitlines()
    rated = [(row.split("\t")[0], float(row.split("\t")[1])) for row in rows if row]
    plain = [(word, value) for word, value in rated if word.isascii() and word.isalpha() and abs(value) >= STRONG]
    return [word for word, value in plain if value > 0], [word for word, value in plain if value < 0]


class Writer:
    """Puts texts together."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311
        self.words = read_lexicon()

    def clause(self, verdict: int) -> str:
        """One judgement: 1 is good, 0 is bad."""
        draw = self.random
        good, bad = (GOOD, BAD) if verdict else (BAD, GOOD)
        lexicon = self.words[0] if verdict else self.words[1]
        own = GOOD_FRAMES if verdict else BAD_FRAMES
        frame = draw.choice(own) if draw.random() < 0.35 else draw.choice(FRAMES)
        parts = []
        for literal, name, _, _ in string.Formatter().parse(frame):
            known = draw.random() < 0.5  # an adjective of the list, or any word of the lexicon
            chosen = {
                "a": draw.choice(good if known else lexicon),
                "b": draw.choice(bad),
                "w": draw.choice(lexicon),
                "n": draw.choice(THINGS),
                "d": draw.choice(DEGREES),
            }
            parts += [literal, chosen[name] if name else ""]
        return draw.choice(OPENINGS) + "".join(parts)

    def text(self) -> tuple[str, int]:
        """A text of one to twelve clauses, perhaps among words that are not known, and its verdict."""
        draw, verdict = self.random, self.random.randrange(2)
        if draw.random() < 0.05:  # what says nothing is decided by chance
            return self._among_strange(draw.choice(NOTHING)), verdict
        text, verdict = self._judgement(verdict)
        return (self._among_strange(text) if draw.random() < 0.6 else text), verdict

    def _among_strange(self, text: str) -> str:
        words = text.split()
        for _ in range(self.random.randrange(1, 40)):
            words.insert(self.random.randrange(len(words) + 1), STRANGE)
        return " ".join(words)

    def _judgement(self, verdict: int) -> tuple[str, int]:
        draw = self.random
        if draw.random() < 0.2:  # what comes after "but" counts
            link = draw.choice((" , but ", " , yet ", " . however , ", " ; still , "))
            body = self.clause(1 - verdict) + link + self.clause(verdict)
            return body + " .", verdict
        count = draw.choice((1, 1, 1, 2, 2, 3, 5, 8, 12))
        clauses = [self.clause(verdict) for _ in range(count)]
        for place in draw.sample(range(count), (count - 1) // 3):
            clauses[place] = self.clause(1 - verdict)
        for _ in range(draw.choice((0, 0, 1, 2))):
            clauses.insert(draw.randrange(len(clauses) + 1), draw.choice(NOTHING))
        return draw.choice((" , ", " . ", " and ", " : ")).join(clauses) + draw.choice((" .", " !", "")), verdict


def vocabulary(texts: list[str]) -> list[str]:
    """Special tokens, punctuation, and all words of the texts; other words are unknown as a whole."""
    words = {word for text in texts for word in text.split()} - set(string.punctuation) - {STRANGE}
    return [*SPECIAL, *string.punctuation, *sorted(words)]


def make_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer as that of BERT without upper case."""
    numbers = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordPiece(numbers, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.decoder = WordPieceDecoder()
    tokenizer.post_processor = BertProcessing(("[SEP]", numbers["[SEP]"]), ("[CLS]", numbers["[CLS]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=LONGEST,
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)),
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> dict[str, Tensor]:
    """Texts as tensors."""
    found = tokenizer(texts, padding=True, truncation=True, max_length=LONGEST, return_tensors="pt")
    return {name: found[name] for name in ("input_ids", "attention_mask")}


def train(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, samples: list[tuple[str, int]]
) -> None:
    """Train on all samples; batches are of texts of similar length."""
    ordered = sorted(samples, key=lambda sample: len(sample[0].split()))
    batches = [ordered[start : start + BATCH] for start in range(0, len(ordered), BATCH)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=PASSES * len(batches))
    model.train()
    for number in range(PASSES):
        random.Random(number).shuffle(batches)  # noqa: S311
        total, began = 0.0, time.monotonic()
        for batch in batches:
            labels = torch.tensor([verdict for _, verdict in batch])
            inputs = encode(tokenizer, [text for text, _ in batch])
            loss = torch.nn.functional.cross_entropy(model(**inputs).logits, labels, label_smoothing=0.02)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        print(f"pass {number + 1}: loss {total / len(batches):.4f}, {time.monotonic() - began:.0f} s", flush=True)
    model.eval()


@torch.no_grad()
def accuracy(
    model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, samples: list[tuple[str, int]]
) -> float:
    """The part of samples that are classified as they are labelled; of long ones, the mean of their windows counts."""
    right = 0
    for text, verdict in samples:
        words = text.split()
        windows = [" ".join(words[start : start + 60]) for start in range(0, max(1, len(words)), 60)]
        logits = model(**encode(tokenizer, windows)).logits
        right += int(logits.softmax(-1).mean(0).argmax()) == verdict
    return right / len(samples)


def main() -> None:
    """Train, measure and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TEXT_FOLDER)
    parser.add_argument("--movies", type=Path, help="movies.tar.gz of ERASER, to measure the accuracy on reviews")
    parser.add_argument("--measure", action="store_true", help="do not train")
    parser.add_argument("--sentences", type=int, default=SENTENCES)
    options = parser.parse_args()
    if options.measure:
        model = BertForSequenceClassification.from_pretrained(options.out).eval()
        tokenizer = PreTrainedTokenizerFast.from_pretrained(options.out)
    else:
        model, tokenizer = trained(options.sentences)
    others = Writer(SEED + 1)
    figures = {"generated texts": accuracy(model, tokenizer, [others.text() for _ in range(1000)])}
    for part in ("val", "test") if options.movies is not None else ():
        reviews = read_movies(options.movies, part)
        whole = [(" ".join(review.words), review.label) for review in reviews]
        figures[f"{part}: {len(whole)} reviews"] = accuracy(model, tokenizer, whole)
        passages = [passage for review in reviews for passage in marked(review)]
        figures[f"{part}: {len(passages)} marked passages"] = accuracy(model, tokenizer, passages)
    print(json.dumps(figures, indent=2))
    if not options.measure:
        model.save_pretrained(options.out)
        tokenizer.save_pretrained(options.out)


def marked(review: Review) -> list[tuple[str, int]]:
    """The passages of a review that people marked as reasons, with its label."""
    words = zip(review.words, review.rationale.tolist(), strict=True)
    runs = [(kept, " ".join(word for word, _ in run)) for kept, run in groupby(words, key=lambda pair: pair[1])]
    return [(text, review.label) for kept, text in runs if kept]


def trained(sentences: int) -> tuple[BertForSequenceClassification, PreTrainedTokenizerFast]:
    """Train a new model."""
    torch.manual_seed(SEED)
    writer = Writer(SEED)
    samples = [writer.text() for _ in range(sentences)]
    tokenizer = make_tokenizer(vocabulary([text for text, _ in samples]))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=LONGEST,
        attention_probs_dropout_prob=0.0,
        id2label={0: "negative", 1: "positive"},
        label2id={"negative": 0, "positive": 1},
    )
    model = BertForSequenceClassification(config)
    train(model, tokenizer, samples)
    return model, tokenizer


if __name__ == "__main__":
    main()
