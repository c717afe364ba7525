"""What looks like a credential: by the name of its key, or by the form of its text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

MASK = "***"

_SECRET = {
    *("secret", "secrets", "password", "passwords", "passwd", "passphrase", "passcode", "pwd"),
    *("cookie", "credential", "credentials", "authorization", "signature", "apikey", "secretkey"),
}
_KINDS_OF_KEY = {
    *("access", "account", "api", "auth", "customer", "digest", "encryption", "hmac", "master"),
    *("private", "service", "shared", "signing", "ssh", "storage"),
    *("anthropic", "aws", "hf", "openai", "wandb"),
}
_KINDS_OF_TOKEN = {
    *("access", "api", "auth", "bearer", "delegation", "github", "hf", "hub", "id", "refresh"),
    *("sas", "security", "service", "session"),
}
_ABOUT_IT = {"file", "filename", "path", "name", "type", "url", "provider", "expiry"}
"""``password_file`` is not a password."""
_SIGNED = {"sig", "awsaccesskeyid", "googleaccessid", "code", "jwt"}
"""Parameters of signed URLs whose names do not say it otherwise."""
_NOT_SECRET = {"", "anon", "anonymous", "google_default", "cache", "cloud", "browser"}
"""What gcsfs takes for ``token`` instead of one."""

_FORMS = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\b(?:gh[pousr]_|github_pat_|glpat-|hf_|xox[abprs]-|dapi)[A-Za-z0-9_-]{16,}"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bAIza[0-9A-Za-z_-]{35}"
    r"|\beyJ[\w-]{8,512}\.[\w-]{8,}\.[\w-]*"
    r"|\b(?<=Bearer )[\w.~+/=-]{8,}|\b(?<=Basic )[A-Za-z0-9+/=]{8,}"
    r"|(?<=AccountKey=)[^;\s]+|(?<=SharedAccessKey=)[^;\s]+",
    re.DOTALL,
)
# A colon that no port follows: keys of some stores hold slashes, so the host is what follows "@".
# All repeats are bounded: text that others wrote must not take the square of its length.
_PASSWORD = re.compile(
    r"(?<=://)([^\s:/@\[]{0,256}:)(?!\d{1,5}(?:[/?#]|\Z))([^\s/'\"]{1,256}|[^\s@'\"]{1,256})@"
)
_TOKEN_AS_USER = re.compile(r"(?<=://)[^\s:/@'\"\[]{20,256}@")
_QUERY = re.compile(r"(?<=[?&;])([A-Za-z0-9_.-]+)=([^&;\s'\"#]+)")
_REFERENCE = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*|file:(?:/(?!/)|~).+", re.DOTALL)
_IN_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def is_reference(value: Any) -> bool:
    """Whether ``value`` is text of the form ``env:NAME`` or ``file:/path``."""
    return isinstance(value, str) and _REFERENCE.fullmatch(value) is not None


def says_secret(name: str, *, bare_key: bool = False) -> bool:
    """Whether a key of this name holds a credential.

    ``bare_key``: ``key`` by itself does, too, as in the options of a store; elsewhere it may be the
    key of anything.
    """
    words = [word.lower() for word in _IN_WORDS.findall(name)]
    if not words or words[-1] in _ABOUT_IT:
        return False
    if _SECRET & {*words} or words[-2:] == ["connection", "string"] or words[-1] == "sas":
        return True
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return not before or before in _KINDS_OF_TOKEN
    if last == "key":
        return before in _KINDS_OF_KEY or (bare_key and not before)
    return words[-3:] == ["access", "key", "id"] or (bare_key and last == "auth")


def looks_secret(text: str) -> bool:
    """Whether text is a credential, or a URL with one in it, by its form."""
    return masked(text) != text


def masked(text: str) -> str:
    """``text`` with passwords and signatures in URLs, and keys of well-known forms, as ``***``."""
    text = _FORMS.sub(MASK, text)
    text = _PASSWORD.sub(rf"\1{MASK}@", text)
    text = _TOKEN_AS_USER.sub(f"{MASK}@", text)
    return _QUERY.sub(_masked_parameter, text)


def _masked_parameter(match: re.Match[str]) -> str:
    name = match[1]
    is_secret = says_secret(name, bare_key=True) or name.lower() in _SIGNED
    return f"{name}={MASK}" if is_secret or name.lower() == "x-amz-credential" else match[0]


def shown(value: Any, name: str = "", *, bare_key: bool = False, inside: bool = False) -> Any:
    """``value`` as it may be shown: what is a credential by its name or its form is masked.

    References (``env:NAME``, ``file:/path``) are no credentials.
    """
    bare_key = bare_key or name == "storage"
    inside = inside or says_secret(name, bare_key=bare_key)
    if isinstance(value, Mapping):
        return {
            key: shown(item, str(key), bare_key=bare_key, inside=inside)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [shown(item, name, bare_key=bare_key, inside=inside) for item in value]
    if inside and not _is_harmless(value):
        return MASK
    return masked(value) if isinstance(value, str) else value


def literals(
    value: Any, path: tuple[str, ...] = (), *, bare_key: bool = False, inside: bool = False
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """What in ``value`` is a credential itself instead of a reference to one, with its place."""
    inside = inside or says_secret(path[-1] if path else "", bare_key=bare_key)
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from literals(item, (*path, str(key)), bare_key=bare_key, inside=inside)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from literals(item, path, bare_key=bare_key, inside=inside)
    elif (inside and not _is_harmless(value)) or (isinstance(value, str) and looks_secret(value)):
        yield path, value


def _is_harmless(value: Any) -> bool:
    if value is None or isinstance(value, bool) or is_reference(value):
        return True
    # Where a store takes the path of a file with credentials, the path is none.
    return value in _NOT_SECRET or (
        isinstance(value, str) and os.path.isabs(value) and os.path.exists(value)
    )
