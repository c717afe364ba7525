"""How the bytes of a checkpoint are hashed, block by block, and with which key. Imports no torch.

xxh3 finds damage: a flipped bit, a lost block. It is no use against somebody who changes bytes on
purpose, since anybody can compute it anew. BLAKE2b can be compared with a value noted elsewhere.
With a key, only who has the key can write what is accepted.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import xxhash

from paceline.credentials import named_key
from paceline.errors import CheckpointDamaged, ConfigError, KeyNeeded
from paceline.formatting import one_of

Name = Literal["xxh3", "blake2b"]
NAMES: tuple[Name, ...] = ("xxh3", "blake2b")
LEAST_KEY = 16
"""Bytes of a key: fewer could be tried one after the other."""

BLOCK = 4 * 1024 * 1024
"""Files are hashed in blocks of this many bytes, so that a part of one can be checked alone."""
_WORTH_A_THREAD = 512 * 1024

_XXH3, _BLAKE2B, _KEYED = "xxh3_128", "blake2b", "blake2b_keyed"
_BYTES = 32


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Digest:
    """A way to hash, under the ``name`` that manifests know it by; with a ``key``, a keyed one."""

    name: str = _XXH3
    key: bytes = field(default=b"", repr=False)

    def new(self) -> _Hash:
        """A hash that takes bytes piece by piece."""
        if self.name == _XXH3:
            return xxhash.xxh3_128()
        return hashlib.blake2b(key=self.key, digest_size=_BYTES)

    def of(self, data: memoryview | bytes | bytearray) -> str:
        """The hash of all of ``data``, in hexadecimal."""
        if self.name == _XXH3:
            return xxhash.xxh3_128_hexdigest(data)
        return hashlib.blake2b(data, key=self.key, digest_size=_BYTES).hexdigest()

    def of_manifest(self, body: bytes) -> str:
        """The hash of a manifest: another one than that of a block of the same bytes."""
        if self.name == _XXH3:
            return xxhash.xxh3_128_hexdigest(body)
        person = b"manifest"
        return hashlib.blake2b(body, key=self.key, digest_size=_BYTES, person=person).hexdigest()

    def named(self, name: str) -> Digest:
        """What this reader checks a file with that was hashed by the digest of that name."""
        return self if self.key else Digest(name)

    @property
    def key_id(self) -> str:
        """Tells keys apart without giving one away; empty where there is no key."""
        if not self.key:
            return ""
        return hashlib.blake2b(b"key id", key=self.key, digest_size=8).hexdigest()

    def head(self, body: bytes) -> dict[str, str]:
        """What the first line of a manifest says of the rest of it."""
        said = {self.name: self.of_manifest(body)}
        return {**said, "key": self.key_id} if self.key else said

    def to_read(self, head: Any, where: str) -> Digest:
        """The way in which the file with this ``head`` was hashed, for a reader with this one.

        A reader with a key takes nothing but what was hashed with that key: an attacker would
        otherwise leave the key out. A reader without one takes what needs none.
        """
        named = [name for name in (_XXH3, _BLAKE2B, _KEYED) if name in head]
        if len(named) != 1 or not isinstance(head[named[0]], str):
            raise CheckpointDamaged(
                f"{where} is damaged: it does not begin like a manifest of Paceline's."
            )
        if named[0] != _KEYED:
            if self.key:
                raise CheckpointDamaged(
                    f"{where} was written without a key, and a key is required: anybody could "
                    "have written it. Where you trust it, read it without the key."
                )
            return Digest(named[0])
        if not self.key:
            raise KeyNeeded(
                f"{where} was written with a key, and cannot be checked without it. Give the key: "
                "checkpoint.digest_key in a config, --key on a command line, key= in Python."
            )
        if head.get("key") != self.key_id:
            raise CheckpointDamaged(
                f"{where} was written with another key: expected {self.key_id}, found "
                f"{head.get('key')!r}."
            )
        return self

    def check(self, head: Any, body: bytes, where: str) -> None:
        """Raise where ``body`` is not what the ``head`` of its manifest was made for."""
        expected, found = head[self.name], self.of_manifest(body)
        if not hmac.compare_digest(expected.encode(), found.encode()):
            raise CheckpointDamaged(f"{where} is damaged: expected hash {expected}, found {found}.")


XXH3 = Digest()


@dataclass(frozen=True)
class FileEntry:
    """A file beside the manifest: its size, and the hash of each block in hexadecimal."""

    size: int
    hashes: tuple[str, ...]
    block: int = BLOCK


class BlockHasher:
    """Takes the bytes of a file in order, in pieces of any size; knows its size and its hashes."""

    def __init__(self, block: int = BLOCK, digest: Digest = XXH3) -> None:
        if block < 1:
            raise ValueError(f"a block of {block} bytes: it takes at least 1.")
        self.block = block
        self.size = 0
        self._hashes: list[str] = []
        self._digest = digest
        self._current = digest.new()

    def update(self, data: memoryview | bytes | bytearray) -> None:
        """Take the next bytes of the file."""
        view = memoryview(data).cast("B")
        while len(view):
            piece = view[: self.block - self.size % self.block]
            self._current.update(piece)  # other threads run meanwhile
            self.size += len(piece)
            view = view[len(piece) :]
            if self.size % self.block == 0:
                self._hashes.append(self._current.hexdigest())
                self._current = self._digest.new()

    def digests(self) -> FileEntry:
        """The entry of the file in the manifest, for the bytes taken so far."""
        rest = [self._current.hexdigest()] if self.size % self.block else []
        return FileEntry(self.size, (*self._hashes, *rest), self.block)


def hashed(chunks: Iterable[memoryview], hasher: BlockHasher) -> Iterator[memoryview]:
    """Pass ``chunks`` on, a block at most at a time, while ``hasher`` takes them.

    A large piece is hashed in a second thread at the same time as whoever asked for it writes it;
    the next is passed on only when that is done, so a chunk's memory may be used anew by then.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="paceline-hash") as pool:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for start in range(0, len(view), hasher.block):
                piece = view[start : start + hasher.block]
                if len(piece) < _WORTH_A_THREAD:
                    hasher.update(piece)
                    yield piece
                    continue
                try:
                    done = pool.submit(hasher.update, piece)
                except RuntimeError:  # Python shuts down and begins nothing new
                    hasher.update(piece)
                    yield piece
                else:
                    yield piece
                    done.result()


def hash_blocks(
    data: memoryview | bytes | bytearray, block: int = BLOCK, digest: Digest = XXH3
) -> tuple[str, ...]:
    """The hash of each block of ``data``, which begins where a block begins."""
    view = memoryview(data).cast("B")
    return tuple(digest.of(view[at : at + block]) for at in range(0, len(view), block))


def make_digest(name: str = "xxh3", key: str | None = None) -> Digest:
    """The way to hash that a config or a caller asks for; ``key`` as ``read_key`` takes it."""
    if name not in NAMES:
        raise ConfigError(f"checkpoint digest {name!r} must be {one_of(NAMES)}.")
    if key is None:
        return Digest(_BLAKE2B if name == "blake2b" else _XXH3)
    if name != "blake2b":
        raise ConfigError(
            f"checkpoint digest {name} takes no key: a key needs digest blake2b, or no key."
        )
    return Digest(_KEYED, read_key(key))


def with_key(key: str | None) -> Digest:
    """For a reader: nothing is required without a ``key``, with one nothing but it is taken."""
    return XXH3 if key is None else make_digest("blake2b", key)


def read_key(reference: str) -> bytes:
    """The key that ``env:NAME`` or ``file:PATH`` refers to, as hashes take it."""
    secret = named_key(reference).reveal().encode()
    if len(secret) < LEAST_KEY:
        raise ConfigError(
            f"{reference} holds {len(secret)} bytes; a key takes at least {LEAST_KEY}. Make one: "
            "head -c 32 /dev/urandom | base64"
        )
    # Of any length, made into one that BLAKE2b takes.
    return hashlib.blake2b(secret, person=b"paceline-digest").digest()
