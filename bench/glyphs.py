"""Pictures of numbers in a 5 by 7 dot font: text that OCR models see as text, drawn without a font file. Seeded."""

from __future__ import annotations

import numpy as np

from bench.inputs import Array, Feed

FONT = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "11111 00010 00100 00010 00001 10001 01110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "00110 01000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00010 01100",
}
SAMPLES = 16
# input, channels, height, width, lines of text, and the values of white and black paper after normalisation
LAYOUTS: dict[str, tuple[str, int, int, int, int, float, float]] = {
    "ppocr4-det": ("x", 3, 192, 320, 3, 2.4, -2.0),
    "ppocr4-rec": ("x", 3, 48, 320, 1, 1.0, -1.0),
    "ppocr2-cls": ("x", 3, 48, 192, 1, 1.0, -1.0),
    "ddddocr": ("input1", 1, 64, 160, 1, 1.0, 0.0),
}


def line(text: str, scale: int) -> Array:
    """The text as 0 (paper) and 1 (ink), 7 * `scale` high, a column of paper after each figure."""
    rows = [[[int(dot) for dot in row] + [0] for row in FONT[figure].split()] for figure in text]
    return np.kron(np.concatenate([np.array(figure) for figure in rows], axis=1), np.ones((scale, scale), np.int64))


def page(generator: np.random.Generator, height: int, width: int, lines: int) -> Array:
    """[height, width] of 0 to 1: some lines of figures, and a little noise."""
    made = np.zeros((height, width))
    band = height // lines
    scale = max(1, band * 2 // 3 // 7)
    for index in range(lines):
        fits = max(1, (width - 8) // (6 * scale))
        text = "".join(generator.choice(list(FONT), size=int(generator.integers(max(1, fits // 2), fits + 1))))
        ink = line(text, scale)
        top = index * band + int(generator.integers(0, max(1, band - ink.shape[0])))
        left = int(generator.integers(0, max(1, width - ink.shape[1])))
        made[top : top + ink.shape[0], left : left + ink.shape[1]] = ink[:, : width - left]
    return np.clip(made + generator.normal(0, 0.03, made.shape), 0, 1)


def pages(name: str) -> list[Feed]:
    """SAMPLES requests for the OCR model `name` of LAYOUTS."""
    given, channels, height, width, lines, white, black = LAYOUTS[name]
    generator = np.random.default_rng(11)
    feeds: list[Feed] = []
    for _ in range(SAMPLES):
        ink = page(generator, height, width, lines)
        values = (white + (black - white) * ink).astype(np.float32)
        feeds.append({given: np.ascontiguousarray(np.broadcast_to(values, (1, channels, height, width)))})
    return feeds
