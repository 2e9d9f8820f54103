"""Ed25519 signatures of certificates, by key files in PEM. No key and no path of one is logged or stored."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mqlayer.errors import InvalidInput

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ALGORITHM: Final = "ed25519"
MAKE: Final = "openssl genpkey -algorithm ed25519 -out key.pem makes one"


def sign(payload: bytes, key_file: Path) -> dict[str, str]:
    """Return a signature with its public key. Raises InvalidInput for no such key file, or without the package."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = _private_key(key_file)
    public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return {"algorithm": ALGORITHM, "public_key": _text(public), "value": _text(key.sign(payload))}


def check_signature(payload: bytes, signature: Mapping[str, str], public_key: Path | None) -> str | None:
    """Return why a signature does not hold, or None. `public_key`: the signer's; without it, the one named counts.

    Raises InvalidInput for no such key file, or without the package.
    """
    _check_package()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    wanted = None if public_key is None else _public_key(public_key)
    try:
        if signature["algorithm"] != ALGORITHM:
            return f"its algorithm is not {ALGORITHM}"
        named = base64.b64decode(signature["public_key"], validate=True)
        value = base64.b64decode(signature["value"], validate=True)
        if wanted is not None and wanted.public_bytes(Encoding.Raw, PublicFormat.Raw) != named:
            return f"another key signed it: {key_name(signature)}"
        Ed25519PublicKey.from_public_bytes(named).verify(value, payload)
    except InvalidSignature:
        return "the signature is of another content: the certificate was altered"
    except (KeyError, TypeError, ValueError, binascii.Error):
        return "the signature can't be read"
    return None


def key_name(signature: Mapping[str, str]) -> str:
    """Return a public key's fingerprint."""
    try:
        return f"SHA256:{sha256(base64.b64decode(signature['public_key'])).hexdigest()[:32]}"
    except (KeyError, TypeError, ValueError):
        return "a key that can't be read"


def _private_key(path: Path) -> Ed25519PrivateKey:
    _check_package()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        found = load_pem_private_key(_read(path), None)
    except TypeError:
        raise InvalidInput("the key file has a passphrase: give one without, from your secret store") from None
    except ValueError:
        raise InvalidInput(f"the key file is no private key in PEM: {MAKE}") from None
    if not isinstance(found, Ed25519PrivateKey):
        raise InvalidInput(f"the key is not of Ed25519: {MAKE}")
    return found


def _public_key(path: Path) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    hint = "openssl pkey -in key.pem -pubout -out public.pem writes one"
    try:
        found = load_pem_public_key(_read(path))
    except ValueError:
        raise InvalidInput(f"the file is no public key in PEM: {hint}") from None
    if not isinstance(found, Ed25519PublicKey):
        raise InvalidInput(f"the public key is not of Ed25519: {hint}")
    return found


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"can't read the key file: {error.strerror}") from None


def _check_package() -> None:
    try:
        import cryptography  # noqa: F401 - whether it is there
    except ImportError:
        raise InvalidInput("signatures need another package: pip install 'mqlayer[certificates]'") from None


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
