"""Make files of tokens from a folder of text: `python prepare.py FOLDER`.

Without a folder it takes the source of Python's own standard library, so that nothing has to be
downloaded. Bytes are the tokens here; with a tokenizer only `encode` and the numbers change.
"""

import argparse
import sysconfig
from pathlib import Path

import numpy as np

END = 0  # ends a document; no text has this byte


def encode(text: str) -> list[int]:
    return [byte for byte in text.encode() if byte != END]


def write(file: str, documents: list[Path]) -> None:
    tokens: list[int] = []
    for document in documents:
        tokens += encode(document.read_text(encoding="utf-8", errors="replace"))
        tokens.append(END)
    # uint16 has room for a vocabulary of 65,536. The file is mapped into memory when it is
    # trained on, so it may be larger than that.
    np.save(file, np.array(tokens, dtype=np.uint16))
    print(f"{file}: {len(documents)} documents, {len(tokens):,} tokens")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--pattern", default="*.txt", help="the files to take from the folder")
    parser.add_argument("--most", type=int, default=100, help="documents to take")
    options = parser.parse_args()
    if options.folder is None:
        documents = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    else:
        documents = sorted(options.folder.rglob(options.pattern))
    documents = documents[: options.most]
    if len(documents) < 2:
        parser.error(f"{len(documents)} documents of {options.pattern} in {options.folder}: need 2")
    # Every twentieth document is for validation, whole: no part of it is trained on.
    write("val.npy", documents[::20])
    write("train.npy", [d for i, d in enumerate(documents) if i % 20])


if __name__ == "__main__":
    main()
