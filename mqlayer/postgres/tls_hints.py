"""Advice for TLS errors of Postgres' client library."""

from __future__ import annotations

from typing import Final

_SERVERS: Final = (
    "sslrootcert= of the DSN has to name the authority that signed the server's certificate, and that certificate may "
    "not have expired: openssl s_client -starttls postgres -CAfile FILE -connect HOST:PORT says which it is"
)
_OWN: Final = "renew the certificate of sslcert=, and let the server's ssl_ca_file have its authority"
TLS_HINTS: Final = (
    ("certificate verify failed", _SERVERS),
    ("does not match host name", "let the DSN name a host that its certificate has"),
    ("root certificate file", "let sslrootcert= of the DSN name the authority's certificate"),
    ("could not read root certificate", "let sslrootcert= of the DSN name the authority's certificate"),
    ("does not support SSL", "set ssl = on at the server"),
    ("requires a valid client certificate", "set sslcert= and sslkey= in the DSN"),
    ("certificate required", "set sslcert= and sslkey= in the DSN"),
    ("certificate authentication failed", "the user's name has to be the certificate's CN, or pg_ident.conf maps it"),
    ("alert unknown ca", _OWN),
    ("certificate expired", _OWN),
    ("alert bad certificate", _OWN),
    ("no encryption", "let the DSN have sslmode=verify-full and sslrootcert="),
)


def tls_hint(text: str) -> str:
    """Return the first advice that fits an error's whole text, or nothing."""
    return next((f": {hint}" for part, hint in TLS_HINTS if part in text), "")
