"""Refused logins, rights and certificates, with advice."""

from __future__ import annotations

from typing import Final

import redis

from mqlayer.errors import AccessDenied, InvalidInput, StoreUnavailable

IN_SCRIPTS: Final = ("The user executing the script can't", "ACL failure in script")
"""Denials inside scripts have no error code."""
CERTIFICATE_HINT: Final = "set MQLAYER_REDIS_CERT_FILE and MQLAYER_REDIS_KEY_FILE, if it asks for a certificate"
STRICT_HINT: Final = (
    "from Python 3.13 on, an authority's certificate needs keyUsage (keyCertSign) and critical basicConstraints, and "
    "one that it signed authorityKeyIdentifier: make them anew"
)
OWN_HINT: Final = (
    "renew the certificate of MQLAYER_REDIS_CERT_FILE, and let the server's tls-ca-cert-file have its authority"
)
HOST_HINT: Final = "let the node's URL, or a cluster's cluster-announce-hostname, name a host that its certificate has"
TLS_HINTS: Final = (
    ("key usage extension", STRICT_HINT),
    ("Key Identifier", STRICT_HINT),
    ("Basic Constraints", STRICT_HINT),
    ("unable to get local issuer", "set MQLAYER_REDIS_CA_FILE to the authority that signed its certificate"),
    ("self-signed", "set MQLAYER_REDIS_CA_FILE to the authority that signed its certificate"),
    ("self signed", "set MQLAYER_REDIS_CA_FILE to the authority that signed its certificate"),
    ("doesn't match", HOST_HINT),
    ("mismatch", HOST_HINT),
    ("certificate has expired", "renew the server's certificate, or correct this machine's clock"),
    ("not yet valid", "correct this machine's clock, or the server's certificate"),
    ("certificate required", "set MQLAYER_REDIS_CERT_FILE and MQLAYER_REDIS_KEY_FILE"),
    ("ALERT_UNKNOWN_CA", OWN_HINT),
    ("ALERT_CERTIFICATE_EXPIRED", OWN_HINT),
    ("ALERT_BAD_CERTIFICATE", OWN_HINT),
    ("handshake failure", CERTIFICATE_HINT),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS on this port: let the node's URL be redis://"),
)
CUT: Final = ("EOF occurred in violation", "closed by server", "reset by peer", "Broken pipe", "Error while reading")
"""Disconnects before the server's TLS alert was read."""
LOGIN_HINT: Final = "set MQLAYER_REDIS_USER and MQLAYER_REDIS_PASSWORD_FILE"
RIGHTS_HINT: Final = "`mqlayer node acl ROLE` (a Redis Cluster: with `--cluster`) prints what its user needs"


def is_denial(reply: object) -> bool:
    """Whether a reply or error is a denial, also from within a script."""
    if isinstance(reply, redis.exceptions.NoPermissionError):
        return True
    return isinstance(reply, redis.ResponseError) and any(text in str(reply) for text in IN_SCRIPTS)


def not_reached(address: str, error: Exception, *, anonymous: bool = False) -> StoreUnavailable:
    """Return a failed connection's error, with the setting that helps.

    `anonymous`: at connect, without a client certificate.
    """
    if isinstance(error, InvalidInput):
        return AccessDenied(address, str(error))
    reason = str(error) or type(error).__name__
    if is_denial(error):
        return AccessDenied(address, f"{reason}: {RIGHTS_HINT}")
    if isinstance(error, redis.AuthenticationError):
        return AccessDenied(address, f"{reason}: {LOGIN_HINT}")
    if hint := next((hint for text, hint in TLS_HINTS if "SSL" in reason.upper() and text in reason), ""):
        return AccessDenied(address, f"{reason}: {hint}")
    if anonymous and any(text in reason for text in CUT):
        # Not AccessDenied: a server that just stopped looks the same.
        return StoreUnavailable(address, f"{reason}: {CERTIFICATE_HINT}")
    if address.startswith(("rediss:", "sentinels:")) and any(text in reason for text in CUT):
        return StoreUnavailable(address, f"{reason}: if it refuses this process's certificate, {OWN_HINT}")
    return StoreUnavailable(address, reason)
