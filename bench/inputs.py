"""Requests as they would really come, by model name: tokenised sentences, pictures, sound, table rows. Seeded.

Each is a list of named arrays; the tokenizers package is used when it is there, else ids are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Feed = dict[str, Any]
Answer = Mapping[str, Any]

SENTENCES = (
    "The cat sits on the windowsill and watches the rain.",
    "A server that answers while one of its workers dies must keep the listening sockets somewhere else.",
    "Interest rates rose by a quarter of a percentage point on Thursday, the third rise since the spring.",
    "Warum ist der Himmel blau?",
)
STATES = {"stateN": "state", "hn": "h", "cn": "c"}  # outputs that are the next request's inputs


def _noise(seed: int, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0) -> Array:
    drawn: Array = np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)
    return drawn


def tokens(model: Path, sentences: tuple[str, ...]) -> Feed:
    """A padded batch of sentences for the encoder at `model`, whose tokenizer lies beside it."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        ids = np.random.default_rng(len(sentences)).integers(1000, 30000, (len(sentences), 24))
        mask = np.ones_like(ids)
    else:
        tokenizer = Tokenizer.from_file(str(model.with_suffix(".tokenizer.json")))
        tokenizer.enable_padding()
        encoded = tokenizer.encode_batch(list(sentences))
        ids = np.array([row.ids for row in encoded], np.int64)
        mask = np.array([row.attention_mask for row in encoded], np.int64)
    return encoder_feed(model, ids, mask)


def encoder_feed(model: Path, ids: Array, mask: Array) -> Feed:
    feed = {"input_ids": ids, "attention_mask": mask}
    return feed if model.stem.startswith("mpnet") else {**feed, "token_type_ids": np.zeros_like(ids)}


def sequence(model: Path, length: int) -> Feed:
    """One row of `length` tokens for an encoder."""
    ids = np.random.default_rng(length).integers(1000, 30000, (1, length))
    return encoder_feed(model, ids, np.ones_like(ids))


def _encoder(model: Path) -> list[Feed]:
    return [tokens(model, SENTENCES[:1]), tokens(model, SENTENCES)]


def _silero(model: Path) -> list[Feed]:
    sound = _noise(5, (4, 512), -0.4, 0.4)
    state, rate = np.zeros((2, 1, 128), np.float32), np.array(16000, np.int64)
    return [{"input": sound[i : i + 1], "state": state, "sr": rate} for i in range(len(sound))]


def _silero_seq(model: Path) -> list[Feed]:
    zero = np.zeros((1, 1, 128), np.float32)
    return [{"input": _noise(seed, (count, 576), -0.4, 0.4), "h": zero, "c": zero} for seed, count in ((6, 1), (7, 9))]


def _table(model: Path) -> list[Feed]:
    from bench import tabular

    rows = tabular.table(model.stem)[0]
    return [{"X": rows[:1]}, {"X": rows[::40]}]


def _pictures(
    name: str, *shapes: tuple[int, ...], low: float = -1.0, high: float = 1.0
) -> Callable[[Path], list[Feed]]:
    return lambda model: [{name: _noise(i, shape, low, high)} for i, shape in enumerate(shapes)]


FEEDS: dict[str, Callable[[Path], list[Feed]]] = {
    "minilm": _encoder,
    "mpnet": _encoder,
    "bert-base-random": _encoder,
    "nsfw-resnet": _pictures("input_0", (1, 224, 224, 3), (2, 224, 224, 3), low=-120.0, high=150.0),
    "ppocr4-det": _pictures("x", (1, 3, 96, 160), (1, 3, 160, 320)),
    "ppocr4-rec": _pictures("x", (1, 3, 48, 160), (2, 3, 48, 320)),
    "ppocr2-cls": _pictures("x", (1, 3, 48, 192), (3, 3, 48, 192)),
    "ddddocr": _pictures("input1", (1, 1, 64, 128), (1, 1, 64, 201)),
    "ddddocr-old-int8": _pictures("input1", (1, 1, 64, 128), (1, 1, 64, 201)),
    "ddddocr-det": _pictures("images", (1, 3, 416, 416), low=0.0, high=255.0),
    "silero": _silero,
    "silero-op15": _silero,
    "silero-seq": _silero_seq,
    "basic-pitch": _pictures("serving_default_input_2:0", (1, 43844, 1)),
    "sklearn-digits": _table,
    "sklearn-wine": _table,
    "sklearn-breast-cancer": _table,
    "digits": _pictures("image", (1, 64), (16, 64), low=0.0, high=16.0),
}


def chained(feeds: list[Feed], run: Callable[[Feed], Answer]) -> Iterator[tuple[Feed, Answer]]:
    """Each request with its answer; the state that one gives goes into the next where a model has one."""
    carried: Feed = {}
    for feed in feeds:
        given = {**feed, **carried}
        answer = run(given)
        carried = {STATES[name]: np.asarray(value) for name, value in answer.items() if name in STATES}
        yield given, answer
