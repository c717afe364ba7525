"""The secret that the machines of one run share, and the keys derived from it.

Whoever has the secret may take part in the run, nobody else. It comes from a file or a variable, is
never shown, and goes into no store: only keys that are derived from it are used, for the tunnels
between the machines (``tunnel.py``).
"""

from __future__ import annotations

import os
import secrets
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from paceline.config.endpoints import Endpoint
from paceline.credentials import Secret
from paceline.errors import ConfigError
from paceline.launch.environment import SECRET, SECRET_FILE
from paceline.launch.listening import is_loopback

_LEAST_CHARACTERS = 32
_MAKE = "Make one with: paceline secret FILE"


@dataclass(frozen=True)
class RunSecret:
    """A secret, and where it was found; what is shown of it is where."""

    value: bytes = field(repr=False)
    source: str

    def __str__(self) -> str:
        return self.source

    def __reduce__(self) -> str:
        raise TypeError("a secret is not sent anywhere")


def make_secret(path: str | os.PathLike[str]) -> None:
    """Write a new secret of 32 random bytes into a new file that only its owner can read."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
    except FileExistsError:
        raise ConfigError(
            f"{str(path)!r} is there already, and a secret never replaces what is there. Name a "
            "new file."
        ) from None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}.") from error


def find_secret(named: Secret | None, environ: Mapping[str, str] | None = None) -> RunSecret | None:
    """The secret of a run: the one that the config names, else the environment's, else none.

    The environment's are ``PACELINE_SECRET_FILE`` and ``PACELINE_SECRET``. Raises ConfigError for
    a file that others can read, for one that is not there, and for a secret that could be guessed.
    """
    env = os.environ if environ is None else environ
    if named is None and env.get(SECRET_FILE):
        named = Secret(f"file:{os.path.abspath(os.path.expanduser(env[SECRET_FILE]))}")
    if named is None and env.get(SECRET):
        return _checked(env[SECRET], f"env:{SECRET}")
    return None if named is None else _checked(named.reveal(), str(named))


def open_to_strangers(places: Sequence[Endpoint], secret: RunSecret | None) -> str | None:
    """What is open, and how to close it, where machines meet without a secret; else ``None``."""
    if secret is not None or all(is_loopback(place.host) for place in places):
        return None
    where = ", ".join(map(str, places))
    return (
        f"these machines meet at {where} without a secret: whoever reaches that port, or the ports "
        "they open to each other, can read along, take part in the run or end it. To close it: "
        "paceline secret FILE, copy FILE to every machine, and give each --secret-file FILE"
    )


def _checked(text: str, source: str) -> RunSecret:
    value = text.strip().encode()
    # Anyone who connects sees a certificate derived from it, and could test guesses offline.
    if len(value) < _LEAST_CHARACTERS or len(set(value)) < _LEAST_CHARACTERS // 4:
        raise ConfigError(
            f"{source}: has {len(value)} characters, of which {len(set(value))} differ; one of "
            f"less than {_LEAST_CHARACTERS}, or of few different ones, could be guessed. {_MAKE}"
        )
    return RunSecret(value, source)


# The keys derived from it.


@dataclass(frozen=True)
class Keys:
    """TLS for both ends of a tunnel: each shows the one certificate, and takes no other.

    The certificate is the identity of the run, the same on all machines; names and addresses of
    machines play no part in it.
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes = field(repr=False)

    def is_ours(self, connection: ssl.SSLObject | ssl.SSLSocket | None) -> bool:
        """Whether the other end of a connection has shown the certificate of this run."""
        shown = None if connection is None else connection.getpeercert(binary_form=True)
        return shown is not None and secrets.compare_digest(shown, self.certificate)


def keys_of(secret: RunSecret) -> Keys:
    """The keys that every machine derives from the secret: the same, without asking anybody."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(_derive(secret, "tunnel: Ed25519 key, version 1"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a run of paceline")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        # Fixed, and long: the clocks of machines need not agree, and all must make the same one.
        .not_valid_before(datetime(2000, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(2999, 1, 1, tzinfo=UTC))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    shown = certificate.public_bytes(serialization.Encoding.DER)
    chain = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.num_tickets = 0  # every connection proves anew who it is
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False  # the certificate is that of the run, whatever the machine
    for context in (server, client):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=shown)
        _load(context, chain)
    return Keys(server, client, shown)


def store_key(secret: RunSecret) -> bytes:
    """What the two halves of a tunnel on one machine know each other by (see ``tunnel.py``)."""
    return _derive(secret, "loopback: TCP MD5 key, version 1")


def _derive(secret: RunSecret, purpose: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, salt=b"paceline", info=purpose.encode()).derive(secret.value)


def _load(context: ssl.SSLContext, chain: bytes) -> None:
    """Python's ssl takes a key from a file alone: one in memory, where the system has such."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline-key")
        try:
            os.write(descriptor, chain)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:  # its owner's alone
        path = Path(folder) / "key.pem"
        path.write_bytes(chain)
        context.load_cert_chain(path)
